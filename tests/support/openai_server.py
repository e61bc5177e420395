"""A server of the OpenAI kind that behaves like vLLM with an align-mode prefix cache, without a model.

A token is four characters. A block of the prompt is found in the cache once it was computed twice (first two sightings
miss, the third hits); prefill takes time by the tokens it computes; decoding sends 3.5 tokens an event, as speculative
decoding does. Form of requests, chunks, errors and metrics: vLLM 0.27.1, ``vllm/entrypoints/openai`` and
``vllm/v1/metrics``.
"""

import asyncio
import contextlib
import itertools
import json
import math
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """Times in seconds. ``sightings`` is the one that first hits; ``cut_after`` and ``fails_after`` count events."""

    name: str = "tiny"
    block_tokens: int = 16
    sightings: int = 3
    prefill_seconds_per_token: float = 0.0
    tokens_per_second: float = math.inf
    tokens_of_events: tuple[int, ...] = (3, 4)
    max_model_len: int | None = None
    refuses_above: int | None = None
    api_key: str | None = None
    sends_usage: bool = True
    tokenizes: bool = False
    # Tokens more for every 5000 characters, so that short samples do not tell what a long prompt counts.
    surplus: int = 0
    has_metrics: bool = True
    drafts: bool = True
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    stops_after: int | None = None
    cut_after: int | None = None
    fails_after: int | None = None
    # Seconds between a stream's last event and the end of its connection's answer.
    lingers: float = 0.0
    refuses_primers: bool = False
    status: int = 200


@dataclass(kw_only=True)
class Received:
    """One request as it arrived, and what became of it."""

    method: str
    raw_path: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    done: bool = False
    aborted: bool = False
    hit_tokens: int = 0

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        return next((value.decode() for key, value in self.headers if key.decode().lower() == name.lower()), None)


@dataclass
class FakeServer:
    behaviour: Behaviour
    url: str = ""
    received: list[Received] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    # An event to make chat requests wait until it is set: before anything is sent, or after a stream's first event.
    gate: asyncio.Event | None = None
    gate_streams: bool = False
    gate_primers_only: bool = False
    held: int = 0
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    _seen: Counter[int] = field(default_factory=Counter)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def chats(self) -> list[Received]:
        return [one for one in self.received if one.raw_path.endswith("/chat/completions")]

    async def wait_for(self, condition: Any) -> None:
        """Until ``condition()`` holds; looked at whenever a request arrives or ends."""
        async with asyncio.timeout(20), self.arrived:
            await self.arrived.wait_for(condition)

    async def _tell(self) -> None:
        async with self.arrived:
            self.arrived.notify_all()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = b"".join([chunk async for chunk in request.content.iter_any()])
        received = Received(
            method=request.method, raw_path=request.raw_path, headers=tuple(request.raw_headers), body=body
        )
        self.received.append(received)
        await self._tell()
        try:
            response = await self._answer(request, received)
            received.done = True
            return response
        except (asyncio.CancelledError, ConnectionError):
            received.aborted = True
            raise
        finally:
            # Shielded by being no await of ours: the task may be under cancellation.
            asyncio.get_running_loop().create_task(self._tell())

    async def _answer(self, request: web.BaseRequest, received: Received) -> web.StreamResponse:
        expected = self.behaviour.api_key
        if expected and request.path.startswith("/v1") and received.header("authorization") != f"Bearer {expected}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        match request.method, request.path:
            case "GET", "/v1/models":
                card = {"id": self.behaviour.name, "object": "model", "owned_by": "vllm"}
                limit = {"max_model_len": self.behaviour.max_model_len} if self.behaviour.max_model_len else {}
                return web.json_response({"object": "list", "data": [card | limit]})
            case "GET", "/version":
                return web.json_response({"version": "0.27.1"})
            case "GET", "/metrics" if self.behaviour.has_metrics:
                return web.Response(text=self._metrics())
            case "POST", "/tokenize" if self.behaviour.tokenizes:
                return web.json_response({"count": self._count(_prompt_of(received.json)), "tokens": []})
            case "POST", "/v1/chat/completions":
                return await self._chat(request, received)
            case _, "/echo":
                return web.Response(
                    body=received.body, status=207, headers={"X-One": "1", "Content-Type": "application/x-odd"}
                )
        return web.json_response({"detail": "Not Found"}, status=404)

    def _metrics(self) -> str:
        names = ["prefix_cache_queries", "prefix_cache_hits"]
        if self.behaviour.drafts:
            names += ["spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"]
        lines = []
        for name in names:
            lines += [f"# HELP vllm:{name}_total Text.", f"# TYPE vllm:{name}_total counter"]
            lines.append(f'vllm:{name}_total{{engine="0",model_name="{self.behaviour.name}"}} {self.counters[name]}.0')
            lines.append(f'vllm:{name}_created{{engine="0",model_name="{self.behaviour.name}"}} 1.7e+09')
        return "\n".join(lines) + "\n"

    async def _chat(self, request: web.BaseRequest, received: Received) -> web.StreamResponse:
        if self.behaviour.status != 200:
            error = {"message": "no such thing", "type": "BadRequestError", "param": None, "code": 400}
            return web.json_response({"error": error}, status=self.behaviour.status)
        body = received.json
        limit = self.behaviour.refuses_above
        if limit is not None and len(received.body) > limit * CHARACTERS_PER_TOKEN + 500:
            return web.json_response({"error": {"message": "too long", "code": 400}}, status=400)
        prompt_tokens = await self._prefill(body, received)
        primer = received.header("X-Booster") == "off"
        if primer and self.behaviour.refuses_primers:
            return web.json_response({"error": {"message": "roles must alternate", "code": 400}}, status=400)
        if self.gate is not None and not self.gate_streams and (primer or not self.gate_primers_only):
            self.held += 1
            await self._tell()
            await self.gate.wait()
        tokens = min(body.get("max_tokens") or 16, self.behaviour.stops_after or 10**9)
        if body.get("stream"):
            return await self._stream(request, body, prompt_tokens, tokens)
        await asyncio.sleep(self._seconds_for(tokens))
        return web.json_response(self._whole(prompt_tokens, tokens))

    async def _prefill(self, body: dict[str, Any], received: Received) -> int:
        text = _prompt_of(body)
        tokens = self._count(text)
        prefixes = list(_prefixes(text, self.behaviour.block_tokens * CHARACTERS_PER_TOKEN))
        hits = sum(
            1 for _ in itertools.takewhile(lambda one: self._seen[one] >= self.behaviour.sightings - 1, prefixes)
        )
        received.hit_tokens = hits * self.behaviour.block_tokens
        self.counters["prefix_cache_queries"] += tokens
        self.counters["prefix_cache_hits"] += received.hit_tokens
        await asyncio.sleep((tokens - received.hit_tokens) * self.behaviour.prefill_seconds_per_token)
        # Only a prefill that ran to its end leaves its blocks behind.
        self._seen.update(prefixes)
        return tokens

    def _count(self, text: str) -> int:
        return math.ceil(len(text) / CHARACTERS_PER_TOKEN) + self.behaviour.surplus * (len(text) // 5000)

    def _seconds_for(self, tokens: int) -> float:
        return (tokens - 1) / self.behaviour.tokens_per_second

    def _events(self, tokens: int) -> Iterator[int]:
        """Tokens of each event: the prefill's own one first."""
        yield 1
        left = tokens - 1
        for size in itertools.cycle(self.behaviour.tokens_of_events):
            if left <= 0:
                return
            yield min(size, left)
            left -= size

    async def _stream(
        self, request: web.BaseRequest, body: dict[str, Any], prompt_tokens: int, tokens: int
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        number = next(self._numbers)
        await self._send(response, number, {"role": "assistant", "content": ""})
        if self.gate is not None and self.gate_streams:
            await self.gate.wait()
        sent = 0
        for index, (size, delta) in enumerate(self._deltas(tokens)):
            if index:
                await asyncio.sleep(size / self.behaviour.tokens_per_second)
                self._count_draft(size)
            if index == self.behaviour.cut_after:
                assert request.transport is not None
                request.transport.abort()
                return response
            if index == self.behaviour.fails_after:
                error = {"message": "engine died", "type": "InternalServerError", "param": None, "code": 500}
                await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n")
                return response
            sent += size
            reason = self._finish_reason(body, tokens) if sent >= tokens else None
            await self._send(response, number, delta, reason)
        if (body.get("stream_options") or {}).get("include_usage") and self.behaviour.sends_usage:
            await self._send_chunk(response, {"choices": [], "usage": _usage(prompt_tokens, tokens)}, number)
        await response.write(b"data: [DONE]\n\n")
        await asyncio.sleep(self.behaviour.lingers)
        return response

    def _count_draft(self, size: int) -> None:
        self.counters["spec_decode_num_drafts"] += 1
        self.counters["spec_decode_num_draft_tokens"] += 3
        self.counters["spec_decode_num_accepted_tokens"] += size - 1

    def _finish_reason(self, body: dict[str, Any], tokens: int) -> str:
        if self.behaviour.tool_calls:
            return "tool_calls"
        return "stop" if tokens < (body.get("max_tokens") or 16) else "length"

    def _deltas(self, tokens: int) -> Iterator[tuple[int, dict[str, Any]]]:
        sizes = list(self._events(tokens))
        for index, size in enumerate(sizes):
            delta: dict[str, Any] = {"content": "".join(f"w{index}é{part} " for part in range(size))}
            if self.behaviour.reasoning and index == 0:
                delta = {"reasoning": self.behaviour.reasoning}
            if index == len(sizes) - 1 and self.behaviour.tool_calls:
                delta = {"tool_calls": list(_tool_deltas(self.behaviour.tool_calls))}
            yield size, delta

    async def _send(
        self, response: web.StreamResponse, number: int, delta: dict[str, Any], reason: str | None = None
    ) -> None:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        await self._send_chunk(response, {"choices": [choice]}, number)

    async def _send_chunk(self, response: web.StreamResponse, part: dict[str, Any], number: int) -> None:
        chunk = {"id": f"chatcmpl-{number}", "object": "chat.completion.chunk", "created": 1, "model": "tiny", **part}
        await response.write(b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n")

    def _whole(self, prompt_tokens: int, tokens: int) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(delta.get("content", "") for _, delta in self._deltas(tokens)),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": self.behaviour.reasoning,
        }
        if self.behaviour.tool_calls:
            message["tool_calls"] = list(self.behaviour.tool_calls)
        reason = "tool_calls" if self.behaviour.tool_calls else "stop"
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason, "stop_reason": None}
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "tiny",
            "choices": [choice],
            "usage": _usage(prompt_tokens, tokens) if self.behaviour.sends_usage else None,
        }


def _prompt_of(body: dict[str, Any]) -> str:
    return "".join(f"<{one['role']}>{json.dumps(one.get('content'))}" for one in body["messages"])


def _prefixes(text: str, size: int) -> Iterator[int]:
    """One number for each whole block: of its own text and everything before it."""
    chain = 0
    for start in range(0, len(text) - size + 1, size):
        chain = hash((chain, text[start : start + size]))
        yield chain


def _usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}


def _tool_deltas(calls: tuple[dict[str, Any], ...]) -> Iterator[dict[str, Any]]:
    """Each call in three pieces: its name, then its arguments in two halves."""
    for index, call in enumerate(calls):
        arguments = call["function"]["arguments"]
        half = len(arguments) // 2
        yield {"index": index, "id": call["id"], "type": "function", "function": {"name": call["function"]["name"]}}
        yield {"index": index, "function": {"arguments": arguments[:half]}}
        yield {"index": index, "function": {"arguments": arguments[half:]}}


@asynccontextmanager
async def serve(behaviour: Behaviour | None = None, *, port: int = 0) -> AsyncIterator[FakeServer]:
    """The server in the running event loop, on a free port of loopback unless ``port`` says which."""
    fake = FakeServer(behaviour or Behaviour())
    server = web.Server(fake.handle, handler_cancellation=True, access_log=None)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        host, bound = runner.addresses[0][:2]
        fake.url = f"http://{host}:{bound}"
        yield fake
    finally:
        await runner.cleanup()


@contextmanager
def serve_in_thread(behaviour: Behaviour | None = None) -> Iterator[FakeServer]:
    """The server in a thread of its own, for tests that drive a whole command."""
    ready: list[FakeServer] = []
    started, stop = threading.Event(), threading.Event()

    async def hold() -> None:
        async with serve(behaviour) as fake:
            ready.append(fake)
            started.set()
            await asyncio.get_running_loop().run_in_executor(None, stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(hold()), daemon=True)
    thread.start()
    try:
        assert started.wait(10), "the fake server did not start"
        yield ready[0]
    finally:
        stop.set()
        with contextlib.suppress(RuntimeError):
            thread.join(10)
