"""A server's log to findings. Pure.

Only the last start in a log counts: what stood in the way of an earlier one may be mended. A line is evidence by its
number, shortened, and without any API key.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from provisioner.counts import count_text
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
_READY = re.compile(r"Application startup complete|Starting vLLM (?:API )?server on")
_FAILURE = re.compile(
    r"Traceback \(most recent call last\)|EngineDeadError|illegal memory access|device-side assert|IndexError|"
    r"RuntimeError|AssertionError|ValueError|Segmentation fault"
)
_HIT_RATE = re.compile(r"Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s.*Prefix cache hit rate: (?P<rate>[\d.]+)%")
_CACHING = re.compile(r"enable_prefix_caching'?[=:]\s*(?P<on>True|False)")
_KEY_SHOWN = re.compile(r"(?P<head>'?api_key'?\s*[=:]\s*\[?\s*)(?P<quote>['\"])(?P<key>[^'\"]+)(?P=quote)")
_KEY_ARGUMENT = re.compile(r"(?P<head>--api[-_]key[= ]|VLLM_API_KEY=)(?P<key>\S+)")


class Phase(StrEnum):
    """When a symptom counts: while weights load and memory is profiled, while requests run, or always."""

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
        id="no-cache",
        pattern=re.compile(r"No available memory for the cache blocks"),
        what="weights and profiling left no memory for the KV cache",
        next=("provision serve RECIPE -- --max-num-batched-tokens 2048 (a smaller peak while profiling)",),
        phase=Phase.LOAD,
        subject=Subject.COMMAND,
    ),
    Symptom(
        id="load-memory",
        pattern=re.compile(
            r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|less than requested memory for kv|"
            r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"
        ),
        what="memory ran out while the model loaded",
        next=(
            "provision serve RECIPE -- --gpu-memory-utilization 0.85",
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (Hynix; never on a Samsung card)",
        ),
        phase=Phase.LOAD,
    ),
    Symptom(
        id="serving-memory",
        pattern=re.compile(r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory"),
        what="memory ran out while requests ran; a hard out-of-memory can wedge the card",
        next=(
            "provision doctor --gpu",
            "provision serve RECIPE -- --gpu-memory-utilization 0.85",
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
            r"validation errors? for \w*(?:Config|Args)"
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


def read_log(lines: Iterable[str]) -> tuple[Finding, ...]:
    """Everything that the last start in a log shows, each symptom once, in the order of the table."""
    every = [line.rstrip("\n") for line in lines]
    starts = _find_starts(every)
    first = starts[-1] if starts else 0
    run = Run(lines=every[first:], first_number=first + 1)
    known = tuple(finding for symptom in SYMPTOMS for finding in _find_symptom(symptom, run))
    return (
        *known,
        *(() if known or not starts else _find_start_without_end(run)),
        *_find_cold_cache(run),
        *_find_card_events(run),
        *_find_shown_key(run),
        *_find_loop(starts, every),
    )


def _find_starts(lines: Sequence[str]) -> list[int]:
    starts: list[int] = []
    last = -_LINES_OF_A_START
    for number, line in enumerate(lines):
        if _START.search(line):
            if number - last >= _LINES_OF_A_START:
                starts.append(number)
            last = number
    return starts


@dataclass(frozen=True)
class Run:
    """The lines of one start, and the number that the first of them has in the log."""

    lines: Sequence[str]
    first_number: int

    def ready_at(self) -> int:
        """Index of the line at which requests can come; the length of the run where it never got there."""
        return next((index for index, line in enumerate(self.lines) if _READY.search(line)), len(self.lines))

    def quote(self, index: int) -> str:
        """A line as evidence."""
        return f"line {self.first_number + index}: {shorten(self.lines[index])}"


def shorten(line: str) -> str:
    """A line without keys and without its far end."""
    clean = _KEY_SHOWN.sub(rf"\g<head>\g<quote>{REDACTED}\g<quote>", line.strip())
    clean = _KEY_ARGUMENT.sub(rf"\g<head>{REDACTED}", clean)
    return clean if len(clean) <= _LONGEST_EVIDENCE else clean[: _LONGEST_EVIDENCE - 1] + "…"


def _find_symptom(symptom: Symptom, run: Run) -> Iterator[Finding]:
    ready = run.ready_at()
    window = {
        Phase.LOAD: range(ready),
        Phase.SERVING: range(ready, len(run.lines)),
        Phase.ANY: range(len(run.lines)),
    }[symptom.phase]
    found = [index for index in window if symptom.pattern.search(run.lines[index])]
    if symptom.near_failure:
        failures = [index for index in window if _FAILURE.search(run.lines[index])]
        found = [index for index in found if any(abs(index - failure) <= _NEIGHBOUR_LINES for failure in failures)]
    if found:
        match = symptom.pattern.search(run.lines[found[-1]])
        numbers = match.groupdict() if match else {}
        yield Finding(
            id=symptom.id,
            severity=symptom.severity,
            subject=symptom.subject,
            what=symptom.what,
            evidence=tuple(run.quote(index) for index in found[:_MOST_EVIDENCE]),
            next=tuple(step.format_map(numbers) for step in symptom.next),
        )


def _find_start_without_end(run: Run) -> Iterator[Finding]:
    """A start that never became ready is no healthy one, whatever stopped it."""
    end = len(run.lines)
    if run.ready_at() < end:
        return
    yield Finding(
        id="unknown-failure",
        severity=Severity.ERROR,
        subject=Subject.ENVIRONMENT,
        what="the log ends before the server was ready",
        evidence=tuple(run.quote(index) for index in range(max(0, end - _LAST_LINES), end)),
        next=("journalctl -k | grep -i 'out of memory'", "provision doctor RECIPE"),
    )


def _find_cold_cache(run: Run) -> Iterator[Finding]:
    """A hit rate pinned at zero over several reports with prompts in them, while the cache is on."""
    switches = [match["on"] for line in run.lines if (match := _CACHING.search(line))]
    if switches and switches[-1] == "False":
        return
    reports = [(index, match) for index, line in enumerate(run.lines) if (match := _HIT_RATE.search(line))]
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
    for event in parse_kernel_log(run.lines):
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
        if (match := pattern.search(line)) and match["key"] not in {REDACTED, "None", "***"}
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
