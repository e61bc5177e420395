"""Another build in an environment's place: made beside it, proven, swapped in by rename, proven again.

The new environment is relocatable: its scripts find their interpreter wherever the folder is moved to. Between the two
renames of a swap the environment is missing for a moment; a run that was killed there is put right by the next one.
"""

import shutil
from dataclasses import replace
from pathlib import Path

from provisioner.environment.site import find_site
from provisioner.environment.state import read_owner, read_receipt, state_of
from provisioner.environment.uv import Uv, VenvLayout
from provisioner.errors import EnvironmentConflictError, NotRestoredError, ProvisionError, RestoredError
from provisioner.pipeline.execute import WAIT_SECONDS, Outcome, Request, plan_environment, provision
from provisioner.pipeline.plan import EnvironmentPlan, TakeOutPatches, describe_action
from provisioner.pipeline.user_patches import TAKEN_OUT, patches_beside, save_texts
from provisioner.progress import Reporter
from provisioner.transaction.lockfile import hold_environment


def settle_rebuild(venv: Path) -> bool:
    """Put right what a killed rebuild left: the former environment comes back where none is in its place.

    Returns whether anything was done.
    """
    _, former = _beside(venv)
    if not venv.exists() and _is_ours(former):
        former.rename(venv)
        return True
    return False


def plan_rebuild(request: Request, uv: Uv) -> EnvironmentPlan:
    """All that :func:`rebuild_environment` would do beside the environment, with nothing written.

    Raises what provisioning would raise before its first write.
    """
    new, _ = _beside(request.venv)
    return plan_environment(replace(request, venv=new), uv)


def rebuild_environment(request: Request, uv: Uv, reporter: Reporter) -> Outcome:
    """Replace the environment by one of the lock's build; the old one is kept until the new one is proven in its place.

    Raises what provisioning raises, with the old environment untouched; RestoredError where the new one could not be
    proven in its place and the old one is back; NotRestoredError where even that failed.
    """
    new, former = _beside(request.venv)
    with hold_environment(state_of(request.venv), wait_seconds=WAIT_SECONDS):
        for leftover in (new, former):
            _remove(leftover)
        reporter.stage(f"build the new environment beside {request.venv.name}")
        built = provision(replace(request, venv=new, layout=VenvLayout.RELOCATABLE), uv, reporter)
        going = _save_beside(request, new, reporter)
        reporter.stage("put it in its place")
        request.venv.rename(former)
        try:
            new.rename(request.venv)
            outcome = provision(request, uv, reporter)
        except (OSError, ProvisionError) as error:
            _swap_back(request.venv, new, former, error)
        _remove(former)
    return replace(outcome, actions=(*built.actions, *going, *outcome.actions))


def _save_beside(request: Request, new: Path, reporter: Reporter) -> tuple[TakeOutPatches, ...]:
    """Bring the texts of patches that stand beside the recipe's over to the new environment, which has them no more."""
    ids = patches_beside(read_receipt(state_of(request.venv)), request.series)
    if not ids:
        return ()
    action = TakeOutPatches(ids=ids)
    save_texts(find_site(request.venv, request.recipe.distribution), ids, state_of(new))
    reporter.warn(f"{describe_action(action)}; kept in {state_of(request.venv) / TAKEN_OUT}")
    return (action,)


def _swap_back(venv: Path, new: Path, former: Path, error: Exception) -> None:
    try:
        if venv.exists():
            venv.rename(new)
        former.rename(venv)
    except OSError as failure:
        raise NotRestoredError(
            "the new environment could not be proven, and the old one not put back",
            where=str(former),
            found=f"{error}; {failure}",
            hints=(f"mv {former} {venv}",),
        ) from error
    raise RestoredError(
        "the new environment could not be proven in its place; the old one is back",
        where=str(venv),
        found=str(error),
        hints=(f"the new one is kept for a look: {new}",),
    ) from error


def _beside(venv: Path) -> tuple[Path, Path]:
    return venv.with_name(f".{venv.name}.new"), venv.with_name(f".{venv.name}.former")


def _is_ours(folder: Path) -> bool:
    return folder.is_dir() and read_owner(state_of(folder)) is not None


def _remove(folder: Path) -> None:
    if not folder.exists():
        return
    if not _is_ours(folder):
        raise EnvironmentConflictError(
            "a folder that is not ours is in the way of the rebuild",
            where=str(folder),
            hints=(f"mv {folder} ELSEWHERE",),
        )
    shutil.rmtree(folder)
