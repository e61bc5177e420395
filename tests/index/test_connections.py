"""TLS against a real server with a certificate of its own, made on the spot."""

import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from provisioner.errors import NetworkError
from provisioner.index import connections
from provisioner.index.settings import IndexSettings
from provisioner.index.transport import Transport

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
ANSWER = b"over TLS"


class Handler(BaseHTTPRequestHandler):
    """Answers and closes, so that every request needs a connection of its own."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(ANSWER)))
        self.end_headers()
        self.wfile.write(ANSWER)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(folder / "key.pem")]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-out", str(folder / "cert.pem")]
    command = ["openssl", "req", "-x509", "-days", "2", *key, *name]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return folder / "cert.pem"


@pytest.fixture
def url(certificate: Path) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"https://localhost:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every time that certificates are loaded."""
    seen: list[object] = []
    load = ssl.SSLContext.load_verify_locations

    def count(self: ssl.SSLContext, *args: Any) -> None:
        seen.append(args)
        load(self, *args)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", count)
    return seen


@pytest.fixture(autouse=True)
def own_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No certificates are loaded yet, and none stay."""
    monkeypatch.setattr(connections, "_contexts", {})


def fetch_often(url: str, settings: IndexSettings) -> set[bytes]:
    with Transport(settings) as transport, ThreadPoolExecutor(4) as pool:
        return set(pool.map(lambda _: transport.fetch(url, accept=frozenset({200})).body, range(12)))


def test_certificates_are_loaded_once_for_all_connections(
    url: str, certificate: Path, settings: IndexSettings, monkeypatch: pytest.MonkeyPatch, loads: list[object]
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    assert fetch_often(url, settings) == {ANSWER}
    assert fetch_often(url, settings) == {ANSWER}
    assert len(loads) == 1


def test_another_name_than_the_certificate_has_is_refused(
    url: str, certificate: Path, settings: IndexSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    with pytest.raises(NetworkError, match="certificate was not accepted"):
        fetch_often(url.replace("localhost", "127.0.0.1"), settings)


def test_a_certificate_that_nobody_vouches_for_is_refused(
    url: str, settings: IndexSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    monkeypatch.delenv("CURL_CA_BUNDLE", raising=False)
    with pytest.raises(NetworkError, match="certificate was not accepted"):
        fetch_often(url, replace(settings, retries=0))


def test_a_bundle_that_is_not_there_is_told(
    url: str, settings: IndexSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "missing.pem"))
    with pytest.raises(NetworkError) as caught:
        fetch_often(url, settings)
    assert "REQUESTS_CA_BUNDLE" in caught.value.hints[0]
