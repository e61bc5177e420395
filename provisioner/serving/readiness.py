"""Is the environment the one that was proven? The receipt, the files' digests and the required patches, as findings."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provisioner.environment.site import Site, find_site
from provisioner.errors import ProvisionError
from provisioner.gpu.devices import Card
from provisioner.patching.transaction import is_interrupted
from provisioner.provisioning.state import read_receipt
from provisioner.receipt import Receipt
from provisioner.recipe import PatchPolicy, Recipe
from provisioner.serving.findings import Finding, Severity, Subject

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
    verification: Mapping[str, Any] | None, now: Mapping[str, str], *, recipe: str
) -> Iterator[Finding]:
    """What the last check on a card says of serving as things are ``now`` (named as in its ``bound``). Pure."""
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
    yield from _judge_changes(verification, now, again)
    if verification.get("health") == "unobserved":
        what = "the card's health was not observed when it was verified: no source of Xids could be read"
        yield _finding("health-unobserved", Severity.WARNING, what, (), ("sudo " + again,))


def _judge_changes(verification: Mapping[str, Any], now: Mapping[str, str], again: str) -> Iterator[Finding]:
    bound = verification.get("bound")
    changed = [
        (name, str(then), now[name])
        for name, then in (bound.items() if isinstance(bound, Mapping) else ())
        if name in now and str(then) != now[name]
    ]
    lines = tuple(f"{name}: verified {then}, now {current}" for name, then, current in changed)
    if any(name == "card" for name, _, _ in changed):
        yield _finding("other-card", Severity.ERROR, "the build was verified on another card", lines, (again,))
    elif changed:
        what = "something that the verification depends on has changed since"
        yield _finding("verification-old", Severity.WARNING, what, lines, (again,))


def facts_now(receipt: Receipt, card: Card | None, allocator: str | None) -> dict[str, str]:
    """What a verification can depend on, as it is now, under the names that its record uses. Pure."""
    facts = {receipt.build.distribution: receipt.build.version, "allocator": allocator or "default"}
    facts |= {f"patch {patch.id}": patch.text for patch in receipt.patches}
    if card is not None:
        facts |= {"card": card.uuid, "driver": card.driver, "VBIOS": card.vbios or "unknown"}
    return facts


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
    evidence = [error.where] if error.where else []
    if error.expected is not None:
        evidence.append(f"expected: {error.expected}")
    if error.found is not None:
        evidence.append(f"found: {error.found}")
    return _finding(error.code, Severity.ERROR, error.what, tuple(evidence), (*error.hints, mend))


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
