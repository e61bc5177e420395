"""URLs fit to be stored and shown. Pure."""

from urllib.parse import urlsplit, urlunsplit


def redact(url: str) -> str:
    """``url`` fit to be shown: user names, passwords and query strings (signed links) are hidden."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    netloc = f"***@{host}" if "@" in parts.netloc else host
    return urlunsplit((parts.scheme, netloc, parts.path, "***" if parts.query else "", ""))


def strip_credentials(url: str) -> str:
    """``url`` without user name and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
