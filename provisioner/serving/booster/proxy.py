"""The booster's HTTP side: forwards every request byte for byte, and hands completed chat turns to the boosts.

aiohttp serves and asks here: it parses HTTP in C on both sides, hands chunks on as they come, and cancels a handler
whose client went away, which closes the upstream connection and so makes the server drop the request.
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from provisioner.serving.booster.boosts import Boosts, Preparation, Primer
from provisioner.serving.booster.headers import end_to_end
from provisioner.serving.booster.stats import ProxyCounts, print_prometheus, stats_to_json
from provisioner.serving.booster.turns import Turn
from provisioner.serving.conversation import Skip

CONNECT_SECONDS: Final = 10
# A server that sends nothing for this long is taken for dead; the longest prefill takes minutes.
SILENCE_SECONDS: Final = 3600
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
    """The request handler. Use ``open_session`` for its session, and close the boosts when it ends."""

    def __init__(self, settings: BoosterSettings, session: aiohttp.ClientSession) -> None:
        self.settings = settings
        self.boosts = Boosts(self._send_primer)
        self._session = session
        self._counts = ProxyCounts()
        self._host = URL(settings.upstream).raw_authority
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
        try:
            async with self._session.request(
                request.method,
                URL(self.settings.upstream + path, encoded=True),
                headers=_forwarded_headers(request, self._host),
                data=_body_of(request, turn),
                allow_redirects=False,
            ) as answer:
                response = _Answer(answer)
                try:
                    await _pass_on(answer, response, request, turn)
                finally:
                    # An answer that is not read to its end is aborted, not drained.
                    answer.close()
        except asyncio.CancelledError:
            self._counts.disconnected += 1
            raise
        except _ClientGoneError:
            self._counts.disconnected += 1
            return _hang_up(request)
        except (aiohttp.ClientError, TimeoutError) as error:
            self._counts.upstream_failures += 1
            return _explain(error) if response is None else _hang_up(request)
        return response

    async def _send_primer(self, primer: Primer) -> bool:
        """Send a boost and read its answer to the end; True if the server answered it well."""
        try:
            async with self._session.post(
                URL(self.settings.upstream + primer.path, encoded=True),
                headers=CIMultiDict(primer.headers),
                data=json.dumps(primer.body).encode(),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=BOOST_SECONDS, sock_connect=CONNECT_SECONDS),
            ) as answer:
                async for _ in answer.content.iter_any():
                    pass
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, RecursionError):
            return False


class _Answer(web.StreamResponse):
    """The upstream's answer: its status, reason and headers, and none that aiohttp would add of its own.

    The hook is aiohttp's private one: its public one, a signal, exists for applications with routes alone.
    """

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        headers = CIMultiDict(end_to_end(answer.raw_headers))
        super().__init__(status=answer.status, reason=answer.reason or "", headers=headers)
        self._added = [name for name in ("Date", "Server", "Content-Type") if name not in headers]

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        for name in self._added:
            self.headers.popall(name, None)


class _ClientGoneError(Exception):
    """The client closed its connection before it had the whole answer."""


async def _pass_on(
    answer: aiohttp.ClientResponse, response: web.StreamResponse, request: web.BaseRequest, turn: Turn | None
) -> None:
    """Hand the answer on, piece by piece. Raises _ClientGoneError, and aiohttp's errors about upstream as they are."""
    if turn is not None:
        turn.begin_answer(answer)
    await _to_client(response.prepare(request))
    async for chunk in answer.content.iter_any():
        await _to_client(response.write(chunk))
        if turn is not None:
            turn.take_answer(chunk)
    await _to_client(response.write_eof())
    if turn is not None:
        turn.complete_answer()


async def _to_client(writing: Awaitable[object]) -> None:
    """aiohttp has one exception for a lost client and a lost upstream; where it came from tells them apart."""
    try:
        await writing
    except ConnectionError as error:
        raise _ClientGoneError from error


def _forwarded_headers(request: web.BaseRequest, host: str) -> CIMultiDict[str]:
    headers = CIMultiDict(end_to_end(request.raw_headers))
    headers["Host"] = host
    return headers


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


def _hang_up(request: web.BaseRequest) -> web.StreamResponse:
    """Cut the client's connection, so that it sees the answer end as early as it did upstream."""
    if request.transport is not None:
        request.transport.close()
    return web.Response(status=502)


def _explain(error: Exception) -> web.Response:
    """An answer in the server's own form for the case that it gave none."""
    if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
        return _refuse(504, "the server behind the booster did not answer in time")
    return _refuse(502, "the server behind the booster cannot be reached")


def _refuse(status: int, message: str) -> web.Response:
    """An error of the booster's own, which the header tells from one of the server."""
    error: dict[str, Any] = {"message": message, "type": "booster_error", "param": None, "code": status}
    return web.json_response({"error": error}, status=status, headers={"X-Booster": "error"})


def open_session() -> aiohttp.ClientSession:
    """A session that adds nothing to requests and takes nothing from answers.

    One connection a request: a kept one may have been closed by a server that restarted, and closing it is how a
    request is aborted.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS),
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        auto_decompress=False,
        max_line_size=HEADER_BYTES,
        max_field_size=HEADER_BYTES,
    )


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
