"""Telling systemd how a service is (sd_notify's datagrams), where systemd asked for it."""

import asyncio
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Notifier:
    """``address`` is NOTIFY_SOCKET's value; None means that nobody listens, and every call does nothing.

    ``watchdog_seconds`` is how long systemd waits for a sign of life before it restarts the service.
    """

    address: str | None
    watchdog_seconds: float | None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], *, pid: int | None = None) -> Self:
        """Read NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID (which may mean another process)."""
        address = environ.get("NOTIFY_SOCKET") or None
        period = environ.get("WATCHDOG_USEC", "")
        meant = environ.get("WATCHDOG_PID") or str(pid or os.getpid())
        mine = address is not None and period.isdigit() and int(period) > 0 and meant == str(pid or os.getpid())
        return cls(address=address, watchdog_seconds=int(period) / 1e6 if mine else None)

    def tell(self, *states: str) -> None:
        """Send states such as ``READY=1``. A listener that is gone is no failure of the service."""
        if self.address is None:
            return
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto("\n".join(states).encode(), address)
        except OSError:
            return

    async def keep_telling(self) -> None:
        """Give a sign of life twice in each watchdog period, from the event loop, so that a stuck loop gives none."""
        if self.watchdog_seconds is None:
            return
        while True:
            self.tell("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_seconds / 2)
