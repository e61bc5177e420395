"""The report as one self-contained page: a lettered matrix, and for each cell an account and a side-by-side."""

from collections.abc import Iterator
from html import escape
from importlib.resources import files
from string import Template

from provisioner.counts import count_text
from provisioner.documents.recipe import DriftResponse
from provisioner.drift.model import Cell, Column, DriftReport, HunkView, Row, Turn, Unread
from provisioner.drift.reports.text import describe_turn, letter_of, letters_used

_MEANING = {
    DriftResponse.IGNORE: "holds",
    DriftResponse.NOTICE: "notice",
    DriftResponse.WARN: "warning",
    DriftResponse.FAIL: "fails",
}


def print_html(report: DriftReport) -> str:
    """The page; it loads nothing and works by keyboard."""
    rows = report.rows
    page = Template(files("provisioner.drift.reports").joinpath("page.html").read_text(encoding="utf-8"))
    return page.safe_substitute(
        lead=escape(_lead(report)),
        recipes="".join(_option(recipe) for recipe in dict.fromkeys(recipe for recipe, _ in rows)),
        heads="".join(f'<th scope="col">{escape(column.build.label)}</th>' for column in report.columns),
        rows="".join(_row(report, number, row) for number, row in enumerate(rows)),
        legend="".join(_legend(report)),
        accounts="".join(_accounts(report)) or "<p>Every patch holds on every build.</p>",
        footer=escape(_cost(report)),
    )


def _lead(report: DriftReport) -> str:
    failing = len(report.failing)
    cells = count_text(failing, "cell fails by its recipe's policy", "cells fail by their recipes' policies")
    patches, builds = count_text(len(report.rows), "patch", "patches"), count_text(len(report.columns), "build")
    found = [cells if failing else "nothing fails"]
    if report.unread:
        found.append(count_text(len(report.unread), "build could not be read", "builds could not be read"))
    if report.not_judged:
        found.append(count_text(len(report.not_judged), "cell was not judged", "cells were not judged"))
    return f"{patches} on {builds} of {', '.join(report.against)}: {', '.join(found)}."


def _option(recipe: str) -> str:
    return f'<option value="{escape(recipe)}">{escape(recipe)}</option>'


def _row(report: DriftReport, number: int, row: Row) -> str:
    recipe, patch = row
    cells = "".join(f"<td>{_cell(column, column.look_up(row), number)}</td>" for column in report.columns)
    title = f'<th scope="row">{escape(patch)}<small>{escape(recipe)}</small></th>'
    return f"<tr {_data(report, row)}>{title}{cells}</tr>"


def _data(report: DriftReport, row: Row) -> str:
    found = [column.look_up(row) for column in report.columns]
    drifts = any(not isinstance(cell, Cell) or cell.response is not DriftResponse.IGNORE for cell in found)
    return f'data-recipe="{escape(row[0])}" data-patch="{escape(row[1])}" data-drifts="{"yes" if drifts else "no"}"'


def _cell(column: Column, answer: Cell | Unread | None, number: int) -> str:
    if not isinstance(answer, Cell):
        return _empty_cell(column, answer)
    cell = answer
    meaning = f"{cell.verdict.verdict}, {_MEANING[cell.response]}"
    label = f"{cell.verdict.id} on {column.build.label}: {meaning}"
    letter = escape(letter_of(cell)) + ("*" if cell.response is DriftResponse.FAIL else "")
    if cell.response is DriftResponse.IGNORE:
        names = f'title="{escape(label)}" aria-label="{escape(label)}"'
        return f'<span class="cell ignore" tabindex="0" {names}>{letter}</span>'
    anchor = _anchor(number, column)
    return (
        f'<a class="cell {cell.response}" href="#{anchor}" title="{escape(meaning)}" '
        f'aria-label="{escape(label)}">{letter}</a>'
    )


def _empty_cell(column: Column, answer: Unread | None) -> str:
    why = "not judged" if answer is None else f"could not be read: {answer.why}"
    label = escape(f"{column.build.label}: {why}")
    return f'<span class="cell unread" tabindex="0" title="{label}" aria-label="{label}">{letter_of(answer)}</span>'


def _anchor(number: int, column: Column) -> str:
    label = "".join(character if character.isalnum() else "-" for character in column.build.label)
    return f"row{number}-{label}"


def _legend(report: DriftReport) -> Iterator[str]:
    yield from (f"<li><b>{escape(letter)}</b> {escape(meaning)}</li>" for letter, meaning in letters_used(report))
    yield "<li><b>*</b> fails by the recipe's policy</li>"


def _accounts(report: DriftReport) -> Iterator[str]:
    for number, row in enumerate(report.rows):
        for column in report.columns:
            cell = column.look_up(row)
            if isinstance(cell, Cell) and cell.response is not DriftResponse.IGNORE:
                yield _account(report, row, column, cell, _anchor(number, column))
    yield from (_turn(report, turn) for found in report.bisections for turn in found.turns)


def _turn(report: DriftReport, turn: Turn) -> str:
    title = escape(f"{turn.patch} ({turn.recipe}): {describe_turn(turn)}")
    lines = "".join(f"<li>{escape(line)}</li>" for line in turn.after.account)
    views = "".join(_side_by_side(view) for view in turn.after.views)
    data = _data(report, turn.after.row)
    return f"<details {data}><summary>{title}</summary><ul>{lines}</ul>{views}</details>"


def _account(report: DriftReport, row: Row, column: Column, cell: Cell, anchor: str) -> str:
    title = f"{escape(column.build.label)}: {escape(row[1])} ({escape(row[0])}): {escape(str(cell.verdict.verdict))}"
    lines = "".join(f"<li>{escape(line)}</li>" for line in cell.account)
    views = "".join(_side_by_side(view) for view in cell.views)
    return (
        f'<details id="{anchor}" {_data(report, row)}><summary>{title} <code>key {escape(cell.key)}</code></summary>'
        f"<ul>{lines}</ul>{views}</details>"
    )


def _side_by_side(view: HunkView) -> str:
    height = max(len(view.wanted), len(view.found))
    rows = "".join(_side_row(view, number) for number in range(height))
    place = f"line {view.line}" if view.line is not None else "nowhere in the file"
    heads = f'<th class="mark"></th><th scope="col">the patch wants</th><th scope="col">stands at {place}</th>'
    caption = f"{escape(view.path)}, hunk {view.index}: {escape(view.verdict)}"
    return f'<table class="sides"><caption>{caption}</caption><tr>{heads}</tr>{rows}</table>'


def _side_row(view: HunkView, number: int) -> str:
    wanted = view.wanted[number] if number < len(view.wanted) else ""
    found = view.found[number] if number < len(view.found) else ""
    differs = wanted != found
    sign = '<td class="mark" aria-label="differs">≠</td>' if differs else '<td class="mark"></td>'
    opening = '<tr class="differs">' if differs else "<tr>"
    return f"{opening}{sign}<td>{escape(wanted)}</td><td>{escape(found)}</td></tr>"


def _cost(report: DriftReport) -> str:
    cost = report.cost
    return (
        f"{count_text(cost.requests, 'request')}, {cost.received / 1e6:.1f} MB received, {cost.seconds:.1f} s, "
        f"{count_text(cost.reused, 'build')} answered by equal digests."
    )
