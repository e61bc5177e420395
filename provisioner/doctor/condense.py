"""A log of any length, read once in pieces, to what can tell something of its last start. Pure.

Nearly all of a long log are requests that were answered and reports of throughput. They are dropped before anything
looks closer, so that a log costs little more than reading it; of what is left a bounded amount is kept, from both ends.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from provisioner.doctor.log_lines import LogLine, parse_line

# What serve writes into a log before it starts a server.
START_MARK = "provision: starting "
BUSY_REPORTS = 3
LAST_LINES = 10
_LONGEST_LINE = 8192
_MOST_BYTES = 4 << 20
_START = re.compile(
    rb"provision: starting |(?i:vLLM (?:API )?server version)|non-default args: |"
    + "▀▄▀ █".encode()
    + rb"\s+version \S+"
)
# One start writes two of these within a few lines: a banner or a line with the version, then its arguments.
_LINES_OF_A_START = 15
_ANSWERED, _REPORT = b'HTTP/1.1" 200 ', b"Avg prompt throughput: "
_ROUTINE = re.compile(
    rb'(?:^(?:[^\n"]*"[A-Z]+ [^\n"]* HTTP/1\.1" 200 |[^\n"]{0,200}Avg prompt throughput: )[^\n]*\n)+', re.MULTILINE
)
_READY = re.compile(rb"Application startup complete|Starting vLLM (?:API )?server on")
_BUSY = re.compile(rb"Avg prompt throughput: (?!0\.0 )[\d.]+ tokens/s.*Prefix cache hit rate: ")
_WARM = re.compile(rb"Prefix cache hit rate: (?!0\.0%)[\d.]+%")
# What matters of that which a server that is ready says at its ordinary levels.
_TOLD = (b"hutting down", b"[shutdown]", b"api_key", b"--api", b"API_KEY", b"NVRM")
_ORDINARY = re.compile(rb"[^\n]{0,160}?(?:(?P<ordinary>INFO|DEBUG)|WARNING|ERROR|CRITICAL)")

_Raw = tuple[int, bytes]


@dataclass(frozen=True, kw_only=True)
class NumberedLine:
    """A line and its number in the log, from 1."""

    number: int
    line: LogLine


@dataclass(frozen=True, kw_only=True)
class Condensed:
    """``kept``: the telling lines of the last start; ``last``: its last lines, whatever they say.

    ``starts`` are those since a server was last ready; ``total`` counts the log's lines; ``is_warm`` says that the
    prefix cache hit at least once.
    """

    kept: tuple[NumberedLine, ...]
    last: tuple[NumberedLine, ...]
    starts: tuple[NumberedLine, ...]
    has_start: bool
    is_ready: bool
    is_warm: bool
    total: int


def condense(pieces: Iterable[bytes]) -> Condensed:
    """A whole log, in pieces of any size."""
    condenser = Condenser()
    for piece in pieces:
        condenser.feed(piece)
    return condenser.result()


class Condenser:
    """Takes a log as it comes. What it holds is bounded, however long the log and its lines are."""

    def __init__(self) -> None:
        self._rest = b""
        self._total = 0
        self._has_start = False
        self._awaits_banner = False
        self._last_sign = -_LINES_OF_A_START
        self._starts: deque[_Raw] = deque(maxlen=1000)
        self._run = _Run(first=1)

    def feed(self, piece: bytes) -> None:
        """Read on; the last line waits for its end."""
        text, newline, rest = (self._rest + piece).rpartition(b"\n")
        self._rest = rest[:_LONGEST_LINE]
        self._take(text + newline)

    def result(self) -> Condensed:
        """What there is to tell once everything was fed."""
        if self._rest:
            self._take(self._rest + b"\n")
            self._rest = b""
        return Condensed(
            kept=tuple(_parse(self._run.kept)),
            last=tuple(_parse(self._run.last))[-LAST_LINES:],
            starts=() if self._run.is_ready else tuple(_parse(self._starts)),
            has_start=self._has_start,
            is_ready=self._run.is_ready,
            is_warm=self._run.is_warm,
            total=self._total,
        )

    def _take(self, text: bytes) -> None:
        """Whole lines: those between stretches of routine, and the stretches where they can tell something."""
        position = 0
        for stretch in _ROUTINE.finditer(text):
            self._take_lines(text[position : stretch.start()])
            if self._run.is_settled:
                self._total += text.count(b"\n", *stretch.span())
                self._run.is_warm = self._run.is_warm or _WARM.search(text, *stretch.span()) is not None
            else:
                self._take_lines(stretch.group())
            position = stretch.end()
        self._take_lines(text[position:])
        self._run.end_with(text[-LAST_LINES * _LONGEST_LINE :].split(b"\n")[-4 * LAST_LINES : -1], self._total)

    def _take_lines(self, text: bytes) -> None:
        for line in text.split(b"\n")[:-1]:
            self._total += 1
            if _START.search(line):
                self._note_start(self._total, line)
            self._run.consider(self._total, line)

    def _note_start(self, number: int, line: bytes) -> None:
        """A line that a start writes: of a new one, unless one began just before."""
        marked = START_MARK.encode() in line
        is_new = marked or not (self._awaits_banner or number - self._last_sign < _LINES_OF_A_START)
        self._awaits_banner = marked
        self._last_sign = number
        if not is_new:
            return
        if self._run.is_ready:
            self._starts.clear()
        self._has_start = True
        self._run = _Run(first=number)
        self._starts.append((number, line[:_LONGEST_LINE]))


class _Run:
    """One start: its telling lines, the first and the last of them where they are many."""

    def __init__(self, *, first: int) -> None:
        self.is_ready = False
        self.is_warm = False
        self._busy = 0
        self._first = first
        self._head: list[_Raw] = []
        self._tail: deque[_Raw] = deque()
        self._room = _MOST_BYTES
        self._tail_bytes = 0
        self._last: deque[_Raw] = deque(maxlen=LAST_LINES)

    @property
    def is_settled(self) -> bool:
        """Whether it was ready, and reports can tell no more than whether the cache ever hits."""
        return self.is_ready and (self.is_warm or self._busy >= BUSY_REPORTS)

    @property
    def kept(self) -> Iterator[_Raw]:
        yield from self._head
        yield from self._tail

    @property
    def last(self) -> Iterator[_Raw]:
        yield from self._last

    def consider(self, number: int, line: bytes) -> None:
        """Keep the line if it can tell something."""
        if _ANSWERED in line or _REPORT in line:
            self._consider_routine(number, line)
        elif not self.is_ready:
            self._keep(number, line)
            self.is_ready = _READY.search(line) is not None
        elif _is_telling(line):
            self._keep(number, line)

    def end_with(self, lines: Sequence[bytes], number: int) -> None:
        """Remember the last of ``lines``, of which the last has that number."""
        self._last.extend(
            (index, line)
            for index, line in enumerate(lines, number + 1 - len(lines))
            if index >= self._first and line and not line.isspace()
        )

    def _consider_routine(self, number: int, line: bytes) -> None:
        self.is_warm = self.is_warm or _WARM.search(line) is not None
        is_busy = self._busy < BUSY_REPORTS and _BUSY.search(line) is not None
        self._busy += is_busy
        if is_busy or not self.is_ready:
            self._keep(number, line)
        self.is_ready = True

    def _keep(self, number: int, line: bytes) -> None:
        if not line or line.isspace():
            return
        line = line[:_LONGEST_LINE]
        if self._room > 0:
            self._room -= len(line)
            self._head.append((number, line))
            return
        self._tail.append((number, line))
        self._tail_bytes += len(line)
        while self._tail_bytes > _MOST_BYTES:
            self._tail_bytes -= len(self._tail.popleft()[1])


def _is_telling(line: bytes) -> bool:
    """Of a server that is ready, what it says at its ordinary levels is no failure, and may quote a request."""
    match = _ORDINARY.match(line)
    return match is None or match["ordinary"] is None or any(told in line for told in _TOLD)


def _parse(lines: Iterable[_Raw]) -> Iterator[NumberedLine]:
    """A progress bar draws many times in one line."""
    for number, line in lines:
        for drawn in line.decode("utf-8", "replace").split("\r"):
            if drawn and not drawn.isspace():
                yield NumberedLine(number=number, line=parse_line(drawn))
