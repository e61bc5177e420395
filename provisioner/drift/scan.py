"""Judge series over many wheels, reading only what is needed: the head of each wheel, and each distinct file once."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from packaging.version import Version

from provisioner.digests import Digest
from provisioner.documents.recipe import DriftResponse
from provisioner.drift.explain import Account, explain_patch, tell_changes
from provisioner.drift.history import Ancestry, Witness, tell_history
from provisioner.drift.model import Build, Cell, Column, Cost, DriftReport, Unread, age_of, drift_key, respond
from provisioner.environment.facts import shipped_facts
from provisioner.errors import ProvisionError
from provisioner.index.lazy import Wheel
from provisioner.index.settings import IndexSettings
from provisioner.index.source import open_cache, open_wheel
from provisioner.index.transport import Transport
from provisioner.patching.model import Create, FileFacts, Patch, PatchVerdict, SeriesPatch
from provisioner.patching.series import judge_series, touched_paths
from provisioner.progress import Reporter
from provisioner.series.model import NamedPatch, Series
from provisioner.wheels.names import Candidate
from provisioner.wheels.record import Record

WORKERS = 8
_Key = tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One series that is judged: a recipe's, or patches from elsewhere under a name of their own."""

    name: str
    series_for: Callable[[Version], Series]
    responses: Mapping[str, DriftResponse]


@dataclass(frozen=True, kw_only=True)
class _Read:
    """One wheel, its RECORD and what each subject asks of it; ``key`` is equal for wheels that give the same answer."""

    build: Build
    wheel: Wheel
    record: Record
    series: Mapping[str, Series]
    ancestries: Mapping[str, Ancestry]
    key: _Key


def scan(
    subjects: Sequence[Subject],
    candidates: Sequence[Candidate],
    settings: IndexSettings,
    *,
    against: Sequence[str],
    reporter: Reporter,
    witness: Witness | None = None,
) -> DriftReport:
    """Judge every subject on every candidate. A wheel that cannot be read becomes a column that says why.

    Files with the same digests as in a wheel already judged are neither read nor judged again. ``witness`` is asked
    whether what upstream merged is in a build's history.
    """
    start = time.monotonic()
    cache = open_cache(settings)
    with Transport(settings) as transport, ThreadPoolExecutor(max_workers=WORKERS) as pool:
        open_one = partial(open_wheel, settings=settings, transport=transport, cache=cache)
        opened = list(pool.map(lambda item: _open(item, subjects, open_one, witness), candidates))
        reporter.amount(0, len(opened), "wheels")
        groups = _group(opened)
        judged = dict(zip(groups, pool.map(lambda reads: _judge(subjects, reads[0]), groups.values()), strict=True))
        for item in opened:
            if isinstance(item, _Read):
                item.wheel.close()
        traffic = transport.traffic
    names = tuple(sorted(subject.name for subject in subjects))
    columns = [_column(item, names, judged) for item in sorted(opened, key=lambda item: age_of(item.build))]
    reused = sum(len(reads) - 1 for reads in groups.values())
    cost = Cost(requests=traffic.requests, received=traffic.received, seconds=time.monotonic() - start, reused=reused)
    return DriftReport(against=tuple(sorted(set(against))), columns=tell_changes(columns), cost=cost)


def build_of(candidate: Candidate) -> Build:
    """The build that a candidate is a wheel of."""
    label = str(candidate.version)
    if candidate.commit is not None and f"g{candidate.commit[:7]}" not in label:
        label += f" ({candidate.commit[:9]})"
    return Build(
        label=label,
        version=candidate.version,
        filename=candidate.filename,
        commit=candidate.commit,
        variant=candidate.variant,
        uploaded=candidate.upload_time,
    )


@dataclass(frozen=True, kw_only=True)
class _Unread:
    build: Build
    failure: str


def _open(
    candidate: Candidate, subjects: Sequence[Subject], open_one: Callable[[Candidate], Wheel], witness: Witness | None
) -> _Read | _Unread:
    build = build_of(candidate)
    try:
        wheel = open_one(candidate)
        record = wheel.record()
    except ProvisionError as error:
        return _Unread(build=build, failure=str(error))
    series = {subject.name: subject.series_for(build.version) for subject in subjects}
    ancestries = _hear(witness, build, series.values()) if witness is not None else {}
    if ancestries:
        series = _with_history(series, ancestries)
    key = (_key_of(build, record, series), *ancestries.items())
    return _Read(build=build, wheel=wheel, record=record, series=series, ancestries=ancestries, key=key)


def _hear(witness: Witness, build: Build, series: Iterable[Series]) -> dict[str, Ancestry]:
    patches = (item.patch for found in series for item in (*found.patches, *found.unwanted))
    commits = sorted({item.merged_as for item in patches if item.merged_as is not None})
    return {commit: witness(commit, build) for commit in commits}


def _with_history(series: Mapping[str, Series], ancestries: Mapping[str, Ancestry]) -> dict[str, Series]:
    """The same series with what was heard; what several of them share, they share afterwards."""
    known: dict[int, SeriesPatch] = {}

    def told(item: NamedPatch) -> NamedPatch:
        ancestry = ancestries.get(item.patch.merged_as or "")
        if ancestry is None:
            return item
        heard = known.setdefault(id(item.patch), replace(item.patch, in_history=ancestry.is_ancestor))
        return replace(item, patch=heard)

    return {
        name: replace(found, patches=tuple(map(told, found.patches)), unwanted=tuple(map(told, found.unwanted)))
        for name, found in series.items()
    }


def _group(opened: Iterable[_Read | _Unread]) -> dict[_Key, list[_Read]]:
    """Wheels that give the same answer, because patches and all touched files are the same; the first is read."""
    groups: dict[_Key, list[_Read]] = {}
    for item in opened:
        if isinstance(item, _Read):
            groups.setdefault(item.key, []).append(item)
    return groups


def _key_of(build: Build, record: Record, asked: Mapping[str, Series]) -> _Key:
    texts: list[tuple[str, tuple[Digest, ...]]] = []
    paths: set[str] = set()
    created: set[str] = set()
    for name, series in asked.items():
        patches = _texts_of(series)
        texts.append((name, tuple(item.patch.digest for item in patches)))
        paths.update(touched_paths(patches))
        created.update(change.path for item in patches for change in item.patch.changes if isinstance(change, Create))
    # Where a file is missing, the answer says where it went, and that rests on the whole of RECORD.
    whole = build.filename if any(path not in record for path in paths - created) else ""
    return tuple(texts), tuple((path, record.digest(path)) for path in sorted(paths)), whole


def _judge(subjects: Sequence[Subject], read: _Read) -> tuple[Cell, ...] | ProvisionError:
    paths = {path for series in read.series.values() for path in _paths_of(series)}
    try:
        facts = shipped_facts(read.record, sorted(paths), read.wheel)
    except ProvisionError as error:
        return error
    judge = _Judge(facts, read.record)
    cells = (cell for subject in subjects for cell in _cells(subject, read, judge))
    return tuple(sorted(cells, key=lambda cell: cell.order))


_Answer = tuple[PatchVerdict, Account]


class _Judge:
    """Judges series on the files of one wheel; what several subjects share, once."""

    def __init__(self, facts: Mapping[str, FileFacts], record: Record) -> None:
        self._facts = facts
        self._record = record
        self._known: dict[tuple[int, ...], tuple[_Answer, ...]] = {}
        self._accounts: dict[tuple[PatchVerdict, Digest], Account] = {}

    def answers(self, series: tuple[SeriesPatch, ...]) -> tuple[_Answer, ...]:
        """Verdict and account of each patch."""
        key = tuple(map(id, series))
        if key not in self._known:
            verdicts = judge_series(series, self._facts, self._record).patches
            pairs = zip(verdicts, series, strict=True)
            self._known[key] = tuple((verdict, self._account(verdict, item.patch)) for verdict, item in pairs)
        return self._known[key]

    def _account(self, verdict: PatchVerdict, patch: Patch) -> Account:
        key = (verdict, patch.digest)
        if key not in self._accounts:
            self._accounts[key] = explain_patch(verdict, patch, self._facts)
        return self._accounts[key]


def _cells(subject: Subject, read: _Read, judge: _Judge) -> Iterator[Cell]:
    series = read.series[subject.name]
    alone = [answer for item in series.unwanted for answer in judge.answers((item.patch,))]
    named = (*series.patches, *series.unwanted)
    for place, (verdict, account) in enumerate((*judge.answers(series.texts), *alone)):
        item, policy = named[place].patch, named[place].policy
        ancestry = read.ancestries.get(item.merged_as or "")
        told = tell_history(verdict, item.merged_as, ancestry) if item.merged_as and ancestry else ()
        yield Cell(
            recipe=subject.name,
            place=place,
            text=item.patch.digest,
            policy=policy,
            verdict=verdict,
            response=respond(verdict, policy, subject.responses, in_history=item.in_history),
            key=drift_key(subject.name, verdict, in_history=item.in_history),
            merged_as=item.merged_as,
            in_history=item.in_history,
            reasons=(*told, *account.lines),
            views=account.views,
            signatures=account.signatures,
        )


def _column(
    item: _Read | _Unread, names: tuple[str, ...], judged: Mapping[_Key, tuple[Cell, ...] | ProvisionError]
) -> Column:
    found = item if isinstance(item, _Unread) else judged[item.key]
    if isinstance(found, tuple):
        # A recipe without patches has nothing that could be judged.
        judged_names = tuple(sorted({cell.recipe for cell in found}))
        return Column(build=item.build, recipes=judged_names, cells=found)
    why = found.failure if isinstance(found, _Unread) else str(found)
    return Column(build=item.build, recipes=(), cells=(), unread=tuple(Unread(recipe=name, why=why) for name in names))


def _paths_of(series: Series) -> tuple[str, ...]:
    return touched_paths(_texts_of(series))


def _texts_of(series: Series) -> tuple[SeriesPatch, ...]:
    return tuple(item.patch for item in (*series.patches, *series.unwanted))
