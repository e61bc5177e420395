"""A bundle in use: one tar file from which an environment is made without any network.

``bundle.json`` comes first and lists every other member with its digest. Nothing is believed before its digest was
checked: small members when they are read, wheels when they are unpacked.
"""

import contextlib
import hashlib
import re
import tarfile
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from provisioner.counts import count_text
from provisioner.digests import Digest
from provisioner.documents.bundle_manifest import FILE_NAME, BundledFile, Manifest, parse_manifest
from provisioner.documents.lock import Lock, Pin, marker_environment, parse_lock, parse_requirements, select_pin
from provisioner.documents.recipe import Recipe, parse_recipe
from provisioner.environment.site import ask_interpreter
from provisioner.errors import (
    CannotObtainError,
    HashMismatchError,
    InvalidBundleError,
    NoCompatibleWheelError,
    UsageError,
)
from provisioner.index.lazy import LocalWheel, Wheel
from provisioner.locks.wheel import insist_on_record
from provisioner.pipeline.preflight import check_disk
from provisioner.progress import Reporter
from provisioner.wheels.names import oldest_glibc

RECIPES, LOCKS, PATCHES, WHEELS, TOOL = "recipes", "lockfiles", "patches", "wheels", "tool"
_MANIFEST_LIMIT = 16 << 20
_SMALL = 64 << 20
"""More than any text of a bundle has, in bytes."""
_BLOCK = 1 << 20
_WORKERS = 4
_NO_ROOM = ("set PROVISION_HOME to a folder on another disk",)
_ABANDONED_AFTER = 24 * 3600.0
"""Seconds after which what a killed run had unpacked belongs to nobody."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle whose list of members was read and compared with the members; ``offsets`` say where each begins."""

    path: Path
    manifest: Manifest
    offsets: dict[str, int] = field(repr=False)

    def read(self, member: str) -> bytes:
        """One small member.

        Raises InvalidBundleError where there is none, HashMismatchError where it is not what the list says.
        """
        found = next((file for file in self.manifest.files if file.path == member), None)
        if found is None:
            raise InvalidBundleError(f"the bundle does not hold {member}", where=str(self.path))
        if found.size > _SMALL:
            raise InvalidBundleError(f"{member} is too large for what it is", where=str(self.path))
        return b"".join(self.blocks(found))

    def unpack(self, file: BundledFile, folder: Path) -> Path:
        """Write one member under ``folder``, by its own path. Raises HashMismatchError or CannotObtainError."""
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with target.open("wb") as stream:
                for block in self.blocks(file):
                    stream.write(block)
        except OSError as error:
            raise CannotObtainError("the bundle cannot be unpacked", where=str(target), found=error.strerror) from error
        return target

    def recipe(self) -> Recipe:
        """The recipe that the bundle was made for. Raises InvalidBundleError where it is not the one that is listed."""
        name = self.manifest.recipe
        where = f"{self.path.name}: {name}.toml"
        recipe = parse_recipe(self._read_text(f"{RECIPES}/{name}.toml"), name=name, where=where)
        self._insist("recipe", recipe.digest, self.manifest.recipe_digest)
        return recipe

    def lock(self) -> Lock:
        """The lock that the bundle was made by. Raises InvalidBundleError where it is not the one that is listed."""
        name = self.manifest.recipe
        facts, requirements = (self._read_text(f"{LOCKS}/{name}.{ending}") for ending in ("toml", "txt"))
        lock = parse_lock(facts, requirements, where=f"{self.path.name}: {name}.toml")
        self._insist("lock", lock.digest, self.manifest.lock_digest)
        return lock

    def _read_text(self, member: str) -> str:
        try:
            return self.read(member).decode()
        except UnicodeDecodeError as error:
            raise InvalidBundleError(f"{member} is no text", where=str(self.path)) from error

    def _insist(self, what: str, found: Digest, expected: Digest) -> None:
        if found != expected:
            raise InvalidBundleError(
                f"the {what} is not the one that the bundle names",
                where=str(self.path), expected=expected, found=found,
            )  # fmt: skip

    def blocks(self, file: BundledFile) -> Iterator[bytes]:
        """A member's bytes in pieces.

        Raises HashMismatchError after the last piece where they were not the ones that the list says.
        """
        hasher = hashlib.sha256()
        with _open(self.path) as stream:
            stream.seek(self.offsets[file.path])
            left = file.size
            while left and (block := stream.read(min(left, _BLOCK))):
                left -= len(block)
                hasher.update(block)
                yield block
        if hasher.hexdigest() != file.sha256:
            raise HashMismatchError(
                f"{file.path} is not what the bundle says",
                where=str(self.path),
                expected=file.sha256,
                found=hasher.hexdigest(),
                hints=("copy the bundle again, or make it again: provision bundle RECIPE -o FILE",),
            )


def open_bundle(path: Path) -> Bundle:
    """Read the list of members and compare it with the members that are there.

    Raises CannotObtainError where the file cannot be read, InvalidBundleError where it is no whole bundle.
    """
    with _open(path) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                manifest = _read_list(archive, path)
                members = _read_members(archive)
        except tarfile.TarError as error:
            raise InvalidBundleError(f"this is no bundle: {error}", where=str(path)) from error
        end = stream.seek(0, 2)
    _compare(manifest, members, path, end)
    return Bundle(path=path, manifest=manifest, offsets={member.name: member.offset_data for member in members})


def _read_list(archive: tarfile.TarFile, path: Path) -> Manifest:
    first = archive.next()
    stream = archive.extractfile(first) if first is not None and first.name == FILE_NAME and _is_plain(first) else None
    if first is None or stream is None or first.size > _MANIFEST_LIMIT:
        raise InvalidBundleError("this is no bundle: its first member is not the list of the others", where=str(path))
    try:
        text = stream.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidBundleError("the list of members is no text", where=str(path)) from error
    return parse_manifest(text, where=f"{path.name}: {FILE_NAME}")


def _read_members(archive: tarfile.TarFile) -> list[tarfile.TarInfo]:
    """The members after the list, as far as they can be read: where the file was cut, the last ones are missing."""
    members: list[tarfile.TarInfo] = []
    with contextlib.suppress(tarfile.ReadError):
        while (member := archive.next()) is not None:
            members.append(member)
    return members


def _is_plain(member: tarfile.TarInfo) -> bool:
    """A file with its bytes in the tar: no link, device, folder or sparse file."""
    return member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)


def _compare(manifest: Manifest, members: list[tarfile.TarInfo], path: Path, end: int) -> None:
    odd = next((member for member in members if not _is_plain(member)), None)
    if odd is not None:
        raise InvalidBundleError("a member is not a plain file", where=str(path), found=odd.name)
    listed = [(file.path, file.size) for file in manifest.files]
    found = [(member.name, member.size) for member in members]
    whole = [member.offset_data + member.size <= end for member in members]
    if listed[: len(found)] == found and not (len(found) == len(listed) and all(whole)):
        first = next((name for (name, _), there in zip(found, whole, strict=True) if not there), None)
        raise InvalidBundleError(
            "the bundle is cut short or damaged",
            where=str(path),
            found=f"nothing whole from {first or listed[len(found)][0]} on",
            hints=("copy it again",),
        )
    if listed != found:
        names = sorted({name for name, _ in {*listed} ^ {*found}})
        raise InvalidBundleError(
            "the members are not the ones that the bundle lists", where=str(path), found=", ".join(names[:5]) or None
        )


class Unpacking:
    """The wheels of a bundle as files, unpacked when they are first asked for, and gone at the end."""

    def __init__(self, bundle: Bundle, lock: Lock, folder: Path) -> None:
        self.bundle = bundle
        self._lock = lock
        self._folder = folder
        self._unpacked: set[str] = set()

    def patches(self) -> Path:
        """A folder with the patch store of the bundle."""
        for file in self.bundle.manifest.under(PATCHES):
            self._take(file)
        return self._folder / PATCHES

    def links(self, reporter: Reporter) -> Path:
        """A folder with every wheel."""
        files = self.bundle.manifest.under(WHEELS)
        total = sum(file.size for file in files)
        check_disk(self._folder, sum(file.size for file in files if file.path not in self._unpacked), hints=_NO_ROOM)
        done = 0
        reporter.stage(f"unpack {count_text(len(files), 'wheel')} ({total / 1e6:.0f} MB) from {self.bundle.path.name}")
        with ThreadPoolExecutor(_WORKERS, thread_name_prefix="unpack") as pool:
            running = [(file, pool.submit(self._take, file)) for file in files]
            try:
                for file, unpacked in running:
                    unpacked.result()
                    done += file.size
                    reporter.amount(done, total, "bytes")
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        return self._folder / WHEELS

    def wheel_file(self, _: Reporter | None = None) -> Path:
        """The wheel of the locked build. Raises InvalidBundleError where the bundle lacks it."""
        path = f"{WHEELS}/{self._lock.build.filename}"
        for file in self.bundle.manifest.files:
            if file.path == path:
                return self._take(file)
        raise InvalidBundleError(f"the bundle does not hold {path}", where=str(self.bundle.path))

    def open_wheel(self) -> Wheel:
        """The same, opened. Raises HashMismatchError where its RECORD is not the lock's."""
        return insist_on_record(self._lock, LocalWheel(self.wheel_file()))

    def _take(self, file: BundledFile) -> Path:
        if file.path in self._unpacked:
            return self._folder / file.path
        target = self.bundle.unpack(file, self._folder)
        self._unpacked.add(file.path)
        return target


@contextlib.contextmanager
def unpacking(bundle: Bundle, folder: Path) -> Iterator[Unpacking]:
    """Use a bundle; what is unpacked lies in a folder of its own under ``folder`` until the end of the block."""
    lock = bundle.lock()
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    with tempfile.TemporaryDirectory(prefix="unpacked-", dir=folder) as temporary:
        yield Unpacking(bundle, lock, Path(temporary))


def wanted_pins(lock: Lock, distribution: str, python: str, *, bare: bool) -> tuple[Pin, ...]:
    """The pins of ``lock`` that a bundle has wheels for: all that ``python`` installs, or the build's own alone."""
    if bare:
        return parse_requirements(select_pin(lock, distribution), where=lock.recipe)
    environment = marker_environment(python)
    return tuple(pin for pin in lock.pins if pin.wanted(environment))


def insist_on_recipe(bundle: Bundle, name: str, *, bare: bool) -> None:
    """Raise UsageError where the bundle is another recipe's, or lacks the dependencies that a whole run needs."""
    manifest = bundle.manifest
    if manifest.recipe != name:
        raise UsageError(
            "the bundle is another recipe's", where=str(bundle.path), expected=name, found=manifest.recipe,
            hints=(f"provision up {manifest.recipe} --from-bundle {bundle.path}",),
        )  # fmt: skip
    if manifest.bare and not bare:
        raise UsageError(
            "the bundle holds the wheel alone",
            where=str(bundle.path),
            hints=(f"provision up {name} --from-bundle {bundle.path} --bare", f"provision bundle {name} -o FILE"),
        )


def insist_on_host(bundle: Bundle, python: str | None, *, bare: bool) -> None:
    """Refuse a host where the wheels cannot run. ``python`` is what the user names: a version, a path, or None.

    Raises UsageError for another Python, NoCompatibleWheelError for too old a C library.
    """
    import platform

    minor, named = bundle.manifest.python, _version_of(python) if python is not None and not bare else None
    if named is not None and not f"{named}.".startswith(f"{minor}."):
        raise UsageError(
            "the bundle is for another Python",
            where=str(bundle.path), expected=minor, found=named,
            hints=("leave --python out", f"provision bundle {bundle.manifest.recipe} --python VERSION -o FILE"),
        )  # fmt: skip
    name, version = platform.libc_ver()
    has = tuple(int(part) for part in version.split(".")[:2]) if name == "glibc" else None
    for file in bundle.manifest.under(WHEELS):
        needs = oldest_glibc(file.path.rpartition("/")[2])
        if needs is not None and (has is None or has < needs):
            raise NoCompatibleWheelError(
                "a wheel of the bundle does not run on this system",
                where=f"{bundle.path}: {file.path}",
                expected=f"glibc {needs[0]}.{needs[1]} or newer",
                found=f"{name or 'another C library'} {version}".strip(),
            )


def _version_of(python: str) -> str | None:
    """The version that a name of a Python means; None where only a search could tell."""
    if re.fullmatch(r"3(\.\d+)+", python):
        return python
    path = Path(python).expanduser()
    return ".".join(map(str, ask_interpreter(path, module="sys").version)) if path.is_file() else None


def _sweep(folder: Path) -> None:
    import shutil

    for left in folder.glob("unpacked-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_AFTER:
                shutil.rmtree(left, ignore_errors=True)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise CannotObtainError("the bundle cannot be read", where=str(path), found=error.strerror) from error
