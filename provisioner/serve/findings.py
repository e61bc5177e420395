"""What serve and doctor have to say: one finding, its evidence, and what to run next. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from provisioner.errors import ProvisionError


class Severity(StrEnum):
    """``error``: the server would fail or do harm; ``warning``: it would run worse; ``note``: worth knowing."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Subject(StrEnum):
    """What a finding is about; it decides the exit code of a refusal."""

    COMMAND = "command"
    ENVIRONMENT = "environment"
    CARD = "card"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing found. ``what`` is a sentence without a full stop; each of ``next`` is a command or an act."""

    id: str
    severity: Severity
    subject: Subject
    what: str
    evidence: tuple[str, ...] = ()
    next: tuple[str, ...] = ()


def evidence_of(error: ProvisionError) -> tuple[str, ...]:
    """Where an error was met, and what was found there instead of what was expected."""
    lines = (error.where, error.found, error.expected and f"expected {error.expected}")
    return tuple(line for line in lines if line)


def refusals(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Those that stop a start."""
    return tuple(finding for finding in findings if finding.severity is Severity.ERROR)


def exit_code_of(findings: Iterable[Finding]) -> int:
    """Exit code of a refused start: the card (8) before the environment (5) before the command line (2); 0 if none."""
    return max((_exit_code(finding.subject) for finding in refusals(findings)), default=0)


def _exit_code(subject: Subject) -> int:
    match subject:
        case Subject.COMMAND:
            return 2
        case Subject.ENVIRONMENT:
            return 5
        case Subject.CARD:
            return 8
        case _:
            assert_never(subject)
