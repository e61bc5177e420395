"""When the booster boosts, with what, and what it leaves alone."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.booster.proxy import BoosterSettings
from provisioner.booster.schedule import Boosts, Preparation, Primer
from provisioner.booster.service import Listening, serve
from provisioner.openai.conversation import Reply, ReplyReader, Skip, make_primer
from provisioner.openai.prometheus import parse_samples
from provisioner.probes import model
from provisioner.probes.client import Endpoint
from provisioner.probes.measure import Targets, run_probes
from provisioner.probes.model import Probe
from tests.booster.test_proxy import boosted, chat, post, read_stats, run, settle
from tests.support import openai_server
from tests.support.openai_server import Behaviour, FakeServer
from tests.support.probe_runs import Kept, settings
from tests.support.virtual_time import run_virtually

DOCUMENT = "A long document. " * 100
CALLS = (
    {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Ålesund"}'}},
    {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
)


async def boosts(listening: Listening) -> dict[str, Any]:
    counted: dict[str, Any] = (await read_stats(listening))["boosts"]
    return counted


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
def test_a_second_turn_hits_through_the_booster_and_misses_without(stream: bool) -> None:
    async def second_turn_hits(url: str, fake: FakeServer, settled: Callable[[], Awaitable[None]]) -> int:
        first = chat(stream=stream, content=url + DOCUMENT)
        _, body = await post(url, first)
        await settled()
        reply = read_content(body, stream=stream)
        messages = [*first["messages"], {"role": "assistant", "content": reply}, {"role": "user", "content": "And?"}]
        await post(url, {**first, "messages": messages})
        return next(one.hit_tokens for one in reversed(fake.chats) if len(one.json["messages"]) == 3)

    async def main() -> None:
        async with boosted(threshold=1000) as (fake, listening):

            async def nothing() -> None: ...

            async def boost_done() -> None:
                await settle(listening)

            assert await second_turn_hits(fake.url, fake, nothing) == 0
            hits = await second_turn_hits(listening.url, fake, boost_done)
            assert hits > len(DOCUMENT) // openai_server.CHARACTERS_PER_TOKEN * 0.9

    run(main())


def read_content(body: bytes, *, stream: bool) -> str:
    reader = ReplyReader(streamed=stream)
    reader.feed(body)
    reply = reader.close()
    assert isinstance(reply, Reply)
    return str(reply.message["content"])


@pytest.mark.parametrize("stream", [True, False])
def test_the_primer_is_what_the_client_would_send_next(stream: bool) -> None:
    parts = [{"type": "text", "text": DOCUMENT}, {"type": "image_url", "image_url": {"url": "data:,x"}}]
    request = {
        "model": "tiny",
        "messages": [{"role": "system", "content": "é"}, {"role": "user", "content": parts}],
        "tools": [{"type": "function", "function": {"name": "look_up"}}],
        "tool_choice": "auto",
        "chat_template_kwargs": {"enable_thinking": True},
        "max_tokens": 9,
        "stream": stream,
        "temperature": 0.7,
    }

    async def main() -> None:
        async with boosted(Behaviour(reasoning="hm", tool_calls=CALLS), threshold=1000) as (fake, listening):
            await post(listening.url, request, **{"Authorization": "Bearer sk-1", "X-Tenant": "t", "X-Request-Id": "7"})
            await settle(listening)
            _, primer = fake.chats
            *history, reply = primer.json["messages"]
            assert history == request["messages"]
            assert reply["role"] == "assistant"
            assert reply["reasoning"] == "hm"
            assert reply["tool_calls"] == list(CALLS)
            assert isinstance(reply["content"], str)
            rest = {name: value for name, value in primer.json.items() if name != "messages"}
            same = ("model", "tools", "tool_choice", "chat_template_kwargs", "temperature")
            assert rest == {**{name: request[name] for name in same}, "max_tokens": 1, "stream": False}
            assert primer.header("Authorization") == "Bearer sk-1"
            assert primer.header("X-Tenant") == "t"
            assert primer.header("X-Booster") == "off"
            assert primer.header("X-Request-Id") is None
            assert (await boosts(listening))["completed"] == 1

    run(main())


@pytest.mark.parametrize(
    ("behaviour", "request_body", "headers", "why"),
    [
        (Behaviour(), chat(content=DOCUMENT), {"X-Booster": "Off"}, "off"),
        (Behaviour(), chat(content="short"), {}, "too-short"),
        (Behaviour(), chat(content=DOCUMENT, n=2), {}, "several-choices"),
        (Behaviour(), chat(content=DOCUMENT, continue_final_message=True), {}, "continued-message"),
        (Behaviour(status=500), chat(content=DOCUMENT), {}, "not-completed"),
        (Behaviour(fails_after=2), chat(content=DOCUMENT), {}, "not-completed"),
    ],
)
def test_turns_that_are_not_boosted_are_counted_by_reason(
    behaviour: Behaviour, request_body: dict[str, Any], headers: dict[str, str], why: str
) -> None:
    async def main() -> None:
        async with boosted(behaviour, threshold=1000) as (fake, listening):
            await post(listening.url, request_body, **headers)
            await settle(listening)
            counted = await boosts(listening)
            assert counted["sent"] == 0
            assert {name: count for name, count in counted["skipped"].items() if count} == {why: 1}
            assert len(fake.chats) == 1

    run(main())


@asynccontextmanager
async def boost_in_flight() -> AsyncIterator[tuple[FakeServer, Listening]]:
    """A booster whose boost has arrived at the server, which does not answer it."""
    async with boosted(threshold=1000) as (fake, listening):
        await post(listening.url, chat(content=DOCUMENT))
        await settle(listening)
        fake.gate = asyncio.Event()
        fake.gate_primers_only = True
        await post(listening.url, chat(content=DOCUMENT + "again"))
        await fake.wait_for(lambda: fake.held == 1)
        yield fake, listening


def is_primer(fake: FakeServer) -> bool:
    return fake.chats[-1].header("X-Booster") == "off"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
def test_real_traffic_cancels_the_boost_and_the_server_sees_it_go(path: str) -> None:
    async def main() -> None:
        async with boost_in_flight() as (fake, listening), aiohttp.ClientSession() as session:
            primer = fake.chats[-1]
            async with session.post(listening.url + path, json=chat(content="short")) as answer:
                await answer.read()
            await fake.wait_for(lambda: primer.aborted)
            counted = await boosts(listening)
            assert counted["cancelled"] == 1
            assert not counted["in_flight"]
            assert counted["sent"] == 2

    run(main())


def test_questions_about_the_server_cancel_nothing() -> None:
    async def main() -> None:
        async with boost_in_flight() as (fake, listening), aiohttp.ClientSession() as session:
            for path in ("/v1/models", "/metrics", "/booster/stats"):
                async with session.get(listening.url + path) as answer:
                    assert answer.status == 200
            counted = await boosts(listening)
            assert counted["in_flight"]
            assert counted["cancelled"] == 0
            assert fake.gate is not None
            fake.gate.set()
            await settle(listening)
            assert (await boosts(listening))["completed"] == 2

    run(main())


def test_a_boost_waits_for_real_requests_and_the_newest_conversation_wins() -> None:
    async def main() -> None:
        async with boosted(threshold=1000) as (fake, listening):
            fake.gate = asyncio.Event()
            slow = asyncio.create_task(post(listening.url, chat(content="slow", stream=False)))
            await fake.wait_for(lambda: fake.held == 1)
            fake.gate, gate = None, fake.gate
            for name in ("older", "newest"):
                await post(listening.url, chat(content=name + DOCUMENT))
            counted = await boosts(listening)
            assert counted["waiting"]
            assert counted["sent"] == 0
            assert counted["superseded"] == 1
            gate.set()
            await slow
            await settle(listening)
            primers = [one for one in fake.chats if one.header("X-Booster") == "off"]
            assert [one.json["messages"][0]["content"][:6] for one in primers] == ["newest"]

    run(main())


def test_a_boost_that_the_server_refuses_is_counted_and_does_no_harm() -> None:
    async def main() -> None:
        async with boosted(Behaviour(refuses_primers=True), threshold=1000) as (_fake, listening):
            assert (await post(listening.url, chat(content=DOCUMENT)))[0] == 200
            await settle(listening)
            assert (await boosts(listening))["failed"] == 1
            assert (await post(listening.url, chat(content="short")))[0] == 200

    run(main())


def test_a_client_that_leaves_with_the_last_event_has_completed_its_turn() -> None:
    async def main() -> None:
        async with boosted(Behaviour(lingers=0.5), threshold=1000) as (fake, listening):
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{listening.url}/v1/chat/completions", json=chat(content=DOCUMENT)) as answer,
            ):
                while b"[DONE]" not in await answer.content.readuntil(b"\n\n"):
                    pass
            await fake.wait_for(lambda: len(fake.chats) == 2 and fake.chats[1].done)
            assert is_primer(fake)

    run(main())


def test_stats_and_metrics_say_the_same() -> None:
    async def main() -> None:
        async with boosted(threshold=1000) as (_, listening):
            await post(listening.url, chat(content=DOCUMENT))
            await settle(listening)
            await post(listening.url, chat(content="short"))
            stats = await read_stats(listening)
            async with aiohttp.ClientSession() as session, session.get(f"{listening.url}/booster/metrics") as answer:
                samples = parse_samples(await answer.text())
        values = {(one.name, *one.labels.values()): one.value for one in samples}
        assert set(stats) == {"schema", "uptime_seconds", "threshold_characters", "requests", "boosts"}
        assert stats["schema"] == "provision/booster-stats/1"
        assert stats["threshold_characters"] == 1000
        assert values["booster_requests_total",] == stats["requests"]["forwarded"] == 2
        assert values["booster_boosts_ended_total", "completed"] == stats["boosts"]["completed"] == 1
        for why, count in stats["boosts"]["skipped"].items():
            assert values["booster_boosts_skipped_total", why] == count
        assert set(stats["boosts"]["skipped"]) == {str(why) for why in Skip}

    run(main())


def test_nothing_of_a_conversation_or_a_key_is_told(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with boosted(threshold=100) as (_, listening):
            body = chat(content="confidential " * 100)
            await post(listening.url, body, Authorization="Bearer sk-secret")
            await settle(listening)
            stats = json.dumps(await read_stats(listening))
            assert "confidential" not in stats
            assert "sk-secret" not in stats
            host, port = listening.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET / HTTP/1.1\r\nAuthorization: Bearer sk-secret\r\nBad header sk-secret\r\n\r\n")
            await reader.read()
            writer.close()

    caplog.set_level(0)
    run(main())
    told = "".join(capfd.readouterr()) + caplog.text
    assert "sk-secret" not in told
    assert "confidential" not in told


def test_a_primer_shows_neither_headers_nor_body() -> None:
    primer = Primer(path="/p", headers=((b"Authorization", b"Bearer sk-secret"),), body={"messages": ["confidential"]})
    assert "secret" not in repr(primer)
    assert "confidential" not in repr(primer)


def test_booster_ab_shows_the_second_turn_as_a_hit_through_the_booster_alone() -> None:
    async def main() -> Kept:
        kept = Kept()
        behaviour = Behaviour(prefill_seconds_per_token=34.6 / 40_000, tokens_per_second=69.3)
        async with openai_server.serve(behaviour) as fake:
            settings_ = BoosterSettings(upstream=fake.url)
            async with serve(settings_, port=0, grace_seconds=0.2) as listening:
                targets = Targets(server=Endpoint.parse(fake.url), booster=Endpoint.parse(listening.url))
                await run_probes(targets, settings(Probe.BOOSTER_AB, contexts=(40_000, 500)), kept, extra={})
        return kept

    kept = run_virtually(main())
    times = {}
    for point in kept.points:
        spread = point.find(model.SECOND_TURN)
        hits = point.find(model.PREFIX_HITS)
        assert spread is not None
        assert hits is not None
        assert len(spread.values) == 3
        times[point.setting.context, point.setting.route] = (spread.median, hits.median)
    assert times[40_000, "direct"] == pytest.approx((34.6 * 1.06, 0.0), rel=0.03, abs=0.01)
    assert times[40_000, "via"][0] < 34.6 * 0.08
    assert times[40_000, "via"][1] > 0.9
    # Below the threshold the booster changes nothing, and the run says so.
    assert times[500, "via"][1] == 0
    assert kept.notes == ["a turn was not boosted; /booster/stats of the booster says why"] * 3
    assert kept.advanced == kept.expected


class Sender:
    """Stands for the server: boosts end when the test says so."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.running = 0
        self.most = 0
        self.release = asyncio.Event()
        self.ends_well = True

    async def __call__(self, primer: Primer) -> bool:
        self.sent.append(primer.path)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.release.wait()
            return self.ends_well
        finally:
            self.running -= 1


def primer_of(path: str) -> Preparation:
    async def prepare() -> Primer | Skip:
        return Primer(path=path, headers=(), body={})

    return prepare


@given(st.lists(st.sampled_from(["begin", "end with boost", "end", "let go", "pause"]), max_size=40))
def test_never_two_boosts_and_never_one_beside_real_requests(events: list[str]) -> None:
    async def main() -> None:
        sender = Sender()
        counted = Boosts(sender)
        active = 0
        for number, event in enumerate(events):
            match event:
                case "begin":
                    counted.begin_real()
                    await counted.wait_until_clear()
                    active += 1
                case "end with boost" if active:
                    counted.end_real(primer_of(str(number)))
                    active -= 1
                case "end" if active:
                    counted.end_real(None)
                    active -= 1
                case "let go":
                    sender.release.set()
                    await asyncio.sleep(0)
                case "pause":
                    await asyncio.sleep(0)
                case _:
                    continue
            assert sender.most <= 1
            assert not (active and sender.running)
        await counted.close()
        totals = counted.count()
        assert totals.sent <= events.count("end with boost")
        assert not totals.in_flight
        assert sender.running == 0

    asyncio.run(main())


def test_after_its_close_nothing_is_boosted() -> None:
    async def main() -> None:
        sender = Sender()
        counted = Boosts(sender)
        counted.begin_real()
        await counted.close()
        counted.end_real(primer_of("late"))
        await asyncio.sleep(0)
        assert sender.sent == []

    asyncio.run(main())


FIELDS = st.sampled_from(
    [
        "choices",
        "delta",
        "message",
        "index",
        "role",
        "content",
        "tool_calls",
        "reasoning",
        "finish_reason",
        "n",
        "messages",
        "text",
        "function",
        "type",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=12,
)


@hypothesis.settings(max_examples=60)
@given(JSON, JSON)
def test_no_request_and_no_answer_makes_the_booster_fail(request: Any, answer: Any) -> None:
    for streamed, body in (
        (True, b"data: " + json.dumps(answer).encode() + b"\n\ndata: [DONE]\n\n"),
        (False, json.dumps(answer).encode()),
    ):
        reader = ReplyReader(streamed=streamed)
        reader.feed(body)
        assert isinstance(reader.close(), Reply | Skip)
    reply = Reply(message={"role": "assistant", "content": "x"}, finish_reason="stop")
    assert isinstance(make_primer(json.dumps(request).encode(), reply, threshold=0), dict | Skip)


def test_a_body_nested_beyond_reason_is_unreadable() -> None:
    deep = b'{"messages": [' + b"[" * 100_000 + b"]" * 100_000 + b"]}"
    assert make_primer(deep, Reply(message={}, finish_reason="stop"), threshold=0) is Skip.UNREADABLE
