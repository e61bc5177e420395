"""Names of wheels: versions, commits, variants, tags, and the choice of one file with reasons against others. Pure."""

import re
from collections.abc import Iterable
from dataclasses import field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import BuildTag, InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from provisioner.digests import Digest
from provisioner.errors import InvalidInputError, NoCompatibleWheelError
from provisioner.records import dataclass

DEFAULT_VARIANT = "default"
_COMMIT_PART = re.compile(r"g([0-9a-f]{6,40})\Z")
_DATE_PART = re.compile(r"d\d{8}\Z")
_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_")
_NEWEST_GLIBC_MINOR = 60
_LEGACY_MANYLINUX = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}


@dataclass(frozen=True, kw_only=True)
class WheelName:
    """A wheel's file name, taken apart. ``filename`` is unquoted (a plus sign, never %2B)."""

    filename: str
    project: str
    version: Version
    build: BuildTag
    tags: frozenset[Tag] = field(repr=False)

    @property
    def platforms(self) -> tuple[str, ...]:
        return tuple(sorted({tag.platform for tag in self.tags}))

    @property
    def pythons(self) -> tuple[str, ...]:
        return tuple(sorted({f"{tag.interpreter}-{tag.abi}" for tag in self.tags}))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One wheel that could be used, wherever it lies: exactly one of ``url`` (without credentials) and ``path`` is set.

    ``size`` is in bytes; ``commit`` is as long as the source knows it; ``variant`` None is the default one.
    """

    filename: str
    version: Version
    url: str | None = None
    path: Path | None = None
    sha256: Digest | None = None
    size: int | None = None
    commit: str | None = None
    variant: str | None = None
    requires_python: SpecifierSet | None = None
    yanked: bool = False
    upload_time: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a wheel must run on. None for ``python`` or ``glibc``: any will do (to read without installing)."""

    python: tuple[int, int] | None = None
    arch: str = "x86_64"
    glibc: tuple[int, int] | None = None

    def __str__(self) -> str:
        python = f"Python {self.python[0]}.{self.python[1]}" if self.python else "any Python"
        glibc = f" with glibc {self.glibc[0]}.{self.glibc[1]}" if self.glibc else ""
        return f"{python} on Linux {self.arch}{glibc}"


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A file that was not chosen, and the axis on which it failed."""

    filename: str
    reason: str

    def __str__(self) -> str:
        return f"{self.filename}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    chosen: Candidate
    rejected: tuple[Rejection, ...]


@lru_cache(maxsize=4096)
def parse_wheel_name(filename: str) -> WheelName:
    """Take a wheel's file name apart; ``%2B`` is understood.

    Raises InvalidInputError where it is none.
    """
    plain = unquote(filename)
    try:
        project, version, build, tags = parse_wheel_filename(plain)
    except InvalidWheelFilename as error:
        raise InvalidInputError("this is not the name of a wheel", where=plain) from error
    return WheelName(filename=plain, project=project, version=version, build=build, tags=tags)


def oldest_glibc(filename: str) -> tuple[int, int] | None:
    """The oldest glibc that a wheel runs with; None where it asks for none.

    Raises InvalidInputError where this is not the name of a wheel.
    """
    platforms = parse_wheel_name(filename).platforms
    modern = [(int(found[1]), int(found[2])) for name in platforms if (found := _MANYLINUX.match(name))]
    legacy = [
        (2, minor) for minor, tag in _LEGACY_MANYLINUX.items() if any(name.startswith(f"{tag}_") for name in platforms)
    ]
    return None if "any" in platforms else min([*modern, *legacy], default=None)


def commit_of(version: Version) -> str | None:
    """The abbreviated commit in a local version such as ``g1fe3a1571.cu130``."""
    for part in (version.local or "").split("."):
        if match := _COMMIT_PART.match(part):
            return match[1]
    return None


def spec_of(version: Version) -> str:
    """An installed version as a place to read its build from: ``pypi:0.27.1`` or ``commit:1fe3a1571``."""
    commit = commit_of(version)
    return f"commit:{commit}" if commit else f"pypi:{version.public}"


def variant_of(version: Version) -> str | None:
    """The variant in a local version: ``cu130`` of ``g1fe3a1571.cu130``; None for the default one."""
    parts = [part for part in (version.local or "").split(".") if part]
    kept = [part for part in parts if not _COMMIT_PART.match(part) and not _DATE_PART.match(part)]
    return ".".join(kept) or None


def without_variant(version: Version) -> Version:
    """``version`` with its local part reduced to the commit."""
    commit = commit_of(version)
    return Version(f"{version.public}+g{commit}" if commit else version.public)


def metadata_version(text: str) -> Version | None:
    """The version that the text of a METADATA tells; None where it tells none."""
    for line in text.splitlines():
        if not line:
            break
        name, _, value = line.partition(":")
        if name.lower() == "version":
            try:
                return Version(value.strip())
            except InvalidVersion:
                return None
    return None


def choose(candidates: Iterable[Candidate], target: Target, *, variant: str | None = None) -> Choice:
    """The newest version's best file for ``target``, and the reason against each other one.

    Raises NoCompatibleWheelError, naming every file with its reason, where none fits.
    """
    listed = tuple(candidates)
    fitting, rejected = sift(listed, target, variant=variant)
    if not fitting:
        raise NoCompatibleWheelError(
            f"no wheel fits: {_summary(listed, rejected, variant)}",
            expected=f"variant {variant or DEFAULT_VARIANT} for {target}",
            found="; ".join(map(str, rejected)) or "no wheel at all",
            hints=(
                "provision hynix-stable, which takes a release",
                "name another variant or another build in the recipe",
            ),
        )
    chosen = max(fitting, key=lambda candidate: _preference(candidate, target))
    others = tuple(
        Rejection(filename=candidate.filename, reason=f"{chosen.filename} is preferred")
        for candidate in fitting
        if candidate is not chosen
    )
    return Choice(chosen=chosen, rejected=(*rejected, *others))


def choose_each(
    candidates: Iterable[Candidate], target: Target, *, variant: str | None = None
) -> tuple[Candidate, ...]:
    """The best file of each build that has one for ``target``, oldest first."""
    best: dict[tuple[Version, str | None], Candidate] = {}
    fitting, _ = sift(candidates, target, variant=variant)
    for candidate in fitting:
        key = (candidate.version, candidate.commit)
        known = best.get(key)
        if known is None or _preference(candidate, target) > _preference(known, target):
            best[key] = candidate
    return tuple(best.values())


def sift(
    candidates: Iterable[Candidate], target: Target, *, variant: str | None = None
) -> tuple[tuple[Candidate, ...], tuple[Rejection, ...]]:
    """The candidates that fit, in their order, and the others with the axis on which each failed."""
    fitting: list[Candidate] = []
    rejected: list[Rejection] = []
    for candidate in candidates:
        reason = _reason_against(candidate, target, variant)
        if reason is None:
            fitting.append(candidate)
        else:
            rejected.append(Rejection(filename=candidate.filename, reason=reason))
    return tuple(fitting), tuple(rejected)


def _reason_against(candidate: Candidate, target: Target, variant: str | None) -> str | None:
    name = parse_wheel_name(candidate.filename)
    if candidate.variant != variant:
        return f"variant {variant or DEFAULT_VARIANT} wanted, this is {candidate.variant or DEFAULT_VARIANT}"
    if not any(_platform_fits(platform, target) for platform in name.platforms):
        return f"only {', '.join(name.platforms)}"
    if target.python is None:
        return None
    if _rank(name, target) is None:
        return f"only for {', '.join(name.pythons)}, not Python {target.python[0]}.{target.python[1]}"
    if candidate.requires_python is not None and not _python_allowed(candidate.requires_python, target.python):
        return f"requires Python {candidate.requires_python}, not {target.python[0]}.{target.python[1]}"
    return None


def _python_allowed(wanted: SpecifierSet, python: tuple[int, int]) -> bool:
    """Micro versions are not known here: a late one stands for the series, so that ``>=3.11.4`` allows 3.11."""
    return wanted.contains(f"{python[0]}.{python[1]}.99", prereleases=True)


def _platform_fits(platform: str, target: Target) -> bool:
    return platform == "any" or platform in _platforms(target)


@lru_cache(maxsize=32)
def _platforms(target: Target) -> tuple[str, ...]:
    """Platform tags that ``target`` can run, best first (PEP 600 and its forerunners)."""
    newest = target.glibc[1] if target.glibc and target.glibc[0] == 2 else _NEWEST_GLIBC_MINOR
    tags: list[str] = []
    for minor in range(newest, 4, -1):
        tags.append(f"manylinux_2_{minor}_{target.arch}")
        if legacy := _LEGACY_MANYLINUX.get(minor):
            tags.append(f"{legacy}_{target.arch}")
    return (*tags, f"linux_{target.arch}")


@lru_cache(maxsize=32)
def _ranks(target: Target) -> dict[Tag, int]:
    assert target.python is not None
    short = f"cp{target.python[0]}{target.python[1]}"
    platforms = _platforms(target)
    ordered = [
        *cpython_tags(python_version=target.python, abis=[short], platforms=platforms),
        *compatible_tags(python_version=target.python, interpreter=short, platforms=platforms),
    ]
    return {tag: rank for rank, tag in reversed(list(enumerate(ordered)))}


def _rank(name: WheelName, target: Target) -> int | None:
    ranks = _ranks(target)
    return min((ranks[tag] for tag in name.tags if tag in ranks), default=None)


def _preference(candidate: Candidate, target: Target) -> tuple[Version, int, BuildTag]:
    name = parse_wheel_name(candidate.filename)
    rank = (_rank(name, target) or 0) if target.python else 0
    return candidate.version, -rank, name.build


def _summary(listed: tuple[Candidate, ...], rejected: tuple[Rejection, ...], variant: str | None) -> str:
    has = sorted(
        {candidate.variant or DEFAULT_VARIANT for candidate in listed}, key=lambda name: (name != DEFAULT_VARIANT, name)
    )
    if has and (variant or DEFAULT_VARIANT) not in has:
        return f"variant {variant or DEFAULT_VARIANT} wanted, has: {', '.join(has)}"
    reasons = dict.fromkeys(rejection.reason for rejection in rejected if "wanted, this is" not in rejection.reason)
    return "; ".join(reasons) or "nothing is listed"
