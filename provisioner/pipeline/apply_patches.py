"""A series of patches brought to the disk of an environment, and recorded."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from provisioner import __version__
from provisioner.digests import digest_of
from provisioner.documents.receipt import AppliedPatch, InstalledBuild, PatchedFile, Receipt
from provisioner.environment.site import Site
from provisioner.environment.state import objects_of, read_receipt, recover_site, write_receipt
from provisioner.errors import CannotObtainError, NotRestoredError, RestoredError
from provisioner.patching.model import (
    FileVerdict,
    PatchVerdict,
    Verdict,
)
from provisioner.patching.plan import make_plan, reset_foreign
from provisioner.patching.steps import FileStep
from provisioner.pipeline.evaluate import (
    InstalledTree,
    Judgement,
    gather,
    insist_on_python,
    is_unknown,
    judge_installed,
    resettable_paths,
    scope_of,
    with_applied,
)
from provisioner.pipeline.plan import is_receipt_current
from provisioner.series.model import NamedPatch, Series, judge_by_policy
from provisioner.transaction.interrupted import is_interrupted

if TYPE_CHECKING:
    from provisioner.transaction.lockfile import Holder
    from provisioner.transaction.transaction import FileOutcome, Recovery

WAIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Application:
    """What applying did. ``judgement`` is of the files before; no ``files`` where it blocked or nothing was to do."""

    judgement: Judgement
    files: "tuple[FileOutcome, ...]" = ()
    recovery: "Recovery | None" = None


def apply(
    tree: InstalledTree,
    series: Series,
    *,
    reset: bool = False,
    strict: bool = False,
    on_wait: "Callable[[Holder | None], None]" = lambda _holder: None,
) -> Application:
    """Bring the files to the end of the series in one transaction, and record it.

    Where all is true already nothing is opened for writing. Where a patch stands in the way nothing is written, and the
    judgement says so; with ``reset``, files that hold foreign bytes, part of a patch or an older text of one count as
    shipped; with ``strict``, a patch whose change the build has already stands in the way. Raises ConflictError where
    the series makes a file that is no Python, what a transaction raises, and BusyError.
    """
    site = tree.site
    looked = _look(tree, series, reset=reset, strict=strict)
    if _is_settled(site, looked):
        return Application(judgement=looked.judgement)
    # Here, so that a run which finds nothing to do loads nothing of it.
    from provisioner.transaction.lockfile import hold_environment
    from provisioner.transaction.transaction import execute

    with hold_environment(site.state_dir, wait_seconds=WAIT_SECONDS, on_wait=on_wait):
        recovery = recover_site(site)
        looked = _look(tree, series, reset=reset, strict=strict)
        if looked.judgement.blocking:
            return Application(judgement=looked.judgement, recovery=recovery)
        judgement = insist_on_python(site, looked.judgement, looked.steps)
        with _nothing_written(site):
            _keep(site, looked)
        files = execute(
            site.site_packages,
            site.state_dir,
            looked.steps,
            record=site.record,
            may_create=frozenset(looked.judgement.verdict.final),
        )
        record_in_receipt(site, _make_receipt(site, looked))
    return Application(judgement=judgement, files=files, recovery=recovery)


def record_in_receipt(site: Site, receipt: Receipt) -> None:
    """Write the receipt where it says something new.

    Raises NotRestoredError where it cannot be written: by then the files are changed.
    """
    if is_receipt_current(read_receipt(site.state_dir), receipt):
        return
    try:
        write_receipt(site.state_dir, receipt)
    except OSError as error:
        raise NotRestoredError(
            f"the files are changed and proven, but the receipt cannot be written: {error.strerror}",
            where=str(site.state_dir),
            hints=("mend the cause and run the same command again: it will only write the receipt",),
        ) from error


@contextmanager
def _nothing_written(site: Site) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RestoredError(
            f"what must be kept for taking back cannot be written: {error.strerror}; no file was changed",
            where=str(site.state_dir),
            hints=(f"make room on its file system (df -h {site.state_dir}) and run the command again",),
        ) from error


@dataclass(frozen=True, kw_only=True)
class _Looked:
    series: Series
    judgement: Judgement
    steps: tuple[FileStep, ...]


def _look(tree: InstalledTree, named: Series, *, reset: bool, strict: bool) -> _Looked:
    series = with_applied(tree.site, named)
    judgement = replace(judge_installed(tree, series), strict=strict)
    if reset and (paths := resettable_paths(judgement.verdict, series)):
        judgement = _judge_as_if_reset(tree, series, judgement, paths)
    steps = () if judgement.blocking else make_plan(judgement.verdict, judgement.facts).steps
    return _Looked(series=series, judgement=judgement, steps=steps)


def _judge_as_if_reset(tree: InstalledTree, series: Series, judgement: Judgement, paths: Collection[str]) -> Judgement:
    """As if the files at ``paths`` were as shipped; the facts stay what they are, and the plan starts from them."""
    facts = dict(judgement.facts)
    if any(is_unknown(facts[path]) for path in paths) and tree.open_wheel:
        facts |= gather(tree, series, tree.open_wheel)
    for path in paths:
        if is_unknown(facts[path]):
            raise CannotObtainError(
                "the bytes as shipped are not at hand, so the file cannot be reset",
                where=path,
                hints=(f"name the wheel: --wheel pypi:{tree.version.public}, or the path of a .whl file",),
            )
    considered = reset_foreign(facts, paths)
    return replace(judgement, verdict=judge_by_policy(series, considered, tree.site.record), facts=facts)


def _is_settled(site: Site, looked: _Looked) -> bool:
    """Whether there is nothing to write: then a tree that cannot be written is as good as any."""
    return (
        not is_interrupted(site.state_dir)
        and not looked.steps
        and not looked.judgement.blocking
        and is_receipt_current(read_receipt(site.state_dir), _make_receipt(site, looked))
    )


def _keep(site: Site, looked: _Looked) -> None:
    """Keep the files as shipped, and the patches, so that taking back needs no network and no patch file."""
    objects = objects_of(site.state_dir)
    for content in looked.judgement.verdict.pristine.values():
        if content is not None:
            objects.put(content)
    for item in looked.series.patches:
        objects.put(item.kept)


def _make_receipt(site: Site, looked: _Looked) -> Receipt:
    former = read_receipt(site.state_dir)
    by_id = {item.id: item for item in looked.series.patches}
    patches = tuple(
        describe_applied(by_id[patch.id], patch)
        for patch in looked.judgement.verdict.patches
        if patch.verdict.remains or patch.verdict.merged
    )
    now = datetime.now(UTC).isoformat(timespec="seconds")
    if former is not None:
        return replace(former, created=now, tool=__version__, patches=with_idle(patches, former))
    from provisioner.environment.integrity import read_build

    build = InstalledBuild(
        distribution=site.distribution,
        version=str(site.version),
        commit=read_build(site).commit,
        variant=None,
        wheel=None,
        wheel_sha256=None,
    )
    return Receipt(created=now, tool=__version__, build=build, patches=with_idle(patches, None), python=site.python)


def with_idle(patches: Sequence[AppliedPatch], former: Receipt | None) -> tuple[AppliedPatch, ...]:
    """The entries of a new receipt: what is applied, in order, then by id what the build holds already, that of the
    former receipt among it, which stays true."""
    ids = {patch.id for patch in patches}
    every = (*patches, *(entry for entry in (former.patches if former else ()) if entry.id not in ids))
    applied = [entry for entry in patches if entry.verdict == Verdict.APPLIED]
    idle = [entry for entry in every if entry.verdict != Verdict.APPLIED]
    return (*applied, *sorted(idle, key=lambda entry: entry.id))


def describe_applied(named: NamedPatch, patch: PatchVerdict) -> AppliedPatch:
    """A patch as the receipt lists it. Its text is kept in the form that needs no root or strip level."""
    return AppliedPatch(
        id=patch.id,
        source=patch.source,
        text=digest_of(named.kept),
        policy=named.policy,
        verdict=patch.verdict.outcome,
        files=tuple(
            PatchedFile(path=file.path, before=file.before, after=file.after, scopes=_scopes_of(file))
            for file in patch.files
            if patch.verdict.remains and file.before != file.after
        ),
    )


def _scopes_of(file: FileVerdict) -> tuple[str, ...]:
    """The scope of each hunk where all are known, so that the patch finds its places again later."""
    scopes = [scope_of(hunk) for hunk in file.hunks]
    known = [scope for scope in scopes if scope is not None]
    return tuple(known) if len(known) == len(scopes) else ()
