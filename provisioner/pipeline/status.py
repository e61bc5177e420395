"""What an environment is now: the receipt, and the files as they are."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from provisioner.counts import count_text
from provisioner.digests import Digest, digest_of
from provisioner.documents.policy import LeftOut
from provisioner.documents.receipt import Receipt
from provisioner.documents.recipe import PatchPolicy, Recipe
from provisioner.environment.facts import gather_facts
from provisioner.environment.integrity import (
    RecordFinding,
    SourceCheck,
    check_sources,
    commits_agree,
    is_record_edited,
    read_build,
    read_torch,
)
from provisioner.environment.site import Site
from provisioner.environment.state import objects_of, read_receipt, state_of
from provisioner.environment.unlisted import Unlisted, find_unlisted, removal_of
from provisioner.patching.model import FileFacts, PatchVerdict, SeriesPatch, Verdict
from provisioner.patching.series import judge_series, touched_paths
from provisioner.pipeline.evaluate import applied_series
from provisioner.pipeline.inspect import (
    Absent,
    Adoptable,
    Installed,
    Unfinished,
    differing_packages,
    inspect_environment,
    is_replaceable,
    reinstall_command,
)
from provisioner.records import dataclass
from provisioner.series.fork import find_series
from provisioner.series.model import pristine_only
from provisioner.transaction.interrupted import is_interrupted
from provisioner.transaction.lockfile import read_holder
from provisioner.wheels.record import Record

ADDED = "added"
"""Stands for the policy of a patch that was applied to the environment beside the recipe's."""


@dataclass(frozen=True, kw_only=True)
class FileStatus:
    """A file of a patch: digest as shipped, as the series wants it, and as it is (None: no such file)."""

    path: str
    pristine: Digest | None
    before: Digest | None
    after: Digest | None
    now: Digest | None


@dataclass(frozen=True, kw_only=True)
class PatchStatus:
    """A patch of the recipe and what the files say of it."""

    id: str
    policy: str
    verdict: Verdict
    why: str
    files: tuple[FileStatus, ...]


@dataclass(frozen=True, kw_only=True)
class Status:
    """The whole answer; ``proven`` only where nothing contradicts the recipe. ``notes`` are remarks that do not."""

    recipe: str
    venv: Path
    state: str
    distribution: str
    version: str | None = None
    commit: str | None = None
    python: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    bare: bool = False
    verification: str | None = None
    patches: tuple[PatchStatus, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()

    @property
    def proven(self) -> bool:
        """Whether the environment is as its recipe says."""
        return self.state == "installed" and not self.problems


def read_status(recipe: Recipe, venv: Path, check: SourceCheck = check_sources) -> Status:
    """Read the status of the recipe's environment: the series' files, and the others against RECORD by ``check``.

    Raises EnvironmentConflictError as inspection does.
    """
    found = inspect_environment(venv, recipe.distribution)
    match found:
        case Absent():
            return _missing(recipe, venv, "absent", "there is no environment yet")
        case Unfinished():
            return _missing(recipe, venv, "unfinished", _say_unfinished(venv))
        case Installed(site=site) | Adoptable(site=site):
            return _installed(recipe, venv, site, check)


def _missing(recipe: Recipe, venv: Path, state: str, problem: str) -> Status:
    return Status(
        recipe=recipe.name,
        venv=venv,
        state=state,
        distribution=recipe.distribution,
        problems=(problem,),
        hints=(_up_command(recipe, venv),),
    )


def _say_unfinished(venv: Path) -> str:
    holder = read_holder(state_of(venv))
    return f"a first run is going on: {holder}" if holder else "an interrupted first run"


def _up_command(recipe: Recipe, venv: Path, *options: str) -> str:
    return shlex.join(["provision", "up", recipe.name, "--venv", str(venv), *options])


def _installed(recipe: Recipe, venv: Path, site: Site, check: SourceCheck) -> Status:
    receipt, build, torch = read_receipt(site.state_dir), read_build(site), read_torch(site.site_packages)
    patches = _judge(recipe, venv, site, receipt)
    found_torch = (torch.version, torch.cuda) if torch else (None, None)
    answered = _patched(patches, receipt)
    wrong, unlisted = check(site, skip=answered), find_unlisted(site, answered)
    record_edited = is_record_edited(site, receipt)
    mending = _hints_of_edits(recipe, venv, site) if wrong or record_edited else _hints(recipe, venv, patches)
    problems = (
        *_receipt_problems(receipt, build.commit, site),
        *(("RECORD was edited since the install, so it proves nothing",) if record_edited else ()),
        *_torch_problems(receipt, found_torch),
        *_package_problems(receipt, site),
        *_patch_problems(patches),
        *_omission_problems(recipe, receipt),
        *_record_problems(wrong),
        *_shadow_problems(unlisted),
    )
    return Status(
        recipe=recipe.name,
        venv=venv,
        state="installed",
        distribution=site.distribution,
        version=str(site.version),
        commit=build.commit,
        python=site.python,
        torch=torch.version if torch else None,
        torch_cuda=torch.cuda if torch else None,
        bare=receipt.bare if receipt else False,
        verification=_describe_verification(receipt, torch.version if torch else None) if receipt else None,
        patches=patches,
        left_out=receipt.left_out if receipt else (),
        problems=problems,
        notes=_unlisted_notes(unlisted),
        hints=(*_removal_hints(site, unlisted), *mending) if problems else (),
    )


def _hints_of_edits(recipe: Recipe, venv: Path, site: Site) -> tuple[str, ...]:
    """What mends files outside the series, and those of the series with them."""
    if is_replaceable(site):
        return (_up_command(recipe, venv, "--rebuild"),)
    return (reinstall_command(site, site.version), _up_command(recipe, venv))


def _removal_hints(site: Site, unlisted: Unlisted) -> tuple[str, ...]:
    return (removal_of(site, unlisted),) if unlisted.shadowing else ()


def _hints(recipe: Recipe, venv: Path, patches: tuple[PatchStatus, ...]) -> tuple[str, ...]:
    if any(patch.policy == PatchPolicy.REQUIRED and _needs_reset(patch.verdict) for patch in patches):
        return (_up_command(recipe, venv, "--reapply-patches"),)
    return (_up_command(recipe, venv),)


def _needs_reset(verdict: Verdict) -> bool:
    return verdict.resettable or verdict is Verdict.CONFLICT


def _torch_problems(receipt: Receipt | None, found: tuple[str | None, str | None]) -> tuple[str, ...]:
    if receipt is None or receipt.bare or (receipt.torch, receipt.torch_cuda) == found:
        return ()
    return (f"torch is {found[0]} (CUDA {found[1]}), the receipt's is {receipt.torch} (CUDA {receipt.torch_cuda})",)


def _package_problems(receipt: Receipt | None, site: Site) -> tuple[str, ...]:
    wanted = receipt.packages if receipt else {}
    differing = differing_packages(site, wanted)
    shown = [f"{name} {wanted[name]}".rstrip() + " is not what is installed" for name in differing[:5]]
    return (*shown, *([f"and {count_text(len(differing) - 5, 'more package')}"] if len(differing) > 5 else []))


def _patched(patches: tuple[PatchStatus, ...], receipt: Receipt | None) -> set[str]:
    """The files that the series answers for; those of a patch that is not needed or left out must be as shipped."""
    judged = {file.path for patch in patches if _answers(patch) for file in patch.files}
    return judged | set(receipt.final_digests() if receipt else ())


def _answers(patch: PatchStatus) -> bool:
    return patch.policy in {PatchPolicy.REQUIRED, ADDED} or (
        patch.policy == PatchPolicy.OPTIONAL and patch.verdict.settled
    )


def _record_problems(wrong: tuple[RecordFinding, ...]) -> tuple[str, ...]:
    shown = [f"{item.path} is {'missing' if item.found is None else 'not as shipped'}" for item in wrong[:5]]
    return (*shown, *([f"and {count_text(len(wrong) - 5, 'more file')}"] if len(wrong) > 5 else []))


def _shadow_problems(unlisted: Unlisted) -> tuple[str, ...]:
    return tuple(
        f"{path} is not of the distribution, and Python prefers it to a module that is" for path in unlisted.shadowing
    )


def _unlisted_notes(unlisted: Unlisted) -> tuple[str, ...]:
    found = unlisted.others
    shown = [f"{path} is neither of the distribution nor of a patch" for path in found[:5]]
    return (*shown, *([f"and {count_text(len(found) - 5, 'more such file')}"] if len(found) > 5 else []))


def _describe_verification(receipt: Receipt, torch: str | None) -> str | None:
    """The verdict of the last check on a card, and what changed in the environment since; the card is not asked."""
    if not receipt.verification:
        return None
    from provisioner.gpu.report import changes_since

    bound = {str(key): str(value) for key, value in dict(receipt.verification.get("bound") or {}).items()}
    now = {receipt.build.distribution: receipt.build.version}
    now |= {f"patch {patch.id}": patch.text for patch in receipt.patches}
    now |= {"torch": torch} if torch is not None else {}
    changed = [change.what for change in changes_since(bound, now)] if bound else []
    text = str(receipt.verification.get("verdict"))
    text += ", health unobserved" if receipt.verification.get("health") == "unobserved" else ""
    return text + (f"; changed since: {', '.join(changed)}" if changed else "")


def _receipt_problems(receipt: Receipt | None, commit: str | None, site: Site) -> tuple[str, ...]:
    problems = []
    if is_interrupted(site.state_dir):
        problems.append("an interrupted change of files waits for recovery")
    if receipt is None:
        problems.append("there is no receipt: the environment was never proven")
    elif receipt.build.commit is not None and not commits_agree(commit, receipt.build.commit):
        problems.append(f"the build is of commit {commit}, the receipt's is of {receipt.build.commit}")
    return tuple(problems)


def _patch_problems(patches: tuple[PatchStatus, ...]) -> tuple[str, ...]:
    unsettled = [
        f"{patch.id} is {patch.policy} and its verdict is {patch.verdict}"
        for patch in patches
        if patch.policy == PatchPolicy.REQUIRED and not patch.verdict.settled
    ]
    return (*unsettled, *(f"{patch.id} is applied and not the recipe's" for patch in patches if patch.policy == ADDED))


def _omission_problems(recipe: Recipe, receipt: Receipt | None) -> tuple[str, ...]:
    left_out = {item.id for item in receipt.left_out} if receipt else set()
    return tuple(
        f"{use.id} is {use.policy} and was left out: not as the recipe says"
        for use in recipe.patches
        if use.policy is PatchPolicy.REQUIRED and use.id in left_out
    )


def _judge(recipe: Recipe, venv: Path, site: Site, receipt: Receipt | None) -> tuple[PatchStatus, ...]:
    series = find_series(recipe, venv, site.version, receipt.left_out if receipt else ())
    unwanted = tuple(item.patch for item in series.unwanted)
    policies = {item.id: str(item.policy) for item in (*series.patches, *series.unwanted)}
    known = {*policies, *(item.id for item in series.left_out)}
    added = [item.patch for item in applied_series(site).patches if item.id not in known]
    patches = (*series.texts, *added)
    facts = gather_facts(site, touched_paths((*patches, *unwanted)), objects=objects_of(site.state_dir))
    now = {path: digest_of(fact.content) if fact.content is not None else None for path, fact in facts.items()}
    recorded = {path: fact.recorded for path, fact in facts.items()}
    verdicts = list(judge_series(patches, facts, site.record).patches)
    verdicts += [verdict for patch in unwanted for verdict in _judge_alone(patch, facts, site.record)]
    return tuple(
        PatchStatus(
            id=verdict.id,
            policy=policies.get(verdict.id, ADDED),
            verdict=verdict.verdict,
            why=verdict.why,
            files=_files_of(verdict, recorded, now),
        )
        for verdict in verdicts
    )


def _judge_alone(patch: SeriesPatch, facts: Mapping[str, FileFacts], record: Record) -> tuple[PatchVerdict, ...]:
    return judge_series((patch,), pristine_only(facts), record).patches


def _files_of(
    verdict: PatchVerdict, recorded: dict[str, Digest | None], now: dict[str, Digest | None]
) -> tuple[FileStatus, ...]:
    return tuple(
        FileStatus(
            path=file.path,
            pristine=recorded.get(file.path),
            before=file.before,
            after=file.after,
            now=now.get(file.path),
        )
        for file in verdict.files
    )
