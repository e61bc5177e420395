"""A small installed package, the steps that change it in every way there is, and file systems that fail on demand."""

import errno
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from provisioner.digests import digest_of, digest_to_record
from provisioner.errors import ProvisionError
from provisioner.patching.steps import CreateFile, DeleteFile, FileStep, ReplaceFile, SetMode
from provisioner.transaction.filesystem import RealFileSystem
from provisioner.wheels.record import Record, parse_record

SHIPPED = {
    "pkg/__init__.py": b"",
    "pkg/changed.py": b"value = 1\n",
    "pkg/mode.py": b"#!/usr/bin/env python\n",
    "pkg/gone.py": b"gone = True\n",
    "pkg/lonely/only.py": b"only = True\n",
    "pkg/sub/also.py": b"also = 1\r\nother = 2\r\n",
}
CREATED = frozenset({"pkg/made.py", "pkg/new/deep/made.py"})

STEPS: tuple[FileStep, ...] = (
    ReplaceFile(path="pkg/changed.py", before=digest_of(SHIPPED["pkg/changed.py"]), content=b"value = 2\n"),
    SetMode(path="pkg/mode.py", before=0o644, after=0o755),
    CreateFile(path="pkg/new/deep/made.py", content=b"made = 1\n"),
    DeleteFile(path="pkg/gone.py", before=digest_of(SHIPPED["pkg/gone.py"])),
    DeleteFile(path="pkg/lonely/only.py", before=digest_of(SHIPPED["pkg/lonely/only.py"])),
    ReplaceFile(path="pkg/sub/also.py", before=digest_of(SHIPPED["pkg/sub/also.py"]), content=b"also = 2\r\n"),
    SetMode(path="pkg/sub/also.py", before=0o644, after=0o640),
    CreateFile(path="pkg/made.py", content=b"", mode=0o755),
)

Snapshot = dict[str, tuple[bytes, int]]


def make_site(folder: Path) -> Path:
    """site-packages with SHIPPED, modes 0644, and bytecode for two of the files."""
    site = folder / "site-packages"
    for path, content in SHIPPED.items():
        place = site / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
        place.chmod(0o644)
    for compiled in ("pkg/__pycache__/changed.cpython-312.pyc", "pkg/__pycache__/gone.cpython-313.opt-1.pyc"):
        (site / compiled).parent.mkdir(exist_ok=True)
        (site / compiled).write_bytes(b"bytecode")
    return site


def record_of(shipped: dict[str, bytes]) -> Record:
    return parse_record(
        "".join(f"{path},{digest_to_record(digest_of(data))},{len(data)}\n" for path, data in shipped.items())
    )


RECORD = record_of(SHIPPED)


def snapshot(site: Path) -> Snapshot:
    """Every file and folder but bytecode, with its bytes and permissions."""
    found: Snapshot = {}
    for place in sorted(site.rglob("*")):
        path = place.relative_to(site).as_posix()
        if "__pycache__" not in path:
            found[path] = (place.read_bytes() if place.is_file() else b"", place.lstat().st_mode)
    return found


def new_snapshot(folder: Path) -> Snapshot:
    """The snapshot after STEPS, made without the code under test."""
    site = make_site(folder)
    (site / "pkg/changed.py").write_bytes(b"value = 2\n")
    (site / "pkg/mode.py").chmod(0o755)
    (site / "pkg/new/deep").mkdir(parents=True)
    (site / "pkg/new/deep/made.py").write_bytes(b"made = 1\n")
    (site / "pkg/new/deep/made.py").chmod(0o644)
    (site / "pkg/gone.py").unlink()
    (site / "pkg/lonely/only.py").unlink()
    (site / "pkg/lonely").rmdir()
    (site / "pkg/sub/also.py").write_bytes(b"also = 2\r\n")
    (site / "pkg/sub/also.py").chmod(0o640)
    (site / "pkg/made.py").write_bytes(b"")
    (site / "pkg/made.py").chmod(0o755)
    return snapshot(site)


def attempt(work: Callable[[], object]) -> ProvisionError | None:
    """Do ``work``; the error that it ended with, if it did."""
    try:
        work()
    except ProvisionError as error:
        return error
    return None


class CountingFileSystem(RealFileSystem):
    """Calls ``before`` with the number and the name of each operation that changes something, from 1 up."""

    def __init__(self, before: Callable[[int, str], None]) -> None:
        self.count = 0
        self._before = before

    def _step(self, name: str) -> None:
        self.count += 1
        self._before(self.count, name)

    def create(self, path: Path, data: bytes) -> None:
        try:
            self._step("create")
        except OSError:
            super().create(path, data[: len(data) // 2])  # as a disk does that is full after half of it
            raise
        super().create(path, data)

    def chmod(self, path: Path, mode: int) -> None:
        self._step("chmod")
        super().chmod(path, mode)

    def chown(self, path: Path, uid: int, gid: int) -> None:
        self._step("chown")
        super().chown(path, uid, gid)

    def set_mtime(self, path: Path, mtime_ns: int) -> None:
        self._step("set_mtime")
        super().set_mtime(path, mtime_ns)

    def fsync(self, path: Path) -> None:
        self._step("fsync")
        super().fsync(path)

    def replace(self, source: Path, target: Path) -> None:
        self._step("replace")
        super().replace(source, target)

    def unlink(self, path: Path) -> None:
        self._step("unlink")
        super().unlink(path)

    def mkdir(self, path: Path) -> None:
        self._step("mkdir")
        super().mkdir(path)

    def rmdir(self, path: Path) -> None:
        self._step("rmdir")
        super().rmdir(path)


def failing_at(number: int, code: int, *, for_good: bool = False) -> CountingFileSystem:
    """Operation ``number`` fails with ``code``; with ``for_good`` every later one does, too."""

    def fail(count: int, _name: str) -> None:
        if count == number or (for_good and count > number):
            raise OSError(code, os.strerror(code))

    return CountingFileSystem(fail)


def dying_at(number: int) -> CountingFileSystem:
    """The process is killed just before operation ``number``."""

    def die(count: int, _name: str) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return CountingFileSystem(die)


class TearingFileSystem(CountingFileSystem):
    """The process is killed in the middle of writing file number ``number``."""

    def __init__(self, number: int) -> None:
        super().__init__(lambda _count, _name: None)
        self._left = number

    def create(self, path: Path, data: bytes) -> None:
        self._left -= 1
        if self._left == 0:
            super().create(path, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        super().create(path, data)


ERRORS = {name: getattr(errno, name) for name in ("ENOSPC", "EROFS", "EACCES", "EIO")}


class ForgetfulDisk(CountingFileSystem):
    """The power fails before operation ``number``, and what was not synced is lost, as far as chance will have it.

    Bytes of a file reach the disk with its own fsync; names (of creations, renames, removals) with that of their
    folder. Of those that did not, all are undone, or any number of the last ones.
    """

    def __init__(self, number: int, chance: random.Random) -> None:
        super().__init__(self._maybe_fail)
        self._number = number
        self._chance = chance
        self._bytes: set[Path] = set()
        self._names: list[tuple[Path, Callable[[], object]]] = []

    def _maybe_fail(self, count: int, _name: str) -> None:
        if count != self._number:
            return
        for path in self._bytes:
            if self._chance.random() < 0.7:
                os.truncate(path, 0)
        kept = self._chance.choice([0, self._chance.randint(0, len(self._names))])
        for _, undo in reversed(self._names[kept:]):
            undo()
        os.kill(os.getpid(), signal.SIGKILL)

    def _name_changed(self, path: Path, undo: Callable[[], object]) -> None:
        self._names.append((path.parent, undo))

    def create(self, path: Path, data: bytes) -> None:
        super().create(path, data)
        self._bytes.add(path)
        self._name_changed(path, lambda: path.unlink(missing_ok=True))

    def fsync(self, path: Path) -> None:
        super().fsync(path)
        self._bytes.discard(path)
        self._names = [(folder, undo) for folder, undo in self._names if folder != path]

    def replace(self, source: Path, target: Path) -> None:
        old = (target.read_bytes(), target.stat().st_mode & 0o7777) if target.exists() else None
        super().replace(source, target)
        if source in self._bytes:
            self._bytes.remove(source)
            self._bytes.add(target)

        def undo() -> None:
            if target.exists() and not source.exists():
                target.replace(source)
            if old is not None:
                target.write_bytes(old[0])
                target.chmod(old[1])

        self._name_changed(target, undo)

    def unlink(self, path: Path) -> None:
        data, mode = path.read_bytes(), path.stat().st_mode & 0o7777
        super().unlink(path)
        self._bytes.discard(path)

        def undo() -> None:
            if path.parent.is_dir():
                path.write_bytes(data)
                path.chmod(mode)

        self._name_changed(path, undo)

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self._name_changed(path, lambda: shutil.rmtree(path, ignore_errors=True))

    def rmdir(self, path: Path) -> None:
        super().rmdir(path)
        self._name_changed(path, lambda: path.mkdir(exist_ok=True))
