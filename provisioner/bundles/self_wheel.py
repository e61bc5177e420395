"""The tool as a bundle carries it: its own wheel, made from what is running, and the names of all that it needs.

The same bytes each time and on every machine, with nothing asked of any index.
"""

import importlib.metadata
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from provisioner import __version__
from provisioner.digests import digest_of, digest_to_record
from provisioner.documents.lock import marker_environment
from provisioner.errors import CannotObtainError
from provisioner.resources import lockfiles_folder, package_folder, patches_folder

_NAME = "provisioner"
_MOMENT = (1980, 1, 1, 0, 0, 0)
_WHEEL = "Wheel-Version: 1.0\nGenerator: provision\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_LEAVE_OUT = "leave the tool out: --without-tool"


@dataclass(frozen=True, kw_only=True)
class Need:
    """A distribution that the tool needs, in the version that is installed here."""

    name: str
    version: Version


@dataclass(frozen=True, kw_only=True)
class OwnTool:
    """The tool's wheel, and all that it needs on one Python, sorted by name."""

    filename: str
    wheel: bytes = field(repr=False)
    needs: tuple[Need, ...]


def read_own_tool(python: str) -> OwnTool:
    """The tool that runs here, for a Python such as ``3.12``.

    Raises CannotObtainError where it runs without being installed, or where something is not installed here that it
    needs on that Python.
    """
    return OwnTool(filename=f"{_NAME}-{__version__}-py3-none-any.whl", wheel=_own_wheel(), needs=find_needs(python))


def find_needs(python: str) -> tuple[Need, ...]:
    """All that the tool needs on Linux x86_64 with a late ``python``, in the versions that are installed here."""
    environment = marker_environment(f"{python}.99")
    found: dict[str, Need] = {}
    waiting = [(requirement, "") for requirement in _requirements_of(_own_distribution())]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({**environment, "extra": extra}):
            continue
        distribution = _installed(requirement, python)
        name = canonicalize_name(requirement.name)
        found[name] = Need(name=name, version=Version(distribution.version))
        for inner in {"", *requirement.extras}:
            if (name, inner) not in seen:
                seen.add((name, inner))
                waiting += [(needed, inner) for needed in _requirements_of(distribution)]
    return tuple(found[name] for name in sorted(found))


def _requirements_of(distribution: importlib.metadata.Distribution) -> list[Requirement]:
    return [Requirement(text) for text in distribution.requires or ()]


def _installed(requirement: Requirement, python: str) -> importlib.metadata.Distribution:
    try:
        found = importlib.metadata.distribution(requirement.name)
    except importlib.metadata.PackageNotFoundError as error:
        raise CannotObtainError(
            f"the tool needs {requirement.name} on Python {python}, and it is not installed here",
            hints=(f"run provision with Python {python}", _LEAVE_OUT),
        ) from error
    if not requirement.specifier.contains(found.version, prereleases=True):
        raise CannotObtainError(
            "a package beside the tool is not in a version that works",
            expected=str(requirement), found=found.version, hints=("make install", _LEAVE_OUT),
        )  # fmt: skip
    return found


def _own_wheel() -> bytes:
    """Not compressed: what a compressor makes of the same text differs from one machine to the next."""
    distribution = _own_distribution()
    info = f"{_NAME}-{__version__}.dist-info"
    members = {path: source.read_bytes() for path, source in _sources()}
    for name in ("METADATA", "entry_points.txt", "licenses/LICENSE"):
        if (text := distribution.read_text(name)) is not None:
            members[f"{info}/{name}"] = text.encode()
    members[f"{info}/WHEEL"] = _WHEEL.encode()
    members[f"{info}/RECORD"] = _print_record(members, f"{info}/RECORD").encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path, data in members.items():
            entry = zipfile.ZipInfo(path, _MOMENT)
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)
    return buffer.getvalue()


def _sources() -> Iterator[tuple[str, Path]]:
    folders = {"": package_folder(), "_data/patches/": patches_folder(), "_data/lockfiles/": lockfiles_folder()}
    for prefix, folder in folders.items():
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            if path.is_file() and "__pycache__" not in parts and not (prefix == "" and parts[0] == "_data"):
                yield f"{_NAME}/{prefix}{'/'.join(parts)}", path


def _own_distribution() -> importlib.metadata.Distribution:
    try:
        found = importlib.metadata.distribution(_NAME)
    except importlib.metadata.PackageNotFoundError as error:
        raise CannotObtainError(
            "the tool runs from a folder and is not installed, so its own wheel cannot be made",
            where=str(package_folder()),
            hints=("make install, then .venv/bin/provision", _LEAVE_OUT),
        ) from error
    if found.version != __version__:
        raise CannotObtainError(
            "the tool is installed as another version than it is",
            expected=__version__,
            found=found.version,
            hints=("make install",),
        )
    return found


def _print_record(members: dict[str, bytes], record: str) -> str:
    rows = [f"{path},{digest_to_record(digest_of(data))},{len(data)}" for path, data in members.items()]
    return "\n".join([*rows, f"{record},,"]) + "\n"
