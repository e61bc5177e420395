"""The report as Markdown: a table that fits an issue or a job's summary, and the accounts below it."""

from collections.abc import Iterator

from provisioner.drift.model import Cell, DriftReport
from provisioner.drift.reports.text import LETTERS, cell_of, changes, legend, row_keys
from provisioner.recipe import DriftResponse


def print_markdown(report: DriftReport) -> str:
    """The whole report as Markdown."""
    return "\n".join([*_table(report), "", *_accounts(report), *_cost(report)]) + "\n"


def _table(report: DriftReport) -> Iterator[str]:
    labels = [column.build.label for column in report.columns]
    yield "| recipe | patch | " + " | ".join(labels) + " |"
    yield "|---|---|" + "---|" * len(labels)
    for recipe, patch in row_keys(report):
        cells = [_letter(cell_of(column, (recipe, patch))) for column in report.columns]
        yield f"| {recipe} | {patch} | " + " | ".join(cells) + " |"
    yield ""
    yield legend(report).replace("  ", " · ") + " · **bold** fails"


def _letter(cell: Cell | None) -> str:
    if cell is None:
        return "!"
    letter = f"`{LETTERS[cell.verdict.verdict]}`"
    return f"**{letter}**" if cell.response is DriftResponse.FAIL else letter


def _accounts(report: DriftReport) -> Iterator[str]:
    for recipe, patch in row_keys(report):
        for column, cell in changes(report, (recipe, patch)):
            if cell.response is DriftResponse.IGNORE:
                continue
            yield f"* **{column.build.label}**, {recipe}, {patch}: {cell.verdict.verdict} (key `{cell.key}`)"
            yield from (f"    * {line}" for line in cell.account)
    for column in report.unread:
        yield f"* **{column.build.label}** could not be read: {column.failure}"


def _cost(report: DriftReport) -> Iterator[str]:
    cost = report.cost
    yield ""
    yield f"{len(report.columns)} builds, {cost.requests} requests, {cost.received / 1e6:.1f} MB, {cost.seconds:.1f} s."
