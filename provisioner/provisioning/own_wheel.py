"""The tool's own wheel, made from what is running: the same bytes each time, with nothing asked of any index."""

import importlib.metadata
import zipfile
from collections.abc import Iterator
from pathlib import Path

from provisioner import __version__
from provisioner.digests import digest_of, digest_to_record
from provisioner.errors import CannotObtainError
from provisioner.resources import lockfiles_folder, package_folder, patches_folder

_NAME = "provisioner"
_MOMENT = (1980, 1, 1, 0, 0, 0)
_WHEEL = "Wheel-Version: 1.0\nGenerator: provision\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def own_requirements() -> tuple[str, ...]:
    """What the tool needs, extras left out. Raises CannotObtainError where it is not installed."""
    from packaging.requirements import Requirement

    found = [Requirement(text) for text in _own_distribution().requires or ()]
    return tuple(str(item) for item in found if "extra" not in str(item.marker or ""))


def write_own_wheel(folder: Path) -> Path:
    """Write the wheel into ``folder``. Raises CannotObtainError where the tool runs without being installed."""
    distribution = _own_distribution()
    info = f"{_NAME}-{__version__}.dist-info"
    members = {path: source.read_bytes() for path, source in _sources()}
    for name in ("METADATA", "entry_points.txt", "licenses/LICENSE"):
        if (text := distribution.read_text(name)) is not None:
            members[f"{info}/{name}"] = text.encode()
    members[f"{info}/WHEEL"] = _WHEEL.encode()
    members[f"{info}/RECORD"] = _print_record(members, f"{info}/RECORD").encode()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{_NAME}-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in members.items():
            entry = zipfile.ZipInfo(path, _MOMENT)
            entry.external_attr = 0o100644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return target


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
            hints=("make install, then .venv/bin/provision", "leave the tool out: --without-tool"),
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
