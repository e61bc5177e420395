"""What doctor reads beside the machine itself: a server's log and its metrics page."""

import http.client
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from provisioner.errors import NetworkError

_JOURNAL_SECONDS = 5
_JOURNAL_LINES = 20_000
_PIECE_BYTES = 1 << 20
_METRICS_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class LogFile:
    """A server's log in a file."""

    path: Path


@dataclass(frozen=True, kw_only=True)
class JournalUnit:
    """A server's log in the journal, under the unit that ``provision units`` writes."""

    unit: str


LogSource = LogFile | JournalUnit


def name_of(source: LogSource) -> str:
    """The log in words."""
    match source:
        case LogFile(path=path):
            return str(path)
        case JournalUnit(unit=unit):
            return f"journal of {unit}"
        case _:
            assert_never(source)


def read_pieces(source: LogSource) -> Iterator[bytes]:
    """The log's bytes in order. Raises OSError or SubprocessError."""
    match source:
        case LogFile(path=path):
            with path.open("rb", buffering=0) as stream:
                while piece := stream.read(_PIECE_BYTES):
                    yield piece
        case JournalUnit(unit=unit):
            yield _ask_journal(["--user"], unit) or _ask_journal([], unit)
        case _:
            assert_never(source)


def fetch_metrics(address: str, key: str | None) -> str:
    """The metrics page of the server at ``address``. Raises NetworkError where it does not answer."""
    try:
        request = urllib.request.Request(f"{address}/metrics")
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        with urllib.request.urlopen(request, timeout=_METRICS_SECONDS) as answer:
            return str(answer.read().decode("utf-8", "replace"))
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NetworkError("/metrics gave no answer", where=address, found=str(error)) from error


def _ask_journal(scope: list[str], unit: str) -> bytes:
    command = ["journalctl", *scope, "--unit", unit, "--quiet", "--no-pager", "--output=cat"]
    done = subprocess.run(
        [*command, f"--lines={_JOURNAL_LINES}"], capture_output=True, timeout=_JOURNAL_SECONDS, check=False
    )
    return done.stdout
