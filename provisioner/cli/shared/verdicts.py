"""Patch verdicts as JSON and as table rows."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from provisioner.patching.model import SeriesVerdict


def describe_verdict(verdict: SeriesVerdict) -> list[dict[str, Any]]:
    """Each patch with its files and hunks, for JSON."""
    return [asdict(patch) for patch in verdict.patches]


def verdict_rows(verdict: SeriesVerdict) -> Iterator[tuple[str, str, str, str]]:
    """A row for each file of each patch."""
    for patch in verdict.patches:
        for file in patch.files:
            yield patch.id, str(patch.verdict), file.path, (file.after or "no file")[:16]
