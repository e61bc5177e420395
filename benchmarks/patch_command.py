"""`provision patch` as a whole process, journal and proofs included, against a two-command typer program.

The tree has the files that the series touches and the whole RECORD of vLLM 0.27.1, read from the user's package index.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.timing import BARE_TYPER, interleave, run_timed
from provisioner.index.lazy import Wheel
from provisioner.index.settings import read_settings
from provisioner.index.source import candidates, open_wheel, parse_spec
from provisioner.patching.diff import print_patch
from provisioner.wheels.names import Target, choose
from tests.support.real_series import SHIPPED, make_series

VERSION = "0.27.1"
PATCH = [sys.executable, "-m", "provisioner", "patch"]
RUNS = 11


def rows() -> list[dict[str, object]]:
    """Applying, applying again and judging, in seconds and as multiples of the bare program; peak memory."""
    with tempfile.TemporaryDirectory(prefix="provision-bench-") as name:
        folder = Path(name)
        make_desk(folder)
        return [*_times(folder), _memory(folder)]


def make_desk(folder: Path) -> None:
    """``pristine`` and ``patched`` trees, series of 13 and 14 patches, and the bare program."""
    settings = read_settings(os.environ, Path.home())
    found = candidates(parse_spec(f"pypi:{VERSION}"), settings)
    wheel = open_wheel(choose(found, Target()).chosen, settings)
    tree = dict(wheel.read_many(SHIPPED))
    _write_tree(folder / "pristine", tree, wheel)
    patches, trees = make_series(tree)
    for count in (13, 14):
        stack = folder / f"stack-{count}"
        stack.mkdir()
        for patch in patches[:count]:
            (stack / f"{patch.id}.patch").write_bytes(print_patch(patch))
    _write_tree(folder / "patched", trees[14], wheel)
    (folder / "bare.py").write_text(BARE_TYPER)
    wheel.close()


def _write_tree(site: Path, files: dict[str, bytes], wheel: Wheel) -> None:
    info = site / f"vllm-{VERSION}.dist-info"
    info.mkdir(parents=True)
    (info / "RECORD").write_text(wheel.record_text())
    for path, content in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)


def _command(folder: Path, word: str, count: int, site: str) -> list[str]:
    return [*PATCH, word, str(folder / f"stack-{count}"), "--site-packages", str(folder / site)]


def _times(folder: Path) -> list[dict[str, object]]:
    home = {"PROVISION_HOME": str(folder / "home")}

    def apply_afresh() -> float:
        shutil.rmtree(folder / "site", ignore_errors=True)
        shutil.copytree(folder / "pristine", folder / "site")
        return run_timed(_command(folder, "apply", 13, "site"), environ=home)

    medians = interleave(
        RUNS,
        bare=lambda: run_timed([sys.executable, str(folder / "bare.py"), "one"]),
        apply=apply_afresh,
        again=lambda: run_timed(_command(folder, "apply", 13, "site"), environ=home),
        check=lambda: run_timed(_command(folder, "check", 13, "pristine"), environ=home),
        applied=lambda: run_timed(_command(folder, "check", 14, "patched"), environ=home),
    )
    return [
        _row("patch apply, 13 patches / bare typer", medians["apply"], medians["bare"], "<= 2.5 x"),
        _row("patch apply again (nothing to do) / bare typer", medians["again"], medians["bare"], "<= 2.5 x"),
        _row("patch check, 13 patches / bare typer", medians["check"], medians["bare"], "<= 2.5 x"),
        _row("patch check, 14 applied patches / bare typer", medians["applied"], medians["bare"], "<= 2.0 x"),
    ]


def _row(name: str, ours: float, theirs: float, target: str) -> dict[str, object]:
    return {"name": name, "ours": ours, "theirs": theirs, "unit": "s", "ratio": ours / theirs, "target": target}


_SHOW_PEAK = "import resource, sys; from provisioner.cli.main import main; code = main(sys.argv[1:]); "
_SHOW_PEAK += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr); sys.exit(code)"


def _memory(folder: Path) -> dict[str, object]:
    shutil.rmtree(folder / "site", ignore_errors=True)
    shutil.copytree(folder / "pristine", folder / "site")
    words = _command(folder, "apply", 13, "site")[3:]
    command = [sys.executable, "-c", _SHOW_PEAK, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    kib = int(done.stderr.split()[-1])
    return {"name": "patch apply, 13 patches: peak memory", "ours": kib / 1024, "unit": "MiB", "target": "< 120"}
