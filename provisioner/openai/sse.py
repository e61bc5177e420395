"""Server-sent events, read from whatever pieces the network hands over. Pure.

Source: the event stream format of the HTML standard; servers of the OpenAI kind use its ``data:`` field alone and end
with the payload ``[DONE]``.
"""

from typing import Final

DONE: Final = b"[DONE]"


class EventReader:
    """Turns chunks of bytes into the data payloads of whole events, keeping what is unfinished for the next chunk."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Payloads of the events that this chunk completes; an event without a ``data`` field gives none."""
        text = self._rest + chunk
        lines = text.splitlines(keepends=True)
        # A trailing CR may be the first half of a CRLF that the network cut in two.
        self._rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        payloads: list[bytes] = []
        for line in lines:
            self._take_line(line.rstrip(b"\r\n"), payloads)
        return payloads

    def close(self) -> list[bytes]:
        """The event that the end of the stream completes, if its blank line never came."""
        payloads: list[bytes] = []
        if self._rest:
            self._take_line(self._rest.rstrip(b"\r\n"), payloads)
            self._rest = b""
        self._take_line(b"", payloads)
        return payloads

    def _take_line(self, line: bytes, payloads: list[bytes]) -> None:
        if not line:
            if self._data:
                payloads.append(b"\n".join(self._data))
                self._data.clear()
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
