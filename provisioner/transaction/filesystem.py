"""The few operations by which a transaction changes files, behind a seam through which tests make each of them fail."""

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Protocol

from provisioner.digests import Digest, digest_of
from provisioner.errors import RefusedTargetError
from provisioner.records import dataclass

_SECOND_NS = 1_000_000_000
_COPY_MODE_MASK = 0o7777
_OWNER_IS_NOT_OURS_TO_GIVE = frozenset({errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOTSUP})


class FileSystem(Protocol):
    """Operations that read or change bytes, names and attributes; each raises OSError."""

    def read(self, path: Path) -> bytes: ...

    def create(self, path: Path, data: bytes) -> None:
        """A new file with ``data``; FileExistsError where the name is taken, by whatever."""

    def chmod(self, path: Path, mode: int) -> None: ...

    def chown(self, path: Path, uid: int, gid: int) -> None: ...

    def set_mtime(self, path: Path, mtime_ns: int) -> None: ...

    def fsync(self, path: Path) -> None:
        """Bytes and attributes of a file, or the names in a folder, reach the disk."""

    def replace(self, source: Path, target: Path) -> None: ...

    def unlink(self, path: Path) -> None: ...

    def mkdir(self, path: Path) -> None: ...

    def rmdir(self, path: Path) -> None: ...


class RealFileSystem:
    """The operating system's."""

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def create(self, path: Path, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)

    def chmod(self, path: Path, mode: int) -> None:
        path.chmod(mode)

    def chown(self, path: Path, uid: int, gid: int) -> None:
        os.chown(path, uid, gid, follow_symlinks=False)

    def set_mtime(self, path: Path, mtime_ns: int) -> None:
        os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)

    def fsync(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def mkdir(self, path: Path) -> None:
        path.mkdir()

    def rmdir(self, path: Path) -> None:
        path.rmdir()


REAL: FileSystem = RealFileSystem()


@dataclass(frozen=True, kw_only=True)
class Image:
    """What a file or folder is: digest of its bytes ("" for a folder), permission bits, owner."""

    digest: Digest
    mode: int
    uid: int
    gid: int

    def agrees_with(self, other: "Image | None") -> bool:
        """Equal in bytes and permissions; the owner is kept where that is possible, and is no proof of anything."""
        return other is not None and (self.digest, self.mode) == (other.digest, other.mode)


def resolve_target(site_packages: Path, path: str) -> Path:
    """The place of ``path`` (posix, relative to site-packages), every folder on the way a real folder.

    Raises RefusedTargetError for a path that is absolute, climbs, or passes a symlink or a file that is no folder.
    """
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or str(pure) != path or ".." in pure.parts or "\0" in path:
        raise RefusedTargetError("not a plain path inside site-packages", where=path)
    here = site_packages
    for part in pure.parts[:-1]:
        here /= part
        try:
            mode = here.lstat().st_mode
        except FileNotFoundError:
            break
        except NotADirectoryError:
            break
        if stat.S_ISLNK(mode):
            raise RefusedTargetError(f"{path} leads through a symbolic link", where=str(here))
        if not stat.S_ISDIR(mode):
            raise RefusedTargetError(f"{path} leads through a file that is no folder", where=str(here))
    return site_packages / pure


def refusal_of(site_packages: Path, path: str) -> str | None:
    """Why a transaction would not touch ``path``, whatever stands there; None where nothing speaks against it."""
    try:
        target = resolve_target(site_packages, path)
        _require_regular(target)
    except RefusedTargetError as error:
        return error.what
    return None


def _require_regular(target: Path) -> os.stat_result | None:
    try:
        status = target.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISLNK(status.st_mode):
        raise RefusedTargetError(
            "the file is a symbolic link: a write would change what it points to",
            where=str(target),
            hints=("install the package again with uv's --link-mode copy",),
        )
    if not stat.S_ISREG(status.st_mode):
        raise RefusedTargetError("what stands there is not a regular file", where=str(target))
    return status


def read_image(target: Path, *, filesystem: FileSystem) -> tuple[Image, bytes] | None:
    """The image and the bytes of a regular file; None where nothing has that name.

    Raises RefusedTargetError for anything that is not a regular file, a symlink above all.
    """
    status = _require_regular(target)
    if status is None:
        return None
    content = filesystem.read(target)
    return _image_of(status, digest_of(content)), content


def read_folder_image(folder: Path) -> Image | None:
    """The image of a folder; None where there is none."""
    try:
        status = folder.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _image_of(status, "")


def _image_of(status: os.stat_result, digest: Digest) -> Image:
    return Image(digest=digest, mode=status.st_mode & _COPY_MODE_MASK, uid=status.st_uid, gid=status.st_gid)


def temporary_sibling(target: Path) -> Path:
    """Where the bytes of ``target`` are made ready: the same folder, a short name that cannot be imported."""
    return target.with_name(f".provision-{sha256(os.fsencode(target.name)).hexdigest()[:12]}.tmp")


def dress(path: Path, image: Image, *, newer_than_ns: int, filesystem: FileSystem) -> None:
    """Give a prepared file owner, permissions and a time of change, and bring it to the disk.

    The time is a whole second or more after ``newer_than_ns``: bytecode is checked by whole seconds and size.
    """
    take_owner(path, image, filesystem=filesystem)
    filesystem.chmod(path, image.mode)
    filesystem.set_mtime(path, max(time.time_ns(), newer_than_ns + _SECOND_NS))
    filesystem.fsync(path)


def take_owner(path: Path, image: Image, *, filesystem: FileSystem) -> None:
    """Give ``path`` the owner of ``image`` where this process may: only root can give files away."""
    status = path.lstat()
    if (status.st_uid, status.st_gid) == (image.uid, image.gid):
        return
    try:
        filesystem.chown(path, image.uid, image.gid)
    except OSError as error:
        if error.errno not in _OWNER_IS_NOT_OURS_TO_GIVE:
            raise


def bytecode_of(target: Path) -> Iterator[Path]:
    """The compiled forms of a source file: every tag and optimisation level in ``__pycache__``, and beside it."""
    if target.suffix != ".py":
        return
    cache = target.parent / "__pycache__"
    prefix = f"{target.stem}."
    with suppress(FileNotFoundError, NotADirectoryError):
        entries = sorted(cache.iterdir())
        yield from (entry for entry in entries if entry.name.startswith(prefix) and entry.suffix == ".pyc")
    beside = target.with_suffix(".pyc")
    if beside.is_file():
        yield beside


def drop_bytecode(target: Path, *, filesystem: FileSystem) -> None:
    """Remove every compiled form of ``target``."""
    for compiled in bytecode_of(target):
        with suppress(FileNotFoundError):
            filesystem.unlink(compiled)


def remove_if_empty(folder: Path, *, filesystem: FileSystem) -> bool:
    """Remove a folder that holds nothing, or nothing but an empty ``__pycache__``; False where it stays."""
    try:
        entries = list(folder.iterdir())
        if [entry.name for entry in entries] == ["__pycache__"] and not any(entries[0].iterdir()):
            filesystem.rmdir(entries.pop())
    except (FileNotFoundError, NotADirectoryError):
        return False
    if entries:
        return False
    filesystem.rmdir(folder)
    return True
