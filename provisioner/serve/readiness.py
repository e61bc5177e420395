"""Is the environment the one that was proven? The receipt, the files' digests and the required patches, as findings."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provisioner.documents.receipt import Receipt
from provisioner.documents.recipe import PatchPolicy, Recipe
from provisioner.environment.site import Site, find_site
from provisioner.environment.state import read_receipt
from provisioner.errors import ProvisionError
from provisioner.gpu.model import Card
from provisioner.gpu.report import Change
from provisioner.serve.findings import Finding, Severity, Subject, evidence_of
from provisioner.transaction.transaction import is_interrupted

_MOST_FILES = 5
# A verification's verdicts that let a server start; the others are refused where the card is the same.
_GOOD = frozenset({"bit-exact"})
_NO_VERDICT = frozenset({"not-run", "unsupported", "toolchain"})


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """An environment as found: site and receipt (None where they cannot be read), and everything that is wrong."""

    venv: Path
    site: Site | None
    receipt: Receipt | None
    findings: tuple[Finding, ...]

    @property
    def patches(self) -> frozenset[str] | None:
        """Ids of the patches that the receipt says are applied; None where there is no receipt."""
        return frozenset(patch.id for patch in self.receipt.patches) if self.receipt else None


def examine_environment(recipe: Recipe | None, venv: Path, *, distribution: str, mend: str) -> Readiness:
    """Look at ``venv`` without changing it; ``mend`` is the command that makes it right. Nothing is raised."""
    try:
        site = find_site(venv, distribution)
    except ProvisionError as error:
        return Readiness(venv=venv, site=None, receipt=None, findings=(_from_error(error, mend),))
    try:
        receipt = read_receipt(site.state_dir)
    except ProvisionError as error:
        return Readiness(venv=venv, site=site, receipt=None, findings=(_from_error(error, mend),))
    findings = (*_judge_state(site, mend), *_judge_receipt(recipe, site, receipt, mend))
    return Readiness(venv=venv, site=site, receipt=receipt, findings=findings)


def judge_verification(
    verification: Mapping[str, Any] | None, changes: Sequence[Change], *, recipe: str
) -> Iterator[Finding]:
    """What the last check on a card says of serving now that these things have changed since. Pure."""
    again = f"provision verify {recipe}"
    if verification is None:
        yield _finding("not-verified", Severity.WARNING, "the build was never verified on a card", (), (again,))
        return
    verdict, why = str(verification.get("verdict")), str(verification.get("why", ""))
    if verdict in _NO_VERDICT:
        what = f"the last verification came to no verdict: {verdict}"
        yield _finding("not-verified", Severity.WARNING, what, (why,), (again,))
    elif verdict not in _GOOD:
        what = f"the last verification says {verdict}"
        yield _finding("verification", Severity.ERROR, what, (why,), (again,))
    lines = tuple(f"{change.what}: verified {change.then}, now {change.now}" for change in changes)
    if any(change.what == "card" for change in changes):
        yield _finding("other-card", Severity.ERROR, "the build was verified on another card", lines, (again,))
    elif changes:
        what = "something that the verification depends on has changed since"
        yield _finding("verification-old", Severity.WARNING, what, lines, (again,))
    if verification.get("health") == "unobserved":
        what = "the card's health was not observed when it was verified: no source of Xids could be read"
        yield _finding("health-unobserved", Severity.WARNING, what, (), ("sudo " + again,))


def changes_since_verified(ready: Readiness, card: Card | None, allocator: str | None) -> tuple[Change, ...]:
    """What the stored verification depends on that is another today; nothing where there is no readable one."""
    if ready.site is None or ready.receipt is None or ready.receipt.verification is None:
        return ()
    # Costs much to load, and is needed only where a verification exists.
    from provisioner.pipeline.verification import find_changes, read_summary

    try:
        summary = read_summary(ready.site.state_dir)
    except ProvisionError:
        return ()
    return find_changes(ready.site, summary, card=card, allocator=allocator) if summary else ()


def judge_files(site: Site, receipt: Receipt, mend: str) -> Iterator[Finding]:
    """A finding where a file that the patches touched is not as the receipt says."""
    wrong = [
        f"{path}: expected {_short(wanted)}, found {_short(found)}"
        for path, wanted in sorted(receipt.final_digests().items())
        if (found := _digest_file(site.site_packages / path)) != wanted
    ]
    if wrong:
        more = (f"and {len(wrong) - _MOST_FILES} more",) if len(wrong) > _MOST_FILES else ()
        yield _finding(
            "files-changed",
            Severity.ERROR,
            "patched files are not as the receipt says",
            (*wrong[:_MOST_FILES], *more),
            (f"{mend} --reapply-patches",),
        )


def _judge_state(site: Site, mend: str) -> Iterator[Finding]:
    if is_interrupted(site.state_dir):
        yield _finding("interrupted", Severity.ERROR, "an interrupted change of files waits for recovery", (), (mend,))
    command = site.prefix / "bin" / "vllm" if site.prefix else None
    if command is not None and not command.is_file():
        yield _finding("no-command", Severity.ERROR, "the environment has no vllm command", (str(command),), (mend,))


def _judge_receipt(recipe: Recipe | None, site: Site, receipt: Receipt | None, mend: str) -> Iterator[Finding]:
    if receipt is None:
        where = (str(site.state_dir),)
        yield _finding("no-receipt", Severity.ERROR, "there is no receipt: nothing here was proven", where, (mend,))
        return
    if receipt.build.version != str(site.version):
        evidence = (f"receipt: {receipt.build.version}", f"installed: {site.version}")
        yield _finding("other-build", Severity.ERROR, "the installed build is not the receipt's", evidence, (mend,))
    if receipt.bare:
        what = "the environment is bare: its dependencies were left out, so nothing can run"
        yield _finding("bare", Severity.ERROR, what, (str(site.prefix),), (mend,))
    yield from judge_files(site, receipt, mend)
    if recipe is not None:
        yield from _judge_recipe(recipe, receipt, mend)


def _judge_recipe(recipe: Recipe, receipt: Receipt, mend: str) -> Iterator[Finding]:
    if receipt.recipe is not None and receipt.recipe != recipe.name:
        evidence = (f"receipt: {receipt.recipe}", f"asked: {recipe.name}")
        yield _finding("other-recipe", Severity.ERROR, "the environment is another recipe's", evidence, (mend,))
    elif receipt.recipe_digest is not None and receipt.recipe_digest != recipe.digest:
        what = "the recipe has changed since the environment was proven"
        yield _finding("recipe-changed", Severity.WARNING, what, (), (mend,))
    applied = {patch.id for patch in receipt.patches}
    lacking = [use for use in recipe.patches if use.policy is PatchPolicy.REQUIRED and use.id not in applied]
    for use in lacking:
        what = f"the required patch {use.id} is not applied"
        yield _finding("patch-missing", Severity.ERROR, what, (use.why,), (mend,))


def _from_error(error: ProvisionError, mend: str) -> Finding:
    return _finding(error.code, Severity.ERROR, error.what, evidence_of(error), (*error.hints, mend))


def _finding(id_: str, severity: Severity, what: str, evidence: tuple[str, ...], act: tuple[str, ...]) -> Finding:
    return Finding(
        id=id_,
        severity=severity,
        subject=Subject.ENVIRONMENT,
        what=what,
        evidence=evidence,
        next=tuple(dict.fromkeys(act)),
    )


def _digest_file(path: Path) -> str | None:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return None


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "no file"
