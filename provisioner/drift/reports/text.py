"""The table for people: patch by wheel, one letter a cell, and the account of each change of verdict."""

from collections.abc import Iterator
from typing import assert_never

from provisioner.counts import count_text
from provisioner.documents.recipe import DriftResponse
from provisioner.drift.bisect import answer_of
from provisioner.drift.model import Bisection, Cell, Column, DriftReport, Row, Turn, Unread
from provisioner.patching.model import Verdict

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


NOT_READ, NOT_JUDGED = "!", "."
"""What stands in place of a letter where a build could not be read, and where nobody asked."""


def letter_of(answer: Cell | Unread | None) -> str:
    """The letter of what a column says of a row."""
    match answer:
        case Cell():
            return LETTERS[answer.verdict.verdict]
        case Unread():
            return NOT_READ
        case None:
            return NOT_JUDGED
        case _:
            assert_never(answer)


def changes(report: DriftReport, row: Row) -> Iterator[tuple[Column, Cell]]:
    """The builds of a row on which its drift differs from the build before, the first one included."""
    key = None
    for column in report.columns:
        cell = column.look_up(row)
        if isinstance(cell, Cell) and cell.key != key:
            key = cell.key
            yield column, cell


def holes(report: DriftReport) -> Iterator[str]:
    """A line for each row that was not judged on every build."""
    labels: dict[Row, list[str]] = {}
    for build, row in report.not_judged:
        labels.setdefault(row, []).append(build.label)
    for (recipe, patch), found in labels.items():
        yield f"{recipe}: {patch}: not judged on {', '.join(found)}"


def print_text(report: DriftReport) -> str:
    """The whole report as plain text."""
    found = "".join(f"{print_bisection(item)}\n" for item in report.bisections)
    return (
        "\n".join(
            [*_table(report), "", *_accounts(report), *_unread(report), *holes(report), f"{found}{_cost(report)}"]
        )
        + "\n"
    )


def print_bisection(found: Bisection) -> str:
    """Where each patch turned, as plain text."""
    lines = [
        f"{turn.recipe}: {turn.patch}: {describe_turn(turn)}\n"
        + "".join(f"    {line}\n" for line in turn.after.account)
        for turn in found.turns
    ] or [f"no answer differs between {found.good.label} and {found.bad.label}\n"]
    between = count_text(found.between, "build lies", "builds lie")
    return "".join([*lines, f"{count_text(found.judged, 'wheel')} read, {between} between\n"])


def describe_turn(turn: Turn) -> str:
    """Since when a patch has another answer."""
    return f"{answer_of(turn.before)} up to {turn.last.label}, {turn.after.verdict.verdict} from {turn.first.label}"


def legend(report: DriftReport) -> str:
    """The letters that the report uses, with their verdicts."""
    return "  ".join(f"{letter} {meaning}" for letter, meaning in letters_used(report))


def letters_used(report: DriftReport) -> Iterator[tuple[str, str]]:
    """Each letter that stands in the report's table, with what it means."""
    used = {cell.verdict.verdict for column in report.columns for cell in column.cells}
    yield from ((letter, str(verdict)) for verdict, letter in LETTERS.items() if verdict in used)
    if report.unread:
        yield NOT_READ, "could not be read"
    if report.not_judged:
        yield NOT_JUDGED, "not judged"


def _table(report: DriftReport) -> Iterator[str]:
    rows = report.rows
    names = [f"{recipe}: {patch}" for recipe, patch in rows]
    width = max([len(name) for name in names], default=0)
    labels = [column.build.label for column in report.columns]
    yield "  ".join([" " * width, *labels])
    for name, row in zip(names, rows, strict=True):
        cells = [_letter(column.look_up(row)).center(len(column.build.label)) for column in report.columns]
        yield "  ".join([name.ljust(width), *cells]).rstrip()
    yield ""
    yield legend(report)


def _letter(answer: Cell | Unread | None) -> str:
    response = answer.response if isinstance(answer, Cell) else DriftResponse.IGNORE
    return letter_of(answer) + {DriftResponse.FAIL: "*", DriftResponse.WARN: "'"}.get(response, "")


def _accounts(report: DriftReport) -> Iterator[str]:
    for row in report.rows:
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
        f"{count_text(len(report.columns), 'build')} in {cost.seconds:.1f} s: "
        f"{count_text(cost.requests, 'request')}, {size} received, "
        f"{cost.reused} answered by equal digests"
    )
