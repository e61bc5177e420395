"""The fast repack against the reference, with both engines; what it refuses; threads, memory, determinism."""

import functools
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from provisioner.marlin.cases import (
    Case,
    Refusal,
    digit_count,
    digit_words,
    find_difference,
    make_perm,
    random_words,
    refusals,
    small_cases,
)
from provisioner.marlin.layout import Activation, Layout, Packing, all_layouts, pack_values, reference_repack
from provisioner.marlin.repack import Engine, NumbaEngine, RepackError, TorchEngine, default_engine, repack

if TYPE_CHECKING:
    from provisioner.marlin.layout import Words

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

ENGINES: tuple[Engine, ...] = (NumbaEngine(), TorchEngine())
engines = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)


def call(case: Case, words: "Words", engine: Engine, **kwargs: object) -> "Words":
    perm = make_perm(case)
    made = repack(
        case.layout.packing,
        torch.from_numpy(words.view(np.int32)),
        case.size_k,
        case.size_n,
        case.layout.bits,
        perm=None if perm is None else torch.from_numpy(perm),
        is_a_8bit=case.layout.activation is Activation.NARROW,
        engine=engine,
        **kwargs,
    )
    return made.numpy().view(np.uint32)


@functools.cache
def answers(case: Case) -> tuple[tuple["Words", "Words"], ...]:
    """Random words and, for shapes where that is cheap, every digit of the values' numbers; each with its repack."""
    digits = digit_count(case) if case.size_k * case.size_n <= 1 << 16 else 0
    inputs = [random_words(case), *(digit_words(case, digit) for digit in range(digits))]
    return tuple((words, reference_repack(words, case.layout, perm=make_perm(case))) for words in inputs)


@engines
@pytest.mark.parametrize("case", small_cases(), ids=lambda case: case.name)
def test_equals_the_reference(engine: Engine, case: Case) -> None:
    for words, expected in answers(case):
        assert find_difference(call(case, words, engine), expected) is None


@engines
@pytest.mark.parametrize("layout", all_layouts(), ids=str)
def test_one_flipped_bit_turns_the_comparison_red(engine: Engine, layout: Layout) -> None:
    case = Case(layout=layout, size_k=128, size_n=192)
    words = random_words(case)
    expected = reference_repack(words, layout)
    words[words.shape[0] // 2, words.shape[1] // 3] ^= np.uint32(1 << 21)
    difference = find_difference(call(case, words, engine), expected)
    assert difference is not None
    assert difference.count == 1
    assert (difference.left ^ difference.right).bit_count() == 1


@engines
@pytest.mark.parametrize("layout", all_layouts(), ids=str)
def test_experts_are_repacked_one_by_one(engine: Engine, layout: Layout) -> None:
    case = Case(layout=layout, size_k=64, size_n=128)
    each = [random_words(case, seed) for seed in range(3)]
    expected = np.stack([reference_repack(words, layout) for words in each])
    assert np.array_equal(call(case, np.stack(each), engine), expected)


@engines
@pytest.mark.parametrize("bits", [4, 8])
def test_experts_have_their_own_order(engine: Engine, bits: int) -> None:
    layout = Layout(bits=bits)
    case = Case(layout=layout, size_k=48, size_n=128, act_order=True)
    words = np.stack([random_words(case, seed) for seed in range(3)])
    perms = np.stack([np.random.default_rng(seed).permutation(48).astype(np.int32) for seed in range(3)])
    made = repack(
        "gptq", torch.from_numpy(words.view(np.int32)), 48, 128, bits, perm=torch.from_numpy(perms), engine=engine
    )
    expected = np.stack([reference_repack(w, layout, perm=p) for w, p in zip(words, perms, strict=True)])
    assert np.array_equal(made.numpy().view(np.uint32), expected)


@engines
@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_an_empty_perm_means_none(engine: Engine, shape: tuple[int, ...]) -> None:
    case = Case(layout=Layout(bits=8), size_k=32, size_n=64)
    words = random_words(case)
    made = repack(
        "gptq",
        torch.from_numpy(words.view(np.int32)),
        32,
        64,
        8,
        perm=torch.empty(shape, dtype=torch.int32),
        engine=engine,
    )
    assert np.array_equal(made.numpy().view(np.uint32), reference_repack(words, case.layout))


@pytest.mark.parametrize("refusal", refusals(), ids=lambda refusal: refusal.name)
def test_what_must_be_refused_is(refusal: Refusal) -> None:
    perm = torch.arange(refusal.size_k, dtype=torch.int32) if refusal.act_order else None
    with pytest.raises(RepackError):
        repack(
            refusal.packing,
            torch.zeros(refusal.shape, dtype=torch.int32),
            refusal.size_k,
            refusal.size_n,
            refusal.bits,
            perm=perm,
            is_a_8bit=refusal.activation is Activation.NARROW,
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (torch.zeros((4, 64), dtype=torch.int64), "must be int32"),
        (torch.zeros((64, 4), dtype=torch.int32).t(), "not contiguous"),
        (torch.zeros((4, 64, 1, 1), dtype=torch.int32), "4 dimensions"),
        (torch.zeros((4, 64), dtype=torch.int32, device="meta"), "is on meta"),
    ],
)
def test_tensors_that_are_no_packed_weight_are_refused(words: "torch.Tensor", message: str) -> None:
    with pytest.raises(RepackError, match=message):
        repack("gptq", words, 16, 64, 8)


@pytest.mark.parametrize(
    ("perm", "message"),
    [
        (torch.arange(15, dtype=torch.int32), r"shape \(15,\), expected \(16,\)"),
        (torch.arange(16, dtype=torch.int64), "must be int32"),
        (torch.zeros(16, dtype=torch.int32), "not a permutation of 0 to 15"),
        (torch.arange(1, 17, dtype=torch.int32), "not a permutation of 0 to 15"),
        (torch.arange(32, dtype=torch.int32)[::2], "not contiguous"),
    ],
)
def test_orders_that_would_read_elsewhere_are_refused(perm: "torch.Tensor", message: str) -> None:
    with pytest.raises(RepackError, match=message):
        repack("gptq", torch.zeros((4, 64), dtype=torch.int32), 16, 64, 8, perm=perm)


@pytest.mark.parametrize(("size_k", "size_n"), [(0, 64), (16, 0), (-16, 64)])
def test_empty_weights_are_refused(size_k: int, size_n: int) -> None:
    with pytest.raises(RepackError, match="nothing to repack"):
        repack("gptq", torch.empty((max(size_k, 0) // 4, size_n), dtype=torch.int32), size_k, size_n, 8)


def test_awq_with_an_order_is_refused() -> None:
    words = torch.zeros((16, 8), dtype=torch.int32)
    with pytest.raises(RepackError, match="AWQ has no act-order"):
        repack("awq", words, 16, 64, 4, perm=torch.arange(16, dtype=torch.int32))


@engines
def test_the_output_is_the_one_that_was_given(engine: Engine) -> None:
    case = Case(layout=Layout(bits=8), size_k=64, size_n=128)
    words = random_words(case)
    out = torch.full(case.layout.marlin_shape(64, 128), -1, dtype=torch.int32)
    made = call(case, words, engine, out=out)
    assert made.ctypes.data == out.data_ptr()
    assert np.array_equal(made, reference_repack(words, case.layout))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.empty((4, 512), dtype=torch.int32), r"the output has shape \(4, 512\)"),
        (torch.empty((8, 256), dtype=torch.int32).t(), "the output has shape"),
        (torch.empty((4, 256), dtype=torch.float32), "the output must be int32"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(out: "torch.Tensor", message: str) -> None:
    with pytest.raises(RepackError, match=message):
        repack("gptq", torch.zeros((16, 64), dtype=torch.int32), 64, 64, 8, out=out)


def test_an_output_over_its_input_is_refused() -> None:
    memory = torch.zeros(3 * 16 * 64, dtype=torch.int32)
    words, out = memory[: 16 * 64].view(16, 64), memory[512 : 512 + 16 * 64].view(4, 256)
    with pytest.raises(RepackError, match="overlaps"):
        repack("gptq", words, 64, 64, 8, out=out)


@engines
@pytest.mark.parametrize("act_order", [False, True])
def test_threads_do_not_change_the_result(engine: Engine, act_order: bool) -> None:
    case = Case(layout=Layout(bits=8), size_k=512, size_n=2048, act_order=act_order)
    words = random_words(case)
    once = call(case, words, engine, threads=1)
    assert all(np.array_equal(once, call(case, words, engine)) for _ in range(3))


@engines
def test_several_threads_may_call_at_once(engine: Engine) -> None:
    cases = [Case(layout=layout, size_k=256, size_n=512) for layout in all_layouts()]
    wrong: list[str] = []

    def check(case: Case) -> None:
        for seed in range(5):
            words = random_words(case, seed)
            if find_difference(call(case, words, engine), reference_repack(words, case.layout)):
                wrong.append(case.name)

    threads = [threading.Thread(target=check, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_failing_task_reaches_the_caller() -> None:
    class Broken(TorchEngine):
        def shuffle(self, *args: object, **kwargs: object) -> None:
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        repack("gptq", torch.zeros((256, 1024), dtype=torch.int32), 1024, 1024, 8, engine=Broken())


SCRIPT = """
import importlib.util, re, sys
import numpy as np, torch
spec = importlib.util.spec_from_file_location(sys.argv[2], sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
assert not any(name.startswith("provisioner") for name in sys.modules)

def measure(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])

words = torch.randint(-(2**31), 2**31 - 1, (1024, 8192), dtype=torch.int32)
out = torch.zeros((256, 32768), dtype=torch.int32)
perm = torch.randperm(4096).to(torch.int32)
for order in (None, perm):  # what loading and compiling costs is not the repack's
    module.repack("gptq", torch.zeros((1024, 64), dtype=torch.int32), 4096, 64, 8, perm=order)
before = measure("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak counts from here
for order in (None, perm):
    module.repack("gptq", words, 4096, 8192, 8, out=out, perm=order)
print(module.default_engine().name, measure("VmHWM") - before)
"""


def run_alone(cache: Path, *, name: str, disable_jit: bool = False) -> tuple[str, int]:
    """The engine and the growth in KiB of a process that loads the file by path, as ``name``."""
    source = Path(__file__).parents[2] / "provisioner/marlin/repack.py"
    environ = {"NUMBA_DISABLE_JIT": str(int(disable_jit)), "NUMBA_CACHE_DIR": str(cache), "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(source), name],
        capture_output=True,
        text=True,
        timeout=180,
        env=environ,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    engine, grown_kib = result.stdout.split()
    return engine, int(grown_kib)


def test_extra_memory_is_bounded_and_the_file_stands_alone(tmp_path: Path) -> None:
    """32 MiB in and 32 MiB out are there before. The second name meets a cache that the first one filled."""
    for name in ("first", "second"):
        engine, grown_kib = run_alone(tmp_path, name=name)
        assert engine == "numba"
        assert grown_kib < 8 << 10
    assert list(tmp_path.rglob("*.nbi"))


def test_without_numba_extra_memory_is_bounded_too(tmp_path: Path) -> None:
    engine, grown_kib = run_alone(tmp_path, name="first", disable_jit=True)
    assert engine == "torch"
    assert grown_kib < 26 << 10


def test_the_default_engine_is_compiled_here() -> None:
    assert default_engine().name == "numba"


def test_awq_and_gptq_hold_the_same_marlin_words() -> None:
    """Two packings of the same values are one Marlin weight."""
    values = np.random.default_rng(5).integers(0, 16, size=(64, 128), dtype=np.uint8)
    made = [
        call(Case(layout=layout, size_k=64, size_n=128), pack_values(values, layout), NumbaEngine())
        for layout in (Layout(bits=4), Layout(bits=4, packing=Packing.AWQ))
    ]
    assert np.array_equal(*made)
