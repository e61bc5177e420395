"""The report as Markdown: a table that fits an issue or a job's summary, and the accounts below it."""

from collections.abc import Iterator

from provisioner.counts import count_text
from provisioner.documents.recipe import DriftResponse
from provisioner.drift.model import Cell, DriftReport, Unread
from provisioner.drift.reports.text import changes, describe_turn, holes, legend, letter_of


def print_markdown(report: DriftReport) -> str:
    """The whole report as Markdown."""
    return "\n".join([*_table(report), "", *_accounts(report), *_cost(report)]) + "\n"


def _table(report: DriftReport) -> Iterator[str]:
    labels = [column.build.label for column in report.columns]
    yield "| recipe | patch | " + " | ".join(labels) + " |"
    yield "|---|---|" + "---|" * len(labels)
    for recipe, patch in report.rows:
        cells = [_letter(column.look_up((recipe, patch))) for column in report.columns]
        yield f"| {recipe} | {patch} | " + " | ".join(cells) + " |"
    yield ""
    yield legend(report).replace("  ", " · ") + " · **bold** fails"


def _letter(answer: Cell | Unread | None) -> str:
    if not isinstance(answer, Cell):
        return letter_of(answer)
    letter = f"`{letter_of(answer)}`"
    return f"**{letter}**" if answer.response is DriftResponse.FAIL else letter


def _accounts(report: DriftReport) -> Iterator[str]:
    for recipe, patch in report.rows:
        for column, cell in changes(report, (recipe, patch)):
            if cell.response is DriftResponse.IGNORE:
                continue
            yield f"* **{column.build.label}**, {recipe}, {patch}: {cell.verdict.verdict} (key `{cell.key}`)"
            yield from (f"    * {line}" for line in cell.account)
    for column in report.unread:
        yield f"* **{column.build.label}** could not be read: {column.failure}"
    yield from (f"* {line}" for line in holes(report))
    for turn in (turn for found in report.bisections for turn in found.turns):
        yield f"* **{turn.first.label}**, {turn.recipe}, {turn.patch}: {describe_turn(turn)}"
        yield from (f"    * {line}" for line in turn.after.account)


def _cost(report: DriftReport) -> Iterator[str]:
    cost = report.cost
    yield ""
    builds, requests = count_text(len(report.columns), "build"), count_text(cost.requests, "request")
    yield f"{builds}, {requests}, {cost.received / 1e6:.1f} MB, {cost.seconds:.1f} s."
