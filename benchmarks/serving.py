"""Serving's commands as whole processes: a fork's stack applied again, the checks before a start, doctor."""

import shlex
import sys
import tempfile
from pathlib import Path

from benchmarks.timing import BARE_TYPER, interleave, run_timed
from tests.support.environments import make_environment
from tests.support.real_fork import commit_fork

PROVISION = [sys.executable, "-m", "provisioner"]
RECIPE = """\
schema = 1
title = "Small"
[python]
[build]
release = "0.27.1"
[expect]
[serve]
port = 18999
"""


def rows() -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory(prefix="provision-bench-") as name:
        folder = Path(name)
        return [_reapply(folder), *_small(folder)]


def _reapply(folder: Path) -> dict[str, object]:
    """`provision samsung --reapply-patches` with nothing to change: the real fork, the wheel without dependencies."""
    program = folder / "bare_typer.py"
    program.write_text(BARE_TYPER, encoding="utf-8")
    home = {"PROVISION_HOME": str(folder / "home")}
    command = [*PROVISION, "samsung", "--bare", "--fork-commit", commit_fork(folder / "origin")]
    run_timed([*command, "--fork-url", f"file://{folder / 'origin'}"], environ=home)
    medians = interleave(
        11,
        ours=lambda: run_timed([*command, "--reapply-patches"], environ=home),
        typer=lambda: run_timed([sys.executable, str(program), "one"]),
    )
    ours, typer = medians["ours"], medians["typer"]
    name = "samsung --reapply-patches (17 patches) / two-command typer program"
    return {"name": name, "ours": ours, "theirs": typer, "ratio": ours / typer, "unit": "s", "target": "< 2.5"}


def _small(folder: Path) -> list[dict[str, object]]:
    make_environment(folder / "venv", recipe="tiny")
    recipe = folder / "tiny.toml"
    recipe.write_text(RECIPE, encoding="utf-8")
    program = folder / "bare_typer.py"
    program.write_text(BARE_TYPER, encoding="utf-8")
    record = {"RECORD_TO": str(folder / "record.json")}
    place = ["--venv", str(folder / "venv")]
    medians = interleave(
        9,
        server=lambda: run_timed([str(folder / "venv" / "bin" / "vllm")], environ=record),
        typer=lambda: run_timed([sys.executable, str(program), "one"]),
        serve=lambda: run_timed([*PROVISION, "serve", str(recipe), *place, "--model", "a/b"], environ=record),
        # What else runs on this machine may be a finding (1).
        doctor=lambda: run_timed(["sh", "-c", f"{shlex.join([*PROVISION, 'doctor', *place])} || test $? -eq 1"]),
    )
    checks = medians["serve"] - medians["server"] - medians["typer"]
    return [
        {"name": "serve: checks before exec (less typer and server)", "ours": checks, "unit": "s", "target": "< 0.5 s"},
        {"name": "doctor without --gpu", "ours": medians["doctor"], "unit": "s", "target": "< 1.5 s"},
    ]
