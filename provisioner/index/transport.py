"""HTTP for wheels: time limits, retries, ranges, downloads that resume, and a count of what it cost.

Requests is imported only when the first request is made: it costs 0.12 s, and a local wheel needs none of it.
Proxies, netrc and certificates are what requests takes from the environment. Credentials in a URL are sent to that host
alone and never shown.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

from provisioner import __version__
from provisioner.digests import Digest
from provisioner.errors import CannotObtainError, HashMismatchError, NetworkError, NoSuchBuildError, ProvisionError
from provisioner.records import dataclass
from provisioner.wheels.urls import redact, strip_credentials

if TYPE_CHECKING:
    import requests

    from provisioner.index.settings import IndexSettings

Progress = Callable[[int, int | None], None]
"""Called with the bytes so far and the whole size in bytes, where it is known."""

_CHUNK = 1 << 16
_SLOWEST = 1024
"""Bytes a second. A download below this for a minute is as good as dead: the next attempt goes on from where it is."""
_SLOW_FOR = 60.0
GONE = frozenset({403, 404, 410})
"""Object stores answer 403 for what does not exist to those who may not list it."""
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What was asked of servers: requests (redirects count), and bytes of bodies as they were received."""

    requests: int
    received: int

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(requests=self.requests - other.requests, received=self.received - other.received)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One answer: ``url`` is where redirects ended, header names are in lower case; ``body`` may be left unread."""

    status: int
    url: str
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False, default=b"")

    @property
    def total_size(self) -> int | None:
        """Size in bytes of the whole file, from Content-Range."""
        _, _, total = self.headers.get("content-range", "").partition("/")
        return int(total) if total.isdigit() else None

    @property
    def range_start(self) -> int | None:
        span = self.headers.get("content-range", "").removeprefix("bytes").strip()
        start, _, _ = span.partition("-")
        return int(start) if start.isdigit() else None

    @property
    def validator(self) -> str | None:
        """A strong ETag, else the modification time; None where the server gives neither."""
        etag = self.headers.get("etag")
        if etag and not etag.startswith("W/"):
            return etag
        return self.headers.get("last-modified")


@dataclass(frozen=True, kw_only=True)
class Download:
    """A file that was downloaded: its place, its sha256 as computed on the way, its size in bytes."""

    path: Path
    sha256: Digest
    size: int
    validator: str | None = None


class _TryAgainError(Exception):
    """An attempt failed in a way that another one may mend. Never leaves this module."""

    def __init__(self, why: str, *, after: float | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.after = after


class Transport:
    """All requests of one run. Safe for threads; connections are kept and shared between them."""

    def __init__(self, settings: IndexSettings, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._settings = settings
        self._sleep = sleep
        self._guard = threading.Lock()
        self._local = threading.local()
        self._adapter: requests.adapters.HTTPAdapter | None = None
        self._sessions: list[requests.Session] = []
        self._credentials: dict[str, tuple[str, str]] = {}
        self._requests = 0
        self._received = 0

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._guard:
            sessions, self._sessions, self._adapter = self._sessions, [], None
            self._local = threading.local()
        for session in sessions:
            session.close()

    @property
    def traffic(self) -> Traffic:
        with self._guard:
            return Traffic(requests=self._requests, received=self._received)

    def fetch(
        self,
        url: str,
        *,
        accept: frozenset[int],
        headers: Mapping[str, str] | None = None,
        unread: frozenset[int] = frozenset(),
    ) -> Reply:
        """One small answer with a status in ``accept``; the bodies of statuses in ``unread`` are left where they are.

        Raises NetworkError when the server cannot be reached, keeps failing, or answers with any other status.
        """
        return self._persist(url, lambda: self._fetch_once(url, accept, headers or {}, unread))

    def fetch_range(self, url: str, start: int, stop: int | None = None, *, if_match: str | None = None) -> Reply:
        """Bytes ``start`` to ``stop`` (exclusive), or the last ``-start`` bytes where ``start`` is negative.

        Status 206 with the body; 200 (no ranges here) and 416 (no such range) without one.
        """
        span = f"bytes={start}" if start < 0 else f"bytes={start}-{stop - 1 if stop is not None else ''}"
        headers = {"Range": span, "Accept-Encoding": "identity"}
        if if_match and if_match.startswith('"'):
            headers["If-Match"] = if_match
        reply = self.fetch(
            url,
            accept=frozenset({200, 206, 412, 416}) | GONE,
            headers=headers,
            unread=frozenset({200, 412, 416}),
        )
        return _checked_range(reply, start, stop)

    def download(
        self,
        url: str,
        path: Path,
        *,
        expected: Digest | None = None,
        size: int | None = None,
        progress: Progress | None = None,
    ) -> Download:
        """Write ``url`` to ``path``, hashing on the way.

        Bytes arrive in ``path`` + ``.part``, which a broken download leaves for the next to go on from (with If-Range,
        so a file that changed on the server starts anew); ``path`` appears whole or not at all.
        Raises HashMismatchError where ``expected`` is another digest; the bytes are dropped then.
        """
        part = path.with_name(path.name + ".part")
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = self._persist(
            url, lambda: self._download_once(url, part, size, progress), progress_of=lambda: _size_of(part)
        )
        validator = _read_note(_note_path(part))
        if expected is not None and digest != expected:
            part.unlink()
            _note_path(part).unlink(missing_ok=True)
            raise HashMismatchError(
                "the downloaded file is not the one that was promised",
                where=redact(url),
                expected=f"sha256 {expected}",
                found=f"sha256 {digest}",
                hints=("run the command again; if it fails again, the index serves another file: make a new lock",),
            )
        part.replace(path)
        _note_path(part).unlink(missing_ok=True)
        return Download(path=path, sha256=digest, size=path.stat().st_size, validator=validator)

    def is_unchanged(self, url: str, validator: str) -> bool:
        """Whether the file at ``url`` is still the one that came with ``validator``; its bytes are not read."""
        condition = "If-None-Match" if validator.startswith('"') else "If-Modified-Since"
        reply = self.fetch(
            url, accept=frozenset({200, 304, 403, 404, 410}), headers={condition: validator}, unread=frozenset({200})
        )
        return reply.status == 304 or (reply.status == 200 and reply.validator == validator)

    def _persist(
        self, url: str, attempt: Callable[[], _Result], *, progress_of: Callable[[], int] = lambda: 0
    ) -> _Result:
        """Try until it works, or fails more often in a row than the settings allow without getting any further."""
        failures, reached = 0, progress_of()
        while True:
            try:
                return attempt()
            except _TryAgainError as failure:
                last = failure
            got = progress_of()
            failures = 1 if got > reached else failures + 1
            reached = max(reached, got)
            if failures > self._settings.retries:
                break
            self._sleep(self._pause(failures - 1, last, url))
        raise NetworkError(
            last.why,
            where=redact(url),
            hints=("check the network and the proxy settings, then run the command again",),
        )

    def _pause(self, number: int, failure: _TryAgainError, url: str) -> float:
        import random

        if failure.after is None:
            return float(self._settings.backoff * 2**number * random.uniform(0.75, 1.25))
        if failure.after > self._settings.longest_wait:
            raise NetworkError(
                f"{failure.why}; the server asks to wait {failure.after:.0f} s",
                where=redact(url),
                hints=(f"run the command again in {failure.after:.0f} s",),
            )
        return failure.after

    def _fetch_once(
        self, url: str, accept: frozenset[int], headers: Mapping[str, str], unread: frozenset[int]
    ) -> Reply:
        deadline = time.monotonic() + self._settings.deadline
        with self._open(url, headers) as response:
            if response.status_code not in accept:
                raise _unexpected(response.status_code, url)
            body = b"" if response.status_code in unread else b"".join(self._read_body(response, deadline))
            lowered = {name.lower(): value for name, value in response.headers.items()}
            return Reply(status=response.status_code, url=strip_credentials(response.url), headers=lowered, body=body)

    def _download_once(self, url: str, part: Path, size: int | None, progress: Progress | None) -> Digest:
        hasher, have = hashlib.sha256(), 0
        headers = {"Accept-Encoding": "identity"}
        note = _read_note(_note_path(part))
        if note and part.exists():
            have = part.stat().st_size
            headers |= {"Range": f"bytes={have}-", "If-Range": note} if have else {}
        with self._open(url, headers) as response:
            if response.status_code == 416:
                part.unlink(missing_ok=True)
                raise _TryAgainError("the download ended early, and the server does not go on with it")
            if response.status_code in GONE:
                raise missing_file(url, response.status_code)
            if response.status_code not in (200, 206):
                raise _unexpected(response.status_code, url)
            resumed = response.status_code == 206
            reply = Reply(
                status=response.status_code, url=url, headers={k.lower(): v for k, v in response.headers.items()}
            )
            if resumed and reply.range_start != have:
                part.unlink(missing_ok=True)
                raise _TryAgainError("the server went on with another part than asked")
            with part.open("ab" if resumed else "wb") as file:
                if resumed:
                    _hash_file(part, hasher)
                else:
                    have = 0
                    _write_note(_note_path(part), reply.validator)
                total = reply.total_size if resumed else _content_length(response) or size
                for chunk in self._read_body(response, None):
                    file.write(chunk)
                    hasher.update(chunk)
                    have += len(chunk)
                    if progress is not None:
                        progress(have, total)
                file.flush()
                os.fsync(file.fileno())
        if total is not None and have != total:
            raise _TryAgainError(f"the download ended after {have} of {total} bytes")
        return hasher.hexdigest()

    @contextlib.contextmanager
    def _open(self, url: str, headers: Mapping[str, str]) -> Iterator[requests.Response]:
        """A response whose body is not read yet; failures of the connection become _TryAgainError."""
        import requests

        bare = strip_credentials(url)
        try:
            with self._session().get(
                bare,
                headers=dict(headers),
                auth=self._credentials_for(url),
                timeout=self._settings.timeout,
                stream=True,
            ) as response:
                with self._guard:
                    self._requests += 1 + len(response.history)
                if response.status_code in _RETRIED:
                    raise _TryAgainError(
                        f"the server answered {response.status_code}", after=_retry_after(response.headers)
                    )
                yield response
        except requests.exceptions.Timeout as error:
            raise _TryAgainError(f"no answer within {self._settings.timeout:g} s") from error
        except (
            requests.exceptions.InvalidURL,
            requests.exceptions.MissingSchema,
            requests.exceptions.InvalidSchema,
        ) as error:
            raise NetworkError("this is not a URL that can be asked", where=redact(url)) from error
        except requests.exceptions.TooManyRedirects as error:
            raise NetworkError("the server redirects in a circle", where=redact(url)) from error
        except requests.exceptions.ProxyError as error:
            raise _TryAgainError("the proxy could not be reached or refused") from error
        except requests.exceptions.SSLError as error:
            raise NetworkError(
                "the server's certificate was not accepted",
                where=redact(url),
                hints=("export REQUESTS_CA_BUNDLE=/path/to/your/ca-certificates.crt",),
            ) from error
        except requests.exceptions.RequestException as error:
            raise _TryAgainError(_plain_reason(error)) from error

    def _read_body(self, response: requests.Response, deadline: float | None) -> Iterator[bytes]:
        received, counted = 0, 0
        since, then = time.monotonic(), 0
        for chunk in _arriving(response):
            received += len(chunk)
            with self._guard:
                self._received += response.raw.tell() - counted
            counted = response.raw.tell()
            yield chunk
            now = time.monotonic()
            if deadline is not None and now > deadline:
                raise _TryAgainError(f"the answer was not complete after {self._settings.deadline:g} s")
            if now - since > _SLOW_FOR:
                if received - then < _SLOWEST * _SLOW_FOR:
                    raise _TryAgainError(f"the download slowed down to less than {_SLOWEST} bytes a second")
                since, then = now, received
        promised = _content_length(response)
        if promised is not None and "content-encoding" not in response.headers and received != promised:
            raise _TryAgainError(f"the answer ended after {received} of {promised} bytes")

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is not None:
            return session
        import requests

        from provisioner.index.connections import SharingAdapter

        session = requests.Session()
        session.headers["User-Agent"] = f"provisioner/{__version__}"
        with self._guard:
            if self._adapter is None:
                self._adapter = SharingAdapter(pool_connections=8, pool_maxsize=32)
            session.mount("https://", self._adapter)
            session.mount("http://", self._adapter)
            self._sessions.append(session)
        self._local.session = session
        return session

    def _credentials_for(self, url: str) -> tuple[str, str] | None:
        """Those in the URL, else those seen earlier for its host: index pages link to files without repeating them."""
        parts = urlsplit(url)
        origin = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        with self._guard:
            if parts.username:
                self._credentials[origin] = (unquote(parts.username), unquote(parts.password or ""))
            return self._credentials.get(origin)


def _arriving(response: requests.Response) -> Iterator[bytes]:
    """The body in pieces as they arrive: a reader that waits for full pieces would not see that a server only drips."""
    import urllib3

    read1 = getattr(response.raw, "read1", None)
    if read1 is None:  # urllib3 before 2
        yield from response.iter_content(_CHUNK)
        return
    try:
        while piece := read1(_CHUNK, decode_content=True):
            yield piece
    except urllib3.exceptions.ReadTimeoutError as error:
        raise _TryAgainError("the server stopped answering") from error
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise _TryAgainError(_plain_reason(error)) from error


def _checked_range(reply: Reply, start: int, stop: int | None) -> Reply:
    if reply.status != 206:
        return reply
    first, length = reply.range_start, len(reply.body)
    right = first is not None and (
        (first == start and (stop is None or length == stop - start))
        if start >= 0
        else (
            reply.total_size is not None
            and first == max(0, reply.total_size + start)
            and length == reply.total_size - first
        )
    )
    if right:
        return reply
    raise NetworkError(
        "the server answered with another part of the file than asked",
        where=redact(reply.url),
        expected=f"bytes {start} to {'the end' if stop is None else stop - 1}",
        found=reply.headers.get("content-range", "no Content-Range") + f", {length} bytes",
    )


def missing_file(url: str, status: int) -> NoSuchBuildError:
    """What to say of a file that an index lists and its server does not have."""
    return NoSuchBuildError(
        f"the server does not have this wheel, although the index lists it ({status})",
        where=redact(url),
        hints=("it may still be being uploaded: run the command again in some minutes", "name another build"),
    )


def _unexpected(status: int, url: str) -> ProvisionError:
    if status in (401, 403, 407):
        return CannotObtainError(
            f"the server refused access ({status})",
            where=redact(url),
            hints=("check the user name and password of the index (in its URL, in ~/.netrc), or use another index",),
        )
    return NetworkError(f"the server answered {status}", where=redact(url))


def _content_length(response: requests.Response) -> int | None:
    text = response.headers.get("Content-Length", "")
    return int(text) if text.isdigit() else None


def _retry_after(headers: Mapping[str, str]) -> float | None:
    text = headers.get("Retry-After", "").strip()
    if text.isdigit():
        return float(text)
    if not text:
        return None
    import email.utils

    try:
        moment = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, moment.timestamp() - time.time())


def _plain_reason(error: Exception) -> str:
    text = str(error)
    for sign, reason in (
        ("NameResolutionError", "the host name could not be resolved"),
        ("Connection refused", "the connection was refused"),
        ("Connection reset", "the connection was reset"),
        ("IncompleteRead", "the answer ended early"),
        ("Remote end closed", "the server closed the connection without an answer"),
        ("Network is unreachable", "the network is unreachable"),
        ("timed out", "the server stopped answering"),
    ):
        if sign in text:
            return reason
    return f"the request failed ({type(error).__name__})"


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _note_path(part: Path) -> Path:
    return part.with_name(part.name + ".validator")


def _read_note(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _write_note(path: Path, validator: str | None) -> None:
    if validator is None:
        path.unlink(missing_ok=True)
    else:
        path.write_text(validator, encoding="utf-8")


def _hash_file(path: Path, hasher: hashlib._Hash) -> None:
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            hasher.update(chunk)
