"""Patches taken back, all or some."""

import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from provisioner import __version__
from provisioner.documents.receipt import AppliedPatch
from provisioner.environment.site import Site
from provisioner.environment.state import read_receipt, recover_site
from provisioner.errors import ConflictError, ForeignBytesError, UsageError
from provisioner.nearest import near_names
from provisioner.patching.model import PatchVerdict, Verdict
from provisioner.patching.plan import plan_revert, plan_without
from provisioner.patching.steps import FileStep
from provisioner.pipeline.apply_patches import WAIT_SECONDS, describe_applied, record_in_receipt, with_idle
from provisioner.pipeline.evaluate import (
    InstalledTree,
    Judgement,
    applied_series,
    judge_installed,
    with_applied,
)
from provisioner.resources import stored_patch_names
from provisioner.series.model import Series
from provisioner.transaction.lockfile import Holder, hold_environment
from provisioner.transaction.transaction import FileOutcome, Recovery, execute, is_interrupted
from provisioner.wheels.record import Record


@dataclass(frozen=True, kw_only=True)
class Withdrawal:
    """What taking patches back did: the ids, the files that changed, and the patches that stay.

    ``absent`` are ids that were named, and are of patches that are known and not applied here.
    """

    ids: tuple[str, ...]
    files: tuple[FileOutcome, ...]
    remaining: tuple[str, ...]
    absent: tuple[str, ...] = ()
    recovery: Recovery | None = None


def withdraw(
    tree: InstalledTree,
    ids: Sequence[str],
    named: Series,
    *,
    on_wait: Callable[[Holder | None], None] = lambda _holder: None,
) -> Withdrawal:
    """Take the patches with ``ids`` back (none: all), in one transaction, and prove the rest.

    The series is the receipt's, or ``named`` for an environment without one. Raises UsageError for an id of nothing;
    ForeignBytesError where a file is no state of the series; ConflictError, naming them, where patches that stay need
    one that goes; what a transaction raises, and BusyError.
    """
    site = tree.site
    if not (is_interrupted(site.state_dir) or applied_series(site).patches or named.patches):
        _refuse_unknown(ids, (), site)
        return Withdrawal(ids=(), files=(), remaining=(), absent=tuple(ids))
    with hold_environment(site.state_dir, wait_seconds=WAIT_SECONDS, on_wait=on_wait):
        recovery = recover_site(site)
        series = with_applied(site, named)
        applied = series.ids
        _refuse_unknown(ids, applied, site)
        going = frozenset(ids or applied) & frozenset(applied)
        if not going:
            return Withdrawal(ids=(), files=(), remaining=applied, absent=tuple(ids), recovery=recovery)
        judgement = judge_installed(tree, series)
        _require_standing(judgement)
        staying = replace(series, patches=tuple(item for item in series.patches if item.id not in going))
        files = execute(
            site.site_packages,
            site.state_dir,
            _plan(series, judgement, going, site.record),
            record=site.record,
            may_create=frozenset(judgement.facts),
        )
        _write_remaining(tree, staying)
    return Withdrawal(
        ids=tuple(patch_id for patch_id in applied if patch_id in going),
        files=files,
        remaining=staying.ids,
        absent=tuple(patch_id for patch_id in ids if patch_id not in going),
        recovery=recovery,
    )


def _refuse_unknown(ids: Sequence[str], applied: Sequence[str], site: Site) -> None:
    receipt = read_receipt(site.state_dir)
    known = (*applied, *(entry.id for entry in (receipt.patches if receipt else ())), *stored_patch_names())
    for patch_id in ids:
        if patch_id not in known:
            raise UsageError(
                f"no patch is called {patch_id!r}, neither here nor in the store",
                found=f"applied here: {', '.join(applied) or 'no patch at all'}",
                hints=(*near_names(patch_id, known), "provision patches"),
            )


def _require_standing(judgement: Judgement) -> None:
    for patch in judgement.verdict.patches:
        if not patch.verdict.settled:
            error = ForeignBytesError if patch.verdict is Verdict.FOREIGN else ConflictError
            raise error(
                "the files are not as the series left them, so nothing was taken back",
                where=patch.id,
                expected=str(Verdict.APPLIED),
                found=f"{patch.verdict}: {patch.why}" if patch.why else str(patch.verdict),
                hints=(
                    "provision patch diff",
                    f"to restore the files as shipped first: provision patch apply {_source_of(patch)} --reset",
                ),
            )


def _source_of(patch: PatchVerdict) -> str:
    """What a command line names the patch by."""
    return patch.id if patch.id in stored_patch_names() else shlex.quote(patch.source)


def _plan(series: Series, judgement: Judgement, going: Collection[str], record: Record) -> tuple[FileStep, ...]:
    if len(going) == len(series.patches):
        return plan_revert(judgement.verdict, judgement.facts).steps
    return plan_without(series.texts, judgement.verdict, judgement.facts, going, record).steps


def _write_remaining(tree: InstalledTree, staying: Series) -> None:
    """The receipt of what stays, judged anew on the files as they are now."""
    site = tree.site
    receipt = read_receipt(site.state_dir)
    if receipt is None:
        return
    patches = describe_standing(tree, staying)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    kept = with_idle(patches, receipt)
    record_in_receipt(site, replace(receipt, created=now, tool=__version__, patches=kept))


def describe_standing(tree: InstalledTree, series: Series) -> tuple[AppliedPatch, ...]:
    """Those of ``series`` that are in the files now, as the receipt lists them."""
    by_id = {item.id: item for item in series.patches}
    standing = [patch for patch in judge_installed(tree, series).verdict.patches if patch.verdict.remains]
    return tuple(describe_applied(by_id[patch.id], patch) for patch in standing)
