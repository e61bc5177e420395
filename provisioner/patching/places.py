"""Where each hunk of a change goes in one file: one proven place, or a reason against every place. Pure.

Equal text is no proof of place. A hunk with a known scope (see :mod:`provisioner.patching.scope`) only ever goes there:
to its own line, else to the one place in it. Without a known scope only a place that is the only one in the file will
do, and a heading after ``@@`` that names a class or function must name the nearest such line above. A place that lies
inside the text which the hunk would make is where the hunk already is, not where it could go.
"""

from collections.abc import Mapping, Sequence

from provisioner.patching.model import HunkVerdict, Verdict
from provisioner.patching.surface import (
    NAMED,
    Block,
    Side,
    Surface,
    find_all,
    line_of,
    offset_of,
    own_place,
    scope_at_place,
)
from provisioner.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Shift:
    """Lines that an earlier patch of the series put in (or took out) below line ``after`` of the file before it."""

    after: int
    by: int


@dataclass(frozen=True, slots=True)
class Places:
    """Where one side of a hunk stands: in its scope (or anywhere, where that is not known), and under other scopes."""

    inside: list[int]
    outside: list[int]


@dataclass(slots=True)
class Search:
    """One hunk's search: where it may go, whether its result stands already, and what was decided."""

    block: Block
    scope: str | None
    places: Places
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


def choose_places(
    surface: Surface, scopes: Sequence[str | None], shifts: Sequence[Sequence[Shift]]
) -> tuple[Search, ...]:
    """One decided search per hunk, in order."""
    searches = tuple(_search(surface, block, scope) for block, scope in zip(surface.blocks, scopes, strict=True))
    _keep_order(searches)
    _choose(surface.text, searches, shifts)
    for search in searches:
        _doubt(surface, search)
    _doubt_order(searches)
    return searches


def take_own_lines(surface: Surface, scopes: Sequence[str | None]) -> tuple[Search, ...]:
    """One decided search per hunk in the very file that the change was cut against: its own line or nothing."""
    return tuple(_take_own_line(surface, block, scope) for block, scope in zip(surface.blocks, scopes, strict=True))


def find_in_scope(surface: Surface, block: Block, scope: str | None, side: Side) -> Places:
    found = find_all(surface.text, block.old if side == "old" else block.new)
    if side == "old" and found and block.old in block.new:
        done = find_all(surface.text, block.new)
        found = [at for at in found if not _lies_inside(at, len(block.old), done, len(block.new))]
    if scope is None or not found or surface.scopes is None:
        return Places(found, [])
    named = surface.added_names if side == "new" else frozenset()
    inside = [at for at in found if _fits(scope_at_place(surface, block, at, side), scope, named)]
    return Places(inside, [at for at in found if at not in inside]) if len(inside) < len(found) else Places(found, [])


def _fits(found: str | None, wanted: str, named: frozenset[str]) -> bool:
    """Whether a scope is the wanted one, but for names that the change itself gives."""
    if found == wanted:
        return True
    return bool(named) and found is not None and set(found.split(".")) <= named | {*wanted.split(".")}


def _lies_inside(at: int, length: int, starts: list[int], size: int) -> bool:
    return any(start <= at and at + length <= start + size for start in starts)


def _take_own_line(surface: Surface, block: Block, scope: str | None) -> Search:
    at = own_place(surface.text, block)
    inside = [] if at is None else [at]
    search = Search(block, scope, Places(inside, []), [], inside, at)
    if at is None:
        search.refuse(Verdict.CONFLICT, "the text is not at its line in the very file that the patch was cut against")
    return search


def _search(surface: Surface, block: Block, scope: str | None) -> Search:
    places = find_in_scope(surface, block, scope, "old")
    done = find_in_scope(surface, block, scope, "new").inside if block.is_telling else []
    if not block.old and surface.text == b"" and block.index == 0:
        places = Places([0], [])
    search = Search(block, scope, places, done, places.inside)
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


def _nearest_miss(text: bytes, block: Block) -> str:
    """Which line of a hunk that stands nowhere is the first that differs, if its first lines stand somewhere."""
    lines = [line for line in block.hunk.lines if line.kind != "+"]
    for number, line in enumerate(lines, start=1):
        bare = line.text.removesuffix(b"\r")
        if bare.strip() and bare not in text:
            return f"its old line {number} stands nowhere in the file: {bare.strip()[:60].decode('utf-8', 'replace')}"
    return "its old lines do not stand together anywhere in the file"


def _keep_order(searches: Sequence[Search]) -> None:
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


def _choose(text: bytes, searches: Sequence[Search], shifts: Sequence[Sequence[Shift]]) -> None:
    lines = {at: line_of(text, at) for search in searches for at in search.options}
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


def _own_option(search: Search, lines: Mapping[int, int], shifts: Sequence[Sequence[Shift]]) -> int | None:
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


def _offsets_of_unique(searches: Sequence[Search], lines: Mapping[int, int]) -> set[int]:
    """By how many lines the hunks moved that can stand at one place only; 0 left out."""
    return {
        lines[search.options[0]] - search.block.index
        for search in searches
        if len(search.places.inside) == 1 and search.options
    } - {0}


def _places_text(search: Search, lines: Mapping[int, int]) -> str:
    places = ", ".join(str(lines[at] + 1) for at in search.places.inside if at in lines)
    scope = f" in {search.scope or 'module level'}" if search.scope is not None else ", and no scope is known"
    return f"it could go to several places{scope}: lines {places}"


def _doubt(surface: Surface, search: Search) -> None:
    """Refuse a chosen place that other evidence speaks against."""
    if search.chosen is None:
        return
    old, new = len(search.block.old), len(search.block.new)
    if any(not _lies_inside(at, new, [search.chosen], old) for at in search.done):
        search.refuse(Verdict.AMBIGUOUS, "its result stands there already, and it could be applied once more")
    elif search.scope is None and not _heading_agrees(surface.text, search.chosen, search.block.hunk.heading):
        search.refuse(Verdict.WRONG_SCOPE, "the heading of the hunk names another class or function")


def _doubt_order(searches: Sequence[Search]) -> None:
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
    named = NAMED.match(heading)
    if named is None:
        return True
    nearest_def = nearest_any = None
    end = at
    while end > 0 and nearest_any is None:
        start = text.rfind(b"\n", 0, end - 1) + 1
        line = text[start:end]
        if nearest_def is None and NAMED.match(line):
            nearest_def = line
        if line[:1].isalpha() or line[:1] in (b"_", b"$"):
            nearest_any = line
        end = start
    found = [NAMED.match(line) for line in (nearest_def, nearest_any) if line is not None]
    return any(match is not None and match[1] == named[1] for match in found)


def report(surface: Surface, search: Search) -> HunkVerdict:
    hunk = search.block.hunk
    at = search.chosen
    if at is None:
        elsewhere = (
            search.places.outside[0] if search.verdict is Verdict.WRONG_SCOPE and search.places.outside else None
        )
        found = None if elsewhere is None else line_of(surface.text, elsewhere) + 1
        scope = None if elsewhere is None else scope_at_place(surface, search.block, elsewhere, "old")
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
    offset = line_of(surface.text, at) - search.block.index
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


def verdict_of(hunks: tuple[HunkVerdict, ...]) -> Verdict:
    found = {hunk.verdict for hunk in hunks}
    if found == {Verdict.APPLIED}:
        return Verdict.APPLIED
    if all(verdict.remains for verdict in found):
        return Verdict.PARTIAL
    order = list(Verdict)
    return min(found, key=order.index)


def places_to_try(surface: Surface, block: Block, scope: str | None) -> list[int]:
    """Every place of a hunk's old text, those in its scope first, then the nearest to its own line."""
    if not block.old:
        at = offset_of(surface.text, block.index)
        return [] if at is None else [at]
    found = find_all(surface.text, block.old)
    if len(found) < 2:
        return found

    def rank(at: int) -> tuple[bool, int]:
        elsewhere = scope is not None and scope_at_place(surface, block, at, "old") != scope
        return elsewhere, abs(line_of(surface.text, at) - block.index)

    return sorted(found, key=rank)
