"""One chat turn as it passes through the booster: what of it a boost needs, and whether there is to be one."""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from provisioner.booster.headers import RawHeaders, for_primer
from provisioner.booster.http1 import AnswerHead
from provisioner.booster.schedule import Preparation, Primer
from provisioner.openai.conversation import ReplyReader, Skip, make_primer

if TYPE_CHECKING:
    from aiohttp.web import BaseRequest

# A conversation larger than this is forwarded and not boosted.
TURN_BYTES: Final = 64 << 20
# How much of an answer is read at a time: about a millisecond's work, between which other streams get their turn.
_SLICE_BYTES: Final = 16 << 10


class Turn:
    """Keeps the pieces of a request and its answer until the turn ends, or until it is clear that no boost follows.

    Nothing is parsed while the answer passes: that would slow down the stream.
    """

    def __init__(self, request: "BaseRequest", path: str) -> None:
        self._path = path
        self._headers = for_primer(tuple(request.raw_headers))
        off = request.headers.get("X-Booster", "").strip().lower() == "off"
        self._skip: Skip | None = Skip.OFF if off else None
        self._body: list[bytes] = []
        self._answer: list[bytes] = []
        self._bytes = 0
        self._streamed = False
        self._ended = False

    def take_request(self, chunk: bytes) -> None:
        """A piece of the request's body."""
        if self._has_room_for(chunk):
            self._body.append(chunk)

    def begin_answer(self, head: AnswerHead) -> None:
        """The answer's status and headers are there."""
        if head.status != 200:
            self._pass_over(Skip.NOT_COMPLETED)
        elif head.find(b"content-encoding") is not None:
            self._pass_over(Skip.UNREADABLE)
        else:
            self._streamed = (head.find(b"content-type") or b"").lower().startswith(b"text/event-stream")
            # A stream says in its last event that it is complete; clients may leave with that one.
            self._ended = self._streamed

    def take_answer(self, chunk: bytes) -> None:
        """A piece of the answer's body that the client has been sent."""
        if self._has_room_for(chunk):
            self._answer.append(chunk)

    def complete_answer(self) -> None:
        """The whole answer has been sent."""
        self._ended = True

    def finish(self, threshold: int) -> Preparation | Skip:
        """What prepares the boost that may follow, or why there is none."""
        if self._skip is not None:
            return self._skip
        if not self._ended:
            return Skip.NOT_COMPLETED
        if self._bytes < threshold:
            return Skip.TOO_SHORT
        passed = PassedTurn(
            path=self._path,
            headers=self._headers,
            request=tuple(self._body),
            answer=tuple(self._answer),
            streamed=self._streamed,
            threshold=threshold,
        )
        return passed.prepare

    def _has_room_for(self, chunk: bytes) -> bool:
        self._bytes += len(chunk)
        if self._bytes > TURN_BYTES:
            self._pass_over(Skip.TOO_LARGE)
        return self._skip is None

    def _pass_over(self, why: Skip) -> None:
        self._skip = self._skip or why
        self._body.clear()
        self._answer.clear()


@dataclass(frozen=True, kw_only=True)
class PassedTurn:
    """A turn whose answer has been handed over."""

    path: str
    headers: RawHeaders = field(repr=False)
    request: tuple[bytes, ...] = field(repr=False)
    answer: tuple[bytes, ...] = field(repr=False)
    streamed: bool
    threshold: int

    async def prepare(self) -> Primer | Skip:
        """The boost of this turn, or why there is none; gives way to other tasks while it reads."""
        reader = ReplyReader(streamed=self.streamed)
        for chunk in self.answer:
            for start in range(0, len(chunk), _SLICE_BYTES):
                reader.feed(chunk[start : start + _SLICE_BYTES])
                await asyncio.sleep(0)
        reply = reader.close()
        if isinstance(reply, Skip):
            return reply
        body = make_primer(b"".join(self.request), reply, threshold=self.threshold)
        return body if isinstance(body, Skip) else Primer(path=self.path, headers=self.headers, body=body)
