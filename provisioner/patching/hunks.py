"""One file's change on one file's bytes: the new bytes, or what stands in the way of each hunk. Never fuzz. Pure.

Every context and removal line must be equal, byte for byte once line ends are set aside, at one proven place (see
:mod:`provisioner.patching.places`). Where the file is, by digest, the one that the patch was cut against, each hunk
goes to its own line and nowhere else.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import islice, pairwise, product
from typing import assert_never

from provisioner.digests import digest_of
from provisioner.patching.model import (
    Create,
    Cut,
    Delete,
    FileChange,
    Hunk,
    HunkLine,
    HunkVerdict,
    LineKind,
    Modify,
    Rename,
    Verdict,
)
from provisioner.patching.places import (
    Shift,
    choose_places,
    find_in_scope,
    places_to_try,
    report,
    take_own_lines,
    verdict_of,
)
from provisioner.patching.surface import (
    Surface,
    ends_of,
    is_python,
    own_place,
    prepare,
    scope_at_place,
    splice,
    without_cr,
)
from provisioner.records import dataclass

NO_CUT = Cut()
_MOST_ORIGINS = 16
_SWAPPED: Mapping[LineKind, LineKind] = {"+": "-", "-": "+", " ": " "}


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """The change took place: the new content (None: no file), and where each hunk went."""

    content: bytes | None = field(repr=False)
    hunks: tuple[HunkVerdict, ...]

    @property
    def verdict(self) -> Verdict:
        """``applies``, or ``applies-at-offset`` if any hunk went to another line than its own."""
        moved = any(hunk.verdict is Verdict.APPLIES_AT_OFFSET for hunk in self.hunks)
        return Verdict.APPLIES_AT_OFFSET if moved else Verdict.APPLIES


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """The change cannot be made. ``applied``: all of it stands there already; ``partial``: some hunks do, the rest
    applies; else the worst of the hunks' verdicts."""

    verdict: Verdict
    hunks: tuple[HunkVerdict, ...]
    why: str = ""


def apply_change(
    content: bytes | None, change: FileChange, cut: Cut = NO_CUT, shifts: Sequence[Sequence[Shift]] = ()
) -> Applied | Refused:
    """Make one change on the bytes of one file; ``content`` None means that there is no file.

    For a rename, ``content`` is the old file's and the result the new file's. ``cut`` is what is known of the file that
    the change was cut against, ``shifts`` what each earlier patch of the series moved, in order.
    """
    match change:
        case Create():
            return _create(content, change)
        case Delete():
            return _delete(content, change)
        case Modify() | Rename():
            if content is None:
                return _refuse_all(change, Verdict.TARGET_MISSING, "there is no such file")
            return _modify(content, change, cut, shifts)
        case _:
            assert_never(change)


def reverse_of(change: FileChange) -> FileChange:
    """The change that takes ``change`` back."""
    hunks = tuple(_reverse_hunk(hunk) for hunk in change.hunks)
    match change:
        case Create():
            return Delete(path=change.path, hunks=hunks, mode=change.mode)
        case Delete():
            return Create(path=change.path, hunks=hunks, mode=change.mode)
        case Modify():
            return Modify(path=change.path, hunks=hunks, old_mode=change.new_mode, new_mode=change.old_mode)
        case Rename():
            return Rename(
                source=change.path,
                path=change.source,
                hunks=hunks,
                old_mode=change.new_mode,
                new_mode=change.old_mode,
                similarity=change.similarity,
            )
        case _:
            assert_never(change)


def reverse_change(content: bytes | None, change: FileChange, cut: Cut = NO_CUT) -> Applied | Refused:
    """Take one change back. A digest of the file before is of no use for that; the scopes are, unless the change itself
    renames what encloses its hunks."""
    return apply_change(content, reverse_of(change), replace(cut, digest=None))


def _reverse_hunk(hunk: Hunk) -> Hunk:
    lines = tuple(HunkLine(kind=_SWAPPED[line.kind], text=line.text, ends=line.ends) for line in hunk.lines)
    return replace(
        hunk,
        old_start=hunk.new_start,
        old_count=hunk.new_count,
        new_start=hunk.old_start,
        new_count=hunk.old_count,
        lines=lines,
    )


def possible_origins(content: bytes | None, change: FileChange, cut: Cut = NO_CUT) -> Iterator[bytes | None]:
    """Contents from which ``change`` may have made ``content``, the likeliest first, for a digest to decide.

    Every origin holds the removed lines where the added ones stood, but twins are not told apart by rules: each place
    is tried, up to a bound.
    """
    back = reverse_of(change)
    match back:
        case Create() | Delete():
            done = apply_change(content, back)
            if isinstance(done, Applied):
                yield done.content
            if isinstance(change, Create) and change.fills_empty and content == _content_of(change):
                yield b""
        case Modify() | Rename():
            if content is not None:
                yield from _modify_everywhere(content, back, cut)
        case _:
            assert_never(back)


def cut_of(content: bytes, change: FileChange) -> Cut | None:
    """What a change is cut against, if ``content`` may be that file: every hunk stands at its own line.

    None where any does not. The scopes are None for files that are not Python.
    """
    if not isinstance(change, Modify | Rename):
        return Cut(digest=None, scopes=("",) * len(change.hunks)) if is_python(change.path) else Cut()
    surface = prepare(content, change)
    scopes: list[str | None] = []
    for block in surface.blocks:
        at = own_place(surface.text, block)
        if at is None:
            return None
        scopes.append(scope_at_place(surface, block, at, "old"))
    return Cut(digest=digest_of(content), scopes=tuple(scopes))


def present_hunks(content: bytes, change: FileChange, cut: Cut = NO_CUT) -> frozenset[int]:
    """The indices of the hunks whose new text stands in ``content``, in their scope where that is known."""
    surface = prepare(content, change)
    return frozenset(
        block.hunk.index
        for block, scope in zip(surface.blocks, _scopes_for(surface, change, cut), strict=True)
        if find_in_scope(surface, block, scope, "new").inside
    )


def _content_of(change: Create | Delete) -> bytes:
    lines = [line for hunk in change.hunks for line in hunk.lines]
    return b"".join(line.text + b"\n" if line.ends else line.text for line in lines)


def _create(content: bytes | None, change: Create) -> Applied | Refused:
    wanted = _content_of(change)
    if content is None or (content == b"" and change.fills_empty and wanted):
        return Applied(content=wanted, hunks=_at_own_lines(change, Verdict.APPLIES))
    if content == wanted:
        return Refused(verdict=Verdict.APPLIED, hunks=_at_own_lines(change, Verdict.APPLIED))
    return _refuse_all(change, Verdict.CONFLICT, "the file is there already, with other content")


def _delete(content: bytes | None, change: Delete) -> Applied | Refused:
    if content is None:
        return Refused(verdict=Verdict.APPLIED, hunks=_at_own_lines(change, Verdict.APPLIED))
    gone = _content_of(change)
    ends = ends_of(change)
    if content == gone or (ends != "mixed" and without_cr(content) == without_cr(gone)):
        return Applied(content=None, hunks=_at_own_lines(change, Verdict.APPLIES))
    return _refuse_all(change, Verdict.CONFLICT, "the file to delete holds something else")


def _at_own_lines(change: FileChange, verdict: Verdict) -> tuple[HunkVerdict, ...]:
    return tuple(
        HunkVerdict(index=hunk.index, verdict=verdict, line=hunk.old_start, found=hunk.old_start, offset=0)
        for hunk in change.hunks
    )


def _refuse_all(change: FileChange, verdict: Verdict, why: str) -> Refused:
    hunks = tuple(HunkVerdict(index=hunk.index, verdict=verdict, line=hunk.old_start, why=why) for hunk in change.hunks)
    return Refused(verdict=verdict, hunks=hunks, why=why)


def _modify(content: bytes, change: Modify | Rename, cut: Cut, shifts: Sequence[Sequence[Shift]]) -> Applied | Refused:
    surface = prepare(content, change)
    if cut.digest is not None and digest_of(content) == cut.digest:
        searches = take_own_lines(surface, _known_scopes(change, cut))
    else:
        searches = choose_places(surface, _scopes_for(surface, change, cut), shifts)
    hunks = tuple(report(surface, search) for search in searches)
    places = [(search.chosen, search.block) for search in searches if search.chosen is not None]
    if len(places) == len(searches):
        return Applied(content=splice(surface, places), hunks=hunks)
    return Refused(verdict=verdict_of(hunks), hunks=hunks, why=next((hunk.why for hunk in hunks if hunk.why), ""))


def _scopes_for(surface: Surface, change: FileChange, cut: Cut) -> tuple[str | None, ...]:
    """One scope a hunk, by its index; None where it is not known or the content has no scopes to compare with."""
    known = _known_scopes(change, cut)
    return known if any(scope is not None for scope in known) and surface.scopes else (None,) * len(known)


def _known_scopes(change: FileChange, cut: Cut) -> tuple[str | None, ...]:
    known = cut.scopes
    return tuple(known[hunk.index - 1] if hunk.index <= len(known) else None for hunk in change.hunks)


def _modify_everywhere(content: bytes, change: Modify | Rename, cut: Cut) -> Iterator[bytes]:
    surface = prepare(content, change)
    choices: list[list[int]] = []
    for block, scope in zip(surface.blocks, _scopes_for(surface, change, cut), strict=True):
        places = places_to_try(surface, block, scope)
        if not places:
            return
        choices.append(places)
    for chosen in islice(product(*choices), _MOST_ORIGINS):
        pairs = list(zip(chosen, surface.blocks, strict=True))
        if all(a + len(left.old) <= b for (a, left), (b, _) in pairwise(pairs)):
            yield splice(surface, pairs)
