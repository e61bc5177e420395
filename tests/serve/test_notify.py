import asyncio
import contextlib
import socket
from pathlib import Path

from provisioner.serve.notify import Notifier


def listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.settimeout(5)
    listener.bind(address)
    return listener


def test_states_arrive_at_a_socket_of_the_file_system(tmp_path: Path) -> None:
    with listen(str(tmp_path / "s")) as listener:
        Notifier(address=str(tmp_path / "s"), watchdog_seconds=None).tell("READY=1", "STATUS=x")
        assert listener.recv(100) == b"READY=1\nSTATUS=x"


def test_states_arrive_at_an_abstract_socket(tmp_path: Path) -> None:
    name = f"provision-test-{tmp_path.name}"
    with listen("\0" + name) as listener:
        Notifier(address="@" + name, watchdog_seconds=None).tell("READY=1")
        assert listener.recv(100) == b"READY=1"


def test_nobody_listening_is_no_failure(tmp_path: Path) -> None:
    Notifier(address=str(tmp_path / "none"), watchdog_seconds=None).tell("READY=1")
    Notifier(address=None, watchdog_seconds=None).tell("READY=1")


def test_the_watchdog_is_fed_twice_a_period(tmp_path: Path) -> None:
    async def main() -> None:
        task = asyncio.create_task(Notifier(address=str(tmp_path / "s"), watchdog_seconds=0.02).keep_telling())
        await asyncio.sleep(0.05)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with listen(str(tmp_path / "s")) as listener:
        asyncio.run(main())
        assert [listener.recv(100) for _ in range(2)] == [b"WATCHDOG=1"] * 2


def test_without_a_watchdog_nothing_is_fed() -> None:
    asyncio.run(Notifier(address="/nonexistent", watchdog_seconds=None).keep_telling())


def test_the_environment_says_where_and_how_often_and_to_whom() -> None:
    full = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}
    assert Notifier.from_environment(full, pid=7) == Notifier(address="/run/x", watchdog_seconds=30.0)
    assert Notifier.from_environment(full, pid=8) == Notifier(address="/run/x", watchdog_seconds=None)
    assert Notifier.from_environment({}, pid=7) == Notifier(address=None, watchdog_seconds=None)
    assert Notifier.from_environment({"WATCHDOG_USEC": "5"}, pid=7).watchdog_seconds is None
    odd = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "soon"}
    assert Notifier.from_environment(odd, pid=7).watchdog_seconds is None
