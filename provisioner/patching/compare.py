"""Two contents to the change between them, and which known content is nearest to an unknown one. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import SequenceMatcher

from provisioner.digests import digest_of
from provisioner.patching.diff import print_patch
from provisioner.patching.model import Create, Delete, FileChange, Hunk, HunkLine, LineKind, Modify, Patch

_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_HEADING_START = re.compile(rb"[A-Za-z_$]")
_HEADING_SIZE = 80


def change_between(path: str, old: bytes | None, new: bytes | None, *, context: int = 3) -> FileChange | None:
    """The change from ``old`` to ``new`` (None: no file) with ``context`` lines around; None where they are equal."""
    if old == new:
        return None
    if old is None or new is None:
        lines = _LINE.findall(new if new is not None else old or b"")
        kind: LineKind = "+" if old is None else "-"
        hunk = Hunk(
            index=1,
            old_start=0 if old is None else 1,
            old_count=0 if old is None else len(lines),
            new_start=1 if old is None else 0,
            new_count=len(lines) if old is None else 0,
            lines=tuple(_line(kind, line) for line in lines),
        )
        hunks = (hunk,) if lines else ()
        return Create(path=path, hunks=hunks, mode=0o644) if old is None else Delete(path=path, hunks=hunks, mode=0o644)
    before, after = _LINE.findall(old), _LINE.findall(new)
    found = enumerate(_hunks(before, after, context), start=1)
    return Modify(path=path, hunks=tuple(replace(hunk, index=index) for index, hunk in found))


def patch_between(
    old: Mapping[str, bytes | None],
    new: Mapping[str, bytes | None],
    *,
    id: str,  # noqa: A002
    source: str,
) -> Patch:
    """The patch from one set of files to another, in the order of paths; a path that a side lacks is no file there."""
    changes = [change_between(path, old.get(path), new.get(path)) for path in sorted({*old, *new})]
    patch = Patch(id=id, source=source, digest="", changes=tuple(change for change in changes if change is not None))
    return replace(patch, digest=digest_of(print_patch(patch)))


def nearest_state(content: bytes | None, states: Iterable[bytes | None]) -> bytes | None:
    """The state that shares the most lines with ``content``, the earlier one among equals; None if all are None."""
    known = [state for state in states if state is not None]
    if not known:
        return None
    lines = Counter(_LINE.findall(content or b""))

    def distance(state: bytes) -> int:
        other = Counter(_LINE.findall(state))
        return sum((lines - other).values()) + sum((other - lines).values())

    return min(known, key=distance)


def _line(kind: LineKind, line: bytes) -> HunkLine:
    ends = line.endswith(b"\n")
    return HunkLine(kind=kind, text=line.removesuffix(b"\n"), ends=ends)


def _hunks(old: list[bytes], new: list[bytes], context: int) -> Iterator[Hunk]:
    head, tail = _common_ends(old, new)
    # Enough of the common lines stays in for the context of the first and last hunk.
    skip, keep = max(head - context, 0), max(tail - context, 0)
    matcher = SequenceMatcher(None, old[skip : len(old) - keep], new[skip : len(new) - keep])
    for group in matcher.get_grouped_opcodes(context):
        lines: list[HunkLine] = []
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                lines += (_line(" ", line) for line in old[skip + i1 : skip + i2])
            else:
                lines += (_line("-", line) for line in old[skip + i1 : skip + i2])
                lines += (_line("+", line) for line in new[skip + j1 : skip + j2])
        first, last = group[0], group[-1]
        old_count, new_count = last[2] - first[1], last[4] - first[3]
        start = skip + first[1]
        yield Hunk(
            index=1,
            old_start=start + (1 if old_count else 0),
            old_count=old_count,
            new_start=skip + first[3] + (1 if new_count else 0),
            new_count=new_count,
            heading=_heading(old, start),
            lines=tuple(lines),
        )


def _common_ends(old: list[bytes], new: list[bytes]) -> tuple[int, int]:
    most = min(len(old), len(new))
    head = next((at for at in range(most) if old[at] != new[at]), most)
    tail = next((at for at in range(most - head) if old[-1 - at] != new[-1 - at]), most - head)
    return head, tail


def _heading(lines: list[bytes], start: int) -> bytes:
    """The last line above ``start`` that begins in column 0 with a letter, as git writes it after @@."""
    for line in reversed(lines[:start]):
        if _HEADING_START.match(line):
            return line[:_HEADING_SIZE].strip()
    return b""
