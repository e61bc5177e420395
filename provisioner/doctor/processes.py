"""vLLM servers that run on this machine, read from /proc, judged by the same rules as a start."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from provisioner.doctor.builds import Build
from provisioner.gpu.devices import Inventory
from provisioner.serve import flags, rules
from provisioner.serve.cards import judge_order
from provisioner.serve.findings import Finding, Severity, Subject
from provisioner.serve.flags import Origin
from provisioner.serve.launch import SHADOWING_NAMES, is_loopback

_PROC = Path("/proc")
_MODULE = "vllm.entrypoints.openai.api_server"
_DEFAULT_PORT = 8000


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server: ``program`` is its ``vllm`` (or python), ``arguments`` the words after ``serve``.

    ``environ`` and ``cwd`` are None where this user may not read them. ``pids`` are its numbers in this and inner
    process namespaces: a container counts its own.
    """

    pid: int
    pids: tuple[int, ...]
    program: str
    arguments: tuple[str, ...]
    environ: Mapping[str, str] | None
    cwd: Path | None

    @property
    def port(self) -> int:
        setting = flags.find(self.settings(), "--port")
        text = setting.value or "" if setting else ""
        return int(text) if text.isdigit() else _DEFAULT_PORT

    @property
    def host(self) -> str:
        setting = flags.find(self.settings(), "--host")
        return setting.value or "" if setting else ""

    @property
    def venv(self) -> Path | None:
        """The environment whose program it is, where the program is known by its whole path."""
        program = Path(self.program)
        return program.parent.parent if program.is_absolute() else None

    @property
    def address(self) -> str:
        """The URL at which this machine reaches it."""
        host = self.host if self.host not in {"", "0.0.0.0", "::"} else "127.0.0.1"
        return f"http://{host}:{self.port}"

    def settings(self) -> tuple[flags.Setting, ...]:
        """Its arguments, each name once."""
        return flags.override((), flags.parse_arguments(self.arguments, origin=Origin.EXTRA).settings)


def parse_command(words: tuple[str, ...]) -> tuple[str, tuple[str, ...]] | None:
    """Program and arguments of a vLLM server's command line; None for any other command. Pure."""
    # A script runs as its interpreter with the script's path. Any other word before it is a wrapper such as timeout(1).
    by_python = PurePosixPath(words[0]).name.startswith("python")
    rest = words[1:] if by_python else words
    if len(rest) > 1 and PurePosixPath(rest[0]).name == "vllm" and rest[1] == "serve":
        return rest[0], rest[2:]
    if by_python and rest[:2] == ("-m", _MODULE):
        return words[0], rest[2:]
    return None


def find_servers(proc: Path = _PROC) -> tuple[Server, ...]:
    """Every vLLM server whose command line can be read, by process number."""
    numbers = sorted(int(folder.name) for folder in proc.iterdir() if folder.name.isdigit())
    return tuple(server for number in numbers if (server := _read_server(proc / str(number))) is not None)


def judge_server(
    server: Server, *, inventory: Inventory | None, memory_vendor: str | None, build: Build | None = None
) -> Iterator[Finding]:
    """What is wrong with a running server: its arguments, environment, folder, and the build that it is."""
    who = f"server {server.pid}"
    situation = rules.Situation(
        settings=server.settings(),
        environment=server.environ or {},
        # Without its environment nothing can be said about its allocator.
        memory_vendor=memory_vendor if server.environ is not None else None,
        version=build.version if build else None,
        patches=build.patches if build else None,
    )
    for finding in rules.judge(situation):
        yield replace(finding, what=f"{who}: {finding.what}")
    if server.environ is not None and inventory is not None:
        yield from judge_order(inventory, server.environ, who=who)
    yield from _judge_folder(server, who)
    yield from _judge_key(server, who)


def judge_origin(server: Server, venv: Path) -> Iterator[Finding]:
    """A warning where another environment than ``venv`` serves: what was patched is not what runs."""
    if PurePosixPath(server.program).is_relative_to(venv):
        return
    its_venv = str(PurePosixPath(server.program).parent.parent)
    yield Finding(
        id="other-environment",
        severity=Severity.WARNING,
        subject=Subject.ENVIRONMENT,
        what=f"server {server.pid} runs another vLLM than the one that was looked at",
        evidence=(f"runs: {server.program}", f"looked at: {venv}"),
        next=(shlex.join(["provision", "doctor", "--venv", its_venv]), "provision serve RECIPE"),
    )


def _judge_folder(server: Server, who: str) -> Iterator[Finding]:
    if server.cwd is None:
        return
    inside = "site-packages" in server.cwd.parts
    hiding = sorted(name for name in SHADOWING_NAMES if (server.cwd / name).exists())
    if inside or hiding:
        yield Finding(
            id="working-directory",
            severity=Severity.WARNING,
            subject=Subject.COMMAND,
            what=f"{who} was started where other modules hide the installed ones (architecture failed to be inspected)",
            evidence=(f"{server.cwd}" + (f" has {', '.join(hiding)}" if hiding else ""),),
            next=("cd ~ && provision serve RECIPE",),
        )


def _judge_key(server: Server, who: str) -> Iterator[Finding]:
    given = flags.find(server.settings(), "--api-key") is not None
    if server.environ is None or given or server.environ.get("VLLM_API_KEY") or is_loopback(server.host):
        return
    yield Finding(
        id="no-key",
        severity=Severity.WARNING,
        subject=Subject.COMMAND,
        what=f"{who} listens on {server.host or 'every address'} without an API key",
        next=("provision serve RECIPE --generate-key",),
    )


def _read_server(folder: Path) -> Server | None:
    try:
        raw = (folder / "cmdline").read_bytes()
    except OSError:
        return None
    words = tuple(word.decode("utf-8", "replace") for word in raw.rstrip(b"\0").split(b"\0"))
    command = parse_command(words)
    if command is None:
        return None
    program, arguments = command
    return Server(
        pid=int(folder.name),
        pids=_read_pids(folder),
        program=program,
        arguments=arguments,
        environ=_read_environ(folder),
        cwd=_read_link(folder / "cwd"),
    )


def _read_pids(folder: Path) -> tuple[int, ...]:
    try:
        status = (folder / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        status = ""
    named = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [folder.name])
    return tuple(int(word) for word in named)


def _read_environ(folder: Path) -> dict[str, str] | None:
    try:
        raw = (folder / "environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.decode("utf-8", "replace").partition("=") for entry in raw.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def _read_link(path: Path) -> Path | None:
    try:
        return path.readlink()
    except OSError:
        return None
