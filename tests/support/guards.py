"""No test leaves anything behind for the next one, and none reaches the network unless it says so. A plugin of pytest.

What a fixture of a wider scope keeps is there before the test, so it is none of the test's leavings.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

# What was told to end may take this long.
_GRACE_SECONDS = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Fails the test that leaves a thread, a child, or other state of the process changed."""
    threads, children, state = set(threading.enumerate()), _list_children(), _read_state()
    yield
    left = [f"the thread {thread.name}" for thread in set(threading.enumerate()) - threads if _stays(thread)]
    left += [f"the process {pid}" for pid in _await_children(children)]
    left += [f"{name} changed" for name, value in _read_state().items() if value != state.get(name)]
    left += [f"{name} is gone" for name in state.keys() - _read_state().keys()]
    left += [f"a connection to {address}" for address in _take_strangers()]
    if left:
        pytest.fail(f"the test leaves behind: {', '.join(left)}", pytrace=False)
