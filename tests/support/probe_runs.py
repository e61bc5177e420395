"""Probe runs for tests: a watcher that keeps everything, and settings with small numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from provisioner.probes.model import (
    DECODE_RATE,
    FIRST_TOKEN_WARM,
    Measure,
    Method,
    Point,
    Probe,
    ProbeRun,
    Provenance,
    RunSettings,
    ServerFacts,
    Setting,
    Spread,
    Workload,
)


@dataclass
class Kept:
    """A watcher that keeps what it is told."""

    expected: int = 0
    advanced: int = 0
    server: ServerFacts | None = None
    points: list[Point] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)

    def expect(self, requests: int) -> None:
        self.expected = requests

    def begin(self, what: str) -> None:
        self.stages.append(what)

    def advance(self) -> None:
        self.advanced += 1

    def take_server(self, facts: ServerFacts) -> None:
        self.server = facts

    def take_points(self, points: Sequence[Point]) -> None:
        self.points += points

    def take_note(self, note: str) -> None:
        self.notes.append(note)


def settings(*probes: Probe, **changed: Any) -> RunSettings:
    values: dict[str, Any] = {
        "contexts": (6000, 40000),
        "streams": (1, 4),
        "stream_context": 1000,
        "repeats": 3,
        "completion_tokens": 257,
        "workload": Workload.PROSE,
        "temperature": 0.0,
        "method": Method.STREAM,
        "seed": 11,
    }
    return RunSettings(probes=probes, **(values | changed))


def run_of(*rates: tuple[float, ...], **changed: Any) -> ProbeRun:
    """A run with a decode point at 1K, 2K and so on, of these rates."""
    values: dict[str, Any] = {
        "tool_version": "0.1.0",
        "started": "2026-11-30T20:00:00+00:00",
        "seconds": 12.5,
        "server": ServerFacts(
            url="http://127.0.0.1:8012", model="m", software="vLLM 0.27.1", max_model_len=4096, has_counters=True
        ),
        "provenance": Provenance(recipe="hynix", receipt_digest="ab", card="a card", driver="610.43.03"),
        "settings": settings(Probe.DECODE),
        "points": tuple(decode_point((number + 1) * 1000, values) for number, values in enumerate(rates)),
        "notes": ("a note",),
    }
    return ProbeRun(**(values | changed))


def decode_point(context: int, rates: tuple[float, ...]) -> Point:
    measures = (
        Measure(quantity=DECODE_RATE, spread=Spread(values=rates)),
        Measure(quantity=FIRST_TOKEN_WARM, spread=Spread(values=tuple(round(10 / rate, 3) for rate in rates))),
    )
    return Point(probe=Probe.DECODE, setting=Setting(context=context), measures=measures)
