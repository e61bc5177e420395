"""The hook: which calls it takes over, from which it keeps its hands off, and what it says."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from provisioner.marlin import repack as module
from provisioner.marlin.cases import Case, random_words
from provisioner.marlin.layout import Layout, Packing, reference_repack
from provisioner.marlin.repack import SETTING, Ledger, RepackError, TorchEngine, belongs_on_cpu, read_setting, route

torch = pytest.importorskip("torch")

COMPILED = "compiled op"


def gptq_marlin_repack(
    b_q_weight: Any, perm: Any, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
) -> Any:
    return COMPILED


def new_gptq_marlin_repack(b_q_weight: Any, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False) -> Any:
    return COMPILED


def awq_marlin_moe_repack(
    b_q_weight: Any, perm: Any, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
) -> Any:
    return COMPILED


new_gptq_marlin_repack.__name__ = "gptq_marlin_repack"


class Watch:
    """The clock and the watcher threads of ledgers, moved by the test: no time passes, no thread starts of itself."""

    perf_counter = staticmethod(time.perf_counter)
    Lock = staticmethod(threading.Lock)

    def __init__(self) -> None:
        self.now = 100.0
        self.waiting: list[Callable[[], None]] = []
        self.while_asleep: list[Callable[[], None]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Leap ``seconds`` ahead; the next of ``while_asleep`` happens a second after falling asleep."""
        woken = self.now + seconds
        if self.while_asleep:
            self.now += 1.0
            self.while_asleep.pop(0)()
        self.now = woken

    def Thread(self, *, target: Callable[[], None], name: str, daemon: bool) -> SimpleNamespace:  # noqa: N802
        assert daemon, "vLLM's exit would wait for the watcher"
        return SimpleNamespace(start=lambda: self.waiting.append(target))

    def run(self) -> None:
        """Let the one watcher that was started run to its end."""
        (watcher,) = self.waiting
        self.waiting.clear()
        watcher()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    made = Watch()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(module, "threading", made)
    return made


@pytest.fixture(autouse=True)
def quiet_ledger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module's ledger notes without a watcher; a ledger of a test's own leaves none behind."""
    monkeypatch.setattr(module, "_ledger", SimpleNamespace(note=lambda size, seconds, *, how: None))
    monkeypatch.setattr(module, "default_engine", TorchEngine)
    monkeypatch.delenv(SETTING, raising=False)
    yield
    assert watchers() == []


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "marlin-repack-ledger"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], Any]:
    """A tensor that claims to be on a GPU of some compute capability."""

    def make(capability: tuple[int, int], *, capturing: bool = False) -> Any:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        return SimpleNamespace(device=torch.device("cuda:0"))

    return make


def words_of(case: Case) -> "torch.Tensor":
    return torch.from_numpy(random_words(case).view(np.int32))


@pytest.mark.parametrize(
    ("setting", "capability", "taken"),
    [
        (None, (8, 0), True),
        ("auto", (8, 0), True),
        ("AUTO", (8, 0), True),
        ("", (8, 0), True),
        (None, (8, 6), False),
        (None, (9, 0), False),
        (None, (7, 5), False),
        ("1", (9, 0), True),
        ("0", (8, 0), False),
    ],
)
def test_the_device_and_the_setting_decide(
    monkeypatch: pytest.MonkeyPatch, gpu: Any, setting: str | None, capability: tuple[int, int], taken: bool
) -> None:
    if setting is not None:
        monkeypatch.setenv(SETTING, setting)
    assert belongs_on_cpu(gpu(capability)) is taken


def test_never_while_a_graph_is_captured(gpu: Any) -> None:
    assert not belongs_on_cpu(gpu((8, 0), capturing=True))


def test_never_on_rocm(monkeypatch: pytest.MonkeyPatch, gpu: Any) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not belongs_on_cpu(gpu((8, 0)))


@pytest.mark.parametrize(("setting", "taken"), [("auto", False), ("0", False), ("1", True)])
def test_host_tensors_are_taken_only_on_demand(monkeypatch: pytest.MonkeyPatch, setting: str, taken: bool) -> None:
    monkeypatch.setenv(SETTING, setting)
    assert belongs_on_cpu(torch.zeros(1, dtype=torch.int32)) is taken


def test_tensors_without_data_go_to_the_compiled_op(monkeypatch: pytest.MonkeyPatch, gpu: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setenv(SETTING, "1")
    gpu((8, 0))
    assert not belongs_on_cpu(torch.zeros(1, dtype=torch.int32, device="meta"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert not belongs_on_cpu(torch.zeros(1, dtype=torch.int32))
        assert not belongs_on_cpu(torch.zeros(1, dtype=torch.int32, device="cuda"))


@pytest.mark.parametrize("value", ["yes", "2", "on", "auto1"])
def test_other_settings_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(SETTING, value)
    with pytest.raises(RepackError, match="expected auto, 1 or 0"):
        read_setting()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("act_order", [False, True])
def test_a_call_with_perm_gives_the_reference(monkeypatch: pytest.MonkeyPatch, bits: int, act_order: bool) -> None:
    monkeypatch.setenv(SETTING, "1")
    case = Case(layout=Layout(bits=bits), size_k=64, size_n=128)
    order = np.random.default_rng(1).permutation(64).astype(np.int32)[: 64 if act_order else 0]
    expected = reference_repack(random_words(case), case.layout, perm=order if act_order else None)
    routed = route(gptq_marlin_repack)
    words, perm = words_of(case), torch.from_numpy(order)
    for made in (
        routed(words, perm, 64, 128, bits),
        routed(words, perm=perm, size_k=64, size_n=128, num_bits=bits, is_a_8bit=False),
    ):
        assert np.array_equal(made.numpy().view(np.uint32), expected)


def test_a_call_without_perm_gives_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "1")
    case = Case(layout=Layout(bits=8), size_k=64, size_n=128)
    made = route(new_gptq_marlin_repack)(words_of(case), 64, 128, num_bits=8)
    assert np.array_equal(made.numpy().view(np.uint32), reference_repack(random_words(case), case.layout))


def test_awq_experts_ignore_their_perm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's function takes a perm there and does not use it."""
    monkeypatch.setenv(SETTING, "1")
    layout = Layout(bits=4, packing=Packing.AWQ)
    each = [random_words(Case(layout=layout, size_k=64, size_n=128), seed) for seed in range(2)]
    words = torch.from_numpy(np.stack(each).view(np.int32))
    made = route(awq_marlin_moe_repack)(words, torch.arange(64, dtype=torch.int32), 64, 128, 4)
    expected = np.stack([reference_repack(one, layout) for one in each])
    assert np.array_equal(made.numpy().view(np.uint32), expected)


def test_a_weight_on_such_a_gpu_goes_down_and_up(monkeypatch: pytest.MonkeyPatch, gpu: Any) -> None:
    words = gpu((8, 0))
    words.nbytes = 5
    calls = []
    monkeypatch.setattr(module, "repack_from_device", lambda *args, **kwargs: calls.append((args, kwargs)) or "made")
    assert route(gptq_marlin_repack)(words, None, 64, 128, 8, True) == "made"
    ((args, kwargs),) = calls
    assert args == ("gptq", words, 64, 128, 8)
    assert kwargs["is_a_8bit"] is True


def test_other_calls_reach_the_compiled_op_as_they_are(gpu: Any) -> None:
    seen: list[Any] = []

    def gptq_marlin_repack(b_q_weight: Any, *, added_later: int) -> str:
        seen.append((b_q_weight, added_later))
        return COMPILED

    words = gpu((9, 0))
    assert route(gptq_marlin_repack)(words, added_later=3) == COMPILED
    assert seen == [(words, 3)]
    with pytest.raises(RepackError, match=f"added_later, which the CPU repack does not know; {SETTING}=0"):
        route(gptq_marlin_repack)(gpu((8, 0)), added_later=3)


def test_under_torch_compile_the_compiled_op_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "1")

    def gptq_marlin_repack(b_q_weight: Any, size_k: int, size_n: int, num_bits: int) -> Any:
        return b_q_weight + 1

    routed = route(gptq_marlin_repack)
    compiled = torch.compile(lambda words: routed(words, 64, 64, 8), backend="eager", fullgraph=True)
    words = torch.zeros((16, 64), dtype=torch.int32)
    assert torch.equal(compiled(words), words + 1)
    assert routed(words, 64, 64, 8).shape == (4, 256)


def test_the_wrapper_keeps_name_and_signature() -> None:
    routed: Any = route(gptq_marlin_repack)
    assert routed.__name__ == "gptq_marlin_repack"
    assert routed.__wrapped__ is gptq_marlin_repack


def test_it_says_once_that_it_works_and_once_what_it_did(caplog: pytest.LogCaptureFixture, watch: Watch) -> None:
    quiet: list[float] = []
    ledger = Ledger(lambda: quiet.append(watch.now), quiet_seconds=5.0)
    with caplog.at_level(logging.INFO, logger=module.__name__):
        for _ in range(3):
            ledger.note(1_500_000_000, 0.5, how="numba, 16 threads")
        watch.run()
        ledger.note(1_000_000, 0.1, how="numba, 16 threads")
        watch.run()
    assert quiet == [105.0, 110.0]
    assert [record.getMessage() for record in caplog.records] == [
        f"Marlin weights are repacked on the CPU (numba, 16 threads; {SETTING}=0 turns this off)",
        "Repacked 3 Marlin weights on the CPU: 4.50 GB in 1.5 s, copies included",
    ]


def test_it_is_quiet_only_when_the_last_weight_is_long_past(caplog: pytest.LogCaptureFixture, watch: Watch) -> None:
    quiet: list[float] = []
    ledger = Ledger(lambda: quiet.append(watch.now), quiet_seconds=5.0)
    with caplog.at_level(logging.INFO, logger=module.__name__):
        ledger.note(1_000_000_000, 0.5, how="numba, 16 threads")
        watch.while_asleep.append(lambda: ledger.note(1_000_000_000, 0.5, how="numba, 16 threads"))
        watch.run()
    assert quiet == [106.0]
    assert watch.waiting == []
    assert caplog.messages[-1] == "Repacked 2 Marlin weights on the CPU: 2.00 GB in 1.0 s, copies included"


def test_a_call_is_noted_in_the_ledger(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    monkeypatch.setenv(SETTING, "1")
    quiet: list[float] = []
    monkeypatch.setattr(module, "_ledger", Ledger(lambda: quiet.append(watch.now), quiet_seconds=5.0))
    route(new_gptq_marlin_repack)(words_of(Case(layout=Layout(bits=8), size_k=64, size_n=128)), 64, 128, num_bits=8)
    watch.run()
    assert quiet == [105.0]


def test_the_watcher_is_a_thread_of_its_own() -> None:
    by: list[str] = []
    quiet = threading.Event()

    def note_thread() -> None:
        by.append(threading.current_thread().name)
        quiet.set()

    Ledger(note_thread, quiet_seconds=0.0).note(1, 0.5, how="numba, 16 threads")
    assert quiet.wait(10)
    for thread in watchers():
        thread.join(10)
    assert by == ["marlin-repack-ledger"]
