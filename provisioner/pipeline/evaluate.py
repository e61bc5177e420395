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
from provisioner.patching.series import learn_cuts, touched_paths
from provisioner.patching.steps import FileStep
from provisioner.records import dataclass
from provisioner.resources import patches_folder
from provisioner.series.model import NamedPatch, Series, judge_by_policy, name_not_needed
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


def judge(tree: Tree, series: Series) -> Judgement:
    """Judge a series on a tree and write nothing. Raises ConflictError where it makes a file that is no Python.

    On an installed tree the patches that its receipt lists, and that stand there, come first. The bytes as shipped are
    fetched only where something stands in the way and they could tell more.
    """
    match tree:
        case ShippedTree(wheel=wheel):
            record = wheel.record()
            facts = shipped_facts(record, touched_paths(series.texts), wheel)
            return _judgement(tree, judge_by_policy(series, facts, record), facts, series)
        case InstalledTree():
            judgement = judge_installed(tree, with_applied(tree.site, series))
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


def with_applied(site: Site, series: Series) -> Series:
    """``series`` after the patches that stand in the environment by its receipt; one with the same id takes its place
    and knows the older text as a former one."""
    recorded = recorded_series(site)
    # Those that come first in the same order stay there, whether they stand or not: the usual second run.
    known = recorded if recorded.ids == series.ids[: len(recorded.ids)] else _standing(site, recorded)
    wanted = dict(zip(series.ids, series.patches, strict=True))
    merged = [_succeed(item, wanted.pop(item.id)) if item.id in wanted else item for item in known.patches]
    return replace(series, patches=(*merged, *wanted.values()))


def applied_series(site: Site) -> Series:
    """The patches of the receipt that can be read back and whose files are as they left them, in order."""
    return _standing(site, recorded_series(site))


def recorded_series(site: Site) -> Series:
    """The patches of the receipt that can be read back, in order."""
    receipt = read_receipt(site.state_dir)
    entries = [entry for entry in receipt.patches if entry.verdict == Verdict.APPLIED] if receipt else []
    return Series(patches=tuple(item for entry in entries if (item := _read_back(site, entry)) is not None))


def _standing(site: Site, series: Series) -> Series:
    if not series.patches:
        return series
    facts = gather_facts(site, touched_paths(series.texts), objects=objects_of(site.state_dir))
    verdict = judge_by_policy(series, facts, site.record)
    standing = {patch.id for patch in verdict.patches if not patch.verdict.applies}
    return Series(patches=tuple(item for item in series.patches if item.id in standing))


def judge_installed(tree: InstalledTree, series: Series) -> Judgement:
    """Judge exactly ``series`` on an installed tree."""
    facts = gather(tree, series)
    verdict, notes = judge_by_policy(series, facts, tree.site.record), []
    if verdict.blocking and tree.open_wheel and lacks_pristine(facts):
        try:
            facts = gather(tree, series, tree.open_wheel)
            verdict = judge_by_policy(series, facts, tree.site.record)
        except CannotObtainError as error:
            notes.append(f"the files as shipped could not be read, so less is known: {error}")
    verdict = _refuse_targets(tree.site, verdict)
    wheel = read_patched_wheel(tree.site)
    if wheel is not None:
        notes.append(f"{tree.distribution} {tree.version} is a patched wheel; it holds {_name_patches(wheel)}")
        verdict = _take_from_wheel(verdict, wheel, series, tree.site.record)
    interrupted = is_interrupted(tree.site.state_dir)
    if interrupted:
        notes.append(
            "an interrupted change of files waits for recovery, or one is going on: they may be half changed; "
            "provision patch apply and provision patch revert undo or complete it first"
        )
    return replace(_judgement(tree, verdict, facts, series, notes), interrupted=interrupted)


def _name_patches(wheel: PatchedWheel) -> str:
    return ", ".join(patch.id for patch in wheel.patches)


def _take_from_wheel(verdict: SeriesVerdict, wheel: PatchedWheel, series: Series, record: Record) -> SeriesVerdict:
    """The verdict where the same texts, which the installed wheel was made with, are what the build has already."""
    if any(record.digest(file.path) != file.after for file in wheel.files):
        return verdict
    held = {patch.text for patch in wheel.patches}
    ids = {item.id for item in series.patches if digest_of(item.kept) in held}
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
    series: Series,
    notes: Iterable[str] = (),
) -> Judgement:
    foreign = _paths_judged(verdict, series, lambda found: found is Verdict.FOREIGN)
    return Judgement(
        distribution=tree.distribution,
        version=tree.version,
        verdict=verdict,
        facts=facts,
        edits=tuple(_describe_edit(path, verdict, facts) for path in foreign if _is_edited(path, verdict, facts)),
        notes=tuple(notes),
    )


def gather(tree: InstalledTree, series: Series, open_wheel: OpenWheel | None = None) -> dict[str, FileFacts]:
    """What stands at the files of the series; ``open_wheel`` gives the bytes as shipped that are not at hand."""
    with closing(open_wheel()) if open_wheel else nullcontext() as wheel:
        return gather_facts(
            tree.site,
            touched_paths(series.texts),
            objects=objects_of(tree.site.state_dir),
            wheel=wheel,
        )


def is_unknown(fact: FileFacts) -> bool:
    """Whether the bytes as shipped exist and are not at hand."""
    return fact.recorded is not None and fact.pristine is None


def lacks_pristine(facts: Mapping[str, FileFacts]) -> bool:
    """Whether the bytes as shipped of any file are not at hand."""
    return any(map(is_unknown, facts.values()))


def resettable_paths(verdict: SeriesVerdict, series: Series) -> tuple[str, ...]:
    """The files of patches in the way that would be judged otherwise if they were as shipped, sorted."""
    return _paths_judged(verdict, series, lambda found: found.resettable)


def _paths_judged(verdict: SeriesVerdict, series: Series, matches: Callable[[Verdict], bool]) -> tuple[str, ...]:
    """The files whose verdict in some patch ``matches``, and with the target of a rename its source."""
    changes = {item.id: item.patch.patch.changes for item in series.patches}
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


def cut_against(series: Series, wheel: "Wheel") -> Series:
    """The same series, where a patch from elsewhere knows in which class or function each hunk stands, by the files of
    the release in ``wheel``, which the series was cut against."""
    shipped = wheel.digests(touched_paths(series.texts))
    bases = wheel.read_many([path for path, digest in shipped.items() if digest is not None])
    learnt = zip(series.patches, learn_cuts(series.texts, bases), strict=True)
    return replace(series, patches=tuple(replace(item, patch=patch) for item, patch in learnt))


def _read_back(site: Site, entry: AppliedPatch) -> NamedPatch | None:
    """A patch of the receipt with its text: as kept in the environment, else from the patch store."""
    policy = PatchPolicy(entry.policy)
    text = objects_of(site.state_dir).get(entry.text)
    if text is not None:
        return named_by(entry, text)
    from provisioner.series.store import find_text  # few commands come here

    found = find_text(patches_folder(), entry.id, entry.text)
    return NamedPatch(patch=found[0], policy=policy, text=found[1]) if found else None


def named_by(entry: AppliedPatch, text: bytes) -> NamedPatch:
    """A patch as it was applied, from what is written of it and its text in the form that needs no root."""
    patch = parse_patch(text, id=entry.id, source=entry.source)
    return NamedPatch(
        patch=SeriesPatch(
            patch=patch,
            cuts={file.path: Cut(scopes=file.scopes) for file in entry.files if file.scopes},
            new_roots=frozenset(
                change.path.partition("/")[0] for change in patch.changes if isinstance(change, Create)
            ),
        ),
        policy=PatchPolicy(entry.policy),
        text=text,
    )


def _succeed(known: NamedPatch, item: NamedPatch) -> NamedPatch:
    """``item`` in the place of an earlier text of the same patch, with the scopes that were known of an equal one."""
    if known.patch.patch.changes == item.patch.patch.changes:
        return replace(item, patch=replace(item.patch, cuts={**known.patch.cuts, **item.patch.cuts}))
    return replace(item, patch=replace(item.patch, former=(*item.patch.former, known.patch.patch)))


def record_of(tree: Tree) -> Record:
    """What the tree's distribution ships."""
    return tree.site.record if isinstance(tree, InstalledTree) else tree.wheel.record()


def find_scopes(tree: Tree, item: SeriesPatch) -> dict[str, tuple[str | None, ...]]:
    """The class or function in which each hunk of a patch stands in the files as shipped, by path; only of the files in
    which every hunk stands at its own line."""
    alone = Series(patches=(NamedPatch(patch=item),))
    if isinstance(tree, ShippedTree):
        (learnt,) = cut_against(alone, tree.wheel).texts
    else:
        facts = gather(tree, alone)
        bases = {path: fact.pristine for path, fact in facts.items() if fact.pristine is not None}
        (learnt,) = learn_cuts(alone.texts, bases)
    return {path: cut.scopes for path, cut in learnt.cuts.items()}


def scope_of(hunk: HunkVerdict) -> str | None:
    """Where a hunk stands, else where it must stand."""
    return hunk.found_scope if hunk.found_scope is not None else hunk.scope
