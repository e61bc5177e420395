"""``provision serve`` as a process: what it executes, what it refuses, what it prints."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from provisioner.cli.main import main
from provisioner.documents.receipt import print_receipt
from tests.support.environments import PATCHED, make_environment, make_receipt, make_recorder, read_record

REPOSITORY = Path(__file__).parents[2]
RECIPE = """\
schema = 1
title = "A server for tests"

[python]
preferred = "3.12"

[build]
release = "0.27.1"

[expect]

[[patch]]
id = "pr50021-gdn-spec-bounds"
policy = "required"
why = "w"

[serve]
port = {port}

[[serve.variable]]
name = "PYTORCH_CUDA_ALLOC_CONF"
value = "expandable_segments:True"
why = "Fragmentation."

[[serve.flag]]
name = "--max-model-len"
value = "4096"
why = "Enough for a test."

[[serve.flag]]
name = "--enforce-eager"
why = "No graphs."
"""


@pytest.fixture
def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


@pytest.fixture
def place(tmp_path, free_port):
    make_environment(tmp_path / "venv", recipe="tiny")
    (tmp_path / "tiny.toml").write_text(RECIPE.format(port=free_port), encoding="utf-8")
    (tmp_path / "weights").mkdir()
    return tmp_path


def run(place: Path, *words: str, environ: dict[str, str] | None = None, cwd: Path | None = None):
    """Run the command; returns the finished process and what the fake server recorded, None if it was not started."""
    record = place / "record.json"
    record.unlink(missing_ok=True)
    done = subprocess.Popen(
        [sys.executable, "-m", "provisioner", "serve", str(place / "tiny.toml"), "--venv", str(place / "venv"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd or place,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "RECORD_TO": str(record), **(environ or {})},
    )
    stdout, stderr = done.communicate(timeout=60)
    found = read_record(record) if record.exists() else None
    return subprocess.CompletedProcess(done.args, done.returncode, stdout, stderr), found, done.pid


def test_the_process_becomes_the_server(place, free_port):
    done, record, pid = run(place, "--model", "weights", "--", "--seed", "7", "--max-model-len", "100")
    assert done.returncode == 0, done.stderr
    assert record is not None
    assert record["pid"] == pid
    assert record["argv"] == [
        str(place / "venv" / "bin" / "vllm"), "serve", str(place / "weights"), "--max-model-len", "100",
        "--enforce-eager", "--host", "127.0.0.1", "--port", str(free_port), "--seed", "7",
    ]  # fmt: skip
    assert record["environ"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert record["cwd"] == str(place)
    assert "PYTHONPATH" not in record["environ"]
    assert done.stdout == ""


def test_the_key_reaches_the_server_through_its_environment_alone(place):
    key = place / "key"
    words = ("--model", "weights", "--host", "0.0.0.0", "--generate-key", "--key-file", str(key))
    done, record, _ = run(place, *words)
    assert record is not None, done.stderr
    secret = key.read_text().strip()
    assert record["environ"]["VLLM_API_KEY"] == secret
    assert secret not in " ".join(record["argv"]) + done.stdout + done.stderr
    assert key.stat().st_mode & 0o777 == 0o600


def test_a_key_made_without_a_file_outlives_the_environment(place, own_home):
    _, record, _ = run(place, "--model", "weights", "--generate-key", environ={"PROVISION_HOME": str(own_home / "p")})
    assert record is not None
    assert record["environ"]["VLLM_API_KEY"] == (own_home / "p" / "keys" / "tiny").read_text().strip()


def test_everything_that_is_wrong_is_said_at_once_with_what_mends_it(place, free_port):
    packages = next((place / "venv").glob("lib/python*/site-packages"))
    (packages / PATCHED).write_text("other\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        done, record, _ = run(
            place, "--host", "0.0.0.0", "--", "--max-num-batched-tokens", "32000", "--api-key", "s3cret"
        )
    assert record is None
    assert done.returncode == 5
    ids = [line.partition("[")[2].partition("]")[0] for line in done.stderr.splitlines() if line.startswith("error[")]
    assert ids == ["files-changed", "no-model", "no-key", "batched-tokens", "key-in-arguments", "port"]
    assert f"by process {os.getpid()} of user" in done.stderr
    assert "--reapply-patches" in done.stderr
    assert "s3cret" not in done.stderr


def test_a_refused_command_line_alone_is_a_usage_error(place):
    done, record, _ = run(place, "--model", "weights", "--", "--prefix-match-unit", "512")
    assert (done.returncode, record) == (2, None)


def test_print_shows_a_script_that_runs_the_same(place):
    environ = {"VLLM_API_KEY": "s3cret"}
    printed, record, _ = run(place, "--model", "weights", "--print", "--host", "0.0.0.0", environ=environ)
    assert (printed.returncode, record) == (0, None)
    assert "s3cret" not in printed.stdout + printed.stderr
    record_to = place / "by-script.json"
    environment = {"PATH": os.environ["PATH"], "RECORD_TO": str(record_to), **environ}
    subprocess.run(["sh", "-c", printed.stdout], check=True, timeout=30, env=environment)
    by_script = read_record(record_to)
    _, by_serve, _ = run(place, "--model", "weights", "--host", "0.0.0.0", environ=environ)
    assert by_serve is not None
    assert by_script["argv"] == by_serve["argv"]
    assert by_script["environ"]["VLLM_API_KEY"] == "s3cret"


def test_print_works_without_an_environment(place):
    import shutil

    shutil.rmtree(place / "venv")
    done, _, _ = run(place, "--model", "org/weights", "--print")
    assert done.returncode == 0
    assert done.stderr.startswith("warning[environment-conflict]")
    assert "vllm serve org/weights" in done.stdout


def test_a_printed_script_asks_for_the_key_that_nobody_named(place):
    done, _, _ = run(place, "--model", "org/weights", "--print", "--host", "0.0.0.0")
    assert done.returncode == 0
    assert "warning[no-key]" in done.stderr
    environment = {"PATH": os.environ["PATH"], "RECORD_TO": str(place / "by-script.json")}
    refused = subprocess.run(
        ["sh", "-c", done.stdout], capture_output=True, text=True, timeout=30, check=False, env=environment
    )
    assert refused.returncode != 0
    assert "export the API key first" in refused.stderr
    assert not (place / "by-script.json").exists()


def test_print_still_refuses_what_is_known_to_fail(place):
    done, _, _ = run(place, "--model", "org/weights", "--print", "--", "--max-num-batched-tokens", "9000")
    assert (done.returncode, done.stdout) == (2, "")


def test_json_has_the_plan_and_the_findings(place):
    done, _, _ = run(place, "--json", "--host", "0.0.0.0", environ={"VLLM_API_KEY": "s3cret"})
    values = json.loads(done.stdout)
    assert values["schema"] == "provision/serve/1"
    assert values["environment"]["VLLM_API_KEY"] == "<redacted>"
    assert [(item["id"], item["severity"]) for item in values["findings"]] == [
        ("no-model", "error"),
        ("variable-dropped", "note"),
    ]
    assert set(values["findings"][0]) == {"id", "severity", "subject", "what", "evidence", "next"}
    assert values["argv"][2] == "<model>"
    assert (done.returncode, values["exit"]) == (2, 2)


def test_json_ends_as_the_start_would(place):
    words = ["--model", "weights"]
    assert [run(place, *words, "--json")[0].returncode, run(place, *words)[0].returncode] == [0, 0]
    packages = next((place / "venv").glob("lib/python*/site-packages"))
    (packages / PATCHED).write_text("other\n")
    assert [run(place, *words, "--json")[0].returncode, run(place, *words)[0].returncode] == [5, 5]
    printed, _, _ = run(place, *words, "--json", "--print")
    assert (printed.returncode, json.loads(printed.stdout)["exit"]) == (0, 0)


def test_explain_gives_every_reason(place):
    done, _, _ = run(place, "--model", "weights", "--explain", "--", "--seed", "7")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert any("--max-model-len 4096" in line and "Enough for a test." in line for line in lines)
    assert any("--seed 7" in line and "given on the command line" in line for line in lines)
    assert any("PYTORCH_CUDA_ALLOC_CONF" in line and "Fragmentation." in line for line in lines)


def test_from_inside_the_package_the_server_starts_elsewhere(place):
    inside = next((place / "venv").glob("lib/python*/site-packages/vllm"))
    done, record, _ = run(place, "--model", str(place / "weights"), cwd=inside)
    assert record is not None, done.stderr
    assert record["cwd"] == str(place / "venv")


def test_a_recipe_for_a_card_needs_one(place, capsys, monkeypatch):
    monkeypatch.setenv("PROVISION_HOME", str(place / "home"))
    code = main(["serve", "hynix-stable", "--venv", str(place / "venv"), "--model", str(place / "weights")])
    errors = capsys.readouterr().err
    assert code == 8
    assert "error[card-missing]" in errors
    assert "error[other-recipe]" in errors
    assert "error[no-key]" in errors


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["serve", "hynix", "--fork-dir", "/x"], "--fork-dir does not go with"),
        (["serve", "samsung", "--fork-dir", "/x", "--without-fork"], "--fork-dir does not go with"),
        (["serve", "samsung", "--fork-dir", "/x", "--venv", "/y"], "the venv of its own checkout"),
        (["serve", "hynix", "--env", "NOVALUE"], "not an assignment"),
        (["serve", "hynix", "--memory-vendor", "micron"], "unknown memory vendor"),
        (["serve", "hynx"], "no recipe is called"),
    ],
)
def test_options_that_cannot_be_meant(words, what, capsys):
    assert main(words) == 2
    assert what in capsys.readouterr().err


@pytest.fixture
def fork(tmp_path):
    folder = tmp_path / "fork"
    make_environment(folder / "venv", recipe="samsung")
    script = folder / "single-user" / "start_qwen.sh"
    script.parent.mkdir()
    script.write_text(
        "#!/bin/bash\nexport PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}\n"
        'cd "$(dirname "$0")/.."\nexec venv/bin/vllm serve "$MODEL" --host 0.0.0.0 --port $PORT $EXTRA_ARGS\n'
    )
    return folder


def test_the_forks_plan_needs_a_key_and_no_host(fork, capsys):
    words = ["serve", "samsung", "--fork-dir", str(fork), "--host", "127.0.0.1", "--json"]
    assert main([*words, "--print"]) == 2
    assert main(words[:-1]) == 8
    assert "error[no-key]" in capsys.readouterr().err
    assert main(words) == 8
    values = json.loads(capsys.readouterr().out)
    found = [finding["id"] for finding in values["findings"]]
    assert {"fork-host", "no-key", "no-drafter", "card-missing", "fork-differs"} <= set(found)
    assert values["environment"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"
    assert values["environment"]["KV_MEM"] == ""
    assert values["argv"] == ["/bin/bash", str(fork / "single-user" / "start_qwen.sh")]


def test_the_forks_launcher_gets_what_was_planned(fork, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    (fork / "models" / "Qwen3.8-27B-DFlash2").mkdir(parents=True)
    (fork / "models" / "Qwen3.8-27B-DFlash2" / "model.safetensors").touch()
    words = ["serve", "samsung", "--fork-dir", str(fork), "--model", "org/q", "--print", "--", "--max-num-seqs", "4"]
    assert main(words) == 0
    script = capsys.readouterr().out
    record_to = tmp_path / "record.json"
    environment = {"PATH": os.environ["PATH"], "RECORD_TO": str(record_to), "VLLM_API_KEY": "s3cret"}
    environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    subprocess.run(["sh", "-c", script], check=True, timeout=30, env=environment)
    record = read_record(record_to)
    assert record["argv"][1:] == [
        "serve", "org/q", "--host", "0.0.0.0", "--port", "18020", "--dtype", "bfloat16", "--max-num-seqs", "4",
    ]  # fmt: skip
    assert record["environ"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"
    assert (record["environ"]["SPEC"], record["environ"]["KV_MEM"]) == ("dflash2", "")
    assert record["cwd"] == str(fork)


def test_a_checkout_that_differs_is_told_of_once_with_a_command_unless_it_was_taken_as_it_is(fork, capsys):
    author = ["-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "--quiet"], ["add", "single-user"], [*author, "commit", "--quiet", "-m", "m"]):
        subprocess.run(["git", "-C", str(fork), *words], check=True, timeout=30)
    words = ["serve", "samsung", "--fork-dir", str(fork), "--print"]
    main(words)
    shown = capsys.readouterr().err
    assert "warning[fork-differs]: the checkout is at another commit" in shown
    assert f"to take it as it is: provision up samsung --fork-dir {fork} --fork-any" in shown
    assert "found: found:" not in shown
    receipt = make_receipt(recipe="samsung", fork_any=True)
    (fork / "venv" / ".provision" / "receipt.json").write_text(print_receipt(receipt))
    main(words)
    assert "fork-differs" not in capsys.readouterr().err


def test_serving_the_samsung_card_without_the_fork(tmp_path, capsys):
    make_environment(tmp_path / "venv", recipe="samsung")
    words = ["serve", "samsung", "--without-fork", "--venv", str(tmp_path / "venv"), "--model", "org/q", "--json"]
    main([*words, "--host", "127.0.0.1"])
    values = json.loads(capsys.readouterr().out)
    assert "not-validated" in [finding["id"] for finding in values["findings"]]
    assert values["argv"][:3] == [str(tmp_path / "venv" / "bin" / "vllm"), "serve", "org/q"]
    assert values["argv"][values["argv"].index("--max-model-len") + 1] == "16384"


def test_an_executable_that_cannot_run_is_an_error_with_its_name(place):
    make_recorder(place / "venv" / "bin" / "vllm")
    (place / "venv" / "bin" / "vllm").chmod(0o644)
    done, record, _ = run(place, "--model", "weights")
    assert (done.returncode, record) == (5, None)
    assert "cannot be executed" in done.stderr


@pytest.fixture
def rig(tmp_path, monkeypatch):
    """A GeForce, a Hynix and a Samsung card, in this order; returns the words that serve hynix-stable on it."""
    from provisioner.gpu.devices import read_inventory
    from provisioner.serve import cards, prepare
    from tests.support.fake_nvml import mixed_rig

    monkeypatch.setattr(cards, "read_inventory", lambda nvml: read_inventory(mixed_rig()))
    monkeypatch.setattr(prepare, "read_kernel_log", lambda: cards.KernelLog(lines=(), source=None, why_not="closed"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    make_environment(tmp_path / "venv")
    return [
        "serve",
        "hynix-stable",
        "--venv",
        str(tmp_path / "venv"),
        "--model",
        "o/q",
        "--host",
        "127.0.0.1",
        "--json",
    ]


def planned(words: list[str], capsys) -> tuple[dict, list[str]]:
    main(words)
    values = json.loads(capsys.readouterr().out)
    return values["environment"], [f"{item['severity']}:{item['id']}" for item in values["findings"]]


@pytest.mark.parametrize("card", ["82:00", "1", "GPU-11111111"])
def test_a_card_of_a_mixed_rig_is_pinned_by_uuid(rig, capsys, card):
    environment, found = planned([*rig, "--gpu", card], capsys)
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-11111111-aaaa-bbbb-cccc-000000000001"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert found == ["warning:not-verified"]


def test_a_mixed_rig_without_a_choice_lists_the_cards(rig, capsys):
    assert main(rig[:-1]) == 2
    errors = capsys.readouterr().err
    assert "error[card-choice]" in errors
    assert errors.count("--gpu GPU-") == 3


def test_a_samsung_card_under_a_hynix_recipe(rig, capsys):
    _, found = planned([*rig, "--gpu", "C1:00"], capsys)
    assert found == ["warning:card-differs", "warning:not-verified", "error:expandable-segments"]
    _, found = planned([*rig, "--gpu", "C1:00", "--env", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"], capsys)
    assert found == ["warning:card-differs", "warning:not-verified"]
    _, found = planned([*rig, "--gpu", "C1:00", "--memory-vendor", "hynix"], capsys)
    assert found == ["warning:not-verified"]


@pytest.mark.parametrize(
    ("verdict", "code", "line"), [("wedged", 8, "error[card-wedged]"), ("lost", 8, "error[card-lost]")]
)
def test_a_card_that_does_not_answer_is_not_started_on(rig, capsys, monkeypatch, verdict, code, line):
    from provisioner.gpu.health import Probe, ProbeVerdict
    from provisioner.serve import prepare
    from provisioner.serve.cards import judge_probe

    result = Probe(verdict=ProbeVerdict(verdict), steps=(), why="so", seconds=1.0)
    monkeypatch.setattr(prepare, "judge_probe", lambda card: judge_probe(card, probe=lambda _: result))
    assert main([*rig[:-1], "--gpu", "82:00", "--probe-card"]) == code
    assert line in capsys.readouterr().err
