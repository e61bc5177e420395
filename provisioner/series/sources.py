"""What a user names as patches (recipes, ids of the store, files, folders, overlays), found and read."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from provisioner.errors import UsageError
from provisioner.nearest import near_names
from provisioner.patching.model import SeriesPatch
from provisioner.records import dataclass
from provisioner.resources import is_stored_patch, patches_folder, recipe_names, stored_patch_names
from provisioner.series.files import SUFFIXES, Reading, name_apart, read_overlay, read_patch_file, read_stack
from provisioner.series.model import NamedPatch, Series

if TYPE_CHECKING:
    from provisioner.documents.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the user named: names, how paths in loose files are meant, and folders of new files, which come last."""

    names: tuple[str, ...]
    reading: Reading = field(default_factory=Reading)
    overlays: tuple[Path, ...] = ()


def read_series(wanted: Wanted, version: Version, recipes: "Mapping[str, Recipe] | None" = None) -> Series:
    """The series that was named, in order: of each name its patches, then the overlays.

    A recipe or an id goes before a file of the same name. ``recipes`` has those of the names that mean one. Each
    patch of the store is taken in the variant for ``version``. Raises UsageError for a name that is nothing,
    InvalidPatchError with file and line.
    """
    known = recipes or {}
    found: list[NamedPatch] = []
    for name in wanted.names:
        recipe = known.get(name)
        found += _read_recipe(recipe, version) if recipe else _read_named(name, version, wanted.reading)
    found += [NamedPatch(patch=read_overlay(folder, wanted.reading)) for folder in wanted.overlays]
    if wanted.names and not found:
        raise UsageError(
            "these recipes apply no patch",
            where=", ".join(wanted.names),
            hints=tuple(f"provision patch check {use.id}" for recipe in known.values() for use in recipe.patches),
        )
    return Series(patches=_name_apart(_once(found)))


def has_variants(name: str) -> bool:
    """Whether a name means a patch in the form of the store, whose text depends on the version."""
    return ("/" not in name and is_stored_patch(patches_folder() / name)) or is_stored_patch(Path(name))


def _read_named(name: str, version: Version, reading: Reading) -> Iterator[NamedPatch]:
    path = Path(name)
    if is_stored_patch(patches_folder() / name) and "/" not in name:
        yield _read_stored(patches_folder() / name, version)
    elif is_stored_patch(path):
        yield _read_stored(path, version)
    elif path.is_dir():
        yield from (NamedPatch(patch=item) for item in read_stack(path, reading))
    elif path.is_file() or path.suffix in SUFFIXES:
        yield NamedPatch(patch=SeriesPatch(patch=read_patch_file(path, reading)))
    else:
        raise UsageError(
            f"{name!r} is no recipe, no patch of the store, and no file or folder",
            hints=(
                *near_names(name, (*stored_patch_names(), *recipe_names())),
                "provision patches",
                "provision recipes",
            ),
        )


# Below, what reads the store is loaded where it is used: a stack from elsewhere needs nothing of it.


def _read_recipe(recipe: "Recipe", version: Version) -> tuple[NamedPatch, ...]:
    from provisioner.series.recipe import open_series

    return open_series(recipe, version).patches


def _read_stored(folder: Path, version: Version) -> NamedPatch:
    from provisioner.series.recipe import nearest_variant, read_variant
    from provisioner.series.store import open_stored_patch

    stored = open_stored_patch(folder.parent, folder.name)
    return read_variant(stored, nearest_variant(stored, version))


def _once(named: Iterable[NamedPatch]) -> list[NamedPatch]:
    """Without those that stand in the series before, by id and text: a recipe and one of its patches, say."""
    kept: dict[tuple[str, str], NamedPatch] = {}
    for item in named:
        kept.setdefault((item.id, item.patch.patch.digest), item)
    return list(kept.values())


def _name_apart(named: Sequence[NamedPatch]) -> tuple[NamedPatch, ...]:
    patches = name_apart(item.patch for item in named)
    return tuple(replace(item, patch=patch) for item, patch in zip(named, patches, strict=True))
