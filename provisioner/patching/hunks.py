"""One file's change on one file's bytes: the new bytes, or what stands in the way of each hunk. Never fuzz. Pure.

Every context and removal line must be equal, byte for byte, at one place. Line ends are set aside where the patch says
nothing about them: a change whose lines all end alike (LF or CRLF) is matched without them, and the file keeps its own;
a change whose lines end differently is matched and written byte for byte.

Equal text is no proof of place. A hunk with a known scope (see :mod:`provisioner.patching.scope`) only ever goes there:
to its own line, else to the one place in it. Without a known scope only a place that is the only one in the file will
do, and a heading after ``@@`` that names a class or function must name the nearest such line above. Where the file is,
by digest, the one that the patch was cut against, each hunk goes to its own line and nowhere else.

A place that lies inside the text which the hunk would make is where the hunk already is, not where it could go.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise, product
from typing import Literal, assert_never

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
from provisioner.patching.scope import ScopeMap, column_of, map_scopes

NO_CUT = Cut()
_MOST_PLACES = 256
_MOST_ORIGINS = 16
_SWAPPED: Mapping[LineKind, LineKind] = {"+": "-", "-": "+", " ": " "}
_NAMED = re.compile(rb"[ \t]*(?:class|(?:async[ \t]+)?def)[ \t]+([\w\x80-\xff]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shift:
    """Lines that an earlier patch of the series put in (or took out) below line ``after`` of the file before it."""

    after: int
    by: int


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
        return Cut(digest=None, scopes=("",) * len(change.hunks)) if _is_python(change.path) else Cut()
    surface = _prepare(content, change)
    scopes: list[str | None] = []
    for block in surface.blocks:
        at = _own_place(surface.text, block)
        if at is None:
            return None
        scopes.append(_scope_at(surface, block, at, "old"))
    return Cut(digest=digest_of(content), scopes=tuple(scopes))


def present_hunks(content: bytes, change: FileChange, cut: Cut = NO_CUT) -> frozenset[int]:
    """The indices of the hunks whose new text stands in ``content``, in their scope where that is known."""
    surface = _prepare(content, change)
    return frozenset(
        block.hunk.index
        for block, scope in zip(surface.blocks, _scopes_for(change, cut), strict=True)
        if _in_scope(surface, block, scope, "new").inside
    )


# ---- whole-file changes


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
    ends = _ends_of(change)
    if content == gone or (ends != "mixed" and _without_cr(content) == _without_cr(gone)):
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


# ---- a file made matchable

_Ends = Literal["lf", "crlf", "mixed"]


@dataclass(frozen=True, slots=True)
class _Block:
    """A hunk as bytes: both sides for matching, and both as the patch has them. ``lead_old`` and ``lead_new`` are the
    bytes of each side above the run of changed lines that decides the scope, ``indent`` is the column of the first of
    them that is not blank."""

    hunk: Hunk
    index: int
    old: bytes
    new: bytes
    old_verbatim: bytes
    new_verbatim: bytes
    lead_old: int
    lead_new: int
    indent: int | None
    adds_text: bool


@dataclass(frozen=True, slots=True)
class _Surface:
    """Content and hunks with line ends set aside, or as they are where the change is about line ends."""

    content: bytes
    text: bytes
    blocks: tuple[_Block, ...]
    is_python: bool

    @property
    def added_names(self) -> frozenset[str]:
        """The names of classes and functions whose first lines the change adds."""
        lines = (line for block in self.blocks for line in block.hunk.lines if line.kind == "+")
        found = (_NAMED.match(line.text) for line in lines)
        return frozenset(match[1].decode("utf-8", "replace") for match in found if match is not None)

    @property
    def scopes(self) -> ScopeMap | None:
        """The scopes of the content without CRs; None where it is not Python. Worked out only if asked for."""
        return map_scopes(_without_cr(self.content)) if self.is_python else None


def _prepare(content: bytes, change: FileChange) -> _Surface:
    exact = _ends_of(change) == "mixed"
    text = content if exact else _without_cr(content)
    blocks = tuple(_block_of(hunk, exact=exact) for hunk in change.hunks)
    return _Surface(content, text, blocks, _is_python(change.path))


def _is_python(path: str) -> bool:
    return path.endswith((".py", ".pyi"))


def _without_cr(content: bytes) -> bytes:
    return content.replace(b"\r\n", b"\n") if b"\r" in content else content


def _ends_of(change: FileChange) -> _Ends:
    ends = {line.text.endswith(b"\r") for hunk in change.hunks for line in hunk.lines if line.ends}
    if len(ends) > 1:
        return "mixed"
    return "crlf" if True in ends else "lf"


def _block_of(hunk: Hunk, *, exact: bool) -> _Block:
    lines = [(line.kind, _bytes_of(line, exact=exact), line.text) for line in hunk.lines]
    first = next((at for at, (kind, _, text) in enumerate(lines) if kind != " " and text.strip()), None)
    run = next(at for at, (kind, _, _) in enumerate(lines) if kind != " ") if first is None else first
    while run and lines[run - 1][0] != " ":
        run -= 1
    return _Block(
        hunk=hunk,
        index=hunk.old_start - 1 if hunk.old_count else hunk.old_start,
        old=b"".join(data for kind, data, _ in lines if kind != "+"),
        new=b"".join(data for kind, data, _ in lines if kind != "-"),
        old_verbatim=b"".join(_bytes_of(line, exact=True) for line in hunk.lines if line.kind != "+"),
        new_verbatim=b"".join(_bytes_of(line, exact=True) for line in hunk.lines if line.kind != "-"),
        lead_old=sum(len(data) for kind, data, _ in lines[:run] if kind != "+"),
        lead_new=sum(len(data) for kind, data, _ in lines[:run] if kind != "-"),
        indent=None if first is None else column_of(lines[first][2]),
        adds_text=any(kind == "+" and text.strip() for kind, _, text in lines),
    )


def _bytes_of(line: HunkLine, *, exact: bool) -> bytes:
    if not line.ends:
        return line.text
    return (line.text if exact else line.text.removesuffix(b"\r")) + b"\n"


def _line_of(text: bytes, offset: int) -> int:
    """The index from 0 of the line that starts at ``offset``."""
    return text.count(b"\n", 0, offset)


def _offset_of(text: bytes, line: int) -> int | None:
    """Where line ``line`` (from 0) starts; the end of the text for the line after the last; None beyond."""
    at = 0
    for _ in range(line):
        at = text.find(b"\n", at) + 1
        if at == 0:
            return None
    return at


# ---- finding a place


def _own_place(text: bytes, block: _Block) -> int | None:
    """Where the hunk's own line starts, if its old text stands there."""
    found = _find_all(text, block.old)
    if 0 < len(found) < _MOST_PLACES:
        return next((at for at in found if _line_of(text, at) == block.index), None)
    at = _offset_of(text, block.index)
    return at if at is not None and _stands_at(text, at, block.old) else None


def _stands_at(text: bytes, at: int, block: bytes) -> bool:
    if not text.startswith(block, at):
        return False
    return not block or block.endswith(b"\n") or at + len(block) == len(text)


def _find_all(text: bytes, block: bytes) -> list[int]:
    """Where ``block`` stands as whole lines, up to a bound; nowhere if it is empty."""
    found: list[int] = []
    at = text.find(block) if block else -1
    while at >= 0 and len(found) < _MOST_PLACES:
        if (at == 0 or text[at - 1] == 10) and (block.endswith(b"\n") or at + len(block) == len(text)):
            found.append(at)
        at = text.find(block, at + 1)
    return found


@dataclass(frozen=True, slots=True)
class _Places:
    """Where one side of a hunk stands: in its scope (or anywhere, where that is not known), and under other scopes."""

    inside: list[int]
    outside: list[int]


def _in_scope(surface: _Surface, block: _Block, scope: str | None, side: Literal["old", "new"]) -> _Places:
    found = _find_all(surface.text, block.old if side == "old" else block.new)
    if side == "old" and found and block.old in block.new:
        done = _find_all(surface.text, block.new)
        found = [at for at in found if not _lies_inside(at, len(block.old), done, len(block.new))]
    if scope is None or not found or surface.scopes is None:
        return _Places(found, [])
    named = surface.added_names if side == "new" else frozenset()
    inside = [at for at in found if _fits(_scope_at(surface, block, at, side), scope, named)]
    return _Places(inside, [at for at in found if at not in inside]) if len(inside) < len(found) else _Places(found, [])


def _fits(found: str | None, wanted: str, named: frozenset[str]) -> bool:
    """Whether a scope is the wanted one, but for names that the change itself gives."""
    if found == wanted:
        return True
    return bool(named) and found is not None and set(found.split(".")) <= named | {*wanted.split(".")}


def _lies_inside(at: int, length: int, starts: list[int], size: int) -> bool:
    return any(start <= at and at + length <= start + size for start in starts)


def _scope_at(surface: _Surface, block: _Block, at: int, side: Literal["old", "new"]) -> str | None:
    scopes = surface.scopes
    if scopes is None:
        return None
    lead = block.lead_old if side == "old" else block.lead_new
    return scopes.scope_at(_plain_offset(surface, at + lead), block.indent)


def _plain_offset(surface: _Surface, at: int) -> int:
    """An offset in the text as one in the text without CRs, which is what scopes are counted in."""
    return at - surface.text.count(b"\r\n", 0, at) if b"\r" in surface.text else at


def _scopes_for(change: FileChange, cut: Cut) -> tuple[str | None, ...]:
    """One scope a hunk; a change that is one of several for its path takes its own by index."""
    known = cut.scopes
    return tuple(known[hunk.index - 1] if hunk.index <= len(known) else None for hunk in change.hunks)


@dataclass(slots=True)
class _Search:
    """One hunk's search: where it may go, whether its result stands already, and what was decided."""

    block: _Block
    scope: str | None
    places: _Places
    done: list[int]
    options: list[int]
    chosen: int | None = None
    verdict: Verdict = Verdict.CONFLICT
    why: str = ""

    def settle(self, at: int) -> None:
        """Decide for a place."""
        self.chosen = at
        self.options = [at]

    def refuse(self, verdict: Verdict, why: str) -> None:
        """Decide against every place."""
        self.chosen = None
        self.verdict = verdict
        self.why = why


def _modify(content: bytes, change: Modify | Rename, cut: Cut, shifts: Sequence[Sequence[Shift]]) -> Applied | Refused:
    surface = _prepare(content, change)
    scopes = _scopes_for(change, cut)
    if cut.digest is not None and digest_of(content) == cut.digest:
        searches = [
            _search_own_line(surface, block, scope) for block, scope in zip(surface.blocks, scopes, strict=True)
        ]
    else:
        searches = [_search(surface, block, scope) for block, scope in zip(surface.blocks, scopes, strict=True)]
        _keep_order(searches)
        _choose(surface.text, searches, shifts)
        for search in searches:
            _doubt(surface, search)
        _doubt_order(searches)
    hunks = tuple(_report(surface, search) for search in searches)
    if all(search.chosen is not None for search in searches):
        return Applied(content=_splice(surface, searches), hunks=hunks)
    return Refused(verdict=_verdict_of(hunks), hunks=hunks, why=next((hunk.why for hunk in hunks if hunk.why), ""))


def _search_own_line(surface: _Surface, block: _Block, scope: str | None) -> _Search:
    at = _own_place(surface.text, block)
    inside = [] if at is None else [at]
    search = _Search(block, scope, _Places(inside, []), [], inside, at)
    if at is None:
        search.refuse(Verdict.CONFLICT, "the text is not at its line in the very file that the patch was cut against")
    return search


def _search(surface: _Surface, block: _Block, scope: str | None) -> _Search:
    places = _in_scope(surface, block, scope, "old")
    done = [] if places.inside and not block.adds_text else _in_scope(surface, block, scope, "new").inside
    if not block.old and surface.text == b"" and block.index == 0:
        places = _Places([0], [])
    search = _Search(block, scope, places, done, places.inside)
    if places.inside:
        return search
    if done:
        search.refuse(Verdict.APPLIED, "its result stands there already")
    elif places.outside:
        search.refuse(Verdict.WRONG_SCOPE, "the text stands only in another class or function")
    elif not block.old:
        search.refuse(Verdict.AMBIGUOUS, "the hunk has no line that says where it goes")
    else:
        search.refuse(Verdict.CONFLICT, _nearest_miss(surface.text, block))
    return search


def _nearest_miss(text: bytes, block: _Block) -> str:
    """Which line of a hunk that stands nowhere is the first that differs, if its first lines stand somewhere."""
    lines = [line for line in block.hunk.lines if line.kind != "+"]
    for number, line in enumerate(lines, start=1):
        bare = line.text.removesuffix(b"\r")
        if bare.strip() and bare not in text:
            return f"its old line {number} stands nowhere in the file: {bare.strip()[:60].decode('utf-8', 'replace')}"
    return "its old lines do not stand together anywhere in the file"


def _keep_order(searches: list[_Search]) -> None:
    """Drop options that no order-keeping choice for all hunks can use; hunks without any option do not count."""
    active = [search for search in searches if search.options]
    low = 0
    for search in active:
        search.options = [at for at in search.options if at >= low]
        low = (search.options[0] if search.options else low) + len(search.block.old)
    high = None
    for search in reversed(active):
        size = len(search.block.old)
        search.options = [at for at in search.options if high is None or at + size <= high]
        high = search.options[-1] if search.options else high


def _choose(text: bytes, searches: list[_Search], shifts: Sequence[Sequence[Shift]]) -> None:
    lines = {at: _line_of(text, at) for search in searches for at in search.options}
    for search in searches:
        at = _own_option(search, lines, shifts)
        if at is not None:
            search.settle(at)
    _keep_order(searches)
    moved = _offsets_of_unique(searches, lines)
    for search in searches:
        if not search.places.inside:
            continue
        twins = [at for at in search.places.inside if lines.get(at, -1) - search.block.index in moved]
        if not search.options:
            search.refuse(Verdict.CONFLICT, "the text stands only where the order of the hunks is broken")
        elif len(search.options) > 1 or (search.scope is None and len(search.places.inside) > 1):
            search.refuse(Verdict.AMBIGUOUS, _places_text(search, lines))
        elif search.chosen is not None and len(search.places.inside) > 1 and twins and search.chosen not in twins:
            search.refuse(Verdict.AMBIGUOUS, "it stands at its own line and where the other hunks have moved")
        else:
            search.settle(search.options[0])


def _own_option(search: _Search, lines: Mapping[int, int], shifts: Sequence[Sequence[Shift]]) -> int | None:
    """The option at the hunk's own line, as written or as earlier patches moved it, if one and only one is."""
    if search.scope is None:
        return None
    own = _own_lines(search.block.index, shifts)
    found = [at for at in search.options if lines[at] in own]
    return found[0] if len(found) == 1 else None


def _own_lines(index: int, shifts: Sequence[Sequence[Shift]]) -> set[int]:
    """The line as written, and as the patches since any earlier state of the series moved it."""
    own = {index}
    for patch in shifts:
        own |= {line + sum(shift.by for shift in patch if shift.after <= line) for line in own} | {index}
    return own


def _offsets_of_unique(searches: list[_Search], lines: Mapping[int, int]) -> set[int]:
    """By how many lines the hunks moved that can stand at one place only; 0 left out."""
    return {
        lines[search.options[0]] - search.block.index
        for search in searches
        if len(search.places.inside) == 1 and search.options
    } - {0}


def _places_text(search: _Search, lines: Mapping[int, int]) -> str:
    places = ", ".join(str(lines[at] + 1) for at in search.places.inside if at in lines)
    scope = f" in {search.scope or 'module level'}" if search.scope is not None else ", and no scope is known"
    return f"it could go to several places{scope}: lines {places}"


def _doubt(surface: _Surface, search: _Search) -> None:
    """Refuse a chosen place that other evidence speaks against."""
    if search.chosen is None:
        return
    if search.done and search.block.adds_text:
        search.refuse(Verdict.AMBIGUOUS, "its result stands there already, and it could be applied once more")
    elif search.scope is None and not _heading_agrees(surface.text, search.chosen, search.block.hunk.heading):
        search.refuse(Verdict.WRONG_SCOPE, "the heading of the hunk names another class or function")


def _doubt_order(searches: list[_Search]) -> None:
    """Results that stand there already must stand in the order of the hunks."""
    low = 0
    for search in searches:
        if search.chosen is not None or search.verdict is not Verdict.APPLIED:
            continue
        at = next((at for at in search.done if at >= low), None)
        if at is None:
            search.refuse(Verdict.CONFLICT, "its result stands only where the order of the hunks is broken")
        else:
            low = at + len(search.block.new)


def _heading_agrees(text: bytes, at: int, heading: bytes) -> bool:
    """Whether a heading that names a class or function names the nearest such line above ``at``.

    Tools choose that line in two ways: the last that starts with a letter in column 0, or the last class or def line.
    """
    named = _NAMED.match(heading)
    if named is None:
        return True
    nearest_def = nearest_any = None
    end = at
    while end > 0 and nearest_any is None:
        start = text.rfind(b"\n", 0, end - 1) + 1
        line = text[start:end]
        if nearest_def is None and _NAMED.match(line):
            nearest_def = line
        if line[:1].isalpha() or line[:1] in (b"_", b"$"):
            nearest_any = line
        end = start
    found = [_NAMED.match(line) for line in (nearest_def, nearest_any) if line is not None]
    return any(match is not None and match[1] == named[1] for match in found)


def _report(surface: _Surface, search: _Search) -> HunkVerdict:
    hunk = search.block.hunk
    at = search.chosen
    if at is None:
        elsewhere = (
            search.places.outside[0] if search.verdict is Verdict.WRONG_SCOPE and search.places.outside else None
        )
        found = None if elsewhere is None else _line_of(surface.text, elsewhere) + 1
        scope = None if elsewhere is None else _scope_at(surface, search.block, elsewhere, "old")
        return HunkVerdict(
            index=hunk.index,
            verdict=search.verdict,
            line=hunk.old_start,
            found=found,
            offset=None if found is None else found - hunk.old_start,
            scope=search.scope,
            found_scope=scope,
            why=search.why,
        )
    offset = _line_of(surface.text, at) - search.block.index
    return HunkVerdict(
        index=hunk.index,
        verdict=Verdict.APPLIES_AT_OFFSET if offset else Verdict.APPLIES,
        line=hunk.old_start,
        found=hunk.old_start + offset,
        offset=offset,
        scope=search.scope,
        found_scope=search.scope,
        why="" if search.scope is not None or not surface.is_python else "scope unknown",
    )


def _verdict_of(hunks: tuple[HunkVerdict, ...]) -> Verdict:
    found = {hunk.verdict for hunk in hunks}
    if found == {Verdict.APPLIED}:
        return Verdict.APPLIED
    if found <= {Verdict.APPLIED, Verdict.APPLIES, Verdict.APPLIES_AT_OFFSET}:
        return Verdict.PARTIAL
    order = list(Verdict)
    return min(found, key=order.index)


# ---- splicing


def _splice(surface: _Surface, searches: Sequence[_Search]) -> bytes:
    places = [(search.chosen, search.block) for search in searches if search.chosen is not None]
    return _splice_at(surface, places)


def _splice_at(surface: _Surface, places: Sequence[tuple[int, _Block]]) -> bytes:
    has_crlf = surface.text is not surface.content
    if has_crlf and surface.content.count(b"\n") != surface.content.count(b"\r\n"):
        return _splice_mixed(surface, places)
    has_newline = b"\n" in surface.text
    parts: list[bytes] = []
    end = 0
    for at, block in places:
        # A file without any newline has no line ends of its own to keep.
        parts += (surface.text[end:at], block.new if has_newline else block.new_verbatim)
        end = at + len(block.old)
    parts.append(surface.text[end:])
    out = b"".join(parts)
    return out.replace(b"\n", b"\r\n") if has_crlf else out


def _splice_mixed(surface: _Surface, places: Sequence[tuple[int, _Block]]) -> bytes:
    """In a file whose lines end differently kept lines keep their ends; a hunk that matches to the byte is written so,
    else a new line takes the end of the line above it (of the line below at the top of the file)."""
    lines = re.findall(rb"[^\n]*\n|[^\n]+", surface.content)
    out: list[bytes] = []
    at = 0
    for offset, block in places:
        start = _line_of(surface.text, offset)
        end = start + block.hunk.old_count
        out += lines[at:start]
        if b"".join(lines[start:end]) == block.old_verbatim and block.old_verbatim:
            out.append(block.new_verbatim)
        else:
            out += _borrow_ends(block.hunk, lines[start - 1] if start else lines[0], lines[start:end])
        at = end
    return b"".join(out + lines[at:])


def _borrow_ends(hunk: Hunk, above: bytes, old: Sequence[bytes]) -> Iterator[bytes]:
    """The hunk's new lines, each kept one as it is, each added one with the end of the old line above it."""
    rest = iter(old)
    for line in hunk.lines:
        if line.kind == "+":
            end = b"\r\n" if above.endswith(b"\r\n") else b"\n"
            yield line.text.removesuffix(b"\r") + end if line.ends else line.text
            continue
        above = next(rest)
        if line.kind == " ":
            yield above


# ---- origins


def _modify_everywhere(content: bytes, change: Modify | Rename, cut: Cut) -> Iterator[bytes]:
    surface = _prepare(content, change)
    choices: list[list[int]] = []
    for block, scope in zip(surface.blocks, _scopes_for(change, cut), strict=True):
        places = _places_to_try(surface, block, scope)
        if not places:
            return
        choices.append(places)
    for chosen in islice(product(*choices), _MOST_ORIGINS):
        pairs = list(zip(chosen, surface.blocks, strict=True))
        if all(a + len(left.old) <= b for (a, left), (b, _) in pairwise(pairs)):
            yield _splice_at(surface, pairs)


def _places_to_try(surface: _Surface, block: _Block, scope: str | None) -> list[int]:
    """Every place of a hunk's old text, those in its scope first, then the nearest to its own line."""
    if not block.old:
        at = _offset_of(surface.text, block.index)
        return [] if at is None else [at]
    found = _find_all(surface.text, block.old)
    if len(found) < 2:
        return found

    def rank(at: int) -> tuple[bool, int]:
        elsewhere = scope is not None and _scope_at(surface, block, at, "old") != scope
        return elsewhere, abs(_line_of(surface.text, at) - block.index)

    return sorted(found, key=rank)
