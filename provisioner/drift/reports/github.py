"""The report for GitHub Actions: annotations, one a drift, as workflow commands."""

from collections.abc import Iterator

from provisioner.documents.recipe import DriftResponse
from provisioner.drift.model import Cell, DriftReport
from provisioner.drift.reports.text import changes, describe_turn, holes

_LEVELS = {DriftResponse.FAIL: "error", DriftResponse.WARN: "warning", DriftResponse.NOTICE: "notice"}


def print_github(report: DriftReport) -> str:
    """A workflow command for each drift where it begins, and for what is not known; nothing where all holds."""
    lines = [*_annotations(report)]
    return "\n".join(lines) + "\n" if lines else ""


def _annotations(report: DriftReport) -> Iterator[str]:
    for recipe, patch in report.rows:
        for column, cell in changes(report, (recipe, patch)):
            level = _LEVELS.get(cell.response)
            if level is not None:
                title = _property(f"{patch} ({recipe}) on {column.build.label}")
                yield f"::{level} title={title}::{_data(_text(cell))}"
    for column in report.unread:
        title = _property(f"{column.build.label} could not be read")
        yield f"::warning title={title}::{_data(column.failure or '')}"
    lacking = "\n".join(holes(report))
    if lacking:
        yield f"::warning title=not judged::{_data(lacking)}"
    for turn in (turn for found in report.bisections for turn in found.turns):
        title = _property(f"{turn.patch} ({turn.recipe}) turned on {turn.first.label}")
        yield f"::notice title={title}::{_data(describe_turn(turn))}"


def _text(cell: Cell) -> str:
    return "\n".join([f"{cell.verdict.verdict}, key {cell.key}", *cell.account])


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
