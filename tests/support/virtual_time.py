"""An event loop whose clock stands still while code runs and leaps to the next timer when there is nothing to do.

Real sockets work in it, so that a server which "takes" a minute and the client which times it run in milliseconds, with
figures that do not depend on the machine.
"""

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

_Result = TypeVar("_Result")

# Bytes written to a loopback socket are readable at once; this covers a kernel that is busy elsewhere.
_GRACE_SECONDS = 0.001


class _LeapingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(min(timeout, _GRACE_SECONDS))
        if not ready:
            self.now += timeout
        return ready

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return super().get_map()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._leaping = _LeapingSelector()
        super().__init__(self._leaping)

    def time(self) -> float:
        return self._leaping.now


def run_virtually(main: Coroutine[Any, Any, _Result]) -> _Result:
    """``asyncio.run`` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
