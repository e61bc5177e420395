"""A fork's checkout as findings: is it the pinned commit, and are the drafter's weights there?"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from provisioner.documents.recipe import Recipe
from provisioner.errors import ProvisionError
from provisioner.series import checkout as forks
from provisioner.serve.findings import Finding, Severity, Subject, evidence_of


def judge_checkout(recipe: Recipe, folder: Path) -> Iterator[Finding]:
    """A warning where the checkout is not the pinned commit; nothing is raised."""
    if recipe.fork is None:
        return
    try:
        forks.require_pinned(forks.read_checkout(folder, recipe.fork), recipe.fork)
    except ProvisionError as error:
        yield Finding(
            id="fork-differs",
            severity=Severity.WARNING,
            subject=Subject.ENVIRONMENT,
            what=error.what,
            evidence=evidence_of(error),
            next=error.hints,
        )


def judge_drafter(recipe: Recipe, folder: Path, environ: Mapping[str, str], *, severity: Severity) -> Iterator[Finding]:
    """A finding where the drafter's weights are not there, with the command that fetches them."""
    fork = recipe.fork
    if fork is None or not fork.drafters or forks.find_drafter(folder, fork, environ) is not None:
        return
    named = environ.get("DRAFT")
    looked = (f"DRAFT={named}",) if named else tuple(str(folder / name) for name in fork.drafters)
    yield Finding(
        id="no-drafter",
        severity=severity,
        subject=Subject.ENVIRONMENT,
        what="the drafter's weights are not there",
        evidence=looked,
        next=(forks.drafter_hint(folder),),
    )
