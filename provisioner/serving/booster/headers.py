"""Which headers pass through a proxy. Pure."""

from collections.abc import Iterable
from typing import Final

# Headers about one connection, which end at a proxy (RFC 9110, section 7.6.1); Expect is answered by the booster.
_HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"}
    | {"transfer-encoding", "upgrade", "expect"}
)
# What belongs to the one request that a client made, and not to a primer in its name.
_OF_ONE_REQUEST: Final = frozenset(
    {"accept", "accept-encoding", "content-length", "content-type", "host", "idempotency-key", "x-booster"}
    | {"x-request-id"}
)


def end_to_end(raw: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Headers that a proxy passes on, in order and spelled as they came; a repeated name is spelled as at first.

    (aiohttp takes a repetition in another spelling for a replacement.)
    """
    spelled: dict[str, str] = {}
    headers = [(spelled.setdefault(_decode(name).lower(), _decode(name)), _decode(value)) for name, value in raw]
    named = {
        token.strip().lower() for name, value in headers if name.lower() == "connection" for token in value.split(",")
    }
    return [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP | named]


def for_primer(raw: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    """Headers of a primer in the name of the client that sent ``raw``; another booster further up leaves it alone."""
    kept = [(name, value) for name, value in end_to_end(raw) if name.lower() not in _OF_ONE_REQUEST]
    return (*kept, ("Content-Type", "application/json"), ("X-Booster", "off"))


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")
