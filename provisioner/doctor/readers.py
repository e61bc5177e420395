"""What doctor reads beside the machine itself: a server's log and its metrics page."""

import http.client
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from provisioner.errors import NetworkError

_JOURNAL_SECONDS = 5
_JOURNAL_LINES = 20_000
_LONGEST_LOG_BYTES = 64 << 20
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


def read_lines(source: LogSource) -> list[str]:
    """The log's lines (of a very long one, the last 64 MiB). Raises OSError or SubprocessError."""
    match source:
        case LogFile(path=path):
            return _read_tail(path).splitlines()
        case JournalUnit(unit=unit):
            return _ask_journal(["--user"], unit) or _ask_journal([], unit)
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


def _ask_journal(scope: list[str], unit: str) -> list[str]:
    command = ["journalctl", *scope, "--unit", unit, "--quiet", "--no-pager", "--output=cat"]
    done = subprocess.run(
        [*command, f"--lines={_JOURNAL_LINES}"],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_JOURNAL_SECONDS,
        check=False,
    )
    return done.stdout.splitlines()


def _read_tail(path: Path) -> str:
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - _LONGEST_LOG_BYTES))
        return stream.read().decode("utf-8", "replace")
