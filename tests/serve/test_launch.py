"""The plan of a start: command, environment, folder, and what speaks against it."""

from pathlib import Path

import pytest
from packaging.version import Version

from provisioner.documents.recipe import Flag, Recipe, Serve, Variable, parse_recipe
from provisioner.resources import recipes_folder
from provisioner.serve.findings import Severity, exit_code_of
from provisioner.serve.launch import (
    ChosenCard,
    ForkLauncher,
    Key,
    Launch,
    Model,
    ModelKind,
    Surroundings,
    VenvLauncher,
    Wish,
    compose_environment,
    is_loopback,
    plan_launch,
    printable_argv,
    redact,
    shell_script,
)

VENV = VenvLauncher(venv=Path("/srv/venv"), site_packages=Path("/srv/venv/lib/python3.12/site-packages"))
FORK = ForkLauncher(folder=Path("/srv/fork"), script="single-user/start_qwen.sh", site_packages=None)
WEIGHTS = Model(text="/models/q", kind=ModelKind.FOLDER)
HYNIX_CARD = ChosenCard(name="NVIDIA CMP 170HX", uuid="GPU-1", pci="0000:82:00.0", memory_vendor="hynix")
SAMSUNG_CARD = ChosenCard(name="NVIDIA CMP 170HX", uuid="GPU-2", pci="0000:81:00.0", memory_vendor="samsung")


def recipe(name: str) -> Recipe:
    path = recipes_folder() / f"{name}.toml"
    return parse_recipe(path.read_text(encoding="utf-8"), name=name, where=path.name)


def serve_of(name: str) -> Serve:
    serve = recipe(name).serve
    assert serve is not None
    return serve


def surroundings(**changes) -> Surroundings:
    values = {"environ": {"PATH": "/usr/bin"}, "cwd": Path("/home/u"), "key": Key(file=None), "card": HYNIX_CARD}
    return Surroundings(**(values | changes))


def plan(name: str = "hynix", launcher=VENV, **changes) -> Launch:
    wish = changes.pop("wish", Wish(model=WEIGHTS))
    return plan_launch(serve_of(name), launcher, wish, surroundings(**changes))


def ids(launch: Launch, severity: Severity | None = None) -> list[str]:
    return [finding.id for finding in launch.findings if severity in (None, finding.severity)]


def variables(launch: Launch) -> dict[str, str]:
    return {variable.name: variable.value for variable in launch.variables}


def test_the_recipe_alone_gives_the_whole_command():
    launch = plan()
    assert launch.argv[:5] == ("/srv/venv/bin/vllm", "serve", "/models/q", "--quantization", "gptq")
    assert launch.argv[-4:] == ("--host", "0.0.0.0", "--port", "8012")
    assert variables(launch) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "VLLM_USE_FLASHINFER_SAMPLER": "1",
        "CUDA_VISIBLE_DEVICES": "GPU-1",
    }
    assert launch.findings == ()


@pytest.mark.parametrize("name", ["hynix", "hynix-stable"])
def test_every_argument_and_variable_has_a_reason(name):
    launch = plan(name)
    assert all(setting.why for setting in launch.settings)
    assert all(variable.why for variable in launch.variables)


def test_extra_arguments_override_the_recipe_and_are_judged():
    extra = ("--max-model-len", "1000", "--max_num_batched_tokens=9000", "--port", "9999", "--host=127.0.0.1")
    launch = plan(wish=Wish(model=WEIGHTS, port=5000, extra=extra))
    assert launch.argv.count("--max-model-len") == 1
    assert launch.argv[launch.argv.index("--max-model-len") + 1] == "1000"
    assert (launch.host, launch.port) == ("127.0.0.1", 9999)
    assert ids(launch) == ["batched-tokens"]


def test_all_findings_stand_together():
    launch = plan(
        wish=Wish(extra=("stray", "--prefix-match-unit", "512", "--max-num-batched-tokens", "32000", "--port", "x")),
        key=None,
        card=SAMSUNG_CARD,
    )
    assert ids(launch, Severity.ERROR) == [
        "stray-argument",
        "no-model",
        "port",
        "no-key",
        "batched-tokens",
        "prefix-match-unit",
        "expandable-segments",
    ]
    assert exit_code_of(launch.findings) == 2


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("192.168.1.2", False),
        ("localhost.example", False),
        ("127.0.0.1.example", False),
    ],
)
def test_loopback(host, alone):
    assert is_loopback(host) is alone


def test_only_loopback_goes_without_a_key():
    assert "no-key" in ids(plan(key=None))
    assert "no-key" in ids(plan(key=None, wish=Wish(model=WEIGHTS, host="10.0.0.1")))
    assert ids(plan(key=None, wish=Wish(model=WEIGHTS, host="127.0.0.1"))) == []


def test_the_key_is_in_the_environment_alone():
    launch = plan(key=Key(file=Path("/srv/key file")))
    environment = compose_environment(launch, {"PATH": "/bin"}, "s3cret")
    assert environment["VLLM_API_KEY"] == "s3cret"
    script = shell_script(launch)
    assert "s3cret" not in script + repr(launch)
    assert "export VLLM_API_KEY=\"$(cat '/srv/key file')\"" in script


def test_a_key_in_arguments_or_a_variable_is_refused_and_never_shown():
    wish = Wish(model=WEIGHTS, extra=("--api-key", "s3cret"), variables={"VLLM_API_KEY": "s3cret"})
    launch = plan(wish=wish)
    assert ids(launch, Severity.ERROR) == ["key-in-arguments", "key-in-arguments"]
    assert "s3cret" not in shell_script(launch) + " ".join(printable_argv(launch)) + str(launch.findings)


def test_redaction_of_any_command():
    words = ("ssh", "-q", "--api_key=a", "--api-key", "b", "c", "--port", "1", "VLLM_API_KEY=d")
    clean = redact(words)
    assert clean == (
        "ssh",
        "-q",
        "--api_key=<redacted>",
        "--api-key",
        "<redacted>",
        "<redacted>",
        "--port",
        "1",
        "VLLM_API_KEY=<redacted>",
    )


@pytest.mark.parametrize(
    ("cwd", "names"),
    [
        ("/srv/venv/lib/python3.12/site-packages/vllm", frozenset()),
        ("/srv/venv/lib/python3.12/site-packages", frozenset()),
        ("/home/u/src", frozenset({"vllm", "README.md"})),
    ],
)
def test_the_server_never_starts_where_modules_would_be_hidden(cwd, names):
    launch = plan(cwd=Path(cwd), cwd_names=names)
    assert launch.cwd == Path("/srv/venv")
    assert ids(launch) == ["working-directory"]


def test_what_changes_imports_or_wins_over_the_recipe_is_dropped():
    environ = {"PYTHONPATH": "/decoy", "PYTORCH_ALLOC_CONF": "x", "PYTORCH_CUDA_ALLOC_CONF": "y", "HOME": "/h"}
    launch = plan(environ=environ)
    environment = compose_environment(launch, environ, None)
    assert "PYTHONPATH" not in environment
    assert "PYTORCH_ALLOC_CONF" not in environment
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert environment["HOME"] == "/h"
    assert environment["PATH"].startswith("/srv/venv/bin:")
    assert ids(launch, Severity.NOTE) == ["variable-replaced", "variable-dropped"]


def test_without_a_card_the_recipes_card_decides():
    launch = plan("hynix-stable", card=None, recipe_vendor="samsung")
    assert "CUDA_VISIBLE_DEVICES" not in variables(launch)
    assert ids(launch) == ["expandable-segments"]


def test_a_missing_patch_is_an_error_of_the_environment():
    launch = plan("hynix-stable", version=Version("0.27.1"), patches=frozenset())
    assert ids(launch) == ["gdn-patch"]
    assert exit_code_of(launch.findings) == 5


def test_a_missing_folder_of_weights():
    launch = plan(wish=Wish(model=Model(text="/nowhere", kind=ModelKind.MISSING)))
    assert ids(launch) == ["no-model"]


def test_the_model_can_stand_in_the_recipe_or_among_the_extra_arguments():
    serve = Serve(launcher="vllm", model="org/m", host="::1", port=1, validated=True, flags=(), variables=())
    launch = plan_launch(serve, VENV, Wish(), surroundings(card=None, key=None))
    assert launch.argv == ("/srv/venv/bin/vllm", "serve", "org/m", "--host", "::1", "--port", "1")
    launch = plan_launch(serve, VENV, Wish(extra=("--model", "org/n")), surroundings(card=None, key=None))
    assert launch.argv[2] == "org/n"
    assert launch.argv.count("--model") == 0


def test_the_fork_is_started_by_its_own_launcher():
    launch = plan("samsung", FORK, card=SAMSUNG_CARD, environ={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert launch.argv == ("/bin/bash", "/srv/fork/single-user/start_qwen.sh")
    assert launch.cwd == Path("/srv/fork")
    assert variables(launch) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "GPU-2",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
        "SPEC": "dflash2",
        "CTX": "fast",
        "GPU_UTIL": "0.96",
        "KV_MEM": "",
        "EXTRA_ARGS": "--dtype bfloat16",
        "PORT": "18020",
        "MODEL": "/models/q",
    }
    assert ids(launch) == ["variable-replaced"]


def test_the_forks_host_cannot_be_chosen_and_its_key_is_required():
    for wish in (Wish(host="127.0.0.1"), Wish(extra=("--host", "127.0.0.1"))):
        launch = plan("samsung", FORK, card=SAMSUNG_CARD, key=None, wish=wish)
        assert ids(launch, Severity.ERROR) == ["fork-host", "no-key"]
        assert launch.host == "0.0.0.0"
        assert "127.0.0.1" not in variables(launch)["EXTRA_ARGS"]


def test_extra_arguments_reach_the_fork_through_its_variable():
    wish = Wish(extra=("--max-model-len", "32768", "--port", "9000", "--dtype", "half"), variables={"GPU_UTIL": "0.9"})
    launch = plan("samsung", FORK, card=SAMSUNG_CARD, wish=wish)
    assert variables(launch)["EXTRA_ARGS"] == "--dtype half --max-model-len 32768"
    assert (variables(launch)["PORT"], launch.port) == ("9000", 9000)
    assert variables(launch)["GPU_UTIL"] == "0.9"


def test_words_that_the_forks_shell_would_split_are_refused():
    wish = Wish(extra=("--chat-template-content", "two words", "--allowed", "*"))
    launch = plan("samsung", FORK, card=SAMSUNG_CARD, wish=wish)
    assert ids(launch) == ["fork-words"]
    assert launch.findings[0].evidence == ("two words", "*")


def test_the_rules_hold_for_the_fork_as_well():
    wish = Wish(extra=("--max-num-batched-tokens", "32000"), variables={"GPU_UTIL": "1.5"})
    launch = plan("samsung", FORK, card=SAMSUNG_CARD, wish=wish)
    assert ids(launch) == ["batched-tokens", "memory-utilization"]


def test_without_the_fork_the_flags_are_marked_as_not_validated():
    serve = recipe("samsung").serve_without_fork
    assert serve is not None
    launch = plan_launch(serve, VENV, Wish(model=WEIGHTS), surroundings(card=SAMSUNG_CARD))
    assert ids(launch) == ["not-validated"]
    assert launch.argv[launch.argv.index("--max-model-len") + 1] == "16384"
    assert variables(launch)["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"


def test_the_script_runs_what_was_planned(tmp_path):
    import subprocess

    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "vllm"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$PWD" "$VLLM_API_KEY" "$QUOTED" "$@"\n', encoding="utf-8")
    fake.chmod(0o755)
    key = tmp_path / "key"
    key.write_text("s3cret\n", encoding="utf-8")
    serve = Serve(
        launcher="vllm",
        model="m",
        host="::1",
        port=1,
        validated=True,
        flags=(Flag(name="--json", value='{"a": "it\'s"}', why="w"),),
        variables=(Variable(name="QUOTED", value="a 'b' $c", why="w"),),
    )
    launch = plan_launch(
        serve,
        VenvLauncher(venv=tmp_path, site_packages=None),
        Wish(),
        surroundings(cwd=tmp_path, card=None, key=Key(file=key)),
    )
    done = subprocess.run(
        ["sh", "-c", shell_script(launch)], capture_output=True, text=True, check=True, timeout=10, cwd="/"
    )
    assert done.stdout.splitlines() == [
        str(tmp_path), "s3cret", "a 'b' $c", "serve", "m", "--json", '{"a": "it\'s"}', "--host", "::1", "--port", "1",
    ]  # fmt: skip
