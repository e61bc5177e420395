"""What a zip archive is made of, as bytes: local headers before the data of members, and the directory after it. Pure.

zipfile can only pack what was unpacked. Here a member's data may come packed from another archive, and nothing depends
on the clock, the machine or the user: equal members give equal bytes.
"""

import struct
from collections.abc import Sequence

from provisioner.records import dataclass

_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4sBB5H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_PLACE = struct.Struct("<4sLQL")
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_PLAIN, _LARGE = 20, 45
"""Version of the format that a reader must know: with folders and deflate, and with sizes of 64 bits."""
_UNIX = 3
_UTF8 = 1 << 11
_HOW_DEFLATED = 0b110
_MIDNIGHT, _NEW_YEAR_1980 = 0, 1 << 5 | 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMember:
    """What the headers say of one member. Sizes are in bytes, ``mode`` is as ``st_mode``; ``flags`` are those of the
    archive that the packed data come from."""

    path: str
    packed: int
    size: int
    crc: int
    method: int
    mode: int
    flags: int = 0


def print_local_header(member: PackedMember) -> bytes:
    """The bytes that stand right before a member's data."""
    name = member.path.encode()
    large = _is_large(member)
    extra = struct.pack("<HHQQ", 1, 16, member.size, member.packed) if large else b""
    header = _LOCAL.pack(
        b"PK\x03\x04", _LARGE if large else _PLAIN, _flags_of(member, name), member.method, _MIDNIGHT, _NEW_YEAR_1980,
        member.crc, _FULL32 if large else member.packed, _FULL32 if large else member.size, len(name), len(extra),
    )  # fmt: skip
    return header + name + extra


def print_directory(members: Sequence[tuple[PackedMember, int]]) -> bytes:
    """The end of an archive: an entry for each member and the byte where its local header begins, then the end records.

    The last member's data end where these bytes begin.
    """
    entries = b"".join(_print_entry(member, start) for member, start in members)
    last, place = members[-1]
    start = place + len(print_local_header(last)) + last.packed
    return entries + _print_end(len(members), start, len(entries))


def _print_entry(member: PackedMember, start: int) -> bytes:
    name = member.path.encode()
    # A reader takes from the extra field, in this order, the numbers that are full in the entry.
    large = [number for number in (member.size, member.packed, start) if number >= _FULL32]
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    needed = _LARGE if large else _PLAIN
    size, packed, place = (min(number, _FULL32) for number in (member.size, member.packed, start))
    entry = _ENTRY.pack(
        b"PK\x01\x02", needed, _UNIX, needed, _flags_of(member, name), member.method, _MIDNIGHT, _NEW_YEAR_1980,
        member.crc, packed, size, len(name), len(extra), 0, 0, 0, member.mode << 16, place,
    )  # fmt: skip
    return entry + name + extra


def _print_end(count: int, start: int, length: int) -> bytes:
    end = _END.pack(
        b"PK\x05\x06", 0, 0, min(count, _FULL16), min(count, _FULL16), min(length, _FULL32), min(start, _FULL32), 0
    )
    if count < _FULL16 and length < _FULL32 and start < _FULL32:
        return end
    rest = _END64.size - 12
    large = _END64.pack(b"PK\x06\x06", rest, _LARGE, _LARGE, 0, 0, count, count, length, start)
    return large + _END64_PLACE.pack(b"PK\x06\x07", 0, start + length, 1) + end


def _is_large(member: PackedMember) -> bool:
    return max(member.size, member.packed) >= _FULL32


def _flags_of(member: PackedMember, name: bytes) -> int:
    """How it was deflated stays; that sizes follow the data does not, since they stand before it."""
    return member.flags & _HOW_DEFLATED | (0 if name.isascii() else _UTF8)
