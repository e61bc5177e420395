"""The table for people: patch by wheel, one letter a cell, and the account of each change of verdict."""

from collections.abc import Iterator

from provisioner.drift.bisect import Bisection, answer_of
from provisioner.drift.model import Cell, Column, DriftReport
from provisioner.patching.model import Verdict
from provisioner.recipe import DriftResponse

LETTERS = {
    Verdict.APPLIES: "=",
    Verdict.APPLIES_AT_OFFSET: "~",
    Verdict.APPLIED: "A",
    Verdict.ALREADY_IN_SERIES: "S",
    Verdict.MERGED_UPSTREAM: "M",
    Verdict.PROBABLY_MERGED: "m",
    Verdict.PARTIAL: "P",
    Verdict.STALE_VERSION: "O",
    Verdict.AMBIGUOUS: "?",
    Verdict.WRONG_SCOPE: "W",
    Verdict.CONFLICT: "X",
    Verdict.TARGET_MISSING: "T",
    Verdict.NOT_SHIPPED: "N",
    Verdict.FOREIGN: "F",
    Verdict.INVALID: "I",
}
"""A letter for each verdict, so that nothing rests on colour."""


def row_keys(report: DriftReport) -> tuple[tuple[str, str], ...]:
    """Recipe and patch of each row, in the order in which they first stand in the report."""
    return tuple(dict.fromkeys((cell.recipe, cell.verdict.id) for column in report.columns for cell in column.cells))


def cell_of(column: Column, row: tuple[str, str]) -> Cell | None:
    """The cell of a row on one build; None where it could not be read."""
    return next((cell for cell in column.cells if (cell.recipe, cell.verdict.id) == row), None)


def changes(report: DriftReport, row: tuple[str, str]) -> Iterator[tuple[Column, Cell]]:
    """The builds of a row on which its drift differs from the build before, the first one included."""
    key = None
    for column in report.columns:
        cell = cell_of(column, row)
        if cell is not None and cell.key != key:
            key = cell.key
            yield column, cell


def print_text(report: DriftReport) -> str:
    """The whole report as plain text."""
    return "\n".join([*_table(report), "", *_accounts(report), *_unread(report), _cost(report)]) + "\n"


def print_bisection(found: Bisection) -> str:
    """Where each patch turned, as plain text."""
    lines = [
        f"{turn.recipe}: {turn.patch}: {answer_of(turn.before)} up to {turn.last.label}, "
        f"{turn.after.verdict.verdict} from {turn.first.label}\n"
        + "".join(f"    {line}\n" for line in turn.after.account)
        for turn in found.turns
    ] or [f"no answer differs between {found.good.label} and {found.bad.label}\n"]
    return "".join([*lines, f"{found.judged} wheels read, {found.between} builds lie between\n"])


def legend(report: DriftReport) -> str:
    """The letters that the report uses, with their verdicts."""
    used = {cell.verdict.verdict for column in report.columns for cell in column.cells}
    return "  ".join(f"{LETTERS[verdict]} {verdict}" for verdict in LETTERS if verdict in used)


def _table(report: DriftReport) -> Iterator[str]:
    rows = row_keys(report)
    names = [f"{recipe}: {patch}" for recipe, patch in rows]
    width = max([len(name) for name in names], default=0)
    labels = [column.build.label for column in report.columns]
    yield "  ".join([" " * width, *labels])
    for name, row in zip(names, rows, strict=True):
        cells = [_letter(cell_of(column, row)).center(len(column.build.label)) for column in report.columns]
        yield "  ".join([name.ljust(width), *cells]).rstrip()
    yield ""
    yield legend(report) + ("  ! could not be read" if report.unread else "")


def _letter(cell: Cell | None) -> str:
    if cell is None:
        return "!"
    mark = {DriftResponse.FAIL: "*", DriftResponse.WARN: "'"}.get(cell.response, "")
    return LETTERS[cell.verdict.verdict] + mark


def _accounts(report: DriftReport) -> Iterator[str]:
    for row in row_keys(report):
        for column, cell in changes(report, row):
            if cell.response is DriftResponse.IGNORE:
                continue
            yield f"{column.build.label}: {row[0]}: {row[1]}: {cell.verdict.verdict} ({cell.response}, key {cell.key})"
            yield from (f"    {line}" for line in cell.account)


def _unread(report: DriftReport) -> Iterator[str]:
    for column in report.unread:
        yield f"{column.build.label}: could not be read: {column.failure}"


def _cost(report: DriftReport) -> str:
    cost = report.cost
    size = f"{cost.received / 1e6:.1f} MB"
    return (
        f"{len(report.columns)} builds in {cost.seconds:.1f} s: {cost.requests} requests, {size} received, "
        f"{cost.reused} answered by equal digests"
    )
