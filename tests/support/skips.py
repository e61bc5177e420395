"""With CI=true a skipped test has failed: what is never run proves nothing. A plugin of pytest."""

import os
from collections.abc import Generator
from pathlib import Path

import pytest

_MUST_RUN = os.environ.get("CI") == "true"
_BESIDE = Path(__file__).parents[3] / "shared"


def _is_excused(reason: str) -> bool:
    """The fork's files are others' and not in this repository: they can only be asked for where they are handed out."""
    return "PROVISION_FORK_CHECKOUT" in reason and not _BESIDE.is_dir()


def _fail_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not _MUST_RUN or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not _is_excused(reason):
        report.outcome = "failed"
        report.longrepr = f"{reason}\nNothing but a GPU may be missing where CI=true."


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.get_closest_marker("gpu") is None:
        _fail_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_skipped(report)
    return report
