"""A connection to the server: what came is never lost to how it ended, and nobody has to wait without a limit."""

import asyncio
import contextlib
import os
from typing import Final

# What may wait unread before the server has to.
_UNREAD_BYTES: Final = 1 << 20


class Connection(asyncio.Protocol):
    """One TCP connection.

    asyncio's streams forget what they hold when a connection is reset, and with just that ends the refusal of a request
    which the server did not read to its end.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._ended = False
        self._arrival: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None

    async def read(self, *, seconds: float) -> bytes:
        """What has come, as soon as there is something; empty at the end. Raises TimeoutError after ``seconds``."""
        if not self._pieces and not self._ended:
            self._arrival = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(seconds):
                    await self._arrival
            finally:
                self._arrival = None
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        if self._bytes > _UNREAD_BYTES and self._transport is not None:
            self._transport.resume_reading()
        self._bytes = 0
        return data

    async def write(self, data: bytes) -> None:
        """Send, waiting while the server is slow to read. Raises ConnectionError where the connection is gone."""
        if self._ended or self._transport is None:
            raise ConnectionResetError
        self._transport.write(data)
        if self._writable is not None:
            await self._writable

    def abort(self) -> None:
        """Close at once; what was not sent is dropped."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        self._bytes += len(data)
        if self._bytes > _UNREAD_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self._wake(self._arrival)

    def eof_received(self) -> bool:
        self._ended = True
        self._wake(self._arrival)
        # Nothing is said after an answer's end, so the transport may close itself.
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._read_what_is_left()
        self._ended = True
        self._wake(self._arrival)
        self._wake(self._writable)

    def _read_what_is_left(self) -> None:
        """A reset met while sending closes the transport, though the answer before it may still be in the kernel."""
        transport = self._transport
        if transport is None or transport.get_extra_info("sslcontext") is not None:
            return
        handle = transport.get_extra_info("socket").fileno()
        # The socket does not block, and it is closed after this call.
        with contextlib.suppress(OSError):
            while data := os.read(handle, _UNREAD_BYTES):
                self._pieces.append(data)

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        self._wake(self._writable)
        self._writable = None

    @staticmethod
    def _wake(future: "asyncio.Future[None] | None") -> None:
        if future is not None and not future.done():
            future.set_result(None)
