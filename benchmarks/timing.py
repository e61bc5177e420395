"""Whole-process timing for the benches."""

import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence


def run_timed(command: Sequence[str], *, environ: Mapping[str, str] | None = None, expect: int = 0) -> float:
    """Seconds of wall time that a command takes; its output is dropped.

    Raises RuntimeError where it ends with another status than ``expect``.
    """
    env = {**user_environ(), **(environ or {})}
    start = time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800, check=False)
    seconds = time.perf_counter() - start
    if done.returncode != expect:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return seconds


def user_environ() -> dict[str, str]:
    """This environment, but for what would keep a command from keeping its bytecode, as a user's does: without it a
    small command takes a third more time."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def interleave(runs: int, **ways: Callable[[], float]) -> dict[str, float]:
    """The median of ``runs`` timings of each way, taken in turn so that a drifting machine touches all alike."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs):
        for name, way in ways.items():
            taken[name].append(way())
    return {name: statistics.median(times) for name, times in taken.items()}


BARE_TYPER = """
import typer
app = typer.Typer()
@app.command()
def one(name: str = "x") -> None: print(name)
@app.command()
def two(name: str = "y") -> None: print(name)
app()
"""
