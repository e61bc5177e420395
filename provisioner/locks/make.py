"""Making a lock: find the wheel, resolve its dependencies, read what the build is, without installing anything."""

import re
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from provisioner.digests import digest_of
from provisioner.documents.lock import (
    PYTHONS,
    Lock,
    LockedBuild,
    LockScope,
    keep_platform,
    marker_environment,
    parse_requirements,
)
from provisioner.documents.recipe import Build, CommitBuild, Recipe, ReleaseBuild
from provisioner.environment import uv as uv_room
from provisioner.environment.integrity import parse_build
from provisioner.errors import CannotObtainError, NoSuchBuildError, UsageError
from provisioner.files import write_output
from provisioner.index.lazy import LocalWheel, Wheel
from provisioner.index.settings import IndexSettings
from provisioner.index.source import CommitSpec, ReleaseSpec, Spec, candidates, fetch_wheel, open_wheel, public_url
from provisioner.index.transport import Transport
from provisioner.progress import Reporter
from provisioner.wheels.names import Candidate, Target, choose, metadata_version

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class LockRequest:
    """What to lock. ``touched`` tells, for a version, which files the recipe's series touches.

    ``scope`` says whether the dependencies are resolved too; ``known`` is the wheel that an earlier lock insists on.
    """

    recipe: Recipe
    build: Build
    exclude_newer: datetime | None
    touched: Callable[[Version], Iterable[str]]
    scope: LockScope = LockScope.COMPLETE
    known: LockedBuild | None = None


def make_lock(request: LockRequest, settings: IndexSettings, uv: uv_room.Uv, reporter: Reporter) -> Lock:
    """Resolve and describe a build. A wheel whose index tells no digest is downloaded, into the cache, and hashed.

    Raises NoSuchBuildError, NoCompatibleWheelError, HashMismatchError, NetworkError or ResolutionError.
    """
    with ExitStack() as held:
        transport = held.enter_context(Transport(settings))
        reporter.stage(f"find the wheel of {request.recipe.distribution} {request.build.version}")
        candidate = _insist(find_wheel(request.build, settings, transport), request, settings)
        if candidate.sha256 is None or candidate.size is None or request.known is not None:
            candidate = held.enter_context(_downloaded(candidate, settings, transport, reporter))
        wheel = open_wheel(candidate, settings, transport=transport)
        held.callback(wheel.close)
        reporter.stage("read what the build is")
        described = describe_wheel(request, candidate, wheel)
        _warn_of_versions(candidate, wheel, reporter)
        moment = resolution_time(request, candidate)
        reporter.stage("resolve its dependencies")
        requirements = _resolve(request, candidate, settings, uv, moment)
    pins = parse_requirements(requirements, where=request.recipe.name)
    torch = next((pin.version for pin in pins if pin.name == "torch"), None)
    return Lock(
        recipe=request.recipe.name,
        python=str(request.recipe.python.supported),
        uv=uv_room.read_version(uv),
        exclude_newer=moment,
        build=LockedBuild(
            distribution=request.recipe.distribution,
            version=candidate.version,
            filename=candidate.filename,
            size=_known(candidate.size, "size", candidate),
            sha256=_known(candidate.sha256, "SHA-256", candidate),
            record=described.record,
            commit=described.commit,
            variant=candidate.variant,
            url=_locked_url(request, candidate, settings),
            torch=torch,
            torch_cuda=request.recipe.expect.torch_cuda,
        ),
        files=described.files,
        pins=pins,
        requirements=requirements,
        complete=request.scope is LockScope.COMPLETE,
    )


def find_wheel(build: Build, settings: IndexSettings, transport: Transport) -> Candidate:
    """The wheel of ``build`` for Linux x86_64.

    Raises NoSuchBuildError or NoCompatibleWheelError, with a reason for every file that was not chosen.
    """
    spec, variant = _spec_of(build)
    found = candidates(spec, settings, transport=transport, variant=variant, target=Target())
    chosen = choose(found, Target(), variant=variant).chosen
    if chosen.version.public != build.version.public:
        raise NoSuchBuildError(
            "the build is of another version",
            where=chosen.filename,
            expected=str(build.version),
            found=str(chosen.version),
        )
    return chosen


@dataclass(frozen=True, kw_only=True)
class Described:
    """What was read from the wheel itself."""

    commit: str
    record: str
    files: dict[str, str]


def describe_wheel(request: LockRequest, candidate: Candidate, wheel: Wheel) -> Described:
    """Commit, RECORD digest and the digests of the touched files, read from the wheel.

    Raises CannotObtainError where the wheel is not the build that was asked for.
    """
    record = wheel.record()
    package = request.recipe.distribution.replace("-", "_")
    text = parse_build(wheel.read(f"{package}/_version.py").decode())
    expected = request.build.commit if isinstance(request.build, CommitBuild) else None
    if text.commit is None or (expected is not None and not expected.startswith(text.commit)):
        raise NoSuchBuildError(
            "the wheel is of another commit", where=candidate.filename, expected=expected, found=text.commit
        )
    shipped = {path: record.digest(path) for path in request.touched(candidate.version)}
    return Described(
        commit=expected or text.commit,
        record=digest_of(wheel.record_text().encode()),
        files={path: digest for path, digest in shipped.items() if digest is not None},
    )


def _warn_of_versions(candidate: Candidate, wheel: Wheel, reporter: Reporter) -> None:
    """An installer that compares the two takes such a wheel for another one at every run."""
    told = metadata_version(wheel.metadata_text())
    if told != candidate.version:
        reporter.warn(f"{candidate.filename} says in its METADATA that it is version {told}")


def resolution_time(request: LockRequest, candidate: Candidate) -> datetime | None:
    """The date after which nothing is taken: the request's, the recipe's for its own build, or the wheel's next day.

    A fixed date makes the same resolution come out whenever it is done.
    """
    if request.exclude_newer is not None:
        return request.exclude_newer
    if request.build == request.recipe.build:
        return request.build.exclude_newer
    if candidate.upload_time is None:
        return None
    day = candidate.upload_time.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return day + timedelta(days=2)


def build_of(recipe: Recipe, *, version: str | None) -> Build:
    """The recipe's own build, or the release ``version`` in its place.

    Raises UsageError for a text that is no version.
    """
    if version is None:
        return recipe.build
    try:
        return ReleaseBuild(version=Version(version), exclude_newer=None)
    except InvalidVersion:
        raise UsageError("not a version", where=version, hints=("say one such as 0.28.0",)) from None


def find_build(recipe: Recipe, spec: Spec, settings: IndexSettings) -> Build:
    """The newest build that ``spec`` names, in the recipe's variant, for Linux x86_64.

    Raises NoSuchBuildError, NoCompatibleWheelError or NetworkError.
    """
    own = recipe.build
    variant = own.variant if isinstance(own, CommitBuild) else None
    known = (own.commit,) if isinstance(own, CommitBuild) else ()
    found = candidates(spec, settings, variant=variant, known_commits=known)
    chosen = choose(found, Target(), variant=variant).chosen
    if isinstance(spec, ReleaseSpec):
        return ReleaseBuild(version=chosen.version, exclude_newer=None)
    commit = _known(chosen.commit, "commit", chosen)
    if isinstance(own, CommitBuild) and own.commit == commit:
        return own
    return CommitBuild(version=Version(chosen.version.public), commit=commit, variant=variant, exclude_newer=None)


def _insist(candidate: Candidate, request: LockRequest, settings: IndexSettings) -> Candidate:
    """With the digest of the wheel that an earlier lock names, if this is that wheel."""
    known = request.known
    if known is None or known.filename != candidate.filename or known.url != _locked_url(request, candidate, settings):
        return candidate
    return replace(candidate, sha256=known.sha256, size=known.size)


@contextmanager
def _downloaded(
    candidate: Candidate, settings: IndexSettings, transport: Transport, reporter: Reporter
) -> Iterator[Candidate]:
    """The candidate as a file, with its digest and size, and the day on which it was built."""
    reporter.stage(f"download {candidate.filename}")

    def show(done: int, total: int | None) -> None:
        reporter.amount(done, total, "bytes")

    with ExitStack() as held:
        if settings.cache is None:
            folder = held.enter_context(tempfile.TemporaryDirectory(prefix="provision-lock-"))
            settings = replace(settings, cache=Path(folder))
        got = fetch_wheel(candidate, settings, transport=transport, progress=show)
        yield replace(
            candidate,
            path=got.path,
            sha256=got.sha256,
            size=got.size,
            upload_time=candidate.upload_time or _built_time(got.path),
        )


def _built_time(path: Path) -> datetime | None:
    """When the wheel was packed, by its own members; an index of commits tells no upload time."""
    with LocalWheel(path) as wheel:
        wheel.names()  # says better than zipfile what is wrong with a file that is no wheel
    with zipfile.ZipFile(path) as archive:
        moments = [info.date_time for info in archive.infolist() if ".dist-info/" in info.filename]
    newest = max(moments, default=(1980, 1, 1, 0, 0, 0))
    return datetime(*newest, tzinfo=UTC) if newest[0] > 1980 else None


def _locked_url(request: LockRequest, candidate: Candidate, settings: IndexSettings) -> str | None:
    """What the lock spells for a commit build; None for a release, which any package index has."""
    if not isinstance(request.build, CommitBuild) or candidate.url is None:
        return None
    return public_url(candidate.url, settings)


def _spec_of(build: Build) -> tuple[Spec, str | None]:
    if isinstance(build, CommitBuild):
        return CommitSpec(commit=build.commit), build.variant
    return ReleaseSpec(specifier=SpecifierSet(f"=={build.version}")), None


def _resolve(
    request: LockRequest, candidate: Candidate, settings: IndexSettings, uv: uv_room.Uv, moment: datetime | None
) -> str:
    """Hashed requirements. The wheel of a commit build is read where it was downloaded; its public URL is spelled."""
    distribution, url = request.recipe.distribution, _locked_url(request, candidate, settings)
    if request.scope is LockScope.WHEEL_ALONE:
        named = f"{distribution} @ {url}" if url else f"{distribution}=={candidate.version}"
        return f"{named} \\\n    --hash=sha256:{_known(candidate.sha256, 'SHA-256', candidate)}\n"
    here = candidate.path.as_uri() if url and candidate.path else None
    requirement = f"{distribution} @ {here}\n" if here else f"{distribution}=={candidate.version}\n"
    with tempfile.TemporaryDirectory(prefix="provision-lock-") as folder:
        output = Path(folder) / "requirements.txt"
        uv_room.compile_requirements(uv, requirement, output, python=PYTHONS[0], exclude_newer=moment)
        text = output.read_text(encoding="utf-8")
    if here and url:
        text = text.replace(here, url)
    return keep_platform(text, environments=[marker_environment(python) for python in PYTHONS])


def export_lock(lock: Lock, output: Path, uv: uv_room.Uv) -> None:
    """Write the lock's pins as a PEP 751 file.

    Raises UsageError for a name that the standard does not allow; ResolutionError or NetworkError; CannotObtainError
    where it cannot be written.
    """
    if not re.fullmatch(r"pylock(\.[^.]+)?\.toml", output.name):
        raise UsageError(
            "not the name of a PEP 751 file",
            where=str(output),
            expected="pylock.toml or pylock.NAME.toml, with no dot in NAME",
        )
    with tempfile.TemporaryDirectory(prefix="provision-lock-") as folder:
        requirements = Path(folder) / "requirements.in"
        requirements.write_text(lock.requirements, encoding="utf-8")
        made = Path(folder) / output.name
        uv_room.export_pylock(uv, requirements, made, python=PYTHONS[0], exclude_newer=lock.exclude_newer)
        write_output(output, made.read_bytes())


def changed_pins(former: Lock | None, lock: Lock) -> tuple[tuple[str, str | None, str | None], ...]:
    """Name, old and new requirement of every package that differs between two locks, sorted by name."""
    old = _pin_texts(former.requirements if former else "")
    new = _pin_texts(lock.requirements)
    return tuple((name, old.get(name), new.get(name)) for name in sorted(old | new) if old.get(name) != new.get(name))


def _pin_texts(requirements: str) -> dict[str, str]:
    texts: dict[str, list[str]] = {}
    for pin in parse_requirements(requirements, where="lock") if requirements else ():
        requirement = Requirement(str(pin.requirement))
        texts.setdefault(canonicalize_name(requirement.name), []).append(str(pin.version or requirement.url))
    return {name: ", ".join(values) for name, values in texts.items()}


def _known(value: _T | None, what: str, candidate: Candidate) -> _T:
    if value is None:
        raise CannotObtainError(f"the index does not say the {what} of the wheel", where=candidate.filename)
    return value
