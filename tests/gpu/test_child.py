"""The child's parts in this process: every way in which answers, inputs and memory can be wrong must show."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from provisioner.gpu.selection import Selection, select_cases
from tests.gpu.conftest import MARLIN, Recorder, leave_numba_out

torch = pytest.importorskip("torch", reason="torch is not installed: the child cannot run")


@pytest.fixture
def mood(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    leave_numba_out(monkeypatch)
    monkeypatch.delenv("OP_MOOD", raising=False)
    return monkeypatch


@pytest.fixture
def compare(child: ModuleType, library: Path, mood: pytest.MonkeyPatch) -> Any:
    """``compare(case values)`` compares one case and gives its results."""
    voice = Recorder()
    request = {
        "device": "cpu",
        "fallback": str(MARLIN / "repack.py"),
        "reference": str(MARLIN / "layout.py"),
    }
    ops = child.find_ops(torch, [library], "cpu", voice)
    comparison = child.Comparison(torch, request, ops, voice)

    def run(**values: Any) -> list[dict[str, Any]]:
        voice.said.clear()
        full = {"packing": "gptq", "bits": 8, "narrow": False, "size_k": 64, "size_n": 128, **values}
        case = child.Case(**{"shape": (full["size_k"] // 4, full["size_n"]), **full})
        for given in child.make_inputs(torch, case):
            comparison.run(case, given, sparse=False)
        return voice.results()

    return run


@pytest.mark.parametrize("case", select_cases(Selection.SMOKE), ids=lambda case: case.name)
def test_three_answers_agree_or_all_refuse(compare: Any, case: Any) -> None:
    outcomes = {result["outcome"] for result in compare(**vars(case))}
    assert outcomes == {"refused" if case.name == "k not of 16" else "agrees"}


def test_act_order_over_several_bands(compare: Any) -> None:
    results = compare(name="long", size_k=1024, act_order=True)
    assert [result["outcome"] for result in results] == ["agrees", "agrees"]


def test_one_wrong_bit_is_found_with_its_place(compare: Any, mood: pytest.MonkeyPatch) -> None:
    mood.setenv("OP_MOOD", "wrong-word")
    for result in compare(name="bits"):
        assert result["outcome"] == "fails"
        by_pair = {(difference["left"], difference["right"]): difference for difference in result["differences"]}
        assert set(by_pair) == {("compiled", "fallback"), ("compiled", "reference")}
        difference = by_pair["compiled", "fallback"]
        assert (difference["words"], difference["total"]) == (1, 4 * 512)
        assert (difference["row"], difference["column"]) == (3, 511)
        assert int(difference["left_value"], 16) ^ int(difference["right_value"], 16) == 1 << 30


def test_a_wrong_fallback_is_found_too(compare: Any, child: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = child.call_fallback

    def wrong(*arguments: Any) -> Any:
        answer = right(*arguments)
        answer[0, 0] ^= 1
        return answer

    monkeypatch.setattr(child, "call_fallback", wrong)
    (first, _) = compare(name="fallback")
    assert [(item["left"], item["right"]) for item in first["differences"]] == [("compiled", "fallback")]


def test_two_wrong_alike_are_found_by_the_reference(
    compare: Any, child: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = child.call_reference

    def other(*arguments: Any) -> Any:
        band = right(*arguments)
        band[0, 5] ^= 1
        return band

    monkeypatch.setattr(child, "call_reference", other)
    (first, _) = compare(name="reference")
    assert [(item["right"], item["row"], item["column"]) for item in first["differences"]] == [("reference", 0, 5)]


def test_an_unwritten_word_shows_as_a_difference(compare: Any, mood: pytest.MonkeyPatch) -> None:
    mood.setenv("OP_MOOD", "unwritten")
    assert {result["outcome"] for result in compare(name="hole")} == {"fails"}


def test_an_answer_of_another_shape_is_a_failure(compare: Any, mood: pytest.MonkeyPatch) -> None:
    mood.setenv("OP_MOOD", "short")
    (first, _) = compare(name="short")
    assert first["outcome"] == "fails"
    assert first["why"] == "the compiled answer is (4, 511) torch.int32, the fallback's (4, 512) torch.int32"


def test_harm_to_the_input_is_found(compare: Any, mood: pytest.MonkeyPatch) -> None:
    mood.setenv("OP_MOOD", "harms-input")
    assert "the compiled op changed its input" in {result["why"] for result in compare(name="input")}


def test_refusals_must_be_shared(compare: Any, mood: pytest.MonkeyPatch) -> None:
    mood.setenv("OP_MOOD", "refuses")
    assert {result["why"].partition(":")[0] for result in compare(name="refuses")} == {
        "the compiled op refuses what the fallback takes"
    }
    mood.setenv("OP_MOOD", "accepts-misfits")
    (first, *_) = compare(name="accepts", size_k=40)
    assert first["outcome"] == "fails"
    assert first["why"].startswith("the fallback refuses what the compiled op takes")


def test_what_the_compiled_op_wrongly_takes_may_be_refused(compare: Any) -> None:
    (first, *_) = compare(name="half a tile", size_k=48, narrow=True, lenient=True)
    assert first["outcome"] == "refused"
    assert first["why"].startswith("only the fallback refuses")
    (first, *_) = compare(name="half a tile", size_k=48, narrow=True)
    assert first["outcome"] == "fails"


@pytest.mark.parametrize("fault", ["illegal-access", "toolchain", "not-ready"])
def test_a_fault_is_no_refusal(compare: Any, mood: pytest.MonkeyPatch, fault: str) -> None:
    mood.setenv("OP_MOOD", fault)
    with pytest.raises(RuntimeError, match="CUDA error"):
        compare(name="fault")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA error: an illegal memory access was encountered", "card"),
        ("CUDA error: unspecified launch failure", "card"),
        ("CUDA error: uncorrectable ECC error encountered", "card"),
        ("CUDA error: the provided PTX was compiled with an unsupported toolchain.", "toolchain"),
        ("CUDA error: device not ready", "toolchain"),
        ("CUDA error: no kernel image is available for execution on the device", "toolchain"),
        ("/x/_C.abi3.so: undefined symbol: _ZN3c104cuda", "toolchain"),
        ("libcudart.so.13: cannot open shared object file: No such file or directory", "toolchain"),
        ("No CUDA GPUs are available", "lost"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "memory"),
        ("size_k = 40 is not divisible by tile_k_size = 16", None),
    ],
)
def test_whose_fault_a_text_names(child: ModuleType, text: str, kind: str | None) -> None:
    assert child.classify(text) == kind


def test_no_library_registers_the_op(child: ModuleType, tmp_path: Path) -> None:
    fake = tmp_path / "_C.abi3.so"
    fake.write_bytes(b"not a library")
    with pytest.raises(child.StopError, match=r"_C\.abi3\.so: .*(file too short|invalid ELF header)") as caught:
        child.find_ops(torch, [fake], "cpu", Recorder())
    assert caught.value.kind == "toolchain"
    with pytest.raises(child.StopError, match="no library named") as caught:
        child.find_ops(torch, [], "cpu", Recorder())
    assert caught.value.kind == "unsupported"


def test_ballast_is_filled_and_reads_back(child: ModuleType) -> None:
    ballast = child.Ballast(torch, "cpu")
    ballast.fill((70 << 20) + 12345, lambda done, total: None)
    assert ballast.filled == 70 << 20
    assert ballast.check(lambda done, total: None) == (0, None)


def test_changed_ballast_is_found(child: ModuleType) -> None:
    ballast = child.Ballast(torch, "cpu")
    ballast.fill(64 << 20, lambda done, total: None)
    ballast._pieces[1][4097] ^= 1 << 7
    wrong, first = ballast.check(lambda done, total: None)
    assert wrong == 1
    assert first is not None
    assert first.startswith("piece 1, word 4097: wrote ")


def test_pieces_that_share_memory_are_found(child: ModuleType) -> None:
    ballast = child.Ballast(torch, "cpu")
    ballast.fill(64 << 20, lambda done, total: None)
    ballast._pieces[0] = ballast._pieces[1]  # what a card that reports more memory than it has does
    wrong, _ = ballast.check(lambda done, total: None)
    assert wrong > 8_000_000


def test_a_sweep_fills_what_is_free_and_says_so(child: ModuleType) -> None:
    voice = Recorder()
    session = child.Session(torch, {"device": "cpu"}, voice)
    session.run({"name": "memory", "ballast": {"share": 1.0, "headroom": 64 << 20}})
    assert [message["event"] for message in voice.said if message["event"] != "progress"] == [
        "stage",
        "ballast",
        "ballast-check",
        "stage-end",
    ]
    ballast = next(message for message in voice.said if message["event"] == "ballast")
    assert (ballast["asked"], ballast["filled"]) == (256 << 20, 192 << 20)
