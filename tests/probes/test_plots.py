from pathlib import Path

import pytest

from provisioner.errors import UsageError
from provisioner.probes import model
from provisioner.probes.model import Measure, Point, Probe, Quantity, Setting, Spread
from provisioner.probes.plots import check_plot_path, draw_plot
from tests.support.probe_runs import run_of

pytest.importorskip("matplotlib", reason="plots are an optional extra: pip install 'provisioner[plot]'")


def point(probe: Probe, quantity: Quantity, *values: float, **setting: object) -> Point:
    measure = Measure(quantity=quantity, spread=Spread(values=values))
    return Point(probe=probe, setting=Setting(**setting), measures=(measure,))  # type: ignore[arg-type]


EVERY_PROBE = (
    point(Probe.DECODE, model.DECODE_RATE, 60.0, 62.0, context=6000),
    point(Probe.CACHE_CLIFF, model.ELAPSED, 34.6, context=40000, sighting=1),
    point(Probe.CACHE_CLIFF, model.ELAPSED, 5.6, context=40000, sighting=3),
    point(Probe.GROWN_PREFIX, model.SECOND_TURN, 6.6, context=40000, resends=1),
    point(Probe.CONCURRENCY, model.AGGREGATE_RATE, 275.0, streams=8, context=1000),
    point(Probe.BOOSTER_AB, model.SECOND_TURN, 6.6, context=40000, route="via"),
)


def test_every_probe_has_its_panel(tmp_path: Path) -> None:
    path = tmp_path / "run.svg"
    draw_plot(run_of(points=EVERY_PROBE), path)
    text = path.read_text(encoding="utf-8")
    for title in (
        "Decode against context",
        "First token against context",
        "Sightings of a document",
        "Second turn after re-sends",
        "Rate against concurrency",
        "Second turn with and without booster",
    ):
        assert title in text


def test_a_png_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "run.png"
    draw_plot(run_of((60.0, 61.0), (50.0,)), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_an_empty_run_is_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no point"):
        draw_plot(run_of(), tmp_path / "run.png")
    assert not (tmp_path / "run.png").exists()


@pytest.mark.parametrize("name", ["run.pdf", "run", "missing/run.svg"])
def test_a_place_where_nothing_can_be_drawn_is_refused_before_the_run(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        check_plot_path(tmp_path / name)
