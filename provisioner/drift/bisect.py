"""Since when: the first build on which an answer changed, with the fewest wheels read. Pure but for the judge."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from provisioner.drift.explain import compare_signatures
from provisioner.drift.model import Bisection, Cell, Column, Turn
from provisioner.errors import NoSuchBuildError, UsageError
from provisioner.wheels.names import Candidate

Judge = Callable[[Candidate], Column]


def find_turns(builds: Sequence[Candidate], good: str, bad: str, judge: Judge) -> Bisection:
    """Find, for each patch whose answer differs between ``good`` and ``bad``, the first build with the new answer.

    ``builds`` are oldest first. Raises UsageError where good is not before bad; NoSuchBuildError for an unknown one or
    one that cannot be read.
    """
    start, end = _find(builds, good), _find(builds, bad)
    if start >= end:
        raise UsageError("the good build must be older than the bad one", expected=f"{good} before {bad}")
    known: dict[int, Column] = {}

    def column(index: int) -> Column:
        if index not in known:
            known[index] = _read(judge, builds[index])
        return known[index]

    first, last = column(start), column(end)
    turns = [
        _search(column, start, end, cell) for cell in first.cells if answer_of(cell) != answer_of(_same_row(last, cell))
    ]
    return Bisection(good=first.build, bad=last.build, turns=tuple(turns), between=end - start - 1, judged=len(known))


def answer_of(cell: Cell) -> str:
    """What counts as the same answer: holding, at whatever line, is one; every other verdict is its own."""
    return "holds" if cell.verdict.verdict.fits else str(cell.verdict.verdict)


def _search(column: Callable[[int], Column], low: int, high: int, cell: Cell) -> Turn:
    old = answer_of(cell)
    while high - low > 1:
        middle = (low + high) // 2
        if answer_of(_same_row(column(middle), cell)) == old:
            low = middle
        else:
            high = middle
    before, after = _same_row(column(low), cell), _same_row(column(high), cell)
    if before.verdict.verdict.fits:
        after = replace(after, changes=compare_signatures(before, after))
    return Turn(
        recipe=cell.recipe,
        patch=cell.verdict.id,
        last=column(low).build,
        first=column(high).build,
        before=before,
        after=after,
    )


def _same_row(column: Column, cell: Cell) -> Cell:
    return next(item for item in column.cells if item.row == cell.row)


def _read(judge: Judge, candidate: Candidate) -> Column:
    column = judge(candidate)
    if column.failure is not None:
        raise NoSuchBuildError("a build in the middle cannot be read", where=column.build.label, found=column.failure)
    return column


def _find(builds: Sequence[Candidate], wanted: str) -> int:
    for index, build in enumerate(builds):
        if wanted in (str(build.version), build.commit) or (
            len(wanted) >= 7 and (build.commit or "").startswith(wanted)
        ):
            return index
    known = ", ".join(str(build.version) for build in builds[-8:])
    raise NoSuchBuildError("this build is not among those to search", where=wanted, found=f"the newest are {known}")
