"""Digests, the only proof of state in this project. A digest is a lower-case hex SHA-256 string of 64 characters.

Pure.
"""

import base64
import binascii
import hashlib

Digest = str


def digest_of(data: bytes) -> Digest:
    """Hex SHA-256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


def digest_from_record(field: str) -> Digest:
    """The hex digest written in a RECORD hash field, ``sha256=<urlsafe base64 without padding>``.

    Raises ValueError for another algorithm or a malformed value.
    """
    algorithm, _, value = field.partition("=")
    if algorithm != "sha256":
        raise ValueError(f"RECORD hash algorithm {algorithm!r} is not sha256")
    try:
        raw = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4))
    except binascii.Error as error:
        raise ValueError(f"RECORD hash {value!r} is not base64") from error
    if len(raw) != hashlib.sha256().digest_size:
        raise ValueError(f"RECORD hash {value!r} is not a SHA-256")
    return raw.hex()


def digest_to_record(digest: Digest) -> str:
    """The RECORD hash field for a hex digest; inverse of :func:`digest_from_record`."""
    return "sha256=" + base64.urlsafe_b64encode(bytes.fromhex(digest)).rstrip(b"=").decode("ascii")
