"""What a patched wheel holds, as JSON in its own dist-info folder. Pure.

The same facts as a receipt has of an environment, as far as they are true of the wheel wherever it is installed.
"""

import json
import re
from dataclasses import asdict

from provisioner.digests import Digest
from provisioner.documents.receipt import AppliedPatch, PatchedFile, parse_applied_patch, parse_patched_file
from provisioner.errors import InvalidReceiptError
from provisioner.records import dataclass
from provisioner.tables import Table, open_json

_DIGEST = re.compile(r"[0-9a-f]{64}")
SCHEMA = "provision/patched-wheel/1"
FACTS_NAME = "provision.json"
"""In the dist-info folder."""


@dataclass(frozen=True, kw_only=True)
class OriginWheel:
    """The wheel as its makers shipped it: digests of the file and of its RECORD, and the version in its METADATA."""

    filename: str
    version: str
    sha256: Digest
    record: Digest


@dataclass(frozen=True, kw_only=True)
class PatchedWheel:
    """``label`` is the recipe, or another name of the series; ``series`` the digest of patches and results in it.

    ``files`` has each file that differs from the origin, sorted; the entries of ``patches`` are those of a receipt.
    Paths are relative to site-packages.
    """

    label: str
    series: Digest
    origin: OriginWheel
    patches: tuple[AppliedPatch, ...]
    files: tuple[PatchedFile, ...]


def print_patched_wheel(wheel: PatchedWheel) -> str:
    """The JSON text; inverse of :func:`parse_patched_wheel`."""
    return json.dumps({"schema": SCHEMA, **asdict(wheel)}, indent=2, sort_keys=True) + "\n"


def parse_patched_wheel(text: str, *, where: str) -> PatchedWheel:
    """Parse the facts.

    Raises InvalidReceiptError, with an address, for anything that is not understood.
    """
    table = open_json(text, where=where, error=InvalidReceiptError)
    if table.take("schema", str) != SCHEMA:
        raise table.fail("unknown schema", "schema", expected=SCHEMA)
    wheel = PatchedWheel(
        label=table.take("label", str),
        series=_take_digest(table, "series"),
        origin=_parse_origin(table.take_table("origin")),
        patches=tuple(parse_applied_patch(entry) for entry in table.take_tables("patches")),
        files=tuple(parse_patched_file(entry) for entry in table.take_tables("files")),
    )
    table.close()
    return wheel


def _parse_origin(table: Table) -> OriginWheel:
    origin = OriginWheel(
        filename=table.take("filename", str),
        version=table.take("version", str),
        sha256=_take_digest(table, "sha256"),
        record=_take_digest(table, "record"),
    )
    table.close()
    return origin


def _take_digest(table: Table, key: str) -> Digest:
    value = table.take(key, str)
    if not _DIGEST.fullmatch(value):
        raise table.fail("not a SHA-256", key, expected="64 hex digits", found=value)
    return value
