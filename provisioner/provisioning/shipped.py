"""A wheel that is not installed, as a tree of files: a file on disk, or a build on the user's index."""

from pathlib import Path

from packaging.utils import canonicalize_name

from provisioner.errors import CannotObtainError, UsageError
from provisioner.provisioning.judging import ShippedTree
from provisioner.wheels.lazy import LocalWheel, Wheel
from provisioner.wheels.names import Target, choose, parse_wheel_name
from provisioner.wheels.settings import IndexSettings
from provisioner.wheels.source import candidates, open_wheel, parse_spec


def open_shipped(spec: str, distribution: str, settings: IndexSettings) -> ShippedTree:
    """The newest build that ``spec`` names, as its wheel's files. The caller closes the wheel.

    Raises UsageError for a wheel of another distribution; CannotObtainError where it is not to be had.
    """
    wheel = _open_file(Path(spec)) if spec.endswith(".whl") else _open_build(spec, distribution, settings)
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


def _open_file(path: Path) -> Wheel:
    if not path.is_file():
        raise CannotObtainError("there is no such wheel", where=str(path))
    return LocalWheel(path)


def _open_build(spec: str, distribution: str, settings: IndexSettings) -> Wheel:
    if canonicalize_name(distribution) != "vllm":
        raise UsageError(
            "only builds of vllm are looked up by version", where=spec, hints=("give the path of a .whl file",)
        )
    found = candidates(parse_spec(spec), settings)
    return open_wheel(choose(found, Target()).chosen, settings)
