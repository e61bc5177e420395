"""No test leaves anything behind for the next one, and none reaches the network unless it says so. A plugin of pytest.

What a fixture of a wider scope keeps is there before the test, so it is none of the test's leavings.
"""

import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

# What was told to end may take this long.
_GRACE_SECONDS = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# Made when first used, and kept for the life of the process: the repack's pool, and what torch sets on import.
_KEPT_THREADS = ("marlin-repack",)
_KEPT_VARIABLES = ("PYTEST_", "TORCHINDUCTOR_")
_PACKAGES = ("provisioner", "benchmarks")


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test that leaves a thread or a child behind, or other state of the process changed."""
    threads, children, state, modules = set(threading.enumerate()), _list_children(), _read_state(), _read_modules()
    yield
    left = [f"the thread {thread.name}" for thread in set(threading.enumerate()) - threads if _stays(thread)]
    if request.node.get_closest_marker("background") is None:
        left += [f"the process {pid}" for pid in _await_children(children)]
    now = _read_state()
    left += [f"a changed {name}" for name in now.keys() | state.keys() if now.get(name) != state.get(name)]
    left += _compare_modules(*modules)
    # The refusal alone may look like a bad network to the code under test, and be what the test expects.
    left += [f"a wish to connect to {host} without the mark `network`" for host in _network.take_refused()]
    if left:
        pytest.fail(f"the test leaves behind: {', '.join(sorted(left))}", pytrace=False)


def _stays(thread: threading.Thread) -> bool:
    if thread.name.startswith(_KEPT_THREADS):
        return False
    thread.join(_GRACE_SECONDS)
    return thread.is_alive()


def _list_children() -> set[int]:
    """Children of this process, zombies included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()
    # Only now is it worth while to look through all processes.
    return {int(folder.name) for folder in Path("/proc").glob("[0-9]*") if _parent_of(folder) == os.getpid()}


def _parent_of(folder: Path) -> int | None:
    try:
        return int((folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return None


def _await_children(before: set[int]) -> set[int]:
    """Children that were not there ``before`` and do not end by themselves."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while (new := _list_children() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return new


def _read_state() -> dict[str, object]:
    """What tests share in a process, by its name."""
    variables = {
        f"variable {name}": value for name, value in os.environ.items() if not name.startswith(_KEPT_VARIABLES)
    }
    handlers = {f"handler of {number.name}": signal.getsignal(number) for number in _SIGNALS}
    return {**variables, **handlers, "working directory": os.getcwd(), "sys.path": list(sys.path)}  # noqa: PTH109


def _read_modules() -> tuple[dict[str, dict[str, Any]], list[tuple[str, Any, Any]]]:
    """The globals of our modules as they are bound, and the containers among them with what they hold."""
    names = [name for name in sys.modules.copy() if name.startswith(_PACKAGES)]
    containers = [(where, kept, kept.copy()) for name in names for where, kept in _containers(name)]
    return {name: vars(sys.modules[name]).copy() for name in names}, containers


@functools.cache
def _containers(name: str) -> tuple[tuple[str, Any], ...]:
    values = vars(sys.modules[name]).items()
    return tuple((f"{name}.{key}", kept) for key, kept in values if type(kept) in {dict, list, set} and key[:2] != "__")


def _compare_modules(bound: dict[str, dict[str, Any]], containers: list[tuple[str, Any, Any]]) -> list[str]:
    changed = [
        f"a changed {name}.{key}"
        for name, values in bound.items()
        if (now := vars(sys.modules[name])) != values
        for key in values.keys() & now.keys()
        if now[key] is not values[key]
    ]
    return changed + [f"a changed {where}" for where, kept, copy in containers if kept != copy]


class _Network:
    """Which addresses a test may connect to: those of this machine, and any if it has the mark ``network``."""

    def __init__(self) -> None:
        self.open = False
        self.refused: list[str] = []

    def check(self, sock: socket.socket, address: Any) -> None:
        if self.open or sock.family not in {socket.AF_INET, socket.AF_INET6} or _is_here(str(address[0])):
            return
        self.refused.append(str(address[0]))
        raise ConnectionRefusedError(f"a test without the mark `network` connects to {address[0]}")

    def take_refused(self) -> list[str]:
        taken, self.refused = self.refused, []
        return taken


def _is_here(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


_network = _Network()


def pytest_configure() -> None:
    plain, plain_ex = socket.socket.connect, socket.socket.connect_ex

    def connect(self: socket.socket, address: Any) -> None:
        _network.check(self, address)
        plain(self, address)

    def connect_ex(self: socket.socket, address: Any) -> int:
        _network.check(self, address)
        return plain_ex(self, address)

    socket.socket.connect, socket.socket.connect_ex = connect, connect_ex  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _network.open = item.get_closest_marker("network") is not None
    return (yield)
