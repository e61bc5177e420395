"""A host of a fleet: an SSH server on a loopback address, whose commands run in a home of their own.

A program: ``python ssh_host.py '{"address": …, "port": …, "home": …, "keys": …, "authorized": …, "environment": …,
"wrapper": […]}'``. Says ``ready`` on stdout once it listens. Ends with its process group, and its commands with it.
"""

import asyncio
import contextlib
import json
import sys
from typing import Any

import asyncssh


async def pump(source: Any, sink: Any) -> None:
    """Hand bytes on until there are no more."""
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()


async def serve(wish: dict[str, Any]) -> None:
    """Serve until killed."""

    async def run_command(process: Any) -> None:
        words = [*wish["wrapper"], "/bin/sh", "-c", process.command or "exit 1"]
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            *words, stdin=pipe, stdout=pipe, stderr=pipe, cwd=wish["home"], env=wish["environment"]
        )
        assert child.stdin is not None

        async def feed() -> None:
            await pump(process.stdin, child.stdin)
            child.stdin.close()

        feeding = asyncio.create_task(feed())
        await asyncio.gather(pump(child.stdout, process.stdout), pump(child.stderr, process.stderr))
        process.exit(await child.wait())
        feeding.cancel()

    await asyncssh.listen(
        wish["address"],
        wish["port"],
        server_host_keys=[wish["key"]],
        authorized_client_keys=wish["authorized"],
        process_factory=run_command,
        encoding=None,
    )
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
