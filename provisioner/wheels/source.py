"""Where a build's wheels are: releases on PyPI, commit builds and nightlies on the vLLM index, folders and files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from provisioner.errors import CannotObtainError, NoSuchBuildError, UsageError
from provisioner.wheels.cache import WheelCache
from provisioner.wheels.lazy import LocalWheel, RemoteWheel, Wheel
from provisioner.wheels.names import Candidate, commit_of, parse_wheel_name, variant_of
from provisioner.wheels.settings import IndexSettings
from provisioner.wheels.simple import ACCEPT, parse_project_page
from provisioner.wheels.transport import Progress, Transport, redact

__all__ = ["Candidate", "Spec", "candidates", "open_wheel", "parse_spec"]

PROJECT = "vllm"


@dataclass(frozen=True, kw_only=True)
class ReleaseSpec:
    """Releases on the user's package index; all that are stable where ``specifier`` is None."""

    specifier: SpecifierSet | None = None


@dataclass(frozen=True, kw_only=True)
class NightlySpec:
    """The newest build of the vLLM index."""


@dataclass(frozen=True, kw_only=True)
class CommitSpec:
    """One commit of vLLM's main, full or abbreviated."""

    commit: str


@dataclass(frozen=True, kw_only=True)
class CommitFileSpec:
    """Commits in a file, one a line, oldest first; text after a blank or ``#`` does not count."""

    path: Path


@dataclass(frozen=True, kw_only=True)
class LocalSpec:
    """A wheel file, or a folder of wheels."""

    path: Path


Spec = ReleaseSpec | NightlySpec | CommitSpec | CommitFileSpec | LocalSpec


def parse_spec(text: str) -> Spec:
    """What ``text`` names: nightly, commit:SHA, commits:FILE, pypi, pypi:VERSION, pypi:RANGE, or a wheel or folder.

    Raises UsageError for anything else.
    """
    kind, colon, rest = text.partition(":")
    if text == "nightly":
        return NightlySpec()
    if kind == "pypi":
        return ReleaseSpec(specifier=_parse_range(rest, text) if colon else None)
    if kind == "commit" and colon:
        return CommitSpec(commit=_checked_commit(rest, text))
    if kind == "commits" and colon and rest:
        return CommitFileSpec(path=Path(rest))
    if text and (text.endswith(".whl") or Path(text).is_dir()):
        return LocalSpec(path=Path(text))
    raise UsageError(
        "this names no build",
        where=text or "an empty text",
        hints=(
            "say nightly, commit:SHA, commits:FILE, pypi, pypi:VERSION, pypi:RANGE, or the path of a wheel or folder",
        ),
    )


def candidates(
    spec: Spec, settings: IndexSettings, *, transport: Transport | None = None, variant: str | None = None
) -> tuple[Candidate, ...]:
    """All wheels of the builds that ``spec`` names, for any platform, oldest build first.

    Raises NoSuchBuildError where an index answers and has none of them, NetworkError where it does not answer.
    """
    if transport is None:
        with Transport(settings) as own:
            return candidates(spec, settings, transport=own, variant=variant)
    match spec:
        case ReleaseSpec(specifier=specifier):
            return _find_releases(specifier, settings, transport)
        case LocalSpec(path=path):
            return _find_files(path)
        case NightlySpec() | CommitSpec() | CommitFileSpec():
            raise NotImplementedError
        case _:
            assert_never(spec)


def open_wheel(
    candidate: Candidate,
    settings: IndexSettings,
    *,
    transport: Transport | None = None,
    progress: Progress | None = None,
) -> Wheel:
    """The wheel of ``candidate``, read where it lies, through the cache that the settings name."""
    if candidate.path is not None:
        return LocalWheel(candidate.path)
    assert candidate.url is not None
    used = transport or Transport(settings)
    wheel = RemoteWheel(
        candidate.url,
        used,
        size=candidate.size,
        sha256=candidate.sha256,
        cache=open_cache(settings),
        progress=progress,
    )
    return wheel if transport is not None else wheel.hold(used)


def open_cache(settings: IndexSettings) -> WheelCache | None:
    """The cache that the settings name; None where they name none."""
    return WheelCache(settings.cache, limit=settings.cache_bytes) if settings.cache is not None else None


def _find_releases(
    specifier: SpecifierSet | None, settings: IndexSettings, transport: Transport
) -> tuple[Candidate, ...]:
    url = f"{settings.pypi_url}{PROJECT}/"
    reply = transport.fetch(url, accept=frozenset({200, 404}), headers={"Accept": ACCEPT})
    if reply.status == 404:
        raise NoSuchBuildError(
            f"the package index has no project {PROJECT}", where=redact(url), hints=("export PIP_INDEX_URL=URL",)
        )
    listed = parse_project_page(
        reply.body, content_type=reply.headers.get("content-type", ""), url=reply.url, project=PROJECT
    )
    ordered = sorted(listed, key=lambda candidate: (candidate.version, candidate.filename))
    wanted = _select(ordered, specifier)
    if not wanted:
        raise NoSuchBuildError(
            f"the package index has no wheel of {PROJECT} {specifier or ''}".rstrip(),
            where=redact(url),
            found=_newest_versions(ordered),
            hints=("name a version that exists, or a range such as pypi:>=0.26",),
        )
    return wanted


def _select(listed: Sequence[Candidate], specifier: SpecifierSet | None) -> tuple[Candidate, ...]:
    """By PEP 592, a yanked file only counts where its version is named exactly."""
    wanted = specifier if specifier is not None else SpecifierSet()
    exact = any(part.operator in ("==", "===") and not part.version.endswith(".*") for part in wanted)
    allowed = set(wanted.filter({candidate.version for candidate in listed}))
    return tuple(candidate for candidate in listed if candidate.version in allowed and (exact or not candidate.yanked))


def _newest_versions(listed: Sequence[Candidate]) -> str:
    versions = list(dict.fromkeys(str(candidate.version) for candidate in listed))
    return f"newest are {', '.join(versions[-5:])}" if versions else "no wheel at all"


def _find_files(path: Path) -> tuple[Candidate, ...]:
    if path.is_dir():
        found = [
            _file_candidate(file)
            for file in sorted(path.glob("*.whl"))
            if parse_wheel_name(file.name).project == PROJECT
        ]
    elif path.is_file():
        found = [_file_candidate(path)]
    else:
        raise CannotObtainError("there is no such file or folder", where=str(path))
    if not found:
        raise NoSuchBuildError(f"the folder holds no wheel of {PROJECT}", where=str(path))
    return tuple(sorted(found, key=lambda candidate: (candidate.version, candidate.filename)))


def _file_candidate(path: Path) -> Candidate:
    name = parse_wheel_name(path.name)
    return Candidate(
        filename=name.filename,
        version=name.version,
        path=path,
        size=path.stat().st_size,
        commit=commit_of(name.version),
        variant=variant_of(name.version),
    )


def _parse_range(text: str, where: str) -> SpecifierSet:
    try:
        return SpecifierSet(f"=={Version(text)}")
    except InvalidVersion:
        pass
    try:
        specifier = SpecifierSet(text)
    except InvalidSpecifier as error:
        raise UsageError("this is neither a version nor a range of versions", where=where) from error
    if not text.strip():
        raise UsageError(
            "a version or a range must follow the colon", where=where, hints=("say pypi:0.27.1 or pypi:>=0.26",)
        )
    return specifier


def _checked_commit(text: str, where: str) -> str:
    lowered = text.lower()
    if not 6 <= len(lowered) <= 40 or any(character not in "0123456789abcdef" for character in lowered):
        raise UsageError("a commit is 6 to 40 hexadecimal digits", where=where)
    return lowered
