"""A series of patches on a distribution's files: a verdict for each patch, each on its predecessor's output. Pure.

Proof is by digest alone. The states of every file are computed forward from its pristine bytes, which are given or won
back from what is on disk (reversal must end at RECORD's digest). A patch is ``applied`` in a file only where carrying
out a choice of patches on the pristine bytes, in order, gives the very bytes on disk and the patch is in that choice.
What no choice explains is ``foreign``.

A patch is whole or not at all: where one of its files refuses it, the states that follow hold nothing of it, and its
successors are judged without it. The same function serves an installed tree and a wheel (``content`` is ``pristine``).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from types import MappingProxyType

from provisioner.digests import Digest, digest_of
from provisioner.errors import HashMismatchError
from provisioner.patching.hunks import Applied, Refused, apply_change, cut_of, present_hunks
from provisioner.patching.model import (
    Create,
    Cut,
    Delete,
    FileChange,
    FileFacts,
    FileVerdict,
    HunkVerdict,
    Modify,
    Patch,
    PatchVerdict,
    Rename,
    SeriesPatch,
    SeriesVerdict,
    Verdict,
    displacing,
    paths_of,
)
from provisioner.patching.shipping import Missing, Shipment
from provisioner.patching.strands import (
    Contents,
    Explanation,
    Link,
    State,
    Step,
    Strand,
    carry_out,
    explain,
    has_digests,
    tie_strands,
    win_back,
)
from provisioner.records import dataclass
from provisioner.wheels.record import Record

_ORDER = {verdict: place for place, verdict in enumerate(Verdict)}


def touched_paths(series: Sequence[SeriesPatch]) -> tuple[str, ...]:
    """Every path that the series, former texts included, reads or writes; sorted. What :func:`judge_series` needs."""
    every = {
        path
        for item in series
        for text in (item.patch, *item.former)
        for change in text.changes
        for path in paths_of(change)
    }
    return tuple(sorted(every))


def judge_series(
    series: Sequence[SeriesPatch], files: Mapping[str, FileFacts], record: Record | None = None
) -> SeriesVerdict:
    """Judge a series on the files that it touches.

    ``files`` has an entry for each of :func:`touched_paths`; ``record`` is the distribution's RECORD, from which is
    known what a wheel ships at all and where a missing file went. Raises HashMismatchError where given pristine bytes
    are not the recorded ones, KeyError where a touched path has no entry.
    """
    facts = {path: files[path] for path in touched_paths(series)}
    _check_pristine(facts)
    missing = Shipment(record, facts).missing_of(series)
    strands = tie_strands(series, {number: frozenset(paths) for number, paths in missing.items()})
    judge = _Judge(series, facts, missing, strands)
    return judge.verdict()


def _check_pristine(facts: Mapping[str, FileFacts]) -> None:
    for path, fact in facts.items():
        if fact.pristine is not None and fact.recorded is not None and digest_of(fact.pristine) != fact.recorded:
            raise HashMismatchError(
                "the pristine bytes at hand are not those that RECORD names",
                where=path,
                expected=fact.recorded,
                found=digest_of(fact.pristine),
            )


def learn_cuts(series: Sequence[SeriesPatch], bases: Mapping[str, bytes]) -> tuple[SeriesPatch, ...]:
    """The series with cuts worked out from the pristine files of the release that it was cut against.

    A patch may have been cut against those files or against the output of its predecessors on them: a state counts in
    which every hunk stands at its own line, the first and the last being asked before those between. Where several
    count, only scopes that all of them give are kept. Cuts whose scopes are known already stay, and so do paths without
    a base.
    """
    states: dict[str, list[bytes]] = {path: [content] for path, content in bases.items()}
    out: list[SeriesPatch] = []
    for item in series:
        cuts = dict(item.cuts)
        for path, changes in _changes_by_path(item.patch).items():
            first = changes[0]
            known = states.get(first.source if isinstance(first, Rename) else path, [])
            learnt = _learn_cut(changes, known)
            if learnt is not None and not cuts.get(path, Cut()).scopes:
                cuts[path] = learnt
        done = replace(item, cuts=MappingProxyType(cuts))
        _advance(states, done)
        out.append(done)
    return tuple(out)


def _changes_by_path(patch: Patch) -> dict[str, list[FileChange]]:
    found: dict[str, list[FileChange]] = {}
    for change in patch.changes:
        found.setdefault(change.path, []).append(change)
    return found


def _learn_cut(changes: Sequence[FileChange], states: Sequence[bytes]) -> Cut | None:
    likely, others = dict.fromkeys((*states[:1], *states[-1:])), dict.fromkeys(states[1:-1])
    cuts = _cuts_in(changes, likely) or _cuts_in(changes, others)
    if len(cuts) < 2:
        return cuts[0] if cuts else None
    scopes = tuple(
        found[0] if len(set(found)) == 1 else None for found in zip(*(cut.scopes for cut in cuts), strict=True)
    )
    return Cut(scopes=scopes)


def _cuts_in(changes: Sequence[FileChange], states: Iterable[bytes]) -> list[Cut]:
    return [cut for state in states if (cut := _cut_in(changes, state)) is not None]


def _cut_in(changes: Sequence[FileChange], content: bytes) -> Cut | None:
    """The cut of one path's changes in a row, if ``content`` may be what the first was cut against."""
    first = cut_of(content, changes[0])
    if first is None or len(changes) == 1:
        return first
    done = apply_change(content, changes[0], first)
    rest = _cut_in(changes[1:], done.content) if isinstance(done, Applied) and done.content is not None else None
    return None if rest is None else Cut(digest=first.digest, scopes=first.scopes + rest.scopes)


def _advance(states: dict[str, list[bytes]], item: SeriesPatch) -> None:
    """Carry one patch out on the last state of each file, where it goes on without doubt."""
    for strand in tie_strands([item], {}):
        contents = tuple(states[path][-1] if path in states else None for path in strand.paths)
        for link in strand.links:
            after = carry_out(strand, State(contents=contents), link).after
            if after is None:
                continue
            for path, content in zip(strand.paths, after.contents, strict=True):
                if content is not None:
                    states.setdefault(path, []).append(content)


@dataclass(slots=True)
class _Track:
    """One strand while a series is judged: what is known of it, and its state after the patches so far."""

    strand: Strand
    found: Contents
    pristine: Contents | None
    state: State
    explanation: Explanation | None = None
    history: list[tuple[int, State]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Turn:
    """One patch in one strand: its step there."""

    track: _Track
    link: Link
    step: Step


class _Judge:
    """Walks a series once, from the first patch to the last."""

    def __init__(
        self,
        series: Sequence[SeriesPatch],
        facts: Mapping[str, FileFacts],
        missing: Mapping[int, Mapping[str, Missing]],
        strands: Sequence[Strand],
    ) -> None:
        self._series = series
        self._facts = facts
        self._missing = missing
        self._tracks = [_track(strand, facts) for strand in strands]
        self._turns: list[list[_Turn]] = []
        self._modes: dict[str, int] = {}
        self._old_modes: dict[str, int] = {}
        # Those that are proven already; what a track holds on to keeps its id.
        self._digests: dict[int, Digest] = {
            id(fact.pristine): fact.recorded
            for fact in facts.values()
            if fact.pristine is not None and fact.recorded is not None
        }
        self._stale: frozenset[int] = frozenset()
        self._committed: set[int] = set()

    def verdict(self) -> SeriesVerdict:
        self._walk()
        for track in self._tracks:
            track.explanation = _explain(track)
            self._stale |= track.explanation.former if track.explanation else frozenset()
        patches = tuple(self._judge_patch(number, turns) for number, turns in enumerate(self._turns))
        final: dict[str, bytes | None] = {}
        pristine: dict[str, bytes | None] = {}
        states: dict[str, tuple[bytes | None, ...]] = {}
        for track in self._tracks:
            if track.pristine is None or not track.strand.links:
                continue
            for at, path in enumerate(track.strand.paths):
                final[path] = track.state.contents[at]
                pristine[path] = track.pristine[at]
                states[path] = tuple(dict.fromkeys(contents[at] for contents in _states_of(track)))
        return SeriesVerdict(
            patches=patches,
            final=MappingProxyType(final),
            final_digests=MappingProxyType({path: self._digest(content) for path, content in final.items()}),
            final_modes=MappingProxyType(self._modes),
            pristine_modes=MappingProxyType(self._old_modes),
            pristine=MappingProxyType(pristine),
            states=MappingProxyType(states),
        )

    def _digest(self, content: bytes | None) -> Digest | None:
        """The digest of a content that a track holds on to, worked out once."""
        if content is None:
            return None
        known = self._digests.get(id(content))
        if known is None:
            known = self._digests[id(content)] = digest_of(content)
        return known

    # ---- forward, patch by patch

    def _walk(self) -> None:
        by_patch: dict[int, list[tuple[_Track, Link]]] = {}
        for track in self._tracks:
            for link in track.strand.links:
                by_patch.setdefault(link.patch, []).append((track, link))
        for number in range(len(self._series)):
            turns = [
                _Turn(track, link, carry_out(track.strand, track.state, link))
                for track, link in by_patch.get(number, [])
                if link.changes
            ]
            self._turns.append(turns)
            if self._goes_on(number, turns):
                self._commit(turns)
                self._committed.add(number)

    def _goes_on(self, number: int, turns: Sequence[_Turn]) -> bool:
        blocked = any(why.verdict is not Verdict.NOT_SHIPPED for why in self._missing.get(number, {}).values())
        return not blocked and all(turn.step.after is not None and turn.track.pristine is not None for turn in turns)

    def _commit(self, turns: Sequence[_Turn]) -> None:
        for turn in turns:
            assert turn.step.after is not None
            turn.track.state = turn.step.after
            turn.track.history.append((turn.link.patch, turn.step.after))
            for change in turn.link.changes:
                mode = _mode_after(change)
                if mode is None:
                    continue
                self._modes[change.path] = mode
                if isinstance(change, Modify) and change.old_mode is not None:
                    self._old_modes.setdefault(change.path, change.old_mode)

    # ---- verdicts

    def _judge_patch(self, number: int, turns: Sequence[_Turn]) -> PatchVerdict:
        item = self._series[number]
        files: dict[str, FileVerdict] = {}
        for path, why in self._missing.get(number, {}).items():
            files[path] = _missing_file(path, item.patch, why)
        same_as = self._same_as(number, turns)
        for turn in turns:
            files.update(self._judge_turn(number, turn, same_as))
        ordered = tuple(files[path] for path in dict.fromkeys(change.path for change in item.patch.changes))
        verdict = _verdict_over(item, ordered, stale=number in self._stale)
        return PatchVerdict(
            id=item.patch.id,
            source=item.patch.source,
            verdict=verdict,
            files=ordered,
            why=_why_of(verdict, ordered),
            same_as=self._series[same_as].patch.id if same_as is not None else None,
        )

    def _judge_turn(self, number: int, turn: _Turn, same_as: int | None) -> dict[str, FileVerdict]:
        by_path: dict[str, list[tuple[FileChange, Applied | Refused]]] = {}
        for change, done in turn.step.outcomes:
            by_path.setdefault(change.path, []).append((change, done))
        return {path: self._judge_file(number, turn, path, parts, same_as) for path, parts in by_path.items()}

    def _judge_file(
        self,
        number: int,
        turn: _Turn,
        path: str,
        parts: Sequence[tuple[FileChange, Applied | Refused]],
        same_as: int | None,
    ) -> FileVerdict:
        at = turn.track.strand.paths.index(path)
        forward = min((done.verdict for _, done in parts), key=_ORDER.__getitem__)
        hunks = tuple(hunk for _, done in parts for hunk in done.hunks)
        why = next((done.why for _, done in parts if isinstance(done, Refused) and done.why), "")
        verdict, reason = self._file_verdict(number, turn, path, forward, same_as)
        explanation = turn.track.explanation
        if explanation is not None and not verdict.holds:
            hunks = self._name_displacing(turn, path, hunks)
        if explanation is None:
            hunks = _hunks_on_disk(self._facts[path], parts, hunks)
        elif number in explanation.partial:
            present = {index for found, index in explanation.partial[number] if found == path}
            hunks = tuple(replace(h, verdict=Verdict.APPLIED, why="") if h.index in present else h for h in hunks)
        hunks = tuple(_restate(hunk, verdict) for hunk in hunks)
        after = turn.step.after
        return FileVerdict(
            path=path,
            verdict=verdict,
            before=self._digest(turn.step.before.contents[at]),
            after=None if after is None else self._digest(after.contents[at]),
            hunks=hunks,
            why=_name_in_reason(displacing(hunks), reason or ("" if verdict.holds else why)),
        )

    def _name_displacing(self, turn: _Turn, path: str, hunks: tuple[HunkVerdict, ...]) -> tuple[HunkVerdict, ...]:
        """Say of each hunk without a place which earlier patch took it: the last that found the place and left none."""
        track, link = turn.track, turn.link
        earlier = [(patch, state) for patch, state in track.history if patch < link.patch]
        if track.pristine is None or not earlier:
            return hunks
        states = [State(contents=track.pristine), *(state for _, state in earlier)]
        fitting = [_fitting_hunks(carry_out(track.strand, state, link), path) for state in states]
        taken: dict[int, str] = {}
        for at, (patch, _) in enumerate(earlier):
            taken |= dict.fromkeys(fitting[at] - fitting[at + 1], self._series[patch].patch.id)
        return tuple(
            hunk if hunk.index in fitting[-1] else replace(hunk, displaced_by=taken.get(hunk.index)) for hunk in hunks
        )

    def _file_verdict(
        self, number: int, turn: _Turn, path: str, forward: Verdict, same_as: int | None
    ) -> tuple[Verdict, str]:
        """The verdict of one file from its state on disk and its place in the series; with a reason where needed."""
        explanation = turn.track.explanation
        if explanation is None:
            return Verdict.FOREIGN, _why_foreign(self._facts[path])
        if same_as is not None:
            return Verdict.ALREADY_IN_SERIES, ""
        if forward is Verdict.APPLIED:
            return self._already_there(turn)
        if not forward.applies:
            there = number in explanation.applied
            return forward, "it stands on disk, but not on the output of its predecessors" if there else ""
        if number in explanation.applied and self._mode_is_right(turn.link, path):
            return Verdict.APPLIED, ""
        if number in explanation.former:
            return Verdict.STALE_VERSION, "an older text of this patch is applied"
        if number in explanation.partial:
            return Verdict.PARTIAL, "some of its hunks are applied"
        return forward, ""

    def _already_there(self, turn: _Turn) -> tuple[Verdict, str]:
        """The verdict where the state before the patch holds its result already."""
        assert turn.track.pristine is not None
        if carry_out(turn.track.strand, State(contents=turn.track.pristine), turn.link).stands_already:
            return Verdict.PROBABLY_MERGED, "the build has it already"
        return Verdict.CONFLICT, "its text stands there through earlier patches, but none of them is the same change"

    def _mode_is_right(self, link: Link, path: str) -> bool:
        """Whether the file's executable bits are as wanted, as far as the patch has a say in them.

        Bits that are not known count as right, except where the patch says nothing but bits.
        """
        changes = [change for change in link.changes if change.path == path]
        if all(_mode_after(change) is None for change in changes):
            return True
        mode, wanted = self._facts[path].mode, self._modes.get(path)
        if mode is None or wanted is None:
            return any(change.hunks for change in changes)
        return (mode & 0o111 != 0) == (wanted & 0o111 != 0)

    def _same_as(self, number: int, turns: Sequence[_Turn]) -> int | None:
        """The earlier patch of the series that makes the same change in each file of this one."""
        if not turns or all(turn.step.after is not None for turn in turns):
            return None
        for earlier in sorted(self._committed):
            if earlier >= number:
                return None
            firsts = {id(turn.track): turn for turn in self._turns[earlier]}
            if all(id(turn.track) in firsts and _does_the_same(firsts[id(turn.track)], turn) for turn in turns):
                return earlier
        return None


def _does_the_same(first: _Turn, second: _Turn) -> bool:
    if first.step.after is None:
        return False
    again = carry_out(second.track.strand, first.step.before, second.link).after
    return again is not None and again.contents == first.step.after.contents


def _name_in_reason(displacing: Sequence[str], why: str) -> str:
    names = ", ".join(displacing)
    if not names:
        return why
    verbs = "come before it and change" if len(displacing) > 1 else "comes before it and changes"
    return f"{names} {verbs} these lines" + (f"; {why}" if why else "")


def _fitting_hunks(step: Step, path: str) -> frozenset[int]:
    """The hunks for a path that have their place in the state before the step."""
    return frozenset(
        hunk.index
        for change, done in step.outcomes
        if change.path == path
        for hunk in done.hunks
        if hunk.verdict.applies
    )


def _track(strand: Strand, facts: Mapping[str, FileFacts]) -> _Track:
    found = tuple(facts[path].content for path in strand.paths)
    pristine = _pristine_of(strand, facts, found)
    return _Track(strand, found, pristine, State(contents=found if pristine is None else pristine))


def _states_of(track: _Track) -> tuple[Contents, ...]:
    known = () if track.pristine is None else (track.pristine,)
    return (*known, *(state.contents for _, state in track.history))


def _explain(track: _Track) -> Explanation | None:
    """What is on disk in terms of the series; the series' own states, the latest first, before any other choice."""
    if track.pristine is None:
        return None
    for number in range(len(track.history), 0, -1):
        if track.history[number - 1][1].contents == track.found:
            return Explanation(applied=frozenset(patch for patch, _ in track.history[:number]))
    if track.found == track.pristine:
        return Explanation()
    return explain(track.strand, track.pristine, track.found)


def _pristine_of(strand: Strand, facts: Mapping[str, FileFacts], found: Contents) -> Contents | None:
    """The strand's contents as shipped: given, found on disk, or won back; proven by RECORD's digests."""
    known = tuple(facts[path].pristine for path in strand.paths)
    recorded = tuple(facts[path].recorded for path in strand.paths)
    if all(content is not None or digest is None for content, digest in zip(known, recorded, strict=True)):
        return known
    if has_digests(found, recorded):
        return found
    digests = tuple(
        digest if content is None else digest_of(content) for content, digest in zip(known, recorded, strict=True)
    )
    return win_back(strand, found, digests)


def _mode_after(change: FileChange) -> int | None:
    match change:
        case Create(mode=mode):
            return mode
        case Modify(new_mode=mode) | Rename(new_mode=mode):
            return mode
        case Delete():
            return None


def _missing_file(path: str, patch: Patch, why: Missing) -> FileVerdict:
    hunks = tuple(
        HunkVerdict(index=hunk.index, verdict=why.verdict, line=hunk.old_start)
        for change in patch.changes
        if change.path == path
        for hunk in change.hunks
    )
    return FileVerdict(
        path=path, verdict=why.verdict, before=None, after=None, hunks=hunks, why=why.why, moved_to=why.moved_to
    )


def _why_foreign(fact: FileFacts) -> str:
    if fact.content is None:
        return "the distribution ships this file, but nothing is there"
    if fact.recorded is None:
        return "a file that the distribution does not ship is there, and no state of the series is like it"
    return "the file is neither as shipped nor any state of the series"


def _hunks_on_disk(
    fact: FileFacts, parts: Sequence[tuple[FileChange, Applied | Refused]], hunks: tuple[HunkVerdict, ...]
) -> tuple[HunkVerdict, ...]:
    """In a foreign file, say of each hunk whether its result stands there."""
    if fact.content is None:
        return tuple(replace(hunk, verdict=Verdict.FOREIGN) for hunk in hunks)
    present: set[int] = set()
    for change, _ in parts:
        if isinstance(change, Modify | Rename):
            present |= present_hunks(fact.content, change)
    return tuple(replace(hunk, verdict=Verdict.APPLIED if hunk.index in present else Verdict.FOREIGN) for hunk in hunks)


def _restate(hunk: HunkVerdict, verdict: Verdict) -> HunkVerdict:
    """Say of a hunk what its file's verdict means for it."""
    if verdict is Verdict.STALE_VERSION or (verdict.fits and not verdict.applies):
        return replace(hunk, verdict=verdict, why="")
    if hunk.verdict is Verdict.APPLIED and verdict is Verdict.PROBABLY_MERGED:
        return replace(hunk, verdict=verdict)
    return hunk


def _verdict_over(item: SeriesPatch, files: Sequence[FileVerdict], *, stale: bool) -> Verdict:
    """The verdict of a patch over its shipped files: the worst of theirs, a mixture with merged ones being partial."""
    found = {file.verdict for file in files} - {Verdict.NOT_SHIPPED}
    if not found:
        return Verdict.NOT_SHIPPED
    worst = min(found, key=_ORDER.__getitem__)
    if worst is Verdict.PROBABLY_MERGED and any(not other.merged for other in found):
        worst = Verdict.PARTIAL
    if item.in_history and worst is Verdict.PROBABLY_MERGED:
        return Verdict.MERGED_UPSTREAM
    if item.in_history and (worst is Verdict.CONFLICT or worst is Verdict.PARTIAL):
        return Verdict.PROBABLY_MERGED
    if stale and _ORDER[worst] > _ORDER[Verdict.STALE_VERSION]:
        return Verdict.STALE_VERSION
    return worst


def _why_of(verdict: Verdict, files: Sequence[FileVerdict]) -> str:
    if verdict.fits:
        return ""
    return next((f"{file.path}: {file.why}" for file in files if file.why and file.verdict is verdict), "")
