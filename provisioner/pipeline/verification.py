"""The check on a card, for an environment that the tool knows: what is tested, and where the result is kept."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from provisioner import __version__
from provisioner.documents.receipt import AppliedPatch, Receipt
from provisioner.documents.recipe import Recipe, Serve
from provisioner.environment.site import Site
from provisioner.environment.state import objects_of, read_receipt, write_receipt
from provisioner.errors import CardError, EnvironmentConflictError, UsageError
from provisioner.gpu.devices import read_inventory, select_card
from provisioner.gpu.model import Card
from provisioner.gpu.report import (
    FILE_NAME,
    Change,
    Form,
    Summary,
    Verdict,
    VerifyReport,
    changes_since,
    parse_summary,
    print_report,
    summarize,
)
from provisioner.gpu.verify import BehaviourCheck, Bench, Target, Wish, gather_facts, report_not_run, verify_card
from provisioner.pipeline.execute import WAIT_SECONDS
from provisioner.progress import Reporter
from provisioner.resources import patches_folder
from provisioner.series.store import open_stored_patch, stored_ids
from provisioner.transaction.folders import read_file, state_file, write_whole
from provisioner.transaction.lockfile import hold_environment

TOOL = f"provision {__version__}"
FALLBACK_MODULE = "vllm/_sm80_cpu_repack.py"
ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"


def verify_site(
    site: Site,
    card: Card,
    wish: Wish,
    *,
    allocator: str | None,
    reporter: Reporter,
    bench: Bench | None = None,
) -> VerifyReport:
    """Check the environment on ``card`` and keep the report beside the receipt, and its summary in it.

    ``allocator`` is the value of PYTORCH_CUDA_ALLOC_CONF that will serve. Whatever happens to the card, a report comes
    back. Raises EnvironmentConflictError where the environment has no Python of its own.
    """
    receipt = read_receipt(site.state_dir)
    with _make_target(site, receipt, allocator) as target:
        report = verify_card(target, card, wish, tool=TOOL, reporter=reporter, bench=bench)
    record_report(site, report)
    return report


def verify_quick(
    site: Site, card: Card, *, allocator: str | None, reporter: Reporter, bench: Bench | None = None
) -> VerifyReport:
    """The quick form, as a part of provisioning."""
    return verify_site(site, card, Wish(form=Form.QUICK), allocator=allocator, reporter=reporter, bench=bench)


def verify_if_needed(
    site: Site,
    recipe: Recipe,
    *,
    gpu: str | None,
    environ: Mapping[str, str],
    reporter: Reporter,
    bench: Bench | None = None,
) -> VerifyReport | None:
    """The quick form where a card is there and no former pass still holds; None where nothing was checked.

    Several cards and none named is a warning here: the environment does not depend on the choice.
    """
    try:
        card = find_card(gpu, environ)
    except UsageError as error:
        if gpu is not None:
            raise
        reporter.warn(f"{error.what}; to check one of them: provision verify {recipe.name} --gpu UUID")
        return None
    if isinstance(card, VerifyReport) or is_verified(site, card, allocator=allocator_of(recipe)):
        return None
    return verify_quick(site, card, allocator=allocator_of(recipe), reporter=reporter, bench=bench)


def is_verified(site: Site, card: Card, *, allocator: str | None) -> bool:
    """Whether the kept report is a pass and nothing that it depends on has changed."""
    summary = read_summary(site.state_dir)
    if summary is None or summary.verdict is not Verdict.BIT_EXACT:
        return False
    return not find_changes(site, summary, card=card, allocator=allocator)


def record_skip(site: Site) -> None:
    """Write down in the receipt that the user wanted no check; a former result stays."""
    receipt = read_receipt(site.state_dir)
    if receipt is not None and receipt.verification is None:
        record_report(site, report_not_run("skipped with --no-verify", tool=TOOL))


def find_card(wanted: str | None, environ: Mapping[str, str], *, form: Form = Form.QUICK) -> Card | VerifyReport:
    """The card to check, or the report (``not-run``) that says why there is none; a card comes before everything.

    Raises UsageError where there are several and none is named.
    """
    try:
        return select_card(read_inventory(), wanted, environ=environ)
    except UsageError:
        raise
    except CardError as error:
        found = f" ({error.found})" if error.found else ""
        return report_not_run(f"{error.what}{found}", tool=TOOL, form=form)


def allocator_of(recipe: Recipe | None) -> str | None:
    """What the recipe sets for torch's allocator when it serves."""
    sections: tuple[Serve | None, ...] = (recipe.serve,) if recipe else ()
    values = [item.value for serve in sections if serve for item in serve.variables if item.name == ALLOCATOR_VARIABLE]
    return values[0] if values else None


def record_report(site: Site, report: VerifyReport) -> None:
    """Keep the report, whole or not at all, and put its summary into the receipt where there is one."""
    with hold_environment(site.state_dir, wait_seconds=WAIT_SECONDS):
        write_whole(state_file(site.state_dir, FILE_NAME), print_report(report).encode())
        receipt = read_receipt(site.state_dir)
        if receipt is not None:
            write_receipt(site.state_dir, replace(receipt, verification=summarize(report)))


def read_summary(state_dir: Path) -> Summary | None:
    """The stored report's summary; None where there is none. Raises InvalidReceiptError for an unreadable one."""
    path = state_file(state_dir, FILE_NAME)
    try:
        text = read_file(path).decode("utf-8")
    except FileNotFoundError:
        return None
    return parse_summary(text, where=str(path))


def find_changes(site: Site, summary: Summary, *, card: Card | None, allocator: str | None) -> tuple[Change, ...]:
    """What the report depends on that is another today; things of the card only where one is given."""
    receipt = read_receipt(site.state_dir)
    target = _describe_target(site, receipt, Path("python"), allocator)
    return changes_since(summary.bound, gather_facts(target, card, known=summary.bound))


@contextmanager
def _make_target(site: Site, receipt: Receipt | None, allocator: str | None) -> Iterator[Target]:
    if site.interpreter is None:
        raise EnvironmentConflictError(
            "a bare folder has no Python to run a check with",
            where=str(site.site_packages),
            hints=("provision verify --venv DIR",),
        )
    with tempfile.TemporaryDirectory(prefix="provision-verify-") as folder:
        checks, missing = _find_checks(site, receipt, Path(folder))
        target = _describe_target(site, receipt, site.interpreter.executable, allocator)
        yield replace(target, behaviours=checks, unchecked=missing)


def _describe_target(site: Site, receipt: Receipt | None, python: Path, allocator: str | None) -> Target:
    fallback = site.site_packages / FALLBACK_MODULE
    return Target(
        python=python,
        site_packages=site.site_packages,
        version=str(site.version),
        package=site.distribution,
        fallback=fallback if fallback.is_file() else None,
        shipped={entry.path: entry.digest for entry in site.record},
        patches={patch.id: patch.text for patch in receipt.patches} if receipt else {},
        allocator=allocator,
    )


def _find_checks(
    site: Site, receipt: Receipt | None, folder: Path
) -> tuple[tuple[BehaviourCheck, ...], tuple[str, ...]]:
    """The checks of the applied patches, each with the files as shipped; and the patches whose check cannot run."""
    checks: list[BehaviourCheck] = []
    missing: list[str] = []
    known = stored_ids(patches_folder())
    for patch in receipt.patches if receipt else ():
        program = _find_program(patch.id) if patch.id in known else None
        if program is None:
            continue
        pristine = folder / patch.id
        if _lay_out(site, patch, pristine):
            checks.append(BehaviourCheck(patch=patch.id, program=program, pristine=pristine))
        else:
            missing.append(f"the kernels of {patch.id}: their files as shipped are not at hand")
    return tuple(checks), tuple(missing)


def _find_program(patch_id: str) -> Path | None:
    stored = open_stored_patch(patches_folder(), patch_id)
    return stored.folder / stored.check if stored.check else None


def _lay_out(site: Site, patch: AppliedPatch, folder: Path) -> bool:
    """Write the files that ``patch`` touches, as shipped, below ``folder``; False where one is not kept."""
    objects = objects_of(site.state_dir)
    for file in (file for file in patch.files if file.path in site.record):
        shipped = site.record.digest(file.path)
        content = objects.get(shipped) if shipped is not None else None
        if content is None:
            return False
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return True
