"""The one way to files below an environment: no link on the way, nothing outside, whoever wrote what is in it.

The root that the user named is resolved once (:func:`canonical`). From there on every folder of a path is opened
through the one above it, and none may be a symbolic link, so what is swapped in meanwhile is refused, too. openat2
would do the same in one call, but Python has none, and a walk costs some ten microseconds.
"""

import os
import secrets
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from provisioner.errors import EnvironmentConflictError, RefusedTargetError

LOCK_NAME = "lock"
JOURNAL_NAME = "journal"
OBJECTS_NAME = "objects"
STATE_NAMES = frozenset(
    {
        LOCK_NAME,
        JOURNAL_NAME,
        OBJECTS_NAME,
        "environment.json",
        "receipt.json",
        "taken-out",
        "verified.json",
        "verify.json",
    }
)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe without a writer must not hold the command up; what is no regular file is refused once it is open.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def canonical(root: Path) -> Path:
    """The folder that ``root`` leads to: the user named it, so links up to it are the user's own."""
    return Path(os.path.realpath(root))


def state_folder(state_dir: Path) -> Path:
    """The canonical path of a state folder, which need not exist.

    Raises EnvironmentConflictError for one that is a link, that belongs to another than this user, root or
    the owner of the environment (who may change every file of it anyway), or that others may write.
    """
    folder = canonical(state_dir.parent) / state_dir.name
    try:
        found, around = folder.lstat(), folder.parent.lstat()
    except OSError:  # what is done next meets it again and tells
        return folder
    shown = shlex.quote(str(folder))
    if stat.S_ISLNK(found.st_mode):
        raise _distrusted(folder, "is a link", f"look at it and take it away: ls -ld {shown}; rm {shown}")
    if found.st_uid not in {os.geteuid(), 0, around.st_uid}:
        raise _distrusted(
            folder, f"belongs to user {found.st_uid}", f"look at it and make it yours: chown -R $(id -u) {shown}"
        )
    if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_own_group(found)):
        raise _distrusted(folder, f"has mode {found.st_mode & 0o777:o}", f"look at it, then: chmod -R go-w {shown}")
    return folder


def _distrusted(folder: Path, why: str, hint: str) -> EnvironmentConflictError:
    return EnvironmentConflictError(
        f"the environment's state folder {why}: what is in it may be anybody's", where=str(folder), hints=(hint,)
    )


def _is_own_group(status: os.stat_result) -> bool:
    """Whether the group is its owner's own, as with umask 002; of a user without a name (in a container), root's."""
    import pwd

    try:
        return status.st_gid == pwd.getpwuid(status.st_uid).pw_gid
    except KeyError:
        return status.st_gid in {0, status.st_uid}


def state_file(state_dir: Path, name: str) -> Path:
    """Where the file or folder ``name`` of the state lies. Raises as :func:`state_folder` does."""
    if name not in STATE_NAMES:
        raise ValueError(f"{name} is no name of the state folder")
    return state_folder(state_dir) / name


def make_state_folder(state_dir: Path) -> Path:
    """The state folder, made if missing, with the folders above it. Raises as :func:`state_folder` does; OSError."""
    folder = state_folder(state_dir)
    state_dir.parent.mkdir(parents=True, exist_ok=True)  # as the user named it: not where a dangling link leads
    with opened_parent(folder) as parent, suppress(FileExistsError):
        os.mkdir(folder.name, 0o755, dir_fd=parent)
    return folder


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A descriptor of a folder, named by its canonical path.

    Raises RefusedTargetError where the way leads through a link; OSError.
    """
    with _telling(folder):
        descriptor = _walk(folder)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


@contextmanager
def opened_parent(path: Path) -> Iterator[int]:
    """A descriptor of the folder that ``path`` lies in; errors in the block name ``path``. Raises as :func:`opened`."""
    with _telling(path):
        descriptor = _walk(path.parent)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _walk(folder: Path) -> int:
    here = os.open("/", _STEP)
    for number, part in enumerate(folder.parts[1:], start=2):
        above = here
        try:
            here = os.open(part, _FOLDER if number == len(folder.parts) else _STEP, dir_fd=above)
        except OSError:
            if _is_link(part, above):
                where = str(Path(*folder.parts[:number]))
                raise RefusedTargetError("the way leads through a symbolic link", where=where) from None
            raise
        finally:
            os.close(above)
    return here


def _is_link(name: str, folder: int) -> bool:
    with suppress(OSError):
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = str(path)  # a name relative to a descriptor says nothing
        raise


def look_at(path: Path) -> os.stat_result | None:
    """What stands at ``path``, a link as a link; None where nothing does. Raises as :func:`opened`."""
    with suppress(FileNotFoundError, NotADirectoryError), opened_parent(path) as parent:
        return os.stat(path.name, dir_fd=parent, follow_symlinks=False)
    return None


def names_in(folder: Path) -> list[str]:
    """The sorted names in a folder; none where there is no folder. Raises as :func:`opened`."""
    with suppress(FileNotFoundError, NotADirectoryError), opened(folder) as descriptor:
        return sorted(os.listdir(descriptor))  # noqa: PTH208 - pathlib reads no descriptor
    return []


@contextmanager
def opened_file(path: Path) -> Iterator[int]:
    """A descriptor, for reading, of a regular file. Raises RefusedTargetError for anything else; OSError."""
    with opened_parent(path) as parent:
        try:
            descriptor = os.open(path.name, _FILE, dir_fd=parent)
        except OSError:
            if _is_link(path.name, parent):
                raise RefusedTargetError("a symbolic link stands in place of a file", where=str(path)) from None
            raise
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RefusedTargetError("what stands there is not a regular file", where=str(path))
            yield descriptor
        finally:
            os.close(descriptor)


def read_file(path: Path) -> bytes:
    """The bytes of a regular file. Raises as :func:`opened_file`."""
    with opened_file(path) as descriptor, open(descriptor, "rb", closefd=False) as stream:
        return stream.read()


def create_file(path: Path, data: bytes) -> None:
    """A new file, mode 0600. Raises FileExistsError where the name is taken, by whatever; as :func:`opened` does."""
    with opened_parent(path) as parent, os.fdopen(os.open(path.name, _NEW_FILE, 0o600, dir_fd=parent), "wb") as stream:
        stream.write(data)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file of the state, whole or not at all, synced to disk, and make the folder it lies in.

    Raises as :func:`opened` does.
    """
    if path.parent.name in STATE_NAMES:
        with opened_parent(path.parent) as above, suppress(FileExistsError):
            os.mkdir(path.parent.name, 0o755, dir_fd=above)
    temporary = f".{path.name}.{secrets.token_hex(4)}"
    with opened_parent(path) as parent:
        try:
            with os.fdopen(os.open(temporary, _NEW_FILE, 0o600, dir_fd=parent), "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fchmod(stream.fileno(), 0o644)
                os.fsync(stream.fileno())
            os.replace(temporary, path.name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=parent)
            raise
