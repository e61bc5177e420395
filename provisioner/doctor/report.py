"""What doctor looked at and what it found. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from provisioner.serve.findings import Finding, Severity, Subject

HEALTHY, FOUND, CARD = 0, 1, 8


class Outcome(StrEnum):
    """A check that was not made is never called passed."""

    PASSED = "passed"
    FOUND = "found"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check: what was looked at (``looked_at``, or why it was not), and the findings."""

    id: str
    title: str
    outcome: Outcome
    looked_at: str
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All checks, in the order they were made."""

    checks: tuple[Check, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for check in self.checks for finding in check.findings)

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 for a warning or an error or where nothing could be checked, 8 for a card missing, lost or
        wedged."""
        grave = [finding for finding in self.findings if finding.severity is not Severity.NOTE]
        if any(finding.subject is Subject.CARD and finding.severity is Severity.ERROR for finding in grave):
            return CARD
        made = any(check.outcome is not Outcome.SKIPPED for check in self.checks)
        return FOUND if grave or not made else HEALTHY


def checked(id_: str, title: str, looked_at: str, findings: Iterable[Finding]) -> Check:
    """A check that was made."""
    found = tuple(findings)
    outcome = Outcome.FOUND if found else Outcome.PASSED
    return Check(id=id_, title=title, outcome=outcome, looked_at=looked_at, findings=found)


def skipped(id_: str, title: str, why: str) -> Check:
    """A check that could not be made."""
    return Check(id=id_, title=title, outcome=Outcome.SKIPPED, looked_at=why)
