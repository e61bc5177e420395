"""A bundle in use: one tar file from which an environment is made without any network.

``bundle.json`` comes first and lists every other member with its digest. Nothing is believed before its digest was
checked: small members when they are read, wheels when they are unpacked.
"""

import contextlib
import hashlib
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from provisioner.counts import count_text
from provisioner.environment.lock import Lock, parse_lock
from provisioner.errors import CannotObtainError, HashMismatchError, InvalidBundleError, UsageError
from provisioner.progress import Reporter
from provisioner.provisioning.manifest import FILE_NAME, BundledFile, Manifest, parse_manifest
from provisioner.provisioning.wheel import insist_on_record
from provisioner.recipe import Recipe, parse_recipe
from provisioner.wheels.lazy import LocalWheel, Wheel

RECIPES, LOCKS, PATCHES, WHEELS, TOOL = "recipes", "lockfiles", "patches", "wheels", "tool"
_MANIFEST_LIMIT = 16 << 20
_BLOCK = 1 << 20
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
        return b"".join(self._blocks(found))

    def unpack(self, file: BundledFile, folder: Path) -> Path:
        """Write one member under ``folder``, by its own path. Raises HashMismatchError or CannotObtainError."""
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with target.open("wb") as stream:
                for block in self._blocks(file):
                    stream.write(block)
        except OSError as error:
            raise CannotObtainError("the bundle cannot be unpacked", where=str(target), found=error.strerror) from error
        return target

    def recipe(self) -> Recipe:
        """The recipe that the bundle was made for."""
        name = self.manifest.recipe
        where = f"{self.path.name}: {name}.toml"
        return parse_recipe(self.read(f"{RECIPES}/{name}.toml").decode(), name=name, where=where)

    def lock(self) -> Lock:
        """The lock that the bundle was made by. Raises InvalidBundleError where it is not the one that is listed."""
        name = self.manifest.recipe
        facts, requirements = (self.read(f"{LOCKS}/{name}.{ending}").decode() for ending in ("toml", "txt"))
        lock = parse_lock(facts, requirements, where=f"{self.path.name}: {name}.toml")
        if lock.digest != self.manifest.lock_digest:
            raise InvalidBundleError(
                "the lock is not the one that the bundle names",
                where=str(self.path),
                expected=self.manifest.lock_digest,
                found=lock.digest,
            )
        return lock

    def _blocks(self, file: BundledFile) -> Iterator[bytes]:
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
                manifest, members = _read_list(archive, path), archive.getmembers()
        except tarfile.TarError as error:
            raise InvalidBundleError(f"this is no bundle: {error}", where=str(path)) from error
        end = stream.seek(0, 2)
    _compare(manifest, members, path, end)
    return Bundle(path=path, manifest=manifest, offsets={member.name: member.offset_data for member in members})


def _read_list(archive: tarfile.TarFile, path: Path) -> Manifest:
    first = archive.next()
    stream = archive.extractfile(first) if first is not None and first.name == FILE_NAME and first.isreg() else None
    if first is None or stream is None or first.size > _MANIFEST_LIMIT:
        raise InvalidBundleError("this is no bundle: its first member is not the list of the others", where=str(path))
    try:
        text = stream.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidBundleError("the list of members is no text", where=str(path)) from error
    return parse_manifest(text, where=f"{path.name}: {FILE_NAME}")


def _compare(manifest: Manifest, members: list[tarfile.TarInfo], path: Path, end: int) -> None:
    listed = [(file.path, file.size) for file in manifest.files]
    found = [(member.name, member.size) for member in members[1:]]
    if listed != found or not all(member.isreg() for member in members):
        odd = sorted({name for name, _ in {*listed} ^ {*found}})
        raise InvalidBundleError(
            "the members are not the ones that the bundle lists", where=str(path), found=", ".join(odd[:5]) or None
        )
    if any(member.offset_data + member.size > end for member in members):
        raise InvalidBundleError("the bundle is cut short", where=str(path), hints=("copy it again",))


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
        done = 0
        reporter.stage(f"unpack {count_text(len(files), 'wheel')} from {self.bundle.path.name}")
        for file in files:
            self._take(file)
            done += file.size
            reporter.amount(done, total, "bytes")
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
