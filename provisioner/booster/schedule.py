"""When a boost may run: one at a time, for the newest conversation, and never beside real traffic."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from provisioner.booster.headers import RawHeaders
from provisioner.openai.conversation import JsonObject, Skip


@dataclass(frozen=True, kw_only=True)
class Primer:
    """The request that makes up a boost, with what the client sent along (its key among it, hence not shown)."""

    path: str
    headers: RawHeaders = field(repr=False)
    body: JsonObject = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class BoostCounts:
    """How boosts ended since the start. ``skipped`` has every reason, also those that did not occur.

    A boost that is cancelled while it is prepared counts as cancelled and not as sent.
    """

    sent: int
    completed: int
    cancelled: int
    superseded: int
    failed: int
    skipped: Mapping[Skip, int]
    seconds: float
    in_flight: bool
    waiting: bool


Preparation = Callable[[], Awaitable[Primer | Skip]]


class Boosts:
    """Decides over boosts. ``send`` makes the request and tells whether the server answered it well.

    Real requests announce themselves with ``begin_real`` before they are forwarded and ``end_real`` after. A boost
    waits until no real request is left; the next one cancels it, and it is not tried again: the request that cancelled
    it ends in a newer conversation, or shows that the user has gone elsewhere.

    A boost begins with preparing its primer, which takes time for a long conversation and may show that there is none.
    """

    def __init__(self, send: Callable[[Primer], Awaitable[bool]]) -> None:
        self._send = send
        self._real = 0
        self._waiting: Preparation | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended: Counter[str] = Counter()
        self._skipped: Counter[Skip] = Counter()
        self._seconds = 0.0
        self._closed = False

    @property
    def real_requests(self) -> int:
        return self._real

    def begin_real(self) -> None:
        """Count a real request and cancel the boost in flight; ``wait_until_clear`` tells when it is gone."""
        self._real += 1
        self._cancel()

    async def wait_until_clear(self) -> None:
        """Return when no boost is in flight any more and its connection is closed."""
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    def end_real(self, outcome: Preparation | Skip | None) -> None:
        """End a real request; ``outcome`` is the boost that may follow, why there is none, or None for no chat turn."""
        self._real -= 1
        if isinstance(outcome, Skip):
            self._skipped[outcome] += 1
        elif outcome is not None:
            self._ended["superseded"] += self._waiting is not None
            self._waiting = outcome
        if self._real == 0 and self._waiting is not None and not self._closed:
            prepare, self._waiting = self._waiting, None
            self._task = asyncio.get_running_loop().create_task(self._boost(prepare))

    async def close(self) -> None:
        """Drop what is in flight, and boost nothing any more."""
        self._closed = True
        self._cancel()
        await self.wait_until_clear()

    def count(self) -> BoostCounts:
        return BoostCounts(
            sent=self._ended["sent"],
            completed=self._ended["completed"],
            cancelled=self._ended["cancelled"],
            superseded=self._ended["superseded"],
            failed=self._ended["failed"],
            skipped={reason: self._skipped[reason] for reason in Skip},
            seconds=self._seconds,
            in_flight=self._task is not None and not self._task.done(),
            waiting=self._waiting is not None,
        )

    def _cancel(self) -> None:
        # Counted here: a task that is cancelled before its first step never gets to count anything.
        if self._task is not None and not self._task.done():
            self._task.cancel()
            self._ended["cancelled"] += 1

    async def _boost(self, prepare: Preparation) -> None:
        primer = await prepare()
        if isinstance(primer, Skip):
            self._skipped[primer] += 1
            return
        clock = asyncio.get_running_loop().time
        started = clock()
        self._ended["sent"] += 1
        try:
            self._ended["completed" if await self._send(primer) else "failed"] += 1
        finally:
            self._seconds += clock() - started
