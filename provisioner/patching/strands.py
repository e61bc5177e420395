"""States of the files that belong together, and which patches of a series explain what stands on disk. Pure.

A strand is one path, or the paths that renames of the series tie together. Its states are computed forward from
pristine bytes; what is on disk is explained by a choice for each patch (nothing of it, its present text, a former text,
or some of its hunks) only if carrying out that choice in order gives the very bytes. Guesses decide what is tried
first, never what is true.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from enum import Enum, auto
from itertools import combinations

from provisioner.digests import Digest, digest_of
from provisioner.patching.hunks import (
    NO_CUT,
    Applied,
    Refused,
    apply_change,
    cut_of,
    possible_origins,
    present_hunks,
    reverse_of,
)
from provisioner.patching.model import (
    Create,
    Cut,
    Delete,
    FileChange,
    Modify,
    Rename,
    SeriesPatch,
    Verdict,
    paths_of,
)
from provisioner.patching.places import Shift
from provisioner.records import dataclass

_MOST_CHOICES = 256
_MOST_PARTIAL_CHOICES = 256
_MOST_STEPS_BACK = 256
_MOST_FOR_ALL = 4
_MOST_HIDDEN = 4

Contents = tuple[bytes | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Strand:
    """Paths that belong together, and the series' changes on them: per patch that has any, in order."""

    paths: tuple[str, ...]
    links: tuple["Link", ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What one patch of the series does to one strand; ``formers`` are what its older texts did."""

    patch: int
    changes: tuple[FileChange, ...]
    cuts: Mapping[str, Cut]
    formers: tuple[tuple[FileChange, ...], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Contents in the order of the strand's paths (None: no file), and what each patch so far moved in each."""

    contents: Contents = field(repr=False)
    shifts: tuple[tuple[tuple[Shift, ...], ...], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One link carried out on one state: an outcome per change; the state after is None unless all were applied."""

    before: State
    after: State | None
    outcomes: tuple[tuple[FileChange, Applied | Refused], ...]

    @property
    def stands_already(self) -> bool:
        """Whether every change's result is in the state before."""
        return bool(self.outcomes) and all(
            isinstance(done, Refused) and done.verdict is Verdict.APPLIED for _, done in self.outcomes
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Which links, carried out in order, give the bytes that were to be explained: by patch number.

    ``former`` are patches of which an older text is there, ``partial`` those of which only the given hunks (path and
    index) are.
    """

    applied: frozenset[int] = frozenset()
    former: frozenset[int] = frozenset()
    partial: Mapping[int, frozenset[tuple[str, int]]] = field(default_factory=dict)


def tie_strands(series: Sequence[SeriesPatch], skipped: Mapping[int, frozenset[str]]) -> tuple[Strand, ...]:
    """The strands of a series; ``skipped`` has, per patch number, the paths that do not count."""
    joined: dict[str, str] = {}

    def root(path: str) -> str:
        while joined.setdefault(path, path) != path:
            path = joined[path]
        return path

    every = [change for item in series for text in (item.patch, *item.former) for change in text.changes]
    for change in every:
        for path in paths_of(change):
            joined[root(path)] = root(change.path)
    groups: dict[str, list[str]] = {}
    for path in joined:
        groups.setdefault(root(path), []).append(path)
    links: dict[str, list[Link]] = {}
    for number, item in enumerate(series):
        for name, link in _links_of(number, item, skipped.get(number, frozenset()), root).items():
            links.setdefault(name, []).append(link)
    return tuple(Strand(paths=tuple(sorted(paths)), links=tuple(links.get(name, ()))) for name, paths in groups.items())


def _links_of(number: int, item: SeriesPatch, skipped: frozenset[str], root: Callable[[str], str]) -> dict[str, Link]:
    """What one patch does to each strand, by the strand's root."""
    present = _by_root([change for change in item.patch.changes if change.path not in skipped], root)
    formers = [_by_root(text.changes, root) for text in item.former]
    names = dict.fromkeys(name for found in (present, *formers) for name in found)
    return {
        name: Link(
            patch=number,
            changes=tuple(present.get(name, ())),
            cuts=item.cuts,
            formers=tuple(tuple(found[name]) for found in formers if name in found),
        )
        for name in names
    }


def _by_root(changes: Sequence[FileChange], root: Callable[[str], str]) -> dict[str, list[FileChange]]:
    found: dict[str, list[FileChange]] = {}
    for change in changes:
        found.setdefault(root(change.path), []).append(change)
    return found


# ---- one step forward


def carry_out(strand: Strand, state: State, link: Link, changes: Sequence[FileChange] | None = None) -> Step:
    """Carry out a link's changes (or the given ones in their stead), each on its predecessor's output."""
    contents = dict(zip(strand.paths, state.contents, strict=True))
    shifts = dict(zip(strand.paths, state.shifts or ((),) * len(strand.paths), strict=True))
    outcomes: list[tuple[FileChange, Applied | Refused]] = []
    for change in link.changes if changes is None else changes:
        source = change.source if isinstance(change, Rename) else change.path
        done = _carry_out_one(contents, change, link.cuts.get(change.path, NO_CUT), shifts[source])
        outcomes.append((change, done))
        if isinstance(done, Applied):
            contents[source] = None
            contents[change.path] = done.content
            shifts[change.path] = (*shifts[source], _shifts_of(change, done))
    whole = all(isinstance(done, Applied) for _, done in outcomes)
    after = State(contents=tuple(contents.values()), shifts=tuple(shifts.values())) if whole else None
    return Step(before=state, after=after, outcomes=tuple(outcomes))


def _carry_out_one(
    contents: Mapping[str, bytes | None], change: FileChange, cut: Cut, shifts: Sequence[Sequence[Shift]]
) -> Applied | Refused:
    if not isinstance(change, Rename):
        return apply_change(contents[change.path], change, cut, shifts)
    source, target = contents[change.source], contents[change.path]
    if source is None and target is not None:
        stays = Modify(path=change.path, hunks=change.hunks, old_mode=change.old_mode, new_mode=change.new_mode)
        done = apply_change(target, stays, cut) if change.hunks else Refused(verdict=Verdict.APPLIED, hunks=())
        return done if isinstance(done, Refused) else Refused(verdict=Verdict.CONFLICT, hunks=(), why=_HALF_RENAMED)
    if target is not None:
        return Refused(verdict=Verdict.CONFLICT, hunks=(), why="a file is there already under the new name")
    return apply_change(source, change, cut, shifts)


_HALF_RENAMED = "the file has its new name already, but not the changes"


def _shifts_of(change: FileChange, done: Applied) -> tuple[Shift, ...]:
    if not isinstance(change, Modify | Rename):
        return ()
    found: list[Shift] = []
    for hunk, place in zip(change.hunks, done.hunks, strict=True):
        start = hunk.old_start + (place.offset or 0) - (1 if hunk.old_count else 0)
        if hunk.new_count != hunk.old_count:
            found.append(Shift(after=start + hunk.old_count, by=hunk.new_count - hunk.old_count))
    return tuple(found)


# ---- explaining what is there


def explain(strand: Strand, pristine: Contents, found: Contents) -> Explanation | None:
    """Which patches, carried out on ``pristine`` in order, give ``found``; None where no choice that was tried does.

    The longest run from the start of the series comes first, then choices among the present texts, then former texts,
    then single hunks.
    """
    return (
        _explain_by_prefix(strand, pristine, found)
        or _explain_by_choice(strand, pristine, found)
        or _explain_by_former(strand, pristine, found)
        or _explain_by_hunks(strand, pristine, found)
    )


def _explain_by_prefix(strand: Strand, pristine: Contents, found: Contents) -> Explanation | None:
    state = State(contents=pristine)
    applied: list[int] = []
    best: Explanation | None = Explanation() if pristine == found else None
    for link in strand.links:
        if not link.changes:
            continue
        after = carry_out(strand, state, link).after
        if after is None:
            continue
        state = after
        applied.append(link.patch)
        if state.contents == found:
            best = Explanation(applied=frozenset(applied))
    return best


def _explain_by_choice(strand: Strand, pristine: Contents, found: Contents) -> Explanation | None:
    links = [link for link in strand.links if link.changes]
    every = len(links) <= _MOST_FOR_ALL
    options = [_options(strand, link, found, every=every) for link in links]
    return _search(strand, pristine, found, links, options, _MOST_CHOICES)


def _explain_by_former(strand: Strand, pristine: Contents, found: Contents) -> Explanation | None:
    links = [link for link in strand.links if link.changes or link.formers]
    if not any(link.formers for link in links):
        return None
    every = len(links) <= _MOST_FOR_ALL
    options = [_options(strand, link, found, every=every) + _former_options(link) for link in links]
    return _search(strand, pristine, found, links, options, _MOST_CHOICES)


def _explain_by_hunks(strand: Strand, pristine: Contents, found: Contents) -> Explanation | None:
    links = [link for link in strand.links if link.changes]
    options = [_hunk_options(strand, link, found) for link in links]
    return _search(strand, pristine, found, links, options, _MOST_PARTIAL_CHOICES)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Option:
    """One way in which a patch may be there: these changes (none: not at all)."""

    changes: tuple[FileChange, ...]
    is_former: bool = False
    is_part: bool = False


_ABSENT = _Option(changes=())


def _options(strand: Strand, link: Link, found: Contents, *, every: bool) -> list[_Option]:
    """Present or absent, the likelier first; one alone where the text on disk leaves little doubt and ``every`` is not
    asked for."""
    whole = _Option(changes=link.changes)
    look = _look_of(strand, link, found)
    likely = [_ABSENT, whole] if look is _Look.ABSENT else [whole, _ABSENT]
    return likely if every or look is _Look.UNCLEAR else likely[:1]


class _Look(Enum):
    """What the text on disk suggests about a patch; later patches can hide it."""

    THERE = auto()
    ABSENT = auto()
    UNCLEAR = auto()


def _look_of(strand: Strand, link: Link, found: Contents) -> _Look:
    if not link.changes:
        return _Look.ABSENT
    contents = dict(zip(strand.paths, found, strict=True))
    counts = [_presence(contents, change, link.cuts.get(change.path, NO_CUT)) for change in link.changes]
    present, absent, total = (sum(column) for column in zip(*counts, strict=True))
    if present == total and absent == 0:
        return _Look.THERE
    return _Look.ABSENT if absent == total and present == 0 else _Look.UNCLEAR


def _presence(contents: Mapping[str, bytes | None], change: FileChange, cut: Cut) -> tuple[int, int, int]:
    """Of how many parts of a change the result seems to stand in the contents, of how many the start, and of how many
    there are."""
    content = contents[change.path]
    if isinstance(change, Create | Delete) or content is None or not change.hunks:
        present = int((content is None) == isinstance(change, Delete))
        return present, 1 - present, 1
    present = len(present_hunks(content, change, cut))
    return present, len(present_hunks(content, reverse_of(change), cut)), len(change.hunks)


def _former_options(link: Link) -> list[_Option]:
    return [_Option(changes=changes, is_former=True) for changes in link.formers if changes != link.changes]


def _hunk_options(strand: Strand, link: Link, found: Contents) -> list[_Option]:
    """Choices of hunks, the likelier first: those whose result stands on disk, with each choice of those that a later
    patch may have hidden, because neither their result nor their start stands there; then all, then none."""
    look = _look_of(strand, link, found)
    if look is not _Look.UNCLEAR:
        return [_Option(changes=link.changes) if look is _Look.THERE else _ABSENT]
    contents = dict(zip(strand.paths, found, strict=True))
    sure: list[tuple[FileChange, frozenset[int]]] = []
    hidden: list[tuple[int, int]] = []
    for change in link.changes:
        cut, content = link.cuts.get(change.path, NO_CUT), contents[change.path]
        every = frozenset(hunk.index for hunk in change.hunks)
        if not isinstance(change, Modify) or content is None or not change.hunks:
            if _presence(contents, change, cut)[0]:
                sure.append((change, every))
            continue
        present = present_hunks(content, change, cut)
        absent = present_hunks(content, reverse_of(change), cut)
        sure.append((change, present))
        hidden += [(len(sure) - 1, index) for index in sorted(every - present - absent)]
    whole = _Option(changes=link.changes)
    parts = [_part(sure, chosen) for chosen in _subsets(hidden[:_MOST_HIDDEN])]
    options = [whole if part.changes == whole.changes else part for part in parts if part.changes]
    return list(dict.fromkeys([*options, whole, _ABSENT]))


def _part(sure: Sequence[tuple[FileChange, frozenset[int]]], chosen: Sequence[tuple[int, int]]) -> _Option:
    """The changes with their sure hunks and the chosen ones (position of the change, index), left out where empty."""
    changes: list[FileChange] = []
    for at, (change, indices) in enumerate(sure):
        wanted = indices | {index for place, index in chosen if place == at}
        hunks = tuple(hunk for hunk in change.hunks if hunk.index in wanted)
        if hunks or not isinstance(change, Modify) or not change.hunks:
            changes.append(replace(change, hunks=hunks))
    return _Option(changes=tuple(changes), is_part=True)


def _subsets(items: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], ...]]:
    """All choices of ``items``, the largest first."""
    for size in range(len(items), -1, -1):
        yield from combinations(items, size)


def _search(
    strand: Strand,
    pristine: Contents,
    found: Contents,
    links: Sequence[Link],
    options: Sequence[Sequence[_Option]],
    most: int,
) -> Explanation | None:
    """Try choices, likeliest first, sharing every common beginning; ``most`` bounds the steps that are carried out."""
    left = [most]
    dead: set[tuple[int, Contents]] = set()

    def descend(at: int, state: State, chosen: tuple[_Option, ...]) -> tuple[_Option, ...] | None:
        if at == len(links):
            return chosen if state.contents == found else None
        key = (at, state.contents)
        if key in dead or left[0] <= 0:
            return None
        for option, after in _branches(strand, state, links[at], options[at]):
            left[0] -= 1
            if (done := descend(at + 1, after, (*chosen, option))) is not None:
                return done
        dead.add(key)
        return None

    chosen = descend(0, State(contents=pristine), ())
    return None if chosen is None else _explanation(links, chosen)


def _branches(strand: Strand, state: State, link: Link, options: Sequence[_Option]) -> Iterator[tuple[_Option, State]]:
    """The options that can be carried out, with the state after each; where none can, the patch is absent."""
    stuck = True
    for option in options:
        after = _take(strand, state, link, option) if option.changes else state
        if after is not None:
            stuck = False
            yield option, after
    if stuck:
        yield _ABSENT, state


def _take(strand: Strand, state: State, link: Link, option: _Option) -> State | None:
    if not option.is_former:
        return carry_out(strand, state, link, option.changes).after
    # A former text comes without scopes; its own lines will do, since only the resulting bytes count.
    contents = dict(zip(strand.paths, state.contents, strict=True))
    cuts: dict[str, Cut] = {}
    for change in option.changes:
        content = contents[change.source if isinstance(change, Rename) else change.path]
        cuts[change.path] = (cut_of(content, change) if content is not None else None) or NO_CUT
    return carry_out(strand, state, replace(link, cuts=cuts), option.changes).after


def _explanation(links: Sequence[Link], chosen: Sequence[_Option]) -> Explanation:
    applied: set[int] = set()
    former: set[int] = set()
    partial: dict[int, frozenset[tuple[str, int]]] = {}
    for link, option in zip(links, chosen, strict=True):
        if not option.changes:
            continue
        if option.is_former:
            former.add(link.patch)
        elif option.is_part:
            partial[link.patch] = frozenset((c.path, hunk.index) for c in option.changes for hunk in c.hunks)
        else:
            applied.add(link.patch)
    return Explanation(applied=frozenset(applied), former=frozenset(former), partial=partial)


# ---- winning pristine bytes back


_Ways = Callable[[Strand, Link, Contents], Iterator[Contents]]


def win_back(strand: Strand, found: Contents, recorded: Sequence[Digest | None]) -> Contents | None:
    """The contents with the recorded digests (None: no file), reached by taking patches back from ``found``; None where
    no way back that was tried leads there."""
    return _go_back(strand, found, recorded, _ways_back) or _go_back(strand, found, recorded, _ways_back_in_part)


def has_digests(contents: Contents, recorded: Sequence[Digest | None]) -> bool:
    """Whether each content has its recorded digest."""
    return all(
        content is None if digest is None else content is not None and digest_of(content) == digest
        for content, digest in zip(contents, recorded, strict=True)
    )


def _go_back(strand: Strand, found: Contents, recorded: Sequence[Digest | None], ways: _Ways) -> Contents | None:
    left = [_MOST_STEPS_BACK]
    seen: set[tuple[int, Contents]] = set()
    judged: dict[Contents, bool] = {}

    def descend(at: int, contents: Contents) -> Contents | None:
        if contents not in judged:
            judged[contents] = has_digests(contents, recorded)
        if judged[contents]:
            return contents
        if at < 0 or (at, contents) in seen or left[0] <= 0:
            return None
        seen.add((at, contents))
        left[0] -= 1
        found_way = False
        for origin in ways(strand, strand.links[at], contents):
            found_way = True
            if (done := descend(at - 1, origin)) is not None:
                return done
        # What looks wholly there is taken back where it can be; a few patches leave time to doubt even that.
        is_there = len(strand.links) > _MOST_FOR_ALL and _look_of(strand, strand.links[at], contents) is _Look.THERE
        return None if found_way and is_there else descend(at - 1, contents)

    return descend(len(strand.links) - 1, found)


def _ways_back(strand: Strand, link: Link, contents: Contents) -> Iterator[Contents]:
    for number, changes in enumerate((link.changes, *link.formers)):
        if changes:
            yield from _origins(strand, changes, link.cuts if number == 0 else {}, contents)


def _ways_back_in_part(strand: Strand, link: Link, contents: Contents) -> Iterator[Contents]:
    for option in _hunk_options(strand, link, contents):
        if option.changes:
            yield from _origins(strand, option.changes, link.cuts, contents)


def _origins(
    strand: Strand, changes: Sequence[FileChange], cuts: Mapping[str, Cut], contents: Contents
) -> Iterator[Contents]:
    """Contents before ``changes``, taken back from the last to the first."""
    here = dict(zip(strand.paths, contents, strict=True))

    def descend(at: int, contents: dict[str, bytes | None]) -> Iterator[Contents]:
        if at < 0:
            yield tuple(contents.values())
            return
        change = changes[at]
        cut = cuts.get(change.path, NO_CUT)
        source = change.source if isinstance(change, Rename) else change.path
        if source != change.path and contents[source] is not None:
            return
        for origin in possible_origins(contents[change.path], change, cut):
            yield from descend(at - 1, {**contents, change.path: None, source: origin})

    yield from descend(len(changes) - 1, here)
