"""Making a bundle: a recipe's text, lock, patches and wheels, and the tool with what it needs, in one tar file."""

import hashlib
import io
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from provisioner import __version__
from provisioner.counts import count_text
from provisioner.digests import Digest, digest_of
from provisioner.environment import uv as uv_room
from provisioner.environment.lock import (
    Lock,
    Pin,
    marker_environment,
    parse_requirements,
    print_facts,
    select_pin,
)
from provisioner.errors import CannotObtainError, HashMismatchError, NoCompatibleWheelError, UsageError
from provisioner.progress import Reporter
from provisioner.provisioning.bundle import LOCKS, PATCHES, RECIPES, TOOL, WHEELS
from provisioner.provisioning.manifest import FILE_NAME, BundledFile, Manifest, print_manifest
from provisioner.provisioning.own_wheel import own_requirements, write_own_wheel
from provisioner.recipe import PythonChoice, Recipe
from provisioner.resources import patches_folder
from provisioner.wheels.names import Candidate, Target, choose, parse_wheel_name
from provisioner.wheels.settings import IndexSettings
from provisioner.wheels.source import find_releases, mirror_url
from provisioner.wheels.transport import Transport

REQUIREMENTS = "requirements.txt"
_OLDEST_GLIBC = (2, 28)
"""What vLLM's own wheels ask for: a wheel that runs there is taken before one that needs a newer system."""
_WORKERS = 8


@dataclass(frozen=True, kw_only=True)
class BundleRequest:
    """What to put into a bundle. ``recipe_text`` is the recipe's file; ``python`` the minor version of the target.

    ``bare`` leaves the dependencies out; ``add_tool`` puts the tool itself into a folder, or is None to leave it out.
    """

    recipe: Recipe
    recipe_text: bytes
    lock: Lock
    python: str
    bare: bool
    add_tool: Callable[[Path], None] | None


@dataclass(frozen=True, kw_only=True)
class WrittenBundle:
    """A bundle as it was written; ``sha256`` and ``size`` (bytes) are those of the whole file."""

    path: Path
    manifest: Manifest
    sha256: Digest
    size: int


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
    """Gather everything beside ``output``, each wheel checked against the lock, and write the tar whole or not at all.

    The same request gives the same bytes. Raises what finding and downloading raises; CannotObtainError where the disk
    refuses.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as temporary:
            folder = Path(temporary) / "content"
            _gather(request, folder, settings, reporter)
            reporter.stage(f"write {output.name}")
            manifest = _describe(request, folder)
            written = _write_tar(manifest, folder, Path(temporary) / "tar")
            (Path(temporary) / "tar").replace(output)
    except OSError as error:
        raise CannotObtainError("the bundle cannot be written", where=str(output), found=error.strerror) from error
    return WrittenBundle(path=output, manifest=manifest, sha256=written, size=output.stat().st_size)


def add_own_tool(folder: Path, python: str, settings: IndexSettings, uv: uv_room.Uv, reporter: Reporter) -> None:
    """Put the tool's own wheel and those of its dependencies for ``python`` into ``folder``, with hashed requirements.

    The dependencies are the versions that run here, where the target's Python allows them.
    Raises what resolving and downloading raises.
    """
    reporter.stage("add the tool itself")
    text = resolve_tool(python, uv)
    environment = marker_environment(_late(python))
    pins = [pin for pin in parse_requirements(text, where=REQUIREMENTS) if pin.wanted(environment)]
    download_pins(pins, folder, python, settings, reporter)
    add_requirements(folder, text)


def add_requirements(folder: Path, dependencies: str) -> None:
    """Write the tool's own wheel into ``folder``, and requirements that name it and ``dependencies``, all hashed."""
    own = write_own_wheel(folder)
    pin = f"provisioner=={__version__} \\\n    --hash=sha256:{digest_of(own.read_bytes())}\n"
    (folder / REQUIREMENTS).write_text(pin + dependencies, encoding="utf-8")


def resolve_tool(python: str, uv: uv_room.Uv) -> str:
    """Hashed requirements of what the tool needs, in the versions that are installed here.

    Raises ResolutionError or NetworkError; CannotObtainError where the tool is not installed.
    """
    wanted = own_requirements()
    with tempfile.TemporaryDirectory(prefix="provision-bundle-") as temporary:
        constraints, output = Path(temporary) / "constraints.txt", Path(temporary) / REQUIREMENTS
        constraints.write_text(_installed_versions(), encoding="utf-8")
        text = "\n".join([*wanted, f"-c {constraints}", ""])
        uv_room.compile_requirements(uv, text, output, python=_late(python), exclude_newer=None)
        return output.read_text(encoding="utf-8")


def download_pins(
    pins: Sequence[Pin], folder: Path, python: str, settings: IndexSettings, reporter: Reporter
) -> tuple[Path, ...]:
    """The wheel of each pin that fits Linux x86_64 and ``python``, downloaded, its digest one of the pin's.

    Raises NoCompatibleWheelError, NoSuchBuildError, HashMismatchError or NetworkError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = 0

    def fetch(pin: Pin) -> Path:
        nonlocal done
        candidate = find_pinned(pin, python, settings, transport)
        assert candidate.url is not None
        got = transport.download(
            candidate.url,
            folder / candidate.filename,
            expected=candidate.sha256,
            size=candidate.size,
            progress=(lambda now, total: reporter.amount(now, total, "bytes")) if len(pins) == 1 else None,
        )
        if got.sha256 not in pin.hashes:
            raise HashMismatchError(
                "the downloaded wheel is not the locked one", where=candidate.filename, found=got.sha256
            )
        done += 1
        if len(pins) > 1:
            reporter.amount(done, len(pins), "wheels")
        return got.path

    with Transport(settings) as transport, ThreadPoolExecutor(_WORKERS, thread_name_prefix="bundle") as pool:
        return tuple(pool.map(fetch, pins))


def find_pinned(pin: Pin, python: str, settings: IndexSettings, transport: Transport) -> Candidate:
    """The file of a pin for ``python``: by its URL, else on the user's index, of a digest that the pin allows."""
    url = pin.requirement.url
    if url is not None:
        name = parse_wheel_name(url.rpartition("/")[2])
        return Candidate(filename=name.filename, version=name.version, url=mirror_url(url, settings))
    listed = find_releases(pin.name, SpecifierSet(f"=={pin.version}"), settings, transport=transport)
    same = [candidate for candidate in listed if candidate.sha256 in pin.hashes]
    if not same:
        raise HashMismatchError(
            f"no wheel of {pin.name} {pin.version} on the index is the locked one",
            found=", ".join(candidate.filename for candidate in listed),
            hints=("provision lock RECIPE, if the index really moved",),
        )
    return _best(same, _target(python))


def _best(same: Sequence[Candidate], target: Target) -> Candidate:
    variant = same[0].variant
    old = Target(python=target.python, glibc=_OLDEST_GLIBC)
    try:
        return choose(same, old, variant=variant).chosen
    except NoCompatibleWheelError:
        return choose(same, target, variant=variant).chosen


def _late(python: str) -> str:
    """A late micro version stands for the series: a package may need one that is not the first."""
    return f"{python}.99"


def _target(python: str) -> Target:
    major, minor = (int(part) for part in Version(python).release[:2])
    return Target(python=(major, minor))


def _gather(request: BundleRequest, folder: Path, settings: IndexSettings, reporter: Reporter) -> None:
    name = request.recipe.name
    _put(folder / RECIPES / f"{name}.toml", request.recipe_text)
    _put(folder / LOCKS / f"{name}.toml", print_facts(request.lock).encode())
    _put(folder / LOCKS / f"{name}.txt", request.lock.requirements.encode())
    for use in request.recipe.patches:
        source = patches_folder() / use.id
        shutil.copytree(source, folder / PATCHES / use.id, ignore=shutil.ignore_patterns("__pycache__"))
    pins = _wanted_pins(request)
    reporter.stage(f"download {count_text(len(pins), 'wheel')} of the lock" if len(pins) > 1 else "download the wheel")
    download_pins(pins, folder / WHEELS, request.python, settings, reporter)
    if request.add_tool is not None:
        request.add_tool(folder / TOOL)


def _wanted_pins(request: BundleRequest) -> tuple[Pin, ...]:
    if request.bare:
        return parse_requirements(select_pin(request.lock, request.recipe.distribution), where=request.lock.recipe)
    environment = marker_environment(request.python)
    return tuple(pin for pin in request.lock.pins if pin.wanted(environment))


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _describe(request: BundleRequest, folder: Path) -> Manifest:
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(2) as pool:
        files = tuple(pool.map(lambda path: _describe_file(folder, path), paths))
    return Manifest(
        recipe=request.recipe.name,
        recipe_digest=request.recipe.digest,
        lock_digest=request.lock.digest,
        distribution=request.recipe.distribution,
        version=request.lock.build.version,
        python=request.python,
        bare=request.bare,
        tool=__version__ if request.add_tool is not None else None,
        files=files,
    )


def _describe_file(folder: Path, path: str) -> BundledFile:
    with (folder / path).open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return BundledFile(path=path, sha256=digest, size=(folder / path).stat().st_size)


class _Hashing(io.RawIOBase):
    """Writes through to a file and hashes on the way."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")
        self.hasher = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.hasher.update(data)
        return self._stream.write(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def _write_tar(manifest: Manifest, folder: Path, target: Path) -> Digest:
    with _Hashing(target) as stream:
        with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            text = print_manifest(manifest).encode()
            archive.addfile(_entry(FILE_NAME, len(text)), io.BytesIO(text))
            for file in manifest.files:
                with (folder / file.path).open("rb") as source:
                    archive.addfile(_entry(file.path, file.size), source)
        return stream.hasher.hexdigest()


def _entry(path: str, size: int) -> tarfile.TarInfo:
    """The same for everybody: no owner, no time."""
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode, entry.mtime = size, 0o644, 0
    return entry


def _installed_versions() -> str:
    """Every distribution that is installed beside the tool, as constraints."""
    import importlib.metadata

    found: Iterable[tuple[str, str]] = {
        (item.metadata["Name"], item.version) for item in importlib.metadata.distributions() if item.metadata["Name"]
    }
    return "".join(f"{name}=={version}\n" for name, version in sorted(found) if name != "provisioner")
