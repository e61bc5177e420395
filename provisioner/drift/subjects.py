"""What is judged: recipes' series from the store, or patches from files and folders."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import InvalidVersion, Version

from provisioner.documents.recipe import Recipe
from provisioner.drift.scan import Subject
from provisioner.errors import UsageError
from provisioner.index.lazy import Wheel
from provisioner.nearest import near_names
from provisioner.pipeline.evaluate import cut_against
from provisioner.resources import patches_folder, stored_patch_names
from provisioner.series.checkout import Checkout
from provisioner.series.fork import with_fork
from provisioner.series.model import NamedPatch, Series
from provisioner.series.recipe import OpenStore


@dataclass(frozen=True, kw_only=True)
class ForkBase:
    """A recipe's fork as checked out, and the wheel that its patches were cut against."""

    checkout: Checkout
    wheel: Wheel


def recipe_subjects(
    recipes: Iterable[Recipe], frozen: Mapping[str, Version], forks: Mapping[str, ForkBase] | None = None
) -> tuple[Subject, ...]:
    """The recipes' series, with the fork's part for those whose name is in ``forks``; a frozen patch keeps, on every
    build, the text that it has for one version."""
    store = OpenStore(patches_folder())
    return tuple(_recipe_subject(recipe, store, frozen, (forks or {}).get(recipe.name)) for recipe in recipes)


def _recipe_subject(recipe: Recipe, store: OpenStore, frozen: Mapping[str, Version], fork: ForkBase | None) -> Subject:
    learnt: dict[str, NamedPatch] = {}

    def series_for(version: Version) -> Series:
        own = _freeze(store.series_of(recipe, version), store, frozen)
        if fork is None:
            return own
        whole = with_fork(own, recipe, fork.checkout)
        theirs = whole.patches[: len(whole.patches) - len(own.patches)]
        if not learnt:
            learnt.update((item.id, item) for item in cut_against(Series(patches=theirs), fork.wheel).patches)
        return replace(whole, patches=(*(learnt[item.id] for item in theirs), *own.patches))

    return Subject(name=recipe.name, series_for=series_for, responses=recipe.drift)


def stack_subject(patches: Sequence[Path], *, root: str, strip: int | None, base: Wheel | None) -> Subject:
    """Patches from files and folders as one required series, called by the first one's name.

    A folder of the store's form gives, on every build, its variant for that version. ``base`` is the wheel that loose
    patches were cut against, from which the scopes of their hunks are learnt.
    """
    from provisioner.series.files import Reading
    from provisioner.series.sources import Wanted, has_variants, read_series

    wanted = Wanted(names=tuple(map(str, patches)), reading=Reading(strip=strip, root=root))

    def read(version: Version) -> Series:
        named = read_series(wanted, version)
        return named if base is None else cut_against(named, base)

    if any(map(has_variants, wanted.names)):
        return Subject(name=patches[0].stem, series_for=functools.cache(read), responses={})
    series = read(Version("0"))
    return Subject(name=patches[0].stem, series_for=lambda _: series, responses={})


def parse_frozen(texts: Sequence[str]) -> dict[str, Version]:
    """``ID@VERSION`` texts.

    Raises UsageError for one that is not.
    """
    frozen = {}
    for text in texts:
        patch_id, at, version = text.rpartition("@")
        if not at or not patch_id:
            raise UsageError("not a variant", where=text, expected="ID@VERSION, such as sm80-cpu-repack@0.29.0")
        try:
            frozen[patch_id] = Version(version)
        except InvalidVersion:
            raise UsageError(f"{version!r} is not a version", where=f"--variant {text}") from None
        if patch_id not in stored_patch_names():
            hints = (*near_names(patch_id, stored_patch_names()), "provision patches")
            raise UsageError(f"no patch is called {patch_id!r}", where=f"--variant {text}", hints=hints)
    return frozen


def _freeze(series: Series, store: OpenStore, frozen: Mapping[str, Version]) -> Series:
    if not frozen:
        return series
    return replace(
        series,
        patches=tuple(_frozen_text(patch, store, frozen) for patch in series.patches),
        unwanted=tuple(_frozen_text(patch, store, frozen) for patch in series.unwanted),
    )


def _frozen_text(patch: NamedPatch, store: OpenStore, frozen: Mapping[str, Version]) -> NamedPatch:
    version = frozen.get(patch.id)
    if version is None:
        return patch
    stored = store.patch(patch.id)
    variant = stored.variant_for(version)
    if variant is None:
        raise UsageError(f"the patch has no text for {version}", where=patch.id)
    return replace(store.text(stored, variant), policy=patch.policy)
