"""HTTP/1.1 as a proxy needs it: print a request, read an answer's head and body framing. Pure. Source: RFC 9112.

A general parser calls back for every chunk of a chunked body, that is, for every event of a streamed answer. Here a
whole read is decoded in one loop, which is what keeps a fast stream fast behind the booster.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from provisioner.booster.headers import RawHeaders

_WITHOUT_BODY: Final = frozenset({204, 304})
_LINE_LIMIT: Final = 8 << 10
_LONGEST_LENGTH: Final = 18
_HEX_DIGITS: Final = b"0123456789abcdefABCDEF"


class MalformedAnswerError(Exception):
    """The server's bytes are no HTTP answer, or its body ended too early."""


@dataclass(frozen=True, kw_only=True)
class AnswerHead:
    """Status line and headers as they came."""

    status: int
    reason: str
    headers: RawHeaders

    def find(self, name: bytes) -> bytes | None:
        """The last value of a header; ``name`` in lower case."""
        return next((value for key, value in reversed(self.headers) if key.lower() == name), None)


def print_request_head(method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Request line and headers, with the empty line after them."""
    lines = [f"{method} {path} HTTP/1.1".encode("utf-8", "surrogateescape")]
    lines += [name + b": " + value for name, value in headers]
    return b"\r\n".join([*lines, b"", b""])


def print_chunk(data: bytes) -> bytes:
    """A chunk of a chunked body; of no data, its end."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def parse_answer_head(head: bytes) -> AnswerHead:
    """Parse everything before the empty line. Raises MalformedAnswerError."""
    first, *lines = head.split(b"\r\n")
    version, _, rest = first.partition(b" ")
    status, _, reason = rest.partition(b" ")
    if not version.startswith(b"HTTP/1.") or len(status) != 3 or not status.isdigit():
        raise MalformedAnswerError("no status line")
    headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            raise MalformedAnswerError("a header line that is none")
        headers.append((name, value.strip(b" \t")))
    return AnswerHead(status=int(status), reason=reason.decode("utf-8", "replace"), headers=tuple(headers))


class BodyFraming(Protocol):
    """Takes the bytes after the head and gives the payload in them. ``done`` is true once the body is whole."""

    @property
    def done(self) -> bool: ...

    def feed(self, data: bytes) -> bytes:
        """Payload of the next bytes. Raises MalformedAnswerError."""

    def end(self) -> None:
        """The connection ended. Raises MalformedAnswerError unless the body may end there."""


def framing_of(method: str, head: AnswerHead) -> BodyFraming:
    """How the body of an answer to ``method`` is framed. Raises MalformedAnswerError."""
    if method == "HEAD" or head.status in _WITHOUT_BODY:
        return SizedBody(0)
    coding = head.find(b"transfer-encoding")
    if coding is not None and coding.lower().endswith(b"chunked"):
        return ChunkedBody()
    lengths = {value for name, value in head.headers if name.lower() == b"content-length"}
    if not lengths:
        return BodyUntilEnd()
    if len(lengths) > 1:  # RFC 9112, 6.3: two readers may each believe another one
        raise MalformedAnswerError("two different Content-Lengths")
    (length,) = lengths
    if not length.isdigit() or len(length) > _LONGEST_LENGTH:
        raise MalformedAnswerError("a Content-Length that is no number")
    return SizedBody(int(length))


class SizedBody:
    """A body of a stated length."""

    def __init__(self, length: int) -> None:
        self._left = length

    @property
    def done(self) -> bool:
        return self._left == 0

    def feed(self, data: bytes) -> bytes:
        payload = data[: self._left]
        self._left -= len(payload)
        return payload

    def end(self) -> None:
        if self._left:
            raise MalformedAnswerError("the answer ended before its length")


class BodyUntilEnd:
    """A body that the end of the connection ends."""

    def __init__(self) -> None:
        self._done = False

    @property
    def done(self) -> bool:
        return self._done

    def feed(self, data: bytes) -> bytes:
        return data

    def end(self) -> None:
        self._done = True


class ChunkedBody:
    """A body in chunks; extensions and trailers are dropped."""

    def __init__(self) -> None:
        # Bytes that were no whole line yet, and payload of the current chunk that is still to come.
        self._rest = b""
        self._left = 0
        # Length of the line end between a chunk's payload and the next size: before the first size there is none.
        self._gap = 0
        self._in_trailer = False
        self._done = False

    @property
    def done(self) -> bool:
        return self._done

    def feed(self, data: bytes) -> bytes:
        if self._left >= len(data):
            self._left -= len(data)
            return data
        payload = [data[: self._left]]
        data = self._rest + data[self._left :]
        self._left = 0
        position = self._take_chunks(data, payload)
        if self._in_trailer:
            position = self._take_trailer(data, position)
        self._rest = data[position:]
        if len(self._rest) > _LINE_LIMIT:
            raise MalformedAnswerError("a line of a chunked body that does not end")
        return b"".join(payload)

    def end(self) -> None:
        if not self._done:
            raise MalformedAnswerError("the answer ended before its last chunk")

    def _take_chunks(self, data: bytes, payload: list[bytes]) -> int:
        """Add the payload of the chunks that ``data`` begins with; returns where what is no whole line begins."""
        position = 0
        while not self._in_trailer:
            begin = position + self._gap
            line_end = data.find(b"\r\n", begin)
            if line_end < 0:
                return position
            if data[position:begin] not in (b"", b"\r\n"):
                raise MalformedAnswerError("a chunk that is longer than its size")
            size = _parse_size(data[begin:line_end])
            self._gap = 2
            position = line_end + 2 + size
            if size == 0:
                self._in_trailer = True
            elif position > len(data):
                self._left = position - len(data)
                payload.append(data[line_end + 2 :])
                return len(data)
            else:
                payload.append(data[line_end + 2 : position])
        return position

    def _take_trailer(self, data: bytes, position: int) -> int:
        while not self._done:
            line_end = data.find(b"\r\n", position)
            if line_end < 0:
                return position
            self._done = line_end == position
            position = line_end + 2
        return position


def _parse_size(line: bytes) -> int:
    digits = line.partition(b";")[0].rstrip(b" \t") if b";" in line else line
    # RFC 9112, 7.1: 1*HEXDIG. Python's int takes signs, underscores, spaces and "0x", too.
    if not digits or digits.strip(_HEX_DIGITS):
        raise MalformedAnswerError("a chunk's size that is no number")
    return int(digits, 16)
