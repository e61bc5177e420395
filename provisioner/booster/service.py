"""Runs the booster until it is told to stop."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from provisioner.booster.proxy import Booster, BoosterSettings, make_runner
from provisioner.errors import ConflictError, UsageError
from provisioner.serve.notify import Notifier

GRACE_SECONDS: Final = 30.0
LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


class CannotListenError(ConflictError):
    """The address is taken, or not this machine's."""

    code = "cannot-listen"


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Where a booster listens: ``port`` is the real one, also where 0 (any free one) was asked for."""

    booster: Booster
    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def parse_upstream(url: str, *, host: str, port: int) -> str:
    """The server's address, cleaned. Raises UsageError for no address, one with a password, and the booster's own."""
    try:
        parts = urlsplit(url)
        upstream_port = parts.port if parts.port is not None else (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise UsageError("not an http address", where="--upstream", hints=(_UPSTREAM_HINT,)) from error
    if "@" in parts.netloc:
        raise UsageError("an address may hold no password", where="--upstream", hints=(_UPSTREAM_HINT,))
    if (
        parts.scheme not in {"http", "https"}
        or not parts.hostname
        or not upstream_port
        or parts.query
        or parts.fragment
    ):
        raise UsageError("not an http address", where="--upstream", found=url, hints=(_UPSTREAM_HINT,))
    if port and upstream_port == port and (parts.hostname == host or {parts.hostname, host} <= LOOPBACK):
        raise UsageError("the booster would forward to itself", where="--upstream", found=url, hints=(_UPSTREAM_HINT,))
    return url.rstrip("/").removesuffix("/v1")


_UPSTREAM_HINT: Final = "provision booster --upstream http://127.0.0.1:8012 --port 8013"


@asynccontextmanager
async def serve(
    settings: BoosterSettings, *, host: str = "127.0.0.1", port: int, grace_seconds: float = GRACE_SECONDS
) -> AsyncIterator[Listening]:
    """Listen while the context lasts; on its end boosts are dropped at once and answers have ``grace_seconds`` to end.

    Raises CannotListenError.
    """
    from aiohttp import web

    booster = Booster(settings)
    runner = make_runner(booster, grace_seconds=grace_seconds)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise CannotListenError(
                f"cannot listen: {error.strerror or error}",
                where=f"{host}:{port}",
                hints=("choose another port with --port, an address of this machine with --host", "ss -ltnp"),
            ) from error
        yield Listening(booster=booster, host=host, port=runner.addresses[0][1])
    finally:
        await booster.boosts.close()
        await runner.cleanup()


async def run_until_stopped(
    settings: BoosterSettings,
    *,
    host: str,
    port: int,
    grace_seconds: float,
    notifier: Notifier,
    announce: Callable[[Listening], None],
) -> None:
    """Serve until SIGTERM or SIGINT, telling systemd READY, signs of life, and STOPPING. Raises CannotListenError.

    A second signal ends the answers that are still under way.
    """
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, lambda: (hurry if stop.is_set() else stop).set())

    async def serve_until_stopped() -> None:
        async with serve(settings, host=host, port=port, grace_seconds=grace_seconds) as listening:
            announce(listening)
            notifier.tell("READY=1", f"STATUS=forwarding to {settings.upstream}")
            await stop.wait()
            notifier.tell("STOPPING=1")

    # Signs of life go on while answers end: a long one must not be taken for a stuck service.
    alive = loop.create_task(notifier.keep_telling())
    serving = loop.create_task(serve_until_stopped())
    hurrying = loop.create_task(hurry.wait())
    try:
        await asyncio.wait({serving, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    finally:
        alive.cancel()
        hurrying.cancel()
