"""The Prometheus text format, and the counters of a vLLM server that the probes read from it. Pure.

Names of the counters: ``vllm/v1/metrics/loggers.py`` and ``vllm/v1/spec_decode/metrics.py`` of 0.26 to 0.33. A counter
is exported with the suffix ``_total`` and one series for each engine; the series are summed.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

_SAMPLE: Final = re.compile(
    r"""(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)
        (?:\{(?P<labels>(?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?
        \s+(?P<value>\S+)(?:\s+-?\d+)?\s*""",
    re.VERBOSE,
)
_LABEL: Final = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ESCAPE: Final = re.compile(r"\\(.)")
_ESCAPED: Final = {"n": "\n"}


@dataclass(frozen=True, kw_only=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    value: float


def parse_samples(text: str) -> tuple[Sample, ...]:
    """Samples of an exposition, in order. Comments and lines that are not samples are passed over."""
    return tuple(sample for line in text.splitlines() if (sample := _parse_line(line)) is not None)


def _parse_line(line: str) -> Sample | None:
    match = _SAMPLE.fullmatch(line.strip())
    if match is None:
        return None
    try:
        value = float(match["value"])
    except ValueError:
        return None
    labels = {
        name: _ESCAPE.sub(lambda escape: _ESCAPED.get(escape[1], escape[1]), text)
        for name, text in _LABEL.findall(match["labels"] or "")
    }
    return Sample(name=match["name"], labels=labels, value=value)


@dataclass(frozen=True, kw_only=True)
class ServerCounters:
    """Counters since the server's start; None where the server does not export one. Unit: tokens, or drafts."""

    prefix_queries: float | None = None
    prefix_hits: float | None = None
    drafts: float | None = None
    draft_tokens: float | None = None
    accepted_tokens: float | None = None

    def since(self, before: "ServerCounters") -> "ServerCounters":
        """What was counted between two readings. A restarted server counts from zero: such a difference is None."""
        return ServerCounters(
            prefix_queries=_grown(before.prefix_queries, self.prefix_queries),
            prefix_hits=_grown(before.prefix_hits, self.prefix_hits),
            drafts=_grown(before.drafts, self.drafts),
            draft_tokens=_grown(before.draft_tokens, self.draft_tokens),
            accepted_tokens=_grown(before.accepted_tokens, self.accepted_tokens),
        )

    @property
    def hit_share(self) -> float | None:
        """Prompt tokens found in the prefix cache, as a share of those looked up (0 to 1)."""
        return _ratio(self.prefix_hits, self.prefix_queries)

    @property
    def acceptance_share(self) -> float | None:
        """Drafted tokens that were accepted, as a share (0 to 1)."""
        return _ratio(self.accepted_tokens, self.draft_tokens)

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens a decoding step yields: the accepted ones of its draft and the one that the model itself adds."""
        accepted = _ratio(self.accepted_tokens, self.drafts)
        return None if accepted is None else 1 + accepted


def read_counters(samples: Iterable[Sample]) -> ServerCounters:
    """The counters among ``samples``; series of several engines are summed."""
    sums: dict[str, float] = {}
    for sample in samples:
        name = sample.name.removesuffix("_total")
        if math.isfinite(sample.value):
            sums[name] = sums.get(name, 0.0) + sample.value
    return ServerCounters(
        prefix_queries=sums.get("vllm:prefix_cache_queries"),
        prefix_hits=sums.get("vllm:prefix_cache_hits"),
        drafts=sums.get("vllm:spec_decode_num_drafts"),
        draft_tokens=sums.get("vllm:spec_decode_num_draft_tokens"),
        accepted_tokens=sums.get("vllm:spec_decode_num_accepted_tokens"),
    )


def _grown(before: float | None, after: float | None) -> float | None:
    if before is None or after is None or after < before:
        return None
    return after - before


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric to export: one value, or one for each value of ``label``."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    values: Mapping[str, float]
    label: str | None = None


def print_metrics(metrics: Iterable[Metric]) -> str:
    """The exposition of ``metrics``, format 0.0.4."""
    lines: list[str] = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        for label, value in metric.values.items():
            series = metric.name if metric.label is None else f'{metric.name}{{{metric.label}="{_escape(label)}"}}'
            lines.append(f"{series} {value:g}" if value != int(value) else f"{series} {int(value)}")
    return "\n".join(lines) + "\n"


def _escape(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
