"""HTTP as bytes: a server that says what it is told to, and a client that sends what it is given."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class CannedServer:
    """Answers every connection's first request with ``answer`` and closes. ``heard`` has what was sent to it."""

    answer: bytes
    url: str = ""
    heard: list[bytes] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.heard.append(await read_request(reader))
            writer.write(self.answer)
            await writer.drain()
        finally:
            writer.close()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Head and body of one request, as sent (chunked framing included)."""
    head = await reader.readuntil(b"\r\n\r\n")
    lowered = head.lower()
    if b"transfer-encoding: chunked" in lowered:
        return head + await reader.readuntil(b"0\r\n\r\n")
    if b"content-length:" in lowered:
        length = int(lowered.split(b"content-length:")[1].split(b"\r\n")[0])
        return head + await reader.readexactly(length)
    return head


@asynccontextmanager
async def serve_canned(answer: bytes) -> AsyncIterator[CannedServer]:
    canned = CannedServer(answer)
    server = await asyncio.start_server(canned.handle, "127.0.0.1", 0)
    async with server:
        canned.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield canned


async def exchange(url: str, request: bytes) -> bytes:
    """Send ``request`` and read until the server closes: let the request say ``Connection: close``."""
    host, port = url.removeprefix("http://").split(":")
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request)
            await writer.drain()
            return await reader.read()
        finally:
            writer.close()
