"""Connections that share what is costly to make. Imported, like requests, only when the first request is made."""

import ssl
import threading
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from requests.utils import DEFAULT_CA_BUNDLE_PATH
from urllib3.util import create_urllib3_context

_guard = threading.Lock()
_contexts: dict[str, ssl.SSLContext] = {}


class SharingAdapter(HTTPAdapter):
    """Loads the authorities' certificates once: requests does so for each connection, 50 ms of CPU every time."""

    def build_connection_pool_key_attributes(self, request: Any, verify: Any, cert: Any = None) -> Any:
        host: Any
        pool: Any
        host, pool = super().build_connection_pool_key_attributes(request, verify, cert)
        if host["scheme"] == "https" and verify:
            pool["ssl_context"] = _context_for(DEFAULT_CA_BUNDLE_PATH if verify is True else str(verify))
            pool.pop("ca_certs", None)
            pool.pop("ca_cert_dir", None)
        return host, pool

    def cert_verify(self, conn: Any, url: Any, verify: Any, cert: Any) -> None:
        """Leave the certificates to the context, but where a proxy is spoken to by TLS, which is given none."""
        if not verify or cert or (conn.proxy is not None and conn.proxy.scheme == "https"):
            super().cert_verify(conn, url, verify, cert)  # type: ignore[no-untyped-call]


def _context_for(bundle: str) -> ssl.SSLContext:
    """Raises requests' SSLError where the file or folder of certificates cannot be read."""
    with _guard:
        if bundle not in _contexts:
            context = create_urllib3_context()
            is_folder = Path(bundle).is_dir()
            try:
                context.load_verify_locations(None if is_folder else bundle, bundle if is_folder else None)
            except OSError as error:
                raise requests.exceptions.SSLError(f"{bundle}: {error}") from error
            _contexts[bundle] = context
        return _contexts[bundle]
