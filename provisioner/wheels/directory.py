"""The central directory of a zip archive, kept as it is and searched. Pure.

zipfile builds an object for each of vLLM's five thousand members, 45 ms a wheel of which a check of ten files needs
nothing: sixty releases would cost three seconds of one core. Only what wheels use is understood here; anything else
(archives split over disks, glued behind other data, encrypted) raises ValueError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import field

from provisioner.records import dataclass

_END = struct.Struct("<4s4HLLH")
_END64_PLACE = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s4xHH4xLLLHHH4xLL")
_LENGTHS = struct.Struct("<HHH")
_LOCAL_HEADER = 30
_LOCAL_EXTRA = 4096
"""Bytes: more than a local header's own extra field and a trailing data descriptor take."""
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Member:
    """Where one member lies: bytes ``start`` to ``stop`` hold its local header and its data (sizes in bytes).

    ``mode`` has the permission bits and the file type, as ``st_mode`` does; 0 where the builder wrote none.
    """

    start: int
    stop: int
    packed: int
    size: int
    crc: int
    method: int
    flags: int
    mode: int


@dataclass(frozen=True, kw_only=True)
class Directory:
    """``raw`` is the directory's bytes, which begin at byte ``start`` of the archive."""

    start: int
    raw: bytes = field(repr=False)

    def names(self, ending: str = "") -> tuple[str, ...]:
        """The names of all files in it that end so, in its order. Raises ValueError where it is broken."""
        last = ending.encode()
        found = [name.decode("utf-8") for name in self._names() if name.endswith(last)]
        return tuple(name for name in found if not name.endswith("/"))

    def member(self, name: str) -> Member | None:
        """The member of that name; None where there is none."""
        wanted = name.encode()
        found = self.raw.find(wanted)
        while found >= 0:
            place = found - _ENTRY.size
            if place >= 0 and self._name_at(place) == wanted:
                return self._member_at(place)
            found = self.raw.find(wanted, found + 1)
        return None

    def members(self) -> dict[str, Member]:
        """Every file by its name, in its order. Raises ValueError where an entry is broken, or a name stands twice."""
        found: dict[str, Member] = {}
        place = 0
        for name in self._names():
            if not name.endswith(b"/"):
                found[name.decode("utf-8")] = self._member_at(place)
            place = self._after(place)
        if len(found) != len(self.names()):
            raise ValueError("a name stands twice in the directory")
        return found

    def _names(self) -> Iterator[bytes]:
        # One function for all entries: this goes through thousands for each wheel that is read for the first time.
        raw, size, lengths_at = self.raw, _ENTRY.size, _LENGTHS.unpack_from
        place, end = 0, len(raw)
        while place < end:
            if not raw.startswith(b"PK\x01\x02", place) or place + size > end:
                raise ValueError("a broken entry in the directory")
            name, extra, comment = lengths_at(raw, place + 28)
            start = place + size
            yield raw[start : start + name]
            place = start + name + extra + comment

    def _name_at(self, place: int) -> bytes | None:
        if self.raw[place : place + 4] != b"PK\x01\x02" or place + _ENTRY.size > len(self.raw):
            return None  # a name can also stand inside another name or a field
        length = int.from_bytes(self.raw[place + 28 : place + 30], "little")
        return self.raw[place + _ENTRY.size : place + _ENTRY.size + length]

    def _after(self, place: int) -> int:
        name, extra, comment = _LENGTHS.unpack_from(self.raw, place + 28)
        return int(place + _ENTRY.size + name + extra + comment)

    def _member_at(self, place: int) -> Member:
        (
            _, flags, method, crc, packed, size, name_length, extra_length, _, attributes, start,
        ) = _ENTRY.unpack_from(self.raw, place)  # fmt: skip
        if flags & 1:
            raise ValueError("an encrypted member")
        if _FULL32 in (packed, size, start):
            begin = place + _ENTRY.size + name_length
            size, packed, start = _read_large(self.raw[begin : begin + extra_length], size, packed, start)
        least = start + _LOCAL_HEADER + name_length + packed
        following = self._start_after(place)
        stop = following if least <= following <= least + _LOCAL_EXTRA else min(self.start, least + _LOCAL_EXTRA)
        return Member(
            start=start, stop=stop, packed=packed, size=size, crc=crc, method=method, flags=flags, mode=attributes >> 16
        )

    def _start_after(self, place: int) -> int:
        """Where the next member begins, as builders order them; the directory's own start after the last."""
        after = self._after(place)
        if after + _ENTRY.size > len(self.raw):
            return self.start
        return int.from_bytes(self.raw[after + 42 : after + 46], "little")


class BeforeTailError(Exception):
    """The directory begins at byte ``place`` of the archive, before the bytes that were given."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place


def read_directory(size: int, tail: bytes) -> Directory:
    """The directory of an archive of ``size`` bytes, from its last bytes.

    Raises ValueError where these are not the end of a whole archive, BeforeTailError where it begins before them.
    """
    place = _find_end(tail)
    _, disk, directory_disk, _, count, length, start, _ = _END.unpack_from(tail, place)
    if disk or directory_disk:
        raise ValueError("an archive split over disks")
    end = size - len(tail) + place
    large = tail[max(0, place - _END64_PLACE.size) : place].startswith(b"PK\x06\x07")
    if large or count == _FULL16 or _FULL32 in (length, start):
        end, count, length, start = _read_end64(size, tail, place)
    if start + length != end:
        raise ValueError("the directory does not end where it should")
    begin = start - (size - len(tail))
    if begin < 0:
        raise BeforeTailError(start)
    directory = Directory(start=start, raw=tail[begin : begin + length])
    names = list(directory._names())
    b"\n".join(names).decode("utf-8")
    if len(names) != count:
        raise ValueError("the directory has not the number of entries that it tells")
    return directory


def _find_end(tail: bytes) -> int:
    place = tail.rfind(b"PK\x05\x06", max(0, len(tail) - _END.size - _FULL16))
    if place < 0 or place + _END.size > len(tail):
        raise ValueError("no end of a directory")
    comment = int.from_bytes(tail[place + 20 : place + 22], "little")
    if place + _END.size + comment != len(tail):
        raise ValueError("bytes behind the end of the archive")
    return place


def _read_end64(size: int, tail: bytes, place: int) -> tuple[int, int, int, int]:
    """Place of the large end record in the archive; count, length and start of the directory."""
    signature, _, end, _ = _END64_PLACE.unpack_from(tail, place - _END64_PLACE.size)
    inside = end - (size - len(tail))
    if signature != b"PK\x06\x07" or inside < 0:
        raise ValueError("no large end record")
    signature, *_, count, length, start = _END64.unpack_from(tail, inside)
    if signature != b"PK\x06\x06":
        raise ValueError("no large end record")
    return end, count, length, start


def _read_large(extra: bytes, size: int, packed: int, start: int) -> tuple[int, int, int]:
    """The numbers that did not fit in 32 bits, from the extra field with the id 1; they stand there in this order."""
    place = 0
    while place + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, place)
        if kind == 1:
            numbers = iter(struct.unpack_from(f"<{length // 8}Q", extra, place + 4))
            try:
                size, packed, start = (next(numbers) if n == _FULL32 else n for n in (size, packed, start))
            except RuntimeError as error:
                raise ValueError("a large member without its sizes") from error
            return size, packed, start
        place += 4 + length
    raise ValueError("a large member without its sizes")
