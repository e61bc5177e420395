"""Findings of serve and doctor as lines for people and as JSON."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from provisioner.serve.findings import Finding


def finding_lines(findings: "Iterable[Finding]", *, indent: str = "") -> list[str]:
    """Each finding with its evidence and what to run next."""
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{indent}{finding.severity}[{finding.id}]: {finding.what}")
        lines += [f"{indent}  found: {line}" for line in finding.evidence]
        lines += [f"{indent}  next:  {line}" for line in finding.next]
    return lines


def describe_finding(finding: "Finding") -> dict[str, Any]:
    """A finding for JSON."""
    return {
        "id": finding.id,
        "severity": str(finding.severity),
        "subject": str(finding.subject),
        "what": finding.what,
        "evidence": list(finding.evidence),
        "next": list(finding.next),
    }
