"""Whether files that are about to be written are Python, by the compiler of the environment that will import them.

The compiler sees the new bytes on its standard input: nothing is written, and nothing of the environment is imported.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from provisioner.environment.site import Site
from provisioner.errors import ConflictError, EnvironmentConflictError
from provisioner.patching.model import SeriesVerdict
from provisioner.patching.steps import CreateFile, FileStep, ReplaceFile
from provisioner.records import dataclass

_TIMEOUT_SECONDS = 60
# compile() and not only a parser: "return outside function" and its like are found later than by the grammar.
_COMPILER = """
import sys
stream, wrong = sys.stdin.buffer, []
while header := stream.readline():
    path, size = header.decode("utf-8", "surrogateescape").rstrip("\\n").rsplit(" ", 1)
    try:
        compile(stream.read(int(size)), path, "exec", dont_inherit=True)
    except SyntaxError as error:
        wrong.append((path, error.lineno or 1, error.msg))
    except (ValueError, RecursionError, MemoryError) as error:
        wrong.append((path, 1, str(error) or type(error).__name__))
print(ascii(wrong))
"""


@dataclass(frozen=True, kw_only=True)
class SyntaxFinding:
    """A file that does not compile: the line, counted from 1, and the compiler's own words."""

    path: str
    line: int
    message: str


def compiler_of(site: Site) -> Path | None:
    """The Python that will import a site's files; None for a bare folder of another version than ours, or of none."""
    if site.interpreter is not None:
        return site.interpreter.executable
    own = "python{}.{}".format(*sys.version_info)
    return Path(sys.executable) if own in site.site_packages.parts else None


def refuse_broken_python(python: Path, steps: Iterable[FileStep], verdict: SeriesVerdict) -> None:
    """Raise ConflictError, with file and line, where a Python file that ``steps`` write does not compile.

    ``verdict`` is of the series behind the steps, to say whose text it is. No such step: no process. Raises
    EnvironmentConflictError where the interpreter does not answer.
    """
    findings = find_broken(python, written_sources(steps))
    if not findings:
        return
    lines = []
    for finding in findings:
        ids = [patch.id for patch in verdict.patches if any(file.path == finding.path for file in patch.files)]
        lines.append(f"{finding.path}:{finding.line}: {finding.message} (changed by {', '.join(ids)})")
    raise ConflictError(
        "the series makes a file that is no Python; nothing was written",
        where=f"{findings[0].path}:{findings[0].line}",
        expected=f"source that {python} compiles",
        found="\n".join(lines),
        hints=("provision patches",),
    )


def find_broken(python: Path, files: dict[str, bytes]) -> tuple[SyntaxFinding, ...]:
    """Compile ``files`` (path to source) in one child of ``python``, about 0.1 s for 1 MB; those that do not compile.

    Raises EnvironmentConflictError where the interpreter does not answer.
    """
    if not files:
        return ()
    stream = b"".join(
        path.encode("utf-8", "surrogateescape") + b" %d\n" % len(content) + content for path, content in files.items()
    )
    # -S: a .pth file of the environment may run code. -W: remarks of the compiler are not ours to show.
    command = [str(python), "-I", "-S", "-W", "ignore", "-c", _COMPILER]
    try:
        done = subprocess.run(command, input=stream, capture_output=True, timeout=_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _no_answer(python, str(error)) from error
    if done.returncode != 0:
        raise _no_answer(python, done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2])
    return tuple(
        SyntaxFinding(path=path, line=line, message=message)
        for path, line, message in ast.literal_eval(done.stdout.decode("ascii"))
    )


def written_sources(steps: Iterable[FileStep]) -> dict[str, bytes]:
    """The Python files that ``steps`` write, by path."""
    writing = [step for step in steps if isinstance(step, CreateFile | ReplaceFile)]
    return {step.path: step.content for step in writing if step.path.endswith(".py")}


def _no_answer(python: Path, found: str) -> EnvironmentConflictError:
    return EnvironmentConflictError(
        "the environment's Python cannot compile the changed files", where=str(python), found=found or "no output"
    )
