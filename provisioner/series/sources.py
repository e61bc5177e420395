"""What a user names as patches (recipes, ids of the store, files, folders, overlays), found and read."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from provisioner.documents.policy import PatchPolicy
from provisioner.errors import UsageError
from provisioner.patching.diff import print_patch
from provisioner.patching.model import SeriesPatch
from provisioner.records import dataclass
from provisioner.resources import is_stored_patch, patches_folder, recipe_names, stored_patch_names
from provisioner.series.files import SUFFIXES, Reading, name_apart, read_overlay, read_patch_file, read_stack

if TYPE_CHECKING:
    from provisioner.documents.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class PatchSource:
    """A patch and what is asked of it. ``text`` is its text where that needs no root or strip level to be read.

    ``upstream`` is the address of the same change at the distribution's own makers, where it is known.
    """

    series: SeriesPatch
    policy: PatchPolicy = PatchPolicy.REQUIRED
    text: bytes | None = field(default=None, repr=False)
    upstream: str | None = None

    @property
    def id(self) -> str:
        """The patch's name in its series."""
        return self.series.patch.id

    @property
    def kept(self) -> bytes:
        """What is kept with an environment in which the patch is applied."""
        return print_patch(self.series.patch) if self.text is None else self.text


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the user named: names, how paths in loose files are meant, and folders of new files, which come last."""

    names: tuple[str, ...]
    reading: Reading = field(default_factory=Reading)
    overlays: tuple[Path, ...] = ()


def read_sources(
    wanted: Wanted, version: Version, recipes: "Mapping[str, Recipe] | None" = None
) -> tuple[PatchSource, ...]:
    """The series that was named, in order: of each name its patches, then the overlays.

    A recipe or an id goes before a file of the same name. ``recipes`` has those of the names that mean one. Each
    patch of the store is taken in the variant for ``version``. Raises UsageError for a name that is nothing,
    InvalidPatchError with file and line.
    """
    known = recipes or {}
    found: list[PatchSource] = []
    for name in wanted.names:
        recipe = known.get(name)
        found += _read_recipe(recipe, version) if recipe else _read_named(name, version, wanted.reading)
    found += [PatchSource(series=read_overlay(folder, wanted.reading)) for folder in wanted.overlays]
    if wanted.names and not found:
        raise UsageError(
            "these recipes apply no patch",
            where=", ".join(wanted.names),
            hints=tuple(f"provision patch check {use.id}" for recipe in known.values() for use in recipe.patches),
        )
    return _name_apart(_once(found))


def without_sources(sources: Sequence[PatchSource], ids: Sequence[str]) -> tuple[PatchSource, ...]:
    """The series without the patches called ``ids``.

    Raises UsageError for an id that it does not have.
    """
    known = [source.id for source in sources]
    for wrong in ids:
        if wrong not in known:
            raise UsageError(
                f"the series has no patch {wrong!r}", where="--without-patch", hints=near_names(wrong, known)
            )
    return tuple(source for source in sources if source.id not in ids)


def has_variants(name: str) -> bool:
    """Whether a name means a patch in the form of the store, whose text depends on the version."""
    return ("/" not in name and is_stored_patch(patches_folder() / name)) or is_stored_patch(Path(name))


def _read_recipe(recipe: "Recipe", version: Version) -> Iterator[PatchSource]:
    for use in recipe.patches:
        if use.policy is not PatchPolicy.NOT_NEEDED:
            yield replace(_read_stored(patches_folder() / use.id, version), policy=use.policy)


def _read_named(name: str, version: Version, reading: Reading) -> Iterator[PatchSource]:
    path = Path(name)
    if is_stored_patch(patches_folder() / name) and "/" not in name:
        yield _read_stored(patches_folder() / name, version)
    elif is_stored_patch(path):
        yield _read_stored(path, version)
    elif path.is_dir():
        yield from (PatchSource(series=item) for item in read_stack(path, reading))
    elif path.is_file() or path.suffix in SUFFIXES:
        yield PatchSource(series=SeriesPatch(patch=read_patch_file(path, reading)))
    else:
        raise UsageError(
            f"{name!r} is no recipe, no patch of the store, and no file or folder",
            hints=(
                *near_names(name, (*stored_patch_names(), *recipe_names())),
                "provision patches",
                "provision recipes",
            ),
        )


def near_names(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """A hint with the known name that is nearest to ``name``; none where none is near."""
    import difflib

    near = difflib.get_close_matches(name, tuple(known), n=1)
    return (f"did you mean {near[0]!r}?",) if near else ()


def _read_stored(folder: Path, version: Version) -> PatchSource:
    # Here, since a stack from elsewhere needs nothing of the store, and what it imports takes a while.
    from provisioner.series.recipe import nearest_variant
    from provisioner.series.store import load_series_patch, open_stored_patch

    stored = open_stored_patch(folder.parent, folder.name)
    variant = nearest_variant(stored, version)
    text = None if stored.root else stored.file_of(variant).read_bytes()
    return PatchSource(series=load_series_patch(stored, variant), text=text, upstream=stored.upstream)


def _once(sources: Iterable[PatchSource]) -> list[PatchSource]:
    """Without those that stand in the series before, by id and text: a recipe and one of its patches, say."""
    kept: dict[tuple[str, str], PatchSource] = {}
    for source in sources:
        kept.setdefault((source.id, source.series.patch.digest), source)
    return list(kept.values())


def _name_apart(sources: Sequence[PatchSource]) -> tuple[PatchSource, ...]:
    named = name_apart(source.series for source in sources)
    return tuple(replace(source, series=series) for source, series in zip(sources, named, strict=True))
