from dataclasses import replace

import pytest

from provisioner.probes.compare import Finding, compare_runs, judge, to_json
from provisioner.probes.model import DECODE_RATE, ELAPSED, PROMPT_TOKENS, Measure, Quantity, Spread
from tests.support.probe_runs import run_of


@pytest.mark.parametrize(
    ("quantity", "first", "second", "finding"),
    [
        (DECODE_RATE, (60.0, 61.0, 62.0), (64.0, 65.0, 66.0), Finding.BETTER),
        (DECODE_RATE, (64.0, 65.0, 66.0), (60.0, 61.0, 62.0), Finding.WORSE),
        (ELAPSED, (60.0, 61.0, 62.0), (64.0, 65.0, 66.0), Finding.WORSE),
        (ELAPSED, (64.0, 65.0, 66.0), (60.0, 61.0, 62.0), Finding.BETTER),
        (PROMPT_TOKENS, (64.0, 65.0, 66.0), (60.0, 61.0, 62.0), Finding.CHANGED),
        (DECODE_RATE, (60.0, 61.0, 62.0), (61.0, 62.0, 66.0), Finding.WITHIN_SPREAD),
        (DECODE_RATE, (60.0, 60.0), (60.0, 60.0), Finding.WITHIN_SPREAD),
        (DECODE_RATE, (60.0,), (90.0, 91.0), Finding.NO_SPREAD),
    ],
)
def test_a_difference_counts_if_it_exceeds_the_spread(
    quantity: Quantity, first: tuple[float, ...], second: tuple[float, ...], finding: Finding
) -> None:
    assert judge(Measure(quantity=quantity, spread=Spread(values=first)), Spread(values=second)) is finding


def test_points_are_matched_by_setting_and_the_rest_is_named() -> None:
    first = run_of((60.0, 61.0), (50.0, 51.0))
    second = replace(run_of((66.0, 67.1)), server=replace(first.server, software="vLLM 0.28.0", url="http://other"))
    comparison = compare_runs(first, second)
    rate = comparison.rows[0]
    assert rate.quantity == DECODE_RATE
    assert rate.ratio == pytest.approx(66.55 / 60.5)
    assert rate.finding is Finding.BETTER
    assert [str(point.setting) for point in comparison.only_first] == ["2K context"]
    assert comparison.only_second == ()
    assert [(one.name, one.first, one.second) for one in comparison.differences] == [
        ("server.software", "vLLM 0.27.1", "vLLM 0.28.0")
    ]


def test_a_run_compared_with_itself_differs_in_nothing() -> None:
    run = run_of((60.0, 61.0), (50.0, 51.0))
    comparison = compare_runs(run, run)
    assert {row.finding for row in comparison.rows} == {Finding.WITHIN_SPREAD}
    assert {row.ratio for row in comparison.rows} == {1.0}
    assert comparison.differences == ()


def test_the_keys_of_the_comparison() -> None:
    made = to_json(compare_runs(run_of((60.0, 61.0)), run_of((66.0, 67.0), (5.0, 6.0))))
    assert made["schema"] == "provision/probe-compare/1"
    assert set(made) == {"schema", "rows", "differences", "only_first", "only_second"}
    assert made["rows"][0] == {
        "probe": "decode",
        "setting": {"context": 1000},
        "quantity": "decode",
        "unit": "tok/s",
        "first": {"median": 60.5, "min": 60.0, "max": 61.0},
        "second": {"median": 66.5, "min": 66.0, "max": 67.0},
        "ratio": 1.0992,
        "finding": "better",
    }
    assert made["only_second"] == [{"probe": "decode", "setting": {"context": 2000}}]
