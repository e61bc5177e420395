"""The CPU repack against what runs in the field today, and against plain copies of the same bytes.

GB/s count the bytes of the packed weight, once. All ways take turns, medians of five rounds; outputs are allocated and
touched beforehand except where a row says otherwise (``clone()`` allocates each time).
"""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.field_repack import field_repack
from benchmarks.timing import interleave
from provisioner.marlin.repack import Engine, NumbaEngine, TorchEngine, default_threads, repack

ROOT = Path(__file__).parent.parent
SHAPES = ((5120, 17408), (17408, 5120))
ROUNDS = 5
MANY_CORES = 8

FIELD = {8: 80, 4: 60}
CLONE = {8: 1.0, 4: 0.7}
ORDER = {8: 2.2, 4: 3.0}


def rows() -> list[dict[str, object]]:
    table: list[dict[str, object]] = []
    for bits in (8, 4):
        for size_k, size_n in SHAPES:
            table += _speeds(size_k, size_n, bits)
    return [*table, *_memory()]


def _speeds(size_k: int, size_n: int, bits: int) -> list[dict[str, object]]:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31 - 1, (size_k * bits // 32, size_n), dtype=torch.int32, generator=generator)
    perm = torch.randperm(size_k, generator=generator).to(torch.int32)
    out = torch.zeros((size_k // 16, size_n * bits // 2), dtype=torch.int32)
    copied = torch.zeros_like(words)

    def run(engine: Engine, **kwargs: Any) -> Callable[[], float]:
        return lambda: _timed(lambda: repack("gptq", words, size_k, size_n, bits, engine=engine, **kwargs))

    ways: dict[str, Callable[[], float]] = {
        "numba": run(NumbaEngine(), out=out),
        "numba_new": run(NumbaEngine()),
        "numba_order": run(NumbaEngine(), out=out, perm=perm),
        "torch": run(TorchEngine(), out=out),
        "torch_order": run(TorchEngine(), out=out, perm=perm),
        "clone": lambda: _timed(words.clone),
        "copy": lambda: _timed(lambda: copied.copy_(words)),
        "field": lambda: _timed(lambda: field_repack(words, size_k, size_n, bits)),
    }
    for name, way in ways.items():
        if name != "field":
            way()  # compiles, warms the caches; the field's way has nothing to warm
    taken = interleave(ROUNDS, **ways)
    speed = {name: words.nbytes / seconds / 1e9 for name, seconds in taken.items()}
    few = default_threads() < MANY_CORES
    torch_target = 20 if bits == 4 or not few else 30

    def row(name: str, ours: str, theirs: str, target: str = "") -> dict[str, object]:
        return {
            "name": f"{bits} bits {size_k}x{size_n}: {name}",
            "ours": speed[ours],
            "theirs": speed[theirs],
            "ratio": speed[ours] / speed[theirs],
            "unit": "GB/s",
            "target": target,
        }

    return [
        row("numba / field", "numba", "field", f">= {FIELD[bits]}"),
        row("numba / clone()", "numba", "clone", f">= {CLONE[bits]}"),
        row("numba / copy into touched memory", "numba", "copy"),
        row("numba with a new output / clone()", "numba_new", "clone"),
        row("torch / field", "torch", "field", f">= {torch_target}"),
        row("numba act-order / numba", "numba_order", "numba", f">= 1/{ORDER[bits]}"),
        row("torch act-order / torch", "torch_order", "torch"),
    ]


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


MEASURE = """
import re, sys
import torch
from benchmarks.field_repack import field_repack
from provisioner.marlin.repack import NumbaEngine, TorchEngine, repack
way, size_k, size_n = sys.argv[1], 5120, 17408

def measure(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])

small = torch.zeros((4, 64), dtype=torch.int32)
words = torch.randint(-(2**31), 2**31 - 1, (size_k // 4, size_n), dtype=torch.int32)
perm = torch.randperm(size_k).to(torch.int32)
run = {
    "numba": lambda w, k, n: repack("gptq", w, k, n, 8, engine=NumbaEngine()),
    "order": lambda w, k, n: repack("gptq", w, k, n, 8, engine=NumbaEngine(), perm=perm if k == size_k else None),
    "torch": lambda w, k, n: repack("gptq", w, k, n, 8, engine=TorchEngine()),
    "field": lambda w, k, n: field_repack(w, k, n, 8),
}[way]
run(small, 16, 64)
if way == "order":
    repack("gptq", torch.zeros((size_k // 4, 64), dtype=torch.int32), size_k, 64, 8, engine=NumbaEngine(), perm=perm)
before = measure("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak counts from here
run(words, size_k, size_n)
print((measure("VmHWM") - before) * 1024 - words.nbytes)
"""


def _memory() -> list[dict[str, object]]:
    """Peak memory beyond input and output, 8 bits, 5120x17408, each way in its own process."""

    def extra(way: str) -> float:
        result = subprocess.run(
            [sys.executable, "-c", MEASURE, way], cwd=ROOT, capture_output=True, text=True, timeout=600, check=True
        )
        return max(0.0, int(result.stdout) / 1e6)

    field = extra("field")
    return [
        {
            "name": f"extra memory, {name}",
            "ours": ours,
            "theirs": field,
            "ratio": ours / field,
            "unit": "MB",
            "target": "<= 64 MB",
        }
        for name, ours in (
            ("numba", extra("numba")),
            ("numba act-order", extra("order")),
            ("torch", extra("torch")),
        )
    ]
