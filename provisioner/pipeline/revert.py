"""Back to the files as shipped."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from provisioner.environment.facts import gather_facts
from provisioner.environment.integrity import check_record
from provisioner.environment.site import Site, find_site
from provisioner.environment.state import objects_of, read_receipt, recover_site, state_of, write_receipt
from provisioner.errors import EnvironmentConflictError, ForeignBytesError, NotRestoredError
from provisioner.patching.plan import plan_revert, plan_without
from provisioner.patching.series import judge_series, touched_paths
from provisioner.pipeline.evaluate import InstalledTree
from provisioner.pipeline.execute import WAIT_SECONDS
from provisioner.pipeline.revert_patches import describe_standing
from provisioner.pipeline.user_patches import user_series
from provisioner.series.model import Series
from provisioner.transaction.lockfile import hold_environment
from provisioner.transaction.transaction import FileOutcome, execute


@dataclass(frozen=True, kw_only=True)
class Reverted:
    """The files that were changed (none where all were as shipped), and others that are not as RECORD says."""

    venv: Path
    files: tuple[FileOutcome, ...]
    others: tuple[str, ...] = ()


def revert(distribution: str, series: Series, venv: Path) -> Reverted:
    """Restore every file of the series to its bytes as shipped, remove what the series created, and prove RECORD.

    Patches of the user's own stay, with their entries in the receipt. Raises ForeignBytesError where a file is in no
    state of the series; ConflictError where one of the user's patches needs one of the series; EnvironmentConflictError
    where there is nothing.
    """
    if not state_of(venv).is_dir():
        raise EnvironmentConflictError(
            "there is no environment of ours", where=str(venv), hints=("provision up RECIPE",)
        )
    with hold_environment(state_of(venv), wait_seconds=WAIT_SECONDS):
        site = find_site(venv, distribution)
        recover_site(site)
        staying = user_series(site, series)
        outcomes = _restore(series, site, staying)
        _forget_patches(site, staying)
        others = _prove(series, site, staying)
    return Reverted(venv=venv, files=outcomes, others=others)


def _restore(series: Series, site: Site, staying: Series) -> tuple[FileOutcome, ...]:
    patches = (*series.texts, *staying.texts)
    facts = gather_facts(site, touched_paths(patches), objects=objects_of(site.state_dir))
    verdict = judge_series(patches, facts, site.record)
    try:
        plan = (
            plan_without(patches, verdict, facts, series.ids, site.record)
            if staying.patches
            else plan_revert(verdict, facts)
        )
    except ForeignBytesError as error:
        raise _with_hints(error, site) from error
    return execute(
        site.site_packages, site.state_dir, plan.steps, record=site.record, may_create=frozenset(verdict.final)
    )


def _forget_patches(site: Site, staying: Series) -> None:
    receipt = read_receipt(site.state_dir)
    if receipt is not None and receipt.patches:
        entries = describe_standing(InstalledTree(site=site), staying) if staying.patches else ()
        write_receipt(site.state_dir, replace(receipt, patches=entries, verification=None))


def _with_hints(error: ForeignBytesError, site: Site) -> ForeignBytesError:
    venv = shlex.quote(str(site.prefix))
    return ForeignBytesError(
        error.what,
        where=error.where,
        expected=error.expected,
        found=error.found,
        hints=(f"provision patch diff --venv {venv}", f"provision up RECIPE --venv {venv} --reapply-patches"),
    )


def _prove(series: Series, site: Site, staying: Series) -> tuple[str, ...]:
    """Insist on RECORD for the series' files, but for those of patches that stay, which the transaction proved; the
    other sources that are not as it says."""
    touched = set(touched_paths(series.texts))
    patched = touched_paths(staying.texts)
    wrong = [item.path for item in check_record(site, skip=patched, python_only=True)]
    ours = [path for path in wrong if path in touched]
    if ours:
        raise NotRestoredError("files are not as RECORD says after the revert", where=", ".join(ours))
    return tuple(wrong)
