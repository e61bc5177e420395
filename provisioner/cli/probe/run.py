"""Runs probes for the command line: progress, what remains of a run that ends early, and the output."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from provisioner import __version__
from provisioner.cli.probe.options import (
    Asked,
    find_provenance,
    read_extra,
    read_settings,
    read_targets,
)
from provisioner.cli.probe.tables import describe_run, tables_of
from provisioner.cli.shared import render
from provisioner.cli.shared.progress import open_reporter
from provisioner.errors import InterruptedRunError, ProvisionError, UsageError
from provisioner.probes.model import Point, ProbeRun, RunSettings, ServerFacts
from provisioner.probes.record import to_json
from provisioner.progress import Reporter

if TYPE_CHECKING:
    from provisioner.probes.measure import Targets


@dataclass(kw_only=True)
class _Collector:
    """Keeps what was measured, so that a run which ends early still has it, and reports how it goes on."""

    reporter: Reporter
    total: int = 0
    done: int = 0
    server: ServerFacts | None = None
    points: list[Point] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def expect(self, requests: int) -> None:
        self.total = requests

    def begin(self, what: str) -> None:
        self.reporter.stage(what)
        self.reporter.amount(self.done, self.total, "requests")

    def advance(self) -> None:
        self.done += 1
        self.reporter.amount(self.done, self.total, f"request {self.done} of {self.total}")

    def take_server(self, facts: ServerFacts) -> None:
        self.server = facts

    def take_points(self, points: Sequence[Point]) -> None:
        self.points += points

    def take_note(self, note: str) -> None:
        self.notes.append(note)


def run_and_print(names: tuple[str, ...], asked: Asked) -> int:
    targets, settings, extra = read_targets(asked), read_settings(names, asked), read_extra(asked.extra)
    if asked.plot is not None:
        from provisioner.probes.plots import check_plot_path

        check_plot_path(asked.plot)
    provenance = find_provenance(asked)
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    with open_reporter() as reporter:
        collector = _Collector(reporter=reporter)
        failure = _measure(targets, settings, collector, extra)
    if collector.server is None:
        raise failure or UsageError("nothing was measured")
    run = ProbeRun(
        tool_version=__version__,
        started=started,
        seconds=time.monotonic() - clock,
        server=collector.server,
        provenance=provenance,
        settings=settings,
        points=tuple(collector.points),
        notes=tuple(collector.notes),
        ended=None if failure is None else "interrupted" if isinstance(failure, InterruptedRunError) else str(failure),
    )
    _hand_over(run, asked)
    if failure is None:
        return 0
    if run.points:
        return _report_failure(failure)
    raise failure


def _measure(
    targets: "Targets", settings: RunSettings, collector: _Collector, extra: dict[str, Any]
) -> ProvisionError | None:
    """Run the probes; what ended them early comes back, so that the points so far can be handed over first."""
    from provisioner.probes.measure import run_probes

    try:
        asyncio.run(run_probes(targets, settings, collector, extra=extra))
    except ProvisionError as failure:
        return failure
    except KeyboardInterrupt:
        return InterruptedRunError()
    return None


def _report_failure(failure: ProvisionError) -> int:
    """Stdout already holds the record with the points so far: the error goes to stderr alone."""
    render.print_error(failure)
    return failure.exit_code


def _hand_over(run: ProbeRun, asked: Asked) -> None:
    from provisioner.probes.plots import draw_plot

    if asked.as_json and (run.points or run.ended is None):
        render.print_json("probe", to_json(run))
    elif run.points:
        for line in describe_run(run):
            render.print_note(line)
        for headers, rows in tables_of(run):
            render.print_table(headers, rows)
            render.print_text("")
    for note in run.notes:
        render.print_note(note)
    if asked.plot is not None and run.points:
        draw_plot(run, asked.plot)
        render.print_note(f"drawn: {asked.plot}")
