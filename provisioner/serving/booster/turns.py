"""One chat turn as it passes through the booster: what of it a boost needs, and whether there is to be one."""

from typing import TYPE_CHECKING, Final

from provisioner.serving.booster.boosts import Primer
from provisioner.serving.booster.headers import for_primer
from provisioner.serving.conversation import ReplyReader, Skip, make_primer

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from aiohttp.web import BaseRequest

# A conversation larger than this is forwarded and not boosted.
TURN_BYTES: Final = 64 << 20


class Turn:
    """Keeps the pieces of a request and its answer until the turn ends, or until it is clear that no boost follows."""

    def __init__(self, request: "BaseRequest", path: str) -> None:
        self._path = path
        self._headers = for_primer(request.raw_headers)
        off = request.headers.get("X-Booster", "").strip().lower() == "off"
        self._skip: Skip | None = Skip.OFF if off else None
        self._body: list[bytes] = []
        self._bytes = 0
        self._reader: ReplyReader | None = None
        self._ended = False

    def take_request(self, chunk: bytes) -> None:
        """A piece of the request's body."""
        if self._has_room_for(chunk):
            self._body.append(chunk)

    def begin_answer(self, answer: "ClientResponse") -> None:
        """The answer's status and headers are there."""
        if answer.status != 200:
            self._pass_over(Skip.NOT_COMPLETED)
        elif "Content-Encoding" in answer.headers:
            self._pass_over(Skip.UNREADABLE)
        else:
            streamed = answer.content_type == "text/event-stream"
            self._reader = ReplyReader(streamed=streamed)
            # A stream says in its last event that it is complete; clients may leave with that one.
            self._ended = streamed

    def take_answer(self, chunk: bytes) -> None:
        """A piece of the answer's body that the client has been sent."""
        if self._reader is not None and self._has_room_for(chunk):
            self._reader.feed(chunk)

    def complete_answer(self) -> None:
        """The whole answer has been sent."""
        self._ended = True

    def finish(self, threshold: int) -> Primer | Skip:
        """The boost that may follow, or why there is none. Call it once."""
        if self._skip is not None:
            return self._skip
        if self._reader is None or not self._ended:
            return Skip.NOT_COMPLETED
        reply = self._reader.close()
        if isinstance(reply, Skip):
            return reply
        body = make_primer(b"".join(self._body), reply, threshold=threshold)
        if isinstance(body, Skip):
            return body
        return Primer(path=self._path, headers=self._headers, body=body)

    def _has_room_for(self, chunk: bytes) -> bool:
        self._bytes += len(chunk)
        if self._bytes > TURN_BYTES:
            self._pass_over(Skip.TOO_LARGE)
        return self._skip is None

    def _pass_over(self, why: Skip) -> None:
        self._skip = self._skip or why
        self._body.clear()
        self._reader = None
