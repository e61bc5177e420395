"""What the booster counts, as JSON (schema ``provision/booster-stats/1``) and for Prometheus."""

from dataclasses import dataclass
from typing import Any, Final

from provisioner.booster.schedule import BoostCounts
from provisioner.openai.prometheus import Metric, print_metrics

SCHEMA: Final = "provision/booster-stats/1"


@dataclass(kw_only=True)
class ProxyCounts:
    """Forwarded requests, those whose client left early, and those that the server did not answer to the end."""

    requests: int = 0
    disconnected: int = 0
    upstream_failures: int = 0


def stats_to_json(
    counts: ProxyCounts, *, boosts: BoostCounts, active: int, uptime: float, threshold: int
) -> dict[str, Any]:
    """``active`` counts requests under way that may make the server work; ``uptime`` is in seconds."""
    return {
        "schema": SCHEMA,
        "uptime_seconds": round(uptime, 3),
        "threshold_characters": threshold,
        "requests": {
            "forwarded": counts.requests,
            "active": active,
            "disconnected": counts.disconnected,
            "upstream_failures": counts.upstream_failures,
        },
        "boosts": {
            "sent": boosts.sent,
            "completed": boosts.completed,
            "cancelled": boosts.cancelled,
            "superseded": boosts.superseded,
            "failed": boosts.failed,
            "skipped": {str(reason): count for reason, count in boosts.skipped.items()},
            "seconds": round(boosts.seconds, 3),
            "in_flight": boosts.in_flight,
            "waiting": boosts.waiting,
        },
    }


def print_prometheus(counts: ProxyCounts, *, boosts: BoostCounts, active: int, uptime: float) -> str:
    """The same as a page for Prometheus."""
    ended = {
        "completed": boosts.completed,
        "cancelled": boosts.cancelled,
        "superseded": boosts.superseded,
        "failed": boosts.failed,
    }
    skipped = {str(reason): count for reason, count in boosts.skipped.items()}

    def count(name: str, text: str, value: float) -> Metric:
        return Metric(name=f"booster_{name}_total", kind="counter", help=text, values={"": value})

    def gauge(name: str, text: str, value: float) -> Metric:
        return Metric(name=f"booster_{name}", kind="gauge", help=text, values={"": value})

    return print_metrics(
        (
            gauge("uptime_seconds", "Time since the booster started.", uptime),
            count("requests", "Requests forwarded.", counts.requests),
            gauge("requests_active", "Requests under way that may make the server work.", active),
            count("disconnected", "Requests whose client left before the answer's end.", counts.disconnected),
            count("upstream_failures", "Requests that the server did not answer to the end.", counts.upstream_failures),
            count("boosts_sent", "Boosts sent to the server.", boosts.sent),
            Metric(
                name="booster_boosts_ended_total",
                kind="counter",
                help="Boosts by how they ended; superseded ones were never sent.",
                label="how",
                values=ended,
            ),
            Metric(
                name="booster_boosts_skipped_total",
                kind="counter",
                help="Chat turns without a boost, by reason.",
                label="why",
                values=skipped,
            ),
            count("boost_seconds", "Time that boosts took, cancelled ones included.", boosts.seconds),
            gauge("boost_in_flight", "1 while a boost runs.", boosts.in_flight),
            gauge("boost_waiting", "1 while a boost waits for real requests to end.", boosts.waiting),
        )
    )
