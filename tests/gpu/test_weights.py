"""Real checkpoints in the three forms, written by this test's own packer, compared layer by layer."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from provisioner.marlin.layout import Layout, Packing, pack_values
from tests.gpu.conftest import MARLIN, Recorder, leave_numba_out, load_by_path

np = pytest.importorskip("numpy", reason="numpy is not installed: the child cannot run")
torch = pytest.importorskip("torch", reason="torch is not installed: the child cannot run")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")


def pack(size_k: int, size_n: int, layout: Layout) -> Any:
    values = np.random.default_rng(size_k).integers(0, 1 << layout.bits, (size_k, size_n), dtype=np.uint8)
    return torch.from_numpy(pack_values(values, layout).view(np.int32))


def write_model(folder: Path, quantization: dict[str, Any], *files: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    for index, tensors in enumerate(files):
        safetensors.save_file(tensors, str(folder / f"model-{index}.safetensors"))
    return folder


def gptq_model(folder: Path) -> Path:
    layout = Layout(bits=8)
    groups = torch.arange(128, dtype=torch.int32).flip(0) // 32
    return write_model(
        folder,
        {"quant_method": "gptq", "bits": 8, "desc_act": True},
        {
            "layers.0.q.qweight": pack(128, 64, layout),
            "layers.0.q.g_idx": groups,
            "layers.0.q.scales": torch.ones(4, 64),
            "layers.0.norm.weight": torch.ones(64),
        },
        {
            "layers.1.q.qweight": pack(128, 128, layout),
            "layers.1.q.g_idx": groups,
            "layers.1.odd.qweight": pack(40, 64, layout),
        },
    )


def awq_model(folder: Path) -> Path:
    layout = Layout(bits=4, packing=Packing.AWQ)
    return write_model(
        folder,
        {"quant_method": "awq", "bits": 4},
        {"a.qweight": pack(64, 128, layout), "a.scales": torch.ones(2, 128), "b.qweight": pack(32, 64, layout)},
    )


def compressed_model(folder: Path) -> Path:
    words = pack(64, 128, Layout(bits=4))
    return write_model(
        folder,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "actorder": None}}},
        },
        {"a.weight_packed": words.t().contiguous(), "a.weight_shape": torch.tensor([128, 64])},
    )


@pytest.fixture
def compare(child: ModuleType, library: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``compare(folder)`` compares a model and gives what was said."""
    leave_numba_out(monkeypatch)
    monkeypatch.delenv("OP_MOOD", raising=False)
    voice = Recorder()
    request = {"device": "cpu", "fallback": str(MARLIN / "repack.py"), "reference": str(MARLIN / "layout.py")}
    comparison = child.Comparison(torch, request, child.find_ops(torch, [library], "cpu", voice), voice)
    weights = load_by_path("weights")

    def run(folder: Path) -> Recorder:
        weights.compare_model(torch, child, comparison, folder, voice)
        return voice

    return run


@pytest.mark.parametrize(
    ("make", "layers", "skipped", "method"),
    [
        (gptq_model, 2, 1, "gptq, 8 bits, act-order"),
        (awq_model, 2, 0, "awq, 4 bits"),
        (compressed_model, 1, 0, "compressed-tensors, 4 bits"),
    ],
)
def test_real_weights(compare: Any, tmp_path: Path, make: Any, layers: int, skipped: int, method: str) -> None:
    voice = compare(make(tmp_path / "model"))
    said = voice.said[-1]
    assert (said["event"], said["layers"], said["skipped"], said["method"]) == ("layers", layers, skipped, method)
    outcomes = [result["outcome"] for result in voice.results()]
    assert sorted(outcomes) == ["agrees"] * layers + ["refused"] * skipped
    assert [message["unit"] for message in voice.said if message["event"] == "progress"] == [
        result["case"] for result in voice.results()
    ]


def test_a_wrong_layer_is_named(compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_MOOD", "wrong-word")
    results = compare(awq_model(tmp_path / "model")).results()
    assert {result["case"]: result["outcome"] for result in results} == {"a.qweight": "fails", "b.qweight": "fails"}
    pairs = [(difference["left"], difference["right"]) for difference in results[0]["differences"]]
    assert pairs == [("compiled", "fallback"), ("compiled", "reference")]


def test_act_order_comes_from_the_groups(child: ModuleType, tmp_path: Path) -> None:
    weights = load_by_path("weights")
    folder = gptq_model(tmp_path / "model")
    layers = list(weights.read_layers(torch, weights.list_weights(folder), weights.read_quantization(folder)))
    assert [(layer.size_k, layer.size_n, layer.bits) for layer in layers] == [(128, 64, 8), (40, 64, 8), (128, 128, 8)]
    assert layers[0].perm[:32].tolist() == list(range(96, 128))
    assert layers[1].perm is None


def test_a_tensor_of_experts_is_taken_apart(tmp_path: Path) -> None:
    weights = load_by_path("weights")
    experts = torch.stack([pack(64, 64, Layout(bits=8)), pack(32 * 2, 64, Layout(bits=8)) + 1])
    folder = write_model(tmp_path / "model", {"quant_method": "gptq", "bits": 8}, {"experts.qweight": experts})
    layers = list(weights.read_layers(torch, weights.list_weights(folder), weights.read_quantization(folder)))
    assert [layer.name for layer in layers] == ["experts.qweight[0]", "experts.qweight[1]"]
    assert torch.equal(layers[1].words, experts[1])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{}", "config.json names no quantization"),
        ('{"quantization_config": {"quant_method": "fp8"}}', "its quantization is 'fp8'"),
        ('{"quantization_config": {"quant_method": "gptq", "bits": 8}}', "holds no packed weights"),
        ("not json", "Expecting value"),
        (None, "No such file"),
    ],
)
def test_folders_without_weights(
    compare: Any, child: ModuleType, tmp_path: Path, config: str | None, words: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(child.StopError, match=words) as caught:
        compare(tmp_path)
    assert caught.value.kind == "unsupported"


def test_tensors_are_read_as_safetensors_reads_them(tmp_path: Path) -> None:
    weights = load_by_path("weights")
    tensors = {"a": pack(64, 128, Layout(bits=8)), "b": torch.tensor([[1, -2], [3, 1 << 40]]), "c": torch.ones(3)}
    safetensors.save_file(tensors, str(tmp_path / "x.safetensors"), metadata={"format": "pt"})
    with weights.TensorFile(tmp_path / "x.safetensors") as file:
        assert file.names == {"a", "b", "c"}
        assert file.shape("c") == (3,)
        assert all(torch.equal(file.read(torch, name), tensors[name]) for name in ("a", "b"))
        with pytest.raises(weights.ModelError, match="c is F32, not packed words"):
            file.read(torch, "c")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda data: data[:-100], "model-0.safetensors is cut off"),
        (lambda data: b"", "is no safetensors file"),
        (lambda data: b"\xff" * 200, "is no safetensors file"),
        (lambda data: data[:8] + b"x" + data[9:], "Expecting value"),
        (lambda data: data.replace(b'"shape":[64,16]', b'"shape":[64,99]'), "do not make its shape"),
    ],
)
def test_spoilt_files_stop_the_check(compare: Any, child: ModuleType, tmp_path: Path, spoil: Any, words: str) -> None:
    folder = awq_model(tmp_path / "model")
    file = folder / "model-0.safetensors"
    data = file.read_bytes()
    file.write_bytes(spoil(data))
    assert file.read_bytes() != data
    with pytest.raises(child.StopError, match=words):
        compare(folder)
