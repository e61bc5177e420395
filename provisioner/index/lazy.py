"""Members of a wheel without the wheel: a file on disk, or a URL read by range requests.

The directory of a zip stands at its end, and builders put ``*.dist-info`` last, so one request for the tail brings the
directory, RECORD and METADATA; each other member costs at most one request more. Whatever is read is checked by its CRC
and by RECORD's digest, and kept in the cache where there is one.
"""

from __future__ import annotations

import hashlib
import io
import struct
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Protocol, Self
from urllib.parse import unquote, urlsplit

from provisioner.digests import Digest, digest_of
from provisioner.errors import CannotObtainError, HashMismatchError, InvalidWheelError, NetworkError
from provisioner.index.cache import Entry, WheelCache, key_of_url
from provisioner.index.download import download_wheel
from provisioner.index.transport import GONE, Progress, Reply, Transport, missing_file
from provisioner.wheels.directory import Member
from provisioner.wheels.record import Record
from provisioner.wheels.urls import redact, strip_credentials
from provisioner.wheels.zipped import (
    ENDING_BYTES,
    HEAD_FORM,
    LOCAL_HEADER,
    Head,
    data_offset,
    decode_head,
    encode_head,
    is_same_ending,
    read_head,
    unpack_member,
)

_FIRST_TAIL = 768 << 10
"""Bytes. Directory, RECORD and METADATA of vllm 0.24 to 0.33 take 717 to 920 KB; a second request brings the rest."""
_GAP = 16 << 10
"""Bytes worth reading in vain to save a request."""
_READERS = 8
_BLOCK = 1 << 20
_FRESH = 3600.0
"""Seconds for which a wheel known by its URL alone is not asked about again."""


class Wheel(Protocol):
    """A wheel whose members can be read. Paths are as RECORD writes them."""

    filename: str

    def names(self) -> tuple[str, ...]:
        """All members, as the archive orders them."""

    def record_text(self) -> str:
        """The text of RECORD as shipped."""

    def record(self) -> Record:
        """RECORD, parsed (some 40 ms for vLLM's five thousand rows; ``digests`` needs none of it)."""

    def digests(self, paths: Iterable[str]) -> Mapping[str, Digest | None]:
        """RECORD's digest of each path; None where it lists none."""

    def metadata_text(self) -> str:
        """The text of METADATA."""

    def read(self, path: str) -> bytes:
        """One member. Raises KeyError where it is missing, HashMismatchError where it is not what RECORD says."""

    def read_many(self, paths: Iterable[str]) -> Mapping[str, bytes]:
        """Several members in as few requests as useful, in parallel where remote. Raises as ``read`` does."""

    def close(self) -> None:
        """Give back what is held."""


class _ZippedWheel(Protocol):
    """A wheel over anything that gives a head and bytes by place: what a class must have, and what comes of it."""

    filename: str
    where: str

    @abstractmethod
    def close(self) -> None:
        """Give back what is held."""

    @abstractmethod
    def _load_head(self) -> Head:
        """Directory, RECORD and METADATA."""

    @abstractmethod
    def _load_spans(self, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes from each start to its stop."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> tuple[str, ...]:
        return self._head.directory.names()

    def record_text(self) -> str:
        return self._head.record

    def record(self) -> Record:
        return self._head.parsed_record

    def digests(self, paths: Iterable[str]) -> Mapping[str, Digest | None]:
        return {path: self._head.digest(path) for path in paths}

    def metadata_text(self) -> str:
        return self._head.metadata

    def read(self, path: str) -> bytes:
        return self.read_many((path,))[path]

    def read_many(self, paths: Iterable[str]) -> Mapping[str, bytes]:
        wanted = tuple(dict.fromkeys(paths))
        for path in wanted:
            if self._head.member(path) is None:
                raise KeyError(path)
        return self._read_members(wanted)

    @cached_property
    def _head(self) -> Head:
        return self._load_head()

    def _read_members(self, paths: Sequence[str]) -> dict[str, bytes]:
        members = {path: member for path in paths if (member := self._head.member(path)) is not None}
        spans = join_spans((member.start, member.stop) for member in members.values())
        blocks = dict(zip(spans, self._load_spans(spans), strict=True))
        contents: dict[str, bytes] = {}
        for path, member in members.items():
            start, stop = next(span for span in spans if span[0] <= member.start and member.stop <= span[1])
            raw = blocks[start, stop][member.start - start : member.stop - start]
            contents[path] = self._checked(path, unpack_member(path, member, raw, where=self.where))
        return contents

    def _checked(self, path: str, data: bytes) -> bytes:
        expected = self._head.digest(path)
        if expected is None and not self._head.needs_no_digest(path):
            raise HashMismatchError(f"RECORD vouches for no digest of {path}", where=self.where)
        if expected is not None and digest_of(data) != expected:
            raise HashMismatchError(
                f"{path} is not what RECORD says",
                where=self.where,
                expected=f"sha256 {expected}",
                found=f"sha256 {digest_of(data)}",
            )
        return data


class LocalWheel(_ZippedWheel):
    """A wheel file on disk."""

    def __init__(self, path: Path) -> None:
        self.filename, self.where = unquote(path.name), str(path)
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise CannotObtainError("the wheel cannot be read", where=str(path), found=error.strerror) from error

    def close(self) -> None:
        self._file.close()

    def members(self) -> dict[str, Member]:
        """Every member by its path, as the archive orders them. Raises InvalidWheelError where one cannot be used."""
        try:
            return self._head.directory.members()
        except (ValueError, struct.error) as error:
            raise InvalidWheelError(f"the zip directory cannot be used: {error}", where=self.where) from error

    def packed_blocks(self, member: Member) -> Iterator[bytes]:
        """The data of a member as it is packed, a megabyte at a time. Raises HashMismatchError where it ends early."""
        header = self._span(member.start, member.start + LOCAL_HEADER)
        place = member.start + data_offset(header, where=self.where)
        stop = place + member.packed
        while place < stop:
            block = self._span(place, min(stop, place + _BLOCK))
            if not block:
                raise HashMismatchError("the file ends within a member", where=self.where)
            yield block
            place += len(block)

    def digest(self) -> Digest:
        """The digest of the whole file, which may be read elsewhere at the same time."""
        with Path(self.where).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _load_head(self) -> Head:
        size = self._file.seek(0, io.SEEK_END)
        tail = self._span(max(0, size - _FIRST_TAIL), size)
        return read_head(self.filename, size, tail, self._span, where=self.where)

    def _load_spans(self, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self._span(start, stop) for start, stop in wanted]

    def _span(self, start: int, stop: int) -> bytes:
        self._file.seek(start)
        return self._file.read(stop - start)


class RemoteWheel(_ZippedWheel):
    """A wheel at a URL, read by ranges; where the server gives none, the whole file is downloaded once.

    ``size`` (bytes) and ``sha256`` are what an index told. The digest makes the cache's answer final; without it the
    server is asked now and then whether the file is still the same. ``progress`` is called while a whole file is
    downloaded.
    """

    def __init__(
        self,
        url: str,
        transport: Transport,
        *,
        size: int | None = None,
        sha256: Digest | None = None,
        cache: WheelCache | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.filename, self.where = unquote(urlsplit(url).path.rpartition("/")[2]), redact(url)
        self._url, self._transport, self._cache, self._progress = url, transport, cache, progress
        self._size, self._sha256 = size, sha256
        self._key = f"sha256-{sha256}" if sha256 else key_of_url(strip_credentials(url))
        self._validator: str | None = None
        self._whole: LocalWheel | None = None
        self._guard = threading.Lock()
        self._held = ExitStack()

    def hold(self, resource: Transport) -> Self:
        """Close ``resource`` with this wheel."""
        self._held.enter_context(resource)
        return self

    def close(self) -> None:
        self._held.close()
        if self._cache is not None:
            self._cache.trim()

    def read_many(self, paths: Iterable[str]) -> Mapping[str, bytes]:
        wanted = tuple(dict.fromkeys(paths))
        found = {path: data for path in wanted if (data := self._cached_member(path)) is not None}
        fetched = super().read_many(path for path in wanted if path not in found)
        for path, data in fetched.items():
            digest = self._head.digest(path)
            if self._cache is not None and digest is not None:
                self._cache.store_member(digest, data)
        return {path: found[path] if path in found else fetched[path] for path in wanted}

    def _cached_member(self, path: str) -> bytes | None:
        digest = self._head.digest(path)
        if self._cache is None or digest is None or self._head.member(path) is None:
            return None
        return self._cache.load_member(digest)

    def _load_head(self) -> Head:
        entry = self._cache.load("heads", self._key) if self._cache is not None else None
        if entry is not None and entry.facts.get("form") != HEAD_FORM:
            entry = None
        if self._cache is not None and entry is not None and self._is_current(entry):
            if entry.age >= _FRESH:
                self._cache.renew("heads", self._key)
            head = decode_head(entry.facts, entry.data)
            self._size = head.size
            return head
        head = self._read_head()
        if self._cache is not None:
            self._cache.store("heads", self._key, *encode_head(head))
        return head

    def _is_current(self, entry: Entry) -> bool:
        """With the wheel's digest for a key there is no doubt; a URL is asked for its end now and then."""
        if self._sha256 is not None or entry.age < _FRESH:
            return True
        reply = self._ask(-ENDING_BYTES, None)
        head = decode_head(entry.facts, entry.data)
        if reply.status != 206 or reply.total_size is None or not is_same_ending(head, reply.total_size, reply.body):
            return False
        self._validator = reply.validator
        return True

    def _read_head(self) -> Head:
        # A range with both ends is understood by more servers than a suffix; PyPI's index tells the size it needs.
        reply = self._ask(max(0, self._size - _FIRST_TAIL) if self._size else -_FIRST_TAIL, self._size)
        if reply.status == 416:
            reply = self._ask_by_size()
        if reply.status != 206:
            return self._download()._head
        self._note(reply)
        assert self._size is not None
        return read_head(self.filename, self._size, reply.body, self._fetch, where=self.where)

    def _ask_by_size(self) -> Reply:
        """The tail, of a server that knows ranges but no suffixes: one byte tells the size."""
        first = self._ask(0, 1)
        if first.status != 206:
            return first
        self._note(first)
        assert self._size is not None
        return self._ask(max(0, self._size - _FIRST_TAIL), self._size)

    def _load_spans(self, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        if self._whole is not None:
            return self._whole._load_spans(wanted)
        if len(wanted) < 2:
            return [self._fetch(start, stop) for start, stop in wanted]
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(_READERS, len(wanted)), thread_name_prefix="wheel") as pool:
            return list(pool.map(lambda span: self._fetch(*span), wanted))

    def _fetch(self, start: int, stop: int) -> bytes:
        if self._whole is not None:
            return self._whole._span(start, stop)
        reply = self._ask(start, stop)
        if reply.status == 200:
            with self._guard:
                return self._download()._span(start, stop)
        if reply.status != 206:
            raise self._changed()
        self._note(reply)
        return reply.body

    def _ask(self, start: int, stop: int | None) -> Reply:
        reply = self._transport.fetch_range(self._url, start, stop, if_match=self._validator)
        if reply.status in GONE:
            raise missing_file(self._url, reply.status)
        return reply

    def _note(self, reply: Reply) -> None:
        """Remember which file this is; another one from now on is an error."""
        if reply.total_size is None:
            raise NetworkError("the server does not tell the size of the file", where=self.where)
        if self._validator is not None and reply.validator != self._validator:
            raise self._changed()
        if self._size is not None and self._size != reply.total_size:
            raise HashMismatchError(
                "the file has not the size that it should have",
                where=self.where,
                expected=f"{self._size} bytes",
                found=f"{reply.total_size} bytes",
            )
        self._size, self._validator = reply.total_size, reply.validator

    def _changed(self) -> NetworkError:
        return NetworkError(
            "the file changed on the server while it was read", where=self.where, hints=("run the command again",)
        )

    def _download(self) -> LocalWheel:
        if self._whole is None:
            self._whole = self._held.enter_context(LocalWheel(self._download_file()))
        return self._whole

    def _download_file(self) -> Path:
        if self._cache is None:
            import tempfile

            folder = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="provision-")))
            return self._transport.download(
                self._url, folder / self.filename, expected=self._sha256, size=self._size, progress=self._progress
            ).path
        return download_wheel(
            self._url,
            self._transport,
            self._cache,
            filename=self.filename,
            sha256=self._sha256,
            size=self._size,
            progress=self._progress,
        ).path


def join_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and start - joined[-1][1] <= _GAP:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined
