"""Two probe runs side by side. Pure."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from provisioner.probes.model import Measure, Point, Probe, ProbeRun, Quantity, Setting, Spread

SCHEMA: Final = "provision/probe-compare/1"


class Finding(StrEnum):
    """BETTER, WORSE and CHANGED exceed the spread; NO_SPREAD means that one value alone cannot tell."""

    BETTER = "better"
    WORSE = "worse"
    CHANGED = "changed"
    WITHIN_SPREAD = "within-spread"
    NO_SPREAD = "no-spread"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity at one setting in both runs; ``ratio`` is second over first, None where the first is 0."""

    probe: Probe
    setting: Setting
    quantity: Quantity
    first: Spread
    second: Spread
    ratio: float | None
    finding: Finding


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A fact of the runs themselves that is not the same, so that their figures may not be comparable."""

    name: str
    first: str
    second: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]
    only_first: tuple[Point, ...]
    only_second: tuple[Point, ...]


def compare_runs(first: ProbeRun, second: ProbeRun) -> Comparison:
    """Match points by probe and setting, quantities by name."""
    seconds = {(point.probe, point.setting): point for point in second.points}
    firsts = {(point.probe, point.setting): point for point in first.points}
    return Comparison(
        rows=tuple(
            row for key, point in firsts.items() if key in seconds for row in _compare_points(point, seconds[key])
        ),
        differences=tuple(_find_differences(first, second)),
        only_first=tuple(point for key, point in firsts.items() if key not in seconds),
        only_second=tuple(point for key, point in seconds.items() if key not in firsts),
    )


def _compare_points(first: Point, second: Point) -> Iterator[Row]:
    for measure in first.measures:
        other = second.find(measure.quantity)
        if other is not None:
            yield Row(
                probe=first.probe,
                setting=first.setting,
                quantity=measure.quantity,
                first=measure.spread,
                second=other,
                ratio=other.median / measure.spread.median if measure.spread.median else None,
                finding=judge(measure, other),
            )


def judge(first: Measure, second: Spread) -> Finding:
    """A difference counts if the medians lie further apart than either run's values do (largest less smallest)."""
    spreads = (first.spread, second)
    if any(len(spread.values) < 2 for spread in spreads):
        return Finding.NO_SPREAD
    distance = second.median - first.spread.median
    if abs(distance) <= max(spread.maximum - spread.minimum for spread in spreads):
        return Finding.WITHIN_SPREAD
    match first.quantity.better:
        case "higher":
            return Finding.BETTER if distance > 0 else Finding.WORSE
        case "lower":
            return Finding.BETTER if distance < 0 else Finding.WORSE
        case "neither":
            return Finding.CHANGED


# What two runs are expected to differ in.
_OWN: Final = frozenset({"seed", "probes", "contexts", "streams", "url"})


def _find_differences(first: ProbeRun, second: ProbeRun) -> Iterator[Difference]:
    for part in ("server", "provenance", "settings"):
        left, right = (dataclasses.asdict(getattr(run, part)) for run in (first, second))
        for name, value in left.items():
            if name not in _OWN and value != right[name]:
                yield Difference(name=f"{part}.{name}", first=str(value), second=str(right[name]))


def to_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "rows": [
            {
                "probe": row.probe,
                "setting": _setting_to_json(row.setting),
                "quantity": row.quantity.name,
                "unit": row.quantity.unit,
                "first": _spread_to_json(row.first),
                "second": _spread_to_json(row.second),
                "ratio": None if row.ratio is None else round(row.ratio, 4),
                "finding": row.finding,
            }
            for row in comparison.rows
        ],
        "differences": [dataclasses.asdict(difference) for difference in comparison.differences],
        "only_first": [_name_point(point) for point in comparison.only_first],
        "only_second": [_name_point(point) for point in comparison.only_second],
    }


def _setting_to_json(setting: Setting) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(setting).items() if value is not None}


def _spread_to_json(spread: Spread) -> dict[str, Any]:
    return {"median": round(spread.median, 6), "min": round(spread.minimum, 6), "max": round(spread.maximum, 6)}


def _name_point(point: Point) -> dict[str, Any]:
    return {"probe": point.probe, "setting": _setting_to_json(point.setting)}
