"""Which headers pass through a proxy. Pure."""

from typing import Final, TypeAlias

RawHeaders: TypeAlias = tuple[tuple[bytes, bytes], ...]

# Headers about one connection, which end at a proxy (RFC 9110, section 7.6.1); Expect is answered by the booster.
_HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
)
# What belongs to the one request that a client made, and not to a primer in its name.
_OF_ONE_REQUEST: Final = frozenset(
    {b"accept", b"accept-encoding", b"content-length", b"content-type", b"idempotency-key", b"x-booster"}
    | {b"x-request-id"}
)


def end_to_end(raw: RawHeaders) -> RawHeaders:
    """Headers that a proxy passes on, in order and spelled as they came."""
    named = {
        token.strip().lower() for name, value in raw if name.lower() == b"connection" for token in value.split(b",")
    }
    return tuple((name, value) for name, value in raw if name.lower() not in _HOP_BY_HOP | named)


def for_upstream(raw: RawHeaders) -> RawHeaders:
    """A client's headers as they are passed on; the host that it named is the booster's."""
    return tuple((name, value) for name, value in end_to_end(raw) if name.lower() != b"host")


def for_primer(raw: RawHeaders) -> RawHeaders:
    """Headers of a primer in the name of the client that sent ``raw``; another booster further up leaves it alone."""
    kept = ((name, value) for name, value in for_upstream(raw) if name.lower() not in _OF_ONE_REQUEST)
    return (*kept, (b"Content-Type", b"application/json"), (b"X-Booster", b"off"))
