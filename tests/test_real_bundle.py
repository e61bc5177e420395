"""A bundle of the real wheel, made with the network and used without any: tool and environment come out of it."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(900)]

RECIPE = "hynix-stable"
ROOT = Path(__file__).parent.parent


def run(home: Path, *words: str, cwd: Path | None = None) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"PROVISION_HOME": str(home), "UV_CACHE_DIR": str(home / "uv")}
    done = subprocess.run(words, env=environ, cwd=cwd or ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tool_command(bundle: Path, folder: Path) -> str:
    """The documented line, with this Python."""
    (line,) = re.findall(r"^tar -xOf .*$", (ROOT / "docs/fleet.md").read_text(), flags=re.MULTILINE)
    line = line.replace("hynix-stable.tar", str(bundle)).replace("~/provision", str(folder))
    return line.replace("| python3.12 ", f"| {sys.executable} ")


def read_build_stage(text: str) -> tuple[list[str], list[str]]:
    """The variables and the commands of a Containerfile's build stage, mounts left out."""
    stage = text.split("\nFROM ")[1].replace("\\\n", " ").splitlines()
    variables = [word for line in stage if line.startswith("ENV ") for word in line.split()[1:]]
    steps = [re.sub(r"--mount=\S+", "", line.removeprefix("RUN ")) for line in stage if line.startswith("RUN ")]
    return variables, steps


def unplug() -> tuple[str, ...]:
    """The words before a command that runs it in a namespace without any network but an unused loopback."""
    words = ("unshare", "--map-root-user", "--net")
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody make a network namespace")
    return words


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        distribution("provisioner")
    except PackageNotFoundError:
        pytest.skip("the tool is not installed here, so its own wheel cannot be made")
    folder = tmp_path_factory.mktemp("bundle")
    made = run(folder, sys.executable, "-m", "provisioner", "bundle", RECIPE, "--bare", "--python",
               f"3.{sys.version_info[1]}", "-o", str(folder / "b.tar"), "--json")  # fmt: skip
    answer = json.loads(made)
    assert answer["schema"] == "provision/bundle-written/1"
    assert answer["manifest"]["tool"]
    return folder / "b.tar"


def test_tool_and_environment_come_from_the_bundle_with_the_network_unplugged(bundle: Path, tmp_path: Path) -> None:
    alone = unplug()
    command = tool_command(bundle, tmp_path / "venv")
    assert run(tmp_path, *alone, "sh", "-c", command) == f"installed {tmp_path}/venv/bin/provision\n"
    assert run(tmp_path, *alone, "sh", "-c", command) == f"unchanged {tmp_path}/venv/bin/provision\n"

    def provision(*words: str) -> str:
        return run(tmp_path, *alone, str(tmp_path / "venv/bin/provision"), *words, cwd=tmp_path)

    plan = json.loads(provision(RECIPE, "--from-bundle", str(bundle), "--bare", "--dry-run", "--json"))
    made = json.loads(provision(RECIPE, "--from-bundle", str(bundle), "--bare", "--json"))
    assert [patch["verdict"] for patch in made["receipt"]["patches"]] == ["applied"]
    status = json.loads(provision("status", RECIPE, "--json"))
    assert status["proven"]
    assert {file["path"]: file["now"] for file in status["patches"][0]["files"]} == plan["final"]
    again = json.loads(provision(RECIPE, "--from-bundle", str(bundle), "--bare", "--json"))
    assert again["actions"] == []
    assert not list((tmp_path / "cache/bundles").iterdir())


def test_the_steps_of_the_containerfile_make_a_proven_environment(bundle: Path, tmp_path: Path) -> None:
    alone = unplug()
    text = run(tmp_path, sys.executable, "-m", "provisioner", "containerfile", RECIPE, "--bundle", str(bundle))
    here = text.replace("/mnt/bundle.tar", str(bundle)).replace("/tmp/bundle", f"{tmp_path}/unpacked")
    variables, steps = read_build_stage(here.replace("/opt/", f"{tmp_path}/opt/"))
    assert len(steps) == 2
    for step in steps:
        command = step.replace("python3 ", f"{sys.executable} ")
        run(tmp_path, *alone, "env", *variables, "sh", "-e", "-c", command, cwd=tmp_path)
    (receipt,) = tmp_path.glob("opt/provision/venvs/*/.provision/receipt.json")
    made = json.loads(receipt.read_text())
    assert f'LABEL "provision.lock"="{made["lock_digest"]}"' in text
    assert f'LABEL "provision.patch.{made["patches"][0]["id"]}"="{made["patches"][0]["text"]}"' in text
