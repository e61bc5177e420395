"""A patch carried to another build: a three-way merge of each file, and an account of what changed on the way. Pure.

The merge itself is passed in (git's, at the edge). What it gives is diffed against the new build's own file, so the new
text is exact there, whatever the merge did; nothing that the old text added or removed is lost without a word; and a
merge that went well line by line but uses a name that the new build binds nowhere is a conflict, too.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from provisioner.errors import ConflictError
from provisioner.patching.compare import patch_between
from provisioner.patching.hunks import Refused, apply_change
from provisioner.patching.model import Cut, FileChange, Patch, SeriesPatch
from provisioner.porting.undefined_names import find_unbound


class Fate(StrEnum):
    """What became of one file of a patch on the way to another build."""

    CARRIED = "carried"
    MOVED = "moved"
    MERGED_UPSTREAM = "merged-upstream"
    TARGET_MISSING = "target-missing"
    CONFLICT = "conflict"


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The result of a three-way merge; with ``conflicts``, ``content`` holds conflict markers."""

    content: bytes = field(repr=False)
    conflicts: int


Merge = Callable[[bytes, bytes, bytes], Merged]
"""Base, patched base, new file; all of one path."""


@dataclass(frozen=True, kw_only=True)
class RefreshedFile:
    """One file: its path in the old text and on the new build, the three versions, and the merge's result.

    ``why`` says what a person has to settle where the fate is CONFLICT.
    """

    path: str
    target: str
    fate: Fate
    base: bytes | None = field(repr=False)
    patched: bytes | None = field(repr=False)
    new: bytes | None = field(repr=False)
    merged: bytes | None = field(repr=False)
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Refresh:
    """A whole refresh. ``patch`` is None while there are conflicts or where nothing is left to patch.

    ``lost`` names, for each file, the lines that the old text adds or removes and the new one does not.
    """

    files: tuple[RefreshedFile, ...]
    patch: Patch | None
    lost: tuple[str, ...]

    @property
    def conflicts(self) -> tuple[RefreshedFile, ...]:
        """The files whose merge needs a person."""
        return tuple(file for file in self.files if file.fate is Fate.CONFLICT)


def refresh_patch(
    item: SeriesPatch,
    base: Mapping[str, bytes | None],
    new: Mapping[str, bytes | None],
    moved: Mapping[str, str],
    merge: Merge,
) -> Refresh:
    """Carry a patch from the files that it was cut against to another build's.

    ``base`` and ``new`` give contents by path (None: no such file), ``moved`` the new path of a file that went
    elsewhere. Raises ConflictError where the patch does not apply to its own base.
    """
    files = tuple(
        _carry(change, item.cuts.get(change.path, Cut()), base, new, moved, merge) for change in item.patch.changes
    )
    if any(file.fate is Fate.CONFLICT for file in files):
        return Refresh(files=files, patch=None, lost=())
    return finish_refresh(item.patch, files)


def finish_refresh(old: Patch, files: tuple[RefreshedFile, ...]) -> Refresh:
    """The refreshed text of files whose merge is done, and what was lost on the way."""
    before = {file.target: file.new for file in files}
    after = {file.target: file.merged for file in files}
    patch = patch_between(before, after, id=old.id, source=old.source)
    lost = tuple(line for file in files for line in _lost_of(file, old, patch))
    return Refresh(files=files, patch=patch if patch.changes else None, lost=lost)


def _carry(
    change: FileChange,
    cut: Cut,
    base: Mapping[str, bytes | None],
    new: Mapping[str, bytes | None],
    moved: Mapping[str, str],
    merge: Merge,
) -> RefreshedFile:
    path = change.path
    target = moved.get(path, path)
    old, now = base.get(path), new.get(target)
    applied = apply_change(old, change, cut)
    if isinstance(applied, Refused):
        raise ConflictError("the patch does not apply to the build that it was cut against", where=path)
    patched = applied.content
    fate, merged = _merge(old, patched, now, merge)
    if fate is Fate.CARRIED and target != path:
        fate = Fate.MOVED
    why = "the two sides change the same lines" if fate is Fate.CONFLICT else ""
    if fate in (Fate.CARRIED, Fate.MOVED) and (broken := find_break(target, now, merged)):
        fate, why = Fate.CONFLICT, broken
    return RefreshedFile(
        path=path, target=target, fate=fate, base=old, patched=patched, new=now, merged=merged, why=why
    )


def find_break(path: str, new: bytes | None, merged: bytes | None) -> str:
    """What a merged Python file lacks that the new build's own file did not; empty where nothing is."""
    if not path.endswith(".py") or merged is None or merged == new:
        return ""
    try:
        before = find_unbound(new or b"", path)
    except SyntaxError:
        return ""
    try:
        unbound = find_unbound(merged, path) - before
    except SyntaxError as error:
        return f"line {error.lineno} of the merge is no Python: {error.msg}"
    return f"the merge uses {', '.join(sorted(unbound))}, which nothing in this build's file binds" if unbound else ""


def _merge(old: bytes | None, patched: bytes | None, now: bytes | None, merge: Merge) -> tuple[Fate, bytes | None]:
    if now == patched:
        return Fate.MERGED_UPSTREAM, now
    if now == old:
        return Fate.CARRIED, patched
    if now is None:
        return Fate.TARGET_MISSING, None
    if patched is None:
        # The patch deletes a file that changed since: a person must say whether it may still go.
        return Fate.CONFLICT, now
    result = merge(old or b"", patched, now)
    if result.conflicts:
        return Fate.CONFLICT, result.content
    return (Fate.MERGED_UPSTREAM if result.content == now else Fate.CARRIED), result.content


def _lost_of(file: RefreshedFile, old: Patch, new: Patch) -> list[str]:
    if file.fate is Fate.MERGED_UPSTREAM:
        return []
    wanted = _edits(old, file.path)
    kept = _edits(new, file.target)
    missing = wanted - kept
    return [f"{file.path}: {kind}{text.decode('utf-8', 'replace')}" for (kind, text) in missing.elements()]


def _edits(patch: Patch, path: str) -> Counter[tuple[str, bytes]]:
    return Counter(
        (line.kind, line.text)
        for change in patch.changes
        if change.path == path
        for hunk in change.hunks
        for line in hunk.lines
        if line.kind != " " and line.text.strip()
    )
