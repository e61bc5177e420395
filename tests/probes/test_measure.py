"""The probes against a server with an align-mode cache, in virtual time: no figure depends on the machine."""

import asyncio
import contextlib
from typing import Any

import pytest

from provisioner.errors import NetworkError, UsageError
from provisioner.probes import model
from provisioner.probes.client import Endpoint, NoUsageError, RefusedError
from provisioner.probes.measure import Targets, count_requests, find_first_hit, run_probes
from provisioner.probes.model import Measure, Method, Point, Probe, RunSettings, Setting, Spread
from tests.support.openai_server import Behaviour, FakeServer, serve
from tests.support.probe_runs import Kept, settings
from tests.support.virtual_time import run_virtually

# The field's figures at 40K: 34.6 s cold, and 69 tokens a second in events of 3.5.
TRUE_RATE = 69.3
FIELD = {"prefill_seconds_per_token": 34.6 / 40_000, "tokens_per_second": TRUE_RATE}


def measure(wanted: RunSettings, *, model_name: str | None = None, **behaviour: Any) -> Kept:
    async def main() -> Kept:
        kept = Kept()
        async with serve(Behaviour(**(FIELD | behaviour))) as fake:
            targets = Targets(server=Endpoint.parse(fake.url, api_key="key"), model=model_name)
            await run_probes(targets, wanted, kept, extra={})
        return kept

    return run_virtually(main())


def median(point: Point, quantity: model.Quantity) -> float:
    spread = point.find(quantity)
    assert spread is not None, quantity.name
    return spread.median


@pytest.mark.parametrize("method", list(Method))
def test_the_decode_rate_is_right_where_counting_events_is_wrong_by_three_and_a_half(method: Method) -> None:
    kept = measure(settings(Probe.DECODE, method=method))
    assert [str(point.setting) for point in kept.points] == ["6K context", "40K context"]
    for point in kept.points:
        assert median(point, model.DECODE_RATE) == pytest.approx(TRUE_RATE, rel=0.03)
        by_events = TRUE_RATE / median(point, model.TOKENS_PER_EVENT)
        assert TRUE_RATE / by_events == pytest.approx(3.5, rel=0.05)


def test_the_decode_probe_tells_cold_from_warm_and_reads_the_drafts() -> None:
    point = measure(settings(Probe.DECODE, contexts=(40_000,))).points[0]
    assert median(point, model.FIRST_TOKEN_COLD) == pytest.approx(34.6, rel=0.03)
    assert median(point, model.FIRST_TOKEN_WARM) < 0.1
    assert median(point, model.PROMPT_TOKENS) == pytest.approx(40_000, rel=0.02)
    assert median(point, model.ACCEPTANCE_LENGTH) == pytest.approx(3.5, rel=0.03)
    assert median(point, model.ACCEPTANCE) == pytest.approx(2.5 / 3, rel=0.03)


def test_prompts_are_sized_by_the_servers_own_count() -> None:
    kept = measure(settings(Probe.DECODE), tokenizes=True, surplus=100)
    assert [median(point, model.PROMPT_TOKENS) for point in kept.points] == [
        pytest.approx(6000, rel=0.01),
        pytest.approx(40_000, rel=0.01),
    ]
    assert kept.notes == []


def test_a_prompt_of_another_length_than_wanted_is_noted_once() -> None:
    kept = measure(settings(Probe.CACHE_CLIFF, contexts=(40_000,), repeats=1), surplus=100)
    made = 40_000 + 100 * 31
    assert kept.notes[0] == f"a prompt for 40K context had {made} tokens ({made / 40_000 - 1:+.1%})"
    assert [note for note in kept.notes if note.startswith("a prompt")] == kept.notes[:1]


def test_the_cliff_is_found_at_the_third_sighting() -> None:
    kept = measure(settings(Probe.CACHE_CLIFF))
    at_40k = [point for point in kept.points if point.setting.context == 40_000]
    cold, second, third = (median(point, model.ELAPSED) for point in at_40k)
    assert cold == pytest.approx(34.6, rel=0.03)
    assert second == pytest.approx(34.6, rel=0.03)
    assert third < 0.1
    assert [median(point, model.PREFIX_HITS) for point in at_40k] == pytest.approx([0, 0, 1], abs=0.01)
    assert kept.notes == [f"{context} context: first hit at sighting 3" for context in ("6K", "40K")]


@pytest.mark.parametrize("sightings", [2, 4])
def test_other_caches_have_their_cliff_elsewhere(sightings: int) -> None:
    kept = measure(settings(Probe.CACHE_CLIFF, contexts=(6000,)), sightings=sightings)
    expected = {2: "first hit at sighting 2", 4: "no hit in 3 sightings"}
    assert kept.notes == [f"6K context: {expected[sightings]}"]


def test_without_counters_the_cliff_is_found_by_time() -> None:
    kept = measure(settings(Probe.CACHE_CLIFF, contexts=(6000,)), has_metrics=False)
    assert kept.server is not None
    assert not kept.server.has_counters
    assert kept.points[0].find(model.PREFIX_HITS) is None
    assert kept.notes == ["6K context: first hit at sighting 3"]


def test_a_second_turn_hits_after_one_resend() -> None:
    kept = measure(settings(Probe.GROWN_PREFIX, contexts=(40_000,)))
    none, one, two = kept.points
    assert median(none, model.SECOND_TURN) == pytest.approx(34.6 * 1.06, rel=0.03)
    assert median(one, model.SECOND_TURN) == pytest.approx(34.6 * 0.06, rel=0.15)
    assert median(two, model.SECOND_TURN) == pytest.approx(34.6 * 0.06, rel=0.15)
    assert [point.setting.resends for point in kept.points] == [0, 1, 2]


def test_streams_are_measured_together_and_one_by_one() -> None:
    one, four = measure(settings(Probe.CONCURRENCY)).points
    assert median(four, model.STREAM_RATE) == pytest.approx(TRUE_RATE, rel=0.03)
    assert median(four, model.AGGREGATE_RATE) == pytest.approx(4 * median(one, model.AGGREGATE_RATE), rel=0.03)
    assert median(one, model.FIRST_TOKEN) == pytest.approx(0.865, rel=0.1)


@pytest.mark.parametrize("probe", [probe for probe in Probe if probe is not Probe.BOOSTER_AB])
@pytest.mark.parametrize("method", list(Method))
def test_as_many_requests_are_sent_as_were_announced(probe: Probe, method: Method) -> None:
    kept = measure(settings(probe, method=method, contexts=(500,), repeats=2, completion_tokens=8))
    assert kept.advanced == kept.expected == count_requests(settings(probe, method=method, contexts=(500,), repeats=2))


def test_a_server_without_usage_is_said_so_and_not_measured() -> None:
    with pytest.raises(NoUsageError) as caught:
        measure(settings(Probe.DECODE), sends_usage=False)
    assert "sends no usage" in caught.value.what
    assert caught.value.exit_code == 4


def test_a_context_beyond_the_servers_limit_is_passed_over_with_a_note() -> None:
    kept = measure(settings(Probe.DECODE, repeats=1), max_model_len=8192)
    assert [point.setting.context for point in kept.points] == [6000]
    assert kept.notes == ["40K context passed over: the server's limit is 8192 tokens"]


def test_an_answer_that_stops_early_is_noted() -> None:
    kept = measure(settings(Probe.DECODE, contexts=(500,), repeats=1), stops_after=20)
    assert kept.notes[0].startswith("an answer ended after 20 of 257 tokens")
    assert median(kept.points[0], model.DECODE_RATE) == pytest.approx(TRUE_RATE, rel=0.03)


def test_reasoning_and_tool_calls_are_tokens_too() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    kept = measure(settings(Probe.DECODE, contexts=(500,), repeats=1), reasoning="hm", tool_calls=(call,))
    assert median(kept.points[0], model.DECODE_RATE) == pytest.approx(TRUE_RATE, rel=0.03)


def test_a_model_that_is_not_served_is_named_with_those_that_are() -> None:
    with pytest.raises(UsageError) as caught:
        measure(settings(Probe.DECODE), model_name="other")
    assert (caught.value.expected, caught.value.found) == ("other", "tiny")


def test_a_wrong_key_is_said_so() -> None:
    with pytest.raises(RefusedError) as caught:
        measure(settings(Probe.DECODE), api_key="another")
    assert caught.value.status == 401
    assert "--key-file" in caught.value.hints[0]


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"fails_after": 3}, "the answer broke off with an error: engine died"),
        ({"cut_after": 3}, "the connection broke"),
        ({"status": 400}, "the server answered 400: no such thing"),
    ],
)
def test_an_answer_that_goes_wrong_is_a_network_error(behaviour: dict[str, Any], message: str) -> None:
    with pytest.raises(NetworkError) as caught:
        measure(settings(Probe.DECODE), **behaviour)
    assert message in caught.value.what


def test_nobody_listening_is_said_so() -> None:
    async def main() -> None:
        await run_probes(Targets(server=Endpoint.parse("http://127.0.0.1:1")), settings(Probe.DECODE), Kept(), extra={})

    with pytest.raises(NetworkError) as caught:
        asyncio.run(main())
    assert caught.value.what == "no server listens there"


def test_an_answer_that_takes_too_long_is_given_up() -> None:
    async def main() -> None:
        async with serve(Behaviour(prefill_seconds_per_token=1.0)) as fake:
            await run_probes(
                Targets(server=Endpoint.parse(fake.url, answer_seconds=60)), settings(Probe.DECODE), Kept(), extra={}
            )

    with pytest.raises(NetworkError) as caught:
        run_virtually(main())
    assert caught.value.what == "the server gave no whole answer in 60 s"


def test_an_interrupted_run_has_handed_on_the_repeats_that_were_whole() -> None:
    async def main() -> tuple[Kept, FakeServer]:
        kept = Kept()
        async with serve(Behaviour(**FIELD)) as fake:
            targets = Targets(server=Endpoint.parse(fake.url))
            task = asyncio.create_task(run_probes(targets, settings(Probe.CACHE_CLIFF), kept, extra={}))
            # Two calibrations, one whole document of three sightings at 6K, and one more of the second.
            while kept.advanced < 2 + 3 + 1:
                await asyncio.sleep(0.5)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await fake.wait_for(lambda: fake.chats[-1].aborted)
        return kept, fake

    kept, fake = run_virtually(main())
    assert [len(point.measures[0].spread.values) for point in kept.points] == [1, 1, 1]
    assert fake.chats[-1].aborted


def test_the_first_hit_of_no_cache_is_none() -> None:
    points = [
        Point(
            probe=Probe.CACHE_CLIFF,
            setting=Setting(context=1, sighting=sighting),
            measures=(Measure(quantity=model.ELAPSED, spread=Spread(values=(seconds,))),),
        )
        for sighting, seconds in ((1, 34.6), (2, 67.8), (3, 33.0))
    ]
    assert find_first_hit(points) is None
