"""Drift over vLLM's real releases, from the user's package index."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from provisioner.index.settings import read_settings
from provisioner.index.source import candidates, open_wheel, parse_spec
from provisioner.patching.compare import patch_between
from provisioner.patching.diff import print_patch

pytestmark = pytest.mark.network

ROOT = Path(__file__).parents[2]
OPS = "vllm/_custom_ops.py"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def drift(home: Path, *arguments: str, expect: int) -> dict[str, Any]:
    environ = {**os.environ, "PROVISION_HOME": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "provisioner", "drift", *arguments, "--json"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == expect, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_required_patches_hold_on_their_release(home: Path) -> None:
    report = drift(home, "hynix-stable", "samsung", "--against", "pypi:0.27.1", expect=0)
    (build,) = report["builds"]
    assert {patch["verdict"] for patch in build["patches"]} == {"applies"}


def test_a_second_scan_asks_for_no_wheel(home: Path) -> None:
    first = drift(home, "hynix-stable", "--against", "pypi:>=0.27,<0.29", expect=0)
    again = drift(home, "hynix-stable", "--against", "pypi:>=0.27,<0.29", expect=0)
    assert again["builds"] == first["builds"]
    assert again["cost"]["received"] < 100_000


def test_the_change_of_a_signature_is_found_and_named(home: Path, tmp_path: Path) -> None:
    """A text that holds gptq_marlin_repack's signature of 0.29.0, with perm, breaks where 0.30.0 drops perm."""
    settings = read_settings(os.environ, Path.home(), cache=home / "cache")
    (candidate,) = [item for item in candidates(parse_spec("pypi:0.29.0"), settings) if "x86_64" in item.filename]
    old = open_wheel(candidate, settings).read(OPS)
    start = old.index(b"def gptq_marlin_repack(")
    body = old.index(b") -> torch.Tensor:\n", start) + len(b") -> torch.Tensor:\n")
    new = old[:body] + b"    # a hook would stand here\n" + old[body:]
    text = print_patch(patch_between({OPS: old}, {OPS: new}, id="frozen", source="frozen"))
    patch = tmp_path / "frozen.patch"
    patch.write_bytes(text)
    found = drift(
        home,
        "--patches",
        str(patch),
        "--cut-against",
        "0.29.0",
        "--against",
        "pypi:>=0.27",
        "--bisect",
        "0.27.1",
        "0.33.0",
        expect=1,
    )
    (turn,) = found["turns"]
    assert (turn["last"]["label"], turn["first"]["label"]) == ("0.29.0", "0.30.0")
    account = " ".join(turn["after"]["account"])
    assert "perm" in account
    assert found["judged"] < found["between"] + 2
