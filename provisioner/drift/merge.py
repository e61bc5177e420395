"""Several reports as one: what a single run over everything would have said. Pure.

Merging is commutative, associative and idempotent but for the cost, which adds up: columns and cells are unions in an
order of their own, and of two equal answers one is kept by a rule that does not look at which came first.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from provisioner.drift.explain import tell_changes
from provisioner.drift.model import (
    Bisection,
    Build,
    Cell,
    Column,
    Cost,
    DriftReport,
    Row,
    age_of,
)
from provisioner.drift.reports.data import describe_bisection, describe_cell
from provisioner.errors import InvalidReportError


@dataclass(frozen=True, kw_only=True)
class Part:
    """One report, and the file that it came from."""

    name: str
    report: DriftReport


def merge_reports(parts: Sequence[Part]) -> DriftReport:
    """The report of all that the parts report; what none of them judged stays not judged.

    A recipe that one part judged on a build and another could not read there is judged. Raises InvalidReportError,
    naming the files, where parts contradict one another.
    """
    _refuse_contradictions(parts)
    reports = tuple(dict.fromkeys(part.report for part in parts))
    columns: dict[Build, list[Column]] = {}
    for report in reports:
        for column in report.columns:
            columns.setdefault(column.build, []).append(column)
    merged = [_merge_columns(build, columns[build]) for build in sorted(columns, key=_full_age)]
    return DriftReport(
        against=tuple(sorted({spec for report in reports for spec in report.against})),
        columns=tell_changes(merged),
        cost=_add_costs(report.cost for report in reports),
        bisections=tuple(sorted({found for report in reports for found in report.bisections}, key=_print_bisection)),
    )


def _merge_columns(build: Build, columns: Sequence[Column]) -> Column:
    recipes = sorted({recipe for column in columns for recipe in column.recipes})
    unread = {item for column in columns for item in column.unread if item.recipe not in recipes}
    cells: dict[Row, list[Cell]] = {}
    for column in columns:
        for cell in column.cells:
            cells.setdefault(cell.row, []).append(replace(cell, changes=()))
    kept = (_choose(found) for found in cells.values())
    return Column(
        build=build,
        recipes=tuple(recipes),
        cells=tuple(sorted(kept, key=lambda cell: cell.order)),
        unread=tuple(sorted(unread, key=lambda item: (item.recipe, item.why))),
    )


def _choose(cells: Iterable[Cell]) -> Cell:
    """One of several cells that agree in what they say, whichever came first."""
    distinct = tuple(dict.fromkeys(cells))
    return distinct[0] if len(distinct) == 1 else min(distinct, key=_print_cell)


def _add_costs(costs: Iterable[Cost]) -> Cost:
    listed = tuple(costs)
    return Cost(
        requests=sum(cost.requests for cost in listed),
        received=sum(cost.received for cost in listed),
        seconds=sum(cost.seconds for cost in listed),
        reused=sum(cost.reused for cost in listed),
    )


def _refuse_contradictions(parts: Sequence[Part]) -> None:
    lines = sorted({*_contradicting_names(parts), *_contradicting_cells(parts), *_contradicting_turns(parts)})
    if lines:
        raise InvalidReportError(
            "the reports contradict one another",
            where=", ".join(dict.fromkeys(part.name for part in parts)),
            expected="one file for each build, and one answer for each recipe, patch and build",
            found="\n".join(lines),
            hints=("judge all parts again, with the same patches and the same tool",),
        )


def _contradicting_names(parts: Sequence[Part]) -> Iterator[str]:
    """One build under two file names: its columns would stand beside one another as if they were two builds."""
    first: dict[tuple[object, ...], tuple[str, str]] = {}
    for part in parts:
        for build in (column.build for column in part.report.columns):
            key = (build.version, build.commit, build.variant, _machine_of(build.filename))
            name, known = first.setdefault(key, (part.name, build.filename))
            if name != part.name and known != build.filename:
                yield f"{build.label}: {known} in {name}, {build.filename} in {part.name}"


def _machine_of(filename: str) -> str:
    """The architecture of a wheel's platform tag, whatever libc it asks for."""
    platform = filename.removesuffix(".whl").rpartition("-")[2]
    return next((machine for machine in ("x86_64", "aarch64") if platform.endswith(machine)), platform)


def _contradicting_cells(parts: Sequence[Part]) -> Iterator[str]:
    first: dict[tuple[Build, Row], tuple[str, Cell]] = {}
    for part in parts:
        for column in part.report.columns:
            for cell in column.cells:
                name, known = first.setdefault((column.build, cell.row), (part.name, cell))
                difference = _difference(known, cell)
                if difference is not None:
                    row = f"{cell.recipe}: {cell.verdict.id} on {column.build.label}"
                    yield f"{row}: {difference[0]} in {name}, {difference[1]} in {part.name}"


def _difference(one: Cell, other: Cell) -> tuple[str, str] | None:
    """What each of two cells of one place says that the other denies; None where they agree."""
    sayings: tuple[tuple[str, str], ...] = (
        (f"text {one.text[:12]}", f"text {other.text[:12]}"),
        (str(one.verdict.verdict), str(other.verdict.verdict)),
        (f"drift {one.key}", f"drift {other.key}"),
        (f"policy {one.policy}", f"policy {other.policy}"),
        (f"response {one.response}", f"response {other.response}"),
    )
    return next((pair for pair in sayings if pair[0] != pair[1]), None)


def _contradicting_turns(parts: Sequence[Part]) -> Iterator[str]:
    first: dict[tuple[Build, Build, Row], tuple[str, tuple[Build, Build]]] = {}
    for part in parts:
        for found in part.report.bisections:
            for turn in found.turns:
                place = (turn.last, turn.first)
                key = (found.good, found.bad, turn.after.row)
                name, known = first.setdefault(key, (part.name, place))
                if known != place:
                    yield (
                        f"{turn.recipe}: {turn.patch} turned on {known[1].label} in {name}, "
                        f"on {turn.first.label} in {part.name}"
                    )


def _full_age(build: Build) -> tuple[object, ...]:
    return *age_of(build), build.commit or ""


def _print_cell(cell: Cell) -> str:
    return json.dumps(describe_cell(cell), sort_keys=True)


def _print_bisection(found: Bisection) -> str:
    return json.dumps(describe_bisection(found), sort_keys=True)
