"""Running servers: found in /proc, judged by the rules of a start."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.version import Version

from provisioner.doctor.builds import Build, read_build
from provisioner.doctor.processes import Server, find_servers, judge_origin, judge_server, parse_command
from provisioner.gpu.devices import read_inventory
from provisioner.serve.findings import Severity
from provisioner.serve.rules import GDN_PATCH
from tests.support.environments import make_environment
from tests.support.fake_nvml import FakeCard, FakeNvml

TWO_CARDS = read_inventory(FakeNvml(cards=[FakeCard(), FakeCard(uuid="GPU-2", bus="00000000:83:00.0")]))
TRIO = "--enable-prefix-caching --async-scheduling --max-num-batched-tokens 8192 --max-num-scheduled-tokens 8192"


def make_server(tmp_path: Path, words: str = "", **changes) -> Server:
    values = {
        "pid": 7,
        "pids": (7,),
        "program": "/v/bin/vllm",
        "arguments": tuple(words.split()),
        "environ": {"VLLM_API_KEY": "k"},
        "cwd": tmp_path,
    }
    return Server(**(values | changes))


def ids(server: Server, **situation) -> list[str]:
    values = {"inventory": None, "memory_vendor": None} | situation
    return [finding.id for finding in judge_server(server, **values)]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("/v/bin/python3", "/v/bin/vllm", "serve", "m", "--port", "1"), ("/v/bin/vllm", ("m", "--port", "1"))),
        (("vllm", "serve", "m"), ("vllm", ("m",))),
        (("/v/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"),
         ("/v/bin/python", ("--model", "m"))),
        (("timeout", "60", "/v/bin/vllm", "serve", "m"), None),
        (("grep", "vllm", "serve.log"), None),
        (("/v/bin/vllm", "bench"), None),
        (("",), None),
    ],
)  # fmt: skip
def test_which_commands_are_servers(words, command):
    assert parse_command(words) == command


def test_a_server_is_found_with_its_environment_and_folder(tmp_path):
    program = tmp_path / "vllm"
    program.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n", encoding="utf-8")
    program.chmod(0o755)
    process = subprocess.Popen(
        [str(program), "serve", "m", "--port", "4321", "--host", "0.0.0.0"],
        env={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"},
        cwd=tmp_path,
    )
    try:
        deadline = time.monotonic() + 10
        while not (found := [server for server in find_servers() if server.pid == process.pid]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait(timeout=10)
    (server,) = found
    assert (server.program, server.port, server.cwd) == (str(program), 4321, tmp_path)
    assert server.address == "http://127.0.0.1:4321"
    assert server.environ == {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}


def test_this_process_is_no_server():
    assert os.getpid() not in {server.pid for server in find_servers()}


def test_what_runs_well_shows_nothing(tmp_path):
    server = make_server(tmp_path, TRIO, environ={"VLLM_API_KEY": "k", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert ids(server, inventory=TWO_CARDS) == []


def test_the_rules_hold_for_what_already_runs(tmp_path):
    server = make_server(tmp_path, "m --enable-prefix-caching --max_num_batched_tokens=32000")
    assert ids(server, inventory=TWO_CARDS, memory_vendor="samsung") == [
        "batched-tokens",
        "prefix-trio",
        "expandable-segments",
        "device-order",
    ]
    finding = next(judge_server(server, inventory=None, memory_vendor=None))
    assert finding.what.startswith("server 7: ")


def test_a_server_whose_environment_is_closed_is_judged_by_its_arguments_alone(tmp_path):
    server = make_server(tmp_path, "m --prefix-match-unit 512", environ=None, cwd=None)
    assert ids(server, inventory=TWO_CARDS, memory_vendor="samsung") == ["prefix-match-unit"]


def test_a_server_in_the_wrong_folder(tmp_path):
    (tmp_path / "vllm").mkdir()
    assert ids(make_server(tmp_path)) == ["working-directory"]
    assert ids(make_server(tmp_path, cwd=Path("/v/lib/python3.12/site-packages/vllm"))) == ["working-directory"]


@pytest.mark.parametrize(
    ("words", "environ", "found"),
    [
        ("--host 0.0.0.0", {}, ["no-key"]),
        ("", {}, ["no-key"]),
        ("--host 127.0.0.1", {}, []),
        ("--host 0.0.0.0", {"VLLM_API_KEY": "k"}, []),
        ("--host 0.0.0.0 --api-key k", {}, ["key-in-arguments"]),
    ],
)
def test_a_server_without_a_key(tmp_path, words, environ, found):
    assert ids(make_server(tmp_path, words, environ=environ)) == found


MTP = 'm --speculative-config {"method":"mtp","num_speculative_tokens":3}'


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (Build(version=Version("0.27.1"), patches=frozenset()), ["gdn-patch"]),
        (Build(version=Version("0.27.1"), patches=frozenset({GDN_PATCH})), []),
        (Build(version=Version("0.27.1"), patches=None), []),
        (Build(version=Version("0.32.0"), patches=frozenset()), []),
        (None, []),
    ],
)
def test_a_server_that_is_not_the_patched_build(tmp_path, build, found):
    assert ids(make_server(tmp_path, MTP), build=build) == found


def test_what_build_an_environment_holds(tmp_path):
    packages = make_environment(tmp_path / "venv")
    assert read_build(tmp_path / "venv") == Build(
        version=Version("0.27.1"), patches=frozenset({GDN_PATCH, "sm80-cpu-repack"})
    )
    assert read_build(tmp_path) is None
    # Without a receipt the files are asked; these are no state of the patch.
    (tmp_path / "venv" / ".provision" / "receipt.json").unlink()
    assert (packages / "vllm").is_dir()
    assert read_build(tmp_path / "venv") == Build(version=Version("0.27.1"), patches=None)


def test_another_environment_that_serves(tmp_path):
    assert list(judge_origin(make_server(tmp_path), Path("/v"))) == []
    (finding,) = judge_origin(make_server(tmp_path), Path("/other"))
    assert finding.severity is Severity.WARNING
    assert finding.next[0] == "provision doctor --venv /v"
