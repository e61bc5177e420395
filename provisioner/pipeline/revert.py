"""Back to the files as shipped."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from provisioner.environment.facts import gather_facts
from provisioner.environment.integrity import check_record
from provisioner.environment.site import Site, find_site
from provisioner.environment.state import objects_of, read_receipt, recover_site, state_of, write_receipt
from provisioner.errors import EnvironmentConflictError, ForeignBytesError, NotRestoredError
from provisioner.patching.plan import plan_revert
from provisioner.patching.series import judge_series, touched_paths
from provisioner.pipeline.execute import WAIT_SECONDS
from provisioner.series.policies import RecipeSeries
from provisioner.transaction.lockfile import hold_environment
from provisioner.transaction.transaction import FileOutcome, execute


@dataclass(frozen=True, kw_only=True)
class Reverted:
    """The files that were changed (none where all were as shipped), and others that are not as RECORD says."""

    venv: Path
    files: tuple[FileOutcome, ...]
    others: tuple[str, ...] = ()


def revert(distribution: str, series: RecipeSeries, venv: Path) -> Reverted:
    """Restore every file of the series to its bytes as shipped, remove what the series created, and prove RECORD.

    Raises ForeignBytesError where a file is in no state of the series; EnvironmentConflictError where there is nothing.
    """
    if not state_of(venv).is_dir():
        raise EnvironmentConflictError(
            "there is no environment of ours", where=str(venv), hints=("provision up RECIPE",)
        )
    with hold_environment(state_of(venv), wait_seconds=WAIT_SECONDS):
        site = find_site(venv, distribution)
        recover_site(site)
        outcomes = _restore(series, site)
        _forget_patches(site)
        others = _prove(series, site)
    return Reverted(venv=venv, files=outcomes, others=others)


def _restore(series: RecipeSeries, site: Site) -> tuple[FileOutcome, ...]:
    facts = gather_facts(site, touched_paths(series.patches), objects=objects_of(site.state_dir))
    verdict = judge_series(series.patches, facts, site.record)
    try:
        steps = plan_revert(verdict, facts).steps
    except ForeignBytesError as error:
        raise _with_hints(error, site) from error
    return execute(site.site_packages, site.state_dir, steps, record=site.record, may_create=frozenset(verdict.final))


def _forget_patches(site: Site) -> None:
    receipt = read_receipt(site.state_dir)
    if receipt is not None and receipt.patches:
        write_receipt(site.state_dir, replace(receipt, patches=(), verification=None))


def _with_hints(error: ForeignBytesError, site: Site) -> ForeignBytesError:
    venv = shlex.quote(str(site.prefix))
    return ForeignBytesError(
        error.what,
        where=error.where,
        expected=error.expected,
        found=error.found,
        hints=(f"provision patch diff --venv {venv}", f"provision up RECIPE --venv {venv} --reapply-patches"),
    )


def _prove(series: RecipeSeries, site: Site) -> tuple[str, ...]:
    """Insist on RECORD for the series' files; the other sources that are not as it says."""
    touched = set(touched_paths(series.patches))
    wrong = [item.path for item in check_record(site, python_only=True)]
    ours = [path for path in wrong if path in touched]
    if ours:
        raise NotRestoredError("files are not as RECORD says after the revert", where=", ".join(ours))
    return tuple(wrong)
