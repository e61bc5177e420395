"""Serving's commands as whole processes: a fork's stack applied again, checks before a start, doctor, a long log."""

import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.timing import BARE_TYPER, interleave, run_timed
from provisioner.doctor.condense import condense
from provisioner.doctor.readers import LogFile, read_pieces
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
        return [_reapply(folder), *_small(folder), _long_log(folder / "server.log")]


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
        {
            "name": "doctor without --gpu / two-command typer program",
            "ours": medians["doctor"],
            "theirs": medians["typer"],
            "ratio": medians["doctor"] / medians["typer"],
            "unit": "s",
            "target": "< 2.5",
        },
    ]


def _long_log(path: Path) -> dict[str, object]:
    """A log of 200 MB of a server at work, judged; against reading the file, which is the least that it can cost."""
    answer = b'INFO:     127.0.0.1:40112 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
    report = (
        b"(APIServer pid=7) INFO 12-07 11:43:14 [loggers.py:335] Engine 000: Avg prompt throughput: 512.4 tokens/s, "
        b"Avg generation throughput: 62.3 tokens/s, Running: 1 reqs, Waiting: 0 reqs, Prefix cache hit rate: 43.2%\n"
    )
    other = b"(APIServer pid=7) INFO 12-07 11:43:14 [logger.py:51] Received request: prompt: 'out of memory?'\n"
    work = (answer * 40 + report * 8 + other) * 100
    with path.open("wb") as log:
        log.write(b"INFO vLLM server version 0.32.0\nINFO:     Application startup complete.\n")
        for _ in range(200_000_000 // len(work)):
            log.write(work)
    medians = interleave(5, ours=lambda: _timed(path, condense), read=lambda: _timed(path, _drop))
    ours, read = medians["ours"], medians["read"]
    name = "a log of 200 MB, condensed / read"
    return {"name": name, "ours": ours, "theirs": read, "ratio": ours / read, "unit": "s", "target": "< 3 s"}


def _drop(pieces: Iterator[bytes]) -> None:
    for _ in pieces:
        pass


def _timed(path: Path, act: Callable[[Iterator[bytes]], object]) -> float:
    start = time.perf_counter()
    act(read_pieces(LogFile(path=path)))
    return time.perf_counter() - start
