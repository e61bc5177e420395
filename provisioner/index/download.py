"""Whole wheels in the cache: downloaded once, kept by their sha256, found again by URL if the server says unchanged."""

import os
from pathlib import Path

from provisioner.digests import Digest
from provisioner.index.cache import WheelCache, key_of_url
from provisioner.index.transport import Download, Progress, Transport
from provisioner.wheels.urls import strip_credentials

_WAIT = 1800.0
"""Seconds to wait for another process that downloads the same wheel."""


def download_wheel(
    url: str,
    transport: Transport,
    cache: WheelCache,
    *,
    filename: str,
    sha256: Digest | None = None,
    size: int | None = None,
    progress: Progress | None = None,
) -> Download:
    """The wheel at ``url`` as a file in ``cache``; nothing is downloaded where it lies there already.

    Raises HashMismatchError where the bytes have not the digest ``sha256``, NetworkError where they do not arrive.
    """
    key = f"sha256-{sha256}" if sha256 else key_of_url(strip_credentials(url))
    with cache.hold_wheel(key, wait=_WAIT) as folder:
        known = _find_known(url, transport, cache, key, sha256, filename)
        if known is not None:
            return known
        fresh = transport.download(url, folder / filename, expected=sha256, size=size, progress=progress)
        cache.note_written(fresh.size)
        return _file_away(fresh, cache, key)


def _find_known(
    url: str, transport: Transport, cache: WheelCache, key: str, sha256: Digest | None, filename: str
) -> Download | None:
    if sha256 is not None:
        return _reuse(cache, sha256, filename)
    entry = cache.load("pages", key)
    if entry is None or not isinstance(entry.facts.get("validator"), str):
        return None
    known = _reuse(cache, entry.facts["sha256"], filename)
    return known if known is not None and transport.is_unchanged(url, entry.facts["validator"]) else None


def _reuse(cache: WheelCache, sha256: Digest, filename: str) -> Download | None:
    path = _place(cache, sha256, filename)
    try:
        os.utime(path)  # whoever trims the cache leaves alone what was used just now
        return Download(path=path, sha256=sha256, size=path.stat().st_size)
    except FileNotFoundError:
        return None


def _file_away(fresh: Download, cache: WheelCache, key: str) -> Download:
    """Move a wheel to the folder of its digest, and note which digest the URL gave."""
    place = _place(cache, fresh.sha256, fresh.path.name)
    if place != fresh.path:
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh.path.replace(place)
        cache.store("pages", key, {"sha256": fresh.sha256, "validator": fresh.validator}, b"")
    return Download(path=place, sha256=fresh.sha256, size=fresh.size, validator=fresh.validator)


def _place(cache: WheelCache, sha256: Digest, filename: str) -> Path:
    return cache.wheel_folder(f"sha256-{sha256}") / filename
