"""What a server's log shows: each symptom is found, in the last start alone, and nothing in a healthy log."""

from pathlib import Path

import pytest

from provisioner.doctor.logs import SYMPTOMS, read_log, shorten
from provisioner.serve.findings import Severity

LOGS = Path(__file__).parent / "logs"
START = "(APIServer pid=7) INFO 11-30 10:00:00 [api_utils.py:330] vLLM server version 0.27.1, serving model /models/q"
CONFIG = "(EngineCore pid=9) INFO 11-30 10:00:05 [core.py:90] config: model='/models/q', enable_prefix_caching=True, "
READY = "(APIServer pid=7) INFO:     Application startup complete."
TRACE = "(EngineCore pid=9) ERROR 11-30 10:01:00 [core.py:1349] Traceback (most recent call last):"
REPORT = (
    "(APIServer pid=7) INFO 11-30 10:05:{second:02} [loggers.py:310] Engine 000: Avg prompt throughput: {prompt} "
    "tokens/s, Avg generation throughput: 60.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 3.1%, "
    "Prefix cache hit rate: {rate}%"
)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 63.2 GiB"
FAULT = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"


def reports(prompts, rates) -> list[str]:
    rows = zip(prompts, rates, strict=True)
    return [REPORT.format(second=n, prompt=prompt, rate=rate) for n, (prompt, rate) in enumerate(rows)]


def found(*lines: str) -> dict[str, tuple[str, ...]]:
    return {finding.id: finding.evidence for finding in read_log([START, *lines])}


HEALTHY = [
    START,
    CONFIG,
    "INFO [causal_conv1d.py:12] autotuning causal_conv1d kernels",
    READY,
    *reports(["512.0", "0.0", "900.1", "12.0"], ["0.0", "0.0", "31.2", "40.5"]),
]


def test_a_healthy_log_shows_nothing():
    assert read_log(HEALTHY) == ()


@pytest.mark.parametrize(
    ("lines", "id_"),
    [
        (["ValueError: Model architectures ['Qwen3_8ForCausalLM'] failed to be inspected."], "working-directory"),
        ([READY, TRACE, '  File "…/mamba/ops/causal_conv1d.py", line 120, in causal_conv1d_update'], "gdn-patch"),
        ([READY, TRACE, "RuntimeError: mamba state shape mismatch"], "gdn-patch"),
        ([TRACE, FAULT], "load-fault"),
        ([READY, TRACE, FAULT], "serving-fault"),
        ([TRACE, OOM], "load-memory"),
        ([READY, TRACE, OOM], "serving-memory"),
        (["ValueError: No available memory for the cache blocks. Try increasing"], "no-cache"),
        (["ValueError: Free memory on device cuda:0 (1/63 GiB) on startup is less than desired GPU memory utilization"],
         "memory-taken"),
        (["RuntimeError: No CUDA GPUs are available"], "card-start"),
        (["RuntimeError: CUDA driver initialization failed, you might not have a CUDA gpu."], "card-start"),
        (["the provided PTX was compiled with an unsupported toolchain."], "toolchain"),
        (["ImportError: …/_C.abi3.so: undefined symbol: _ZN3c104cuda"], "torch-mismatch"),
        (["OSError: [Errno 98] Address already in use"], "port"),
        (["vllm: error: unrecognized arguments: --max-modle-len 1"], "bad-argument"),
        (["ValueError: Invalid prefix_match_unit=512; all KV cache group block sizes"], "prefix-match-unit"),
        ([CONFIG, READY, *reports(["9.0"] * 3, ["0.0"] * 3)], "prefix-trio"),
        (["INFO non-default args: {'api_key': ['s3cret'], 'port': 8012}"], "key-in-log"),
        (["kernel: NVRM: Xid (PCI:0000:81:00): 31, pid=13332, name=python3, Ch 00000010"], "xid-31"),
        (["kernel: NVRM: Xid (PCI:0000:82:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."],
         "xid-79"),
        (["kernel: NVRM: The NVIDIA GPU 0000:82:00.0 (PCI ID: 10de:20c2)", "kernel: NVRM: installed in this system has",
          "kernel: NVRM: fallen off the bus and is not responding to commands."], "xid-79"),
    ],
)  # fmt: skip
def test_each_symptom_is_found_with_its_line(lines, id_):
    shown = found(*lines)
    assert id_ in shown
    assert shown[id_]


@pytest.mark.parametrize("path", sorted(LOGS.glob("*.log")), ids=lambda path: path.stem)
def test_what_a_real_server_wrote(path):
    """Logs of vLLM 0.32.0 on a CPU, shortened; each is named by what was done to it."""
    found = [finding.id for finding in read_log(path.read_text(encoding="utf-8").splitlines())]
    assert found == [path.stem]


def test_a_start_that_never_became_ready_is_a_finding_with_its_last_ten_lines():
    (finding,) = read_log([START, CONFIG, *(f"INFO loading shard {n}" for n in range(20))])
    assert finding.id == "unknown-failure"
    assert [line.rsplit(" ", 1)[1] for line in finding.evidence] == [str(n) for n in range(10, 20)]


TOO_SMALL = (
    "ValueError: To serve at least one request with the model's max seq len (262144), (36.0 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (6.94 GiB). Based on the available memory, the estimated "
    "maximum model length is 50512. Try increasing `gpu_memory_utilization`"
)


@pytest.mark.parametrize("line", [TOO_SMALL, "ValueError: No available memory for the cache blocks. Try increasing"])
def test_advice_on_a_small_cache_does_not_shrink_it(line):
    """A lower share of the card's memory is taken from the cache first: the weights keep their size."""
    (finding,) = read_log([START, TRACE, line])
    assert not any("gpu-memory-utilization" in step for step in finding.next)


def test_a_cache_too_small_is_answered_with_the_length_in_the_line():
    (finding,) = read_log([START, TRACE, TOO_SMALL])
    assert finding.next == ("provision serve RECIPE -- --max-model-len 50512",)


def test_every_symptom_says_what_to_run_next():
    assert all(symptom.next for symptom in SYMPTOMS)


def test_a_kernels_name_without_a_failure_near_it_is_no_crash():
    far = ["INFO fine"] * 100
    assert found("INFO causal_conv1d autotuned", *far, READY, TRACE, "RuntimeError: something else") == {}


@pytest.mark.parametrize(
    "lines",
    [
        [CONFIG, READY, *reports(["9.0"] * 2, ["0.0"] * 2)],
        [CONFIG, READY, *reports(["0.0"] * 9, ["0.0"] * 9)],
        [CONFIG, READY, *reports(["9.0"] * 4, ["0.0", "0.0", "0.1", "0.0"])],
        [CONFIG.replace("True", "False"), READY, *reports(["9.0"] * 4, ["0.0"] * 4)],
    ],
)
def test_a_hit_rate_is_pinned_only_over_several_busy_reports_with_the_cache_on(lines):
    assert found(*lines) == {}


def test_without_a_word_on_the_cache_it_is_a_warning():
    (finding,) = read_log([START, READY, *reports(["9.0"] * 3, ["0.0"] * 3)])
    assert finding.severity is Severity.WARNING


def test_only_the_last_start_counts_and_lines_are_numbered_in_the_file():
    mended = read_log([START, TRACE, OOM, *["INFO shutting down"] * 20, *HEALTHY])
    assert mended == ()
    before = [*HEALTHY, *["INFO shutting down"] * 20]
    (finding,) = read_log([*before, START, TRACE, OOM])
    assert finding.evidence == (f"line {len(before) + 3}: {OOM}",)


def test_the_lines_of_one_start_are_one_start():
    banner = "(APIServer pid=7) INFO [api_utils.py:347]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0"
    arguments = "(APIServer pid=7) INFO [api_utils.py:286] non-default args: {'port': 8012}"
    for first in (banner, START):
        (finding,) = read_log([first, "", arguments, TRACE, OOM])
        assert finding.evidence == (f"line 5: {OOM}",)
    far = ["INFO fine"] * 20
    assert read_log([arguments, TRACE, OOM, *far, banner, arguments, READY]) == ()


def test_a_log_without_a_start_is_read_from_its_beginning():
    assert {finding.id for finding in read_log([TRACE, OOM])} == {"load-memory"}


def test_a_restart_loop_is_named():
    loop = [START, TRACE, FAULT, *["INFO shutting down"] * 20] * 4
    assert {finding.id for finding in read_log(loop)} == {"load-fault", "restart-loop"}
    assert read_log([*loop, START, READY]) == ()


def test_no_key_is_quoted():
    line = "ERROR cmd: vllm serve m --api-key s3cret VLLM_API_KEY=s3cret api_key='s3cret' {'api_key': ['s3cret']}"
    assert "s3cret" not in shorten(line)
    assert len(shorten("x" * 1000)) == 220
    for finding in read_log([START, TRACE, OOM + " --api-key s3cret"]):
        assert "s3cret" not in str(finding)
