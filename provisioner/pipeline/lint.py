"""Patch files looked at for themselves, and against a tree where one is named."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from provisioner.errors import InvalidPatchError, UsageError
from provisioner.patching.diff import manifest_of
from provisioner.patching.model import Create, Manifest, SeriesPatch
from provisioner.pipeline.evaluate import Tree, find_scopes, record_of
from provisioner.resources import is_stored_patch, patches_folder
from provisioner.series.files import SERIES_FILE, SUFFIXES, Reading, read_patch_file, read_stack
from provisioner.series.store import load_series_patch, read_stored_patch
from provisioner.wheels.record import Record


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One patch file: its manifest, or the error that it is refused for. ``not_shipped`` are paths that the tree does
    not have and the patch does not make (empty where no tree was named)."""

    source: str
    id: str
    manifest: Manifest | None = None
    error: InvalidPatchError | None = None
    not_shipped: tuple[str, ...] = ()


def lint(names: Iterable[str], reading: Reading, tree: Tree | None = None) -> tuple[Finding, ...]:
    """A finding for every patch in the files and folders named, refused ones included.

    Raises UsageError for a name that is no file and no folder, and for a folder without patches.
    """
    return tuple(finding for name in names for finding in _lint_named(name, reading, tree))


def _lint_named(name: str, reading: Reading, tree: Tree | None) -> Sequence[Finding]:
    path, stored = Path(name), patches_folder() / name
    if "/" not in name and is_stored_patch(stored):
        return [_lint_stored(stored, tree)]
    if is_stored_patch(path):
        return [_lint_stored(path, tree)]
    if path.is_dir() and (path / SERIES_FILE).is_file():
        return _lint_series(path, reading, tree)
    if path.is_dir():
        return _lint_folder(path, reading, tree)
    return [_lint_file(path, reading, tree)]


def _lint_folder(folder: Path, reading: Reading, tree: Tree | None) -> Sequence[Finding]:
    inside = sorted(folder.iterdir())
    findings = [_lint_file(file, reading, tree) for file in inside if file.suffix in SUFFIXES]
    findings += [_lint_stored(place, tree) for place in inside if is_stored_patch(place)]
    if not findings:
        raise UsageError(
            "the folder holds no patches",
            where=str(folder),
            expected=f"files that end in {' or '.join(SUFFIXES)}, or folders with a patch.toml",
            hints=(f"ls {shlex.quote(str(folder))}",),
        )
    return findings


def _lint_file(file: Path, reading: Reading, tree: Tree | None) -> Finding:
    try:
        return _describe(str(file), SeriesPatch(patch=read_patch_file(file, reading)), tree)
    except InvalidPatchError as error:
        return Finding(source=str(file), id=file.stem, error=error)


def _lint_series(folder: Path, reading: Reading, tree: Tree | None) -> Sequence[Finding]:
    try:
        return [_describe(item.patch.source, item, tree) for item in read_stack(folder, reading)]
    except InvalidPatchError as error:
        return [Finding(source=str(folder), id=folder.name, error=error)]


def _lint_stored(folder: Path, tree: Tree | None) -> Finding:
    try:
        stored = read_stored_patch(folder)
        loaded = [load_series_patch(stored, variant) for variant in stored.variants]
    except InvalidPatchError as error:
        return Finding(source=str(folder), id=folder.name, error=error)
    return _describe(str(folder), loaded[-1], tree)


def _describe(source: str, item: SeriesPatch, tree: Tree | None) -> Finding:
    scopes = find_scopes(tree, item) if tree else {path: cut.scopes for path, cut in item.cuts.items()}
    known = {path: tuple(scope for scope in found if scope is not None) for path, found in scopes.items()}
    return Finding(
        source=source,
        id=item.patch.id,
        manifest=manifest_of(item.patch, known),
        not_shipped=_not_shipped(item, record_of(tree)) if tree else (),
    )


def _not_shipped(item: SeriesPatch, record: Record) -> tuple[str, ...]:
    made = {change.path for change in item.patch.changes if isinstance(change, Create)}
    return tuple(change.path for change in item.patch.changes if change.path not in record and change.path not in made)
