"""The only caller of uv: venvs, resolution, installs, finding Pythons. uv sees no settings but what is passed here."""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from packaging.version import Version

from provisioner.documents.recipe import PythonChoice
from provisioner.environment.site import ask_interpreter
from provisioner.errors import (
    CannotObtainError,
    HashMismatchError,
    NetworkError,
    NoInterpreterError,
    ProvisionError,
    ResolutionError,
)
from provisioner.progress import Reporter
from provisioner.records import dataclass

INSTALL_TIMEOUT_SECONDS = 3600
RESOLVE_TIMEOUT_SECONDS = 600
QUERY_TIMEOUT_SECONDS = 60

# uv reads its configuration from parent folders and from UV_*; either could change what is installed. What stays is
# what a user's network and file system need: index, credentials, certificates, time limits, cache, where Pythons lie.
_KEPT_SETTINGS = re.compile(
    r"UV_(DEFAULT_INDEX|INDEX_URL|INDEX|INDEX_[A-Z0-9_]+_(USERNAME|PASSWORD)|KEYRING_PROVIDER|INSECURE_HOST|NATIVE_TLS"
    r"|SYSTEM_CERTS|HTTP_TIMEOUT|HTTP_RETRIES|CONCURRENT_DOWNLOADS|CACHE_DIR|LINK_MODE|PYTHON_INSTALL_DIR|OFFLINE)"
)
_DROPPED = frozenset({"VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH", "CONDA_PREFIX"})
_FIXED = {"UV_NO_CONFIG": "1", "UV_PYTHON_DOWNLOADS": "never", "NO_COLOR": "1"}


@dataclass(frozen=True, kw_only=True)
class Uv:
    """One uv binary and the environment that it is run in; ``links`` is a folder of wheels in place of any index."""

    binary: Path
    environment: Mapping[str, str]
    links: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ChosenPython:
    """The interpreter for a new environment; ``preferred`` tells whether it is the recipe's first choice."""

    executable: Path
    version: tuple[int, int, int]
    preferred: bool


def find_uv(environ: Mapping[str, str], *, index: str | None = None) -> Uv:
    """The uv that came with the tool, isolated; ``index`` is the package index where the user's settings name one.

    Raises CannotObtainError where uv is missing.
    """
    return Uv(binary=find_binary(), environment=isolate(environ, index=index))


def find_binary() -> Path:
    """The uv binary that came with the tool.

    Raises CannotObtainError where it is missing.
    """
    import uv

    try:
        return Path(uv.find_uv_bin())
    except FileNotFoundError as error:
        raise CannotObtainError("uv is not installed", hints=("pip install uv",)) from error


def name_command(*words: str) -> str:
    """A command line of uv that works as it is printed: the tool's own uv is seldom on PATH."""
    return shlex.join([str(find_binary()), *words])


def isolate(environ: Mapping[str, str], *, index: str | None) -> dict[str, str]:
    """The environment for uv: the user's network settings kept, everything else that steers uv or Python dropped."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _DROPPED and (not name.startswith("UV_") or _KEPT_SETTINGS.fullmatch(name))
    }
    if index is not None and not kept.keys() & {"UV_DEFAULT_INDEX", "UV_INDEX_URL"}:
        kept["UV_DEFAULT_INDEX"] = index
    return kept | _FIXED


def unplug(uv: Uv, links: Path) -> Uv:
    """The same uv, which takes packages from the folder ``links`` alone and asks no server."""
    return replace(uv, links=links)


def read_version(uv: Uv) -> str:
    """Version of the uv binary, as text."""
    return _query(uv, ["--version"]).split()[1]


class VenvLayout(StrEnum):
    """Whether an environment's scripts name its folder, or find it wherever it is moved to."""

    FIXED = "fixed"
    RELOCATABLE = "relocatable"


def create_venv(uv: Uv, folder: Path, python: Path, *, layout: VenvLayout = VenvLayout.FIXED) -> None:
    """Create a virtual environment in ``folder``, which may already hold the tool's own state.

    Raises CannotObtainError where uv refuses.
    """
    arguments = ["venv", "--no-project", "--allow-existing", "--python", str(python), str(folder)]
    if layout is VenvLayout.RELOCATABLE:
        arguments.append("--relocatable")
    done = _run(uv, arguments, timeout=120)
    if done.returncode:
        raise CannotObtainError("uv could not create the environment", where=str(folder), found=_tail(done.stderr))


def compile_requirements(
    uv: Uv, requirement: str, output: Path, *, python: str, exclude_newer: datetime | None
) -> None:
    """Resolve ``requirement`` for all platforms and Pythons from ``python`` on, with hashes and without any host.

    Raises ResolutionError or NetworkError.
    """
    arguments = ["pip", "compile", "-", "--universal", "--python-version", python, "--generate-hashes", "--no-header"]
    arguments += ["--no-annotate", "--no-strip-markers", "--quiet", "--output-file", str(output)]
    if exclude_newer is not None:
        arguments += ["--exclude-newer", exclude_newer.strftime("%Y-%m-%dT%H:%M:%SZ")]
    done = _run(uv, arguments, timeout=RESOLVE_TIMEOUT_SECONDS, stdin=requirement)
    if done.returncode:
        raise _explain(done.stderr, "the requirements could not be resolved")


def export_pylock(uv: Uv, requirements: Path, output: Path, *, python: str, exclude_newer: datetime | None) -> None:
    """Write the same pins as a PEP 751 file; it names the host of every file, so it is for export only."""
    arguments = ["pip", "compile", str(requirements), "--format", "pylock.toml", "--preview-features", "pylock"]
    arguments += ["--universal", "--python-version", python, "--no-header", "--quiet", "--output-file", str(output)]
    if exclude_newer is not None:
        arguments += ["--exclude-newer", exclude_newer.strftime("%Y-%m-%dT%H:%M:%SZ")]
    done = _run(uv, arguments, timeout=RESOLVE_TIMEOUT_SECONDS)
    if done.returncode:
        raise _explain(done.stderr, "the export could not be resolved")


def sync_requirements(uv: Uv, python: Path, requirements: Path, *, reporter: Reporter) -> None:
    """Make the environment of ``python`` hold exactly ``requirements``, every file checked against its hash.

    Raises HashMismatchError, NetworkError or ResolutionError with uv's own words.
    """
    arguments = ["pip", "sync", "--require-hashes", "--strict", "--python", str(python), str(requirements)]
    _install(uv, arguments, reporter)


def add_requirements(uv: Uv, python: Path, requirements: Path, *, reporter: Reporter) -> None:
    """The same, with whatever else is installed left alone."""
    arguments = ["pip", "install", "--require-hashes", "--strict", "--python", str(python)]
    _install(uv, [*arguments, "--requirements", str(requirements)], reporter)


def choose_python(uv: Uv, choice: PythonChoice, environ: Mapping[str, str]) -> ChosenPython:
    """The preferred Python if one is found, else the newest supported one.

    Raises NoInterpreterError, naming the ways to get one, where none is found.
    """
    for version in [choice.preferred, *_supported_minors(choice)]:
        executable = _find_python(uv, version, environ)
        if executable is not None:
            return _describe_python(executable, choice)
    raise NoInterpreterError(
        "no Python that the build supports was found",
        expected=f"Python {choice.supported}, preferably {choice.preferred}",
        found="none on PATH, in uv's or in pyenv's folders",
        hints=(
            name_command("python", "install", choice.preferred),
            f"pyenv install {choice.preferred}",
            "name one yourself: --python /path/to/python",
        ),
    )


def take_python(uv: Uv, wanted: str, choice: PythonChoice, environ: Mapping[str, str]) -> ChosenPython:
    """The Python that the user names, as a path or a version.

    Raises NoInterpreterError where it is not found or not supported by the build.
    """
    path = Path(wanted).expanduser()
    executable = path if path.is_file() else _find_python(uv, wanted, environ)
    if executable is None:
        raise NoInterpreterError(
            f"no Python {wanted!r} was found",
            hints=(name_command("python", "list"), "name one by its path: --python /path/to/python"),
        )
    # absolute(), not resolve(): a link such as bin/python of an environment must not be followed.
    return _describe_python(executable.absolute(), choice)


def _describe_python(executable: Path, choice: PythonChoice) -> ChosenPython:
    version = ask_interpreter(executable, module="sys").version
    text = ".".join(map(str, version))
    if not choice.supported.contains(text, prereleases=True):
        raise NoInterpreterError(
            "the build does not support this Python",
            where=str(executable),
            expected=f"Python {choice.supported}",
            found=text,
            hints=(f"--python {choice.preferred}",),
        )
    return ChosenPython(executable=executable, version=version, preferred=text.startswith(f"{choice.preferred}."))


def _supported_minors(choice: PythonChoice) -> list[str]:
    minors = [f"3.{minor}" for minor in range(20, 7, -1)]
    return [minor for minor in minors if choice.supported.contains(f"{minor}.99") and minor != choice.preferred]


def _find_python(uv: Uv, version: str, environ: Mapping[str, str]) -> Path | None:
    # Behind a shim of pyenv uv runs bash again and again, for a second; a shim that is not selected ends its search.
    if _is_shimmed(version, environ) and not _has_managed(version, environ):
        installed = _list_pyenv(version, environ)
        if len(installed) == 1:
            return installed[0]
    done = _run(uv, ["python", "find", "--no-project", version], timeout=QUERY_TIMEOUT_SECONDS)
    if done.returncode == 0:
        return Path(done.stdout.strip())
    return next(reversed(_list_pyenv(version, environ)), None)


def _is_shimmed(version: str, environ: Mapping[str, str]) -> bool:
    """Whether the first such Python on PATH is a shim of pyenv."""
    found = shutil.which(f"python{version}", path=environ.get("PATH"))
    return found is not None and Path(found).parent == _pyenv_root(environ) / "shims"


def _has_managed(version: str, environ: Mapping[str, str]) -> bool:
    """Whether uv keeps such a Python of its own, which it prefers to all others."""
    data = Path(environ.get("XDG_DATA_HOME") or _home(environ) / ".local" / "share")
    folder = Path(environ.get("UV_PYTHON_INSTALL_DIR") or data / "uv" / "python")
    return any(folder.glob(f"*-{version}*"))


def _pyenv_root(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("PYENV_ROOT") or _home(environ) / ".pyenv")


def _home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HOME", "~")).expanduser()


def _list_pyenv(version: str, environ: Mapping[str, str]) -> list[Path]:
    """The Pythons of a version where pyenv keeps them, the newest last."""
    found = []
    # Somebody else's folder (PYENV_ROOT kept by sudo, say) may be closed to us: then it has no Python for us.
    with suppress(PermissionError):
        for folder in _pyenv_root(environ).glob(f"versions/{version}*"):
            executable = folder / "bin" / "python3"
            if executable.exists() and re.fullmatch(r"\d+\.\d+\.\d+", folder.name):
                found.append((Version(folder.name), executable))
    return [executable for number, executable in sorted(found) if f"{number}.".startswith(f"{version}.")]


def _install(uv: Uv, arguments: Sequence[str], reporter: Reporter) -> None:
    source = [] if uv.links is None else ["--offline", "--no-index", "--find-links", str(uv.links)]
    status, text = _follow(uv, [*arguments, *source], reporter, timeout=INSTALL_TIMEOUT_SECONDS)
    if status:
        raise _explain(text, "the packages could not be installed")


def _query(uv: Uv, arguments: Sequence[str]) -> str:
    done = _run(uv, arguments, timeout=QUERY_TIMEOUT_SECONDS)
    if done.returncode:
        raise CannotObtainError("uv does not answer", where=str(uv.binary), found=_tail(done.stderr))
    return done.stdout


def _run(
    uv: Uv, arguments: Sequence[str], *, timeout: float, stdin: str | None = None
) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            [str(uv.binary), *arguments],
            env=uv.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NetworkError(f"uv gave no answer in {timeout:.0f} s", where=" ".join(arguments[:2])) from error


def _follow(uv: Uv, arguments: Sequence[str], reporter: Reporter, *, timeout: float) -> tuple[int, str]:
    """Run uv and hand on each line of its stderr as it comes; its exit status and all the lines."""
    lines: list[str] = []
    process = subprocess.Popen(
        [str(uv.binary), *arguments],
        env=uv.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert process.stderr is not None
    clock = threading.Timer(timeout, process.kill)
    clock.start()
    try:
        with process.stderr:
            for line in process.stderr:
                lines.append(line)
                reporter.detail(line.rstrip())
        status = process.wait()
    finally:
        _end(process, clock)
    if not clock.is_alive() and status < 0:
        raise NetworkError(f"uv was not done after {timeout:.0f} s", where=" ".join(arguments[:2]))
    return status, "".join(lines)


def _end(process: "subprocess.Popen[str]", clock: threading.Timer) -> None:
    clock.cancel()
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
    if process.poll() is None:
        process.kill()
        process.wait()
    if process.stderr is not None:
        process.stderr.close()


def _explain(stderr: str, what: str) -> ProvisionError:
    text = stderr.strip()
    lowered = text.lower()
    if "hash mismatch" in lowered:
        return HashMismatchError(
            "a package is not the file that the lock promises",
            found=_tail(text),
            hints=(
                f"{name_command('cache', 'clean')}, if a local cache was changed",
                "provision lock RECIPE, if the index really moved",
            ),
        )
    if any(
        word in lowered for word in ("failed to fetch", "error sending request", "timed out", "dns error", "connect")
    ):
        return NetworkError(
            f"{what}: the package index did not answer",
            found=_tail(text),
            hints=("check the network, proxy and index settings, then run the same command again",),
        )
    if "no space left" in lowered or os.strerror(28).lower() in lowered:
        return ResolutionError(f"{what}: the disk is full", found=_tail(text), hints=("free some space and run again",))
    return ResolutionError(what, found=_tail(text))


def _tail(text: str, limit: int = 30) -> str:
    lines = text.strip().splitlines()
    return "\n".join(lines[-limit:])
