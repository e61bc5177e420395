"""The booster's HTTP side: forwards every request byte for byte, and hands completed chat turns to the boosts.

aiohttp serves here: it parses requests in C, and cancels the handler of a client that went away, which closes the
connection to the server and so makes it drop the request.
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from provisioner.booster.chat_turn import Turn
from provisioner.booster.headers import end_to_end, for_upstream
from provisioner.booster.http1 import AnswerHead
from provisioner.booster.schedule import Boosts, Preparation, Primer
from provisioner.booster.stats import ProxyCounts, print_prometheus, stats_to_json
from provisioner.booster.upstream import Answer, Upstream, UpstreamError
from provisioner.openai.conversation import Skip

BOOST_SECONDS: Final = 1800
HEADER_BYTES: Final = 64 << 10

_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_CHAT_PATH: Final = re.compile(r"/v1/chat/completions/?(\?.*)?")
_ORIGIN: Final = re.compile(r"\A[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")


@dataclass(frozen=True, kw_only=True)
class BoosterSettings:
    """``upstream`` is the server's address without a trailing slash; ``threshold`` is in characters."""

    upstream: str
    threshold: int = 20_000


class Booster:
    """The request handler. Close its boosts when it is no longer needed."""

    def __init__(self, settings: BoosterSettings) -> None:
        self.settings = settings
        self.boosts = Boosts(self._send_primer)
        self._upstream = Upstream.parse(settings.upstream)
        self._counts = ProxyCounts()
        self._started = asyncio.get_running_loop().time()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer from ``/booster/``, else forward."""
        path = _ORIGIN.sub("", request.raw_path) or "/"
        if path.startswith("/booster/"):
            return self._answer(request.method, path.partition("?")[0])
        if not path.startswith("/"):
            return _refuse(400, "not a path")
        self._counts.requests += 1
        if request.method in _SAFE_METHODS:
            return await self._forward(request, path, turn=None)
        return await self._forward_real(request, path)

    def _answer(self, method: str, path: str) -> web.Response:
        """The booster's own pages."""
        if method not in {"GET", "HEAD"}:
            return _refuse(405, "only GET here")
        boosts, active = self.boosts.count(), self.boosts.real_requests
        uptime = asyncio.get_running_loop().time() - self._started
        match path:
            case "/booster/stats":
                limit = self.settings.threshold
                stats = stats_to_json(self._counts, boosts=boosts, active=active, uptime=uptime, threshold=limit)
                return web.json_response(stats)
            case "/booster/metrics":
                text = print_prometheus(self._counts, boosts=boosts, active=active, uptime=uptime)
                return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
            case _:
                return _refuse(404, "no such page of the booster")

    async def _forward_real(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """Forward a request that may make the server work: boosts give way to it."""
        turn = Turn(request, path) if request.method == "POST" and _CHAT_PATH.fullmatch(path) else None
        outcome: Preparation | Skip | None = None
        self.boosts.begin_real()
        try:
            await self.boosts.wait_until_clear()
            try:
                return await self._forward(request, path, turn)
            finally:
                outcome = None if turn is None else turn.finish(self.settings.threshold)
        finally:
            self.boosts.end_real(outcome)

    async def _forward(self, request: web.BaseRequest, path: str, turn: Turn | None) -> web.StreamResponse:
        response: web.StreamResponse | None = None
        headers = for_upstream(tuple(request.raw_headers))
        try:
            async with self._upstream.ask(request.method, path, headers, _body_of(request, turn)) as answer:
                response = _Passed(answer.head)
                await _pass_on(answer, response, request, turn)
        except asyncio.CancelledError:
            self._counts.disconnected += 1
            raise
        except _ClientGoneError:
            self._counts.disconnected += 1
            return _hang_up(request)
        except UpstreamError as error:
            self._counts.upstream_failures += 1
            return _explain(error) if response is None else _hang_up(request)
        return response

    async def _send_primer(self, primer: Primer) -> bool:
        """Send a boost and read its answer to the end; True if the server answered it well."""
        try:
            body = json.dumps(primer.body).encode()
            headers = (*primer.headers, (b"Content-Length", b"%d" % len(body)))
            async with (
                asyncio.timeout(BOOST_SECONDS),
                self._upstream.ask("POST", primer.path, headers, _whole(body)) as answer,
            ):
                async for _ in answer.read_body():
                    pass
                return answer.head.status == 200
        except (UpstreamError, TimeoutError, RecursionError):
            return False


class _Passed(web.StreamResponse):
    """The upstream's answer: its status, reason and headers, and none that aiohttp would add of its own.

    The hook is aiohttp's private one: its public one, a signal, exists for applications with routes alone.
    """

    def __init__(self, head: AnswerHead) -> None:
        super().__init__(status=head.status, reason=head.reason)
        for name, value in end_to_end(head.headers):
            self.headers.add(name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))
        self._added = [name for name in ("Date", "Server", "Content-Type") if name not in self.headers]

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        for name in self._added:
            self.headers.popall(name, None)


class _ClientGoneError(Exception):
    """The client closed its connection before it had the whole answer."""


async def _pass_on(answer: Answer, response: web.StreamResponse, request: web.BaseRequest, turn: Turn | None) -> None:
    """Hand the answer on, piece by piece. Raises _ClientGoneError and UpstreamError."""
    if turn is not None:
        turn.begin_answer(answer.head)
    await _to_client(response.prepare(request))
    async for payload in answer.read_body():
        await _to_client(response.write(payload))
        if turn is not None:
            turn.take_answer(payload)
    await _to_client(response.write_eof())
    if turn is not None:
        turn.complete_answer()


async def _to_client(writing: Awaitable[object]) -> None:
    """Write to the client. Raises _ClientGoneError."""
    try:
        await writing
    except ConnectionError as error:
        raise _ClientGoneError from error


def _body_of(request: web.BaseRequest, turn: Turn | None) -> AsyncIterator[bytes] | None:
    if not request.body_exists:
        return None
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return _stream_body(request, turn)


async def _stream_body(request: web.BaseRequest, turn: Turn | None) -> AsyncIterator[bytes]:
    async for chunk in request.content.iter_any():
        if turn is not None:
            turn.take_request(chunk)
        yield chunk


async def _whole(body: bytes) -> AsyncIterator[bytes]:
    yield body


def _hang_up(request: web.BaseRequest) -> web.StreamResponse:
    """Cut the client's connection, so that it sees the answer end as early as it did upstream."""
    if request.transport is not None:
        request.transport.close()
    return web.Response(status=502)


def _explain(error: UpstreamError) -> web.Response:
    """An answer in the server's own form for the case that it gave none."""
    if error.late:
        return _refuse(504, "the server behind the booster did not answer in time")
    return _refuse(502, "the server behind the booster cannot be reached")


def _refuse(status: int, message: str) -> web.Response:
    """An error of the booster's own, which the header tells from one of the server."""
    error: dict[str, Any] = {"message": message, "type": "booster_error", "param": None, "code": status}
    return web.json_response({"error": error}, status=status, headers={"X-Booster": "error"})


def make_runner(booster: Booster, *, grace_seconds: float) -> web.ServerRunner:
    """Serve ``booster``; on cleanup, answers under way have ``grace_seconds`` to end."""
    # aiohttp would log a malformed request with the line that is wrong, and that line may hold a key.
    silent = logging.Logger("booster", level=logging.CRITICAL + 1)
    server = web.Server(
        booster.handle,
        handler_cancellation=True,
        access_log=None,
        logger=silent,
        auto_decompress=False,
        max_line_size=HEADER_BYTES,
        max_field_size=HEADER_BYTES,
    )
    return web.ServerRunner(server, shutdown_timeout=grace_seconds)
