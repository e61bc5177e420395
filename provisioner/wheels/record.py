"""RECORD text to digests (the `recording installed projects` specification). Pure."""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field

from provisioner.digests import Digest, digest_from_record, digest_of, digest_to_record
from provisioner.errors import InvalidInputError
from provisioner.records import dataclass

_HASH = re.compile(r"(sha256=[A-Za-z0-9_-]{43})?")
_ROW_END = re.compile(r",((?:sha256=[A-Za-z0-9_-]{43})?+,[0-9]*+)\n")
# Rows of a distribution's own folder that installers add.
_INSTALLERS = re.compile(
    r"^[^/]+\.dist-info/(INSTALLER|REQUESTED|RECORD|direct_url\.json|uv_build\.json|uv_cache\.json),"
)
_QUOTED = re.compile(r'"[^"]*"')


@dataclass(frozen=True, kw_only=True)
class RecordEntry:
    """One row: a posix path relative to site-packages, its digest, and its size in bytes where given."""

    path: str
    digest: Digest | None
    size: int | None


@dataclass(frozen=True, kw_only=True)
class Record:
    """All rows of one RECORD, by path; ``text`` is what they were parsed from, where they were."""

    entries: Mapping[str, RecordEntry] = field(repr=False)
    text: str = field(default="", repr=False, compare=False)

    @property
    def text_digest(self) -> Digest:
        """The digest of the text: under the same one, every file has the same digest."""
        return digest_of(self.text.encode())

    @property
    def shipped_digest(self) -> Digest:
        """The digest of the rows that come from the wheel, whatever their order: those with a hash, inside
        site-packages, that no installer adds. The same after every install of a wheel."""
        rows = self.entries.rows() if isinstance(self.entries, _Entries) else map(_fields_of, self)
        lines = [f"{path},{rest}" for path, rest in rows if rest[0] != "," and path[:1] != "/" and path[:2] != ".."]
        return digest_of("\n".join(sorted(line for line in lines if not _is_installers(line))).encode())

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

    def size(self, path: str) -> int | None:
        """The size of ``path`` as shipped; None where the file is not shipped or its row carries no size."""
        if isinstance(self.entries, _Entries):
            return self.entries.size(path)
        entry = self.entries.get(path)
        return entry.size if entry else None

    def paths_of(self, digest: Digest) -> tuple[str, ...]:
        """The paths of all files with these bytes."""
        if self.text and digest_to_record(digest) not in self.text:
            return ()
        if isinstance(self.entries, _Entries):
            return self.entries.paths_of(digest)
        return tuple(entry.path for entry in self if entry.digest == digest)


def parse_record(text: str, *, where: str = "RECORD") -> Record:
    """Parse the CSV text of a RECORD.

    Raises InvalidInputError, with the row number, for a row without three fields, an unreadable hash or size, or a path
    that stands twice with different digests.
    """
    return Record(entries=_Entries(_read_plain_rows(text) or _read_rows(text, where)), text=text)


def _read_plain_rows(text: str) -> dict[str, str]:
    """Hash and size as written, by path, where every row is of the form that builders write; else nothing.

    Much faster than going through the rows one by one, and vLLM has five thousand: no object is made but the strings.
    """
    *parts, rest = _ROW_END.split(text)
    paths, ends = parts[::2], parts[1::2]
    odd = [path for path in paths if "," in path or '"' in path or not path]
    fields = dict(zip((path.strip('"') for path in paths), ends, strict=True))
    is_plain = not rest and "\r" not in text and len(ends) == text.count("\n") and all(map(_QUOTED.fullmatch, odd))
    return fields if is_plain and len(fields) == len(paths) else {}


def _read_rows(text: str, where: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for number, row in enumerate(csv.reader(io.StringIO(text, newline="")), start=1):
        if not row:
            continue
        if len(row) != 3:
            raise InvalidInputError(
                "a row must have a path, a hash and a size", where=f"{where}, row {number}", found=f"{len(row)} fields"
            )
        path, *rest = row
        hash_field, size_field = rest
        if not (_HASH.fullmatch(hash_field) and (size_field.isdecimal() or not size_field)):
            _refuse_row(hash_field, size_field, where=f"{where}, row {number}")
        if fields.setdefault(path, f"{hash_field},{size_field}") != f"{hash_field},{size_field}":
            raise InvalidInputError(f"{path} stands twice with different contents", where=f"{where}, row {number}")
    return fields


class _Entries(Mapping[str, RecordEntry]):
    """Rows of checked form whose digests are decoded when asked for: most readers want a few of thousands."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = fields

    def __getitem__(self, path: str) -> RecordEntry:
        hash_field, _, size_field = self._fields[path].partition(",")
        return RecordEntry(
            path=path,
            digest=digest_from_record(hash_field) if hash_field else None,
            size=int(size_field) if size_field else None,
        )

    def rows(self) -> Iterable[tuple[str, str]]:
        """Each path with hash and size as written."""
        return self._fields.items()

    def size(self, path: str) -> int | None:
        size_field = self._fields.get(path, "").rpartition(",")[2]
        return int(size_field) if size_field else None

    def paths_of(self, digest: Digest) -> tuple[str, ...]:
        wanted = f"{digest_to_record(digest)},"
        return tuple(path for path, rest in self._fields.items() if rest.startswith(wanted))

    def __contains__(self, path: object) -> bool:
        return path in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def _fields_of(row: RecordEntry) -> tuple[str, str]:
    digest = digest_to_record(row.digest) if row.digest else ""
    return row.path, f"{digest},{'' if row.size is None else row.size}"


def _is_installers(line: str) -> bool:
    return ".dist-info/" in line and _INSTALLERS.search(line) is not None


def _refuse_row(hash_field: str, size_field: str, *, where: str) -> None:
    """Say what is wrong with a row, if anything is: the quick check is stricter than the format."""
    try:
        if hash_field:
            digest_from_record(hash_field)
        if size_field:
            int(size_field)
    except ValueError as error:
        raise InvalidInputError(str(error), where=where) from error
