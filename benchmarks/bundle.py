"""A bundle of the bare recipe, written and installed: the wheel comes from the user's index, the rest from the file."""

import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.timing import run_timed

PROVISION = [sys.executable, "-m", "provisioner"]
RECIPE = "hynix-stable"


def rows() -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory(prefix="provision-bench-") as name:
        folder = Path(name)
        environ = {"PROVISION_HOME": str(folder / "home"), "UV_CACHE_DIR": str(folder / "uv")}
        file = str(folder / "bare.tar")
        write = [*PROVISION, "bundle", RECIPE, "--bare", "-o", file]
        install = [*PROVISION, RECIPE, "--from-bundle", file, "--bare"]
        wrote, wrote_cpu = _measure(lambda: run_timed(write, environ=environ))
        installed, installed_cpu = _measure(lambda: run_timed(install, environ=environ))
        again = run_timed(install, environ=environ)
        checked = run_timed([*PROVISION, "bundle", "--check", file], environ=environ)
        size = Path(file).stat().st_size / 1e6
    return [
        _row("bare bundle, written and installed with empty caches", wrote + installed, "s", "< 30 s"),
        _row("of these, written", wrote, "s"),
        _row("CPU time: written", wrote_cpu, "s"),
        _row("CPU time: installed", installed_cpu, "s"),
        _row("second run from the bundle (nothing to do)", again, "s"),
        _row("bundle --check", checked, "s"),
        _row("size of the bundle", size, "MB"),
    ]


def _measure(run: Callable[[], float]) -> tuple[float, float]:
    """Seconds of wall time and of user CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    seconds = run()
    return seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def _row(name: str, ours: float, unit: str, target: str = "") -> dict[str, object]:
    return {"name": name, "ours": ours, "unit": unit, "target": target}
