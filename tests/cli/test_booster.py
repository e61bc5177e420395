"""``provision booster`` as systemd and a user run it: signals, signs of life, exit codes."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from provisioner.cli.main import main
from tests.support.openai_server import Behaviour, serve_in_thread


@contextmanager
def booster(upstream: str, *more: str, **environ: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A booster as a process of its own, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "provisioner", "booster", "--upstream", upstream, "--port", "0", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        match = re.match(r"listening on (http://\S+), forwarding to ", line)
        assert match, line + process.stderr.read()
        yield process, match[1]
    finally:
        process.kill()
        process.communicate(timeout=20)


def start_chat(url: str, tokens: int) -> "socket.socket":
    """A streamed chat whose answer has begun."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    body = b'{"messages": [{"role": "user", "content": "x"}], "stream": true, "max_tokens": %d}' % tokens
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


def read_all(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_stopped_by_systemd_it_lets_answers_end_and_tells_how_it_is(tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener,
        serve_in_thread(Behaviour(tokens_per_second=40.0)) as fake,
    ):
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(20)
        with booster(fake.url, NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="100000") as (process, url):
            told = [listener.recv(200).decode() for _ in range(3)]
            assert any(text.startswith("READY=1\nSTATUS=forwarding to ") for text in told)
            assert "WATCHDOG=1" in told
            chat = start_chat(url, tokens=40)
            process.send_signal(signal.SIGTERM)
            assert read_all(chat).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert process.wait(timeout=20) == 0
            listener.setblocking(False)
            assert "STOPPING=1" in drain(listener)


def drain(listener: socket.socket) -> list[str]:
    texts: list[str] = []
    while True:
        try:
            texts.append(listener.recv(200).decode())
        except BlockingIOError:
            return texts


@pytest.mark.parametrize("how", ["grace", "second signal"])
def test_an_answer_that_does_not_end_is_cut(how: str) -> None:
    with serve_in_thread(Behaviour(tokens_per_second=1.0)) as fake:
        with booster(fake.url, "--grace", "0.2" if how == "grace" else "600") as (process, url):
            chat = start_chat(url, tokens=10_000)
            process.send_signal(signal.SIGINT)
            if how == "second signal":
                process.send_signal(signal.SIGTERM)
            assert b"[DONE]" not in read_all(chat)
            assert process.wait(timeout=20) == 0
        assert process.stderr is not None


def test_its_pages_are_there_and_the_server_behind_it() -> None:
    with serve_in_thread() as fake, booster(fake.url) as (_, url):
        for path, expected in (("/booster/stats", b"provision/booster-stats/1"), ("/v1/models", b"tiny")):
            with urllib.request.urlopen(url + path, timeout=20) as answer:
                assert expected in answer.read()


def test_it_listens_on_loopback_unless_told_otherwise() -> None:
    with booster("http://127.0.0.1:1") as (_, url):
        assert url.startswith("http://127.0.0.1:")
    with booster("http://127.0.0.1:1", "--host", "localhost") as (_, url):
        assert url.startswith("http://localhost:")


def test_an_address_that_others_reach_is_warned_of() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "provisioner", "booster", "--host", "203.0.113.1", "--port", "1"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert process.returncode == 5
    assert "warning: 203.0.113.1 can be reached by others" in process.stderr
    assert "error[cannot-listen]" in process.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--upstream", "nonsense"), 2),
        (("--upstream", "http://127.0.0.1:8013", "--port", "8013"), 2),
        (("--port", "70000"), 2),
        (("--help",), 0),
    ],
)
def test_exit_codes(arguments: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["booster", *arguments]) == code
    if not code:
        assert "Example:" in capsys.readouterr().out
