"""The whole check on a real card, with the op library of a real wheel and without the rest of that wheel.

    python tests/gpu/verify_on_card.py --library _C_stable_libtorch.abi3.so[.xz] --out FOLDER
        [--pristine DIR --patched DIR] [--steps quick,full,share,mutation,ballast,model]

Run in a checkout, on a machine with an NVIDIA card, torch, Triton, numba and nvidia-ml-py. DIR are site-packages
folders (or copies of the files that pr50021-gdn-spec-bounds touches) as shipped and as patched. Each step leaves a
report in FOLDER; a summary goes to stdout as Markdown. Exit status 1 if a step did not come out as it must.
"""

# ruff: noqa: T201 - a program for people, which prints

import argparse
import importlib.util
import json
import lzma
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from provisioner.gpu.devices import read_inventory, select_card  # noqa: E402 - run as a program, not installed
from provisioner.gpu.model import Card  # noqa: E402
from provisioner.gpu.report import Form, Verdict, VerifyReport, describe, print_markdown, print_report  # noqa: E402
from provisioner.gpu.verify import (  # noqa: E402
    BehaviourCheck,
    FixedOccupancy,
    ShareOfFree,
    Target,
    Wish,
    verify_card,
)
from provisioner.progress import Silence  # noqa: E402

GIB = 1 << 30
REPACK = ROOT / "provisioner" / "marlin" / "repack.py"
CHECK = ROOT / "patches" / "pr50021-gdn-spec-bounds" / "check.py"
MUTATED = """
import importlib.util
spec = importlib.util.spec_from_file_location("right_repack", {path!r})
right = importlib.util.module_from_spec(spec)
import sys
sys.modules["right_repack"] = right
spec.loader.exec_module(right)


def repack(*arguments, **options):
    answer = right.repack(*arguments, **options)
    answer.view(-1)[-1] ^= 1 << 30
    return answer
"""


class Log(Silence):
    """Stages with the time, on stderr."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def stage(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:7.2f} s] {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Bed:
    """What the steps run on."""

    target: Target
    card: Card
    out: Path
    scratch: Path
    version: str


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--version", default="0.27.1")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pristine", type=Path)
    parser.add_argument("--patched", type=Path)
    parser.add_argument("--steps", default=",".join(STEPS))
    options = parser.parse_args()
    card = select_card(read_inventory(), None, environ=os.environ)
    options.out.mkdir(parents=True, exist_ok=True)
    good = True
    with tempfile.TemporaryDirectory() as folder:
        target = make_target(Path(folder), options)
        bed = Bed(target, card, options.out, Path(folder), options.version)
        for name in options.steps.split(","):
            print(f"## {name}\n", flush=True)
            good = STEPS[name](bed) and good
    return 0 if good else 1


def make_target(folder: Path, options: argparse.Namespace) -> Target:
    """A site-packages folder that holds no more of vLLM than its op library and the patched kernels."""
    site = folder / "site-packages"
    if options.patched is not None:
        shutil.copytree(options.patched, site)
    library = site / "vllm" / options.library.name.removesuffix(".xz")
    library.parent.mkdir(parents=True, exist_ok=True)
    if options.library.suffix == ".xz":
        with lzma.open(options.library) as packed, library.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    else:
        shutil.copy(options.library, library)
    checks = ()
    if options.pristine is not None and options.patched is not None:
        checks = (BehaviourCheck(patch="pr50021-gdn-spec-bounds", program=CHECK, pristine=options.pristine.absolute()),)
    return Target(python=Path(sys.executable), site_packages=site, version=options.version, behaviours=checks)


def run(bed: Bed, name: str, wish: Wish, target: Target | None = None) -> VerifyReport:
    started = time.monotonic()
    report = verify_card(target or bed.target, bed.card, wish, tool="verify_on_card", reporter=Log())
    seconds = time.monotonic() - started
    (bed.out / f"{name}.json").write_text(print_report(report))
    (bed.out / f"{name}.md").write_text(print_markdown(report))
    print("\n".join(f"    {line}" for line in describe(report)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"\n{seconds:.1f} s, the tool's own process at most {peak} MB\n", flush=True)
    return report


def quick(bed: Bed) -> bool:
    return run(bed, "quick", Wish()).verdict is Verdict.BIT_EXACT


def full(bed: Bed) -> bool:
    wish = Wish(form=Form.FULL, occupancy=FixedOccupancy(bytes=27 * GIB))
    return run(bed, "full", wish).verdict is Verdict.BIT_EXACT


def share(bed: Bed) -> bool:
    alone = replace(bed.target, behaviours=())
    return run(bed, "share", Wish(occupancy=ShareOfFree(share=0.9)), alone).verdict is Verdict.BIT_EXACT


def mutation(bed: Bed) -> bool:
    """One bit of one word of each answer is wrong: every case that answers must fail, by one word."""
    fallback = bed.scratch / "mutated_repack.py"
    fallback.write_text(MUTATED.format(path=str(REPACK)))
    wish = Wish(occupancy=FixedOccupancy(bytes=GIB))
    report = run(bed, "mutation", wish, replace(bed.target, fallback=fallback, behaviours=()))
    differences = [item for stage in report.stages for failure in stage.failures for item in failure.differences]
    alone = all((item.left, item.right, item.words) == ("compiled", "fallback", 1) for item in differences)
    agreed = sum(stage.agreed for stage in report.stages)
    print(f"{len(differences)} differences of one word each: {alone}; cases that agree all the same: {agreed}\n")
    return report.verdict is Verdict.MISMATCH and bool(differences) and alone and agreed == 0


def ballast(bed: Bed) -> bool:
    """One bit of one word of 8 GiB of ballast on the card is changed: the check must find that word."""
    import torch

    child = load_child()
    held = child.Ballast(torch, "cuda")
    held.fill(8 * GIB, lambda done, total: None)
    before = held.check(lambda done, total: None)
    held._pieces[100][12345] ^= 1
    after = held.check(lambda done, total: None)
    print(f"before: {before}; after: {after}\n")
    held.release()
    return before == (0, None) and after[0] == 1 and "piece 100, word 12345" in after[1]


def model(bed: Bed) -> bool:
    """16 layers of the model's MLP as a GPTQ checkpoint: how fast, against reading alone and repacking alone."""
    folder = bed.scratch / "model"
    size = write_model(folder)
    reading, repacking = measure_reading(folder, size), measure_repacking()
    report = run(
        bed, "model", Wish(model=folder, occupancy=FixedOccupancy(bytes=GIB)), replace(bed.target, behaviours=())
    )
    if report.layers is None:
        return False
    rate = report.layers.bytes / report.layers.seconds / 1e9
    slower = min(reading, repacking)
    print(
        f"reading {reading:.2f} GB/s, repacking {repacking:.2f} GB/s, comparing {rate:.2f} GB/s = {rate / slower:.2f}\n"
    )
    return report.verdict is Verdict.BIT_EXACT


def write_model(folder: Path) -> int:
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    config = {"quantization_config": {"quant_method": "gptq", "bits": 8, "desc_act": False}}
    (folder / "config.json").write_text(json.dumps(config))
    size = 0
    for index in range(16):
        shapes = {"gate_up": (1280, 34816), "down": (4352, 5120)}
        tensors = {
            f"layers.{index}.{name}.qweight": torch.randint(
                -(2**31), 2**31, shape, dtype=torch.int32, device="cuda"
            ).cpu()
            for name, shape in shapes.items()
        }
        size += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, str(folder / f"model-{index:02}.safetensors"))
    torch.cuda.empty_cache()
    return size


def measure_reading(folder: Path, size: int) -> float:
    import torch

    weights = load_by_path("weights")
    drop_page_cache(folder)
    started = time.monotonic()
    names = weights.list_weights(folder)
    for layer in weights.read_layers(torch, names, weights.read_quantization(folder)):
        layer.words.view(-1)[::1024].sum()
    seconds = time.monotonic() - started
    drop_page_cache(folder)
    return size / seconds / 1e9


def drop_page_cache(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_repacking() -> float:
    import torch

    from provisioner.marlin.repack import repack

    words = torch.randint(-(2**31), 2**31, (1280, 34816), dtype=torch.int32)
    out = torch.empty((320, 34816 * 4), dtype=torch.int32)
    repack("gptq", words, 5120, 34816, 8, out=out)
    started = time.monotonic()
    for _ in range(5):
        repack("gptq", words, 5120, 34816, 8, out=out)
    return 5 * words.nbytes / (time.monotonic() - started) / 1e9


def load_child() -> ModuleType:
    return load_by_path("child")


def load_by_path(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"verify_{name}", ROOT / "provisioner" / "gpu" / f"{name}.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


STEPS: dict[str, Callable[[Bed], bool]] = {
    "quick": quick,
    "full": full,
    "share": share,
    "mutation": mutation,
    "ballast": ballast,
    "model": model,
}

if __name__ == "__main__":
    sys.exit(main())
