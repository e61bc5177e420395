"""`provision drift` over PyPI's releases: cold and warm, in seconds and bytes, beside a two-command typer program."""

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.timing import BARE_TYPER, interleave, run_timed, user_environ

PROVISION = [sys.executable, "-m", "provisioner"]


def rows() -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory(prefix="provision-bench-") as name:
        folder = Path(name)
        program = folder / "bare_typer.py"
        program.write_text(BARE_TYPER)
        _scan(folder / "home-first", ["drift", "hynix-stable", "--against", "pypi:0.27.1"])  # leaves bytecode behind
        return [*_single(folder), *_releases(folder, 12, program, warm=5), *_releases(folder, 60, program, warm=3)]


def _releases(folder: Path, last: int, program: Path, *, warm: int) -> list[dict[str, object]]:
    home = folder / f"home-{last}"
    arguments = ["drift", "--against", "pypi", "--last", str(last)]
    seconds, report = _scan(home, arguments)
    times = interleave(
        warm,
        ours=lambda: _timed(home, arguments),
        theirs=lambda: run_timed([sys.executable, str(program), "one"]),
    )
    count = len(report["builds"])
    megabytes = report["cost"]["received"] / 1e6
    target_bytes = "< 14" if last == 12 else ""
    return [
        {"name": f"{count} releases, cold", "ours": seconds, "unit": "s", "target": "< 5" if last == 12 else "< 25"},
        {"name": f"{count} releases, cold, received", "ours": megabytes, "unit": "MB", "target": target_bytes},
        {"name": f"{count} releases, cold, requests", "ours": report["cost"]["requests"], "unit": "", "target": ""},
        {
            "name": f"{count} releases, warm / two-command typer program",
            **times,
            "ratio": times["ours"] / times["theirs"],
            "unit": "s",
            "target": "<= 4" if last == 12 else "",
        },
        {
            "name": "peak memory so far",
            "ours": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
            "unit": "MiB",
            "target": "< 200",
        },
    ]


def _single(folder: Path) -> list[dict[str, object]]:
    """One wheel, nothing cached: what a nightly costs."""
    times = []
    for number in range(3):
        home = folder / f"single-{number}"
        times.append(_scan(home, ["drift", "hynix-stable", "--against", "pypi:0.27.1"])[0])
        shutil.rmtree(home, ignore_errors=True)
    return [{"name": "one wheel, cold", "ours": sorted(times)[1], "unit": "s", "target": "< 1.5"}]


def _scan(home: Path, arguments: list[str]) -> tuple[float, dict[str, Any]]:
    start = time.perf_counter()
    done = subprocess.run(
        [*PROVISION, *arguments, "--json"],
        env={**user_environ(), "PROVISION_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    seconds = time.perf_counter() - start
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr)
    report: dict[str, Any] = json.loads(done.stdout)
    return seconds, report


def _timed(home: Path, arguments: list[str]) -> float:
    return _scan(home, arguments)[0]
