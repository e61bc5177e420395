"""What was read of wheels, kept on disk: heads by the wheel's identity, members by digest, and some whole wheels.

Every entry is written under a temporary name and renamed, so parallel processes see whole entries or none; a broken one
is dropped and read anew. The folder is kept under its bound by dropping what was used longest ago.

Locks and whatever else a warm read does not need are imported where they are used.
"""

import contextlib
import hashlib
import json
import os
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from provisioner.digests import Digest, digest_of
from provisioner.errors import CannotObtainError
from provisioner.loading import load_json
from provisioner.records import dataclass

_SCHEMA = 1
_TOUCH_AFTER = 3600.0
"""Seconds: uses closer together than this are not told apart, which saves a write for each read."""
_ABANDONED_AFTER = 24 * 3600.0
"""Seconds after which a temporary file or a broken download belongs to nobody."""
_IN_USE = 3600.0
_WHOLE = (".whl", ".part", ".validator")
_KINDS = ("heads", "members", "pages", "wheels")


@dataclass(frozen=True, kw_only=True)
class CacheSummary:
    """How much lies in a cache: bytes and files, in all and for each kind of entry."""

    path: Path
    bytes: int
    files: int
    kinds: dict[str, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Facts and data as they were stored, and how long ago in seconds."""

    facts: dict[str, Any]
    data: bytes
    age: float


class WheelCache:
    """A cache in ``root``, at most ``limit`` bytes large after each run."""

    def __init__(self, root: Path, *, limit: int = 2 << 30) -> None:
        self.root = root
        self._limit = limit
        self._guard = threading.Lock()
        self._written = 0

    def load(self, kind: str, key: str) -> Entry | None:
        """The entry stored under ``key``, whole; None where there is none."""
        path = self._path(kind, key)
        try:
            age = time.time() - path.stat().st_mtime
            header, _, data = path.read_bytes().partition(b"\n")
            facts = load_json(header)
            if facts.pop("schema") != _SCHEMA or facts.pop("crc") != zlib.crc32(data):
                raise ValueError(key)
        except OSError:
            return None
        except (ValueError, KeyError, AttributeError, TypeError):
            path.unlink(missing_ok=True)
            return None
        return Entry(facts=facts, data=data, age=max(0.0, age))

    def store(self, kind: str, key: str, facts: dict[str, Any], data: bytes) -> None:
        header = json.dumps({"schema": _SCHEMA, "crc": zlib.crc32(data), **facts}, sort_keys=True)
        self._write(self._path(kind, key), header.encode() + b"\n" + data)

    def renew(self, kind: str, key: str) -> None:
        """Note that the entry was found to be still true: its age starts again."""
        with contextlib.suppress(OSError):
            os.utime(self._path(kind, key))

    def load_member(self, digest: Digest) -> bytes | None:
        """The bytes with ``digest``, which are checked against it."""
        path = self._path("members", digest)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if digest_of(data) != digest:
            path.unlink(missing_ok=True)
            return None
        _touch(path)
        return data

    def store_member(self, digest: Digest, data: bytes) -> None:
        path = self._path("members", digest)
        if not path.exists():
            self._write(path, data)

    @contextlib.contextmanager
    def hold_wheel(self, key: str, *, wait: float) -> Iterator[Path]:
        """The folder of a whole wheel, which this process alone may fill until the end of the block.

        Raises CannotObtainError where another process fills it for longer than ``wait`` seconds.
        """
        import filelock

        folder = self.wheel_folder(key)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with filelock.FileLock(folder / ".lock", timeout=wait):
                yield folder
        except filelock.Timeout as error:
            raise CannotObtainError(
                "another process has been downloading this wheel for too long",
                where=str(folder),
                hints=("wait until it ends, then run the command again",),
            ) from error

    def wheel_folder(self, key: str) -> Path:
        return self.root / "wheels" / key

    def note_written(self, count: int) -> None:
        with self._guard:
            self._written += count

    def trim(self) -> None:
        """Drop what was used longest ago, if this run wrote anything; another process that is at it is left to it."""
        with self._guard:
            written, self._written = self._written, 0
        if not written:
            return
        import filelock

        with contextlib.suppress(filelock.Timeout, OSError), filelock.FileLock(self.root / ".trim", timeout=0):
            trim_folder(self.root, self._limit)

    def _path(self, kind: str, key: str) -> Path:
        folder = self.root / kind
        return folder / key[:2] / key if kind == "members" else folder / key

    def _write(self, path: Path, data: bytes) -> None:
        """A full or read-only disk costs the cache, never the run."""
        temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            return
        self.note_written(len(data))


def key_of_url(url: str) -> str:
    return "url-" + hashlib.sha256(url.encode()).hexdigest()


def trim_folder(root: Path, limit: int) -> None:
    """Drop the entries used longest ago until at most ``limit`` bytes are left, and what broken runs left behind.

    A whole wheel that was used within the hour stays: somebody may be about to open it.
    """
    now = time.time()
    entries = []
    for path in _files(root):
        with contextlib.suppress(OSError):
            status = path.stat()
            if _is_leftover(path) and now - status.st_mtime > _ABANDONED_AFTER:
                path.unlink()
            else:
                entries.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in entries)
    for moment, size, path in sorted(entries, key=lambda entry: entry[0]):
        if total <= limit:
            return
        if path.suffix in _WHOLE and now - moment < _IN_USE:
            continue
        with contextlib.suppress(OSError):
            path.unlink()
            total -= size


def summarize_cache(root: Path) -> CacheSummary:
    """What lies in ``root``; a folder that does not exist holds nothing."""
    kinds: dict[str, tuple[int, int]] = dict.fromkeys(_KINDS, (0, 0))
    for path in _files(root):
        kind = path.relative_to(root).parts[0]
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            known = kinds.get(kind, (0, 0))
            kinds[kind] = (known[0] + size, known[1] + 1)
    return CacheSummary(
        path=root,
        bytes=sum(size for size, _ in kinds.values()),
        files=sum(count for _, count in kinds.values()),
        kinds=kinds,
    )


def clear_cache(root: Path) -> CacheSummary:
    """Remove every entry and tell what was there. Only the folders that a cache has are touched."""
    import shutil

    summary = summarize_cache(root)
    for kind in _KINDS:
        shutil.rmtree(root / kind, ignore_errors=True)
    return summary


def _files(root: Path) -> Iterator[Path]:
    for kind in _KINDS:
        for folder, _, names in os.walk(root / kind):
            yield from (Path(folder) / name for name in names if name != ".lock")


def _is_leftover(path: Path) -> bool:
    return path.suffix in (".tmp", ".part", ".validator")


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > _TOUCH_AFTER:
            os.utime(path)
