"""What a probe run measured, as frozen values. Pure."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Self

from provisioner.counts import count_text

Better = Literal["higher", "lower", "neither"]


class Probe(StrEnum):
    DECODE = "decode"
    CACHE_CLIFF = "cache-cliff"
    GROWN_PREFIX = "grown-prefix"
    CONCURRENCY = "concurrency"
    BOOSTER_AB = "booster-ab"


class Workload(StrEnum):
    """What the model is asked to write: drafts of prose are accepted less often than those of records."""

    PROSE = "prose"
    STRUCTURED = "structured"


class Method(StrEnum):
    """How a decode rate is taken.

    STREAM: the tokens after the first over the time from the first to the last. DIFFERENCE: the tokens after the first
    over the time that the whole answer takes on a warm prompt, less the time of an answer of one token; this one does
    not depend on when the server lets its events go.
    """

    STREAM = "stream"
    DIFFERENCE = "difference"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Repeated measurements of one quantity. ``values`` has at least one element."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Self | None:
        """The spread of the values that exist, or None if none does."""
        present = tuple(value for value in values if value is not None)
        return cls(values=present) if present else None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def minimum(self) -> float:
        return min(self.values)

    @property
    def maximum(self) -> float:
        return max(self.values)


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Name and unit of something measured, and the direction in which it improves."""

    name: str
    unit: str
    better: Better


DECODE_RATE = Quantity(name="decode", unit="tok/s", better="higher")
AGGREGATE_RATE = Quantity(name="aggregate", unit="tok/s", better="higher")
STREAM_RATE = Quantity(name="stream", unit="tok/s", better="higher")
FIRST_TOKEN = Quantity(name="first token", unit="s", better="lower")
FIRST_TOKEN_COLD = Quantity(name="first token, cold", unit="s", better="lower")
FIRST_TOKEN_WARM = Quantity(name="first token, warm", unit="s", better="lower")
ELAPSED = Quantity(name="elapsed", unit="s", better="lower")
SECOND_TURN = Quantity(name="second turn", unit="s", better="lower")
PREFIX_HITS = Quantity(name="prefix hits", unit="share", better="higher")
ACCEPTANCE = Quantity(name="drafts accepted", unit="share", better="higher")
ACCEPTANCE_LENGTH = Quantity(name="tokens a step", unit="tok", better="higher")
TOKENS_PER_EVENT = Quantity(name="tokens an event", unit="tok", better="neither")
PROMPT_TOKENS = Quantity(name="prompt", unit="tok", better="neither")
COMPLETION_TOKENS = Quantity(name="completion", unit="tok", better="neither")


@dataclass(frozen=True, kw_only=True)
class Measure:
    quantity: Quantity
    spread: Spread


def measures_of(pairs: Iterable[tuple[Quantity, Iterable[float | None]]]) -> tuple[Measure, ...]:
    """Measures for the quantities that have at least one value."""
    return tuple(
        Measure(quantity=quantity, spread=spread)
        for quantity, values in pairs
        if (spread := Spread.of(values)) is not None
    )


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where on its axes a point was measured. Fields that do not apply are None.

    ``context`` is the wanted length of the prompt in tokens (what it really had is a measure), ``sighting`` counts from
    1, ``resends`` are repetitions of the first turn before the second, ``route`` is ``direct`` or ``via``.
    """

    context: int | None = None
    sighting: int | None = None
    resends: int | None = None
    streams: int | None = None
    route: Literal["direct", "via"] | None = None

    def __str__(self) -> str:
        parts = (
            None if self.context is None else f"{print_context(self.context)} context",
            None if self.sighting is None else f"sighting {self.sighting}",
            None if self.resends is None else f"{self.resends} re-sends",
            None if self.streams is None else count_text(self.streams, "stream"),
            self.route,
        )
        return ", ".join(part for part in parts if part is not None)


def print_context(tokens: int) -> str:
    return f"{tokens // 1000}K" if tokens >= 1000 and tokens % 1000 == 0 else str(tokens)


@dataclass(frozen=True, kw_only=True)
class Point:
    """Measures of one probe at one setting."""

    probe: Probe
    setting: Setting
    measures: tuple[Measure, ...]

    def find(self, quantity: Quantity) -> Spread | None:
        return next((measure.spread for measure in self.measures if measure.quantity.name == quantity.name), None)


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What the server says of itself."""

    url: str
    model: str
    software: str | None
    max_model_len: int | None
    has_counters: bool


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What the server runs on, as far as the caller could tell; None is "not known"."""

    recipe: str | None = None
    receipt_digest: str | None = None
    card: str | None = None
    driver: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What was asked of a run. ``seed`` makes the same documents again."""

    probes: tuple[Probe, ...]
    contexts: tuple[int, ...]
    streams: tuple[int, ...]
    stream_context: int
    repeats: int
    completion_tokens: int
    workload: Workload
    temperature: float
    method: Method
    seed: int


@dataclass(frozen=True, kw_only=True)
class ProbeRun:
    """One run: complete, or what was measured until it ended early (``ended`` says why)."""

    tool_version: str
    started: str
    seconds: float
    server: ServerFacts
    provenance: Provenance
    settings: RunSettings
    points: tuple[Point, ...]
    notes: tuple[str, ...]
    ended: str | None = None
