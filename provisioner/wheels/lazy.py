"""Members of a wheel without the wheel: a file on disk, or a URL read by range requests.

The directory of a zip stands at its end, and builders put ``*.dist-info`` last, so one request for the tail brings the
directory, RECORD and METADATA; each other member costs at most one request more. Whatever is read is checked by its CRC
and by RECORD's digest.
"""

from __future__ import annotations

import io
import posixpath
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, Self
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name

from provisioner.digests import Digest, digest_of
from provisioner.errors import CannotObtainError, HashMismatchError, InvalidInputError, NetworkError, NoSuchBuildError
from provisioner.wheels.names import parse_wheel_name
from provisioner.wheels.record import Record, parse_record
from provisioner.wheels.transport import Progress, Transport, redact

_FIRST_TAIL = 768 << 10
"""Bytes. Directory, RECORD and METADATA of vllm 0.24 to 0.33 take 717 to 920 KB; a second request brings the rest."""
_RECORD_SHARE = 0.45
"""Of the directory's size, to be read before it where the tail lacks both: RECORD takes 0.39 of it in these wheels."""
_GAP = 16 << 10
"""Bytes worth reading in vain to save a request."""
_READERS = 8
_LOCAL_HEADER = 30


class Wheel(Protocol):
    """A wheel whose members can be read."""

    filename: str

    def names(self) -> tuple[str, ...]:
        """All members, as the archive orders them."""

    def record_text(self) -> str:
        """The text of RECORD as shipped."""

    def record(self) -> Record:
        """RECORD, parsed."""

    def metadata_text(self) -> str:
        """The text of METADATA."""

    def read(self, path: str) -> bytes:
        """One member. Raises KeyError where it is missing, HashMismatchError where it is not what RECORD says."""

    def read_many(self, paths: Iterable[str]) -> Mapping[str, bytes]:
        """Several members in as few requests as useful, in parallel where remote. Raises as ``read`` does."""

    def close(self) -> None:
        """Give back what is held."""


@dataclass(frozen=True, slots=True)
class Member:
    """Where one member lies: bytes ``start`` to ``stop`` hold its local header and its data."""

    start: int
    stop: int
    packed: int
    size: int
    crc: int
    method: int


class _Spans(Protocol):
    """Bytes of a file, by place."""

    where: str

    def tail(self, length: int) -> tuple[int, bytes]:
        """The size of the whole file and its last ``length`` bytes, or all of it where it is shorter."""

    def spans(self, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes from each start to its stop."""

    def close(self) -> None: ...


class _ZippedWheel:
    """A wheel over anything that gives bytes by place."""

    def __init__(self, filename: str, spans: _Spans) -> None:
        self.filename = unquote(filename)
        self._spans = spans

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._spans.close()

    def names(self) -> tuple[str, ...]:
        return tuple(self._head.members)

    def record_text(self) -> str:
        return self._head.record

    def record(self) -> Record:
        return self._record

    def metadata_text(self) -> str:
        return self._head.metadata

    def read(self, path: str) -> bytes:
        return self.read_many((path,))[path]

    def read_many(self, paths: Iterable[str]) -> Mapping[str, bytes]:
        wanted = tuple(dict.fromkeys(paths))
        for path in wanted:
            if path not in self._head.members:
                raise KeyError(path)
        return dict(zip(wanted, self._read_members(wanted), strict=True))

    def _read_members(self, paths: Sequence[str]) -> Iterator[bytes]:
        members = [self._head.members[path] for path in paths]
        spans = _join_spans([(member.start, member.stop) for member in members])
        blocks = dict(zip(spans, self._spans.spans(spans), strict=True))
        for path, member in zip(paths, members, strict=True):
            span = next(span for span in spans if span[0] <= member.start and member.stop <= span[1])
            raw = blocks[span][member.start - span[0] : member.stop - span[0]]
            yield self._checked(path, unpack_member(path, member, raw, where=self._spans.where))

    def _checked(self, path: str, data: bytes) -> bytes:
        expected = self._record.digest(path)
        if expected is None and not _needs_no_digest(path, self._head.dist_info):
            raise HashMismatchError(f"RECORD vouches for no digest of {path}", where=self._spans.where)
        if expected is not None and digest_of(data) != expected:
            raise HashMismatchError(
                f"{path} is not what RECORD says",
                where=self._spans.where,
                expected=f"sha256 {expected}",
                found=f"sha256 {digest_of(data)}",
            )
        return data

    @cached_property
    def _head(self) -> Head:
        return read_head(self.filename, self._spans)

    @cached_property
    def _record(self) -> Record:
        return parse_record(self._head.record, where=f"{self.filename}: RECORD")


@dataclass(frozen=True, kw_only=True)
class Head:
    """What the tail of a wheel tells: its members, the name of its dist-info folder, and the two texts in it."""

    members: Mapping[str, Member]
    dist_info: str
    record: str
    metadata: str
    tail_bytes: int


class LocalWheel(_ZippedWheel):
    """A wheel file on disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.name, _FileSpans(path))


class RemoteWheel(_ZippedWheel):
    """A wheel at a URL.

    ``size`` is in bytes, where an index told it; ``progress`` is called when the whole file must be downloaded.
    """

    def __init__(
        self,
        url: str,
        transport: Transport,
        *,
        size: int | None = None,
        sha256: Digest | None = None,
        progress: Progress | None = None,
    ) -> None:
        filename = unquote(urlsplit(url).path.rpartition("/")[2])
        super().__init__(filename, _UrlSpans(url, transport, size=size, sha256=sha256, progress=progress))


class _FileSpans:
    def __init__(self, path: Path) -> None:
        self.where = str(path)
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise CannotObtainError("the wheel cannot be read", where=str(path), found=error.strerror) from error

    def tail(self, length: int) -> tuple[int, bytes]:
        size = self._file.seek(0, io.SEEK_END)
        self._file.seek(max(0, size - length))
        return size, self._file.read(length)

    def spans(self, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self._read(start, stop) for start, stop in wanted]

    def close(self) -> None:
        self._file.close()

    def _read(self, start: int, stop: int) -> bytes:
        self._file.seek(start)
        return self._file.read(stop - start)


class _UrlSpans:
    """Ranges of a URL; where the server gives none, the whole file is downloaded once, to a temporary file."""

    def __init__(
        self, url: str, transport: Transport, *, size: int | None, sha256: Digest | None, progress: Progress | None
    ) -> None:
        self.where = redact(url)
        self._url, self._transport, self._size, self._sha256, self._progress = url, transport, size, sha256, progress
        self._validator: str | None = None
        self._whole: _FileSpans | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def tail(self, length: int) -> tuple[int, bytes]:
        if self._whole is not None:
            return self._whole.tail(length)
        # A range with both ends is understood by more servers than a suffix; PyPI's index tells the size it needs.
        start = max(0, self._size - length) if self._size else -length
        reply = self._transport.fetch_range(self._url, start, self._size)
        if reply.status == 416 and start < 0:
            return self._tail_by_size(length)
        if reply.status != 206:
            return self._download(reply.status).tail(length)
        return self._noted(reply.total_size, reply.validator), reply.body

    def spans(self, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        if self._whole is not None:
            return self._whole.spans(wanted)
        if len(wanted) < 2:
            return [self._fetch(span) for span in wanted]
        with ThreadPoolExecutor(min(_READERS, len(wanted)), thread_name_prefix="wheel") as pool:
            return list(pool.map(self._fetch, wanted))

    def close(self) -> None:
        if self._whole is not None:
            self._whole.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _tail_by_size(self, length: int) -> tuple[int, bytes]:
        """For servers that know ranges but no suffixes: one byte tells the size."""
        reply = self._transport.fetch_range(self._url, 0, 1)
        if reply.status != 206:
            return self._download(reply.status).tail(length)
        size = self._noted(reply.total_size, reply.validator)
        start = max(0, size - length)
        return size, self._fetch((start, size))

    def _noted(self, total: int | None, validator: str | None) -> int:
        if total is None:
            raise NetworkError("the server does not tell the size of the file", where=self.where)
        if self._size is not None and self._size != total:
            raise HashMismatchError(
                "the file has not the size that the index tells",
                where=self.where,
                expected=f"{self._size} bytes",
                found=f"{total} bytes",
            )
        self._size, self._validator = total, validator
        return total

    def _fetch(self, span: tuple[int, int]) -> bytes:
        reply = self._transport.fetch_range(self._url, span[0], span[1], if_match=self._validator)
        if reply.status == 206 and reply.total_size == self._size and reply.validator == self._validator:
            return reply.body
        if reply.status == 200:
            return self._download(200).spans([span])[0]
        raise NetworkError(
            "the file changed on the server while it was read", where=self.where, hints=("run the command again",)
        )

    def _download(self, status: int) -> _FileSpans:
        if status in (403, 404, 410):
            raise NoSuchBuildError(
                f"the index lists this wheel, but the server does not have it ({status})",
                where=self.where,
                hints=("it may still be being uploaded: run the command again in some minutes", "name another build"),
            )
        if status != 200:
            raise NetworkError(f"the server answered {status}", where=self.where)
        self._folder = tempfile.TemporaryDirectory(prefix="provision-")
        path = Path(self._folder.name) / posixpath.basename(unquote(urlsplit(self._url).path))
        self._transport.download(self._url, path, expected=self._sha256, size=self._size, progress=self._progress)
        self._whole = _FileSpans(path)
        return self._whole


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


def read_head(filename: str, spans: _Spans) -> Head:
    """Directory, RECORD and METADATA of a wheel, in one reading of its tail or two.

    Raises InvalidInputError where the bytes are no wheel.
    """
    size, tail = spans.tail(_FIRST_TAIL)
    try:
        members = read_directory(size, tail)
    except _OutsideError as outside:
        before = int((size - outside.place) * _RECORD_SHARE)
        tail = _extend(spans, size, tail, max(0, outside.place - before))
        members = _directory_or_error(size, tail, spans.where)
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise _not_a_wheel(spans.where) from error
    dist_info = find_dist_info(filename, members, where=spans.where)
    paths = (f"{dist_info}/RECORD", f"{dist_info}/METADATA")
    tail = _extend(spans, size, tail, min(members[path].start for path in paths))
    texts = [_tail_text(path, members[path], size, tail, spans.where) for path in paths]
    return Head(members=members, dist_info=dist_info, record=texts[0], metadata=texts[1], tail_bytes=len(tail))


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


def _extend(spans: _Spans, size: int, tail: bytes, start: int) -> bytes:
    """``tail``, reaching back to ``start`` at least."""
    known = size - len(tail)
    return tail if start >= known else spans.spans([(start, known)])[0] + tail


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


def _join_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and start - joined[-1][1] <= _GAP:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def _needs_no_digest(path: str, dist_info: str) -> bool:
    """RECORD cannot hold its own digest, nor that of a signature over it."""
    return path in (f"{dist_info}/RECORD", f"{dist_info}/RECORD.jws", f"{dist_info}/RECORD.p7s")
