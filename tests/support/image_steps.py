"""Carries a Containerfile out without an engine: every instruction in order, in a folder per stage, by chroot.

The stages have this machine's system and Python bound into them, and folders of their own for all that an image holds.
A step has no network. Needs a kernel that lets its user make namespaces.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib64", "dev", "proc")
_SETTINGS = ("passwd", "group", "shadow", "gshadow", "login.defs", "ld.so.cache", "nsswitch.conf")
_PYTHON = Path(sys.base_prefix).resolve()
_ASIDE = frozenset({"LABEL", "EXPOSE", "VOLUME", "HEALTHCHECK", "ENTRYPOINT"})


@dataclass(kw_only=True)
class Stage:
    """One stage on disk, and what was said of it so far."""

    name: str
    root: Path
    steps: list[tuple[str, str]]
    variables: dict[str, str] = field(default_factory=lambda: {"PATH": f"{_PYTHON}/bin:/usr/sbin:/usr/bin:/bin"})
    labels: dict[str, str] = field(default_factory=dict)
    user: int = 0
    entry: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def run(
        self, words: Sequence[str], *, binds: Sequence[tuple[Path, str]] = ()
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command in the stage as its user; ``binds`` are files that lie there meanwhile."""
        who = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups"] if self.user else []
        given = [f"{name}={value}" for name, value in self.variables.items()]
        inside = shlex.join(["chroot", str(self.root), *who, "env", "-i", *given, *words])
        script = "\n".join(["set -e", *self._mounts(binds), f"exec {inside}"])
        words = [*namespace_words(), "--mount", "sh", "-c", script]
        return subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)

    def _mounts(self, binds: Sequence[tuple[Path, str]]) -> list[str]:
        system = [Path("/") / name for name in _SYSTEM if (Path("/") / name).is_dir()]
        places = [path for path in system if not path.is_symlink()]
        places += [] if _PYTHON.is_relative_to("/usr") else [_PYTHON]
        pairs = [(path, str(path)) for path in places] + list(binds)
        lines = []
        for source, target in pairs:
            place = self.root / target.lstrip("/")
            kind = f"mkdir -p {place}" if source.is_dir() else f"mkdir -p {place.parent}; touch {place}"
            lines += [kind, f"mount --rbind {shlex.quote(str(source))} {shlex.quote(str(place))}"]
        return lines


def namespace_words() -> list[str]:
    """The words before a command that gives it a network of its own, without any way out; the user is root there."""
    return ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--net"]


def read_stages(text: str, folder: Path) -> list[Stage]:
    """The stages of a Containerfile, prepared under ``folder`` and not carried out."""
    stages: list[Stage] = []
    for line in text.replace("\\\n", " ").splitlines():
        name, _, value = line.strip().partition(" ")
        if name == "FROM":
            called = value.partition(" AS ")[2] or "image"
            stages.append(Stage(name=called, root=_prepare(folder / called), steps=[]))
        elif name and not name.startswith("#"):
            stages[-1].steps.append((name, value.strip()))
    return stages


def carry_out(stage: Stage, context: Path, others: Sequence[Stage] = ()) -> None:
    """Every instruction of a stage, in order. A step that fails, or an instruction that is not known, is an error."""
    for name, value in stage.steps:
        if name == "RUN":
            _run(stage, value, context)
        elif name == "COPY":
            _move(stage, value, others)
        elif name == "ENV":
            words = (Template(word).substitute(stage.variables) for word in shlex.split(value))
            stage.variables |= dict(word.split("=", 1) for word in words)
        elif name == "USER":
            stage.user = int(value)
        else:
            assert name in _ASIDE, name
            _note(stage, name, value)


def _note(stage: Stage, name: str, value: str) -> None:
    if name == "LABEL":
        (word,) = shlex.split(value)
        stage.labels |= dict([word.split("=", 1)])
    elif name == "ENTRYPOINT":
        stage.entry = json.loads(value)
    elif name == "HEALTHCHECK":
        stage.health = json.loads(value.partition(" CMD ")[2])
    elif name == "VOLUME":
        (stage.root / value.lstrip("/")).mkdir()


def _run(stage: Stage, value: str, context: Path) -> None:
    binds = []
    while found := re.match(r"--mount=type=bind,source=(\S+),target=(\S+)\s+", value):
        binds.append((context / found[1], found[2]))
        value = value[found.end() :]
    assert not value.startswith("--"), value
    done = stage.run(["sh", "-c", value], binds=binds)
    assert done.returncode == 0, done.stderr


def _move(stage: Stage, value: str, others: Sequence[Stage]) -> None:
    """A copy between stages whose source nobody needs any more."""
    found = re.fullmatch(r"--from=(\S+) (\S+) (\S+)", value)
    assert found is not None, value
    (source,) = (other for other in others if other.name == found[1])
    target = stage.root / found[3].lstrip("/")
    if target.exists():
        shutil.rmtree(target)
    (source.root / found[2].lstrip("/")).rename(target)


def _prepare(root: Path) -> Path:
    for name in ("etc", "home", "mnt", "opt", "root", "run", "tmp", "var"):
        (root / name).mkdir(parents=True)
    root.chmod(0o755)
    (root / "tmp").chmod(0o1777)
    for name in _SETTINGS:
        source = Path("/etc") / name
        if os.access(source, os.R_OK):
            shutil.copy2(source, root / "etc" / name)
    for name in _SYSTEM:
        source = Path("/") / name
        if source.is_symlink():
            (root / name).symlink_to(source.readlink())
    return root
