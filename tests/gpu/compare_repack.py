"""The CPU repack against vLLM's compiled op on a real GPU: every layout, every shape, refusals, a mutation, speed.

    python tests/gpu/compare_repack.py --library _C_stable_libtorch.abi3.so[.xz] [--out FOLDER] [--skip-huge]

Run in a checkout, on a machine with a GPU, torch, numpy and numba; vLLM itself is not needed, only the library of one
of its wheels. Prints Markdown; with --out also writes ``repack.json`` and ``repack.md``. Exit status 1 if anything
differs. The op is called through ``torch.ops._C`` and never through vLLM's wrapper, which the patch reroutes.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import lzma
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from provisioner.marlin import repack as module
from provisioner.marlin.cases import (
    LAYER_SHAPES,
    Case,
    Refusal,
    digit_count,
    digit_words,
    find_difference,
    huge_cases,
    make_perm,
    model_cases,
    refusals,
    small_cases,
)
from provisioner.marlin.layout import Activation, Layout, Packing, reference_repack
from provisioner.marlin.repack import SETTING, CudaLink, RepackError, Staging, repack, repack_from_device, route

DEVICE = "cuda"
LAYERS = 64
POISON = -0x21524111


class CompiledOp:
    """vLLM's op, called by the schema that its library registers."""

    def __init__(self, library: Path) -> None:
        torch.ops.load_library(str(library))
        self.schemas = {
            packing: str(getattr(torch.ops._C, f"{packing}_marlin_repack").default._schema) for packing in Packing
        }

    @property
    def has_perm(self) -> bool:
        return "perm" in self.schemas[Packing.GPTQ]

    def __call__(self, layout: Layout, words: Any, size_k: int, size_n: int, perm: Any) -> Any:
        narrow = layout.activation is Activation.NARROW
        return self.call(layout.packing, words, size_k, size_n, layout.bits, perm, narrow=narrow)

    def call(
        self, packing: Packing, words: Any, size_k: int, size_n: int, bits: int, perm: Any, *, narrow: bool
    ) -> Any:
        if packing is Packing.AWQ:
            return torch.ops._C.awq_marlin_repack(words, size_k, size_n, bits, narrow)
        if not self.has_perm:
            return torch.ops._C.gptq_marlin_repack(words, size_k, size_n, bits, narrow)
        given = torch.empty(0, dtype=torch.int32, device=DEVICE) if perm is None else perm
        return torch.ops._C.gptq_marlin_repack(words, given, size_k, size_n, bits, narrow)


def random_on_device(case: Case, seed: int) -> Any:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    shape = case.layout.packed_shape(case.size_k, case.size_n)
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=DEVICE, generator=generator)


def perm_on_device(case: Case) -> Any:
    perm = make_perm(case)
    return None if perm is None else torch.from_numpy(perm).to(DEVICE)


def poison(words: int) -> None:
    """Leave a recognisable pattern where the next allocation of this size is likely to land."""
    torch.full((words,), POISON, dtype=torch.int32, device=DEVICE)


def ours(case: Case, words: Any, perm: Any) -> Any:
    narrow = case.layout.activation is Activation.NARROW
    return repack_from_device(
        case.layout.packing, words, case.size_k, case.size_n, case.layout.bits, perm=perm, is_a_8bit=narrow
    )


def count_differences(left: Any, right: Any) -> int:
    if left.shape != right.shape:
        return max(left.numel(), right.numel())
    return int((left != right).sum())


def compare(op: CompiledOp, case: Case, *, digits: bool) -> dict[str, Any]:
    """Op and CPU repack on random words, and on every digit of the values' numbers where asked."""
    perm = perm_on_device(case)
    inputs = [random_on_device(case, seed=1)]
    if digits:
        inputs += [
            torch.from_numpy(digit_words(case, digit).view(np.int32)).to(DEVICE) for digit in range(digit_count(case))
        ]
    differing = 0
    for words in inputs:
        poison(words.numel())
        compiled = op(case.layout, words, case.size_k, case.size_n, perm)
        poison(words.numel())
        differing += count_differences(compiled, ours(case, words, perm))
    return {"case": case.name, "inputs": len(inputs), "words": int(inputs[0].numel()), "differing": differing}


def compare_reference(op: CompiledOp, case: Case) -> dict[str, Any]:
    """All three: op, CPU repack of host memory, reference."""
    perm = make_perm(case)
    words = random_on_device(case, seed=2)
    compiled = op(case.layout, words, case.size_k, case.size_n, perm_on_device(case)).cpu().numpy().view(np.uint32)
    host = words.cpu()
    fast = repack(
        case.layout.packing,
        host,
        case.size_k,
        case.size_n,
        case.layout.bits,
        perm=None if perm is None else torch.from_numpy(perm),
        is_a_8bit=case.layout.activation is Activation.NARROW,
    )
    expected = reference_repack(host.numpy().view(np.uint32), case.layout, perm=perm)
    found = [find_difference(other, expected) for other in (compiled, fast.numpy().view(np.uint32))]
    return {"case": case.name, "words": expected.size, "differing": sum(one.count for one in found if one)}


def try_refusal(op: CompiledOp, refusal: Refusal) -> dict[str, Any]:
    words = torch.zeros(refusal.shape, dtype=torch.int32, device=DEVICE)
    perm = torch.arange(refusal.size_k, dtype=torch.int32, device=DEVICE) if refusal.act_order else None
    narrow = refusal.activation is Activation.NARROW
    answers = {}
    for name, call in {
        "op": lambda: op.call(
            refusal.packing, words, refusal.size_k, refusal.size_n, refusal.bits, perm, narrow=narrow
        ),
        "ours": lambda: repack_from_device(
            refusal.packing, words, refusal.size_k, refusal.size_n, refusal.bits, perm=perm, is_a_8bit=narrow
        ),
    }.items():
        try:
            call()
            torch.cuda.synchronize()
            answers[name] = "computes"
        except (RuntimeError, RepackError) as error:
            answers[name] = f"refuses: {str(error).splitlines()[0][:90]}"
    return {"case": refusal.name, "by_op": refusal.by_op, **answers}


def mutate(op: CompiledOp) -> list[dict[str, Any]]:
    """One flipped bit of one tile must show in every comparison."""
    results = []
    for layout in (Layout(bits=bits, packing=packing) for bits in (4, 8) for packing in Packing):
        case = Case(layout=layout, size_k=1024, size_n=1088)
        words = random_on_device(case, seed=3)
        compiled = op(layout, words, case.size_k, case.size_n, None)
        flipped = words.clone()
        flipped[words.shape[0] // 3, words.shape[1] // 2] ^= 1 << 13
        results.append({"case": case.name, "differing": count_differences(compiled, ours(case, flipped, None))})
    return results


def time_op(op: CompiledOp, case: Case) -> float:
    """GB/s of the compiled op, bytes read and written."""
    words, perm = random_on_device(case, seed=4), perm_on_device(case)
    times = []
    for _ in range(12):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        op(case.layout, words, case.size_k, case.size_n, perm)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return 2 * words.nbytes / statistics.median(times[2:]) / 1e9


def layer_weights(bits: int) -> list[tuple[Any, int, int]]:
    cases = [Case(layout=Layout(bits=bits), size_k=size_k, size_n=size_n) for size_k, size_n in LAYER_SHAPES]
    return [(random_on_device(case, seed), case.size_k, case.size_n) for seed, case in enumerate(cases)]


def peak_beyond(call: Callable[[], Any]) -> int:
    """Bytes of GPU memory at the peak of a call, beyond what was there before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def time_layers(op: CompiledOp, bits: int, *, act_order: bool = False) -> dict[str, Any]:
    """The patched call, through the hook, on the weights of every layer; weights on the GPU in and out."""

    def gptq_marlin_repack(b_q_weight: Any, perm: Any, size_k: int, size_n: int, num_bits: int) -> Any:
        return op(Layout(bits=num_bits), b_q_weight, size_k, size_n, perm)

    patched = route(gptq_marlin_repack)
    weights = layer_weights(bits)
    perms = {k: torch.randperm(k, device=DEVICE).to(torch.int32) if act_order else None for _, k, _ in weights}
    layers = LAYERS if not act_order else 4
    with setting("1"):
        for words, size_k, size_n in weights:  # compiles, pins
            patched(words, perms[size_k], size_k, size_n, bits)
        torch.cuda.synchronize()
        times = []
        for _ in range(3 if not act_order else 1):
            started = time.perf_counter()
            for _ in range(layers):
                for words, size_k, size_n in weights:
                    patched(words, perms[size_k], size_k, size_n, bits)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        words, size_k, size_n = weights[0]
        peak = peak_beyond(lambda: patched(words, perms[size_k], size_k, size_n, bits))
    with setting("0"):
        compiled_peak = peak_beyond(lambda: patched(words, perms[size_k], size_k, size_n, bits))
    size = sum(words.nbytes for words, _, _ in weights) * layers
    seconds = statistics.median(times)
    return {
        "bits": bits,
        "act_order": act_order,
        "layers": layers,
        "GB": size / 1e9,
        "seconds": seconds,
        "GB/s": size / seconds / 1e9,
        "runs": [round(size / taken / 1e9, 2) for taken in times],
        "peak_bytes": peak,
        "compiled_peak_bytes": compiled_peak,
    }


@contextlib.contextmanager
def setting(value: str) -> Iterator[None]:
    before = os.environ.get(SETTING)
    os.environ[SETTING] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[SETTING]
        else:
            os.environ[SETTING] = before


def time_blocks() -> list[dict[str, Any]]:
    """The pipeline with other block sizes, counts of slots and of threads than it has."""
    words, size_k, size_n = layer_weights(8)[0]
    results = []
    for mebibytes, slots, threads in itertools.product((4, 8, 16), (3, 4), (2, 4, 8)):
        staging = Staging(CudaLink(words.device), block_bytes=mebibytes << 20, slots=slots)
        times = []
        for _ in range(6):
            started = time.perf_counter()
            repack_from_device("gptq", words, size_k, size_n, 8, staging=staging, threads=threads)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        speed = round(words.nbytes / statistics.median(times[1:]) / 1e9, 2)
        results.append({"MiB": mebibytes, "slots": slots, "threads": threads, "GB/s": speed})
    return results


def time_copies() -> dict[str, float]:
    """GB/s of plain copies between this GPU and host memory: what bounds the pipeline."""
    device = torch.zeros(64 << 20, dtype=torch.int32, device=DEVICE)
    hosts = {
        "pageable": torch.zeros(device.shape, dtype=torch.int32),
        "pinned": torch.zeros(device.shape, dtype=torch.int32, pin_memory=True),
    }
    speeds = {}
    for name, host in hosts.items():
        for direction, (target, source) in {"down": (host, device), "up": (device, host)}.items():
            times = []
            for _ in range(5):
                torch.cuda.synchronize()
                started = time.perf_counter()
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - started)
            speeds[f"{name} {direction}"] = round(device.nbytes / statistics.median(times) / 1e9, 2)
    return speeds


def describe_machine(library: Path, digest: str) -> dict[str, Any]:
    import numba

    query = ["nvidia-smi", "--query-gpu=name,driver_version,vbios_version,uuid,memory.total", "--format=csv,noheader"]
    return {
        "card": subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.strip(),
        "capability": torch.cuda.get_device_capability(),
        "torch": torch.__version__,
        "numba": numba.__version__,
        "python": platform.python_version(),
        "processors": module.default_threads(),
        "engine": module.default_engine().name,
        "library": library.name.removesuffix(".xz"),
        "library_sha256": digest,
        "kernel_log": read_kernel_log(),
    }


def read_kernel_log() -> dict[str, str]:
    """Whether Xids could be read here at all."""
    found = {}
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            found["/dev/kmsg"] = f"readable: {os.read(descriptor, 8192)[:60]!r}"
        finally:
            os.close(descriptor)
    except OSError as error:
        found["/dev/kmsg"] = str(error)
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=20, check=False)
        found["dmesg"] = f"status {done.returncode}, {len(done.stdout.splitlines())} lines {done.stderr.strip()[:80]}"
    except OSError as error:
        found["dmesg"] = str(error)
    return found


def unpack(path: Path, folder: Path) -> Path:
    if path.suffix != ".xz":
        return path
    target = folder / path.stem
    target.write_bytes(lzma.decompress(path.read_bytes()))
    return target


def render(report: dict[str, Any]) -> str:
    machine = report["machine"]
    lines = [
        f"card: {machine['card']}; torch {machine['torch']}; numba {machine['numba']}; {machine['processors']} threads",
        f"library: {machine['library']}, sha256 {machine['library_sha256']}",
        *(f"schema: {schema}" for schema in report["schemas"].values()),
        f"kernel log: {machine['kernel_log']}",
        "",
    ]
    for title in ("small", "model", "huge", "reference", "mutation"):
        part = report[title]
        differing = sum(entry["differing"] for entry in part)
        lines.append(f"{title}: {len(part)} cases, {sum(e.get('words', 0) for e in part)} words, {differing} differing")
    lines += ["", "| call | compiled op | CPU repack |", "|---|---|---|"]
    lines += [f"| {entry['case']} | {entry['op']} | {entry['ours']} |" for entry in report["refusals"]]
    lines += ["", "| case | compiled op, GB/s read + written |", "|---|---|"]
    lines += [f"| {name} | {speed:.0f} |" for name, speed in report["op_speed"].items()]
    lines += ["", f"plain copies, GB/s: {report['copies']}", "", "| weights | GB | s | GB/s | peak GPU MB, ours / op |"]
    lines.append("|---|---|---|---|---|")
    for entry in report["layers"]:
        name = f"{entry['bits']} bits{', act-order' if entry['act_order'] else ''}, {entry['layers']} layers"
        peaks = f"{entry['peak_bytes'] / 1e6:.1f} / {entry['compiled_peak_bytes'] / 1e6:.1f}"
        lines.append(f"| {name} | {entry['GB']:.1f} | {entry['seconds']:.2f} | {entry['GB/s']:.1f} | {peaks} |")
    lines += ["", "| block, MiB | slots | threads | GB/s |", "|---|---|---|---|"]
    lines += [f"| {e['MiB']} | {e['slots']} | {e['threads']} | {e['GB/s']} |" for e in report["blocks"]]
    lines += ["", f"seconds: {report['seconds']}"]
    return "\n".join(lines)


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def failures(report: dict[str, Any]) -> list[str]:
    found = [
        f"{title}: {entry['case']} differs"
        for title in ("small", "model", "huge", "reference")
        for entry in report[title]
        if entry["differing"]
    ]
    found += [f"mutation unseen: {entry['case']}" for entry in report["mutation"] if entry["differing"] != 1]
    for entry in report["refusals"]:
        if not entry["ours"].startswith("refuses"):
            found.append(f"not refused by us: {entry['case']}")
        if entry["by_op"] and not entry["op"].startswith("refuses"):
            found.append(f"not refused by the op: {entry['case']}")
    return found


def measure(op: CompiledOp, *, huge: bool) -> dict[str, Any]:
    clock = {"start": time.perf_counter()}

    def lap(name: str) -> None:
        clock[name] = time.perf_counter()
        say(f"[{name}]")

    known = [case for case in (*small_cases(), *model_cases()) if op.has_perm or not case.act_order]
    small, model = [case for case in known if case in small_cases()], [case for case in known if case in model_cases()]
    report: dict[str, Any] = {"schemas": op.schemas}
    report["small"] = [compare(op, case, digits=True) for case in small]
    lap("small")
    report["model"] = [compare(op, case, digits=False) for case in model]
    lap("model")
    with ThreadPoolExecutor(5) as pool:
        wanted = [case for case in model if (case.size_k, case.size_n) == (5120, 17408)]
        report["reference"] = list(pool.map(lambda case: compare_reference(op, case), wanted))
    lap("reference")
    report["huge"] = [compare(op, case, digits=False) for case in huge_cases()] if huge else []
    torch.cuda.empty_cache()
    lap("huge")
    report["mutation"] = mutate(op)
    report["refusals"] = [try_refusal(op, refusal) for refusal in refusals() if op.has_perm or not refusal.act_order]
    lap("refusals")
    report["op_speed"] = {case.name: time_op(op, case) for case in model if (case.size_k, case.size_n) == (5120, 17408)}
    report["copies"] = time_copies()
    report["blocks"] = time_blocks()
    lap("blocks")
    report["layers"] = [time_layers(op, 8), time_layers(op, 4)]
    if op.has_perm:
        report["layers"].append(time_layers(op, 8, act_order=True))
    lap("layers")
    names = list(clock)
    report["seconds"] = {name: round(clock[name] - clock[before], 1) for before, name in itertools.pairwise(names)}
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--skip-huge", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        library = unpack(options.library, Path(folder))
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
        report = measure(CompiledOp(library), huge=not options.skip_huge)
        report["machine"] = describe_machine(options.library, digest)
    report["failures"] = failures(report)
    text = render(report)
    sys.stdout.write(f"{text}\n")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "repack.json").write_text(json.dumps(report, indent=2, default=str))
        (options.out / "repack.md").write_text(text)
    say("\n".join(report["failures"]) or "no failures")
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
