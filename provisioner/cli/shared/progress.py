"""Progress on stderr: a live line with a bar on a terminal, one plain line a stage elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from provisioner.cli.shared.render import print_note, print_warning
from provisioner.progress import Reporter

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class PlainReporter:
    """Stages as lines, for logs and pipes; details are left out."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def stage(self, text: str) -> None:
        """Print the stage with the seconds since the start."""
        print_note(f"[{time.monotonic() - self._start:6.1f} s] {text}")

    def detail(self, text: str) -> None:
        """Leave it out: a log wants stages."""

    def amount(self, done: int, total: int | None, unit: str) -> None:
        """Leave it out: a log wants stages."""

    def warn(self, text: str) -> None:
        """Print the warning."""
        print_warning(text)


class LiveReporter:
    """A bar that belongs to the current stage, on a terminal."""

    def __init__(self, progress: "Progress") -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def stage(self, text: str) -> None:
        """Close the former stage's bar and open one."""
        self.finish()
        self._task = self._progress.add_task(text, total=None, detail="")

    def detail(self, text: str) -> None:
        """Show the newest line beside the bar."""
        if self._task is not None:
            self._progress.update(self._task, detail=text[:60])

    def amount(self, done: int, total: int | None, unit: str) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total, detail=_count(done, total, unit))

    def warn(self, text: str) -> None:
        """Print the warning above the bar."""
        self._progress.console.print(f"[yellow]warning[/yellow]: {text}", highlight=False)

    def finish(self) -> None:
        """Close the bar of the last stage."""
        if self._task is not None:
            self._progress.update(self._task, total=1, completed=1, detail="")


def _count(done: int, total: int | None, unit: str) -> str:
    """Bytes as ``310 of 3878 MB``; of anything else the unit alone."""
    if unit != "bytes":
        return unit
    return f"{done // 10**6} MB" if total is None else f"{done // 10**6} of {total // 10**6} MB"


@contextmanager
def open_reporter() -> Iterator[Reporter]:
    """The reporter that suits stderr."""
    if not sys.stderr.isatty():
        yield PlainReporter()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", style="dim"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        reporter = LiveReporter(progress)
        yield reporter
        reporter.finish()
