"""A real server without a GPU: started by ``provision serve`` from a small recipe, read by ``provision doctor``."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from provisioner.doctor.logs import read_log
from provisioner.environment.state import write_receipt
from tests.support.cpu_server import VLLM, CpuEnvironment, cpu_environment
from tests.support.environments import make_receipt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
REPOSITORY = Path(__file__).parents[2]
START_SECONDS = 900
RECIPE = """\
schema = 1
title = "A tiny model on a CPU"

[python]
preferred = "3.12"

[build]
release = "0.32.0"

[expect]

[serve]
port = {port}

[[serve.variable]]
name = "VLLM_CPU_KVCACHE_SPACE"
value = "1"
why = "Gigabytes for the cache."

[[serve.flag]]
name = "--served-model-name"
value = "tiny"
why = "The name in the tests."

[[serve.flag]]
name = "--max-model-len"
value = "4096"
why = "Enough for a test."

[[serve.flag]]
name = "--dtype"
value = "bfloat16"
why = "What the model is in."

[[serve.flag]]
name = "--enforce-eager"
why = "No compilation on a CPU."
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuEnvironment]:
    """The CPU build, with a receipt for as long as the tests run."""
    found = cpu_environment()
    state = found.venv / ".provision"
    state.mkdir(exist_ok=True)
    write_receipt(state, make_receipt(version=f"{VLLM}+cpu", recipe="cpu", patches=()))
    yield found
    (state / "receipt.json").unlink()


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, int]:
    import socket

    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = int(trial.getsockname()[1])
    (tmp_path / "cpu.toml").write_text(RECIPE.format(port=port), encoding="utf-8")
    return tmp_path, port


def command(place: tuple[Path, int], environment: CpuEnvironment, *words: str) -> list[str]:
    base = [sys.executable, "-m", "provisioner", "serve", str(place[0] / "cpu.toml"), "--venv", str(environment.venv)]
    return [*base, "--model", str(environment.model), *words]


def environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "VLLM_NO_USAGE_STATS": "1"}


@contextmanager
def serving(words: list[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, env=environ(), cwd=log.parent)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=60)


def ask(url: str, key: str | None, body: dict | None = None) -> tuple[int, dict]:
    request = urllib.request.Request(url, data=json.dumps(body).encode() if body else None)
    request.add_header("Content-Type", "application/json")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text else {}
    except urllib.error.HTTPError as error:
        return error.code, {}


def await_health(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        try:
            if ask(f"http://127.0.0.1:{port}/health", None)[0] == 200:
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text(errors="replace")[-4000:])


def run_doctor(environment: CpuEnvironment, log: Path) -> tuple[int, dict]:
    words = [
        sys.executable,
        "-m",
        "provisioner",
        "doctor",
        "--venv",
        str(environment.venv),
        "--log",
        str(log),
        "--json",
    ]
    clean = {name: value for name, value in environ().items() if name not in {"VIRTUAL_ENV"}}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=clean, cwd=log.parent)
    return done.returncode, json.loads(done.stdout)


def test_a_server_from_start_to_diagnosis(place, environment, tmp_path):
    port, key_file, log = place[1], tmp_path / "key", tmp_path / "server.log"
    words = command(place, environment, "--generate-key", "--key-file", str(key_file))
    with serving(words, log) as process:
        await_health(port, process, log)
        key = key_file.read_text().strip()
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello " * 200}], "max_tokens": 8}
        assert ask(url, None, body)[0] == 401
        for _ in range(2):
            status, answer = ask(url, key, body)
            assert (status, answer["usage"]["completion_tokens"]) == (200, 8)

        code, report = run_doctor(environment, log)
        checks = {check["id"]: check for check in report["checks"]}
        servers = checks["servers"]["looked_at"]
        assert f"{process.pid} at http://127.0.0.1:{port}" in servers
        assert "of tokens found" in checks["metrics"]["looked_at"]
        assert checks["log"]["outcome"] == "passed", checks["log"]
        assert checks["environment"]["outcome"] == "passed", checks["environment"]
        assert code in {0, 1}

        refused = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=environ())
        assert refused.returncode == 5
        assert f"port {port} is taken" in refused.stderr
        assert f"by process {process.pid} of user" in refused.stderr
        assert key not in refused.stderr + refused.stdout + log.read_text(errors="replace")


def test_an_argument_that_the_server_does_not_know(place, environment, tmp_path):
    log = tmp_path / "server.log"
    with serving(command(place, environment, "--", "--max-modle-len", "1"), log) as process:
        assert process.wait(timeout=START_SECONDS) != 0
    assert "bad-argument" in {finding.id for finding in read_log(log.read_text(errors="replace").splitlines())}
