"""A server's log to findings. Pure.

Only the last start in a log counts: what stood in the way of an earlier one may be mended. A line is evidence by its
number, shortened, and without any API key.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from provisioner.counts import count_text
from provisioner.doctor.endings import Failure, find_failure, stage_at_end
from provisioner.doctor.log_lines import HARMLESS_LEVELS, LogLine, parse_line
from provisioner.gpu.xid import parse_kernel_log
from provisioner.serve.findings import Finding, Severity, Subject
from provisioner.serve.launch import REDACTED

RESTARTS_OF_A_LOOP = 4
_LONGEST_EVIDENCE = 220
_MOST_EVIDENCE = 3
_LAST_LINES = 10
_IDLE_LINES_BEFORE_DOUBT = 3
# A frame names a kernel some lines above or below the error that it led to.
_NEIGHBOUR_LINES = 80

# One start writes two of these within a few lines: a banner or a line with the version, then its arguments.
_START = re.compile(r"vLLM (?:API )?server version|▀▄▀ █\s+version \S+|non-default args: ", re.IGNORECASE)
_LINES_OF_A_START = 15
# The end of a long log shows its server at work, not how it came to serve.
_READY = re.compile(
    r"Application startup complete|Starting vLLM (?:API )?server on|Avg prompt throughput: |HTTP/1\.1\" 200 "
)
_LOADED = re.compile(r"Model loading took")
_CAPTURING = re.compile(r"Capturing (?:\w+ )?CUDA graphs")
_HIT_RATE = re.compile(r"Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s.*Prefix cache hit rate: (?P<rate>[\d.]+)%")
_CACHING = re.compile(r"enable_prefix_caching'?[=:]\s*(?P<on>True|False)")
_KEY_SHOWN = re.compile(r"(?P<head>'?api_key'?\s*[=:]\s*\[?\s*)(?P<quote>['\"])(?P<key>[^'\"]+)(?P=quote)")
_KEY_ARGUMENT = re.compile(r"(?P<head>--api[-_]key[= ]|VLLM_API_KEY=)(?P<key>\S+)")
_CARD_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory")


class Phase(StrEnum):
    """When a symptom counts: at one step of loading, during all of it, while requests run, or always."""

    WEIGHTS = "weights"
    PROFILING = "profiling"
    CAPTURE = "capture"
    LOAD = "load"
    SERVING = "serving"
    ANY = "any"


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """One row of the table: a line that shows it (near a failure, if ``near_failure``), what it means, what to do.

    A group that ``pattern`` names may stand in ``next`` as ``{group}``.
    """

    id: str
    pattern: re.Pattern[str]
    what: str
    next: tuple[str, ...]
    phase: Phase = Phase.ANY
    subject: Subject = Subject.ENVIRONMENT
    severity: Severity = Severity.ERROR
    near_failure: bool = False


SYMPTOMS: tuple[Symptom, ...] = (
    Symptom(
        id="working-directory",
        pattern=re.compile(r"failed\s+to be inspected"),
        what="the server was started inside the installed vllm package (or beside a folder called vllm), which hides "
        "other modules",
        next=("cd ~ && provision serve RECIPE",),
        subject=Subject.COMMAND,
    ),
    Symptom(
        id="gdn-patch",
        pattern=re.compile(
            r"causal_conv1d|selective_scan_update|selective_state_update|fused_recurrent_gated_delta|"
            r"fused_sigmoid_gating|mamba[\w ]*state[\w ]*shape|_copy_mamba_state_block",
            re.IGNORECASE,
        ),
        what="a crash in the state kernels under speculative decoding: pr50021-gdn-spec-bounds is not applied to the "
        "vLLM that ran (required on 0.27.x)",
        next=("provision status RECIPE", "provision RECIPE", "provision doctor RECIPE"),
        near_failure=True,
    ),
    Symptom(
        id="load-fault",
        pattern=re.compile(
            r"illegal memory access|CUDA_ERROR_ILLEGAL_ADDRESS|unspecified launch failure", re.IGNORECASE
        ),
        what="a memory fault while weights loaded: on sm80 the GPU repack does this; the Python trace blames a "
        "bystander, so trust the Xid in the kernel log",
        next=(
            "provision patches",
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False",
            "provision doctor --gpu",
        ),
        phase=Phase.LOAD,
        subject=Subject.CARD,
        severity=Severity.WARNING,
    ),
    Symptom(
        id="serving-fault",
        pattern=re.compile(
            r"illegal memory access|CUDA_ERROR_ILLEGAL_ADDRESS|unspecified launch failure", re.IGNORECASE
        ),
        what="a memory fault while requests ran: the trace is asynchronous; read the kernel log, and probe the card "
        "before the next start",
        next=("provision doctor --gpu",),
        phase=Phase.SERVING,
        subject=Subject.CARD,
        severity=Severity.WARNING,
    ),
    Symptom(
        id="cache-too-small",
        pattern=re.compile(
            r"larger than the available KV cache.*estimated maximum model length is (?P<length>[1-9]\d*)", re.IGNORECASE
        ),
        what="the KV cache has no room for one request of the model's full length",
        next=("provision serve RECIPE -- --max-model-len {length}",),
        phase=Phase.LOAD,
        subject=Subject.COMMAND,
    ),
    Symptom(
        id="cache-too-small",
        pattern=re.compile(
            r"larger than the available KV cache(?!.*estimated maximum model length is [1-9])", re.IGNORECASE
        ),
        what="the KV cache has no room for one request, and the server names no length that fits",
        next=(
            "nvidia-smi (what else holds the card's memory)",
            "provision serve RECIPE -- --gpu-memory-utilization 0.95 (what is added goes to the cache)",
        ),
        phase=Phase.LOAD,
        subject=Subject.COMMAND,
    ),
    Symptom(
        id="cache-too-large",
        pattern=re.compile(r"less than requested memory for kv"),
        what="a KV cache of a fixed size was asked for that the memory cannot hold",
        next=("provision serve RECIPE -- --kv-cache-memory-bytes BYTES (less than the line says is there)",),
        phase=Phase.LOAD,
        subject=Subject.COMMAND,
    ),
    Symptom(
        id="no-cache",
        pattern=re.compile(r"No available memory for the cache blocks"),
        what="weights and profiling left no memory for the KV cache",
        next=("provision serve RECIPE -- --max-num-batched-tokens 2048 (a smaller peak while profiling)",),
        phase=Phase.LOAD,
        subject=Subject.COMMAND,
    ),
    Symptom(
        id="host-memory",
        pattern=re.compile(
            r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|oom-kill|Out of memory: Killed process|"
            r"killed by the OOM killer"
        ),
        what="the machine's own memory ran out, not the card's",
        next=("free -h (close what else uses it, or add swap)", "provision serve RECIPE"),
    ),
    Symptom(
        id="weights-memory",
        pattern=_CARD_MEMORY,
        what="the weights do not fit into the card's memory",
        next=(
            "nvidia-smi (what else holds the card's memory)",
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (Hynix; never on a Samsung card)",
            "provision serve RECIPE -- --cpu-offload-gb 8 (that much of them stays in host memory; slower)",
        ),
        phase=Phase.WEIGHTS,
    ),
    Symptom(
        id="profiling-memory",
        pattern=_CARD_MEMORY,
        what="the weights fit, and the largest batch that was tried beside them does not",
        next=("provision serve RECIPE -- --max-num-batched-tokens 2048 (a smaller peak while profiling)",),
        phase=Phase.PROFILING,
        subject=Subject.COMMAND,
    ),
    Symptom(
        id="capture-memory",
        pattern=_CARD_MEMORY,
        what="the KV cache left no room for the CUDA graphs",
        next=("provision serve RECIPE -- --gpu-memory-utilization 0.85 (a smaller cache leaves room beside it)",),
        phase=Phase.CAPTURE,
        subject=Subject.COMMAND,
    ),
    Symptom(
        id="serving-memory",
        pattern=_CARD_MEMORY,
        what="memory ran out while requests ran; a hard out-of-memory can wedge the card",
        next=(
            "provision doctor --gpu",
            "provision serve RECIPE -- --gpu-memory-utilization 0.85 (a smaller cache leaves room for requests)",
            "--max-num-batched-tokens 8192 is the most",
        ),
        phase=Phase.SERVING,
    ),
    Symptom(
        id="memory-taken",
        pattern=re.compile(r"less than desired GPU memory utilization"),
        what="another process holds memory of the card",
        next=("nvidia-smi", "provision doctor --gpu"),
    ),
    Symptom(
        id="card-start",
        pattern=re.compile(
            r"CUDA driver initialization failed|CUDA-capable device\(s\) is/are busy or unavailable|"
            r"No CUDA GPUs are available|CUDA unknown error|system not yet initialized",
            re.IGNORECASE,
        ),
        what="CUDA could not start on the card: it is wedged, lost or hidden (CUDA_VISIBLE_DEVICES)",
        next=("provision doctor --gpu", "nvidia-smi -L"),
        subject=Subject.CARD,
        severity=Severity.WARNING,
    ),
    Symptom(
        id="toolchain",
        pattern=re.compile(
            r"unsupported toolchain|no kernel image is available|CUDA driver version is insufficient", re.IGNORECASE
        ),
        what="the driver is older than what this build was compiled for",
        next=("nvidia-smi", "install a driver of the 610 series"),
    ),
    Symptom(
        id="torch-mismatch",
        pattern=re.compile(r"undefined symbol: \S+|lib(?:cudart|cublas|torch\w*)\.so[.\d]*: cannot open shared object"),
        what="vLLM's libraries and torch do not fit: another torch, or another CUDA, than the lock's",
        next=("provision RECIPE", "provision status RECIPE"),
    ),
    Symptom(
        id="port",
        pattern=re.compile(r"Address already in use|\[Errno 98\]"),
        what="the port was taken",
        next=("ss -ltnp", "provision serve RECIPE --port PORT"),
        subject=Subject.COMMAND,
    ),
    Symptom(
        id="bad-argument",
        pattern=re.compile(
            r"error: unrecognized arguments: |error: argument [-\w/]+: |error: ambiguous option: |"
            r"validation errors? for \w*(?:Config|Args)|^  Value error, "
        ),
        what="the server does not know an argument, or refuses its value",
        next=("provision serve RECIPE --print --explain",),
        subject=Subject.COMMAND,
    ),
    Symptom(
        id="prefix-match-unit",
        pattern=re.compile(r"Invalid prefix_match_unit=\d+"),
        what="the prefix match unit does not divide the block of the state cache (1600 tokens)",
        next=("provision serve RECIPE -- --prefix-match-unit 400",),
        subject=Subject.COMMAND,
    ),
)


def read_log(lines: Iterable[str], *, running: Collection[int] = ()) -> tuple[Finding, ...]:
    """Everything that the last start in a log shows, each symptom once, in the order of the table.

    ``running`` are the processes of the servers that run: the log of one of them has not ended.
    """
    every = [line.rstrip("\n") for line in lines]
    starts = _find_starts(every)
    run = _last_run(every, starts)
    failure = find_failure(run.lines, run.ready_at())
    shown = [(symptom, found) for symptom in SYMPTOMS if (found := _lines_of(symptom, run, failure))]
    explained = failure is not None and any(index >= failure.first for _, found in shown for index in found)
    return (
        *(_describe(symptom, found, run) for symptom, found in shown),
        *(_describe_failure(failure, run) if failure and not explained else ()),
        *(_find_early_end(run) if starts and failure is None and not _is_of(run, running) else ()),
        *_find_cold_cache(run),
        *_find_card_events(run),
        *_find_shown_key(run),
        *_find_loop(starts, every),
    )


def shows_ready_server(lines: Sequence[str]) -> bool:
    """Whether the last start in a log came to serve."""
    run = _last_run(lines, _find_starts(lines))
    return run.ready_at() < len(run.lines)


def _find_starts(lines: Sequence[str]) -> list[int]:
    starts: list[int] = []
    last = -_LINES_OF_A_START
    for number, line in enumerate(lines):
        if _START.search(line):
            if number - last >= _LINES_OF_A_START:
                starts.append(number)
            last = number
    return starts


def _last_run(lines: Sequence[str], starts: Sequence[int]) -> "Run":
    first = starts[-1] if starts else 0
    return Run(lines=[parse_line(line) for line in lines[first:]], first_number=first + 1)


@dataclass(frozen=True)
class Run:
    """The lines of one start, and the number that the first of them has in the log."""

    lines: Sequence[LogLine]
    first_number: int

    def ready_at(self) -> int:
        """Index of the line at which requests can come; the length of the run where it never got there."""
        return self.first(_READY, len(self.lines))

    def first(self, pattern: re.Pattern[str], end: int) -> int:
        """Index of the first line before ``end`` that shows ``pattern``; ``end`` where none does."""
        return next((index for index in range(end) if pattern.search(self.lines[index].text)), end)

    def quote(self, index: int) -> str:
        """A line as evidence."""
        return f"line {self.first_number + index}: {shorten(self.lines[index].whole)}"


def shorten(line: str) -> str:
    """A line without keys and without its far end."""
    clean = _KEY_SHOWN.sub(rf"\g<head>\g<quote>{REDACTED}\g<quote>", line.strip())
    clean = _KEY_ARGUMENT.sub(rf"\g<head>{REDACTED}", clean)
    return clean if len(clean) <= _LONGEST_EVIDENCE else clean[: _LONGEST_EVIDENCE - 1] + "…"


def _window(phase: Phase, run: Run) -> range:
    ready = run.ready_at()
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
            return range(len(run.lines))
        case _:
            assert_never(phase)


def _is_routine(text: str) -> bool:
    """Most of a long log: a request that was answered, a report of throughput."""
    return 'HTTP/1.1" 200 ' in text or "Avg prompt throughput: " in text


def _lines_of(symptom: Symptom, run: Run, failure: Failure | None) -> list[int]:
    window = _window(symptom.phase, run)
    found = [
        index for index in window if not _is_routine(text := run.lines[index].text) and symptom.pattern.search(text)
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
    when = "after" if run.ready_at() < len(run.lines) else "before"
    cause = [
        f"line {run.first_number + index}: {shorten(run.lines[index].text)}"
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


def _find_early_end(run: Run) -> Iterator[Finding]:
    """A start that just stops is no healthy one, whatever stopped it."""
    if run.ready_at() < len(run.lines):
        return
    yield Finding(
        id="ended-while-loading",
        severity=Severity.ERROR,
        subject=Subject.ENVIRONMENT,
        what=f"the log ends while {stage_at_end(run.lines)}: killed by hand, or by the kernel for want of host memory",
        evidence=_last_lines(run),
        next=("journalctl -k -g 'out of memory|oom-kill'", "provision serve RECIPE"),
    )


def _last_lines(run: Run) -> tuple[str, ...]:
    end = len(run.lines)
    return tuple(run.quote(index) for index in range(max(0, end - _LAST_LINES), end))


def _is_of(run: Run, running: Collection[int]) -> bool:
    """Whether the server that writes this log runs; any that runs may be it where the log names no process."""
    writer = next((line.pid for line in run.lines if line.from_api_server), None)
    return bool(running) if writer is None else writer in running


def _find_cold_cache(run: Run) -> Iterator[Finding]:
    """A hit rate pinned at zero over several reports with prompts in them, while the cache is on."""
    switches = [match["on"] for line in run.lines if (match := _CACHING.search(line.text))]
    if switches and switches[-1] == "False":
        return
    reports = [(index, match) for index, line in enumerate(run.lines) if (match := _HIT_RATE.search(line.text))]
    busy = [index for index, match in reports if float(match["prompt"]) > 0]
    if len(busy) < _IDLE_LINES_BEFORE_DOUBT or any(float(match["rate"]) > 0 for _, match in reports):
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


def _find_loop(starts: Sequence[int], lines: Sequence[str]) -> Iterator[Finding]:
    if len(starts) < RESTARTS_OF_A_LOOP:
        return
    last_ready = max((index for index, line in enumerate(lines) if _READY.search(line)), default=-1)
    failed = [start for start in starts if start > last_ready]
    if len(failed) >= RESTARTS_OF_A_LOOP:
        yield Finding(
            id="restart-loop",
            severity=Severity.WARNING,
            subject=Subject.ENVIRONMENT,
            what=f"the last {count_text(len(failed), 'start')} never came to serve",
            evidence=tuple(f"line {start + 1}: {shorten(lines[start])}" for start in failed[-_MOST_EVIDENCE:]),
            next=("provision units RECIPE writes units that stop on a wedged card",),
        )
