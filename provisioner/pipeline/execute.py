"""Carrying a recipe out: environment, packages, proof of RECORD, patches, post-conditions, receipt."""

import shlex
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from provisioner import __version__
from provisioner.counts import count_text
from provisioner.digests import digest_of
from provisioner.documents.lock import Lock, LockedBuild, marker_environment, select_pin
from provisioner.documents.owner import Owner
from provisioner.documents.receipt import AppliedPatch, InstalledBuild, PatchedFile, Receipt
from provisioner.documents.recipe import Recipe
from provisioner.environment import uv as uv_room
from provisioner.environment.facts import gather_facts, shipped_facts
from provisioner.environment.integrity import (
    RecordFinding,
    check_files,
    check_install,
    commits_agree,
    is_record_edited,
    peek_sources,
    read_build,
    read_torch,
    versions_agree,
)
from provisioner.environment.site import Site, find_site, venv_python
from provisioner.environment.state import (
    objects_of,
    read_owner,
    read_receipt,
    recover_site,
    state_of,
    write_owner,
    write_receipt,
)
from provisioner.environment.syntax import refuse_broken_python
from provisioner.environment.unlisted import find_unlisted, removal_of
from provisioner.environment.uv import VenvLayout
from provisioner.errors import (
    ConflictError,
    EnvironmentConflictError,
    ForeignBytesError,
    HashMismatchError,
    ProvisionError,
)
from provisioner.patching.model import FileFacts, SeriesVerdict
from provisioner.patching.plan import make_plan, steps_to
from provisioner.patching.series import touched_paths
from provisioner.patching.steps import FileStep
from provisioner.pipeline.inspect import (
    Absent,
    Adoptable,
    Found,
    Installed,
    Occupied,
    Unfinished,
    compare_packages,
    differing_packages,
    find_place,
    inspect_environment,
    is_replaceable,
    is_whole,
    refuse_other_build,
    reinstall_command,
    wanted_packages,
)
from provisioner.pipeline.plan import (
    Action,
    AdoptEnvironment,
    ChangeFiles,
    CheckRecord,
    CreateEnvironment,
    EnvironmentPlan,
    InstallPackages,
    RecoverTransaction,
    TakeOutPatches,
    WriteReceipt,
    describe_action,
    is_receipt_current,
)
from provisioner.pipeline.preflight import BARE_ENVIRONMENT_BYTES, FULL_ENVIRONMENT_BYTES, check_disk
from provisioner.pipeline.user_patches import patches_beside, save_texts
from provisioner.progress import Reporter
from provisioner.records import dataclass
from provisioner.series.model import Series, judge_by_policy, refuse_blocked, refuse_merged
from provisioner.transaction.folders import make_state_folder
from provisioner.transaction.interrupted import is_interrupted
from provisioner.transaction.lockfile import Holder, ReadOnlyError, hold_environment
from provisioner.wheels.record import Record

if TYPE_CHECKING:
    from provisioner.index.lazy import Wheel

WAIT_SECONDS = 600


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to provision, where, and how.

    ``open_wheel`` gives the locked wheel's pristine files and is called only where they are needed. ``bare`` leaves the
    dependencies out; ``reapply`` restores pristine files before the series is applied, whatever stands there;
    ``adopts`` takes over an environment that others made, and ``sync`` brings its packages to the lock's; ``strict``
    refuses a patch that the build has already. ``fork_any``: the fork's checkout was taken as it is.
    ``fetch_wheel`` gives the wheel of a commit build as a file, which is installed instead of the lock's public URL.
    ``fetch_links`` gives a folder that has every wheel; no index is asked then.
    """

    recipe: Recipe
    lock: Lock
    series: Series
    venv: Path
    python: str | None
    bare: bool
    reapply: bool
    open_wheel: "Callable[[], Wheel]"
    environ: Mapping[str, str]
    adopts: bool = False
    sync: bool = False
    fork_any: bool = False
    strict: bool = False
    fetch_wheel: Callable[[Reporter], Path] | None = None
    fetch_links: Callable[[Reporter], Path] | None = None
    layout: VenvLayout = VenvLayout.FIXED


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was done: the receipt, the verdict on the series before the change, and the actions taken, if any."""

    receipt: Receipt
    verdict: SeriesVerdict
    actions: tuple[Action, ...]


def plan_environment(request: Request, uv: uv_room.Uv) -> EnvironmentPlan:
    """All that :func:`provision` would do, with nothing written.

    Raises what provisioning would raise before its first write.
    """
    found = _inspect(request)
    match found:
        case Absent() | Unfinished():
            return _plan_new(request, uv)
        case Installed() | Adoptable():
            return _plan_existing(request, found)


def provision(request: Request, uv: uv_room.Uv, reporter: Reporter) -> Outcome:
    """Make the environment as its recipe says and prove it; a second run finds nothing to do.

    Where nothing is to be done, an environment that may not be written is as good as any. Raises a ProvisionError whose
    class says whether nothing was done, everything was restored, or not.
    """
    _look_first(request, uv)
    _make_place(request.venv)
    try:
        return _provision_held(request, uv, reporter)
    except ReadOnlyError:
        settled = _find_settled(request, uv)
        if settled is None:
            raise
        return settled


def _provision_held(request: Request, uv: uv_room.Uv, reporter: Reporter) -> Outcome:
    with _held(request.venv, reporter):
        found = _inspect(request)
        actions = [*_recover(found, reporter), *_install(request, found, uv, reporter)]
        fresh = any(isinstance(action, InstallPackages) for action in actions)
        site = _site_of(request, found, installed=fresh)
        actions += _prove_record(request, site, reporter, fresh=fresh)
        changed, verdict = _patch(request, site, reporter)
        actions += changed
        standing = None if fresh else read_receipt(site.state_dir)
        receipt = _make_receipt(request, site, verdict, standing)
        if not is_receipt_current(read_receipt(site.state_dir), receipt):
            write_receipt(site.state_dir, receipt)
            actions.append(WriteReceipt())
    return Outcome(receipt=receipt, verdict=verdict, actions=tuple(actions))


def _find_settled(request: Request, uv: uv_room.Uv) -> Outcome | None:
    """What a run over an environment gives that needs nothing, only read; None where something is to be done."""
    receipt = read_receipt(state_of(request.venv))
    if receipt is None:
        return None
    plan = plan_environment(request, uv)
    if plan:
        return None
    _prove_build(request, find_site(request.venv, request.recipe.distribution))
    return Outcome(receipt=receipt, verdict=plan.verdict, actions=())


def _look_first(request: Request, uv: uv_room.Uv) -> None:
    """Refuse what can be refused before anything is made, the lock file among it.

    All that can be wrong with an environment that others made is: a refusal leaves no trace in it.
    """
    match find_place(request.venv, request.recipe.distribution, adopts=request.adopts):
        case Absent() | Unfinished():
            check_disk(request.venv, BARE_ENVIRONMENT_BYTES if request.bare else FULL_ENVIRONMENT_BYTES)
        case Occupied(owner=None):
            plan_environment(request, uv)
        case Occupied():
            pass  # looked at when it is held, since it may change until then


def _plan_new(request: Request, uv: uv_room.Uv) -> EnvironmentPlan:
    python = _choose_python(request, uv)
    wheel = request.open_wheel()
    record = wheel.record()
    facts = shipped_facts(record, touched_paths(request.series.texts), wheel)
    verdict = _judge(request, facts, record)
    steps = make_plan(verdict, facts).steps
    refuse_broken_python(python.executable, steps, verdict)
    version = ".".join(map(str, python.version))
    actions: tuple[Action, ...] = (
        CreateEnvironment(venv=str(request.venv), python=f"{version} ({python.executable})"),
        InstallPackages(count=_count_packages(request, version)),
        CheckRecord(files=len(record)),
        *((ChangeFiles(steps=steps),) if steps else ()),
        WriteReceipt(),
    )
    return EnvironmentPlan(actions=actions, verdict=verdict, final=dict(verdict.final_digests))


def _site_of(request: Request, found: Found, *, installed: bool) -> Site:
    known = found.site if isinstance(found, Installed | Adoptable) else None
    return find_site(request.venv, request.recipe.distribution) if installed or known is None else known


def _inspect(request: Request) -> Found:
    return inspect_environment(request.venv, request.recipe.distribution, adopts=request.adopts)


def _plan_existing(request: Request, found: Installed | Adoptable) -> EnvironmentPlan:
    site = found.site
    refuse_other_build(site, request.lock)
    facts = _gather(request, site)
    verdict = _judge(request, facts, site.record, read_receipt(site.state_dir))
    steps = (*make_plan(verdict, facts).steps, *_plan_leftovers(request, site))
    refuse_broken_python(venv_python(request.venv), steps, verdict)
    actions: list[Action] = []
    if isinstance(found, Adoptable):
        actions.append(_adoption(request, site))
    if is_interrupted(site.state_dir):
        actions.append(RecoverTransaction())
    differing = _differing(request, found)
    if differing:
        actions.append(InstallPackages(count=len(differing), reasons=differing))
    if isinstance(found, Adoptable):
        _prove_others(request, site)
    elif not differing:
        _prove_standing(request, site)
    actions += _going(request, site)
    if steps:
        actions.append(ChangeFiles(steps=steps))
    standing = read_receipt(site.state_dir)
    if not is_receipt_current(standing, _make_receipt(request, site, verdict, standing)):
        actions.append(WriteReceipt())
    return EnvironmentPlan(actions=tuple(actions), verdict=verdict, final=dict(verdict.final_digests))


def _make_place(venv: Path) -> None:
    """Make the folder, so that a place where none can be made is named before anything else happens."""
    try:
        make_state_folder(state_of(venv))
    except OSError as error:
        raise EnvironmentConflictError(
            "no environment can be made here",
            where=str(venv),
            found=error.strerror,
            hints=("choose another place with --venv DIR",),
        ) from error


@contextmanager
def _held(venv: Path, reporter: Reporter) -> Iterator[None]:
    def say(holder: Holder | None) -> None:
        reporter.warn(f"waiting for {holder or 'another process'}")

    with hold_environment(state_of(venv), wait_seconds=WAIT_SECONDS, on_wait=say):
        yield


def _recover(found: Found, reporter: Reporter) -> list[Action]:
    if not isinstance(found, Installed | Adoptable) or not is_interrupted(found.site.state_dir):
        return []
    reporter.stage("recover an interrupted change")
    recover_site(found.site)
    return [RecoverTransaction()]


def _install(request: Request, found: Found, uv: uv_room.Uv, reporter: Reporter) -> tuple[Action, ...]:
    match found:
        case Absent() | Unfinished():
            return _install_new(request, uv, reporter)
        case Installed():
            return _install_missing(request, found, uv, reporter)
        case Adoptable(site=site):
            adoption = _adoption(request, site)
            reporter.stage(describe_action(adoption))
            write_owner(site.state_dir, Owner(recipe=request.recipe.name, tool=__version__, adopted=True))
            return (adoption, *_install_missing(request, found, uv, reporter))


def _adoption(request: Request, site: Site) -> AdoptEnvironment:
    return AdoptEnvironment(venv=str(request.venv), differing=compare_packages(site, _locked_packages(request, site)))


def _differing(request: Request, found: Installed | Adoptable) -> tuple[str, ...]:
    """Packages to install: none where the dependencies are left out or are somebody else's."""
    wanted = _locked_packages if request.sync else _own_packages
    return differing_packages(found.site, wanted(request, found.site))


def _own_packages(request: Request, site: Site) -> dict[str, str]:
    return _locked_packages(request, site) if is_replaceable(site) else {}


def _locked_packages(request: Request, site: Site) -> dict[str, str]:
    return {} if request.bare else wanted_packages(request.lock, site.python)


def _install_new(request: Request, uv: uv_room.Uv, reporter: Reporter) -> tuple[Action, ...]:
    python = _choose_python(request, uv)
    version = ".".join(map(str, python.version))
    if not python.preferred and request.python is None:
        reporter.warn(f"Python {request.recipe.python.preferred} was not found; using {version}")
    # The mark comes first: whatever happens now, the next run knows the folder as ours and goes on.
    write_owner(state_of(request.venv), Owner(recipe=request.recipe.name, tool=__version__))
    reporter.stage(f"create the environment with Python {version}")
    uv_room.create_venv(uv, request.venv, python.executable, layout=request.layout)
    count = _count_packages(request, version)
    reporter.stage(f"install {count_text(count, 'package')} from the lock" if count > 1 else "install the wheel alone")
    _sync(request, uv, reporter)
    return CreateEnvironment(venv=str(request.venv), python=version), InstallPackages(count=count)


def _install_missing(
    request: Request, found: Installed | Adoptable, uv: uv_room.Uv, reporter: Reporter
) -> tuple[Action, ...]:
    refuse_other_build(found.site, request.lock)
    differing = _differing(request, found)
    if not differing:
        return ()
    reporter.stage(
        f"install {count_text(len(differing), 'package that differs', 'packages that differ')} from the lock"
    )
    _sync(request, uv, reporter)
    return (InstallPackages(count=len(differing), reasons=differing),)


def _sync(request: Request, uv: uv_room.Uv, reporter: Reporter) -> None:
    text = select_pin(request.lock, request.recipe.distribution) if request.bare else request.lock.requirements
    url = request.lock.build.url
    if url is not None and request.fetch_wheel is not None:
        text = text.replace(url, request.fetch_wheel(reporter).as_uri())
    if request.fetch_links is not None:
        uv = uv_room.unplug(uv, request.fetch_links(reporter))
    with tempfile.TemporaryDirectory(prefix="provision-") as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(text, encoding="utf-8")
        owner = read_owner(state_of(request.venv))
        if owner is not None and owner.adopted:
            uv_room.add_requirements(uv, venv_python(request.venv), requirements, reporter=reporter)
            return
        _forget_parts(request.venv)
        uv_room.sync_requirements(uv, venv_python(request.venv), requirements, reporter=reporter)


def _forget_parts(venv: Path) -> None:
    """What a killed run installed in part is there by its name, and uv would leave it so."""
    for info in venv.glob("lib/python*/site-packages/*.dist-info"):
        if not is_whole(info):
            shutil.rmtree(info)


def _choose_python(request: Request, uv: uv_room.Uv) -> uv_room.ChosenPython:
    if request.python is not None:
        return uv_room.take_python(uv, request.python, request.recipe.python, request.environ)
    return uv_room.choose_python(uv, request.recipe.python, request.environ)


def _count_packages(request: Request, python: str) -> int:
    environment = marker_environment(python)
    return 1 if request.bare else sum(pin.wanted(environment) for pin in request.lock.pins)


def _prove_record(request: Request, site: Site, reporter: Reporter, *, fresh: bool) -> list[Action]:
    reporter.stage("check the installed files against RECORD")
    if not fresh:
        _prove_standing(request, site)
        return []
    _insist_on_shipped_rows(request, site, fresh=True)
    judged = _judged_paths(request, site)
    _refuse_shadowing(site, judged)
    findings = check_install(site, skip=judged)
    if findings:
        raise _record_error(site, findings, fresh=True)
    return [CheckRecord(files=len(site.record))]


def _prove_standing(request: Request, site: Site) -> None:
    """RECORD itself, the sources, and the sizes of the rest, as on every run that installs nothing."""
    _insist_on_shipped_rows(request, site, fresh=False)
    judged = _judged_paths(request, site)
    _refuse_shadowing(site, judged)
    findings = peek_sources(site, skip=judged)
    if findings:
        raise _record_error(site, findings, fresh=False)
    if not is_replaceable(site):
        _refuse_other_torch(request, site)


def _prove_others(request: Request, site: Site) -> None:
    """What nobody has proven yet: RECORD by the wheel's own, every file but the series' by RECORD, and torch."""
    shipped = request.open_wheel().record().shipped_digest
    if site.record.shipped_digest != shipped:
        raise ForeignBytesError(
            f"RECORD is not that of the lock's {site.distribution}, so it proves nothing",
            where=str(site.dist_info / "RECORD"),
            expected=f"{shipped} for the rows of the wheel",
            found=site.record.shipped_digest,
            hints=(reinstall_command(site, request.lock.build.version),),
        )
    judged = _judged_paths(request, site)
    _refuse_shadowing(site, judged)
    findings = check_files(site, skip=judged)
    if findings:
        raise _record_error(site, findings, fresh=False)
    _refuse_other_torch(request, site)


def _refuse_other_torch(request: Request, site: Site) -> None:
    """The torch that the distribution was built against, or none at all where the dependencies are left out."""
    locked, found = request.lock.build, read_torch(site.site_packages)
    if request.bare or request.sync or locked.torch is None:
        return
    if found and versions_agree(found.version, locked.torch) and locked.torch_cuda in (None, found.cuda):
        return
    raise EnvironmentConflictError(
        f"torch is not the one that {site.distribution} {site.version} is built for",
        where=str(site.site_packages / "torch"),
        expected=f"{locked.torch} with CUDA {locked.torch_cuda}",
        found=f"{found.version} with CUDA {found.cuda}" if found else "no torch",
        hints=(
            "run the same command with --sync, to install the lock's packages",
            "run the same command with --bare, to leave the dependencies out of the proof",
        ),
    )


def _insist_on_shipped_rows(request: Request, site: Site, *, fresh: bool) -> None:
    """RECORD is the one that the receipt knows, unless another wheel was installed just now."""
    receipt = read_receipt(site.state_dir)
    if receipt is None or not is_record_edited(site, receipt):
        return
    if fresh and receipt.build.wheel_sha256 != request.lock.build.sha256:
        return
    raise ForeignBytesError(
        "RECORD was edited since the install, so it proves nothing",
        where=str(site.dist_info / "RECORD"),
        expected=f"{receipt.record} for the rows of the wheel",
        found=site.record.shipped_digest,
        hints=(_mend_command(site),),
    )


def _mend_command(site: Site) -> str:
    return "run the same command with --rebuild, to replace it" if is_replaceable(site) else _remove_command(site)


def _refuse_shadowing(site: Site, judged: Collection[str]) -> None:
    unlisted = find_unlisted(site, judged)
    if unlisted.shadowing:
        count = count_text(len(unlisted.shadowing), "unlisted file")
        raise ForeignBytesError(
            f"{count} would be imported instead of {site.distribution}'s own",
            where=str(site.site_packages),
            found="\n".join(unlisted.shadowing),
            hints=(removal_of(site, unlisted),),
        )


def _remove_command(site: Site) -> str:
    if not is_replaceable(site):
        return reinstall_command(site, site.version)
    return f"rm -r {shlex.quote(str(site.prefix))}, then run the same command again"


def is_edited(request: Request, site: Site) -> bool:
    """Whether RECORD, or any installed file outside the series, is not as it was installed; every file is read."""
    edited = is_record_edited(site, read_receipt(site.state_dir))
    return edited or bool(check_files(site, skip=_judged_paths(request, site)))


def _judged_paths(request: Request, site: Site) -> set[str]:
    """The series' own files, which the series answers for."""
    return {*touched_paths(request.series.texts), *_leftover_paths(request, site)}


def _record_error(site: Site, findings: tuple[RecordFinding, ...], *, fresh: bool) -> ProvisionError:
    first = findings[0]
    shown = [f"{finding.path}: {finding.found or 'missing'}" for finding in findings[:5]]
    more = [f"and {len(findings) - 5} more"] if len(findings) > 5 else []
    error = HashMismatchError if fresh else ForeignBytesError
    mend = _remove_command(site) if fresh else _mend_command(site)
    if not is_replaceable(site):
        hints: tuple[str, ...] = (f"provision patch diff --venv {shlex.quote(str(site.prefix))}", mend)
    elif fresh or read_receipt(site.state_dir) is None:
        # The files were never right, and a new install from the same cache would be as wrong.
        clean = uv_room.name_command("cache", "clean", site.distribution)
        hints = (f"{clean}: a file in uv's cache was changed in place", mend)
    else:
        hints = (mend,)
    return error(
        f"{count_text(len(findings), 'installed file is', 'installed files are')} not as RECORD says",
        where=str(site.site_packages),
        expected=first.expected,
        found="\n".join([*shown, *more]),
        hints=hints,
    )


def _patch(request: Request, site: Site, reporter: Reporter) -> tuple[list[Action], SeriesVerdict]:
    reporter.stage("judge the patch series")
    facts = _gather(request, site)
    verdict = _judge(request, facts, site.record, read_receipt(site.state_dir))
    steps = (*make_plan(verdict, facts).steps, *_plan_leftovers(request, site))
    refuse_broken_python(venv_python(request.venv), steps, verdict)
    going = _going(request, site)
    for action in going:
        saved = save_texts(site, action.ids, site.state_dir)
        reporter.warn(f"{describe_action(action)}; kept as {', '.join(map(str, saved))}")
    if steps:
        from provisioner.transaction.transaction import execute

        reporter.stage(f"change {count_text(len({step.path for step in steps}), 'file')} in one transaction")
        _keep(request, site, verdict)
        execute(
            site.site_packages,
            site.state_dir,
            steps,
            record=site.record,
            may_create=frozenset({*verdict.final, *_leftover_paths(request, site)}),
        )
    _prove_build(request, site)
    return [*going, *([ChangeFiles(steps=steps)] if steps else [])], verdict


def _going(request: Request, site: Site) -> list[TakeOutPatches]:
    ids = patches_beside(read_receipt(site.state_dir), request.series)
    return [TakeOutPatches(ids=ids)] if ids else []


def _gather(request: Request, site: Site) -> dict[str, FileFacts]:
    objects = objects_of(site.state_dir)
    paths = touched_paths(request.series.texts)
    facts = gather_facts(site, paths, objects=objects)
    unknown = any(fact.recorded is not None and fact.pristine is None for fact in facts.values())
    return gather_facts(site, paths, objects=objects, wheel=request.open_wheel()) if unknown else facts


def _judge(
    request: Request, facts: Mapping[str, FileFacts], record: Record, former: Receipt | None = None
) -> SeriesVerdict:
    considered = {path: _as_shipped(fact) for path, fact in facts.items()} if request.reapply else facts
    verdict = judge_by_policy(request.series, considered, record)
    if verdict.blocking and former is not None:
        # The series may have changed since: what still has the bytes that we left is not somebody else's edit.
        own = {path: _as_shipped(fact) if _is_as_left(fact, former) else fact for path, fact in considered.items()}
        verdict = judge_by_policy(request.series, own, record)
    try:
        refuse_blocked(verdict, request.series, where=str(request.venv))
    except ConflictError as error:
        from provisioner.pipeline.evaluate import nearest_texts

        error.found = "\n".join(filter(None, (error.found, *nearest_texts(verdict, facts))))
        raise
    if request.strict:
        refuse_merged(verdict, where=str(request.venv))
    return verdict


def _is_as_left(fact: FileFacts, former: Receipt) -> bool:
    left = former.final_digests()
    now = digest_of(fact.content) if fact.content is not None else None
    return fact.path in left and left[fact.path] == now


def _leftover_paths(request: Request, site: Site) -> tuple[str, ...]:
    """Files that a former series changed and this one does not touch."""
    receipt = read_receipt(site.state_dir)
    former = receipt.final_digests() if receipt else {}
    return tuple(sorted(set(former) - set(touched_paths(request.series.texts))))


def _plan_leftovers(request: Request, site: Site) -> tuple[FileStep, ...]:
    """Steps that bring those files back to what was shipped.

    Raises ForeignBytesError where one is not as the former series left it, unless the request restores whatever stands.
    """
    paths, receipt = _leftover_paths(request, site), read_receipt(site.state_dir)
    if not paths or receipt is None:
        return ()
    former = receipt.final_digests()
    facts = gather_facts(site, paths, objects=objects_of(site.state_dir), wheel=request.open_wheel())
    for path, fact in facts.items():
        now = digest_of(fact.content) if fact.content is not None else None
        if fact.content != fact.pristine and now != former[path] and not request.reapply:
            raise ForeignBytesError(
                "a file that a former series changed has been changed since",
                where=str(site.site_packages / path),
                expected=former[path],
                found=now,
                hints=("run again with --reapply-patches to restore the files as shipped first",),
            )
    return steps_to({path: fact.pristine for path, fact in facts.items()}, facts, {})


def _as_shipped(fact: FileFacts) -> FileFacts:
    return replace(fact, content=fact.pristine)


def _keep(request: Request, site: Site, verdict: SeriesVerdict) -> None:
    """The files as shipped, and the texts of patches that come from elsewhere."""
    objects = objects_of(site.state_dir)
    for content in verdict.pristine.values():
        if content is not None:
            objects.put(content)
    for item in request.series.patches:
        objects.put(item.kept)


def _prove_build(request: Request, site: Site) -> None:
    """Version, commit and torch's CUDA, as text, are the lock's."""
    build, locked = read_build(site), request.lock.build
    if not (versions_agree(build.version, locked.version) and commits_agree(build.commit, locked.commit)):
        raise HashMismatchError(
            "the installed build is not the locked one",
            where=str(site.site_packages),
            expected=f"{locked.version} of {locked.commit}",
            found=f"{build.version} of {build.commit}",
        )
    if locked.url is not None:
        _prove_variant(site, locked)
    torch = read_torch(site.site_packages)
    if request.bare or locked.torch_cuda is None:
        return
    if torch is None:
        raise EnvironmentConflictError(
            "torch is not there, although it is installed by name",
            where=str(site.site_packages / "torch"),
            hints=(f"rm -r {shlex.quote(str(request.venv))}, then run the same command again",),
        )
    if torch.cuda != locked.torch_cuda:
        raise HashMismatchError(
            "torch is of another CUDA than the wheel",
            where=str(site.site_packages / "torch" / "version.py"),
            expected=f"CUDA {locked.torch_cuda}",
            found=f"CUDA {torch.cuda}",
            hints=(f"provision lock {request.recipe.name}",),
        )


def _prove_variant(site: Site, locked: LockedBuild) -> None:
    """The whole version, in which a commit's build has its variant, is the lock's."""
    from provisioner.wheels.names import DEFAULT_VARIANT, variant_of

    if site.version != locked.version or variant_of(site.version) != locked.variant:
        raise HashMismatchError(
            "the installed build is not the locked one",
            where=str(site.dist_info),
            expected=f"{locked.version}, variant {locked.variant or DEFAULT_VARIANT}",
            found=f"{site.version}, variant {variant_of(site.version) or DEFAULT_VARIANT}",
        )


def _make_receipt(request: Request, site: Site, verdict: SeriesVerdict, standing: Receipt | None) -> Receipt:
    """``standing`` is the receipt of packages that stand as they were; None where they were installed anew."""
    whole = standing if standing is not None and standing.lock_digest and not standing.bare else None
    kept = whole if request.bare else None  # the dependencies that a bare run leaves alone stay what they are
    locked, torch, former = request.lock.build, read_torch(site.site_packages), read_receipt(site.state_dir)
    return Receipt(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool=__version__,
        build=InstalledBuild(
            distribution=locked.distribution,
            version=str(site.version),
            commit=locked.commit,
            variant=locked.variant,
            wheel=locked.filename,
            wheel_sha256=locked.sha256,
        ),
        patches=_applied_patches(request, verdict),
        recipe=request.recipe.name,
        recipe_digest=request.recipe.digest,
        lock_digest=kept.lock_digest if kept else request.lock.digest,
        python=site.python,
        torch=torch.version if torch else None,
        torch_cuda=torch.cuda if torch else None,
        bare=request.bare and kept is None,
        packages=kept.packages if kept else _own_packages(request, site),
        record=site.record.shipped_digest,
        fork_any=request.fork_any,
        verification=former.verification if former else None,
        left_out=request.series.left_out,
    )


def _applied_patches(request: Request, verdict: SeriesVerdict) -> tuple[AppliedPatch, ...]:
    items = {item.id: item for item in request.series.patches}
    return tuple(
        AppliedPatch(
            id=patch.id,
            source=patch.source,
            text=digest_of(items[patch.id].kept),
            policy=items[patch.id].policy,
            verdict=patch.verdict.outcome,
            files=tuple(
                PatchedFile(path=file.path, before=file.before, after=file.after)
                for file in patch.files
                if file.verdict.remains and file.before != file.after
            ),
        )
        for patch in verdict.patches
    )
