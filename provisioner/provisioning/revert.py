"""Back to the files as shipped."""

from dataclasses import dataclass, replace
from pathlib import Path

from provisioner.environment.site import Site, find_site
from provisioner.errors import EnvironmentConflictError, NotRestoredError
from provisioner.patching.gather import gather_facts
from provisioner.patching.hold import hold_environment
from provisioner.patching.plan import plan_revert
from provisioner.patching.series import judge_series, touched_paths
from provisioner.patching.transaction import FileOutcome, execute, recover
from provisioner.provisioning.checks import check_record
from provisioner.provisioning.execute import WAIT_SECONDS
from provisioner.provisioning.series import RecipeSeries
from provisioner.provisioning.state import objects_of, read_receipt, state_of, write_receipt


@dataclass(frozen=True, kw_only=True)
class Reverted:
    """The files that were changed; none where all were as shipped already."""

    venv: Path
    files: tuple[FileOutcome, ...]


def revert(distribution: str, series: RecipeSeries, venv: Path) -> Reverted:
    """Restore every file of the series to its bytes as shipped, remove what the series created, and prove RECORD.

    Raises ForeignBytesError where a file is in no state of the series; EnvironmentConflictError where there is nothing.
    """
    if not state_of(venv).is_dir():
        raise EnvironmentConflictError("there is no environment of ours", where=str(venv), hints=("provision status",))
    with hold_environment(state_of(venv), wait_seconds=WAIT_SECONDS):
        site = find_site(venv, distribution)
        recover(site.site_packages, site.state_dir)
        outcomes = _restore(series, site)
        _forget_patches(site)
        _prove(series, site)
    return Reverted(venv=venv, files=outcomes)


def _restore(series: RecipeSeries, site: Site) -> tuple[FileOutcome, ...]:
    facts = gather_facts(site, touched_paths(series.patches), objects=objects_of(site.state_dir))
    verdict = judge_series(series.patches, facts, site.record)
    steps = plan_revert(verdict, facts).steps
    return execute(site.site_packages, site.state_dir, steps, record=site.record, may_create=frozenset(verdict.final))


def _forget_patches(site: Site) -> None:
    receipt = read_receipt(site.state_dir)
    if receipt is not None and receipt.patches:
        write_receipt(site.state_dir, replace(receipt, patches=(), verification=None))


def _prove(series: RecipeSeries, site: Site) -> None:
    touched = set(touched_paths(series.patches))
    wrong = [item.path for item in check_record(site, python_only=True) if item.path in touched]
    if wrong:
        raise NotRestoredError("files are not as RECORD says after the revert", where=", ".join(wrong))
