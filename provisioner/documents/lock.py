"""A lock is a pair of files: hashed requirements without any host, and what the build is. Pure."""

import functools
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from datetime import UTC, datetime
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name
from packaging.version import Version

from provisioner.digests import Digest, digest_of
from provisioner.errors import InvalidLockError
from provisioner.loading import load_toml
from provisioner.records import dataclass
from provisioner.tables import Table

if TYPE_CHECKING:
    from packaging.markers import Marker
    from packaging.requirements import Requirement

SCHEMA = 1
PYTHONS = ("3.11", "3.12", "3.13")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_DIGEST = re.compile(r"[0-9a-f]{64}")
# What uv writes for a package of an index. Anything else is read by packaging's parser, which takes 20 times as long.
_PLAIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s=;,*]+)(?: ; (.+))?")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_Value = str | int | datetime | None


class LockScope(StrEnum):
    """What a lock holds."""

    COMPLETE = "the wheel and its dependencies"
    WHEEL_ALONE = "the wheel alone"


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One requirement of the lock: exactly one version (or one URL) and the digests that its files may have."""

    name: str
    text: str
    version: Version | None
    marker: "Marker | None"
    hashes: tuple[Digest, ...] = field(repr=False)

    @property
    def requirement(self) -> "Requirement":
        """The whole requirement as packaging reads it."""
        from packaging.requirements import Requirement

        return Requirement(self.text)

    def wanted(self, environment: Mapping[str, str]) -> bool:
        """Whether an environment with these marker values installs it."""
        return self.marker is None or self.marker.evaluate(dict(environment))


@dataclass(frozen=True, kw_only=True)
class LockedBuild:
    """The wheel that the environment stands on. Sizes in bytes; ``url`` is None for a release from the user's index.

    ``record`` is the digest of the wheel's RECORD. ``torch_cuda`` is the CUDA version of the locked torch, as text.
    """

    distribution: str
    version: Version
    filename: str
    size: int
    sha256: Digest
    record: Digest
    commit: str
    variant: str | None
    url: str | None
    torch: Version | None
    torch_cuda: str | None


@dataclass(frozen=True, kw_only=True)
class Lock:
    """Both files of a lock. ``files`` holds the digests, as shipped, of the files that the patch series touches.

    A lock that is not ``complete`` holds the wheel alone: a run without dependencies made it, and only such a run may
    use it. The next full run resolves the dependencies and insists on the same wheel.
    """

    recipe: str
    python: str
    uv: str
    exclude_newer: datetime | None
    build: LockedBuild
    files: Mapping[str, Digest] = field(repr=False)
    pins: tuple[Pin, ...] = field(repr=False)
    requirements: str = field(repr=False)
    complete: bool = True

    @property
    def digest(self) -> Digest:
        """Digest of both files together; two locks with the same digest install the same bytes."""
        return digest_of((print_facts(self) + self.requirements).encode())

    def pin(self, name: str) -> Pin | None:
        """The pin of a distribution, or None."""
        wanted = canonicalize_name(name)
        return next((pin for pin in self.pins if pin.name == wanted), None)


def parse_lock(facts: str, requirements: str, *, where: str) -> Lock:
    """Parse the two texts of a lock and refuse a pair that contradicts itself.

    Raises InvalidLockError with an address.
    """
    try:
        values = load_toml(facts)
    except tomllib.TOMLDecodeError as error:
        raise InvalidLockError(f"not TOML: {error}", where=where) from error
    table = Table(values, where=where, error=InvalidLockError)
    if table.take("schema", int) != SCHEMA:
        raise table.fail("unknown lock schema", "schema", expected=str(SCHEMA))
    promised = _take_digest(table, "requirements-sha256")
    if promised != digest_of(requirements.encode()):
        raise table.fail(
            "the requirements beside it are not the ones that were locked",
            "requirements-sha256",
            expected=promised,
            found=digest_of(requirements.encode()),
        )
    moment = table.take_optional("exclude-newer", datetime)
    lock = Lock(
        recipe=table.take("recipe", str),
        python=table.take("python", str),
        uv=table.take("uv", str),
        exclude_newer=moment.astimezone(UTC) if moment else None,
        build=_parse_build(table.take_table("build")),
        files=MappingProxyType(table.take_strings("files")),
        pins=parse_requirements(requirements, where=f"{where}: requirements"),
        requirements=requirements,
        complete=table.take_or("complete", bool, True),
    )
    table.close()
    _refuse_contradictions(lock, where=where)
    return lock


def print_facts(lock: Lock) -> str:
    """The TOML text of what the build is; deterministic, and read back by :func:`parse_lock`."""
    # Printed by hand, since every run needs the digest of this text: tomlkit alone takes longer to load than to do it.
    build = lock.build
    head: dict[str, _Value] = {
        "schema": SCHEMA,
        "recipe": lock.recipe,
        "python": lock.python,
        "uv": lock.uv,
        "exclude-newer": lock.exclude_newer,
        "complete": None if lock.complete else False,
        "requirements-sha256": digest_of(lock.requirements.encode()),
    }
    section: dict[str, _Value] = {
        "distribution": build.distribution,
        "version": str(build.version),
        "filename": build.filename,
        "size": build.size,
        "sha256": build.sha256,
        "record-sha256": build.record,
        "commit": build.commit,
        "variant": build.variant,
        "url": build.url,
        "torch": None if build.torch is None else str(build.torch),
        "torch-cuda": build.torch_cuda,
    }
    files: dict[str, _Value] = dict(sorted(lock.files.items()))
    return f"{_print_table(head)}\n[build]\n{_print_table(section)}\n[files]\n{_print_table(files)}"


def parse_requirements(text: str, *, where: str) -> tuple[Pin, ...]:
    """The pins of hashed requirements, in their order.

    Raises InvalidLockError for a line that is not a requirement, a requirement without hashes or without exactly one
    version, a ``file:`` URL, a CPU build of torch, or an option (options name hosts).
    """
    return tuple(_parse_pin(line, where=f"{where}, line {number}") for number, line in _logical_lines(text))


def keep_platform(text: str, *, environments: Sequence[Mapping[str, str]]) -> str:
    """The requirements that at least one of the marker ``environments`` installs, unchanged and in order."""
    from packaging.requirements import Requirement

    kept = []
    for _, line in _logical_lines(text, keep_breaks=True):
        requirement = Requirement(line.partition("--hash")[0].replace("\\\n", " ").strip())
        if requirement.marker is None or any(requirement.marker.evaluate(dict(values)) for values in environments):
            kept.append(line)
    return "".join(f"{line}\n" for line in kept)


def select_pin(lock: Lock, distribution: str) -> str:
    """The requirements text of one distribution alone.

    Raises InvalidLockError where the lock does not hold it.
    """
    for _, line in _logical_lines(lock.requirements, keep_breaks=True):
        if canonicalize_name(re.split(r"[\s=@;\[]", line, maxsplit=1)[0]) == canonicalize_name(distribution):
            return line + "\n"
    raise InvalidLockError(f"the lock does not hold {distribution}", where=lock.recipe)


def marker_environment(python: str) -> dict[str, str]:
    """Marker values of CPython ``python`` (``3.12`` or ``3.12.1``) on Linux x86_64, the platform of every lock."""
    major_minor = ".".join(python.split(".")[:2])
    full = python if python.count(".") == 2 else f"{python}.0"
    return {
        "implementation_name": "cpython",
        "implementation_version": full,
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": full,
        "python_version": major_minor,
        "sys_platform": "linux",
        "extra": "",
    }


def _parse_build(table: Table) -> LockedBuild:
    torch = table.take_optional("torch", str)
    build = LockedBuild(
        distribution=canonicalize_name(table.take("distribution", str)),
        version=Version(table.take("version", str)),
        filename=table.take("filename", str),
        size=table.take("size", int),
        sha256=_take_digest(table, "sha256"),
        record=_take_digest(table, "record-sha256"),
        commit=table.take("commit", str),
        variant=table.take_optional("variant", str),
        url=table.take_optional("url", str),
        torch=None if torch is None else Version(torch),
        torch_cuda=table.take_optional("torch-cuda", str),
    )
    table.close()
    return build


def _take_digest(table: Table, key: str) -> Digest:
    text = table.take(key, str)
    if not _DIGEST.fullmatch(text):
        raise table.fail("not a SHA-256", key, found=text)
    return text


def _print_table(values: Mapping[str, _Value]) -> str:
    """Lines of TOML; a key without a value is left out."""
    return "".join(f"{_print_key(key)} = {_print_value(it)}\n" for key, it in values.items() if it is not None)


def _print_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _print_string(key)


def _print_value(value: str | int | datetime) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case datetime():
            return value.isoformat().replace("+00:00", "Z")
        case str():
            return _print_string(value)


def _print_string(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _logical_lines(text: str, *, keep_breaks: bool = False) -> Iterable[tuple[int, str]]:
    """Lines with their continuations joined, comments and blanks left out, each with its first line number."""
    gathered: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if not gathered:
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            start = number
        gathered.append(line)
        if not line.endswith("\\"):
            yield start, "\n".join(gathered) if keep_breaks else " ".join(part.rstrip("\\ ") for part in gathered)
            gathered = []
    if gathered:
        yield start, "\n".join(gathered)


def _parse_pin(line: str, *, where: str) -> Pin:
    if line.startswith("-"):
        raise InvalidLockError("options have no place in a lock", where=where, found=line.split()[0])
    hashes = tuple(_HASH.findall(line))
    text = line.partition("--hash")[0].strip()
    pin = _parse_plain(text, hashes) or _parse_any(text, hashes, where=where)
    if not hashes:
        raise InvalidLockError("a requirement without a hash", where=where, found=text)
    _refuse_unlockable(pin, where=where)
    return pin


def _parse_plain(text: str, hashes: tuple[Digest, ...]) -> Pin | None:
    """A requirement of the usual form; None where it is of another one or says something that cannot be."""
    plain = _PLAIN.fullmatch(text)
    if plain is None:
        return None
    name, version, marker = plain.groups()
    try:
        return Pin(
            name=canonicalize_name(name),
            text=text,
            version=Version(version),
            marker=_parse_marker(marker) if marker is not None else None,
            hashes=hashes,
        )
    except ValueError:  # of which packaging's errors are kinds
        return None


@functools.lru_cache
def _parse_marker(text: str) -> "Marker":
    # Most pins share one of a few markers.
    from packaging.markers import Marker

    return Marker(text)


def _parse_any(text: str, hashes: tuple[Digest, ...], *, where: str) -> Pin:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise InvalidLockError(f"not a requirement: {error}", where=where, found=text) from error
    return Pin(
        name=canonicalize_name(requirement.name),
        text=text,
        version=_exact_version(requirement, where=where),
        marker=requirement.marker,
        hashes=hashes,
    )


def _exact_version(requirement: "Requirement", *, where: str) -> Version | None:
    if requirement.url is not None:
        return None
    specifiers = list(requirement.specifier)
    if len(specifiers) != 1 or specifiers[0].operator != "==" or specifiers[0].version.endswith("*"):
        raise InvalidLockError("a requirement must name exactly one version", where=where, found=str(requirement))
    return Version(specifiers[0].version)


def _refuse_unlockable(pin: Pin, *, where: str) -> None:
    url = pin.requirement.url if pin.version is None else None
    if url is not None and not url.startswith("https://"):
        raise InvalidLockError("a lock takes packages from an index or an https URL only", where=where, found=url)
    if pin.name == "torch" and pin.version is not None and pin.version.local == "cpu":
        raise InvalidLockError("a CPU build of torch", where=where, found=str(pin.version))


def _refuse_contradictions(lock: Lock, *, where: str) -> None:
    build = lock.build
    pin = lock.pin(build.distribution)
    if pin is None:
        raise InvalidLockError(f"the requirements do not hold {build.distribution}", where=where)
    if pin.version is not None and pin.version != build.version:
        raise InvalidLockError(
            "requirements and build disagree", where=where, expected=str(build.version), found=str(pin.version)
        )
    if build.sha256 not in pin.hashes:
        raise InvalidLockError(
            "the wheel's digest is not among the requirement's hashes", where=where, found=build.sha256
        )
