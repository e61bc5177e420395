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
from provisioner.transaction.folders import canonical, create_file, look_at, names_in, opened_parent, read_file

_SECOND_NS = 1_000_000_000
MODE_MASK = 0o777
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
    """The operating system's, at canonical paths: none of them goes through a link."""

    def read(self, path: Path) -> bytes:
        return read_file(path)

    def create(self, path: Path, data: bytes) -> None:
        create_file(path, data)

    def chmod(self, path: Path, mode: int) -> None:
        with opened_parent(path) as parent:
            descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
            try:
                os.fchmod(descriptor, mode & MODE_MASK)
            finally:
                os.close(descriptor)

    def chown(self, path: Path, uid: int, gid: int) -> None:
        with opened_parent(path) as parent:
            os.chown(path.name, uid, gid, dir_fd=parent, follow_symlinks=False)

    def set_mtime(self, path: Path, mtime_ns: int) -> None:
        with opened_parent(path) as parent:
            os.utime(path.name, ns=(mtime_ns, mtime_ns), dir_fd=parent, follow_symlinks=False)

    def fsync(self, path: Path) -> None:
        with opened_parent(path) as parent:
            descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        with opened_parent(source) as from_folder, opened_parent(target) as to_folder:
            os.replace(source.name, target.name, src_dir_fd=from_folder, dst_dir_fd=to_folder)

    def unlink(self, path: Path) -> None:
        with opened_parent(path) as parent:
            os.unlink(path.name, dir_fd=parent)

    def mkdir(self, path: Path) -> None:
        with opened_parent(path) as parent:
            os.mkdir(path.name, 0o755, dir_fd=parent)

    def rmdir(self, path: Path) -> None:
        with opened_parent(path) as parent:
            os.rmdir(path.name, dir_fd=parent)


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


def is_plain(path: str) -> bool:
    """Whether a text is a posix path that stays below where it starts. Pure."""
    pure = PurePosixPath(path)
    return bool(pure.parts) and not pure.is_absolute() and str(pure) == path and not {"..", "\0"} & {*pure.parts, *path}


def resolve_target(site_packages: Path, path: str) -> Path:
    """The place of ``path`` (posix, relative to site-packages), every folder on the way a real folder, and that of its
    bytecode, too.

    Raises RefusedTargetError for a path that is absolute, climbs, or passes a symlink or a file that is no folder.
    """
    if not is_plain(path):
        raise RefusedTargetError("not a plain path inside site-packages", where=path)
    target = site_packages / path
    folders = [site_packages / folder for folder in PurePosixPath(path).parents[-2::-1]]
    for folder in (*folders, target.parent / "__pycache__"):
        status = look_at(folder)
        if status is None:
            break
        if stat.S_ISLNK(status.st_mode):
            raise RefusedTargetError(f"{path} leads through a symbolic link", where=str(folder))
        if not stat.S_ISDIR(status.st_mode):
            raise RefusedTargetError(f"{path} leads through a file that is no folder", where=str(folder))
    return target


def refusal_of(site_packages: Path, path: str) -> str | None:
    """Why a transaction would not touch ``path``, whatever stands there; None where nothing speaks against it."""
    try:
        _require_regular(resolve_target(canonical(site_packages), path))
    except RefusedTargetError as error:
        return error.what
    return None


def _require_regular(target: Path) -> os.stat_result | None:
    status = look_at(target)
    if status is None:
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
    status = look_at(folder)
    return _image_of(status, "") if status is not None else None


def _image_of(status: os.stat_result, digest: Digest) -> Image:
    return Image(digest=digest, mode=status.st_mode & MODE_MASK, uid=status.st_uid, gid=status.st_gid)


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
    status = look_at(path)
    if status is not None and (status.st_uid, status.st_gid) == (image.uid, image.gid):
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
    yield from (cache / name for name in names_in(cache) if name.startswith(prefix) and name.endswith(".pyc"))
    if look_at(beside := target.with_suffix(".pyc")):
        yield beside


def drop_bytecode(target: Path, *, filesystem: FileSystem) -> None:
    """Remove every compiled form of ``target``."""
    for compiled in bytecode_of(target):
        with suppress(FileNotFoundError):
            filesystem.unlink(compiled)


def remove_if_empty(folder: Path, *, filesystem: FileSystem) -> bool:
    """Remove a folder that holds nothing, or nothing but an empty ``__pycache__``; False where it stays."""
    if not is_folder(folder):
        return False
    names, cache = names_in(folder), folder / "__pycache__"
    if names == [cache.name] and is_folder(cache) and not names_in(cache):
        filesystem.rmdir(cache)
        names = []
    if names:
        return False
    filesystem.rmdir(folder)
    return True


def is_folder(path: Path) -> bool:
    """Whether a real folder stands at ``path``."""
    status = look_at(path)
    return status is not None and stat.S_ISDIR(status.st_mode)
