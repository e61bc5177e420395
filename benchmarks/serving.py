"""Serving's commands as whole processes: a fork's stack applied again, the checks before a start, doctor."""

import os
import shlex
import sys
import tempfile
from pathlib import Path

from benchmarks.timing import BARE_TYPER, interleave, run_timed
from provisioner.index.settings import read_settings
from provisioner.index.source import candidates, open_wheel, parse_spec
from provisioner.index.transport import Transport
from provisioner.wheels.names import Target, choose
from tests.support.environments import make_environment
from tests.support.fork_stack import REAL_FILES, make_repository, make_stack

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
    """`provision samsung --reapply-patches` with nothing to change, on the real wheel without its dependencies."""
    settings = read_settings(os.environ, Path.home())
    with Transport(settings) as transport:
        found = candidates(parse_spec("pypi:0.27.1"), settings, transport=transport)
        files = open_wheel(choose(found, Target()).chosen, settings, transport=transport).read_many(REAL_FILES)
    commit = make_repository(folder / "origin", make_stack(files))
    home = {"PROVISION_HOME": str(folder / "home")}
    command = [*PROVISION, "samsung", "--bare", "--fork-commit", commit]
    run_timed([*command, "--fork-url", f"file://{folder / 'origin'}"], environ=home)
    seconds = interleave(7, ours=lambda: run_timed([*command, "--reapply-patches"], environ=home))["ours"]
    return {"name": "samsung --reapply-patches (18 patches)", "ours": seconds, "unit": "s", "target": "< 2.0 s"}


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
