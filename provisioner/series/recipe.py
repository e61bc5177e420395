"""A recipe's series from the patch store, for one version of the distribution."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from packaging.version import Version

from provisioner.documents.recipe import PatchPolicy, Recipe
from provisioner.errors import InvalidRecipeError, UsageError
from provisioner.patching.series import touched_paths
from provisioner.resources import patches_folder
from provisioner.series.model import NamedPatch, Series
from provisioner.series.store import PatchVariant, StoredPatch, load_series_patch, open_stored_patch


def open_series(recipe: Recipe, version: Version, folder: Path | None = None) -> Series:
    """The recipe's patches, each in the variant for ``version``, from the store in ``folder`` (default: the tool's).

    Raises InvalidRecipeError for an unknown patch; InvalidPatchError for a store that is not what it must be.
    """
    return OpenStore(folder or patches_folder()).series_of(recipe, version)


class OpenStore:
    """A store of which every patch and every text is read once, for who asks for many versions.

    Equal questions get the same objects.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._patches: dict[str, StoredPatch] = {}
        self._texts: dict[tuple[str, int], NamedPatch] = {}

    def series_of(self, recipe: Recipe, version: Version) -> Series:
        """As :func:`open_series`."""
        named = []
        for use in recipe.patches:
            stored = self._named_by(recipe, use.id)
            named.append(replace(self.text(stored, nearest_variant(stored, version)), policy=use.policy))
        return Series(
            patches=tuple(item for item in named if item.policy is not PatchPolicy.NOT_NEEDED),
            unwanted=tuple(item for item in named if item.policy is PatchPolicy.NOT_NEEDED),
        )

    def _named_by(self, recipe: Recipe, patch_id: str) -> StoredPatch:
        try:
            return self.patch(patch_id)
        except UsageError as error:  # named in the recipe's file, not on the command line
            raise InvalidRecipeError(error.what, where=f"{recipe.where}: patches", hints=error.hints) from error

    def patch(self, patch_id: str) -> StoredPatch:
        """As :func:`open_stored_patch`."""
        if patch_id not in self._patches:
            self._patches[patch_id] = open_stored_patch(self._folder, patch_id)
        return self._patches[patch_id]

    def text(self, patch: StoredPatch, variant: PatchVariant) -> NamedPatch:
        """As :func:`read_variant`."""
        key = (patch.id, patch.variants.index(variant))
        if key not in self._texts:
            self._texts[key] = read_variant(patch, variant)
        return self._texts[key]


def read_variant(patch: StoredPatch, variant: PatchVariant) -> NamedPatch:
    """A variant as a patch of a series. Raises as :func:`load_series_patch`."""
    text = None if patch.root else patch.file_of(variant).read_bytes()
    return NamedPatch(patch=load_series_patch(patch, variant), text=text, upstream=patch.upstream)


def touched_by(recipe: Recipe, version: Version) -> Iterable[str]:
    """The paths that the recipe's series touches in ``version``."""
    return touched_paths(open_series(recipe, version).texts)


def nearest_variant(patch: StoredPatch, version: Version) -> PatchVariant:
    """The variant whose range holds ``version``; else the one cut nearest to it, for its contents to be judged."""
    covering = patch.variant_for(version)
    if covering is not None:
        return covering
    return min(patch.variants, key=lambda variant: _distance(variant.cut_against, version))


def _distance(one: Version, other: Version) -> tuple[int, ...]:
    return tuple(abs(a - b) for a, b in zip(_place_of(one), _place_of(other), strict=True))


def _place_of(version: Version) -> tuple[int, int, int]:
    """Where a build stands among the releases: main is on its way to the next minor series, whatever it is called."""
    if version.is_devrelease:
        return version.major, version.minor + 1, 0
    return version.major, version.minor, version.micro
