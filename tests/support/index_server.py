"""A local copy of the vLLM wheel index, as a real HTTP server, with its manners and its bad moods.

Manners, as the real one has them (an object store behind a cache): single ranges and suffixes, strong ETags, If-Match,
If-None-Match and If-Range; a literal plus in a path is a space and so a 404; a path without extension and slash is
redirected to the one with the slash; links are relative, with %2B, and carry no hashes. The same server also has a
package index (``/simple/``, JSON and HTML) and the two GitHub endpoints that are asked about commits (``/github/``).
"""

import contextlib
import email.utils
import hashlib
import json
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Self
from urllib.parse import quote, unquote, urlsplit

from packaging.version import Version

from provisioner.wheels.names import parse_wheel_name, variant_of, without_variant
from tests.support.http_server import ClosingServer

_MODIFIED = "Fri, 21 Aug 2026 03:04:05 GMT"


@dataclass(frozen=True, kw_only=True)
class Mood:
    """How a path misbehaves. ``times`` None is for ever; each answer uses one up."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    ignore_ranges: bool = False
    refuse_suffixes: bool = False
    refuse_head: bool = False
    cut_file_at: int | None = None
    """The file itself is short, as one that is being written."""
    close_after: int | None = None
    """The connection is closed in order after so many bytes of the body, although more were promised."""
    reset_after: int | None = None
    """The connection is reset after so many bytes of the body."""
    pause: float = 0.0
    """Seconds before the answer begins."""
    drip: float = 0.0
    """Seconds between pieces of 1 KB."""
    claim_length: int | None = None
    no_validators: bool = False
    shift_range: int = 0
    body: bytes | None = None
    times: int | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    port: int

    @property
    def range(self) -> str | None:
        return self.headers.get("range")


class IndexServer:
    """Serves ``files`` (path without a leading slash to bytes) on 127.0.0.1 while it is entered."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.missing_status = 404
        self.commits: dict[str, bool] = {}
        """Commits that the GitHub endpoints know, and whether each is on main."""
        self._moods: dict[str, list[Mood]] = {}
        self._lock = threading.Lock()
        self._builds: dict[str, dict[str, bytes]] = {}
        self._server = _Server(self)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._server.close()

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def simple_url(self) -> str:
        return f"{self.url}/simple"

    @property
    def github_url(self) -> str:
        return f"{self.url}/github"

    def add_build(self, folder: str, wheels: dict[str, bytes], *, nightly: bool = False, on_main: bool = True) -> None:
        """Publish ``wheels`` (file name to bytes) as the build of a commit or release; variants are in the names."""
        self.commits[folder] = on_main
        self._builds[folder] = wheels
        for filename, data in wheels.items():
            self.files[f"{folder}/{filename}"] = data
        self._write_index(folder, folder, wheels)
        if nightly:
            for path in [path for path in self.files if path.startswith("nightly/")]:
                del self.files[path]
            self._write_index("nightly", folder, wheels)

    def add_package(self, project: str, wheels: dict[str, bytes], *, requires_python: str = ">=3.10") -> None:
        """Publish wheels on the package index under ``/simple/``."""
        rows: list[dict[str, object]] = []
        links: list[tuple[str, str]] = []
        for filename, data in wheels.items():
            self.files[f"packages/{filename}"] = data
            url, sha256 = f"../../packages/{quote(filename)}", hashlib.sha256(data).hexdigest()
            links.append((f"{url}#sha256={sha256}", filename))
            rows.append(
                {
                    "filename": filename,
                    "url": url,
                    "hashes": {"sha256": sha256},
                    "size": len(data),
                    "requires-python": requires_python,
                    "upload-time": "2026-08-11T11:00:11.706962Z",
                    "yanked": False,
                }
            )
        page = {"meta": {"api-version": "1.1"}, "name": project, "versions": [], "files": rows}
        self.files[f"simple/{project}/index.json"] = json.dumps(page).encode()
        self.files[f"simple/{project}/index.html"] = _html_page(links)

    def set_mood(self, path: str, *moods: Mood) -> None:
        """Let ``path`` (without a leading slash) misbehave, in each of the ways in turn."""
        with self._lock:
            self._moods[path] = list(moods)

    def take_mood(self, path: str) -> Mood:
        with self._lock:
            moods = self._moods.get(path, [])
            while moods and moods[0].times == 0:
                moods.pop(0)
            if not moods:
                return Mood()
            mood = moods[0]
            if mood.times is not None:
                moods[0] = _used(mood)
            return mood

    def forget_requests(self) -> None:
        self.requests.clear()

    def _write_index(self, folder: str, commit: str, wheels: dict[str, bytes]) -> None:
        by_variant: dict[str | None, list[str]] = {None: []}
        for filename in wheels:
            by_variant.setdefault(variant_of(parse_wheel_name(filename).version), []).append(filename)
        for variant, filenames in by_variant.items():
            base = f"{folder}/{variant}" if variant else folder
            up = "../" * (base.count("/") + 2)
            if not filenames:
                continue
            links = [(f"{up}{commit}/{quote(filename)}", filename) for filename in filenames]
            self.files[f"{base}/vllm/index.html"] = _html_page(links)
            rows = [_metadata_row(filename, link, variant) for link, filename in links]
            self.files[f"{base}/vllm/metadata.json"] = json.dumps(rows, indent=2).encode()
            self.files[f"{base}/index.html"] = _html_page([("vllm/", "vllm")])
        folders = [("vllm/", "vllm")] if by_variant[None] else []
        self.files[f"{folder}/index.html"] = _html_page([*folders, *((f"{v}/", v) for v in by_variant if v)])


class _Server(ClosingServer):
    def __init__(self, index: IndexServer) -> None:
        super().__init__(_Handler)
        self.index = index


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 30

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the name is the base class's)
        """Stay quiet."""

    def do_HEAD(self) -> None:
        self._answer(send_body=False)

    def do_GET(self) -> None:
        self._answer(send_body=True)

    def _answer(self, *, send_body: bool) -> None:
        raw = urlsplit(self.path).path.lstrip("/")
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.index.requests.append(
            Request(method=self.command, path=raw, headers=headers, port=self.client_address[1])
        )
        mood = self.server.index.take_mood(raw)
        if mood.pause:
            self.server.closing.wait(mood.pause)
        if mood.refuse_head and self.command == "HEAD":
            return self._send(405, {}, b"", mood, send_body=send_body)
        if mood.status is not None:
            return self._send(mood.status, mood.headers, mood.body or b"no", mood, send_body=send_body)
        if raw.startswith("github/"):
            return self._send(*_github_answer(self.server.index, raw), mood, send_body=send_body)
        return self._send_file(raw, headers, mood, send_body=send_body)

    def _send_file(self, raw: str, headers: dict[str, str], mood: Mood, *, send_body: bool) -> None:
        path, kind = _find_file(self.server.index, raw, headers)
        if path is None:
            if _lacks_slash(raw):
                return self._send(301, {"Location": f"/{raw}/"}, b"", mood, send_body=send_body)
            return self._send(self.server.index.missing_status, {}, b"<Error/>", mood, send_body=send_body)
        data = self.server.index.files[path][: mood.cut_file_at] if mood.body is None else mood.body
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        facts = {"Content-Type": kind, **mood.headers}
        if not mood.ignore_ranges:
            facts["Accept-Ranges"] = "bytes"
        if not mood.no_validators:
            facts |= {"ETag": etag, "Last-Modified": _MODIFIED}
        if headers.get("if-match", etag) != etag:
            return self._send(412, {}, b"", mood, send_body=send_body)
        if headers.get("if-none-match") == etag:
            return self._send(304, facts, b"", mood, send_body=False)
        wanted = headers.get("range")
        if mood.ignore_ranges or wanted is None or headers.get("if-range", etag) != etag or "," in wanted:
            return self._send(200, facts, data, mood, send_body=send_body)
        return self._send_range(wanted, facts, data, mood, send_body=send_body)

    def _send_range(self, wanted: str, facts: dict[str, str], data: bytes, mood: Mood, *, send_body: bool) -> None:
        span = _parse_range(wanted, len(data))
        if span is None or (mood.refuse_suffixes and wanted.startswith("bytes=-")):
            return self._send(416, {"Content-Range": f"bytes */{len(data)}"}, b"", mood, send_body=send_body)
        start, stop = span[0] + mood.shift_range, span[1] + mood.shift_range
        facts["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        return self._send(206, facts, data[start:stop], mood, send_body=send_body)

    def _send(self, status: int, facts: dict[str, str], body: bytes, mood: Mood, *, send_body: bool) -> None:
        self.send_response(status)
        for name, value in facts.items():
            self.send_header(name, value)
        self.send_header("Date", email.utils.formatdate(usegmt=True))
        if status != 304:
            self.send_header("Content-Length", str(len(body) if mood.claim_length is None else mood.claim_length))
        self.end_headers()
        if send_body:
            self._send_body(body, mood)

    def _send_body(self, body: bytes, mood: Mood) -> None:
        limit = next((n for n in (mood.close_after, mood.reset_after) if n is not None), len(body))
        with contextlib.suppress(OSError):
            for piece in _pieces(body[:limit], mood.drip, self.server.closing):
                self.wfile.write(piece)
                self.wfile.flush()
            if mood.reset_after is not None:
                # Without lingering, closing sends a reset instead of an orderly end.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if limit < len(body) or mood.claim_length is not None:
            self.close_connection = True
            if mood.reset_after is not None:
                self.connection.close()


def _pieces(body: bytes, drip: float, closing: threading.Event) -> Iterator[bytes]:
    if not drip:
        yield body
        return
    for start in range(0, len(body), 1024):
        closing.wait(drip)
        yield body[start : start + 1024]


def _find_file(server: IndexServer, raw: str, headers: dict[str, str]) -> tuple[str | None, str]:
    """The stored file for a path as it was asked: a literal plus is a space to the store, and no key has one."""
    path = unquote(raw.replace("+", " "))
    if path.endswith("/") or not path:
        wants_json = "application/vnd.pypi.simple.v1+json" in headers.get("accept", "")
        if wants_json and f"{path}index.json" in server.files:
            return f"{path}index.json", "application/vnd.pypi.simple.v1+json"
        path += "index.html"
    kind = {"html": "text/html", "json": "application/json"}.get(path.rpartition(".")[2], "binary/octet-stream")
    return (path if path in server.files else None), kind


def _lacks_slash(raw: str) -> bool:
    return not raw.endswith("/") and "." not in raw.rpartition("/")[2]


def _parse_range(text: str, size: int) -> tuple[int, int] | None:
    first, _, last = text.removeprefix("bytes=").partition("-")
    if not first:
        return (max(0, size - int(last)), size) if int(last) else None
    start = int(first)
    return (start, min(size, int(last) + 1) if last else size) if start < size else None


def _github_answer(server: IndexServer, raw: str) -> tuple[int, dict[str, str], bytes]:
    kind = {"Content-Type": "application/json"}
    what, _, name = raw.partition("/commits/")
    if name:
        found = [commit for commit in server.commits if commit.startswith(name)]
        if len(found) != 1:
            return 422, kind, json.dumps({"message": f"No commit found for SHA: {name}"}).encode()
        return 200, kind, json.dumps({"sha": found[0]}).encode()
    what, _, span = raw.partition("/compare/")
    base, _, head = unquote(span).partition("...")
    if not what or head != "main" or base not in server.commits:
        return 404, kind, b'{"message": "Not Found"}'
    return 200, kind, json.dumps({"status": "ahead" if server.commits[base] else "diverged"}).encode()


def _html_page(links: Iterable[tuple[str, str]]) -> bytes:
    rows = "\n".join(f'    <a href="{href}">{text}</a><br/>' for href, text in links)
    head = '<meta name="pypi:repository-version" content="1.0">'
    return f"<!DOCTYPE html>\n<html>\n  {head}\n  <body>\n{rows}\n  </body>\n</html>\n".encode()


def _metadata_row(filename: str, link: str, variant: str | None) -> dict[str, object]:
    name = parse_wheel_name(filename)
    tag = next(iter(name.tags))
    version: Version = without_variant(name.version)
    return {
        "package_name": name.project,
        "version": str(version),
        "build_tag": str(name.build[0]) if name.build else None,
        "python_tag": tag.interpreter,
        "abi_tag": tag.abi,
        "platform_tag": ".".join(name.platforms),
        "variant": variant,
        "filename": filename,
        "path": link,
    }


def _used(mood: Mood) -> Mood:
    assert mood.times is not None
    return replace(mood, times=mood.times - 1)
