"""A series of patches judged on one tree of files: installed, or a wheel that is not."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import field, replace
from typing import TYPE_CHECKING

from packaging.version import Version

from provisioner.counts import count_text
from provisioner.digests import Digest, digest_of
from provisioner.documents.patched_wheel import PatchedWheel
from provisioner.documents.policy import PatchPolicy
from provisioner.documents.receipt import AppliedPatch
from provisioner.environment.facts import gather_facts, shipped_facts
from provisioner.environment.site import Site
from provisioner.environment.state import objects_of, read_patched_wheel, read_receipt
from provisioner.errors import CannotObtainError
from provisioner.patching.diff import parse_patch, print_patch
from provisioner.patching.model import (
    Create,
    Cut,
    FileFacts,
    HunkVerdict,
    PatchVerdict,
    SeriesPatch,
    SeriesVerdict,
    Verdict,
    paths_of,
)
from provisioner.patching.plan import foreign_paths, make_plan
from provisioner.patching.series import judge_series, learn_cuts, touched_paths
from provisioner.patching.steps import FileStep
from provisioner.records import dataclass
from provisioner.resources import patches_folder
from provisioner.series.policies import name_not_needed
from provisioner.series.sources import PatchSource
from provisioner.transaction.filesystem import refusal_of
from provisioner.transaction.interrupted import is_interrupted
from provisioner.wheels.record import Record

if TYPE_CHECKING:
    from provisioner.index.lazy import Wheel

OpenWheel = Callable[[], "Wheel"]


@dataclass(frozen=True, kw_only=True)
class InstalledTree:
    """Files that are installed. ``open_wheel`` gives the bytes as shipped; called only where they are needed."""

    site: Site
    open_wheel: OpenWheel | None = None

    @property
    def distribution(self) -> str:
        """Name of what is installed."""
        return self.site.distribution

    @property
    def version(self) -> Version:
        """Version of what is installed."""
        return self.site.version


@dataclass(frozen=True, kw_only=True)
class ShippedTree:
    """The files of a wheel, read where it lies."""

    distribution: str
    version: Version
    wheel: "Wheel"


Tree = InstalledTree | ShippedTree


@dataclass(frozen=True, kw_only=True)
class ForeignEdit:
    """A file with bytes of no known state. ``difference`` is the patch from ``nearest`` to what stands there; it is
    empty, and ``nearest`` None, where the bytes as shipped cannot be had."""

    path: str
    found: Digest | None
    nearest: str | None = None
    difference: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A series judged on a tree. ``notes`` are remarks for people.

    ``interrupted``: a change of these files is going on or was interrupted, so that they may be half changed.
    ``strict``: a patch whose change the build has already stands in the way, too.
    """

    distribution: str
    version: Version
    verdict: SeriesVerdict
    facts: Mapping[str, FileFacts] = field(repr=False)
    edits: tuple[ForeignEdit, ...] = ()
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    strict: bool = False

    @property
    def blocking(self) -> tuple[PatchVerdict, ...]:
        """The patches that stand in the way of carrying out the series."""
        return (*self.verdict.blocking, *(self.verdict.not_needed if self.strict else ()))

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, and what is left out because the build has it."""
        return (*self.notes, *(() if self.strict else name_not_needed(self.verdict)))

    @property
    def exit_code(self) -> int:
        """The fixed table: 0 where the series can be carried out, 3 for an invalid patch, 5 for what else stands in the
        way, 1 where only an interrupted change waits for recovery."""
        verdicts = {patch.verdict for patch in self.blocking}
        if Verdict.INVALID in verdicts:
            return 3
        if verdicts:
            return 5
        return 1 if self.interrupted else 0


def judge(tree: Tree, sources: Sequence[PatchSource]) -> Judgement:
    """Judge a series on a tree and write nothing. Raises ConflictError where it makes a file that is no Python.

    On an installed tree the patches that its receipt lists, and that stand there, come first. The bytes as shipped are
    fetched only where something stands in the way and they could tell more.
    """
    match tree:
        case ShippedTree(wheel=wheel):
            record = wheel.record()
            facts = shipped_facts(record, touched_paths([source.series for source in sources]), wheel)
            return _judgement(tree, judge_by_policy(sources, facts, record), facts, sources)
        case InstalledTree():
            judgement = judge_installed(tree, with_applied(tree.site, sources))
            if judgement.verdict.blocking:
                return judgement
            return insist_on_python(tree.site, judgement, make_plan(judgement.verdict, judgement.facts).steps)


def insist_on_python(site: Site, judgement: Judgement, steps: Sequence[FileStep]) -> Judgement:
    """The judgement, with a note where no Python is known that could compile the files that ``steps`` write.

    Raises ConflictError, with file and line, where one is no Python.
    """
    # Here, so that a run which writes nothing loads nothing of it.
    from provisioner.environment.syntax import compiler_of, refuse_broken_python, written_sources

    if not written_sources(steps):
        return judgement
    python = compiler_of(site)
    if python is None:
        note = "whether the changed files compile was not checked: nobody knows which Python imports this folder"
        return replace(judgement, notes=(*judgement.notes, note))
    refuse_broken_python(python, steps, judgement.verdict)
    return judgement


def with_applied(site: Site, sources: Sequence[PatchSource]) -> tuple[PatchSource, ...]:
    """``sources`` after the patches that stand in the environment by its receipt; one with the same id takes its place
    and knows the older text as a former one."""
    recorded = recorded_sources(site)
    ids = [source.id for source in sources]
    # Those that come first in the same order stay there, whether they stand or not: the usual second run.
    known = recorded if [source.id for source in recorded] == ids[: len(recorded)] else _standing(site, recorded)
    wanted = dict(zip(ids, sources, strict=True))
    merged = [_succeed(item, wanted.pop(item.id)) if item.id in wanted else item for item in known]
    return (*merged, *wanted.values())


def applied_sources(site: Site) -> tuple[PatchSource, ...]:
    """The patches of the receipt that can be read back and whose files are as they left them, in order."""
    return _standing(site, recorded_sources(site))


def recorded_sources(site: Site) -> tuple[PatchSource, ...]:
    """The patches of the receipt that can be read back, in order."""
    receipt = read_receipt(site.state_dir)
    if receipt is None:
        return ()
    entries = [entry for entry in receipt.patches if entry.verdict == Verdict.APPLIED]
    return tuple(source for entry in entries if (source := _read_back(site, entry)) is not None)


def _standing(site: Site, sources: tuple[PatchSource, ...]) -> tuple[PatchSource, ...]:
    if not sources:
        return ()
    facts = gather_facts(site, touched_paths([source.series for source in sources]), objects=objects_of(site.state_dir))
    verdict = judge_by_policy(sources, facts, site.record)
    standing = {patch.id for patch in verdict.patches if not patch.verdict.applies}
    return tuple(source for source in sources if source.id in standing)


def judge_installed(tree: InstalledTree, sources: Sequence[PatchSource]) -> Judgement:
    """Judge exactly ``sources`` on an installed tree."""
    facts = gather(tree, sources)
    verdict, notes = judge_by_policy(sources, facts, tree.site.record), []
    if verdict.blocking and tree.open_wheel and lacks_pristine(facts):
        try:
            facts = gather(tree, sources, tree.open_wheel)
            verdict = judge_by_policy(sources, facts, tree.site.record)
        except CannotObtainError as error:
            notes.append(f"the files as shipped could not be read, so less is known: {error}")
    verdict = _refuse_targets(tree.site, verdict)
    wheel = read_patched_wheel(tree.site)
    if wheel is not None:
        notes.append(f"{tree.distribution} {tree.version} is a patched wheel; it holds {_name_patches(wheel)}")
        verdict = _take_from_wheel(verdict, wheel, sources, tree.site.record)
    interrupted = is_interrupted(tree.site.state_dir)
    if interrupted:
        notes.append(
            "an interrupted change of files waits for recovery, or one is going on: they may be half changed; "
            "provision patch apply and provision patch revert undo or complete it first"
        )
    return replace(_judgement(tree, verdict, facts, sources, notes), interrupted=interrupted)


def _name_patches(wheel: PatchedWheel) -> str:
    return ", ".join(patch.id for patch in wheel.patches)


def _take_from_wheel(
    verdict: SeriesVerdict, wheel: PatchedWheel, sources: Sequence[PatchSource], record: Record
) -> SeriesVerdict:
    """The verdict where the same texts, which the installed wheel was made with, are what the build has already."""
    if any(record.digest(file.path) != file.after for file in wheel.files):
        return verdict
    held = {patch.text for patch in wheel.patches}
    ids = {source.id for source in sources if digest_of(source.kept) in held}
    patches = tuple(
        replace(patch, verdict=Verdict.MERGED_UPSTREAM, why="the installed wheel was made with it")
        if patch.id in ids and patch.verdict.merged
        else patch
        for patch in verdict.patches
    )
    return replace(verdict, patches=patches)


def _refuse_targets(site: Site, verdict: SeriesVerdict) -> SeriesVerdict:
    """The verdict with a conflict where a file would be changed that a transaction refuses: a symbolic link, say."""
    patches = tuple(_refuse_files(site, patch) for patch in verdict.patches)
    return verdict if patches == verdict.patches else replace(verdict, patches=patches)


def _refuse_files(site: Site, patch: PatchVerdict) -> PatchVerdict:
    files = []
    for file in patch.files:
        why = refusal_of(site.site_packages, file.path) if file.verdict.applies else None
        files.append(replace(file, verdict=Verdict.CONFLICT, why=why) if why else file)
    if tuple(files) == patch.files:
        return patch
    return replace(patch, files=tuple(files), verdict=Verdict.CONFLICT, why="a file cannot be written to")


def _judgement(
    tree: Tree,
    verdict: SeriesVerdict,
    facts: Mapping[str, FileFacts],
    sources: Sequence[PatchSource],
    notes: Iterable[str] = (),
) -> Judgement:
    foreign = _paths_judged(verdict, sources, lambda found: found is Verdict.FOREIGN)
    return Judgement(
        distribution=tree.distribution,
        version=tree.version,
        verdict=verdict,
        facts=facts,
        edits=tuple(_describe_edit(path, verdict, facts) for path in foreign if _is_edited(path, verdict, facts)),
        notes=tuple(notes),
    )


def gather(
    tree: InstalledTree, sources: Sequence[PatchSource], open_wheel: OpenWheel | None = None
) -> dict[str, FileFacts]:
    """What stands at the files of the series; ``open_wheel`` gives the bytes as shipped that are not at hand."""
    with closing(open_wheel()) if open_wheel else nullcontext() as wheel:
        return gather_facts(
            tree.site,
            touched_paths([source.series for source in sources]),
            objects=objects_of(tree.site.state_dir),
            wheel=wheel,
        )


def judge_by_policy(sources: Sequence[PatchSource], facts: Mapping[str, FileFacts], record: Record) -> SeriesVerdict:
    """Judge; an optional patch that does not hold is left out, and the rest judged again."""
    kept = tuple(sources)
    while True:
        verdict = judge_series([source.series for source in kept], facts, record)
        blocking = {patch.id for patch in verdict.blocking}
        failing = next((item for item in kept if item.id in blocking and item.policy is PatchPolicy.OPTIONAL), None)
        if failing is None:
            return verdict
        kept = tuple(item for item in kept if item is not failing)


def is_unknown(fact: FileFacts) -> bool:
    """Whether the bytes as shipped exist and are not at hand."""
    return fact.recorded is not None and fact.pristine is None


def lacks_pristine(facts: Mapping[str, FileFacts]) -> bool:
    """Whether the bytes as shipped of any file are not at hand."""
    return any(map(is_unknown, facts.values()))


def resettable_paths(verdict: SeriesVerdict, sources: Iterable[PatchSource]) -> tuple[str, ...]:
    """The files of patches in the way that would be judged otherwise if they were as shipped, sorted."""
    return _paths_judged(verdict, sources, lambda found: found.resettable)


def _paths_judged(
    verdict: SeriesVerdict, sources: Iterable[PatchSource], matches: Callable[[Verdict], bool]
) -> tuple[str, ...]:
    """The files whose verdict in some patch ``matches``, and with the target of a rename its source."""
    changes = {source.id: source.series.patch.changes for source in sources}
    paths = {
        path
        for patch in verdict.patches
        for file in patch.files
        for change in changes[patch.id]
        if change.path == file.path and matches(file.verdict)
        for path in paths_of(change)
    }
    return tuple(sorted(paths))


def nearest_texts(verdict: SeriesVerdict, facts: Mapping[str, FileFacts]) -> tuple[str, ...]:
    """For each file with bytes of no known state the state that is nearest, in a line for people."""
    edits = [_describe_edit(path, verdict, facts) for path in foreign_paths(verdict)]
    return tuple(
        f"{edit.path}: nearest to {edit.nearest}, {count_text(_changed_lines(edit.difference), 'line')} apart"
        for edit in edits
        if edit.nearest is not None and edit.difference
    )


def _changed_lines(difference: bytes) -> int:
    lines = difference.splitlines()
    return sum(line[:1] in (b"+", b"-") and line[:3] not in (b"+++", b"---") for line in lines)


def _is_edited(path: str, verdict: SeriesVerdict, facts: Mapping[str, FileFacts]) -> bool:
    """Whether a file that counts as foreign is so itself, not just one that is renamed from or to it."""
    return facts[path].content not in verdict.states.get(path, ())


def _describe_edit(path: str, verdict: SeriesVerdict, facts: Mapping[str, FileFacts]) -> ForeignEdit:
    """The difference to the nearest state of the series, the file as shipped among them."""
    from provisioner.patching.compare import nearest_state, patch_between  # comparing is for edits only, and costs

    content, states = facts[path].content, verdict.states.get(path, ())
    found = digest_of(content) if content is not None else None
    nearest = nearest_state(content, states)
    if content is None or nearest is None or not is_text(content):
        return ForeignEdit(path=path, found=found)
    change = patch_between({path: nearest}, {path: content}, id=path, source=path)
    name = _name_state(path, states.index(nearest), verdict)
    return ForeignEdit(path=path, found=found, nearest=name, difference=print_patch(change))


def is_text(content: bytes) -> bool:
    """Whether a patch can show ``content``: git's rule, no zero byte near the start."""
    return b"\0" not in content[:8000]


def _name_state(path: str, number: int, verdict: SeriesVerdict) -> str:
    if number == 0:
        return "the file as shipped"
    touching = [patch.id for patch in verdict.patches if any(file.path == path for file in patch.files)]
    return f"the file with {', '.join(touching[:number])}"


def cut_against(sources: Sequence[PatchSource], wheel: "Wheel") -> tuple[PatchSource, ...]:
    """The same series, where a patch from elsewhere knows in which class or function each hunk stands, by the files of
    the release in ``wheel``, which the series was cut against."""
    learnt = cut_series_against([source.series for source in sources], wheel)
    return tuple(replace(source, series=item) for source, item in zip(sources, learnt, strict=True))


def cut_series_against(series: Sequence[SeriesPatch], wheel: "Wheel") -> tuple[SeriesPatch, ...]:
    """The same of patches alone."""
    shipped = wheel.digests(touched_paths(series))
    return learn_cuts(series, wheel.read_many([path for path, digest in shipped.items() if digest is not None]))


def _read_back(site: Site, entry: AppliedPatch) -> PatchSource | None:
    """A patch of the receipt with its text: as kept in the environment, else from the patch store."""
    policy = PatchPolicy(entry.policy)
    text = objects_of(site.state_dir).get(entry.text)
    if text is not None:
        return source_of(entry, text)
    from provisioner.series.store import find_text  # few commands come here

    found = find_text(patches_folder(), entry.id, entry.text)
    return PatchSource(series=found[0], policy=policy, text=found[1]) if found else None


def source_of(entry: AppliedPatch, text: bytes) -> PatchSource:
    """A patch as it was applied, from what is written of it and its text in the form that needs no root."""
    patch = parse_patch(text, id=entry.id, source=entry.source)
    return PatchSource(
        series=SeriesPatch(
            patch=patch,
            cuts={file.path: Cut(scopes=file.scopes) for file in entry.files if file.scopes},
            new_roots=frozenset(
                change.path.partition("/")[0] for change in patch.changes if isinstance(change, Create)
            ),
        ),
        policy=PatchPolicy(entry.policy),
        text=text,
    )


def _succeed(known: PatchSource, source: PatchSource) -> PatchSource:
    """``source`` in the place of an earlier text of the same patch, with the scopes that were known of an equal one."""
    if known.series.patch.changes == source.series.patch.changes:
        return replace(source, series=replace(source.series, cuts={**known.series.cuts, **source.series.cuts}))
    former = (*source.series.former, known.series.patch)
    return replace(source, series=replace(source.series, former=former))


def record_of(tree: Tree) -> Record:
    """What the tree's distribution ships."""
    return tree.site.record if isinstance(tree, InstalledTree) else tree.wheel.record()


def find_scopes(tree: Tree, item: SeriesPatch) -> dict[str, tuple[str | None, ...]]:
    """The class or function in which each hunk of a patch stands in the files as shipped, by path; only of the files in
    which every hunk stands at its own line."""
    if isinstance(tree, ShippedTree):
        (learnt,) = cut_against([PatchSource(series=item)], tree.wheel)
    else:
        facts = gather(tree, [PatchSource(series=item)])
        bases = {path: fact.pristine for path, fact in facts.items() if fact.pristine is not None}
        (learnt,) = (PatchSource(series=found) for found in learn_cuts([item], bases))
    return {path: cut.scopes for path, cut in learnt.series.cuts.items()}


def scope_of(hunk: HunkVerdict) -> str | None:
    """Where a hunk stands, else where it must stand."""
    return hunk.found_scope if hunk.found_scope is not None else hunk.scope
