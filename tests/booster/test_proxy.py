"""The booster as a proxy: what one side sends, the other side gets."""

import asyncio
import gzip
import hashlib
import io
import json
import os
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from provisioner.booster.headers import end_to_end, for_primer
from provisioner.booster.proxy import BoosterSettings
from provisioner.booster.service import Listening, serve
from tests.support import openai_server
from tests.support.openai_server import Behaviour, FakeServer
from tests.support.raw_http import exchange, serve_canned


@asynccontextmanager
async def boosted(
    behaviour: Behaviour | None = None, threshold: int = 10**9
) -> AsyncIterator[tuple[FakeServer, Listening]]:
    async with openai_server.serve(behaviour) as fake, before(fake.url, threshold) as listening:
        yield fake, listening


@asynccontextmanager
async def before(upstream: str, threshold: int = 10**9) -> AsyncIterator[Listening]:
    settings = BoosterSettings(upstream=upstream, threshold=threshold)
    async with serve(settings, port=0, grace_seconds=0.2) as listening:
        yield listening


def run(main: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main

    asyncio.run(bounded())


def chat(tokens: int = 20, *, stream: bool = True, content: str = "hello", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": tokens, "stream": stream, **more}


async def post(url: str, body: dict[str, Any], **headers: str) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{url}/v1/chat/completions", json=body) as answer,
    ):
        return answer.status, await answer.read()


def test_requests_arrive_as_they_were_sent() -> None:
    request = (
        b"PATCH /v2/any/%2e%2F/..//x;y?q=%20+&a=%C3%A4&b=http://c/d HTTP/1.1\r\n"
        b"Host: somewhere\r\nX-Odd-cAse: \xe4\r\nX-Twice: 1\r\nx-twice: 2\r\nAuthorization: Bearer sk-1\r\n"
        b"Cookie: a=b\r\nUser-Agent: raw\r\nContent-Encoding: gzip\r\nContent-Length: 6\r\n"
        b"Connection: close, X-Hop\r\nX-Hop: 1\r\nTE: trailers\r\n\r\n\x00\x01\xffabc"
    )
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

    async def main() -> None:
        async with serve_canned(answer) as upstream, before(upstream.url) as listening:
            await exchange(listening.url, request)
        head, _, body = upstream.heard[0].partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        assert lines[0] == b"PATCH /v2/any/%2e%2F/..//x;y?q=%20+&a=%C3%A4&b=http://c/d HTTP/1.1"
        assert [line for line in lines[1:] if not line.startswith((b"Host", b"Connection"))] == [
            b"X-Odd-cAse: \xe4",
            b"X-Twice: 1",
            b"x-twice: 2",
            b"Authorization: Bearer sk-1",
            b"Cookie: a=b",
            b"User-Agent: raw",
            b"Content-Encoding: gzip",
            b"Content-Length: 6",
        ]
        assert f"Host: {upstream.url.removeprefix('http://')}".encode() in lines
        assert body == b"\x00\x01\xffabc"

    run(main())


def test_a_chunked_request_stays_one() -> None:
    request = (
        b"POST /x HTTP/1.1\r\nHost: h\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
    )

    async def main() -> None:
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
        async with serve_canned(answer) as upstream, before(upstream.url) as listening:
            assert (await exchange(listening.url, request)).endswith(b"hi")
        head, _, body = upstream.heard[0].partition(b"\r\n\r\n")
        assert b"content-length" not in head.lower()
        assert b"".join(body.split(b"\r\n")[1::2]) == b"abcdefg"

    run(main())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 207 Odd Reason\r\nX-One: 1\r\nSet-Cookie: a=1\r\nset-cookie: b=2\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Type: a/b\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 204 No Content\r\nX-Empty: yes\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 29\r\n\r\n"
        + gzip.compress(b"packed!!!", mtime=0),
    ],
)  # fmt: skip
def test_answers_arrive_as_they_were_sent(answer: bytes) -> None:
    async def main() -> None:
        async with serve_canned(answer) as upstream, before(upstream.url) as listening:
            got = await exchange(listening.url, b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert got.replace(b"Connection: close\r\n", b"") == answer

    run(main())


def test_an_answer_to_head_keeps_its_length_and_has_no_body() -> None:
    async def main() -> None:
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\nContent-Type: text/html\r\n\r\n"
        async with serve_canned(answer) as upstream, before(upstream.url) as listening:
            got = await exchange(listening.url, b"HEAD /x HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert got.replace(b"Connection: close\r\n", b"") == answer

    run(main())


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"])
def test_any_method_and_a_large_body_pass_both_ways(method: str) -> None:
    async def main() -> None:
        payload = os.urandom(6 << 20)
        sent = io.BytesIO(payload)
        async with boosted() as (fake, listening), aiohttp.ClientSession(auto_decompress=False) as session:
            async with session.request(method, f"{listening.url}/echo", data=sent, expect100=True) as answer:
                assert answer.status == 207
                assert answer.headers["Content-Type"] == "application/x-odd"
                assert hashlib.sha256(await answer.read()).digest() == hashlib.sha256(payload).digest()
            assert fake.received[0].method == method

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_is_the_same_through_the_booster_as_without(stream: bool) -> None:
    async def main() -> None:
        async with openai_server.serve() as one, boosted() as (_, listening):
            assert await post(listening.url, chat(stream=stream)) == await post(one.url, chat(stream=stream))

    run(main())


def test_sixty_four_streams_at_once_carry_the_same_bytes_as_direct_ones() -> None:
    """The fake numbers its answers: each stream's own number is taken out before the hash."""

    async def digest(url: str, number: int, pause: float) -> str:
        await asyncio.sleep(pause)
        _, body = await post(url, chat(120, content=f"stream {number}"))
        events = [line for line in body.split(b"\n\n") if line]
        stripped = [event.partition(b'"object"')[2] or event for event in events]
        return hashlib.sha256(b"\n".join(stripped)).hexdigest()

    async def main() -> None:
        dice = random.Random(1)
        async with boosted(Behaviour(tokens_per_second=400.0)) as (fake, listening):
            pauses = [dice.random() / 4 for _ in range(64)]
            via = await asyncio.gather(*(digest(listening.url, number, pause) for number, pause in enumerate(pauses)))
            direct = await asyncio.gather(*(digest(fake.url, number, pause) for number, pause in enumerate(pauses)))
        assert via == direct

    run(main())


def test_an_event_arrives_before_the_next_one_is_made() -> None:
    async def main() -> None:
        async with boosted() as (fake, listening), aiohttp.ClientSession() as session:
            fake.gate = asyncio.Event()
            fake.gate_streams = True
            async with session.post(f"{listening.url}/v1/chat/completions", json=chat()) as answer:
                first = await answer.content.readuntil(b"\n\n")
                assert b'"role"' in first
                fake.gate.set()
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")

    run(main())


@pytest.mark.parametrize("behaviour", [Behaviour(status=400), Behaviour(status=503), Behaviour(api_key="other")])
def test_failures_of_the_server_come_through_as_they_are(behaviour: Behaviour) -> None:
    async def main() -> None:
        async with boosted(behaviour) as (fake, listening):
            via = await post(listening.url, chat())
            assert via == await post(fake.url, chat())
            assert via[0] == (401 if behaviour.api_key else behaviour.status)

    run(main())


def test_an_answer_that_breaks_off_breaks_off_for_the_client_too() -> None:
    async def main() -> None:
        async with boosted(Behaviour(cut_after=3), threshold=0) as (fake, listening):
            with pytest.raises(aiohttp.ClientPayloadError):
                await post(listening.url, chat())
            await settle(listening)
            stats = await read_stats(listening)
            assert stats["requests"]["upstream_failures"] == 1
            assert stats["boosts"]["skipped"]["not-completed"] == 1
            assert len(fake.chats) == 1

    run(main())


def test_a_length_that_is_not_kept_is_not_mended() -> None:
    async def main() -> None:
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"
        async with serve_canned(answer) as upstream, before(upstream.url) as listening:
            got = await exchange(listening.url, b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert got.endswith(b"\r\n\r\nabc")
        assert b"Content-Length: 10" in got

    run(main())


def test_an_early_refusal_of_a_large_body_comes_through() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig")
        await writer.drain()
        # Closing with the body unread resets the connection right behind the answer.
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with (
                before(url) as listening,
                aiohttp.ClientSession() as session,
                session.post(f"{listening.url}/x", data=io.BytesIO(os.urandom(4 << 20))) as answer,
            ):
                assert (answer.status, await answer.read()) == (413, b"big")

    run(main())


def test_a_server_that_is_away_is_told_apart_from_one_that_fails_and_found_again() -> None:
    async def main() -> None:
        async with openai_server.serve() as fake:
            port = int(fake.url.rpartition(":")[2])
        async with before(fake.url) as listening:
            status, body = await post(listening.url, chat())
            assert status == 502
            assert json.loads(body)["error"]["message"] == "the server behind the booster cannot be reached"
            for _ in range(2):
                async with openai_server.serve(port=port):
                    assert (await post(listening.url, chat()))[0] == 200
                assert (await post(listening.url, chat()))[0] == 502

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_the_first_token_aborts_the_request(stream: bool) -> None:
    async def main() -> None:
        async with boosted() as (fake, listening):
            fake.gate = asyncio.Event()
            task = asyncio.create_task(post(listening.url, chat(stream=stream)))
            await fake.wait_for(lambda: len(fake.chats) == 1)
            task.cancel()
            await fake.wait_for(lambda: fake.chats[0].aborted)
            assert (await read_stats(listening))["requests"] == {
                "forwarded": 1,
                "active": 0,
                "disconnected": 1,
                "upstream_failures": 0,
            }

    run(main())


def test_a_client_that_leaves_in_the_middle_aborts_the_request() -> None:
    async def main() -> None:
        async with boosted(Behaviour(tokens_per_second=50.0)) as (fake, listening), aiohttp.ClientSession() as session:
            async with session.post(f"{listening.url}/v1/chat/completions", json=chat(10_000)) as answer:
                await answer.content.readuntil(b"\n\n")
            await fake.wait_for(lambda: fake.chats[0].aborted)

    run(main())


def test_random_disconnects_leave_nothing_behind() -> None:
    """A short form of the benchmark's ten thousand."""

    async def visit(listening: Listening, dice: random.Random) -> None:
        patience = dice.choice((0.0, 0.002, 0.01, 0.05, 5.0))
        try:
            async with asyncio.timeout(patience):
                await post(listening.url, chat(dice.randrange(1, 60), stream=dice.random() < 0.7))
        except TimeoutError:
            pass

    async def main() -> None:
        dice = random.Random(3)
        async with boosted(Behaviour(tokens_per_second=1000.0), threshold=0) as (fake, listening):
            await visit(listening, random.Random(0))
            await settle(listening)
            tasks, sockets = len(asyncio.all_tasks()), count_sockets()
            for _ in range(10):
                await asyncio.gather(*(visit(listening, dice) for _ in range(30)))
            await settle(listening)
            await fake.wait_for(lambda: all(chat.done or chat.aborted for chat in fake.chats))
            await asyncio.sleep(0.1)
            assert len(asyncio.all_tasks()) <= tasks + 1
            assert count_sockets() <= sockets + 2
            assert any(chat.aborted for chat in fake.chats)

    run(main())


async def settle(listening: Listening) -> None:
    """Until no request and no boost is under way."""
    while listening.booster.boosts.real_requests or listening.booster.boosts.count().in_flight:
        await asyncio.sleep(0.01)


def count_sockets() -> int:
    return sum(1 for handle in Path("/proc/self/fd").iterdir() if _target(handle).startswith("socket:"))


def _target(handle: Path) -> str:
    try:
        return str(handle.readlink())
    except FileNotFoundError:
        return ""


async def read_stats(listening: Listening) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{listening.url}/booster/stats") as answer:
        stats: dict[str, Any] = await answer.json()
        return stats


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /booster/stats HTTP/1.1", b"200"),
        (b"GET /booster/stats?x=1 HTTP/1.1", b"200"),
        (b"GET /booster/metrics HTTP/1.1", b"200"),
        (b"GET /booster/other HTTP/1.1", b"404"),
        (b"POST /booster/stats HTTP/1.1", b"405"),
        (b"GET http://elsewhere/v1/models HTTP/1.1", b"200"),
        (b"OPTIONS * HTTP/1.1", b"400"),
    ],
)
def test_the_boosters_own_pages_and_odd_targets(request_line: bytes, status: bytes) -> None:
    async def main() -> None:
        async with boosted() as (fake, listening):
            got = await exchange(listening.url, request_line + b"\r\nHost: h\r\nConnection: close\r\n\r\n")
            assert got.split(b" ", 2)[1] == status
            assert [one.raw_path for one in fake.received] == (["/v1/models"] if b"models" in request_line else [])

    run(main())


def test_headers_that_end_at_a_proxy() -> None:
    raw = (
        (b"Connection", b"keep-alive, X-Private"),
        (b"x-private", b"1"),
        (b"Keep-Alive", b"timeout=5"),
        (b"Upgrade", b"h2c"),
        (b"X-Keep", b"\xe4"),
    )
    assert end_to_end(raw) == ((b"X-Keep", b"\xe4"),)


def test_headers_of_a_primer_are_the_clients_own_less_those_of_one_request() -> None:
    raw = (
        (b"Authorization", b"Bearer k"),
        (b"Host", b"h"),
        (b"Content-Length", b"5"),
        (b"content-type", b"application/json; charset=utf-8"),
        (b"X-Request-Id", b"7"),
        (b"X-Booster", b"on"),
        (b"X-Tenant", b"t"),
    )
    assert for_primer(raw) == (
        (b"Authorization", b"Bearer k"),
        (b"X-Tenant", b"t"),
        (b"Content-Type", b"application/json"),
        (b"X-Booster", b"off"),
    )
