"""Making a lock: find the wheel, resolve its dependencies, read what the build is, without installing anything."""

import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from provisioner.digests import digest_of
from provisioner.environment import uv as uv_room
from provisioner.environment.lock import (
    PYTHONS,
    Lock,
    LockedBuild,
    keep_platform,
    marker_environment,
    parse_requirements,
)
from provisioner.errors import CannotObtainError, NoSuchBuildError, UsageError
from provisioner.progress import Reporter
from provisioner.provisioning.checks import parse_build
from provisioner.recipe import Build, CommitBuild, Recipe, ReleaseBuild
from provisioner.wheels.lazy import Wheel
from provisioner.wheels.names import Candidate, Target, choose
from provisioner.wheels.settings import IndexSettings
from provisioner.wheels.source import CommitSpec, ReleaseSpec, Spec, candidates, open_wheel
from provisioner.wheels.transport import Transport

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class LockRequest:
    """What to lock. ``touched`` tells, for a version, which files the recipe's series touches."""

    recipe: Recipe
    build: Build
    exclude_newer: datetime | None
    touched: Callable[[Version], Iterable[str]]


def make_lock(request: LockRequest, settings: IndexSettings, uv: uv_room.Uv, reporter: Reporter) -> Lock:
    """Resolve and describe a build.

    Raises NoSuchBuildError, NoCompatibleWheelError, NetworkError or ResolutionError.
    """
    with Transport(settings) as transport:
        reporter.stage(f"find the wheel of {request.recipe.distribution} {request.build.version}")
        candidate = find_wheel(request.build, settings, transport)
        wheel = open_wheel(candidate, settings, transport=transport)
        reporter.stage("read what the build is")
        described = describe_wheel(request, candidate, wheel)
    reporter.stage("resolve its dependencies")
    moment = resolution_time(request, candidate)
    requirements = _resolve(request, described, uv, moment)
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
            url=candidate.url if isinstance(request.build, CommitBuild) else None,
            torch=torch,
            torch_cuda=request.recipe.expect.torch_cuda,
        ),
        files=described.files,
        pins=pins,
        requirements=requirements,
    )


def find_wheel(build: Build, settings: IndexSettings, transport: Transport) -> Candidate:
    """The wheel of ``build`` for Linux x86_64.

    Raises NoSuchBuildError or NoCompatibleWheelError, with a reason for every file that was not chosen.
    """
    spec, variant = _spec_of(build)
    found = candidates(spec, settings, transport=transport, variant=variant)
    return choose(found, Target(), variant=variant).chosen


@dataclass(frozen=True, kw_only=True)
class Described:
    """What was read from the wheel itself."""

    version: str
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
        version=str(candidate.version),
        commit=expected or text.commit,
        record=digest_of(wheel.record_text().encode()),
        files={path: digest for path, digest in shipped.items() if digest is not None},
    )


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
    """The recipe's own build, or the release ``version`` in its place."""
    return recipe.build if version is None else ReleaseBuild(version=Version(version), exclude_newer=None)


def _spec_of(build: Build) -> tuple[Spec, str | None]:
    if isinstance(build, CommitBuild):
        return CommitSpec(commit=build.commit), build.variant
    return ReleaseSpec(specifier=SpecifierSet(f"=={build.version}")), None


def _resolve(request: LockRequest, described: Described, uv: uv_room.Uv, moment: datetime | None) -> str:
    with tempfile.TemporaryDirectory(prefix="provision-lock-") as folder:
        output = Path(folder) / "requirements.txt"
        requirement = f"{request.recipe.distribution}=={described.version}\n"
        uv_room.compile_requirements(uv, requirement, output, python=PYTHONS[0], exclude_newer=moment)
        text = output.read_text(encoding="utf-8")
    return keep_platform(text, environments=[marker_environment(python) for python in PYTHONS])


def export_lock(lock: Lock, output: Path, uv: uv_room.Uv) -> None:
    """Write the lock's pins as a PEP 751 file.

    Raises UsageError for a name that the standard does not allow; ResolutionError or NetworkError.
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
        uv_room.export_pylock(uv, requirements, output, python=PYTHONS[0], exclude_newer=lock.exclude_newer)


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
