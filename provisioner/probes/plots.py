"""Plots of a probe run. matplotlib is an optional extra and is imported by the call alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from provisioner.errors import UsageError
from provisioner.probes import model
from provisioner.probes.model import Point, Probe, ProbeRun, Quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Panel: TypeAlias = tuple[str, Callable[[Axes, Sequence[Point]], None], tuple[Point, ...]]

FORMATS: Final = (".svg", ".png")
_COLUMNS: Final = 3


def check_plot_path(path: Path) -> None:
    """Raises UsageError unless the plot could be drawn: called before a run that takes an hour, not after it."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError("a plot is an .svg or a .png file", where=str(path))
    if not path.parent.is_dir():
        raise UsageError("there is no such folder for the plot", where=str(path.parent))
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError("plots need matplotlib", hints=("pip install 'provisioner[plot]'",)) from error


def draw_plot(run: ProbeRun, path: Path) -> None:
    """Draw what the run has into ``path``, one panel a probe. Raises UsageError if it has nothing to draw."""
    check_plot_path(path)
    import matplotlib
    from matplotlib.figure import Figure

    panels = _choose_panels(run)
    if not panels:
        raise UsageError("the run has no point to draw", where=str(path))
    columns = min(_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns, 4.0 * lines), layout="constrained")
    figure.suptitle(f"{run.server.model}, {run.server.software or 'server'}, {run.started}", fontsize=9)
    for number, (title, draw, points) in enumerate(panels, start=1):
        axes = figure.add_subplot(lines, columns, number)
        axes.set_title(title, fontsize=10)
        draw(axes, points)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    # Text as text: it can be searched, and the file is a tenth of the size.
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(path)


def _choose_panels(run: ProbeRun) -> "list[Panel]":
    candidates: list[Panel] = [
        ("Decode against context", _draw_decode, _points(run, Probe.DECODE)),
        ("First token against context", _draw_first_token, _points(run, Probe.DECODE)),
        ("Sightings of a document", _draw_cliff, _points(run, Probe.CACHE_CLIFF)),
        ("Second turn after re-sends", _draw_grown, _points(run, Probe.GROWN_PREFIX)),
        ("Rate against concurrency", _draw_streams, _points(run, Probe.CONCURRENCY)),
        ("First token against concurrency", _draw_stream_first_token, _points(run, Probe.CONCURRENCY)),
        ("Second turn with and without booster", _draw_routes, _points(run, Probe.BOOSTER_AB)),
    ]
    return [panel for panel in candidates if panel[2]]


def _points(run: ProbeRun, probe: Probe) -> tuple[Point, ...]:
    return tuple(point for point in run.points if point.probe is probe)


def _draw_line(
    axes: "Axes", points: Sequence[Point], quantity: Quantity, *, label: str, place: Callable[[Point], Any]
) -> None:
    """Medians with bars from the smallest to the largest value."""
    drawn = [(place(point), spread) for point in points if (spread := point.find(quantity)) is not None]
    if not drawn:
        return
    medians = [spread.median for _, spread in drawn]
    below = [spread.median - spread.minimum for _, spread in drawn]
    above = [spread.maximum - spread.median for _, spread in drawn]
    places = [x for x, _ in drawn]
    axes.errorbar(places, medians, yerr=[below, above], marker="o", capsize=3, label=label)
    axes.set_xticks(sorted(set(places)))
    axes.set_ylabel(quantity.unit)


def _context(point: Point) -> int:
    return point.setting.context or 0


def _draw_decode(axes: "Axes", points: Sequence[Point]) -> None:
    _draw_line(axes, points, model.DECODE_RATE, label="decode", place=_context)
    axes.set_xlabel("context, tokens")


def _draw_first_token(axes: "Axes", points: Sequence[Point]) -> None:
    _draw_line(axes, points, model.FIRST_TOKEN_COLD, label="cold", place=_context)
    _draw_line(axes, points, model.FIRST_TOKEN_WARM, label="seen before", place=_context)
    axes.set_xlabel("context, tokens")


def _draw_by_context(
    axes: "Axes", points: Sequence[Point], quantity: Quantity, place: Callable[[Point], Any], name: str
) -> None:
    for context in sorted({_context(point) for point in points}):
        chosen = [point for point in points if _context(point) == context]
        _draw_line(axes, chosen, quantity, label=f"{model.print_context(context)} context", place=place)
    axes.set_xlabel(name)


def _draw_cliff(axes: "Axes", points: Sequence[Point]) -> None:
    _draw_by_context(axes, points, model.ELAPSED, lambda point: point.setting.sighting, "sighting")


def _draw_grown(axes: "Axes", points: Sequence[Point]) -> None:
    _draw_by_context(axes, points, model.SECOND_TURN, lambda point: point.setting.resends, "re-sends of the first turn")


def _draw_streams(axes: "Axes", points: Sequence[Point]) -> None:
    _draw_line(axes, points, model.AGGREGATE_RATE, label="all streams", place=lambda point: point.setting.streams)
    _draw_line(axes, points, model.STREAM_RATE, label="one stream", place=lambda point: point.setting.streams)
    axes.set_xlabel("streams")


def _draw_stream_first_token(axes: "Axes", points: Sequence[Point]) -> None:
    _draw_line(axes, points, model.FIRST_TOKEN, label="first token", place=lambda point: point.setting.streams)
    axes.set_xlabel("streams")


def _draw_routes(axes: "Axes", points: Sequence[Point]) -> None:
    for route in ("direct", "via"):
        chosen = [point for point in points if point.setting.route == route]
        _draw_line(axes, chosen, model.SECOND_TURN, label=route, place=_context)
    axes.set_xlabel("context, tokens")
