"""A patched wheel of the real vLLM, beside ``cp`` of the same file; the wheel is fetched before anything is timed."""

import resource
import sys
import tempfile
from pathlib import Path

from benchmarks.timing import interleave, run_timed

PROVISION = [sys.executable, "-m", "provisioner"]


def rows() -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory(prefix="provision-bench-") as name:
        folder = Path(name)
        environ = {"PROVISION_HOME": str(folder / "home")}
        build = [*PROVISION, "wheel", "hynix-stable", "-o"]
        run_timed([*build, str(folder / "first")], environ=environ)
        (origin,) = (folder / "home").rglob("vllm-*.whl")
        numbers = iter(range(100))
        times = interleave(
            5,
            ours=lambda: run_timed([*build, str(folder / f"out-{next(numbers)}")], environ=environ),
            theirs=lambda: run_timed(["cp", str(origin), str(folder / f"copy-{next(numbers)}")]),
        )
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    bound = 1.5 * times["theirs"] + 1
    return [
        {"name": "wheel of hynix-stable, and cp of the origin", **times, "unit": "s", "target": f"< {bound:.2f} s"},
        {"name": "peak memory", "ours": memory, "unit": "MB", "target": "< 150 MB"},
    ]
