"""The end of a wheel's archive: its directory, RECORD and METADATA; and one member out of its bytes. Pure.

The directory is kept as text and searched: a check of a few files out of five thousand need not build five thousand
objects.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from packaging.utils import canonicalize_name

from provisioner.digests import Digest, digest_from_record
from provisioner.errors import HashMismatchError, InvalidInputError
from provisioner.wheels.names import parse_wheel_name
from provisioner.wheels.record import Record, parse_record

_RECORD_SHARE = 0.45
"""Of the directory's size, to be read before it where the tail lacks both: RECORD takes 0.39 of it in these wheels."""
_LOCAL_HEADER = 30
ENDING_BYTES = 1024
"""Bytes. They hold RECORD's CRC in the directory, and RECORD holds the digest of all else: a wheel's identity."""

ReadSpan = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True)
class Member:
    """Where one member lies: bytes ``start`` to ``stop`` hold its local header and its data."""

    start: int
    stop: int
    packed: int
    size: int
    crc: int
    method: int


@dataclass(frozen=True, kw_only=True)
class Head:
    """What the end of a wheel tells.

    ``directory`` has a line for each member (path, then the numbers of Member, split by tabs); ``size`` is the
    archive's, in bytes; ``ending`` its last bytes, by which a changed file is known.
    """

    filename: str
    size: int
    dist_info: str
    directory: str = field(repr=False)
    record: str = field(repr=False)
    metadata: str = field(repr=False)
    ending: bytes = field(repr=False)

    def names(self) -> tuple[str, ...]:
        return tuple(line.partition("\t")[0] for line in self.directory.splitlines())

    def member(self, path: str) -> Member | None:
        """The member at ``path``; None where there is none."""
        line = _line_after(self.directory, f"{path}\t")
        return None if line is None else Member(*map(int, line.split("\t")))

    def digest(self, path: str) -> Digest | None:
        """RECORD's digest of ``path``, as ``parse_record`` would find it, at the cost of a search."""
        if any(character in path for character in ',"\r\n'):
            return self.parsed_record.digest(path)
        row = _line_after(self.record, f"{path},")
        if row is None:
            return self.parsed_record.digest(path) if f'"{path}"' in self.record else None
        hash_field, comma, _ = row.partition(",")
        if not comma or not hash_field.startswith("sha256="):
            return self.parsed_record.digest(path)
        try:
            return digest_from_record(hash_field)
        except ValueError as error:
            raise InvalidInputError(str(error), where=f"{self.filename}: RECORD") from error

    @cached_property
    def parsed_record(self) -> Record:
        return parse_record(self.record, where=f"{self.filename}: RECORD")

    def needs_no_digest(self, path: str) -> bool:
        """RECORD cannot hold its own digest, nor that of a signature over it."""
        return path in {f"{self.dist_info}/RECORD{suffix}" for suffix in ("", ".jws", ".p7s")}


def encode_head(head: Head) -> tuple[dict[str, Any], bytes]:
    """Facts and bytes that ``decode_head`` turns back into ``head``."""
    parts = (head.directory.encode(), head.record.encode(), head.metadata.encode(), head.ending)
    facts = {
        "filename": head.filename,
        "size": head.size,
        "dist_info": head.dist_info,
        "lengths": [len(part) for part in parts],
    }
    return facts, b"".join(parts)


def decode_head(facts: Mapping[str, Any], data: bytes) -> Head:
    parts: list[bytes] = []
    begin = 0
    for length in facts["lengths"]:
        parts.append(data[begin : begin + length])
        begin += length
    directory, record, metadata, ending = parts
    return Head(
        filename=facts["filename"],
        size=facts["size"],
        dist_info=facts["dist_info"],
        directory=directory.decode(),
        record=record.decode(),
        metadata=metadata.decode(),
        ending=ending,
    )


def is_same_ending(head: Head, size: int, ending: bytes) -> bool:
    """Whether a file of ``size`` bytes that ends in ``ending`` is the one that ``head`` was read from."""
    length = min(len(ending), len(head.ending))
    return size == head.size and length > 0 and ending[-length:] == head.ending[-length:]


def read_head(filename: str, size: int, tail: bytes, read_span: ReadSpan, *, where: str) -> Head:
    """Directory, RECORD and METADATA of a wheel of ``size`` bytes, from its ``tail``.

    ``read_span`` is asked for what the tail lacks; once in the wheels that builders make.

    Raises InvalidInputError where the bytes are no wheel.
    """
    try:
        members = read_directory(size, tail)
    except _OutsideError as outside:
        before = int((size - outside.place) * _RECORD_SHARE)
        tail = _extend(tail, size, max(0, outside.place - before), read_span)
        members = _directory_or_error(size, tail, where)
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise _not_a_wheel(where) from error
    dist_info = find_dist_info(filename, members, where=where)
    paths = (f"{dist_info}/RECORD", f"{dist_info}/METADATA")
    if paths[1] not in members:
        raise InvalidInputError("the wheel holds no METADATA", where=where)
    tail = _extend(tail, size, min(members[path].start for path in paths), read_span)
    record, metadata = (_tail_text(path, members[path], size, tail, where) for path in paths)
    return Head(
        filename=filename,
        size=size,
        dist_info=dist_info,
        directory=_directory_text(members, where),
        record=record,
        metadata=metadata,
        ending=tail[-ENDING_BYTES:],
    )


class _Window(io.RawIOBase):
    """The end of a file, as a file: enough for zipfile to find the directory. Reading before it: _OutsideError."""

    def __init__(self, size: int, tail: bytes) -> None:
        self._size, self._tail, self._place = size, tail, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("before the start")
        self._place = base + offset
        return self._place

    def read(self, length: int = -1) -> bytes:
        begin = self._place - (self._size - len(self._tail))
        if begin < 0:
            raise _OutsideError(self._place)
        end = len(self._tail) if length < 0 else begin + length
        data = self._tail[begin:end]
        self._place += len(data)
        return data


class _OutsideError(Exception):
    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place


def read_directory(size: int, tail: bytes) -> dict[str, Member]:
    """Members by name, from the last bytes of an archive of ``size`` bytes, in the order of the directory."""
    with zipfile.ZipFile(_Window(size, tail)) as archive:
        infos = archive.infolist()
        end = archive.start_dir
    starts = sorted(info.header_offset for info in infos)
    following = dict(zip(starts, [*starts[1:], end], strict=True))
    return {
        info.filename: Member(
            start=info.header_offset,
            stop=following[info.header_offset],
            packed=info.compress_size,
            size=info.file_size,
            crc=info.CRC,
            method=info.compress_type,
        )
        for info in infos
        if not info.is_dir()
    }


def unpack_member(path: str, member: Member, raw: bytes, *, where: str) -> bytes:
    """The contents of a member from its local header and data; checked by size and CRC.

    Raises HashMismatchError where they are broken, InvalidInputError for a method other than stored and deflated.
    """
    if raw[:4] != b"PK\x03\x04" or len(raw) < _LOCAL_HEADER:
        raise HashMismatchError(f"{path} does not stand where the directory says", where=where)
    begin = _LOCAL_HEADER + int.from_bytes(raw[26:28], "little") + int.from_bytes(raw[28:30], "little")
    packed = raw[begin : begin + member.packed]
    if member.method == zipfile.ZIP_STORED:
        data = packed
    elif member.method == zipfile.ZIP_DEFLATED:
        data = _inflate(packed, member.size)
    else:
        raise InvalidInputError(f"{path} is packed by method {member.method}, which wheels do not use", where=where)
    if len(data) != member.size or zlib.crc32(data) != member.crc:
        raise HashMismatchError(
            f"{path} arrived broken", where=where, expected=f"CRC {member.crc:08x}", found=f"CRC {zlib.crc32(data):08x}"
        )
    return data


def find_dist_info(filename: str, members: Iterable[str], *, where: str) -> str:
    """The name of the wheel's own dist-info folder. Raises InvalidInputError where there is not exactly one."""
    project = parse_wheel_name(filename).project
    folders = sorted(
        folder
        for folder, _, name in (path.partition("/") for path in members)
        if name == "RECORD"
        and folder.endswith(".dist-info")
        and canonicalize_name(folder.removesuffix(".dist-info").split("-")[0]) == project
    )
    if len(folders) != 1:
        raise InvalidInputError(
            "a wheel must hold one dist-info folder of its own", where=where, found=", ".join(folders) or "none"
        )
    return folders[0]


def _directory_or_error(size: int, tail: bytes, where: str) -> dict[str, Member]:
    try:
        return read_directory(size, tail)
    except (zipfile.BadZipFile, OSError, ValueError, _OutsideError) as error:
        raise _not_a_wheel(where) from error


def _not_a_wheel(where: str) -> InvalidInputError:
    return InvalidInputError("this is not a whole wheel: it has no readable zip directory", where=where)


def _extend(tail: bytes, size: int, start: int, read_span: ReadSpan) -> bytes:
    """``tail``, reaching back to ``start`` at least."""
    known = size - len(tail)
    return tail if start >= known else read_span(start, known) + tail


def _directory_text(members: Mapping[str, Member], where: str) -> str:
    lines = []
    for path, member in members.items():
        if any(character in path for character in "\t\r\n"):
            raise InvalidInputError("a member's name holds a control character", where=where, found=repr(path))
        numbers = (member.start, member.stop, member.packed, member.size, member.crc, member.method)
        lines.append("\t".join((path, *map(str, numbers))))
    return "\n".join(lines) + "\n"


def _line_after(text: str, start: str) -> str | None:
    """The rest of the line of ``text`` that begins with ``start``."""
    if text.startswith(start):
        begin = len(start)
    else:
        found = text.find(f"\n{start}")
        if found < 0:
            return None
        begin = found + 1 + len(start)
    end = text.find("\n", begin)
    return text[begin : end if end >= 0 else None].rstrip("\r")


def _tail_text(path: str, member: Member, size: int, tail: bytes, where: str) -> str:
    offset = size - len(tail)
    data = unpack_member(path, member, tail[member.start - offset : member.stop - offset], where=where)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} is not UTF-8", where=where) from error


def _inflate(packed: bytes, size: int) -> bytes:
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, size + 1)
    except zlib.error:
        return b""
