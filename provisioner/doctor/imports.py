"""Which vllm would really be imported, and what stands around it that could be taken for it."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from provisioner.errors import EnvironmentConflictError
from provisioner.serve.findings import Finding, Severity, Subject

_SECONDS = 30
_SENTINEL = "provision-import:"
# Not -I: this is the question as the user's own shell would put it, with its folder and PYTHON variables.
_PROBE = f"""
import importlib.util, json, os, sys
name = sys.argv[1]
spec = importlib.util.find_spec(name)
where = (spec.origin or list(spec.submodule_search_locations or [None])[0]) if spec else None
places = [os.path.abspath(os.path.join(folder, name)) for folder in sys.path]
found = [place for place in places if os.path.isdir(place)]
found += [place + ".py" for place in places if os.path.isfile(place + ".py")]
print({_SENTINEL!r} + json.dumps({{"origin": where, "found": found, "base": sys.base_prefix}}))
"""


@dataclass(frozen=True, kw_only=True)
class ImportView:
    """What an import of the package would take (``origin``), every candidate on the path, and the command on PATH."""

    origin: Path | None
    candidates: tuple[Path, ...]
    command: Path | None


@dataclass(frozen=True, kw_only=True)
class VenvView:
    """What a virtual environment says of itself, in files alone.

    ``base`` is pyvenv.cfg's ``home``; ``shebang`` the interpreter that ``bin/vllm`` names; ``packages`` every folder of
    site-packages in it that holds the package.
    """

    venv: Path
    base: Path | None
    version: str | None
    shebang: Path | None
    packages: tuple[Path, ...]


def view_imports(python: Path, package: str, *, cwd: Path, environ: Mapping[str, str]) -> ImportView:
    """Ask the environment's Python, from ``cwd`` with ``environ`` (about 30 ms); the package is not imported.

    Raises EnvironmentConflictError where the interpreter does not start or answer.
    """
    try:
        done = subprocess.run(
            [str(python), "-c", _PROBE, package],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            cwd=cwd,
            env=dict(environ),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentConflictError(
            "the environment's Python does not start", where=str(python), found=str(error)
        ) from error
    _, found, text = done.stdout.rpartition(_SENTINEL)
    if not found:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise EnvironmentConflictError("the environment's Python does not answer", where=str(python), found=last)
    values = json.loads(text)
    command = shutil.which("vllm", path=environ.get("PATH", os.defpath))
    return ImportView(
        origin=Path(values["origin"]) if values["origin"] else None,
        candidates=tuple(dict.fromkeys(Path(path) for path in values["found"])),
        command=Path(command) if command else None,
    )


def view_venv(venv: Path, package: str) -> VenvView:
    """Read an environment's own files; nothing is raised for what is missing."""
    settings = _read_settings(venv / "pyvenv.cfg")
    home = settings.get("home")
    return VenvView(
        venv=venv,
        base=Path(home) if home else None,
        version=settings.get("version_info") or settings.get("version"),
        shebang=_read_shebang(venv / "bin" / "vllm"),
        packages=_find_packages(venv, package),
    )


def judge_imports(view: ImportView, site_packages: Path, package: str) -> Iterator[Finding]:
    """Findings where an import, or the command, would take another package than the one in ``site_packages``. Pure."""
    if view.origin is not None and not view.origin.is_relative_to(site_packages):
        yield Finding(
            id="shadowed",
            severity=Severity.ERROR,
            subject=Subject.ENVIRONMENT,
            what=f"an import of {package} from here takes another one than the environment's",
            evidence=(f"imported: {view.origin}", f"the environment's: {site_packages / package}"),
            next=("unset PYTHONPATH PYTHONHOME", "cd ~"),
        )
    decoys = [path for path in view.candidates if not path.is_relative_to(site_packages)]
    if decoys:
        yield Finding(
            id="decoy",
            severity=Severity.WARNING,
            subject=Subject.ENVIRONMENT,
            what=f"another {package} lies on the import path; it can be taken for the installed one",
            evidence=tuple(map(str, decoys)),
            next=("cd ~", "unset PYTHONPATH", "remove or rename it"),
        )
    prefix = site_packages.parents[2]
    if view.command is not None and not view.command.is_relative_to(prefix):
        yield Finding(
            id="command-elsewhere",
            severity=Severity.NOTE,
            subject=Subject.ENVIRONMENT,
            what="the vllm command on PATH is another environment's, which is not the one that was looked at",
            evidence=(str(view.command), f"looked at: {prefix / 'bin' / 'vllm'}"),
            next=("provision serve RECIPE",),
        )


def judge_venv(view: VenvView, *, running: str | None, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Findings for an environment that is stale or holds a package twice. ``running`` is its Python's real version."""
    if view.base is not None and not view.base.exists():
        yield _stale("the Python that the environment was made with is gone", f"home = {view.base}", view)
    if view.version and running and not _same_minor(view.version, running):
        evidence = f"made with {view.version}, runs {running}"
        yield _stale("the environment's Python is not the one it was made with", evidence, view)
    if view.shebang is not None and not _is_in(view.shebang, view.venv):
        evidence = f"{view.venv / 'bin' / 'vllm'} starts {view.shebang}"
        yield _stale("the vllm command starts another Python (the environment was moved or copied)", evidence, view)
    if len(view.packages) > 1:
        yield Finding(
            id="python-twice",
            severity=Severity.ERROR,
            subject=Subject.ENVIRONMENT,
            what="the environment holds the package for two Pythons; a patch in one is missing in the other",
            evidence=tuple(map(str, view.packages)),
            next=(f"remove {view.venv} and provision it again",),
        )
    active = environ.get("VIRTUAL_ENV")
    if active and Path(active).absolute() != view.venv:
        yield Finding(
            id="other-active",
            severity=Severity.NOTE,
            subject=Subject.ENVIRONMENT,
            what="another environment is active in this shell",
            evidence=(f"VIRTUAL_ENV={active}", f"looked at: {view.venv}"),
            next=("deactivate",),
        )


def _stale(what: str, evidence: str, view: VenvView) -> Finding:
    return Finding(
        id="stale-environment",
        severity=Severity.ERROR,
        subject=Subject.ENVIRONMENT,
        what=what,
        evidence=(evidence,),
        next=(f"remove {view.venv} and provision it again",),
    )


def _find_packages(venv: Path, package: str) -> tuple[Path, ...]:
    # lib64 is often a link to lib: the same folder twice.
    found = {path.parent.resolve(): path.parent for path in venv.glob(f"lib*/python*/site-packages/{package}")}
    return tuple(sorted(found.values()))


def _read_settings(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _read_shebang(path: Path) -> Path | None:
    """The interpreter that a console script names, also in the form for long paths (``exec`` on the second line)."""
    try:
        with path.open("rb") as stream:
            head = stream.read(2048).decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    if not head or not head[0].startswith("#!"):
        return None
    first = head[0][2:].strip()
    if first.endswith("/sh") and len(head) > 1 and "exec" in head[1]:
        parts = [part for part in head[1].replace("'", " ").replace('"', " ").split() if part.startswith("/")]
        return Path(parts[0]) if parts else None
    return Path(first.split()[0]) if first else None


def _is_in(path: Path, venv: Path) -> bool:
    return path.is_relative_to(venv) or path.parent.resolve() == (venv / "bin").resolve()


def _same_minor(one: str, other: str) -> bool:
    return one.split(".")[:2] == other.split(".")[:2]
