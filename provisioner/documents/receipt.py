"""What was done to an environment, as JSON beside it. Pure."""

import json
from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Any

from provisioner.digests import Digest
from provisioner.documents.policy import LeftOut, Omission
from provisioner.errors import InvalidReceiptError
from provisioner.records import dataclass
from provisioner.tables import Table, open_json

SCHEMA = "provision/receipt/1"
FILE_NAME = "receipt.json"


@dataclass(frozen=True, kw_only=True)
class PatchedFile:
    """One file that a patch touched: digest before and after it; None where the file does not exist then.

    ``scopes`` has the class or function of each hunk, where all are known: so a later command finds the places again.
    """

    path: str
    before: Digest | None
    after: Digest | None
    scopes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AppliedPatch:
    """One patch as it was applied. ``text`` is the digest of its text, kept beside the receipt under that name."""

    id: str
    source: str
    text: Digest
    policy: str
    verdict: str
    files: tuple[PatchedFile, ...]


@dataclass(frozen=True, kw_only=True)
class InstalledBuild:
    """The build as the text in the environment says; the wheel and its digest are None where nobody knows them."""

    distribution: str
    version: str
    commit: str | None
    variant: str | None
    wheel: str | None
    wheel_sha256: Digest | None


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The whole receipt. ``recipe`` and ``lock`` are None where patches were applied to an environment made elsewhere.

    ``bare`` tells that the dependencies were left out. ``packages`` has the version of each package that the lock
    wanted, empty for one known by its URL alone; there are none where the packages are not ours. ``record`` is the
    digest of RECORD's shipped rows, None where nobody kept it. ``fork_any``: the fork's checkout was taken as it was,
    whatever its commit and edits. ``verification`` is the path-free summary of the last check on a card, or None where
    there was none. ``left_out`` are patches of the series that are not applied, with the reason. ``created`` is an ISO
    8601 time in UTC.
    """

    created: str
    tool: str
    build: InstalledBuild
    patches: tuple[AppliedPatch, ...]
    recipe: str | None = None
    recipe_digest: Digest | None = None
    lock_digest: Digest | None = None
    python: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    bare: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)
    record: Digest | None = None
    fork_any: bool = False
    verification: Mapping[str, Any] | None = field(default=None)
    left_out: tuple[LeftOut, ...] = ()

    def final_digests(self) -> dict[str, Digest | None]:
        """The digest that each touched file must have now; None where it must not exist."""
        return {file.path: file.after for patch in self.patches for file in patch.files}

    def created_files(self) -> tuple[str, ...]:
        """Files that exist only because a patch created them, sorted."""
        first: dict[str, Digest | None] = {}
        for patch in self.patches:
            for file in patch.files:
                first.setdefault(file.path, file.before)
        final = self.final_digests()
        return tuple(sorted(path for path, before in first.items() if before is None and final[path] is not None))


def print_receipt(receipt: Receipt) -> str:
    """The JSON text of a receipt; inverse of :func:`parse_receipt`."""
    return json.dumps({"schema": SCHEMA, **asdict(receipt)}, indent=2, sort_keys=True) + "\n"


def parse_receipt(text: str, *, where: str) -> Receipt:
    """Parse a receipt.

    Raises InvalidReceiptError, with an address, for anything that is not understood.
    """
    table = open_json(text, where=where, error=InvalidReceiptError)
    if table.take("schema", str) != SCHEMA:
        raise table.fail("unknown schema", "schema", expected=SCHEMA)
    receipt = Receipt(
        created=table.take("created", str),
        tool=table.take("tool", str),
        build=_parse_build(table.take_table("build")),
        patches=tuple(parse_applied_patch(entry) for entry in table.take_tables("patches")),
        recipe=table.take_optional("recipe", str),
        recipe_digest=table.take_optional("recipe_digest", str),
        lock_digest=table.take_optional("lock_digest", str),
        python=table.take_optional("python", str),
        torch=table.take_optional("torch", str),
        torch_cuda=table.take_optional("torch_cuda", str),
        bare=table.take_or("bare", bool, False),
        packages=table.take_strings("packages"),
        record=table.take_optional("record", str),
        fork_any=table.take_or("fork_any", bool, False),
        verification=table.take_optional("verification", dict),
        left_out=tuple(_parse_left_out(entry) for entry in table.take_tables("left_out")),
    )
    table.close()
    return receipt


def _parse_build(table: Table) -> InstalledBuild:
    build = InstalledBuild(
        distribution=table.take("distribution", str),
        version=table.take("version", str),
        commit=_take_nullable(table, "commit"),
        variant=_take_nullable(table, "variant"),
        wheel=_take_nullable(table, "wheel"),
        wheel_sha256=_take_nullable(table, "wheel_sha256"),
    )
    table.close()
    return build


def parse_applied_patch(table: Table) -> AppliedPatch:
    """One entry of ``patches``. Raises the table's error for anything that is not understood."""
    patch = AppliedPatch(
        id=table.take("id", str),
        source=table.take("source", str),
        text=table.take("text", str),
        policy=table.take("policy", str),
        verdict=table.take("verdict", str),
        files=tuple(parse_patched_file(entry) for entry in table.take_tables("files")),
    )
    table.close()
    return patch


def _parse_left_out(table: Table) -> LeftOut:
    text = table.take("omission", str)
    if text not in set(Omission):
        raise table.fail("unknown reason", "omission", expected=" | ".join(Omission), found=text)
    left_out = LeftOut(id=table.take("id", str), omission=Omission(text), by=_take_nullable(table, "by"))
    table.close()
    return left_out


def parse_patched_file(table: Table) -> PatchedFile:
    """One entry of a patch's ``files``. Raises the table's error for anything that is not understood."""
    file = PatchedFile(
        path=table.take("path", str),
        before=_take_nullable(table, "before"),
        after=_take_nullable(table, "after"),
        scopes=table.take_list("scopes", str),
    )
    table.close()
    return file


def _take_nullable(table: Table, key: str) -> str | None:
    value = table.take(key, object)
    if value is None or isinstance(value, str):
        return value
    raise table.fail("a value of the wrong type", key, expected="str or null", found=type(value).__name__)
