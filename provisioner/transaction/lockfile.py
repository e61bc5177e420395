"""One process at a time in an environment: an advisory lock whose file says who holds it."""

import errno
import fcntl
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from provisioner.errors import BusyError, ConflictError, RestoredError
from provisioner.loading import load_json
from provisioner.records import dataclass
from provisioner.transaction.folders import LOCK_NAME, make_state_folder, opened_parent, read_file, state_file

_POLL_SECONDS = 0.05
_COMMAND_LIMIT = 300
_FORBIDDEN = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class ReadOnlyError(RestoredError):
    """The lock file may not be written by this user or on this file system."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds an environment; ``since`` is an ISO 8601 time in UTC."""

    pid: int
    host: str
    command: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}: {self.command}"


def _say_nothing(_holder: Holder | None) -> None:
    return


@contextmanager
def hold_environment(
    state_dir: Path,
    *,
    wait_seconds: float,
    on_wait: Callable[[Holder | None], None] = _say_nothing,
) -> Iterator[None]:
    """Hold the environment of ``state_dir`` (made if missing) for the time of the block.

    ``on_wait`` is called once, with the holder where it is known, before waiting. The lock is the kernel's (flock): it
    ends with its process, however that dies. The file is never removed, since removing a lock file lets two hold it.

    Raises BusyError, naming the holder, after ``wait_seconds``; RestoredError where the lock file cannot be made, which
    is a ReadOnlyError where that is forbidden; EnvironmentConflictError for a state folder that is not to be trusted.
    """
    descriptor = _open_lock(state_dir)
    try:
        _take(descriptor, state_dir, wait_seconds=wait_seconds, on_wait=on_wait)
        _write_holder(descriptor)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def read_holder(state_dir: Path) -> Holder | None:
    """What the lock file says of its holder; None where it says nothing (nobody, or one that just started)."""
    try:
        fields = load_json(read_file(state_file(state_dir, LOCK_NAME)))
        return Holder(
            pid=int(fields["pid"]),
            host=str(fields["host"]),
            command=str(fields["command"]),
            since=str(fields["since"]),
        )
    except (OSError, ConflictError, ValueError, KeyError, TypeError):
        return None


def _open_lock(state_dir: Path) -> int:
    try:
        path = make_state_folder(state_dir) / LOCK_NAME
        with opened_parent(path) as folder:
            return os.open(path.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644, dir_fd=folder)
    except OSError as error:
        kind = ReadOnlyError if error.errno in _FORBIDDEN else RestoredError
        raise kind(
            f"the environment cannot be locked: {error.strerror}; nothing was written",
            where=str(state_dir / LOCK_NAME),
            hints=(f"run the command as the owner of {state_dir.parent}, on a file system that can be written",),
        ) from error


def _take(descriptor: int, state_dir: Path, *, wait_seconds: float, on_wait: Callable[[Holder | None], None]) -> None:
    deadline = time.monotonic() + wait_seconds
    announced = False
    while not _try_lock(descriptor):
        holder = read_holder(state_dir)
        if time.monotonic() >= deadline:
            raise BusyError(
                f"the environment is in use by {holder or 'another process'}",
                where=str(state_dir),
                hints=("wait until it ends and run the command again", *_stop_hint(holder)),
            )
        if not announced:
            on_wait(holder)
            announced = True
        time.sleep(_POLL_SECONDS)


def _stop_hint(holder: Holder | None) -> tuple[str, ...]:
    return (f"look at it with: ps -fp {holder.pid}",) if holder and holder.host == os.uname().nodename else ()


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_holder(descriptor: int) -> None:
    holder = Holder(
        pid=os.getpid(),
        host=os.uname().nodename,
        command=shlex.join(sys.argv)[:_COMMAND_LIMIT],
        since=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    with suppress(OSError):  # a full disk may leave the holder unnamed; the lock itself stands
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(holder)).encode("utf-8"), 0)
