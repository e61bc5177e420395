"""A probe run as JSON, schema ``provision/probe/1``, and back. Pure."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from provisioner.errors import InvalidInputError
from provisioner.loading import load_json
from provisioner.probes.model import (
    Measure,
    Method,
    Point,
    Probe,
    ProbeRun,
    Provenance,
    Quantity,
    RunSettings,
    ServerFacts,
    Setting,
    Spread,
    Workload,
)

SCHEMA: Final = "provision/probe/1"

_Made = TypeVar("_Made")


class InvalidProbeRecordError(InvalidInputError):
    """A file that is no record of a probe run."""

    code = "invalid-probe-record"


def to_json(run: ProbeRun) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "tool_version": run.tool_version,
        "started": run.started,
        "seconds": round(run.seconds, 3),
        "ended": run.ended,
        "server": dataclasses.asdict(run.server),
        "provenance": dataclasses.asdict(run.provenance),
        "settings": dataclasses.asdict(run.settings),
        "points": [_point_to_json(point) for point in run.points],
        "notes": list(run.notes),
    }


def _point_to_json(point: Point) -> dict[str, Any]:
    return {
        "probe": point.probe,
        "setting": {name: value for name, value in dataclasses.asdict(point.setting).items() if value is not None},
        "measures": [spread_to_json(measure) for measure in point.measures],
    }


def spread_to_json(measure: Measure) -> dict[str, Any]:
    spread = measure.spread
    return {
        "quantity": measure.quantity.name,
        "unit": measure.quantity.unit,
        "better": measure.quantity.better,
        "median": round(spread.median, 6),
        "min": round(spread.minimum, 6),
        "max": round(spread.maximum, 6),
        "values": [round(value, 6) for value in spread.values],
    }


def read_run(text: str, *, where: str) -> ProbeRun:
    """Parse a record. Raises InvalidProbeRecordError with the address of what is wrong."""
    try:
        record = load_json(text)
    except ValueError as error:
        raise InvalidProbeRecordError(f"not JSON: {error}", where=where) from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        found = record.get("schema") if isinstance(record, dict) else type(record).__name__
        raise InvalidProbeRecordError(
            "not a record of a probe run",
            where=where,
            expected=SCHEMA,
            found=str(found),
            hints=("make one with `provision probe decode --url URL --json > FILE`",),
        )
    return ProbeRun(
        tool_version=str(record.get("tool_version")),
        started=str(record.get("started")),
        seconds=_make(where, "seconds", lambda: float(record["seconds"])),
        server=_make(where, "server", lambda: ServerFacts(**record["server"])),
        provenance=_make(where, "provenance", lambda: Provenance(**record["provenance"])),
        settings=_make(where, "settings", lambda: _read_settings(record["settings"])),
        points=tuple(
            _make(where, f"points[{index}]", lambda one=one: _read_point(one))  # type: ignore[misc]
            for index, one in enumerate(_make(where, "points", lambda: list(record["points"])))
        ),
        notes=tuple(str(note) for note in record.get("notes", ())),
        ended=record.get("ended"),
    )


def _make(where: str, address: str, build: Callable[[], _Made]) -> _Made:
    try:
        return build()
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidProbeRecordError(f"cannot be read: {error!r}", where=f"{where}: {address}") from error


def _read_settings(settings: Mapping[str, Any]) -> RunSettings:
    return RunSettings(
        probes=tuple(Probe(name) for name in settings["probes"]),
        contexts=tuple(int(value) for value in settings["contexts"]),
        streams=tuple(int(value) for value in settings["streams"]),
        stream_context=int(settings["stream_context"]),
        repeats=int(settings["repeats"]),
        completion_tokens=int(settings["completion_tokens"]),
        workload=Workload(settings["workload"]),
        temperature=float(settings["temperature"]),
        method=Method(settings["method"]),
        seed=int(settings["seed"]),
    )


def _read_point(point: Mapping[str, Any]) -> Point:
    return Point(
        probe=Probe(point["probe"]),
        setting=Setting(**point["setting"]),
        measures=tuple(
            Measure(
                quantity=Quantity(name=one["quantity"], unit=one["unit"], better=one["better"]),
                spread=Spread(values=_read_values(one["values"])),
            )
            for one in point["measures"]
        ),
    )


def _read_values(values: list[Any]) -> tuple[float, ...]:
    if not values:
        raise ValueError("a measure without values")
    return tuple(float(value) for value in values)
