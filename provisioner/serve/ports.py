"""Who owns a TCP port: the kernel's socket table, read as text, and the processes that hold its sockets."""

import errno
import os
import pwd
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from provisioner.serve.findings import Finding, Severity, Subject
from provisioner.serve.launch import redact

_LISTENING = "0A"
_PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class Listener:
    """A listening socket: port, owner's user id, and the inode by which its process is found."""

    port: int
    uid: int
    inode: int


@dataclass(frozen=True, kw_only=True)
class PortOwner:
    """The process that listens, as far as this user may know; ``pid`` is None for another user's process."""

    uid: int
    user: str
    pid: int | None
    command: str


def parse_socket_table(text: str) -> tuple[Listener, ...]:
    """The listening sockets in the text of ``/proc/net/tcp`` or ``tcp6``; other lines are left out."""
    return tuple(_listeners(text.splitlines()[1:]))


def find_port_owner(port: int, *, proc: Path = _PROC) -> PortOwner | None:
    """The owner of a listening socket on ``port``; None where nothing listens, or not in this network namespace."""
    listeners = [listener for listener in _read_listeners(proc) if listener.port == port]
    if not listeners:
        return None
    for listener in listeners:
        pid = _find_holder(listener.inode, proc)
        if pid is not None:
            return PortOwner(uid=listener.uid, user=_user_name(listener.uid), pid=pid, command=read_command(pid, proc))
    uid = listeners[0].uid
    return PortOwner(uid=uid, user=_user_name(uid), pid=None, command="")


def judge_port(host: str, port: int, *, proc: Path = _PROC) -> tuple[Finding, ...]:
    """A refusal where a server could not listen on ``host``:``port``, with the owner's name where it is taken."""
    failure = _try_to_listen(host, port)
    if failure is None:
        return ()
    if failure.errno != errno.EADDRINUSE:
        what = f"a server cannot listen on {host or 'every address'}, port {port}"
        return (_refusal(what, (failure.strerror or str(failure),), ("--host HOST", "--port PORT")),)
    owner = find_port_owner(port, proc=proc)
    if owner is None:
        evidence = "its owner is not visible from here (another network namespace or container)"
        return (_refusal(f"port {port} is taken", (evidence,), (f"ss -ltnp 'sport = :{port}'", "--port PORT")),)
    if owner.pid is None:
        evidence = f"by a process of user {owner.user}"
        return (_refusal(f"port {port} is taken", (evidence,), (f"sudo ss -ltnp 'sport = :{port}'", "--port PORT")),)
    evidence = f"by process {owner.pid} of user {owner.user}: {owner.command}"
    return (_refusal(f"port {port} is taken", (evidence,), (f"kill {owner.pid}", "--port PORT")),)


def read_command(pid: int, proc: Path = _PROC) -> str:
    """The command line of a process, with any key in it redacted; empty where it may not be read."""
    try:
        words = (proc / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    texts = [word.decode("utf-8", "replace") for word in words]
    return " ".join([texts[0], *redact(texts[1:])])


def _refusal(what: str, evidence: tuple[str, ...], act: tuple[str, ...]) -> Finding:
    return Finding(
        id="port", severity=Severity.ERROR, subject=Subject.ENVIRONMENT, what=what, evidence=evidence, next=act
    )


def _listeners(lines: Iterable[str]) -> Iterator[Listener]:
    for line in lines:
        fields = line.split()
        if len(fields) > 9 and fields[3] == _LISTENING:
            yield Listener(port=int(fields[1].rpartition(":")[2], 16), uid=int(fields[7]), inode=int(fields[9]))


def _read_listeners(proc: Path) -> tuple[Listener, ...]:
    found: list[Listener] = []
    for name in ("tcp", "tcp6"):
        try:
            found += parse_socket_table((proc / "net" / name).read_text(encoding="ascii"))
        except OSError:
            continue
    return tuple(found)


def _find_holder(inode: int, proc: Path) -> int | None:
    wanted = f"socket:[{inode}]"
    for folder in proc.iterdir():
        if folder.name.isdigit() and _holds(folder / "fd", wanted):
            return int(folder.name)
    return None


def _holds(handles: Path, wanted: str) -> bool:
    # Processes end while they are looked at, and those of other users may not be looked at.
    try:
        names = os.listdir(handles)  # noqa: PTH208 - names are all that is needed, and there are many
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(f"{handles}/{name}") == wanted:  # noqa: PTH115 - a socket's link is no path
                return True
        except OSError:
            continue
    return False


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _try_to_listen(host: str, port: int) -> OSError | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            trial.listen(1)
    except OSError as error:
        return error
    return None
