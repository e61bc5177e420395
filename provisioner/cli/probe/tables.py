"""The words and tables in which a probe run is shown. Pure."""

from collections.abc import Iterator

from provisioner.probes.model import ProbeRun, Spread

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def describe_run(run: ProbeRun) -> Iterator[str]:
    """Lines that say what was measured, and how."""
    server, settings = run.server, run.settings
    yield f"{server.model} at {server.url}, {server.software or 'server of unknown kind'}"
    yield f"seed {settings.seed}, {settings.workload}, temperature {settings.temperature:g}, {settings.repeats} repeats"
    if not server.has_counters:
        yield "the server shows no counters: prefix hits and draft acceptance are not known"


def tables_of(run: ProbeRun) -> Iterator[Table]:
    """One table for each probe: a row a point, a column a quantity that any of its points has."""
    for probe in dict.fromkeys(point.probe for point in run.points):
        points = [point for point in run.points if point.probe is probe]
        quantities = list(
            {measure.quantity.name: measure.quantity for one in points for measure in one.measures}.values()
        )
        headers = (probe.upper(), *(f"{quantity.name}, {quantity.unit}" for quantity in quantities))
        rows = [
            (str(point.setting), *(print_spread(point.find(quantity)) for quantity in quantities)) for point in points
        ]
        yield headers, rows


def print_spread(spread: Spread | None) -> str:
    """Median, and the smallest and largest value where they differ."""
    if spread is None:
        return "-"
    if spread.minimum == spread.maximum:
        return _figure(spread.median)
    return f"{_figure(spread.median)} ({_figure(spread.minimum)} to {_figure(spread.maximum)})"


def _figure(value: float) -> str:
    if value == int(value) and abs(value) >= 10:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"
