"""Small whole-file writes: a reader sees the old bytes or the new ones, never a part."""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from provisioner.errors import EnvironmentConflictError, UsageError


def write_whole(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` through a sibling temporary file, synced to disk, creating parent folders."""
    with writing_whole(path) as stream:
        stream.write(data)


@contextmanager
def writing_whole(path: Path) -> Iterator[BinaryIO]:
    """A stream whose bytes stand at ``path`` once the block ends, as :func:`write_whole` puts them there.

    Where the block raises, nothing is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_output(path: Path, data: bytes) -> None:
    """Write what a user wants at ``path``: a file whole, through symbolic links; a pipe or a device as it stands.

    Raises UsageError for a folder or a disk, which nobody means; EnvironmentConflictError where it cannot be written.
    """
    target = resolve_output(path)
    with _telling(path):
        if target.exists() and not target.is_file():
            with target.open("wb") as stream:
                stream.write(data)
        else:
            write_whole(target, data)


def resolve_output(path: Path) -> Path:
    """Where output named ``path`` goes: the file that links lead to, or ``path`` itself for a pipe or a device.

    Raises UsageError for a folder or a disk; EnvironmentConflictError where it cannot be looked at.
    """
    with _telling(path):
        mode = _mode_of(path)
        if stat.S_ISREG(mode):
            return path.resolve()
    if stat.S_ISDIR(mode) or stat.S_ISBLK(mode):
        found = "a folder" if stat.S_ISDIR(mode) else "a disk"
        raise UsageError("the output cannot be written there", where=str(path), expected="a file", found=found)
    # Not resolved: the links of a process's own streams lead to names that nothing can open.
    return path


def _mode_of(path: Path) -> int:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return stat.S_IFREG  # what will be there


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentConflictError("the output cannot be written", where=str(path), found=error.strerror) from error
