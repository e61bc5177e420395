"""Asks the server behind the booster, one connection a request.

A kept connection may have been closed by a server that restarted, and closing it is how a request is aborted.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import urlsplit

from provisioner.booster.connection import Connection
from provisioner.booster.headers import RawHeaders
from provisioner.booster.http1 import (
    AnswerHead,
    BodyFraming,
    MalformedAnswerError,
    framing_of,
    parse_answer_head,
    print_chunk,
    print_request_head,
)

CONNECT_SECONDS: Final = 10
# A server that sends nothing for this long is taken for dead; the longest prefill takes minutes.
SILENCE_SECONDS: Final = 3600
HEAD_BYTES: Final = 256 << 10


class UpstreamError(Exception):
    """The server cannot be reached, or its answer broke off. ``late`` tells that it was waited for in vain."""

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.late = late


class Answer:
    """A server's answer whose body is yet to be read."""

    def __init__(self, head: AnswerHead, framing: BodyFraming, connection: Connection, first: bytes) -> None:
        self.head = head
        self._framing = framing
        self._connection = connection
        self._first = first

    async def read_body(self) -> AsyncIterator[bytes]:
        """Pieces of the payload as they come. Raises UpstreamError where it breaks off."""
        while not self._framing.done:
            with _broken_answers():
                payload = await self._read_payload()
            if payload:
                yield payload

    async def _read_payload(self) -> bytes:
        data, self._first = self._first, b""
        data = data or await self._connection.read(seconds=SILENCE_SECONDS)
        if data:
            return self._framing.feed(data)
        self._framing.end()
        return b""


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """The server: where it listens, and what every path on it begins with."""

    host: str
    port: int
    tls: bool
    prefix: str
    authority: bytes

    @classmethod
    def parse(cls, url: str) -> Self:
        """From an address that was checked before."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        return cls(
            host=parts.hostname or "",
            port=parts.port or (443 if tls else 80),
            tls=tls,
            prefix=parts.path.rstrip("/"),
            authority=parts.netloc.encode(),
        )

    @asynccontextmanager
    async def ask(
        self, method: str, path: str, headers: RawHeaders, body: AsyncIterator[bytes] | None
    ) -> AsyncIterator[Answer]:
        """Send a request and hand over its answer; leaving the context early aborts the request.

        ``headers`` hold no framing but a Content-Length where the body's length is known, and no Host.
        """
        connection = await self._connect()
        sending: asyncio.Task[None] | None = None
        try:
            chunked = body is not None and not any(name.lower() == b"content-length" for name, _ in headers)
            framing = ((b"Transfer-Encoding", b"chunked"),) if chunked else ()
            all_headers = ((b"Host", self.authority), *headers, *framing, (b"Connection", b"close"))
            with _broken_answers():
                await connection.write(print_request_head(method, self.prefix + path, all_headers))
            if body is not None:
                # Beside the answer, not before it: a server may refuse a body that it has not read.
                sending = asyncio.get_running_loop().create_task(_send(connection, body, chunked=chunked))
            with _broken_answers():
                answer = await _read_head(connection, method)
            yield answer
        finally:
            if sending is not None:
                sending.cancel()
            connection.abort()

    async def _connect(self) -> Connection:
        context = ssl.create_default_context() if self.tls else None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await asyncio.get_running_loop().create_connection(
                    Connection, self.host, self.port, ssl=context
                )
        except (OSError, TimeoutError) as error:
            raise UpstreamError from error
        return connection


async def _send(connection: Connection, body: AsyncIterator[bytes], *, chunked: bool) -> None:
    # Where the server stops reading, its answer says why, and where it is gone, the answer is missing.
    with contextlib.suppress(ConnectionError):
        async for data in body:
            await connection.write(print_chunk(data) if chunked else data)
        if chunked:
            await connection.write(print_chunk(b""))


async def _read_head(connection: Connection, method: str) -> Answer:
    data = b""
    while True:
        head, end, rest = data.partition(b"\r\n\r\n")
        if end:
            parsed = parse_answer_head(head)
            # Interim answers (1xx) are between this connection's two ends.
            if parsed.status >= 200:
                return Answer(parsed, framing_of(method, parsed), connection, rest)
            data = rest
            continue
        more = await connection.read(seconds=SILENCE_SECONDS)
        if not more or len(data) > HEAD_BYTES:
            raise MalformedAnswerError("no whole head")
        data += more


@contextmanager
def _broken_answers() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise UpstreamError(late=True) from error
    except (MalformedAnswerError, OSError) as error:
        raise UpstreamError from error
