"""What a bundle holds, as JSON at its beginning. Pure."""

import re
from pathlib import PurePosixPath
from typing import Annotated

import msgspec
from packaging.version import Version

from provisioner.documents.codec import ContradictionError, Document, HexDigest, decode_json
from provisioner.errors import InvalidBundleError

SCHEMA = "provision/bundle/1"
_VERSIONED = re.compile(r"provision/bundle/([1-9]\d*)")
FILE_NAME = "bundle.json"


class BundledFile(Document, frozen=True, kw_only=True):
    """One member: its path, in POSIX form and without ``..``, its digest and its size in bytes."""

    path: str
    sha256: HexDigest
    size: Annotated[int, msgspec.Meta(ge=0, title="a size")]


class Manifest(Document, frozen=True, kw_only=True, tag_field="schema", tag=SCHEMA):
    """Everything that a bundle says of itself.

    ``python`` is the minor version (``3.12``) that the wheels were chosen for. ``bare`` tells that the dependencies
    were left out; ``tool`` is the version of the tool in it, None where it was left out. ``files`` are sorted by path.
    """

    recipe: str
    recipe_digest: HexDigest
    lock_digest: HexDigest
    distribution: str
    version: Version
    python: Annotated[str, msgspec.Meta(pattern=r"^3\.\d+$", title="a minor version of Python, such as 3.12")]
    bare: bool
    tool: str | None = None
    files: tuple[BundledFile, ...]

    def __post_init__(self) -> None:
        paths = [file.path for file in self.files]
        for index, path in enumerate(paths):
            if not is_safe(path) or path == FILE_NAME:
                raise ContradictionError("not the path of a member", f"files[{index}].path", found=path)
        if paths != sorted(set(paths)):
            raise ContradictionError("the files are not sorted, or one is listed twice", "files")

    def under(self, folder: str) -> tuple[BundledFile, ...]:
        """The members of a folder, at any depth."""
        return tuple(file for file in self.files if file.path.startswith(f"{folder}/"))


def parse_manifest(text: str, *, where: str) -> Manifest:
    """Parse a manifest.

    Raises InvalidBundleError, with an address, for anything that is not understood.
    """
    try:
        return decode_json(text, Manifest, where=where, error=InvalidBundleError)
    except InvalidBundleError as error:
        if _VERSIONED.fullmatch(error.found or ""):
            raise InvalidBundleError(
                "the bundle was written by a newer provision than this one",
                where=where,
                expected=SCHEMA,
                found=error.found,
                hints=("install the provision that is in the bundle, and use that one",),
            ) from error
        raise


def is_safe(path: str) -> bool:
    """Whether a member may be unpacked: a plain relative path, written in one way only."""
    pure = PurePosixPath(path)
    plain = path.isprintable() and "\\" not in path and str(pure) == path
    return bool(path) and plain and not pure.is_absolute() and ".." not in pure.parts
