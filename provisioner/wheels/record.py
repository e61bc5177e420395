"""RECORD text to digests (the `recording installed projects` specification). Pure."""

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from provisioner.digests import Digest, digest_from_record
from provisioner.errors import InvalidInputError


@dataclass(frozen=True, kw_only=True)
class RecordEntry:
    """One row: a posix path relative to site-packages, its digest, and its size in bytes where given."""

    path: str
    digest: Digest | None
    size: int | None


@dataclass(frozen=True, kw_only=True)
class Record:
    """All rows of one RECORD, by path."""

    entries: Mapping[str, RecordEntry] = field(repr=False)

    def __contains__(self, path: str) -> bool:
        return path in self.entries

    def __iter__(self) -> Iterator[RecordEntry]:
        return iter(self.entries.values())

    def __len__(self) -> int:
        return len(self.entries)

    def digest(self, path: str) -> Digest | None:
        """The digest of ``path`` as shipped; None where the file is not shipped or its row carries no hash."""
        entry = self.entries.get(path)
        return entry.digest if entry else None


def parse_record(text: str, *, where: str = "RECORD") -> Record:
    """Parse the CSV text of a RECORD.

    Raises InvalidInputError, with the row number, for a row without three fields, an unreadable hash or size, or a path
    that stands twice with different digests.
    """
    entries: dict[str, RecordEntry] = {}
    for number, row in enumerate(csv.reader(io.StringIO(text, newline="")), start=1):
        if not row:
            continue
        entry = _parse_row(row, where=f"{where}, row {number}")
        known = entries.setdefault(entry.path, entry)
        if known != entry:
            raise InvalidInputError(
                f"{entry.path} stands twice with different contents", where=f"{where}, row {number}"
            )
    return Record(entries=MappingProxyType(entries))


def _parse_row(row: list[str], *, where: str) -> RecordEntry:
    if len(row) != 3:
        raise InvalidInputError("a row must have a path, a hash and a size", where=where, found=f"{len(row)} fields")
    path, hash_field, size_field = row
    try:
        digest = digest_from_record(hash_field) if hash_field else None
        size = int(size_field) if size_field else None
    except ValueError as error:
        raise InvalidInputError(str(error), where=where) from error
    return RecordEntry(path=path, digest=digest, size=size)
