"""The nouns of drift: builds, cells, what a verdict means for a recipe, and the key of a drift. Pure data."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Final

from packaging.version import Version

from provisioner.patching.model import PatchVerdict, Verdict
from provisioner.recipe import DriftResponse, PatchPolicy

HOLDS: Final = frozenset({Verdict.APPLIES, Verdict.APPLIES_AT_OFFSET, Verdict.APPLIED, Verdict.ALREADY_IN_SERIES})
_MERGED: Final = frozenset({Verdict.MERGED_UPSTREAM, Verdict.PROBABLY_MERGED})
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
class Cell:
    """One patch of one recipe on one build. ``account`` says why in at most a few lines; ``key`` names the drift."""

    recipe: str
    policy: PatchPolicy
    verdict: PatchVerdict
    response: DriftResponse
    account: tuple[str, ...]
    key: str
    views: tuple[HunkView, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Column:
    """All that was found on one build; ``failure`` where it could not be read."""

    build: Build
    cells: tuple[Cell, ...]
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a scan cost: HTTP requests, bytes received, seconds of wall time, and wheels answered by equal digests."""

    requests: int
    received: int
    seconds: float
    reused: int


@dataclass(frozen=True, kw_only=True)
class DriftReport:
    """A whole scan, builds oldest first."""

    against: tuple[str, ...]
    columns: tuple[Column, ...]
    cost: Cost

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
    def unread(self) -> tuple[Column, ...]:
        """The builds that could not be read."""
        return tuple(column for column in self.columns if column.failure is not None)


def response_to(verdict: Verdict, policy: PatchPolicy, own: Mapping[str, DriftResponse]) -> DriftResponse:
    """What a verdict means: the recipe's own word for it, else by policy."""
    if str(verdict) in own:
        return own[str(verdict)]
    if verdict in HOLDS:
        return DriftResponse.IGNORE
    if verdict in _MERGED:
        return DriftResponse.NOTICE
    return _BROKEN[policy]


def drift_key(recipe: str, verdict: PatchVerdict) -> str:
    """A name for this drift that stays the same until the drift itself changes: 12 hex digits.

    It covers recipe, patch, verdict, and verdict and hunks of each file; not the build, nor lines that merely moved.
    """
    files = [
        [file.path, str(file.verdict), [[hunk.index, str(hunk.verdict)] for hunk in file.hunks]]
        for file in verdict.files
    ]
    text = json.dumps([recipe, verdict.id, str(verdict.verdict), files], sort_keys=True)
    return sha256(text.encode()).hexdigest()[:12]
