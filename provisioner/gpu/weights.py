"""Real quantised weights, layer by layer, for the child of ``provision verify``; loaded by path, like it.

Reads GPTQ, AWQ and packed compressed-tensors checkpoints in safetensors files. The next layers are read while one is
compared, and no more than those few are in memory at once. The files are read here rather than by the safetensors
package because its reads hold Python's global lock, which would make reading and comparing take turns.
"""

import json
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

LAYERS_AHEAD = 2
MOST_HEADER_BYTES = 100 << 20
_INTEGERS = {"I32": "int32", "I64": "int64"}
# (suffix of the packed words, how they are packed, suffix of the row groups that act-order sorts)
_FORMS = (("qweight", "g_idx"), ("weight_packed", "weight_g_idx"))
_END = None


class ModelError(Exception):
    """The folder holds no weights that this check knows."""


@dataclass(frozen=True)
class Quantization:
    """What config.json says: ``packing`` of the words, ``bits`` where a tensor's shape does not tell, act-order."""

    method: str
    packing: str
    bits: int
    act_order: bool


@dataclass(frozen=True)
class Layer:
    """One weight in the form that Marlin's repack takes: words and row numbers, int32 on the CPU."""

    name: str
    packing: str
    bits: int
    size_k: int
    size_n: int
    words: Any
    perm: Any
    stored_bytes: int


def compare_model(torch: Any, child: ModuleType, comparison: Any, folder: Path, voice: Any) -> None:
    """Compare every quantised weight in ``folder`` and say what was done.

    Raises the child's StopError where the folder cannot be read.
    """
    try:
        quantization = read_quantization(folder)
        names = list_weights(folder)
    except (ModelError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise child.StopError("unsupported", f"{folder}: {error}") from error
    if not names:
        raise child.StopError("unsupported", f"{folder} holds no packed weights")
    started = time.monotonic()
    total, compared, skipped = 0, 0, 0
    for index, layer in enumerate(read_ahead(torch, names, quantization)):
        if isinstance(layer, Exception):
            raise child.StopError("unsupported", f"{folder}: {layer}") from layer
        voice.say("progress", done=index, total=len(names), unit=layer.name)
        case = child.Case(
            name=layer.name,
            packing=layer.packing,
            bits=layer.bits,
            narrow=False,
            size_k=layer.size_k,
            size_n=layer.size_n,
            shape=tuple(layer.words.shape),
            act_order=layer.perm is not None,
        )
        if comparison.takes(case) and comparison.run_layer(case, child.Input(layer.words, layer.perm)):
            compared += 1
            total += layer.stored_bytes
        else:
            skipped += 1
    voice.say(
        "layers",
        folder=str(folder),
        method=describe_method(quantization),
        layers=compared,
        skipped=skipped,
        bytes=total,
        seconds=round(time.monotonic() - started, 3),
    )


def describe_method(quantization: Quantization) -> str:
    order = ", act-order" if quantization.act_order else ""
    return f"{quantization.method}, {quantization.bits} bits{order}"


def read_quantization(folder: Path) -> Quantization:
    """What ``config.json`` says. Raises ModelError for a method that is not packed for Marlin."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    values = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    if values is None:
        raise ModelError("config.json names no quantization")
    method = str(values.get("quant_method", "")).lower()
    if method in ("gptq", "gptq_marlin", "auto-round"):
        return Quantization("gptq", "gptq", int(values["bits"]), bool(values.get("desc_act", False)))
    if method in ("awq", "awq_marlin"):
        return Quantization("awq", "awq", int(values.get("bits", values.get("w_bit", 4))), act_order=False)
    if method == "compressed-tensors":
        groups = list(values.get("config_groups", {}).values())
        if not groups or values.get("format", "pack-quantized") not in ("pack-quantized", "mixed-precision"):
            raise ModelError("its compressed-tensors format is not pack-quantized")
        weights = groups[0]["weights"]
        order = str(weights.get("actorder") or "none") in ("group", "dynamic")
        return Quantization("compressed-tensors", "gptq", int(weights["num_bits"]), order)
    raise ModelError(f"its quantization is {method!r}; gptq, awq and compressed-tensors are known")


class TensorFile:
    """One safetensors file: an 8-byte length, a JSON header of that length, then the tensors' bytes.

    Raises ModelError for a header that does not fit the file.
    """

    def __init__(self, path: Path) -> None:
        self._stream = path.open("rb", buffering=0)
        try:
            self._read_header(path)
        except BaseException:
            self._stream.close()
            raise

    def _read_header(self, path: Path) -> None:
        size = path.stat().st_size
        length = int.from_bytes(self._stream.read(8), "little")
        if not 0 < length <= min(size - 8, MOST_HEADER_BYTES):
            raise ModelError(f"{path.name} is no safetensors file")
        header = json.loads(self._stream.read(length))
        self._start = 8 + length
        self._entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        if any(self._start + entry["data_offsets"][1] > size for entry in self._entries.values()):
            raise ModelError(f"{path.name} is cut off")

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    @property
    def names(self) -> set[str]:
        return set(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name]["shape"])

    def read(self, torch: Any, name: str) -> Any:
        """The tensor, int32 or int64. Raises ModelError for another type."""
        entry = self._entries[name]
        if entry["dtype"] not in _INTEGERS:
            raise ModelError(f"{name} is {entry['dtype']}, not packed words")
        begin, end = entry["data_offsets"]
        tensor = torch.empty(self.shape(name), dtype=getattr(torch, _INTEGERS[entry["dtype"]]))
        if tensor.numel() * tensor.element_size() != end - begin:
            raise ModelError(f"{name} has {end - begin} bytes, which do not make its shape")
        rest = memoryview(tensor.numpy().reshape(-1).view("uint8")).cast("B")
        self._stream.seek(self._start + begin)
        while rest:
            count = self._stream.readinto(rest)
            if not count:
                raise ModelError(f"{name} is cut off")
            rest = rest[count:]
        return tensor


def list_weights(folder: Path) -> list[tuple[Path, str]]:
    """(file, tensor) of every packed weight, in file order; neighbours in a file are read together."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with TensorFile(path) as file:
            found += [(path, name) for name in sorted(file.names) if _is_packed(name)]
    return found


def _is_packed(name: str) -> bool:
    return name.rpartition(".")[2] in {packed for packed, _ in _FORMS}


def read_ahead(torch: Any, names: list[tuple[Path, str]], quantization: Quantization) -> Iterator[Layer | Exception]:
    """Layers in order, read by a thread that stays a few ahead; an exception of that thread comes last."""
    layers: queue.Queue[Any] = queue.Queue(maxsize=LAYERS_AHEAD)

    def work() -> None:
        try:
            for layer in read_layers(torch, names, quantization):
                layers.put(layer)
        except Exception as error:  # noqa: BLE001 - handed on, and raised by the reader's other end
            layers.put(error)
        layers.put(_END)

    threading.Thread(target=work, name="weights", daemon=True).start()
    while (layer := layers.get()) is not _END:
        yield layer


def read_layers(torch: Any, names: list[tuple[Path, str]], quantization: Quantization) -> Iterator[Layer]:
    """Layers in order; one file is open at a time."""
    groups: dict[Path, list[str]] = {}
    for path, name in names:
        groups.setdefault(path, []).append(name)
    for path, tensors in groups.items():
        with TensorFile(path) as file:
            for name in tensors:
                yield from _read_layer(torch, file, name, quantization)


def _read_layer(torch: Any, file: TensorFile, name: str, quantization: Quantization) -> Iterator[Layer]:
    stem, _, kind = name.rpartition(".")
    packed = file.read(torch, name)
    groups_name = f"{stem}.{dict(_FORMS)[kind]}"
    groups = file.read(torch, groups_name) if quantization.act_order and groups_name in file.names else None
    stored = packed.numel() * packed.element_size()
    size_k, size_n = _find_sizes(torch, file, stem, kind, packed, quantization)
    matrices = packed if packed.dim() == 3 else packed.unsqueeze(0)
    for index, matrix in enumerate(matrices):
        # compressed-tensors stores outputs first; the repack wants them last.
        words = matrix.t().contiguous() if kind == "weight_packed" else matrix.contiguous()
        yield Layer(
            name=name if packed.dim() == 2 else f"{name}[{index}]",
            packing=quantization.packing,
            bits=round(32 * words.numel() / (size_k * size_n)),
            size_k=size_k,
            size_n=size_n,
            words=words.to(torch.int32),
            perm=_find_perm(torch, groups, index),
            stored_bytes=stored // len(matrices),
        )


def _find_sizes(
    torch: Any, file: TensorFile, stem: str, kind: str, packed: Any, quantization: Quantization
) -> tuple[int, int]:
    """(size_k, size_n): from tensors beside the words where they tell, else from the configured bits."""
    rows, columns = packed.shape[-2:]
    share = 32 // quantization.bits
    if kind == "weight_packed":
        if f"{stem}.weight_shape" in file.names:
            size_n, size_k = (int(value) for value in file.read(torch, f"{stem}.weight_shape").flatten()[-2:])
            return size_k, size_n
        return columns * share, rows
    if quantization.packing == "awq":
        scales = f"{stem}.scales"
        return rows, file.shape(scales)[-1] if scales in file.names else columns * share
    groups = f"{stem}.g_idx"
    return file.shape(groups)[-1] if groups in file.names else rows * share, columns


def _find_perm(torch: Any, groups: Any, index: int) -> Any:
    """Row numbers that sort the rows by group, as vLLM sorts them; None without act-order."""
    if groups is None:
        return None
    own = groups if groups.dim() == 1 else groups[index]
    return torch.argsort(own, stable=True).to(torch.int32)
