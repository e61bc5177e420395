"""What a server's log shows: each symptom is found, in the last start alone, and nothing in a healthy log."""

from pathlib import Path

import pytest

from provisioner.doctor.condense import condense
from provisioner.doctor.logs import read_log, shorten
from provisioner.doctor.symptoms import SYMPTOMS
from provisioner.serve.findings import Severity

LOGS = Path(__file__).parent / "logs"
START = "(APIServer pid=7) INFO 11-30 10:00:00 [api_utils.py:330] vLLM server version 0.27.1, serving model /models/q"
CONFIG = "(EngineCore pid=9) INFO 11-30 10:00:05 [core.py:90] config: model='/models/q', enable_prefix_caching=True, "
READY = "(APIServer pid=7) INFO:     Application startup complete."
STOP = "(APIServer pid=7) INFO:     Shutting down"
TRACE = "(EngineCore pid=9) ERROR 11-30 10:01:00 [core.py:1349] Traceback (most recent call last):"
REPORT = (
    "(APIServer pid=7) INFO 11-30 10:05:{second:02} [loggers.py:310] Engine 000: Avg prompt throughput: {prompt} "
    "tokens/s, Avg generation throughput: 60.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 3.1%, "
    "Prefix cache hit rate: {rate}%"
)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 63.2 GiB"
LOADED = (
    "(EngineCore pid=9) INFO 11-30 10:00:40 [model_runner.py:425] Model loading took 40.1 GiB memory and 30 seconds"
)
CAPTURE = "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):   0%|          | 0/35 [00:00<?, ?it/s]"
FAULT = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"


def reports(prompts, rates) -> list[str]:
    rows = zip(prompts, rates, strict=True)
    return [REPORT.format(second=n, prompt=prompt, rate=rate) for n, (prompt, rate) in enumerate(rows)]


def found(*lines: str) -> dict[str, tuple[str, ...]]:
    return {finding.id: finding.evidence for finding in read_log([START, *lines])}


HEALTHY = [
    START,
    CONFIG,
    "(EngineCore pid=9) INFO 11-30 10:00:30 [causal_conv1d.py:12] autotuning causal_conv1d kernels",
    READY,
    *reports(["512.0", "0.0", "900.1", "12.0"], ["0.0", "0.0", "31.2", "40.5"]),
]


def test_a_healthy_log_shows_nothing():
    assert read_log([*HEALTHY, STOP]) == ()
    assert read_log(HEALTHY, running={7}) == ()


@pytest.mark.parametrize(
    ("lines", "id_"),
    [
        (["ValueError: Model architectures ['Qwen3_8ForCausalLM'] failed to be inspected."], "working-directory"),
        ([READY, TRACE, '  File "…/mamba/ops/causal_conv1d.py", line 120, in causal_conv1d_update'], "gdn-patch"),
        ([READY, TRACE, "RuntimeError: mamba state shape mismatch"], "gdn-patch"),
        ([TRACE, FAULT], "load-fault"),
        ([READY, TRACE, FAULT], "serving-fault"),
        ([TRACE, OOM], "weights-memory"),
        ([LOADED, TRACE, OOM], "profiling-memory"),
        ([LOADED, CAPTURE, TRACE, OOM], "capture-memory"),
        (["RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"], "host-memory"),
        (["vllm.service: Failed with result 'oom-kill'."], "host-memory"),
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
        ([CONFIG, READY, *reports(["9.0"] * 3, ["0.0"] * 3), STOP], "prefix-trio"),
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


# What vLLM 0.32.0 wrote on a CPU, shortened, and the one finding that it gives; a new report is one file and one line.
# "killed-while-loading" is a log of a good start, cut off by us.
CORPUS = {
    "bad-argument": "bad-argument",
    "cache-too-large": "cache-too-large",
    "engine-killed-while-serving": "unknown-failure",
    "healthy": None,
    "killed-while-loading": "ended-while-loading",
    "model-length-too-large": "bad-argument",
    "stopped-in-a-terminal": None,
    "truncated-weights": "unknown-failure",
    "unknown-tool-parser": "unknown-failure",
    "wrong-quantization": "bad-argument",
}
ROOTS = {
    "engine-killed-while-serving": "engine core exited unexpectedly",
    "truncated-weights": "SafetensorError: Error while deserializing header: incomplete metadata",
    "unknown-tool-parser": "KeyError: 'invalid tool call parser: nope",
}


def corpus_log(name: str) -> list[str]:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8").splitlines()


def test_every_log_of_the_corpus_has_its_line():
    assert sorted(path.stem for path in LOGS.glob("*.log")) == sorted(CORPUS)


@pytest.mark.parametrize(
    "carrier",
    [
        "{}",
        "Dec 07 11:40:09 rig vllm[3549]: {}",
        "2026-12-07T11:40:09+0100 rig vllm[3549]: {}",
        "2026-12-07T11:40:09.123456789Z {}",
        "vllm-1  | {}",
        "\x1b[0;36m{}\x1b[0m",
    ],
)
@pytest.mark.parametrize(("name", "id_"), CORPUS.items())
def test_what_a_real_server_wrote(name, id_, carrier):
    findings = read_log(carrier.format(line) for line in corpus_log(name))
    assert [finding.id for finding in findings] == ([id_] if id_ else [])
    assert all(ROOTS.get(name, "") in finding.what for finding in findings)


def test_colours_of_vllms_own_prefixes_hide_nothing():
    line = "\x1b[1;36m(EngineCore pid=9)\x1b[0;0m \x1b[31mERROR\x1b[0m 11-30 10:01:00 [core.py:1349] \x1b[1m{}\x1b[0m"
    traceback = ["Traceback (most recent call last):", '  File "/v/vllm/x.py", line 1, in f', "OddError: no such thing"]
    (finding,) = read_log([START, *(line.format(text) for text in traceback)])
    assert finding.what == "the server failed before it was ready: OddError: no such thing"
    assert "\x1b" not in str(finding)


def test_an_unknown_failure_names_the_frame_of_its_root_and_the_last_ten_lines():
    log = corpus_log("truncated-weights")
    (finding,) = read_log(log)
    assert "SafetensorError" in finding.evidence[0]
    assert "/vllm/model_executor/model_loader/weight_utils.py" in finding.evidence[1]
    assert [line.split(":")[0] for line in finding.evidence[2:]] == [f"line {len(log) - n}" for n in range(9, -1, -1)]


def test_the_root_is_the_innermost_exception_of_the_process_that_failed_first():
    (finding,) = read_log([
        START,
        "(Worker_TP1 pid=8) ERROR 11-30 10:00:59 [multiproc_executor.py:953] Traceback (most recent call last):",
        "(EngineCore pid=9) INFO 11-30 10:00:59 [core.py:1] Waiting",
        "INFO:     127.0.0.1:44700 waits",
        "(Worker_TP1 pid=8) WARNING 11-30 10:00:59 [x.py:1] ValueError: an optional part is missing",
        "(Worker_TP1 pid=8) ERROR 11-30 10:00:59 [multiproc_executor.py:953] [rank1]: OddError: the innermost",
        "(Worker_TP1 pid=8) ERROR 11-30 10:00:59 [multiproc_executor.py:953] The above exception was the direct cause",
        "(Worker_TP1 pid=8) ERROR 11-30 10:00:59 [multiproc_executor.py:953] Traceback (most recent call last):",
        "(Worker_TP1 pid=8) ERROR 11-30 10:00:59 [multiproc_executor.py:953] RuntimeError: the outer one",
        TRACE,
        "(EngineCore pid=9) ERROR 11-30 10:01:00 [core.py:1349] OtherError: in consequence",
    ])  # fmt: skip
    assert finding.what.endswith("OddError: the innermost")


@pytest.mark.parametrize(
    "lines",
    [
        [TRACE, "RuntimeError: something else"],
        [TRACE, '  File "/v/vllm/x.py", line 1, in f'],
        ["(EngineCore pid=9) ERROR 11-30 10:01:00 [core.py:1349] EngineCore encountered a fatal error."],
        ["(APIServer pid=7) ERROR 11-30 10:01:00 [core_client.py:1] Engine core proc EngineCore died unexpectedly"],
        ["Dec 07 11:40:09 rig systemd[1]: vllm.service: Main process exited, code=killed, status=9/KILL"],
        ["!!!!!!! Segfault encountered !!!!!!!"],
    ],
)
def test_a_failure_after_ready_is_a_finding(lines):
    (finding,) = read_log([*HEALTHY, *lines])
    assert finding.id == "unknown-failure"
    assert "after it was ready" in finding.what


@pytest.mark.parametrize(
    "lines",
    [
        ["ERROR:    Exception in ASGI application", "Traceback (most recent call last):", "ValueError: a bad request"],
        ["INFO:     Shutting down", TRACE, "RuntimeError: cancelled"],
        [
            "(APIServer pid=7) INFO 12-07 11:45:44 [launcher.py:254] [shutdown] API server: shutdown triggered",
            "(APIServer pid=7) WARNING 12-07 11:45:44 [core_client.py:817] [shutdown] MPClient: engine core exited "
            "unexpectedly; starting cleanup",
        ],
        ["(APIServer pid=7) INFO 12-07 11:45:44 [logger.py:51] Received request: prompt: 'Segmentation fault, why?'"],
        [TRACE, "KeyboardInterrupt"],
        ["(Worker pid=8) WARNING 11-30 10:01:00 [x.py:1] Traceback (most recent call last):", "ImportError: optional"],
    ],
)
def test_what_does_not_end_a_server_is_no_failure(lines):
    assert read_log([*HEALTHY, *lines, STOP]) == ()


def test_a_failure_that_the_start_got_over_is_none():
    assert read_log([START, TRACE, "RuntimeError: tried another way", READY, STOP]) == ()


def test_a_symptom_before_the_failure_does_not_explain_it():
    harmless = "(APIServer pid=7) WARNING 11-30 10:00:01 [x.py:1] No CUDA GPUs are available, asking again"
    assert set(found(harmless, TRACE, "OddError: no such thing")) == {"card-start", "unknown-failure"}
    assert set(found(harmless)) == {"card-start", "ended-while-loading"}


def test_a_log_that_just_stops_says_at_what_and_asks_for_the_oom_killer():
    (finding,) = read_log(corpus_log("killed-while-loading"))
    assert finding.what.startswith("the log ends while loading weights")
    assert "oom-kill" in finding.next[0]
    assert len(finding.evidence) == 10
    (finding,) = read_log([START, CONFIG, LOADED, CAPTURE])
    assert finding.what.startswith("the log ends while capturing CUDA graphs")


def test_a_server_that_died_without_a_word_after_it_was_ready_is_a_finding():
    for log in (HEALTHY, HEALTHY[-2:], corpus_log("healthy")[:60]):
        assert [finding.id for finding in read_log(log)] == ["ended-while-serving"]
    assert read_log(["INFO:     Started server process [5197]", READY.partition(") ")[2]], running={5197}) == ()


def test_what_a_start_got_over_is_no_symptom():
    assert read_log([START, "WARNING retrying: [Errno 98] Address already in use", READY, STOP]) == ()
    assert (
        read_log([*HEALTHY, "(APIServer pid=7) INFO 12-07 11:45:44 [x.py:51] prompt: 'CUDA out of memory'", STOP]) == ()
    )


def test_the_log_of_a_server_that_runs_has_not_ended():
    assert read_log([START, CONFIG], running={7}) == ()
    assert [finding.id for finding in read_log([START, CONFIG], running={8})] == ["ended-while-loading"]
    assert read_log(["INFO vLLM server version 0.27.1"], running={8}) == ()
    assert [finding.id for finding in read_log([START, TRACE, "OddError: x"], running={7})] == ["unknown-failure"]


@pytest.mark.parametrize(
    ("lines", "ready"),
    [(HEALTHY, True), (HEALTHY[-1:], True), ([START], False), (["nothing of a server"], False), ([], False)],
)
def test_ready_is_seen_or_not(lines, ready):
    assert condense(f"{line}\n".encode() for line in lines).is_ready is ready


TOO_SMALL = (
    "ValueError: To serve at least one request with the model's max seq len (262144), (36.0 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (6.94 GiB). Based on the available memory, the estimated "
    "maximum model length is 50512. Try increasing `gpu_memory_utilization`"
)


WITHOUT_ESTIMATE = TOO_SMALL.replace("Based on the available memory, the estimated maximum model length is 50512. ", "")


@pytest.mark.parametrize(
    ("lines", "id_", "does_not"),
    [
        # A lower share of the card's memory is taken from the cache first: the weights keep their size.
        ([TOO_SMALL], "cache-too-small", "utilization"),
        ([WITHOUT_ESTIMATE], "cache-too-small", "utilization 0.85"),
        (["ValueError: No available memory for the cache blocks. Try increasing"], "no-cache", "utilization"),
        # The share bounds the cache, which is made after the weights: it leaves them no more room.
        ([OOM], "weights-memory", "utilization"),
        # The largest batch is tried before the cache is made: a share gives it no more room, a smaller batch does.
        ([LOADED, OOM], "profiling-memory", "utilization"),
        # The cache has its share when graphs are captured: a larger one leaves them less room.
        ([LOADED, CAPTURE, OOM], "capture-memory", "utilization 0.9"),
        # While requests run, only what the cache leaves is free: a larger one leaves less.
        ([LOADED, READY, TRACE, OOM], "serving-memory", "utilization 0.9"),
        # A cache of a fixed size is not bounded by the share.
        (["ValueError: kv cache allocation is less than requested memory for kv (4.0 GiB)"], "cache-too-large",
         "utilization"),
        # The card's memory is not what ran out: to keep weights on the host takes more of what is short.
        (["RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried"], "host-memory", "offload"),
    ],
)  # fmt: skip
def test_advice_on_memory_does_not_make_it_worse(lines, id_, does_not):
    (finding,) = read_log([START, *lines])
    assert finding.id == id_
    assert not any(does_not in step for step in finding.next)


def test_a_cache_too_small_is_answered_with_the_length_in_the_line():
    (finding,) = read_log([START, TRACE, TOO_SMALL])
    assert finding.next == ("provision serve RECIPE -- --max-model-len 50512",)


def test_every_symptom_says_what_to_run_next():
    assert all(symptom.next for symptom in SYMPTOMS)


def test_a_kernels_name_without_a_failure_near_it_is_no_crash():
    far = ["INFO fine"] * 100
    assert found("INFO causal_conv1d autotuned", *far, READY, TRACE, "RuntimeError: something else").keys() == {
        "unknown-failure"
    }


@pytest.mark.parametrize(
    "lines",
    [
        [CONFIG, READY, *reports(["9.0"] * 2, ["0.0"] * 2), STOP],
        [CONFIG, READY, *reports(["0.0"] * 9, ["0.0"] * 9), STOP],
        [CONFIG, READY, *reports(["9.0"] * 4, ["0.0", "0.0", "0.1", "0.0"]), STOP],
        [CONFIG.replace("True", "False"), READY, *reports(["9.0"] * 4, ["0.0"] * 4), STOP],
    ],
)
def test_a_hit_rate_is_pinned_only_over_several_busy_reports_with_the_cache_on(lines):
    assert found(*lines) == {}


def test_without_a_word_on_the_cache_it_is_a_warning():
    (finding,) = read_log([START, READY, *reports(["9.0"] * 3, ["0.0"] * 3), STOP])
    assert finding.severity is Severity.WARNING


def test_only_the_last_start_counts_and_lines_are_numbered_in_the_file():
    mended = read_log([START, TRACE, OOM, *["INFO shutting down"] * 20, *HEALTHY, STOP])
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
    assert read_log([arguments, TRACE, OOM, *far, banner, arguments, READY, STOP]) == ()


def test_a_log_without_a_start_is_read_from_its_beginning():
    assert {finding.id for finding in read_log([TRACE, OOM])} == {"weights-memory"}


def test_a_restart_loop_is_named():
    loop = [START, TRACE, FAULT, *["INFO shutting down"] * 20] * 4
    assert {finding.id for finding in read_log(loop)} == {"load-fault", "restart-loop"}
    assert read_log([*loop, START, READY, STOP]) == ()


def test_no_key_is_quoted():
    line = "ERROR cmd: vllm serve m --api-key s3cret VLLM_API_KEY=s3cret api_key='s3cret' {'api_key': ['s3cret']}"
    assert "s3cret" not in shorten(line)
    assert len(shorten("x" * 1000)) == 220
    for finding in read_log([START, TRACE, OOM + " --api-key s3cret"]):
        assert "s3cret" not in str(finding)
