"""What a report means for the exit code. Pure."""

from provisioner.drift.model import DriftReport

HOLDS, DRIFTED, UNREADABLE = 0, 1, 4


def exit_code(report: DriftReport) -> int:
    """1 where a policy fails or a bisection found a turn; else 4 where a build could not be read; else 0."""
    if report.failing or any(found.turns for found in report.bisections):
        return DRIFTED
    return UNREADABLE if report.unread else HOLDS
