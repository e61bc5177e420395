"""What a bundle holds, as JSON at its beginning. Pure."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath

from packaging.version import InvalidVersion, Version

from provisioner.digests import Digest
from provisioner.errors import InvalidBundleError
from provisioner.tables import Table, open_json

SCHEMA = "provision/bundle/1"
_VERSIONED = re.compile(r"provision/bundle/([1-9]\d*)")
FILE_NAME = "bundle.json"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PYTHON = re.compile(r"3\.\d+")


@dataclass(frozen=True, kw_only=True)
class BundledFile:
    """One member: its path, in POSIX form and without ``..``, its digest and its size in bytes."""

    path: str
    sha256: Digest
    size: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that a bundle says of itself.

    ``python`` is the minor version (``3.12``) that the wheels were chosen for. ``bare`` tells that the dependencies
    were left out; ``tool`` is the version of the tool in it, None where it was left out. ``files`` are sorted by path.
    """

    recipe: str
    recipe_digest: Digest
    lock_digest: Digest
    distribution: str
    version: Version
    python: str
    bare: bool
    tool: str | None
    files: tuple[BundledFile, ...]

    def under(self, folder: str) -> tuple[BundledFile, ...]:
        """The members of a folder, at any depth."""
        return tuple(file for file in self.files if file.path.startswith(f"{folder}/"))


def print_manifest(manifest: Manifest) -> str:
    """The JSON text; inverse of :func:`parse_manifest`."""
    values = {"schema": SCHEMA, **asdict(manifest), "version": str(manifest.version)}
    return json.dumps(values, indent=1, sort_keys=True) + "\n"


def parse_manifest(text: str, *, where: str) -> Manifest:
    """Parse a manifest.

    Raises InvalidBundleError, with an address, for anything that is not understood.
    """
    table = open_json(text, where=where, error=InvalidBundleError)
    _insist_on_schema(table, where)
    manifest = Manifest(
        recipe=table.take("recipe", str),
        recipe_digest=_take_digest(table, "recipe_digest"),
        lock_digest=_take_digest(table, "lock_digest"),
        distribution=table.take("distribution", str),
        version=_take_version(table),
        python=_take_matching(table, "python", _PYTHON),
        bare=table.take("bare", bool),
        tool=table.take_optional("tool", str),
        files=tuple(_parse_file(entry) for entry in table.take_tables("files")),
    )
    table.close()
    paths = [file.path for file in manifest.files]
    if paths != sorted(set(paths)):
        raise InvalidBundleError("the files are not sorted, or one is listed twice", where=where)
    return manifest


def _insist_on_schema(table: Table, where: str) -> None:
    found = table.take("schema", str)
    if found == SCHEMA:
        return
    if _VERSIONED.fullmatch(found):
        raise InvalidBundleError(
            "the bundle was written by a newer provision than this one",
            where=where,
            expected=SCHEMA,
            found=found,
            hints=("install the provision that is in the bundle, and use that one",),
        )
    raise table.fail("unknown schema", "schema", expected=SCHEMA, found=found)


def is_safe(path: str) -> bool:
    """Whether a member may be unpacked: a plain relative path, written in one way only."""
    pure = PurePosixPath(path)
    plain = path.isprintable() and "\\" not in path and str(pure) == path
    return bool(path) and plain and not pure.is_absolute() and ".." not in pure.parts


def _parse_file(table: Table) -> BundledFile:
    file = BundledFile(path=table.take("path", str), sha256=_take_digest(table, "sha256"), size=table.take("size", int))
    if not is_safe(file.path) or file.path == FILE_NAME or file.size < 0:
        raise table.fail("not the path and size of a member", "path", found=file.path)
    table.close()
    return file


def _take_digest(table: Table, key: str) -> Digest:
    return _take_matching(table, key, _DIGEST)


def _take_matching(table: Table, key: str, pattern: re.Pattern[str]) -> str:
    text = table.take(key, str)
    if not pattern.fullmatch(text):
        raise table.fail("a value of the wrong form", key, found=text)
    return text


def _take_version(table: Table) -> Version:
    text = table.take("version", str)
    try:
        return Version(text)
    except InvalidVersion as error:
        raise table.fail("not a version", "version", found=text) from error
