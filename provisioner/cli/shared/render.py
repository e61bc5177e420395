"""The only place that prints. Data goes to stdout, everything else to stderr; colours never carry meaning alone."""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from provisioner.errors import EnvironmentConflictError, ProvisionError


def print_json(schema: str, payload: Mapping[str, Any]) -> None:
    """One JSON object on stdout, named by its schema (``provision/<schema>/1``)."""
    _answer(json.dumps({"schema": f"provision/{schema}/1", **payload}, indent=2, default=str) + "\n")


def print_text(text: str) -> None:
    """Lines of data on stdout."""
    _answer(text if text.endswith("\n") else text + "\n")


def print_bytes(data: bytes) -> None:
    """Data on stdout, byte for byte."""
    with _despite_gone_reader():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def flush_output() -> None:
    """Write what is still buffered."""
    with _despite_gone_reader():
        sys.stdout.flush()


def print_note(text: str) -> None:
    """A line for people on stderr."""
    _tell(f"{text}\n")


def print_warning(text: str) -> None:
    """A warning on stderr."""
    _tell(f"{_paint('warning', '33')}: {text}\n")


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A plain table on stdout: columns as wide as their widest cell, the last one free.

    Plain text rather than drawn boxes: it can be cut and searched, and costs no start-up time. What would break a line
    or move the cursor is shown as an escape.
    """
    table = [tuple(headers), *(tuple(_escape(str(cell)) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(headers))]
    for number, row in enumerate(table):
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        line = "  ".join([*cells, row[-1]]).rstrip()
        _answer((_paint(line, "1", stream=sys.stdout) if number == 0 else line) + "\n")


def print_error(error: ProvisionError) -> None:
    """An error for people: what, where, expected and found, and what to run next."""
    lines = [f"{_paint(f'error[{error.code}]', '31')}: {error.what}"]
    lines += [f"  where:    {error.where}"] if error.where else []
    lines += [f"  expected: {error.expected}"] if error.expected is not None else []
    lines += [f"  found:    {_indent(error.found)}"] if error.found is not None else []
    lines += [f"hint: {hint}" for hint in error.hints]
    _tell("\n".join(lines) + "\n")


def print_error_json(error: ProvisionError) -> None:
    """The same error as JSON on stdout, for machines that read no stderr."""
    payload = {
        "code": error.code,
        "exit": error.exit_code,
        "what": error.what,
        "where": error.where,
        "expected": error.expected,
        "found": error.found,
        "hints": list(error.hints),
    }
    print_json("error", payload)


def size_text(count: int) -> str:
    """A number of bytes for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _answer(text: str) -> None:
    with _despite_gone_reader():
        sys.stdout.write(text)


def _tell(text: str) -> None:
    # A run goes on although nobody listens to how (`provision … 2>&1 | head -1`).
    with suppress(BrokenPipeError):
        sys.stderr.write(text)


@contextmanager
def _despite_gone_reader() -> Iterator[None]:
    """Where the reader of stdout went away (`provision … | head -1`), let this and the rest go nowhere.

    The command ends as it would have, with its own exit code. Raises EnvironmentConflictError for any other failure, of
    a full disk, say: then the answer is lost.
    """
    try:
        yield
    except BrokenPipeError:
        _discard_output()
    except OSError as error:
        _discard_output()
        what = f"the answer cannot be written: {error.strerror}"
        raise EnvironmentConflictError(what, where="standard output", hints=("df -h .",)) from error


def _discard_output() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _escape(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _indent(text: str) -> str:
    return text.replace("\n", "\n            ")


def _paint(text: str, code: str, *, stream: Any = None) -> str:
    stream = stream or sys.stderr
    plain = not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\033[{code}m{text}\033[0m"
