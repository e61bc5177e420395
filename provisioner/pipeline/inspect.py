"""What stands in the folder where the environment should be."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from provisioner.documents.lock import Lock, marker_environment
from provisioner.documents.owner import Owner
from provisioner.environment.site import STATE_FOLDER, Site, find_site, venv_python
from provisioner.environment.state import has_receipt, read_owner, state_of
from provisioner.environment.uv import name_command
from provisioner.errors import EnvironmentConflictError
from provisioner.records import dataclass


@dataclass(frozen=True, kw_only=True)
class Absent:
    """Nothing is there, or an empty folder."""

    venv: Path


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """Ours, and the distribution is not installed: an interrupted first run."""

    venv: Path
    owner: Owner


@dataclass(frozen=True, kw_only=True)
class Installed:
    """Ours, with the distribution in it."""

    venv: Path
    owner: Owner
    site: Site


@dataclass(frozen=True, kw_only=True)
class Adoptable:
    """Made by others, with the distribution in it."""

    venv: Path
    site: Site


@dataclass(frozen=True, kw_only=True)
class Occupied:
    """The distribution seems to be there; its interpreter was not asked. ``owner`` is None where others made it."""

    venv: Path
    owner: Owner | None


Found = Absent | Unfinished | Installed | Adoptable


def inspect_environment(venv: Path, distribution: str, *, adopts: bool = False) -> Found:
    """Look at ``venv`` without changing it. ``adopts`` tells that one made by others will do.

    Raises EnvironmentConflictError where the folder holds something that is not ours, or an environment that cannot be
    proven (editable, installed twice, shadowed).
    """
    place = find_place(venv, distribution, adopts=adopts)
    match place:
        case Absent() | Unfinished():
            return place
        case Occupied(owner=owner):
            site = find_site(venv, distribution)
            return Adoptable(venv=venv, site=site) if owner is None else Installed(venv=venv, owner=owner, site=site)


def find_place(venv: Path, distribution: str, *, adopts: bool = False) -> Absent | Unfinished | Occupied:
    """The same by the names of files and folders alone, which takes no time.

    Raises EnvironmentConflictError where the folder holds something that is not ours.
    """
    if not venv.exists():
        return Absent(venv=venv)
    owner = read_owner(state_of(venv)) if venv.is_dir() else None
    found = _distribution_folders(venv, distribution) if venv.is_dir() else []
    if owner is not None:
        # With a receipt it was whole once; what became of it since is for the checks to say.
        was_whole = owner.adopted or has_receipt(state_of(venv))
        holds = any(was_whole or is_whole(info) for info in found)
        return Occupied(venv=venv, owner=owner) if holds else Unfinished(venv=venv, owner=owner)
    if _is_empty(venv):
        return Absent(venv=venv)
    if adopts and venv_python(venv).exists():
        return Occupied(venv=venv, owner=None)
    raise _not_ours(venv, adoptable=bool(found))


def wanted_packages(lock: Lock, python: str | None) -> dict[str, str]:
    """Version of each package of the lock that an environment with this Python has; empty where only a URL is known."""
    environment = marker_environment(python or lock.python)
    return {pin.name: str(pin.version or "") for pin in lock.pins if pin.wanted(environment)}


def differing_packages(site: Site, wanted: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the packages whose installed version is not the wanted one, or that were installed in part, sorted.

    Only names are read. Packages that nobody wants do not count.
    """
    installed = _installed_versions(site)
    return tuple(sorted(name for name, version in wanted.items() if not _is_installed(installed.get(name), version)))


def compare_packages(site: Site, wanted: Mapping[str, str]) -> tuple[str, ...]:
    """The same packages, each with the version that is there and the wanted one, for people."""
    installed = _installed_versions(site)
    return tuple(
        f"{name} {installed.get(name, 'is not installed')} (lock: {wanted[name]})"
        for name in differing_packages(site, wanted)
    )


def _installed_versions(site: Site) -> dict[str, str]:
    installed: dict[str, str] = {}
    with os.scandir(site.site_packages) as entries:
        names = [entry.name for entry in entries if entry.name.endswith(".dist-info")]
    for name in names:
        project, _, version = name.removesuffix(".dist-info").rpartition("-")
        if is_whole(site.site_packages / name):
            installed[canonicalize_name(project)] = version
    return installed


def is_replaceable(site: Site) -> bool:
    """Whether a rebuild may replace the environment for files that somebody edited: not one that others made."""
    owner = read_owner(site.state_dir)
    return owner is not None and not owner.adopted


def reinstall_command(site: Site, version: Version) -> str:
    """The command that brings the distribution's own files, in an environment that others made, back as shipped."""
    python = site.interpreter.executable if site.interpreter else "PYTHON"
    name = site.distribution
    return name_command(
        "pip", "install", "--python", str(python), "--no-deps", "--reinstall-package", name, f"{name}=={version}"
    )


def is_other_build(site: Site, lock: Lock) -> bool:
    """Whether the installed distribution is another build than the lock's.

    A commit build is known by its whole version, which holds commit and variant; of a release the public part counts.
    """
    locked = lock.build.version
    return site.version != locked if lock.build.url is not None else site.version.public != locked.public


def refuse_other_build(site: Site, lock: Lock) -> None:
    """Raise EnvironmentConflictError where the installed distribution is another build than the lock's."""
    if not is_other_build(site, lock):
        return
    refuse_downgrade(site, lock)
    raise EnvironmentConflictError(
        f"{site.distribution} in this environment is not the lock's",
        where=str(site.prefix or site.site_packages),
        expected=str(lock.build.version),
        found=str(site.version),
        hints=_ways_to(site, lock, "--rebuild, to replace it"),
    )


def refuse_downgrade(site: Site, lock: Lock) -> None:
    """Raise EnvironmentConflictError where the lock's build is older than the installed one."""
    if not is_other_build(site, lock) or lock.build.version > site.version:
        return
    raise EnvironmentConflictError(
        f"the lock's {site.distribution} is older than the one in this environment",
        where=str(site.prefix or site.site_packages),
        expected=str(lock.build.version),
        found=str(site.version),
        hints=_ways_to(site, lock, "--rebuild --downgrade, to go back"),
    )


def _ways_to(site: Site, lock: Lock, rebuild: str) -> tuple[str, ...]:
    """The ways to the lock's build; an environment that is not ours yet is not ours to replace."""
    ours = read_owner(site.state_dir) is not None
    way = f"run the same command with {rebuild}" if ours else reinstall_command(site, lock.build.version)
    return way, "choose another place with --venv DIR"


def is_whole(dist_info: Path) -> bool:
    """Whether the installer came to its end: it says who it is when all files are there, in whatever order."""
    return (dist_info / "INSTALLER").exists()


def _distribution_folders(venv: Path, distribution: str) -> list[Path]:
    found = venv.glob(f"lib*/python*/site-packages/{_folder_name(distribution)}-*.dist-info")
    return list(found) if venv_python(venv).exists() else []


def _is_installed(found: str | None, wanted: str) -> bool:
    if found is None or not wanted or found == wanted:
        return found is not None
    try:
        return Version(found) == Version(wanted)
    except InvalidVersion:
        return False


def _is_empty(folder: Path) -> bool:
    # The lock file of a run that ended before it made anything does not count.
    return folder.is_dir() and all(entry.name == STATE_FOLDER for entry in folder.iterdir())


def _folder_name(distribution: str) -> str:
    return distribution.replace("-", "_")


def _not_ours(venv: Path, *, adoptable: bool) -> EnvironmentConflictError:
    place = shlex.quote(str(venv))
    ways = (
        f"to take over what others made: provision up RECIPE --venv {place} --adopt",
        f"to patch it and no more: provision patch apply RECIPE --venv {place}",
    )
    return EnvironmentConflictError(
        "the folder exists and was not made by provision"
        if venv.is_dir()
        else "a file stands in the environment's place",
        where=str(venv),
        hints=(
            "choose another place with --venv DIR",
            *(ways if adoptable else ()),
        ),
    )
