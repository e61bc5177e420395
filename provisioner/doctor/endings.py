"""How one start of a server ended: where it failed, and why first. Pure."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from provisioner.doctor.log_lines import HARMLESS_LEVELS, ORDINARY_LEVELS, LogLine

_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_EXCEPTION = re.compile(r"(?!(?:DEBUG|INFO|WARNING|ERROR|CRITICAL):)(?:\w+\.)*[A-Za-z_]\w*(?:: |:?$)")
_BARE_EXCEPTION = re.compile(r"(?!(?:DEBUG|INFO|WARNING|ERROR|CRITICAL):)(?:\w+\.)*[A-Z]\w*(?:Error|Exception): ")
_FRAME = re.compile(r'\s+File "(?P<path>[^"]+)", line \d+')
_OWN_FRAME = re.compile(r"/(?:vllm|torch|transformers_modules)/")
# What ends a process without a traceback of its own.
_DEATH = re.compile(
    r"(?:died|exited) unexpectedly|Segmentation fault|Segfault encountered|Fatal Python error|^terminate called after|"
    r"^(?:Killed|Aborted|Bus error)\b|code=(?:killed|dumped)|code=exited, status=[1-9]|"
    r"^(?:vllm(?: \w+)?|\w+\.py): error: "
)
_FATAL = re.compile(r"EngineCore encountered a fatal error|EngineCore failed to start|Application startup failed")
# Said by a process that only heard of another's failure.
_HEARSAY = re.compile(
    r"EngineDeadError|[Ss]ee root cause|[Ss]ee stack trace|Worker failed with error|"
    r"Engine core initialization failed|WorkerProc initialization failed"
)
_INTERRUPT = re.compile(r"(?:\w+\.)*(?:KeyboardInterrupt|SystemExit|CancelledError)\b")
_STOP = re.compile(
    r"^(?:INFO:\s+)?Shutting down\.?$|"
    r"\[shutdown\] (?:API server: shutdown triggered|EngineCore: trigger received signal)"
)
_STAGES = (
    (re.compile(r"Starting to load model|Loading safetensors checkpoint shards"), "loading weights"),
    (re.compile(r"Loading weights took|Model loading took"), "profiling memory"),
    (re.compile(r"Capturing (?:\w+ )?CUDA graphs"), "capturing CUDA graphs"),
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Indexes of a failure's first sign, of the line that names its root, and of the root's frame if it has one."""

    first: int
    root: int
    frame: int | None


def find_failure(lines: Sequence[LogLine], ready: int) -> Failure | None:
    """What ended the start, or None. ``ready`` is the index from which it served, or the count of the lines.

    A failure that a start got over is none, nor is what follows a stop that was asked for.
    """
    signs = list(_signs_while_serving(lines, ready) if ready < len(lines) else _signs(lines, range(len(lines))))
    if not signs:
        return None
    root = next((sign for sign in signs if not _HEARSAY.search(lines[sign.root].text)), signs[0])
    return Failure(first=signs[0].first, root=root.root, frame=root.frame)


def find_stop(lines: Sequence[LogLine], ready: int) -> int | None:
    """Index of the line, after the server was ready, that says that it stops as it was told to."""
    return next((index for index in range(ready, len(lines)) if _STOP.search(lines[index].text)), None)


def stage_at_end(lines: Sequence[LogLine]) -> str:
    """What the server did when its log ended."""
    for line in reversed(lines):
        for pattern, stage in _STAGES:
            if pattern.search(line.text):
                return stage
    return "starting"


def _signs(lines: Sequence[LogLine], region: range) -> Iterator[Failure]:
    for index in region:
        line = lines[index]
        if line.level in ORDINARY_LEVELS:
            continue
        if _TRACEBACK.search(line.text):
            yield from _read_traceback(lines, index)
        elif _DEATH.search(line.text) or (
            line.level not in HARMLESS_LEVELS and (_BARE_EXCEPTION.match(line.text) or _FATAL.search(line.text))
        ):
            yield Failure(first=index, root=index, frame=None)


def _signs_while_serving(lines: Sequence[LogLine], ready: int) -> Iterator[Failure]:
    """Of a server that serves, an exception outside the engine may be one request's."""
    stop = find_stop(lines, ready)
    for sign in _signs(lines, range(ready, len(lines) if stop is None else stop)):
        line = lines[sign.first]
        in_engine = bool(line.process) and not line.from_api_server
        if in_engine or any(pattern.search(lines[sign.root].text) for pattern in (_DEATH, _FATAL, _HEARSAY)):
            yield sign


def _read_traceback(lines: Sequence[LogLine], start: int) -> Iterator[Failure]:
    """The traceback and its exception, its process's next line that is not indented; nothing for a harmless one."""
    origin = (lines[start].process, lines[start].level)
    if lines[start].level in HARMLESS_LEVELS or (start and lines[start - 1].text.startswith("Exception ignored in")):
        return
    frame = None
    for index in range(start + 1, len(lines)):
        line = lines[index]
        if (line.process, line.level) not in {origin, ("", "")}:
            continue
        match = _FRAME.match(line.text)
        if match and (frame is None or _OWN_FRAME.search(match["path"])):
            frame = index
        elif _EXCEPTION.match(line.text):
            if not _INTERRUPT.match(line.text):
                yield Failure(first=start, root=index, frame=frame)
            return
    yield Failure(first=start, root=start if frame is None else frame, frame=frame)
