"""The members of a patched wheel: what is copied from the origin, and what is written anew. Pure."""

import csv
import io
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field

from provisioner.digests import Digest, digest_of, digest_to_record
from provisioner.errors import ConflictError, InvalidWheelError
from provisioner.patched_wheel.naming import Folders
from provisioner.records import dataclass
from provisioner.wheels.archive import PackedMember
from provisioner.wheels.directory import Member
from provisioner.wheels.record import Record

_VERSION_LINE = re.compile(r"(?im)^Version:[^\r\n]*")
_SIGNATURES = ("RECORD.jws", "RECORD.p7s")
_REGULAR, _PERMISSIONS = 0o100000, 0o7777
_PLAIN_FILE = _REGULAR | 0o644


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The wheel as shipped: its folders, members by path in their order, RECORD and the text of METADATA."""

    where: str
    folders: Folders
    members: Mapping[str, Member] = field(repr=False)
    record: Record = field(repr=False)
    metadata: str = field(repr=False)

    @property
    def signatures(self) -> tuple[str, ...]:
        """Members that sign its RECORD, and so nothing else than it."""
        return tuple(path for path in self._own(_SIGNATURES) if path in self.members)

    def _own(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(f"{self.folders.dist_info}/{name}" for name in names)

    def unrecorded(self) -> frozenset[str]:
        """Paths that RECORD cannot vouch for."""
        return frozenset(self._own(("RECORD", *_SIGNATURES)))


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What the series makes of the origin: contents by path (None: no file), and permission bits where it sets them."""

    contents: Mapping[str, bytes | None] = field(repr=False)
    modes: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """A member whose data come packed from the origin's ``source``; ``row`` are its hash and size in RECORD."""

    header: PackedMember
    source: Member
    row: tuple[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A member with data of its own, not compressed: what a compressor makes of a text differs between machines."""

    header: PackedMember
    data: bytes = field(repr=False)
    row: tuple[str, str]


Part = Copied | Written


def lay_out(
    origin: Origin, changes: Changes, target: Folders, version: str, own: Mapping[str, bytes]
) -> tuple[Part, ...]:
    """The members in order: the origin's, what the series creates, ``own`` (names in the dist-info folder), RECORD.

    Raises InvalidWheelError where the origin's RECORD and members are not the same files; ConflictError for a change to
    what describes the wheel.
    """
    _refuse_unlisted(origin)
    _refuse_own_folder(origin, changes)
    metadata = _with_version(origin, version).encode()
    replaced = {**changes.contents, f"{origin.folders.dist_info}/METADATA": metadata}
    parts = [
        *_carried(origin, replaced, changes.modes, target),
        *(
            _write(path, data, _REGULAR | changes.modes.get(path, 0o644))
            for path, data in sorted(changes.contents.items())
            if data is not None and path not in origin.members
        ),
        *(_write(f"{target.dist_info}/{name}", data, _PLAIN_FILE) for name, data in sorted(own.items())),
    ]
    record = _print_record(parts, f"{target.dist_info}/RECORD")
    return (*parts, _write(f"{target.dist_info}/RECORD", record, _PLAIN_FILE))


def _carried(
    origin: Origin, replaced: Mapping[str, bytes | None], modes: Mapping[str, int], target: Folders
) -> Iterator[Part]:
    left_out = origin.unrecorded()
    for path, member in origin.members.items():
        if path in left_out:
            continue
        place = origin.folders.moved(path, target)
        mode = _mode_of(member, modes.get(path))
        if path not in replaced:
            yield _copy(place, member, mode, _row_of(origin, path))
        elif (data := replaced[path]) is not None:
            yield _write(place, data, mode)


def _mode_of(member: Member, bits: int | None) -> int:
    mode = member.mode or _PLAIN_FILE
    return mode if bits is None else mode & ~_PERMISSIONS | bits


def _row_of(origin: Origin, path: str) -> tuple[str, str]:
    entry = origin.record.entries[path]
    if entry.digest is None:
        raise InvalidWheelError(f"RECORD vouches for no digest of {path}", where=origin.where)
    return digest_to_record(entry.digest), str(entry.size) if entry.size is not None else ""


def _copy(path: str, member: Member, mode: int, row: tuple[str, str]) -> Copied:
    header = PackedMember(
        path=path, packed=member.packed, size=member.size, crc=member.crc, method=member.method, mode=mode,
        flags=member.flags,
    )  # fmt: skip
    return Copied(header=header, source=member, row=row)


def _write(path: str, data: bytes, mode: int) -> Written:
    header = PackedMember(
        path=path, packed=len(data), size=len(data), crc=zlib.crc32(data), method=zipfile.ZIP_STORED, mode=mode
    )
    return Written(header=header, data=data, row=(digest_to_record(digest_of(data)), str(len(data))))


def _print_record(parts: Sequence[Part], record: str) -> bytes:
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerows((part.header.path, *part.row) for part in parts)
    rows.writerow((record, "", ""))
    return text.getvalue().encode()


def _with_version(origin: Origin, version: str) -> str:
    head, blank, body = _split_headers(origin.metadata)
    if len(_VERSION_LINE.findall(head)) != 1:
        raise InvalidWheelError("METADATA must name one version", where=origin.where)
    return _VERSION_LINE.sub(f"Version: {version}", head) + blank + body


def _split_headers(text: str) -> tuple[str, str, str]:
    end = re.search(r"\r?\n\r?\n", text)
    return (text, "", "") if end is None else (text[: end.start()], end.group(), text[end.end() :])


def _refuse_unlisted(origin: Origin) -> None:
    listed = frozenset(origin.record.entries)
    odd = (listed ^ frozenset(origin.members)) - origin.unrecorded()
    if odd:
        raise InvalidWheelError(
            "RECORD does not list the files that the wheel holds", where=origin.where, found=", ".join(sorted(odd)[:3])
        )


def _refuse_own_folder(origin: Origin, changes: Changes) -> None:
    own = [path for path in changes.contents if path.startswith(f"{origin.folders.dist_info}/")]
    if own:
        raise ConflictError("the series changes files that describe the wheel itself", where=", ".join(own))


def series_digest(patches: Mapping[str, Digest], after: Mapping[str, Digest | None]) -> Digest:
    """The digest of a series on one build: its patches by id in their order, and what becomes of each file."""
    lines = [f"{digest} {name}" for name, digest in patches.items()]
    lines += [f"{digest or 'no file'} {path}" for path, digest in sorted(after.items())]
    return digest_of("\n".join(lines).encode())
