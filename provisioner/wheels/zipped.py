"""The end of a wheel's archive: its directory, RECORD and METADATA; and one member out of its bytes. Pure.

RECORD too is kept as text and searched, for the same reason as the directory.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from functools import cached_property
from typing import Any

from packaging.utils import canonicalize_name

from provisioner.digests import Digest, digest_from_record
from provisioner.errors import HashMismatchError, InvalidWheelError
from provisioner.records import dataclass
from provisioner.wheels.directory import BeforeTailError, Directory, Member, read_directory
from provisioner.wheels.names import parse_wheel_name
from provisioner.wheels.record import Record, parse_record

_RECORD_SHARE = 0.45
"""Of the directory's size, to be read before it where the tail lacks both: RECORD takes 0.39 of it in these wheels."""
LOCAL_HEADER = 30
"""Bytes of a local header before its name and its extra field."""
ENDING_BYTES = 1024
"""Bytes. They hold RECORD's CRC in the directory, and RECORD holds the digest of all else: a wheel's identity."""

ReadSpan = Callable[[int, int], bytes]


@dataclass(frozen=True, kw_only=True)
class Head:
    """What the end of a wheel tells.

    ``size`` is the archive's, in bytes; ``ending`` its last bytes, by which a changed file is known.
    """

    filename: str
    size: int
    dist_info: str
    directory: Directory
    record: str = field(repr=False)
    metadata: str = field(repr=False)
    ending: bytes = field(repr=False)

    def member(self, path: str) -> Member | None:
        """The member at ``path``; None where there is none. Raises InvalidWheelError where its entry cannot be used."""
        try:
            return self.directory.member(path)
        except (ValueError, struct.error) as error:
            raise InvalidWheelError(
                f"{path} has an entry that wheels do not use: {error}", where=self.filename
            ) from error

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
            raise InvalidWheelError(str(error), where=f"{self.filename}: RECORD") from error

    @cached_property
    def parsed_record(self) -> Record:
        return parse_record(self.record, where=f"{self.filename}: RECORD")

    def needs_no_digest(self, path: str) -> bool:
        """RECORD cannot hold its own digest, nor that of a signature over it."""
        return path in {f"{self.dist_info}/RECORD{suffix}" for suffix in ("", ".jws", ".p7s")}


HEAD_FORM = 2
"""The form of an encoded head; an entry of another form counts as none."""


def encode_head(head: Head) -> tuple[dict[str, Any], bytes]:
    """Facts and bytes that ``decode_head`` turns back into ``head``."""
    parts = (head.directory.raw, head.record.encode(), head.metadata.encode(), head.ending)
    facts = {
        "form": HEAD_FORM,
        "filename": head.filename,
        "size": head.size,
        "dist_info": head.dist_info,
        "directory_start": head.directory.start,
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
        directory=Directory(start=facts["directory_start"], raw=directory),
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

    Raises InvalidWheelError where the bytes are no wheel.
    """
    try:
        directory = read_directory(size, tail)
    except BeforeTailError as before:
        reach = int((size - before.place) * _RECORD_SHARE)
        tail = _extend(tail, size, max(0, before.place - reach), read_span)
        directory = _directory_or_error(size, tail, where)
    except (ValueError, struct.error) as error:
        raise _not_a_wheel(where) from error
    dist_info = find_dist_info(filename, directory.names("/RECORD"), where=where)
    members = {path: _member(directory, path, where) for path in (f"{dist_info}/RECORD", f"{dist_info}/METADATA")}
    tail = _extend(tail, size, min(member.start for member in members.values()), read_span)
    record, metadata = (_tail_text(path, member, size, tail, where) for path, member in members.items())
    return Head(
        filename=filename,
        size=size,
        dist_info=dist_info,
        directory=directory,
        record=record,
        metadata=metadata,
        ending=tail[-ENDING_BYTES:],
    )


def unpack_member(path: str, member: Member, raw: bytes, *, where: str) -> bytes:
    """The contents of a member from its local header and data; checked by size and CRC.

    Raises HashMismatchError where they are broken, InvalidWheelError for a method other than stored and deflated.
    """
    begin = data_offset(raw, where=f"{where}: {path}")
    packed = raw[begin : begin + member.packed]
    if member.method == zipfile.ZIP_STORED:
        data = packed
    elif member.method == zipfile.ZIP_DEFLATED:
        data = _inflate(packed, member.size)
    else:
        raise InvalidWheelError(f"{path} is packed by method {member.method}, which wheels do not use", where=where)
    if len(data) != member.size or zlib.crc32(data) != member.crc:
        raise HashMismatchError(
            f"{path} arrived broken", where=where, expected=f"CRC {member.crc:08x}", found=f"CRC {zlib.crc32(data):08x}"
        )
    return data


def data_offset(header: bytes, *, where: str) -> int:
    """How many bytes stand before a member's data, from its local header. Raises HashMismatchError where it is none."""
    if header[:4] != b"PK\x03\x04" or len(header) < LOCAL_HEADER:
        raise HashMismatchError("the member does not stand where the directory says", where=where)
    return LOCAL_HEADER + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def find_dist_info(filename: str, members: Iterable[str], *, where: str) -> str:
    """The name of the wheel's own dist-info folder. Raises InvalidWheelError where there is not exactly one."""
    project = parse_wheel_name(filename).project
    folders = sorted(
        folder
        for folder, _, name in (path.partition("/") for path in members)
        if name == "RECORD"
        and folder.endswith(".dist-info")
        and canonicalize_name(folder.removesuffix(".dist-info").split("-")[0]) == project
    )
    if len(folders) != 1:
        raise InvalidWheelError(
            "a wheel must hold one dist-info folder of its own", where=where, found=", ".join(folders) or "none"
        )
    return folders[0]


def _directory_or_error(size: int, tail: bytes, where: str) -> Directory:
    try:
        return read_directory(size, tail)
    except (ValueError, struct.error, BeforeTailError) as error:
        raise _not_a_wheel(where) from error


def _member(directory: Directory, path: str, where: str) -> Member:
    try:
        member = directory.member(path)
    except (ValueError, struct.error) as error:
        raise _not_a_wheel(where) from error
    if member is None:
        raise InvalidWheelError(f"the wheel holds no {path}", where=where)
    return member


def _not_a_wheel(where: str) -> InvalidWheelError:
    return InvalidWheelError(
        "this is not a whole wheel: it has no readable zip directory",
        where=where,
        hints=("look at the file: a proxy or a login page may have answered, or an upload is not finished",),
    )


def _extend(tail: bytes, size: int, start: int, read_span: ReadSpan) -> bytes:
    """``tail``, reaching back to ``start`` at least."""
    known = size - len(tail)
    return tail if start >= known else read_span(start, known) + tail


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
        raise InvalidWheelError(f"{path} is not UTF-8", where=where) from error


def _inflate(packed: bytes, size: int) -> bytes:
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, size + 1)
    except zlib.error:
        return b""
