"""A bundle of the real wheel, made with the network and used without any: tool and environment come out of it."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

from tests.support.image_steps import Stage, carry_out, namespace_words, read_stages

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(900)]

RECIPE = "hynix-stable"
ROOT = Path(__file__).parents[2]


def run(home: Path, *words: str, cwd: Path | None = None) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"PROVISION_HOME": str(home), "UV_CACHE_DIR": str(home / "uv")}
    done = subprocess.run(words, env=environ, cwd=cwd or ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def tool_command(bundle: Path, folder: Path) -> str:
    """The documented line, with this Python."""
    (line,) = re.findall(r"^tar -xOf .*$", (ROOT / "docs/fleet.md").read_text(), flags=re.MULTILINE)
    line = line.replace("hynix-stable.tar", str(bundle)).replace("~/provision", str(folder))
    return line.replace("| python3.12 ", f"| {sys.executable} ")


def unplug() -> list[str]:
    """The words before a command that runs it in a namespace without any network but an unused loopback."""
    words = namespace_words()
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


@dataclass(frozen=True)
class Built:
    """Both stages of the image. The first one is carried out, and this is what it left; the second moves it away."""

    build: Stage
    image: Stage
    receipt: dict[str, Any]
    left: list[str]
    temporary: list[str]


@pytest.fixture(scope="module")
def built(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """Nothing of it is kept: it is large."""
    unplug()
    folder = tmp_path_factory.mktemp("image")
    text = run(folder, sys.executable, "-m", "provisioner", "containerfile", RECIPE, "--bundle", str(bundle))
    found = read_stages(text, folder)
    assert [stage.name for stage in found] == ["build", "image"]
    carry_out(found[0], bundle.parent)
    root = found[0].root
    (receipt,) = root.glob("opt/provision/venvs/*/.provision/receipt.json")
    yield Built(*found, json.loads(receipt.read_text()), names(root / "opt/provision"), names(root / "tmp"))
    shutil.rmtree(folder)


def test_the_build_stage_makes_a_proven_environment_and_keeps_nothing_else(built: Built) -> None:
    assert [patch["verdict"] for patch in built.receipt["patches"]] == ["applied"]
    assert built.left == ["venvs"]
    assert not built.temporary


def test_every_step_of_the_image_runs_and_its_user_changes_nothing(built: Built, bundle: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make the user of the image")
    image = built.image
    carry_out(image, bundle.parent, [built.build])
    status = image.run(["provision", "status", RECIPE, "--json"])
    assert json.loads(status.stdout)["proven"], status.stderr
    patch = built.receipt["patches"][0]
    assert image.labels["provision.lock"] == built.receipt["lock_digest"]
    assert image.labels[f"provision.patch.{patch['id']}"] == patch["text"]
    assert image.run(["touch", "/home/provision/own"]).returncode == 0
    for path in ("/opt/x", "/opt/tool/x", f"/opt/provision/venvs/{RECIPE}/.provision/x"):
        assert "Permission denied" in image.run(["touch", path]).stderr
    started = image.run(image.entry)
    assert started.returncode in (5, 8)
    assert "error[bare]" in started.stderr
    asked = image.run(image.health)
    assert asked.returncode == 1
    assert "urlopen error" in asked.stderr
