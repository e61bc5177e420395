"""What lines of a server's log mean, and what to do about them: a table. Pure."""

import re
from dataclasses import dataclass
from enum import StrEnum

from provisioner.serve.findings import Severity, Subject

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
