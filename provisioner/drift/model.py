"""The nouns of drift: builds, cells, what a verdict means for a recipe, and the key of a drift. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from hashlib import sha256
from typing import Final

from packaging.version import Version

from provisioner.digests import Digest
from provisioner.documents.recipe import DriftResponse, PatchPolicy
from provisioner.patching.model import PatchVerdict, Verdict

Row = tuple[str, str]
"""Recipe and patch."""
_BROKEN: Final[Mapping[PatchPolicy, DriftResponse]] = {
    PatchPolicy.REQUIRED: DriftResponse.FAIL,
    PatchPolicy.OPTIONAL: DriftResponse.WARN,
    PatchPolicy.NOT_NEEDED: DriftResponse.NOTICE,
}


@dataclass(frozen=True, kw_only=True)
class Build:
    """One wheel that was judged. ``label`` is what people call it: a version, or a version with its commit."""

    label: str
    version: Version
    filename: str
    commit: str | None
    variant: str | None
    uploaded: datetime | None


@dataclass(frozen=True, kw_only=True)
class HunkView:
    """A hunk beside what stands at its nearest place, for a side-by-side: texts are lines, ``line`` is 1-based."""

    path: str
    index: int
    verdict: str
    wanted: tuple[str, ...]
    found: tuple[str, ...]
    line: int | None


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The arguments of a function in which a hunk stands (of a class, its bases), as the build has them."""

    path: str
    scope: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One patch of one recipe on one build; ``key`` names the drift.

    ``place`` counts from 0 over the recipe's series, ``text`` is the digest of the patch's text. ``reasons`` say why as
    this build alone shows it; ``changes`` what became of signatures since the nearest build on which the patch holds.
    ``merged_as`` is upstream's commit of the same change, ``in_history`` whether it is an ancestor of the build's.
    """

    recipe: str
    place: int
    text: Digest
    policy: PatchPolicy
    verdict: PatchVerdict
    response: DriftResponse
    key: str
    reasons: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    views: tuple[HunkView, ...] = ()
    signatures: tuple[Signature, ...] = ()
    merged_as: str | None = None
    in_history: bool | None = None

    @property
    def account(self) -> tuple[str, ...]:
        """Why, in at most a few lines."""
        return (*self.reasons, *self.changes)

    @property
    def row(self) -> Row:
        """Recipe and patch."""
        return self.recipe, self.verdict.id

    @property
    def order(self) -> tuple[str, int, str]:
        """Sorts the cells of a column."""
        return self.recipe, self.place, self.verdict.id


@dataclass(frozen=True, kw_only=True)
class Unread:
    """A recipe for which a build could not be read, and why."""

    recipe: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Column:
    """All that was found on one build: ``recipes`` were judged there, and for the ``unread`` ones it was tried.

    A recipe in neither was not asked for on this build, which happens only where reports were merged.
    """

    build: Build
    recipes: tuple[str, ...]
    cells: tuple[Cell, ...]
    unread: tuple[Unread, ...] = ()

    @property
    def failure(self) -> str | None:
        """Why the build could not be read; None where it could."""
        return "; ".join(sorted({item.why for item in self.unread})) or None

    def look_up(self, row: Row) -> Cell | Unread | None:
        """What is known of a row; None where it was not asked for on this build."""
        return self._cells.get(row) or self._unread.get(row[0])

    @cached_property
    def _cells(self) -> Mapping[Row, Cell]:
        return {cell.row: cell for cell in self.cells}

    @cached_property
    def _unread(self) -> Mapping[str, Unread]:
        return {item.recipe: item for item in self.unread}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Where one patch of one recipe turned: the last build with the old answer, the first with the new one."""

    recipe: str
    patch: str
    last: Build
    first: Build
    before: Cell
    after: Cell


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """Every patch that turned between two builds, and how many of the builds were read."""

    good: Build
    bad: Build
    turns: tuple[Turn, ...]
    between: int
    judged: int


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a scan cost: HTTP requests, bytes received, seconds of wall time, and wheels answered by equal digests."""

    requests: int
    received: int
    seconds: float
    reused: int


@dataclass(frozen=True, kw_only=True)
class DriftReport:
    """A whole scan, or several that were merged: builds oldest first, cells by recipe and place in its series.

    ``bisections`` are kept from reports that were merged.
    """

    against: tuple[str, ...]
    columns: tuple[Column, ...]
    cost: Cost
    bisections: tuple[Bisection, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        """Recipe and patch of each row, by recipe and place."""
        places: dict[Row, int] = {}
        for cell in (cell for column in self.columns for cell in column.cells):
            places[cell.row] = min(places.get(cell.row, cell.place), cell.place)
        return tuple(sorted(places, key=lambda row: (row[0], places[row], row[1])))

    @property
    def failing(self) -> tuple[tuple[Build, Cell], ...]:
        """Every cell that its recipe's policy makes a failure."""
        return tuple(
            (column.build, cell)
            for column in self.columns
            for cell in column.cells
            if cell.response is DriftResponse.FAIL
        )

    @property
    def not_judged(self) -> tuple[tuple[Build, Row], ...]:
        """Every row that nobody judged on a build, nor tried to."""
        rows = self.rows
        return tuple((column.build, row) for column in self.columns for row in rows if column.look_up(row) is None)

    @property
    def unread(self) -> tuple[Column, ...]:
        """The builds that could not be read, for one recipe at least."""
        return tuple(column for column in self.columns if column.failure is not None)


def age_of(build: Build) -> tuple[Version, str, str, str, str]:
    """Orders builds, oldest first: by version, then by time of upload where it is known, then by name."""
    uploaded = build.uploaded.isoformat() if build.uploaded else ""
    return Version(build.version.public), uploaded, build.label, build.filename, build.variant or ""


def response_to(verdict: Verdict, policy: PatchPolicy, own: Mapping[str, DriftResponse]) -> DriftResponse:
    """What a verdict means: the recipe's own word for it, else by policy."""
    if str(verdict) in own:
        return own[str(verdict)]
    if verdict.fits:
        return DriftResponse.IGNORE
    if verdict.merged:
        return DriftResponse.NOTICE
    return _BROKEN[policy]


def respond(
    verdict: PatchVerdict, policy: PatchPolicy, own: Mapping[str, DriftResponse], *, in_history: bool | None
) -> DriftResponse:
    """What a patch's verdict means where something is known of upstream's history.

    That upstream merged the change lets nothing pass whose text is not there, and is worth a notice where the patch
    still applies.
    """
    if in_history and verdict.verdict is Verdict.PROBABLY_MERGED:
        conflicts = any(file.verdict is Verdict.CONFLICT for file in verdict.files)
        return response_to(Verdict.CONFLICT if conflicts else Verdict.PARTIAL, policy, own)
    if in_history and verdict.verdict.fits and str(verdict.verdict) not in own:
        return DriftResponse.NOTICE
    return response_to(verdict.verdict, policy, own)


def has_whole_text(verdict: PatchVerdict) -> bool:
    """Whether a build has all of what the patch would give it, as far as it ships the files."""
    shipped = [file for file in verdict.files if file.verdict is not Verdict.NOT_SHIPPED]
    return bool(shipped) and all(file.verdict.merged for file in shipped)


def drift_key(recipe: str, verdict: PatchVerdict, *, in_history: bool | None = None) -> str:
    """A name for this drift that stays the same until the drift itself changes: 12 hex digits.

    It covers recipe, patch, verdict, verdict and hunks of each file, and whether a patch applies although upstream
    merged it; not the build, nor lines that merely moved.
    """
    files = [
        [file.path, str(file.verdict), [[hunk.index, str(hunk.verdict)] for hunk in file.hunks]]
        for file in verdict.files
    ]
    merged = ["merged"] if in_history and verdict.verdict.fits else []
    text = json.dumps([recipe, verdict.id, str(verdict.verdict), files, *merged], sort_keys=True)
    return sha256(text.encode()).hexdigest()[:12]
