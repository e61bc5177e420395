"""A line of a server's log without what stands before its text. Pure."""

import re
from dataclasses import dataclass

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# docker writes a time, docker compose the container's name, journalctl a time, the host and the program.
_TIME = r"(?:\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)?|[A-Z][a-z]{2} [ \d]\d [\d:.]{8,})"
_CARRIER = rf"(?:[\w.-]+ +\| ?)?(?:{_TIME} (?:\S+ \S+?\[\d+\]: )?)?"
_ORIGIN = r"(?:\((?P<process>[A-Za-z][\w-]*)(?: [^()]*)? pid=(?P<pid>\d+)\) ?)*"
_HEADER = r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:.]+ \[[^\]]*\] ?)?"
_RANK = r"(?:\[rank\d+\]:? ?)*"
_PREFIX = re.compile(_CARRIER + _RANK + _ORIGIN + _HEADER + _RANK)
# What is said at these may quote a request.
ORDINARY_LEVELS = frozenset({"DEBUG", "INFO"})
HARMLESS_LEVELS = ORDINARY_LEVELS | {"WARNING"}


@dataclass(frozen=True, slots=True)
class LogLine:
    """``whole`` is the line without colours, ``text`` what its writer said; the rest is empty or None where unsaid."""

    whole: str
    text: str
    process: str
    pid: int | None
    level: str

    @property
    def from_api_server(self) -> bool:
        return self.process.lower().startswith("apiserver")


def parse_line(line: str) -> LogLine:
    """A line as a terminal, a file, docker or the journal shows it."""
    whole = _COLOUR.sub("", line) if "\x1b" in line else line
    match = _PREFIX.match(whole)
    if match is None:
        return LogLine(whole, whole, "", None, "")
    pid = match["pid"]
    return LogLine(
        whole=whole,
        text=whole[match.end() :],
        process=match["process"] or "",
        pid=int(pid) if pid else None,
        level=match["level"] or "",
    )
