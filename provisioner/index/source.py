"""Where a build's wheels are: releases on PyPI, commit builds and nightlies on the vLLM index, folders and files."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from provisioner.digests import Digest
from provisioner.errors import CannotObtainError, NoSuchBuildError, UsageError
from provisioner.index.builds import PROJECT, Asking, find_commit, find_nightly
from provisioner.index.cache import WheelCache, key_of_url
from provisioner.index.commits import Witnesses, resolve_commit
from provisioner.index.download import download_wheel
from provisioner.index.lazy import LocalWheel, RemoteWheel, Wheel
from provisioner.index.settings import VLLM_INDEX, IndexSettings
from provisioner.index.transport import Download, Progress, Transport
from provisioner.wheels.names import Candidate, Target, commit_of, parse_wheel_name, variant_of
from provisioner.wheels.simple import ACCEPT, parse_project_page
from provisioner.wheels.urls import redact, strip_credentials

__all__ = ["Candidate", "Found", "Spec", "candidates", "find_builds", "open_wheel", "parse_spec"]

_ASKERS = 8


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


@dataclass(frozen=True, kw_only=True)
class MissingBuild:
    """A commit of a list that has no build, and why."""

    commit: str
    error: NoSuchBuildError


@dataclass(frozen=True, kw_only=True)
class Found:
    """All wheels of the builds that a spec names, for any platform, oldest build first; and what is missing."""

    candidates: tuple[Candidate, ...]
    missing: tuple[MissingBuild, ...] = ()


def candidates(
    spec: Spec,
    settings: IndexSettings,
    *,
    transport: Transport | None = None,
    variant: str | None = None,
    target: Target | None = None,
    known_commits: Iterable[str] = (),
) -> tuple[Candidate, ...]:
    """The wheels that ``find_builds`` finds; at least one.

    Raises NoSuchBuildError where an index answers and has none of them, NetworkError where it does not answer.
    """
    found = find_builds(
        spec, settings, transport=transport, variant=variant, target=target, known_commits=known_commits
    )
    if not found.candidates and found.missing:
        raise found.missing[0].error
    return found.candidates


def find_builds(
    spec: Spec,
    settings: IndexSettings,
    *,
    transport: Transport | None = None,
    variant: str | None = None,
    target: Target | None = None,
    known_commits: Iterable[str] = (),
) -> Found:
    """The builds that ``spec`` names; of commit builds those in the folder of ``variant``.

    ``target`` allows the cache to answer for a full commit where it knows a wheel that fits; ``known_commits`` are full
    hashes that complete abbreviated ones. Commits of a list that have no build are told in ``missing``; all else is
    raised as ``candidates`` does.
    """
    if transport is None:
        with Transport(settings) as own:
            return find_builds(
                spec, settings, transport=own, variant=variant, target=target, known_commits=known_commits
            )
    asking = Asking(
        settings=settings,
        transport=transport,
        witnesses=Witnesses(settings),
        cache=open_cache(settings),
        variant=variant,
        target=target,
    )
    match spec:
        case ReleaseSpec(specifier=specifier):
            return Found(candidates=_find_releases(specifier, asking))
        case LocalSpec(path=path):
            return Found(candidates=_find_files(path))
        case NightlySpec():
            return Found(candidates=find_nightly(asking))
        case CommitSpec(commit=commit):
            full = resolve_commit(commit, settings, transport, known=known_commits)
            return Found(candidates=find_commit(full, asking))
        case CommitFileSpec(path=path):
            return _find_listed(path, asking, tuple(known_commits))
        case _:
            assert_never(spec)


def open_wheel(
    candidate: Candidate,
    settings: IndexSettings,
    *,
    transport: Transport | None = None,
    cache: WheelCache | None = None,
    progress: Progress | None = None,
) -> Wheel:
    """The wheel of ``candidate``, read where it lies, through the cache that the settings name.

    Who opens many wheels gives ``transport`` and ``cache``: connections are shared, and the cache is looked through for
    what to drop once, not for each wheel.
    """
    if candidate.path is not None:
        return LocalWheel(candidate.path)
    assert candidate.url is not None
    used = transport or Transport(settings)
    wheel = RemoteWheel(
        candidate.url,
        used,
        size=candidate.size,
        sha256=candidate.sha256,
        cache=cache or open_cache(settings),
        progress=progress,
    )
    return wheel if transport is not None else wheel.hold(used)


def fetch_wheel(
    candidate: Candidate, settings: IndexSettings, *, transport: Transport, progress: Progress | None = None
) -> Download:
    """The whole wheel as a file, hashed on the way; kept in the cache, which the settings must name.

    Raises HashMismatchError where the index told another digest, NetworkError where it does not arrive.
    """
    if candidate.path is not None:
        return Download(
            path=candidate.path,
            sha256=_digest_of_file(candidate.path),
            size=candidate.path.stat().st_size,
        )
    cache = open_cache(settings)
    assert cache is not None
    assert candidate.url is not None
    return download_wheel(
        candidate.url,
        transport,
        cache,
        filename=candidate.filename,
        sha256=candidate.sha256,
        size=candidate.size,
        progress=progress,
    )


def public_url(url: str, settings: IndexSettings) -> str:
    """The name that a file of the asked vLLM index has on the public one; what a lock spells, whoever made it.

    Raises CannotObtainError where the index links to a file that is not its own.
    """
    base = strip_credentials(settings.vllm_index)
    if not url.startswith(f"{base}/"):
        raise CannotObtainError("the index links to a file that is not its own", where=redact(base), found=redact(url))
    return VLLM_INDEX + url[len(base) :]


def mirror_url(url: str, settings: IndexSettings) -> str:
    """Where the file with the public name ``url`` lies on the vLLM index that is asked."""
    return settings.vllm_index + url[len(VLLM_INDEX) :] if url.startswith(f"{VLLM_INDEX}/") else url


def open_cache(settings: IndexSettings) -> WheelCache | None:
    """The cache that the settings name; None where they name none."""
    return WheelCache(settings.cache, limit=settings.cache_bytes) if settings.cache is not None else None


def find_releases(
    project: str, specifier: SpecifierSet | None, settings: IndexSettings, *, transport: Transport | None = None
) -> tuple[Candidate, ...]:
    """The wheels of any project on the user's package index; all stable ones where ``specifier`` is None.

    Raises as ``candidates`` does.
    """
    if transport is None:
        with Transport(settings) as own:
            return find_releases(project, specifier, settings, transport=own)
    asking = Asking(
        settings=settings,
        transport=transport,
        witnesses=Witnesses(settings),
        cache=open_cache(settings),
        project=canonicalize_name(project),
    )
    return _find_releases(specifier, asking)


def _find_releases(specifier: SpecifierSet | None, asking: Asking) -> tuple[Candidate, ...]:
    url = f"{asking.settings.pypi_url}{asking.project}/"
    wanted = _select(_read_release_page(url, asking, only=specifier), specifier)
    if not wanted:
        listed = _read_release_page(url, asking, only=None)
        raise NoSuchBuildError(
            f"the package index has no wheel of {asking.project}{specifier or ''}",
            where=redact(url),
            found=_newest_versions(listed),
            hints=("name a version that exists, or a range such as pypi:>=0.26",),
        )
    return wanted


def _read_release_page(url: str, asking: Asking, *, only: SpecifierSet | None) -> tuple[Candidate, ...]:
    found = _parse_release_page(url, asking, only)
    return tuple(sorted(found, key=lambda candidate: (candidate.version, candidate.filename)))


def _parse_release_page(url: str, asking: Asking, only: SpecifierSet | None) -> tuple[Candidate, ...]:
    key = key_of_url(url)
    entry = asking.cache.load("pages", key) if asking.cache is not None else None
    if entry is not None and entry.age < asking.settings.index_age:
        return parse_project_page(
            entry.data, content_type=entry.facts["kind"], url=entry.facts["url"], project=asking.project, only=only
        )
    reply = asking.transport.fetch(url, accept=frozenset({200, 404}), headers={"Accept": ACCEPT})
    if reply.status == 404:
        raise NoSuchBuildError(
            f"the package index has no project {asking.project}", where=redact(url), hints=("export PIP_INDEX_URL=URL",)
        )
    kind = reply.headers.get("content-type", "")
    found = parse_project_page(reply.body, content_type=kind, url=reply.url, project=asking.project, only=only)
    if asking.cache is not None:
        asking.cache.store("pages", key, {"kind": kind, "url": reply.url}, reply.body)
    return found


def _find_listed(path: Path, asking: Asking, known: tuple[str, ...]) -> Found:
    from concurrent.futures import ThreadPoolExecutor

    commits = read_commit_list(path)
    with ThreadPoolExecutor(_ASKERS, thread_name_prefix="commit") as pool:
        results = list(pool.map(lambda commit: _find_one(commit, asking, known), commits))
    return Found(
        candidates=tuple(candidate for result in results if isinstance(result, tuple) for candidate in result),
        missing=tuple(result for result in results if isinstance(result, MissingBuild)),
    )


def _find_one(commit: str, asking: Asking, known: tuple[str, ...]) -> tuple[Candidate, ...] | MissingBuild:
    try:
        return find_commit(resolve_commit(commit, asking.settings, asking.transport, known=known), asking)
    except NoSuchBuildError as error:
        return MissingBuild(commit=commit, error=error)


def read_commit_list(path: Path) -> tuple[str, ...]:
    """The commits in a file: the first word of each line; blank lines and comments do not count.

    Raises CannotObtainError where the file cannot be read, UsageError, with the line, where a word is no commit.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CannotObtainError("the list of commits cannot be read", where=str(path), found=str(error)) from error
    words = [(number, line.partition("#")[0].split()) for number, line in enumerate(text.splitlines(), start=1)]
    commits = tuple(_checked_commit(parts[0], f"{path}, line {number}") for number, parts in words if parts)
    if not commits:
        raise UsageError("the list names no commit", where=str(path))
    return tuple(dict.fromkeys(commits))


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


def _digest_of_file(path: Path) -> Digest:
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
