"""Carrying a recipe out: environment, packages, proof of RECORD, patches, post-conditions, receipt."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from provisioner import __version__
from provisioner.environment import uv as uv_room
from provisioner.environment.lock import Lock, marker_environment, select_pin
from provisioner.environment.site import Site, find_site, venv_python
from provisioner.errors import ForeignBytesError, HashMismatchError, ProvisionError
from provisioner.patching.gather import gather_facts, shipped_facts
from provisioner.patching.hold import Holder, hold_environment
from provisioner.patching.model import FileFacts, SeriesVerdict
from provisioner.patching.plan import make_plan
from provisioner.patching.series import touched_paths
from provisioner.patching.steps import FileStep
from provisioner.patching.transaction import execute, is_interrupted, recover
from provisioner.progress import Reporter
from provisioner.provisioning.checks import (
    RecordFinding,
    check_record,
    commits_agree,
    read_build,
    read_torch,
    versions_agree,
)
from provisioner.provisioning.inspect import (
    Absent,
    Found,
    Installed,
    Unfinished,
    differing_packages,
    inspect_environment,
    refuse_other_build,
)
from provisioner.provisioning.plan import (
    Action,
    ChangeFiles,
    CheckRecord,
    CreateEnvironment,
    EnvironmentPlan,
    InstallPackages,
    RecoverTransaction,
    WriteReceipt,
    is_receipt_current,
)
from provisioner.provisioning.preflight import BARE_ENVIRONMENT_BYTES, FULL_ENVIRONMENT_BYTES, check_disk
from provisioner.provisioning.series import RecipeSeries, judge_recipe, refuse_blocked
from provisioner.provisioning.state import Owner, objects_of, read_receipt, state_of, write_owner, write_receipt
from provisioner.receipt import AppliedPatch, InstalledBuild, PatchedFile, Receipt
from provisioner.recipe import Recipe
from provisioner.wheels.lazy import Wheel

WAIT_SECONDS = 600


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to provision, where, and how.

    ``open_wheel`` gives the locked wheel's pristine files and is called only where they are needed. ``bare`` leaves the
    dependencies out; ``reapply`` restores pristine files before the series is applied, whatever stands there.
    """

    recipe: Recipe
    lock: Lock
    series: RecipeSeries
    venv: Path
    python: str | None
    bare: bool
    reapply: bool
    open_wheel: Callable[[], Wheel]
    environ: Mapping[str, str]


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
    found = inspect_environment(request.venv, request.recipe.distribution)
    match found:
        case Absent() | Unfinished():
            return _plan_new(request, uv)
        case Installed(site=site):
            return _plan_existing(request, site)


def provision(request: Request, uv: uv_room.Uv, reporter: Reporter) -> Outcome:
    """Make the environment as its recipe says and prove it; a second run finds nothing to do.

    Raises a ProvisionError whose class says whether nothing was done, everything was restored, or not.
    """
    distribution = request.recipe.distribution
    if isinstance(inspect_environment(request.venv, distribution), Absent | Unfinished):
        check_disk(request.venv, BARE_ENVIRONMENT_BYTES if request.bare else FULL_ENVIRONMENT_BYTES)
    with _held(request.venv, reporter):
        found = inspect_environment(request.venv, distribution)
        actions = [*_recover(found, reporter), *_install(request, found, uv, reporter)]
        site = find_site(request.venv, distribution)
        actions += _prove_record(request, site, fresh=bool(actions), reporter=reporter)
        changed, verdict = _patch(request, site, reporter)
        actions += changed
        receipt = _make_receipt(request, site, verdict)
        if not is_receipt_current(read_receipt(site.state_dir), receipt):
            write_receipt(site.state_dir, receipt)
            actions.append(WriteReceipt())
    return Outcome(receipt=receipt, verdict=verdict, actions=tuple(actions))


def _plan_new(request: Request, uv: uv_room.Uv) -> EnvironmentPlan:
    python = _choose_python(request, uv)
    wheel = request.open_wheel()
    record = wheel.record()
    facts = shipped_facts(record, touched_paths(request.series.patches), wheel)
    verdict = _judge(request, facts)
    steps = make_plan(verdict, facts).steps
    version = ".".join(map(str, python.version))
    actions: tuple[Action, ...] = (
        CreateEnvironment(venv=str(request.venv), python=f"{version} ({python.executable})"),
        InstallPackages(count=_count_packages(request, version)),
        CheckRecord(files=len(record)),
        *((ChangeFiles(steps=steps),) if steps else ()),
        WriteReceipt(),
    )
    return EnvironmentPlan(actions=actions, verdict=verdict, final=dict(verdict.final_digests))


def _plan_existing(request: Request, site: Site) -> EnvironmentPlan:
    refuse_other_build(site, request.lock)
    facts = _gather(request, site)
    verdict = _judge(request, facts)
    steps = make_plan(verdict, facts).steps
    actions: list[Action] = []
    if is_interrupted(site.state_dir):
        actions.append(RecoverTransaction())
    differing = () if request.bare else differing_packages(site, request.lock)
    if differing:
        actions.append(InstallPackages(count=len(differing), reasons=differing))
    if steps:
        actions.append(ChangeFiles(steps=steps))
    if not is_receipt_current(read_receipt(site.state_dir), _make_receipt(request, site, verdict)):
        actions.append(WriteReceipt())
    return EnvironmentPlan(actions=tuple(actions), verdict=verdict, final=dict(verdict.final_digests))


@contextmanager
def _held(venv: Path, reporter: Reporter) -> Iterator[None]:
    def say(holder: Holder | None) -> None:
        reporter.warn(f"waiting for {holder or 'another process'}")

    with hold_environment(state_of(venv), wait_seconds=WAIT_SECONDS, on_wait=say):
        yield


def _recover(found: Found, reporter: Reporter) -> list[Action]:
    if not isinstance(found, Installed) or not is_interrupted(found.site.state_dir):
        return []
    reporter.stage("recover an interrupted change")
    recover(found.site.site_packages, found.site.state_dir)
    return [RecoverTransaction()]


def _install(request: Request, found: Found, uv: uv_room.Uv, reporter: Reporter) -> list[Action]:
    match found:
        case Absent() | Unfinished():
            return _install_new(request, uv, reporter)
        case Installed(site=site):
            return _install_missing(request, site, uv, reporter)


def _install_new(request: Request, uv: uv_room.Uv, reporter: Reporter) -> list[Action]:
    python = _choose_python(request, uv)
    version = ".".join(map(str, python.version))
    if not python.preferred and request.python is None:
        reporter.warn(f"Python {request.recipe.python.preferred} was not found; using {version}")
    # The mark comes first: whatever happens now, the next run knows the folder as ours and goes on.
    write_owner(state_of(request.venv), Owner(recipe=request.recipe.name, tool=__version__))
    reporter.stage(f"create the environment with Python {version}")
    uv_room.create_venv(uv, request.venv, python.executable)
    count = _count_packages(request, version)
    reporter.stage(f"install {count} packages from the lock" if count > 1 else "install the wheel alone")
    _sync(request, uv, reporter)
    return [CreateEnvironment(venv=str(request.venv), python=version), InstallPackages(count=count)]


def _install_missing(request: Request, site: Site, uv: uv_room.Uv, reporter: Reporter) -> list[Action]:
    refuse_other_build(site, request.lock)
    differing = () if request.bare else differing_packages(site, request.lock)
    if not differing:
        return []
    reporter.stage(f"install {len(differing)} packages that differ from the lock")
    _sync(request, uv, reporter)
    return [InstallPackages(count=len(differing), reasons=differing)]


def _sync(request: Request, uv: uv_room.Uv, reporter: Reporter) -> None:
    text = select_pin(request.lock, request.recipe.distribution) if request.bare else request.lock.requirements
    with tempfile.TemporaryDirectory(prefix="provision-") as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(text, encoding="utf-8")
        uv_room.sync_requirements(uv, venv_python(request.venv), requirements, reporter=reporter)


def _choose_python(request: Request, uv: uv_room.Uv) -> uv_room.ChosenPython:
    if request.python is not None:
        return uv_room.take_python(uv, request.python, request.recipe.python, request.environ)
    return uv_room.choose_python(uv, request.recipe.python, request.environ)


def _count_packages(request: Request, python: str) -> int:
    environment = marker_environment(python)
    return 1 if request.bare else sum(pin.wanted(environment) for pin in request.lock.pins)


def _prove_record(request: Request, site: Site, *, fresh: bool, reporter: Reporter) -> list[Action]:
    """Every file after an install, the sources alone on a later run; the series' own files are judged by the series."""
    reporter.stage("check the installed files against RECORD")
    findings = check_record(site, skip=touched_paths(request.series.patches), python_only=not fresh)
    if findings:
        raise _record_error(site, findings, fresh=fresh)
    return [CheckRecord(files=len(site.record))] if fresh else []


def _record_error(site: Site, findings: tuple[RecordFinding, ...], *, fresh: bool) -> ProvisionError:
    first = findings[0]
    shown = [f"{finding.path}: {finding.found or 'missing'}" for finding in findings[:5]]
    more = [f"and {len(findings) - 5} more"] if len(findings) > 5 else []
    error = HashMismatchError if fresh else ForeignBytesError
    hints = (
        ("uv cache clean vllm", "then run the same command again: a file in uv's cache was changed in place")
        if fresh
        else ("these files are not part of any patch; reinstall them: remove the environment and provision it again",)
    )
    return error(
        f"{len(findings)} installed files are not as RECORD says",
        where=str(site.site_packages),
        expected=first.expected,
        found="\n".join([*shown, *more]),
        hints=hints,
    )


def _patch(request: Request, site: Site, reporter: Reporter) -> tuple[list[Action], SeriesVerdict]:
    reporter.stage("judge the patch series")
    facts = _gather(request, site)
    verdict = _judge(request, facts)
    steps = make_plan(verdict, facts).steps
    if steps:
        reporter.stage(f"change {len({step.path for step in steps})} files in one transaction")
        _keep_pristine(site, verdict)
        _change(site, steps, verdict)
    _prove_build(request, site)
    return ([ChangeFiles(steps=steps)] if steps else []), verdict


def _gather(request: Request, site: Site) -> dict[str, FileFacts]:
    objects = objects_of(site.state_dir)
    paths = touched_paths(request.series.patches)
    facts = gather_facts(site, paths, objects=objects)
    unknown = any(fact.recorded is not None and fact.pristine is None for fact in facts.values())
    return gather_facts(site, paths, objects=objects, wheel=request.open_wheel()) if unknown else facts


def _judge(request: Request, facts: Mapping[str, FileFacts]) -> SeriesVerdict:
    considered = {path: _as_shipped(fact) for path, fact in facts.items()} if request.reapply else facts
    verdict = judge_recipe(request.series, considered)
    refuse_blocked(verdict, request.series, where=str(request.venv))
    return verdict


def _as_shipped(fact: FileFacts) -> FileFacts:
    return replace(fact, content=fact.pristine)


def _keep_pristine(site: Site, verdict: SeriesVerdict) -> None:
    objects = objects_of(site.state_dir)
    for content in verdict.pristine.values():
        if content is not None:
            objects.put(content)


def _change(site: Site, steps: tuple[FileStep, ...], verdict: SeriesVerdict) -> None:
    execute(site.site_packages, site.state_dir, steps, record=site.record, may_create=frozenset(verdict.final))


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
    torch = read_torch(site.site_packages)
    if request.bare or locked.torch_cuda is None:
        return
    if torch is None or torch.cuda != locked.torch_cuda:
        raise HashMismatchError(
            "torch is of another CUDA than the wheel",
            where=str(site.site_packages / "torch" / "version.py"),
            expected=f"CUDA {locked.torch_cuda}",
            found=f"CUDA {torch.cuda}" if torch else "no torch",
            hints=(f"provision lock {request.recipe.name}",),
        )


def _make_receipt(request: Request, site: Site, verdict: SeriesVerdict) -> Receipt:
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
        lock_digest=request.lock.digest,
        python=site.python,
        torch=torch.version if torch else None,
        torch_cuda=torch.cuda if torch else None,
        bare=request.bare,
        verification=former.verification if former else None,
    )


def _applied_patches(request: Request, verdict: SeriesVerdict) -> tuple[AppliedPatch, ...]:
    texts = {item.patch.id: item.patch.digest for item in request.series.patches}
    return tuple(
        AppliedPatch(
            id=patch.id,
            source=patch.source,
            text=texts[patch.id],
            policy=request.series.policies.get(patch.id, "required"),
            verdict="applied",
            files=tuple(
                PatchedFile(path=file.path, before=file.before, after=file.after)
                for file in patch.files
                if file.before != file.after
            ),
        )
        for patch in verdict.patches
    )
