"""Making a bundle: a recipe's text, lock, patches and wheels, and the tool with what it needs, in one tar file."""

import contextlib
import errno
import hashlib
import re
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from provisioner import __version__
from provisioner.bundles.self_wheel import OwnTool
from provisioner.bundles.use import LOCKS, PATCHES, RECIPES, TOOL, WHEELS, wanted_pins
from provisioner.bundles.wheelhouse import fetch_wheels, find_wheels
from provisioner.counts import count_text
from provisioner.digests import Digest, digest_of
from provisioner.documents.bundle_manifest import FILE_NAME, BundledFile, Manifest
from provisioner.documents.codec import encode_json
from provisioner.documents.lock import Lock, print_facts
from provisioner.documents.recipe import PythonChoice, Recipe
from provisioner.errors import BusyError, CannotObtainError, UsageError
from provisioner.files import resolve_output
from provisioner.index.settings import IndexSettings
from provisioner.pipeline.preflight import check_disk
from provisioner.progress import Reporter
from provisioner.resources import package_folder, patches_folder
from provisioner.wheels.names import Candidate

REQUIREMENTS = "requirements.txt"
INSTALLER = "install.py"
_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class BundleRequest:
    """What to put into a bundle. ``recipe_text`` is the recipe's file; ``python`` the minor version of the target.

    ``bare`` leaves the dependencies out; ``tool`` is None where it is to be left out.
    """

    recipe: Recipe
    recipe_text: bytes
    lock: Lock
    python: str
    bare: bool
    tool: OwnTool | None


@dataclass(frozen=True, kw_only=True)
class WrittenBundle:
    """A bundle as it was written; ``sha256`` and ``size`` (bytes) are those of the whole file."""

    path: Path
    manifest: Manifest
    sha256: Digest
    size: int


@dataclass(frozen=True, kw_only=True)
class _Member:
    """A file of the bundle: its entry in the list, and its bytes or where they lie."""

    file: BundledFile
    content: bytes | Path = field(repr=False)


def choose_minor(choice: PythonChoice, given: str | None) -> str:
    """The minor version of the target's Python. Raises UsageError where the build does not support the given one."""
    minor = given or choice.preferred
    if not re.fullmatch(r"3\.\d+", minor) or not choice.supported.contains(f"{minor}.99", prereleases=True):
        raise UsageError(
            "the build does not support this Python", expected=f"3.N in {choice.supported}", found=minor,
            hints=(f"--python {choice.preferred}",),
        )  # fmt: skip
    return minor


def write_bundle(request: BundleRequest, output: Path, settings: IndexSettings, reporter: Reporter) -> WrittenBundle:
    """Fetch every wheel beside ``output``, each checked against the lock, and write the tar whole or not at all.

    The same request gives the same bytes. Wheels that a stopped run had fetched are not fetched again. Raises
    UsageError where something stands there that is no file; what finding and downloading raises; BusyError where
    another process writes the same file; CannotObtainError where the disk refuses.
    """
    output = _insist_on_file(output)
    wheels, tools = _find(request, settings, reporter)
    distinct = tuple({wheel.filename: wheel for wheel in (*wheels, *tools)}.values())
    parts = output.with_name(f".{output.name}.parts")
    total = sum(wheel.size or 0 for wheel in distinct)
    # They lie on the disk twice until the bundle is whole.
    check_disk(output, 2 * total - _size_of(parts), hints=(f"write it elsewhere: -o /another/disk/{output.name}",))
    try:
        with _hold(parts):
            reporter.stage(f"download {count_text(len(distinct), 'wheel')} ({total / 1e6:.0f} MB)")
            fetch_wheels(distinct, parts, settings, reporter)
            reporter.stage(f"write {output.name}")
            members = _gather(request, parts, wheels, tools)
            manifest = _describe(request, members)
            written = _write_tar(manifest, members, parts / "tar", reporter)
            (parts / "tar").replace(output)
            shutil.rmtree(parts)
    except OSError as error:
        raise _disk_error(error, output, parts) from error
    return WrittenBundle(path=output, manifest=manifest, sha256=written, size=output.stat().st_size)


def _insist_on_file(output: Path) -> Path:
    """Where links lead. No pipe or device will do, since the wheels are fetched into a folder beside it."""
    target = resolve_output(output)
    if target.exists() and not target.is_file():
        raise UsageError("a bundle is a file, and something else stands there", where=str(output))
    return target


def _find(
    request: BundleRequest, settings: IndexSettings, reporter: Reporter
) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...]]:
    """The wheels of the lock, and those that the tool needs."""
    pins = wanted_pins(request.lock, request.recipe.distribution, request.python, bare=request.bare)
    needs = request.tool.needs if request.tool is not None else ()
    reporter.stage(f"find {count_text(len(pins) + len(needs), 'wheel')} on the index")
    found = find_wheels([*pins, *needs], request.python, settings, reporter)
    wheels = (_with_locked_size(wheel, request.lock) for wheel in found[: len(pins)])
    return tuple(wheels), found[len(pins) :]


def _with_locked_size(wheel: Candidate, lock: Lock) -> Candidate:
    """A wheel that is named by its URL has a size in the lock alone."""
    return replace(wheel, size=lock.build.size) if wheel.sha256 == lock.build.sha256 else wheel


@contextlib.contextmanager
def _hold(parts: Path) -> Iterator[None]:
    import filelock

    parts.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(parts / ".lock", timeout=0):
            yield
    except filelock.Timeout as error:
        raise BusyError("another process is writing this bundle", where=str(parts)) from error


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir()) if folder.is_dir() else 0


def _disk_error(error: OSError, output: Path, parts: Path) -> CannotObtainError:
    full = error.errno == errno.ENOSPC
    kept = f"free some space and run the same command again: what was fetched is kept in {parts}"
    return CannotObtainError(
        "the bundle cannot be written", where=str(output), found=error.strerror, hints=(kept,) if full else ()
    )


def _gather(
    request: BundleRequest, folder: Path, wheels: Sequence[Candidate], tools: Sequence[Candidate]
) -> tuple[_Member, ...]:
    """Everything but the list, sorted by path."""
    name = request.recipe.name
    texts = {
        f"{RECIPES}/{name}.toml": request.recipe_text,
        f"{LOCKS}/{name}.toml": print_facts(request.lock).encode(),
        f"{LOCKS}/{name}.txt": request.lock.requirements.encode(),
        **_patch_texts(request.recipe),
    }
    if request.tool is not None:
        texts |= _tool_texts(request.tool, tools)
    members = [_Member(file=_describe_bytes(path, data), content=data) for path, data in texts.items()]
    members += [_describe_wheel(WHEELS, wheel, folder) for wheel in wheels]
    members += [_describe_wheel(TOOL, wheel, folder) for wheel in tools]
    return tuple(sorted(members, key=lambda member: member.file.path))


def _patch_texts(recipe: Recipe) -> dict[str, bytes]:
    store = patches_folder()
    files = [path for use in recipe.patches for path in (store / use.id).rglob("*") if path.is_file()]
    return {
        f"{PATCHES}/{path.relative_to(store).as_posix()}": path.read_bytes()
        for path in files
        if "__pycache__" not in path.parts
    }


def _tool_texts(tool: OwnTool, wheels: Sequence[Candidate]) -> dict[str, bytes]:
    own = (f"provisioner=={__version__}", digest_of(tool.wheel))
    needed = [(f"{need.name}=={need.version}", wheel.sha256) for need, wheel in zip(tool.needs, wheels, strict=True)]
    lines = [f"{requirement} --hash=sha256:{digest}\n" for requirement, digest in [own, *needed]]
    return {
        f"{TOOL}/{tool.filename}": tool.wheel,
        f"{TOOL}/{REQUIREMENTS}": "".join(lines).encode(),
        f"{TOOL}/{INSTALLER}": (package_folder() / "bundles" / "install_tool.py").read_bytes(),
    }


def _describe(request: BundleRequest, members: Sequence[_Member]) -> Manifest:
    return Manifest(
        recipe=request.recipe.name,
        recipe_digest=request.recipe.digest,
        lock_digest=request.lock.digest,
        distribution=request.recipe.distribution,
        version=request.lock.build.version,
        python=request.python,
        bare=request.bare,
        tool=__version__ if request.tool is not None else None,
        files=tuple(member.file for member in members),
    )


def _describe_bytes(path: str, data: bytes) -> BundledFile:
    return BundledFile(path=path, sha256=digest_of(data), size=len(data))


def _describe_wheel(place: str, wheel: Candidate, folder: Path) -> _Member:
    """Of the digest that was checked when it was fetched."""
    assert wheel.sha256 is not None
    path = folder / wheel.filename
    file = BundledFile(path=f"{place}/{wheel.filename}", sha256=wheel.sha256, size=path.stat().st_size)
    return _Member(file=file, content=path)


def _write_tar(manifest: Manifest, members: Sequence[_Member], target: Path, reporter: Reporter) -> Digest:
    """The digest of the whole file, taken on the way."""
    text = encode_json(manifest).encode()
    total, done, hasher = sum(member.file.size for member in members), 0, hashlib.sha256()
    with target.open("wb") as stream:
        for block in _tar_blocks([_Member(file=_describe_bytes(FILE_NAME, text), content=text), *members]):
            stream.write(block)
            hasher.update(block)
            done += len(block)
            reporter.amount(min(done, total), total, "bytes")
    return hasher.hexdigest()


def _tar_blocks(members: Sequence[_Member]) -> Iterator[bytes]:
    """Written here and not by tarfile, which copies in small pieces and knows no digest."""
    for member in members:
        size = member.file.size
        yield _entry(member.file).tobuf(tarfile.PAX_FORMAT)
        yield from [member.content] if isinstance(member.content, bytes) else _read_blocks(member.content)
        yield b"\0" * (-size % tarfile.BLOCKSIZE)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)


def _read_blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            yield block


def _entry(file: BundledFile) -> tarfile.TarInfo:
    """The same for everybody: no owner, no time."""
    entry = tarfile.TarInfo(file.path)
    entry.size, entry.mode, entry.mtime = file.size, 0o644, 0
    return entry
