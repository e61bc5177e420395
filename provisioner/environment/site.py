"""What is installed in an environment, found without importing any of it."""

import ast
import shlex
import subprocess
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from provisioner.errors import EnvironmentConflictError, InvalidReceiptError
from provisioner.loading import load_json
from provisioner.records import dataclass
from provisioner.transaction.folders import canonical
from provisioner.wheels.record import Record, parse_record

STATE_FOLDER = ".provision"
_SENTINEL = "provision-site:"
_TIMEOUT_SECONDS = 30
# One short process; -I keeps the user's own PYTHON* settings and the current folder out of the answer. A .pth file may
# print, so the answer follows a sentinel. find_spec of a top-level name does not import it. json and sysconfig would
# double the time: the answer is a literal, and in an environment of CPython the folders follow from the prefix.
_PROBE = f"""
import sys
from importlib.util import find_spec
spec = find_spec(sys.argv[1])
where = (spec.origin or list(spec.submodule_search_locations or [None])[0]) if spec else None
if sys.prefix != sys.base_prefix and sys.implementation.name == "cpython" and not sys.abiflags:
    name = "python%d.%d/site-packages" % sys.version_info[:2]
    pure, plat = sys.prefix + "/lib/" + name, sys.prefix + "/" + sys.platlibdir + "/" + name
else:
    from sysconfig import get_path
    pure, plat = get_path("purelib"), get_path("platlib")
print({_SENTINEL!r} + ascii((tuple(sys.version_info[:3]), sys.prefix, sys.base_prefix, pure, plat, where)))
"""


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """A Python as it describes itself: version, the prefixes, where packages go, and what an import name leads to."""

    executable: Path
    version: tuple[int, int, int]
    prefix: Path
    base_prefix: Path
    site_packages: tuple[Path, ...]
    origin: Path | None


@dataclass(frozen=True, kw_only=True)
class Site:
    """One installed distribution: where it lies, which version it says it is, and its RECORD.

    ``prefix`` and ``interpreter`` are None for a bare ``--target`` folder. Installers rewrite RECORD; the rows of
    shipped files keep the wheel's digests.
    """

    distribution: str
    version: Version
    site_packages: Path
    dist_info: Path
    record: Record
    state_dir: Path
    prefix: Path | None
    interpreter: Interpreter | None

    @property
    def python(self) -> str | None:
        """Version of the interpreter, as text."""
        return ".".join(map(str, self.interpreter.version)) if self.interpreter else None


def venv_python(venv: Path) -> Path:
    """The interpreter of a virtual environment. The link is not followed: that would leave the environment."""
    return venv / "bin" / "python"


def ask_interpreter(executable: Path, *, module: str) -> Interpreter:
    """Ask a Python where its packages lie and where ``module`` would be imported from (about 20 ms).

    Raises EnvironmentConflictError where the interpreter does not start or answer.
    """
    command = [str(executable), "-I", "-c", _PROBE, module]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentConflictError(
            "the environment's Python does not start",
            where=str(executable),
            found=str(error),
            hints=(f"{shlex.quote(str(executable))} -I -c pass",),
        ) from error
    _, found, text = answer.stdout.rpartition(_SENTINEL)
    if answer.returncode != 0 or not found:
        last = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        raise EnvironmentConflictError(
            "the environment's Python does not answer",
            where=str(executable),
            found=last,
            hints=(f"{shlex.quote(str(executable))} -I -c pass",),
        )
    version, prefix, base, pure, plat, origin = ast.literal_eval(text)
    return Interpreter(
        executable=executable,
        version=version,
        prefix=Path(prefix),
        base_prefix=Path(base),
        site_packages=tuple(dict.fromkeys((Path(pure), Path(plat)))),
        origin=Path(origin) if origin else None,
    )


def find_site(venv: Path, distribution: str = "vllm") -> Site:
    """The distribution installed in the virtual environment ``venv``.

    Raises EnvironmentConflictError where there is no environment, the distribution is missing, installed twice or
    editable, or where an import would take it from somewhere else.
    """
    python = venv_python(venv)
    if not python.exists():
        raise _no_environment(venv)
    interpreter = ask_interpreter(python, module=distribution.replace("-", "_"))
    if interpreter.prefix == interpreter.base_prefix and not (venv / "pyvenv.cfg").exists():
        raise EnvironmentConflictError(
            "this is a Python installation, not a virtual environment",
            where=str(venv),
            hints=(shlex.join(["provision", "patch", "diff", "--site-packages", str(interpreter.site_packages[0])]),),
        )
    found = [
        (folder, info) for folder in interpreter.site_packages for info in _distribution_folders(folder, distribution)
    ]
    folder, dist_info = _single(found, distribution, where=str(venv))
    _refuse_elsewhere(venv, folder)
    _refuse_editable(dist_info)
    _refuse_shadow(interpreter, folder)
    return _read_site(distribution, folder, dist_info, venv / STATE_FOLDER, prefix=venv, interpreter=interpreter)


def open_site_packages(folder: Path, distribution: str = "vllm") -> Site:
    """The distribution in a bare folder, such as ``pip install --target`` makes.

    Raises EnvironmentConflictError as :func:`find_site` does.
    """
    if not folder.is_dir():
        raise EnvironmentConflictError(
            "no such folder", where=str(folder), hints=(f"ls -ld {shlex.quote(str(folder.parent))}",)
        )
    found = [(folder, info) for info in _distribution_folders(folder, distribution)]
    folder, dist_info = _single(found, distribution, where=str(folder))
    _refuse_editable(dist_info)
    return _read_site(distribution, folder, dist_info, folder / STATE_FOLDER, prefix=None, interpreter=None)


def _no_environment(venv: Path) -> EnvironmentConflictError:
    """What stands there instead, and the command that goes on from there."""
    python, shown = venv_python(venv), shlex.quote(str(venv))
    if python.is_symlink():
        return EnvironmentConflictError(
            "the environment's Python is gone: the link leads nowhere",
            where=str(python),
            found=str(python.readlink()),
            hints=(f"rm -r {shown}, then make it again: provision up RECIPE --venv {shown}",),
        )
    if not venv.exists():
        return EnvironmentConflictError("there is no such environment", where=str(venv), hints=("provision status",))
    if any(venv.glob("*.dist-info")):
        return EnvironmentConflictError(
            "a folder of packages, not a virtual environment",
            where=str(venv),
            hints=(f"provision patch diff --site-packages {shown}",),
        )
    return EnvironmentConflictError(
        "not a virtual environment",
        where=str(venv),
        expected=str(python),
        hints=(f"ls -la {shown}", "provision status"),
    )


def _distribution_folders(folder: Path, distribution: str) -> list[Path]:
    wanted = canonicalize_name(distribution)
    return [
        info
        for info in sorted(folder.glob("*.dist-info"))
        if canonicalize_name(info.name.removesuffix(".dist-info").rpartition("-")[0]) == wanted
    ]


def _single(found: list[tuple[Path, Path]], distribution: str, *, where: str) -> tuple[Path, Path]:
    if not found:
        raise EnvironmentConflictError(
            f"{distribution} is not installed here", where=where, hints=_install_hints(Path(where), distribution)
        )
    if len(found) > 1:
        names = ", ".join(info.name for _, info in found)
        hints = (f"ls -d {' '.join(shlex.quote(str(info)) for _, info in found)}", "remove the folder of the older one")
        raise EnvironmentConflictError(
            f"{distribution} is installed more than once", where=where, found=names, hints=hints
        )
    return found[0]


def _install_hints(place: Path, distribution: str) -> tuple[str, ...]:
    shown = shlex.quote(str(place))
    if (place / STATE_FOLDER).is_dir() and distribution == "vllm":
        return (f"provision up RECIPE --venv {shown}",)
    if venv_python(place).exists():
        return (f"uv pip install --python {shown} {distribution}", f"uv pip list --python {shown}")
    return (f"ls -d {shown}/*.dist-info",)


def _refuse_elsewhere(venv: Path, folder: Path) -> None:
    if not canonical(folder).is_relative_to(canonical(venv)):
        raise EnvironmentConflictError(
            "a link leads from the environment to packages elsewhere",
            where=str(folder),
            expected=f"a folder under {canonical(venv)}",
            found=str(canonical(folder)),
            hints=(f"name the folder itself: provision patch check --site-packages {shlex.quote(str(folder))}",),
        )


def _refuse_editable(dist_info: Path) -> None:
    try:
        direct = load_json((dist_info / "direct_url.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise InvalidReceiptError(f"unreadable: {error}", where=str(dist_info / "direct_url.json")) from error
    if not isinstance(direct, dict):
        raise InvalidReceiptError("not a JSON object", where=str(dist_info / "direct_url.json"))
    if direct.get("dir_info", {}).get("editable"):
        raise EnvironmentConflictError(
            "an editable install is a source checkout, not a wheel; its files cannot be proven",
            where=str(dist_info),
            found=direct.get("url"),
            hints=("provision up RECIPE --venv DIR, which makes an environment of the wheel",),
        )


def _refuse_shadow(interpreter: Interpreter, folder: Path) -> None:
    origin = interpreter.origin
    if origin is not None and not origin.is_relative_to(folder):
        raise EnvironmentConflictError(
            "an import would take the package from another place",
            where=str(folder),
            expected=f"a file under {folder}",
            found=str(origin),
            hints=(f"ls -ld {shlex.quote(str(origin))}", "remove it, or the .pth file or setting that leads there"),
        )


def _read_site(
    distribution: str,
    folder: Path,
    dist_info: Path,
    state_dir: Path,
    *,
    prefix: Path | None,
    interpreter: Interpreter | None,
) -> Site:
    record_file = dist_info / "RECORD"
    try:
        text = record_file.read_text(encoding="utf-8")
    except OSError as error:
        raise EnvironmentConflictError(
            "the RECORD of the installed files cannot be read, so nothing can be proven",
            where=str(record_file),
            found=error.strerror,
            hints=(f"ls -l {shlex.quote(str(record_file))}",),
        ) from error
    return Site(
        distribution=distribution,
        version=_version_of(dist_info),
        site_packages=folder,
        dist_info=dist_info,
        record=parse_record(text, where=str(record_file)),
        state_dir=state_dir,
        prefix=prefix,
        interpreter=interpreter,
    )


def _version_of(dist_info: Path) -> Version:
    text = dist_info.name.removesuffix(".dist-info").rpartition("-")[2]
    try:
        return Version(text)
    except InvalidVersion as error:
        raise InvalidReceiptError(f"{text!r} is not a version", where=str(dist_info)) from error
