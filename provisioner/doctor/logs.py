"""A server's log to findings. Pure.

Only the last start in a log counts: what stood in the way of an earlier one may be mended; and what stood before the
server was ready did not stop it. A line is evidence by its number, shortened, and without any API key.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import assert_never

from provisioner.counts import count_text
from provisioner.doctor.condense import BUSY_REPORTS, Condensed, NumberedLine, condense
from provisioner.doctor.endings import Failure, find_failure, find_stop, stage_at_end
from provisioner.doctor.log_lines import HARMLESS_LEVELS, ORDINARY_LEVELS, LogLine
from provisioner.doctor.symptoms import SYMPTOMS, Phase, Symptom
from provisioner.gpu.xid import parse_kernel_log
from provisioner.serve.findings import Finding, Severity, Subject
from provisioner.serve.launch import REDACTED

RESTARTS_OF_A_LOOP = 4
_LONGEST_EVIDENCE = 220
_MOST_EVIDENCE = 3
# A frame names a kernel some lines above or below the error that it led to.
_NEIGHBOUR_LINES = 80

# The end of a long log shows its server at work, not how it came to serve.
_READY = re.compile(
    r"Application startup complete|Starting vLLM (?:API )?server on|Avg prompt throughput: |HTTP/1\.1\" 200 "
)
_AFTER_A_SUDDEN_END = ("journalctl -k -g 'out of memory|oom-kill'", "provision serve RECIPE")
_LOADED = re.compile(r"Model loading took")
_CAPTURING = re.compile(r"Capturing (?:\w+ )?CUDA graphs")
_HIT_RATE = re.compile(r"Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s.*Prefix cache hit rate: (?P<rate>[\d.]+)%")
_CACHING = re.compile(r"enable_prefix_caching'?[=:]\s*(?P<on>True|False)")
_KEY_SHOWN = re.compile(r"(?P<head>'?api_key'?\s*[=:]\s*\[?\s*)(?P<quote>['\"])(?P<key>[^'\"]+)(?P=quote)")
_KEY_ARGUMENT = re.compile(r"(?P<head>--api[-_]key[= ]|VLLM_API_KEY=)(?P<key>\S+)")
_SERVER_PROCESS = re.compile(r"Started server process \[(?P<pid>\d+)\]")


def read_log(lines: Iterable[str], *, running: Collection[int] = ()) -> tuple[Finding, ...]:
    """As ``judge_log``, of a log's lines."""
    return judge_log(condense(f"{line}\n".encode() for line in lines), running=running)


def judge_log(log: Condensed, *, running: Collection[int] = ()) -> tuple[Finding, ...]:
    """Everything that the last start in a log shows, each symptom once, in the order of the table.

    ``running`` are the processes of the servers that run: the log of one of them has not ended.
    """
    run = Run(lines=[item.line for item in log.kept], numbers=[item.number for item in log.kept], last=log.last)
    failure = find_failure(run.lines, run.ready_at)
    shown = [(symptom, found) for symptom in SYMPTOMS if (found := _lines_of(symptom, run, failure))]
    explained = failure is not None and any(index >= failure.first for _, found in shown for index in found)
    return (
        *(_describe(symptom, found, run) for symptom, found in shown),
        *(_describe_failure(failure, run) if failure and not explained else ()),
        *(_find_sudden_end(run, log) if failure is None and not _is_of(run, running) else ()),
        *_find_cold_cache(run, log),
        *_find_card_events(run),
        *_find_shown_key(run),
        *_find_loop(log.starts),
    )


@dataclass(frozen=True)
class Run:
    """The telling lines of one start, the number of each in the log, and its last lines, whatever they say."""

    lines: Sequence[LogLine]
    numbers: Sequence[int]
    last: Sequence[NumberedLine]

    @cached_property
    def ready_at(self) -> int:
        """Index of the line at which requests can come; the length of the run where it never got there."""
        return self.first(_READY, len(self.lines))

    def first(self, pattern: re.Pattern[str], end: int) -> int:
        """Index of the first line before ``end`` that shows ``pattern``; ``end`` where none does."""
        return next((index for index in range(end) if pattern.search(self.lines[index].text)), end)

    def quote(self, index: int) -> str:
        """A line as evidence."""
        return f"line {self.numbers[index]}: {shorten(self.lines[index].whole)}"


def shorten(line: str) -> str:
    """A line without keys and without its far end."""
    clean = _KEY_SHOWN.sub(rf"\g<head>\g<quote>{REDACTED}\g<quote>", line.strip())
    clean = _KEY_ARGUMENT.sub(rf"\g<head>{REDACTED}", clean)
    return clean if len(clean) <= _LONGEST_EVIDENCE else clean[: _LONGEST_EVIDENCE - 1] + "…"


def _window(phase: Phase, run: Run) -> range:
    """Where a symptom of ``phase`` counts: of a run that served, only what came after."""
    ready = run.ready_at
    if ready < len(run.lines) and phase not in {Phase.SERVING, Phase.ANY}:
        return range(0)
    match phase:
        case Phase.WEIGHTS:
            return range(run.first(_LOADED, ready))
        case Phase.PROFILING:
            return range(run.first(_LOADED, ready), run.first(_CAPTURING, ready))
        case Phase.CAPTURE:
            return range(run.first(_CAPTURING, ready), ready)
        case Phase.LOAD:
            return range(ready)
        case Phase.SERVING:
            return range(ready, len(run.lines))
        case Phase.ANY:
            return range(0 if ready == len(run.lines) else ready, len(run.lines))
        case _:
            assert_never(phase)


def _lines_of(symptom: Symptom, run: Run, failure: Failure | None) -> list[int]:
    found = [
        index
        for index in _window(symptom.phase, run)
        if (line := run.lines[index]).level not in ORDINARY_LEVELS and symptom.pattern.search(line.text)
    ]
    if not symptom.near_failure:
        return found
    if failure is None:
        return []
    near = range(failure.first - _NEIGHBOUR_LINES, failure.root + _NEIGHBOUR_LINES + 1)
    return [index for index in found if index in near and run.lines[index].level not in HARMLESS_LEVELS]


def _describe(symptom: Symptom, found: Sequence[int], run: Run) -> Finding:
    match = symptom.pattern.search(run.lines[found[-1]].text)
    numbers = match.groupdict() if match else {}
    return Finding(
        id=symptom.id,
        severity=symptom.severity,
        subject=symptom.subject,
        what=symptom.what,
        evidence=tuple(run.quote(index) for index in found[:_MOST_EVIDENCE]),
        next=tuple(step.format_map(numbers) for step in symptom.next),
    )


def _describe_failure(failure: Failure, run: Run) -> Iterator[Finding]:
    when = "after" if run.ready_at < len(run.lines) else "before"
    cause = [
        f"line {run.numbers[index]}: {shorten(run.lines[index].text)}"
        for index in (failure.root, failure.frame)
        if index is not None
    ]
    yield Finding(
        id="unknown-failure",
        severity=Severity.ERROR,
        subject=Subject.ENVIRONMENT,
        what=f"the server failed {when} it was ready: {shorten(run.lines[failure.root].text)}",
        evidence=(*cause, *_last_lines(run)),
        next=("provision doctor RECIPE", "journalctl -k -g 'out of memory|oom-kill|NVRM'"),
    )


def _find_sudden_end(run: Run, log: Condensed) -> Iterator[Finding]:
    """A log that just stops is no healthy one, whatever stopped its server."""
    if log.is_ready:
        if find_stop(run.lines, run.ready_at) is not None:
            return
        yield Finding(
            id="ended-while-serving",
            severity=Severity.WARNING,
            subject=Subject.ENVIRONMENT,
            what="the log ends while the server was ready, without a stop, and it does not run here: killed by hand, "
            "or by the kernel for want of host memory (or this is the log of another machine)",
            evidence=_last_lines(run),
            next=_AFTER_A_SUDDEN_END,
        )
    elif log.has_start:
        yield Finding(
            id="ended-while-loading",
            severity=Severity.ERROR,
            subject=Subject.ENVIRONMENT,
            what=f"the log ends while {stage_at_end(run.lines)}: killed by hand, or by the kernel for want of host "
            "memory",
            evidence=_last_lines(run),
            next=_AFTER_A_SUDDEN_END,
        )


def _last_lines(run: Run) -> tuple[str, ...]:
    return tuple(_quote(item) for item in run.last)


def _is_of(run: Run, running: Collection[int]) -> bool:
    """Whether the server that writes this log runs; any that runs may be it where the log names no process."""
    writer = next((line.pid for line in run.lines if line.from_api_server), None) or next(
        (int(match["pid"]) for line in run.lines if (match := _SERVER_PROCESS.search(line.text))), None
    )
    return bool(running) if writer is None else writer in running


def _find_cold_cache(run: Run, log: Condensed) -> Iterator[Finding]:
    """A hit rate pinned at zero over several reports with prompts in them, while the cache is on."""
    switches = [match["on"] for line in run.lines if (match := _CACHING.search(line.text))]
    if switches and switches[-1] == "False":
        return
    reports = [(index, match) for index, line in enumerate(run.lines) if (match := _HIT_RATE.search(line.text))]
    busy = [index for index, match in reports if float(match["prompt"]) > 0]
    if len(busy) < BUSY_REPORTS or log.is_warm:
        return
    yield Finding(
        id="prefix-trio",
        severity=Severity.ERROR if switches else Severity.WARNING,
        subject=Subject.COMMAND,
        what="the prefix hit rate is pinned at 0.0 %: one of --async-scheduling, --max-num-batched-tokens 8192, "
        "--max-num-scheduled-tokens 8192 is missing",
        evidence=tuple(run.quote(index) for index in busy[-_MOST_EVIDENCE:]),
        next=("provision serve hynix", "provision probe cache-cliff --url URL"),
    )


def _find_card_events(run: Run) -> Iterator[Finding]:
    for event in parse_kernel_log([line.whole for line in run.lines]):
        yield Finding(
            id=f"xid-{event.code}",
            severity=Severity.WARNING,
            subject=Subject.CARD,
            what=f"the card at {event.pci} reported Xid {event.code}",
            evidence=(shorten(event.text),),
            next=("provision doctor --gpu",),
        )


def _find_shown_key(run: Run) -> Iterator[Finding]:
    shown = [
        index
        for index, line in enumerate(run.lines)
        for pattern in (_KEY_SHOWN, _KEY_ARGUMENT)
        if (match := pattern.search(line.whole)) and match["key"] not in {REDACTED, "None", "***"}
    ]
    if shown:
        yield Finding(
            id="key-in-log",
            severity=Severity.WARNING,
            subject=Subject.COMMAND,
            what="the API key stands in this log: it was given as an argument",
            evidence=tuple(run.quote(index) for index in shown[:1]),
            next=("choose a new key: provision serve RECIPE --generate-key",),
        )


def _find_loop(starts: Sequence[NumberedLine]) -> Iterator[Finding]:
    if len(starts) >= RESTARTS_OF_A_LOOP:
        yield Finding(
            id="restart-loop",
            severity=Severity.WARNING,
            subject=Subject.ENVIRONMENT,
            what=f"the last {count_text(len(starts), 'start')} never came to serve",
            evidence=tuple(_quote(item) for item in starts[-_MOST_EVIDENCE:]),
            next=("provision units RECIPE writes units that stop on a wedged card",),
        )


def _quote(item: NumberedLine) -> str:
    return f"line {item.number}: {shorten(item.line.whole)}"
