"""One child process that speaks JSON lines, watched so that no hang of it is a hang of ours."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

Message = Mapping[str, Any]

_READ_BYTES = 1 << 16
_LINE_BYTES = 1 << 20
_TAIL_BYTES = 4096
# A process in an uninterruptible driver call outlives SIGKILL; waiting longer for it would be our hang.
_REAP_SECONDS = 5.0
# How soon a child that is called off from another thread is noticed.
_STOP_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds: to the first line of work, then between any two lines, between two lines of work, and in all.

    A heartbeat is a line, but not one of work. Starting can take long (a first import of torch from a slow disk).
    """

    start: float
    silence: float
    work: float
    total: float


@dataclass(frozen=True, kw_only=True)
class Exited:
    """The child ended by itself with this exit status."""

    code: int
    stderr: str


@dataclass(frozen=True, kw_only=True)
class Killed:
    """A signal that was not ours ended the child."""

    signal_name: str
    stderr: str


@dataclass(frozen=True, kw_only=True)
class Hung:
    """The child passed a limit and was killed; ``left_behind`` is its pid where SIGKILL could not end it."""

    why: str
    left_behind: int | None
    stderr: str


@dataclass(frozen=True, kw_only=True)
class NotStarted:
    """The program could not be started."""

    why: str


ChildEnd = Exited | Killed | Hung | NotStarted


def run_child(
    command: Sequence[str],
    *,
    request: Mapping[str, Any],
    environment: Mapping[str, str],
    limits: Limits,
    on_message: Callable[[Message], None],
    stop: threading.Event | None = None,
) -> ChildEnd:
    """Run ``command``, give it ``request`` as one JSON line on stdin, hand on each JSON line of its stdout.

    A line ``{"event": "beat"}`` proves life and is not handed on; lines that are not JSON objects are ignored. The
    child leads a process group of its own, which is killed as a whole when a limit passes, another thread sets
    ``stop``, or an exception (Ctrl-C too) leaves this function.
    """
    with tempfile.TemporaryFile() as stderr, tempfile.TemporaryFile() as stdin:
        stdin.write(json.dumps(dict(request)).encode() + b"\n")
        stdin.seek(0)
        try:
            process = subprocess.Popen(
                list(command),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=dict(environment),
                cwd=tempfile.gettempdir(),
                start_new_session=True,
            )
        except OSError as error:
            return NotStarted(why=str(error))
        try:
            overrun = _listen(process, limits, on_message, stop)
            if overrun is None:
                overrun = _await_exit(process, limits.silence)
        except BaseException:
            _kill_group(process)
            raise
        left_behind = _kill_group(process)
        return _describe_end(process, overrun, left_behind, _read_tail(stderr))


def _listen(
    process: "subprocess.Popen[bytes]",
    limits: Limits,
    on_message: Callable[[Message], None],
    stop: threading.Event | None,
) -> str | None:
    """Read until end of file (None) or until a limit passes (which one)."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    clock = _Clock(limits, stop)
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            if not selector.select(clock.seconds_left()):
                overrun = clock.overrun()
                if overrun is not None:
                    return overrun
                continue
            chunk = os.read(descriptor, _READ_BYTES)
            if not chunk:
                return None
            *lines, pending = (pending + chunk).split(b"\n")
            pending = pending[:_LINE_BYTES]
            for line in lines:
                message = _parse_line(line)
                clock.heard(message)
                if message is not None and message.get("event") != "beat":
                    on_message(message)
            overrun = clock.overrun()
            if overrun is not None:
                return overrun


class _Clock:
    """When each limit passes, and whether the whole is called off."""

    def __init__(self, limits: Limits, stop: threading.Event | None) -> None:
        self._stop = stop
        now = time.monotonic()
        self._limits = limits
        self._total = now + limits.total
        self._work = now + limits.start
        self._silence = now + limits.start
        self._started = False

    def heard(self, message: Message | None) -> None:
        now = time.monotonic()
        if message is None:
            return
        if message.get("event") != "beat":
            self._started = True
            self._work = now + self._limits.work
        if self._started:
            self._silence = now + self._limits.silence

    def seconds_left(self) -> float:
        left = max(0.0, min(self._total, self._work, self._silence) - time.monotonic())
        return left if self._stop is None else min(left, _STOP_SECONDS)

    def overrun(self) -> str | None:
        now = time.monotonic()
        if self._stop is not None and self._stop.is_set():
            return "it was called off"
        if now >= self._total:
            return f"it was not done after {self._limits.total:.0f} s"
        if now >= self._work and not self._started:
            return f"it had not started after {self._limits.start:.0f} s"
        if now >= self._work:
            return f"it made no progress for {self._limits.work:.0f} s"
        if now >= self._silence:
            return f"it gave no sign of life for {self._limits.silence:.0f} s"
        return None


def _parse_line(line: bytes) -> Message | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _await_exit(process: "subprocess.Popen[bytes]", seconds: float) -> str | None:
    """Wait for the end after the last line: a driver that frees much memory takes a while."""
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return "it closed its output and did not end"
    return None


def _kill_group(process: "subprocess.Popen[bytes]") -> int | None:
    """Kill what is left of the child's group; its pid where that does not end it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdout is not None:
        process.stdout.close()
    try:
        process.wait(timeout=_REAP_SECONDS)
    except subprocess.TimeoutExpired:
        return process.pid
    return None


def _describe_end(
    process: "subprocess.Popen[bytes]", overrun: str | None, left_behind: int | None, stderr: str
) -> ChildEnd:
    if overrun is not None:
        return Hung(why=overrun, left_behind=left_behind, stderr=stderr)
    code = process.returncode
    if code is not None and code < 0:
        return Killed(signal_name=_signal_name(-code), stderr=stderr)
    return Exited(code=code or 0, stderr=stderr)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read_tail(stderr: IO[bytes]) -> str:
    size = stderr.seek(0, os.SEEK_END)
    stderr.seek(max(0, size - _TAIL_BYTES))
    return stderr.read().decode("utf-8", "replace")
