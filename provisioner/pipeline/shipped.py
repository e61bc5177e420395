"""A wheel that is not installed, as a tree of files: a file on disk, or a build on the user's index."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from packaging.utils import canonicalize_name

from provisioner.errors import CannotObtainError, UsageError
from provisioner.index.lazy import LocalWheel, Wheel
from provisioner.index.settings import IndexSettings
from provisioner.index.source import (
    LocalSpec,
    ReleaseSpec,
    candidates,
    fetch_wheel,
    find_releases,
    open_wheel,
    parse_spec,
)
from provisioner.index.transport import Transport
from provisioner.pipeline.evaluate import ShippedTree, cut_against
from provisioner.progress import Reporter
from provisioner.series.model import Series
from provisioner.wheels.names import Candidate, Target, parse_wheel_name, sift


def open_shipped(spec: str, distribution: str, settings: IndexSettings) -> ShippedTree:
    """The newest build that ``spec`` names, as its wheel's files. The caller closes the wheel.

    Raises UsageError for a wheel of another distribution; CannotObtainError where it is not to be had.
    """
    wheel = (
        _open_file(Path(spec))
        if spec.endswith(".whl")
        else open_wheel(_find_build(spec, distribution, settings), settings)
    )
    name = parse_wheel_name(wheel.filename)
    if canonicalize_name(name.project) != canonicalize_name(distribution):
        wheel.close()
        raise UsageError(
            "the wheel is of another distribution",
            where=wheel.filename,
            expected=distribution,
            found=name.project,
            hints=(f"--package {name.project}",),
        )
    return ShippedTree(distribution=distribution, version=name.version, wheel=wheel)


def cut_against_release(series: Series, release: str, distribution: str, settings: IndexSettings) -> Series:
    """As :func:`cut_against`; ``release`` is a version, or the path of a .whl file. Raises as :func:`open_shipped`."""
    spec = release if release.endswith(".whl") else f"pypi:{release}"
    with closing(open_shipped(spec, distribution, settings).wheel) as wheel:
        return cut_against(series, wheel)


def _open_file(path: Path) -> Wheel:
    if not path.is_file():
        raise CannotObtainError("there is no such wheel", where=str(path))
    return LocalWheel(path)


def fetch_shipped(spec: str, distribution: str, settings: IndexSettings, reporter: Reporter) -> Path:
    """The file of the newest build that ``spec`` names, downloaded where it lies on an index.

    Raises UsageError for a spec that means nothing; CannotObtainError where it is not to be had.
    """
    path = Path(spec)
    if spec.endswith(".whl"):
        if not path.is_file():
            raise CannotObtainError("there is no such wheel", where=spec)
        return path
    with Transport(settings) as transport:
        return fetch_wheel(
            _find_build(spec, distribution, settings),
            settings,
            transport=transport,
            progress=lambda done, total: reporter.amount(done, total, "bytes"),
        ).path


def _find_build(spec: str, distribution: str, settings: IndexSettings) -> Candidate:
    """Sources are the same in the wheels of all variants and platforms, so any will do."""
    meant = parse_spec(spec)
    match meant:
        case ReleaseSpec(specifier=specifier):
            found = find_releases(distribution, specifier, settings)
        case LocalSpec():
            found = candidates(meant, settings)
        case _ if canonicalize_name(distribution) == "vllm":
            found = candidates(meant, settings)
        case _:
            raise UsageError(
                "only vllm is built by commit", where=spec, hints=("say pypi:VERSION, or the path of a .whl file",)
            )
    return _choose_any(found)


def _choose_any(found: Sequence[Candidate]) -> Candidate:
    """The newest build; of its files the one for this platform where there is one."""
    newest = max(candidate.version for candidate in found)
    same = [candidate for candidate in found if candidate.version == newest]
    fitting, _ = sift(same, Target())
    return (*fitting, *same)[0]
