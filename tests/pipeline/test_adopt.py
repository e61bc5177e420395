"""Environments that people have: made by real uv and real pip with the real wheel of vLLM 0.27.1, patched by other
means or not, and taken over through the real command line."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from provisioner.digests import digest_of, digest_to_record
from provisioner.environment.site import find_site
from provisioner.environment.uv import find_binary
from provisioner.resources import patches_folder
from provisioner.transaction.transaction import is_interrupted
from tests.support.real_fork import commit_fork, final_digests, fork_files, run_own_loop

pytestmark = [pytest.mark.network, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
RECIPE, PATCH = "hynix-stable", "pr50021-gdn-spec-bounds"
PATCHED = "vllm/third_party/flash_linear_attention/ops/fused_recurrent.py"
OTHER = "vllm/envs.py"
Snapshot = dict[str, tuple[int, int, str]]


def run(home: Path, *words: str, expect: int = 0) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, "PROVISION_HOME": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "provisioner", *words]
    done = subprocess.run(command, env=environ, cwd=home, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == expect, done.stderr
    return done


def call(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=600)


def make_by_uv(folder: Path) -> None:
    call(find_binary(), "venv", "--python", sys.executable, folder)
    call(find_binary(), "pip", "install", "--python", folder / "bin" / "python", "--no-deps", "vllm==0.27.1")


def make_by_pip(folder: Path) -> None:
    call(sys.executable, "-m", "venv", folder)
    call(folder / "bin" / "pip", "install", "--no-deps", "vllm==0.27.1")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[Path], None]], Path]:
    """Gives an environment of a maker, made once."""
    known: dict[Callable[[Path], None], Path] = {}

    def give(maker: Callable[[Path], None]) -> Path:
        if maker not in known:
            known[maker] = tmp_path_factory.mktemp("made") / "venv"
            maker(known[maker])
        return known[maker]

    return give


@pytest.fixture(params=[make_by_uv, make_by_pip])
def venv(
    request: pytest.FixtureRequest, made: Callable[[Callable[[Path], None]], Path], tmp_path: Path
) -> Iterator[Path]:
    """A copy by hard links: whoever writes into a file of it instead of replacing it is found out."""
    original = made(request.param)
    before = snapshot(original)
    copy = tmp_path / "venv"
    shutil.copytree(original, copy, symlinks=True, copy_function=os.link)
    yield copy
    assert snapshot(original) == before


by_uv = pytest.mark.parametrize("venv", [make_by_uv], indirect=True)


def snapshot(folder: Path) -> Snapshot:
    """Size and mtime of every file and folder, and where each link leads."""
    found = {}
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        found[str(path)] = (state.st_size, state.st_mtime_ns, str(path.readlink()) if path.is_symlink() else "")
    return found


def packages(venv: Path) -> Path:
    return find_site(venv).site_packages


def edit(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def record(venv: Path) -> bytes:
    return (find_site(venv).dist_info / "RECORD").read_bytes()


def answer(home: Path, *words: str, expect: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(home, *words, "--json", expect=expect).stdout)
    return found


def test_it_is_taken_over_and_every_command_works_on_it(venv: Path, tmp_path: Path) -> None:
    before, untouched = record(venv), snapshot(venv)
    place = ("--venv", str(venv))
    refused = run(tmp_path, RECIPE, *place, "--bare", expect=5)
    assert f"provision up {RECIPE} --venv {venv} --adopt" in refused.stderr
    plan = answer(tmp_path, RECIPE, *place, "--adopt", "--bare", "--dry-run")
    assert plan["actions"][0] == f"take over {venv} with its packages"
    assert snapshot(venv) == untouched
    made = answer(tmp_path, RECIPE, *place, "--adopt", "--bare")
    assert made["actions"] == plan["actions"]
    assert {file["path"]: file["after"] for file in made["receipt"]["patches"][0]["files"]} == plan["final"]
    settled = snapshot(venv)
    assert answer(tmp_path, RECIPE, *place, "--bare")["actions"] == []
    assert answer(tmp_path, RECIPE, *place, "--adopt", "--bare")["actions"] == []
    # The lock file names its holder; and where a source was written within a tick of being read, the status that --json
    # has reads it again, by the clock of the file system, and keeps what it saw.
    state = venv / ".provision"
    moving = {str(path) for path in (state, state / "lock", state / "verified.json")}
    assert {path: state for path, state in snapshot(venv).items() if path not in moving} == {
        path: state for path, state in settled.items() if path not in moving
    }
    assert answer(tmp_path, "status", *place)["proven"]
    served = run(tmp_path, "serve", RECIPE, *place, "--model", "org/q", "--print", "--host", "127.0.0.1")
    assert f"exec {venv}/bin/vllm serve org/q" in served.stdout
    assert run(tmp_path, "revert", *place).stdout == "7 files are as shipped again\n"
    assert record(venv) == before
    assert not is_interrupted(venv / ".provision")


@by_uv
def test_our_patch_by_another_hand_is_recognised(venv: Path, tmp_path: Path) -> None:
    text = next((patches_folder() / PATCH).glob("*0.27*.patch"))
    call("patch", "-p1", "-s", "--no-backup-if-mismatch", "-d", packages(venv), "-i", text)
    made = answer(tmp_path, RECIPE, "--venv", str(venv), "--adopt", "--bare")
    assert made["actions"] == [f"take over {venv} with its packages", "write the receipt"]
    assert made["patches"][0]["verdict"] == "applied"
    assert answer(tmp_path, "status", "--venv", str(venv))["proven"]


@by_uv
@pytest.mark.parametrize("whole", [True, False])
def test_bytes_that_nobody_explains_are_left_alone(venv: Path, tmp_path: Path, whole: bool) -> None:
    place = ("--venv", str(venv), "--adopt", "--bare")
    edited = packages(venv) / PATCHED
    shipped = edited.read_bytes()
    edit(edited, shipped + b"\nMINE = 1\n" if whole else b"nothing of it is left\n")
    before = snapshot(venv)
    refused = run(tmp_path, RECIPE, *place, expect=5)
    assert f"{PATCHED}: foreign" in refused.stderr
    if whole:
        assert f"{PATCHED}: nearest to the file as shipped, 2 lines apart" in refused.stderr
    assert "--reapply-patches" in refused.stderr
    assert snapshot(venv) == before
    run(tmp_path, RECIPE, *place, "--reapply-patches")
    assert answer(tmp_path, "status", "--venv", str(venv))["proven"]
    run(tmp_path, "revert", "--venv", str(venv))
    assert (packages(venv) / PATCHED).read_bytes() == shipped


@by_uv
def test_an_edit_outside_the_series_is_refused_whatever_is_asked(venv: Path, tmp_path: Path) -> None:
    edit(packages(venv) / OTHER, b"X = 1\n")
    before = snapshot(venv)
    for more in ((), ("--reapply-patches",), ("--dry-run",)):
        refused = run(tmp_path, RECIPE, "--venv", str(venv), "--adopt", "--bare", *more, expect=5)
        assert f"{OTHER}: " in refused.stderr
        assert "--reinstall-package vllm vllm==0.27.1" in refused.stderr
    assert snapshot(venv) == before


@by_uv
def test_a_record_that_was_made_to_fit_proves_nothing(venv: Path, tmp_path: Path) -> None:
    site = find_site(venv)
    edit(site.site_packages / OTHER, b"X = 1\n")
    rows = (site.dist_info / "RECORD").read_text().splitlines()
    told = f"{OTHER},{digest_to_record(digest_of(b'X = 1' + bytes([10])))},6"
    edit(
        site.dist_info / "RECORD",
        "".join((told if row.startswith(f"{OTHER},") else row) + "\n" for row in rows).encode(),
    )
    before = snapshot(venv)
    refused = run(tmp_path, RECIPE, "--venv", str(venv), "--adopt", "--bare", expect=5)
    assert "RECORD is not that of the lock's vllm" in refused.stderr
    assert snapshot(venv) == before


@by_uv
def test_the_forks_own_loop_is_named_file_by_file_under_another_recipe(venv: Path, tmp_path: Path) -> None:
    run_own_loop(fork_files(), packages(venv) / "vllm")
    before = snapshot(venv)
    refused = run(tmp_path, RECIPE, "--venv", str(venv), "--adopt", "--bare", expect=5)
    assert f"{PATCHED}: nearest to the file as shipped, 26 lines apart" in refused.stderr
    assert "causal_conv1d.py: nearest to the file with pr50021-gdn-spec-bounds, 11 lines apart" in refused.stderr
    refused = run(tmp_path, RECIPE, "--venv", str(venv), "--adopt", "--bare", "--reapply-patches", expect=5)
    assert "installed files are not as RECORD says" in refused.stderr
    assert f"provision patch diff --venv {venv}" in refused.stderr
    assert snapshot(venv) == before


@by_uv
def test_the_forks_own_loop_is_taken_over_by_its_recipe(venv: Path, tmp_path: Path) -> None:
    checkout, theirs = tmp_path / "checkout", final_digests()
    words = ["samsung", "--bare", "--fork-dir", str(checkout), "--fork-commit", commit_fork(checkout)]
    venv = venv.rename(checkout / "venv")
    site = find_site(venv)
    run_own_loop(checkout, site.site_packages / "vllm")
    before, shipped = snapshot(venv), record(venv)
    refused = run(tmp_path, *words, "--adopt", expect=5)
    assert f"{PATCHED}: nearest to the file as shipped, " in refused.stderr
    assert "--reapply-patches" in refused.stderr
    assert snapshot(venv) == before
    made = answer(tmp_path, *words, "--adopt", "--reapply-patches")
    assert made["actions"][0] == f"take over {venv} with its packages"
    now = {path: digest_of((site.site_packages / path).read_bytes()) for path in theirs}
    assert sum(now[path] == digest for path, digest in theirs.items()) == 50
    assert answer(tmp_path, *words)["actions"] == []
    assert answer(tmp_path, "status", "--venv", str(venv))["proven"]
    run(tmp_path, "revert", "--venv", str(venv))
    assert record(venv) == shipped
    assert all(
        digest_of((site.site_packages / path).read_bytes()) == site.record.digest(path)
        for path in theirs
        if path in site.record
    )


@by_uv
def test_another_torch_is_named_and_nothing_is_written(venv: Path, tmp_path: Path) -> None:
    """The CPU build, a real one: of the locked version, and vLLM's binaries do not load with it."""
    links = os.environ.get("PIP_FIND_LINKS")
    if links is None or not any(Path(links).glob("torch-2.13.0*cp{}{}-*.whl".format(*sys.version_info))):
        pytest.skip("no CPU build of torch on this machine: PIP_FIND_LINKS names none")
    python = venv / "bin" / "python"
    call(find_binary(), "pip", "install", "--python", python, "--no-deps", "--find-links", links, "torch==2.13.0+cpu")
    before = snapshot(venv)
    refused = run(tmp_path, RECIPE, "--venv", str(venv), "--adopt", expect=5)
    assert "torch is not the one that vllm 0.27.1 is built for" in refused.stderr
    assert "expected: 2.13.0 with CUDA 13.0" in refused.stderr
    assert "found:    2.13.0+cpu with CUDA None" in refused.stderr
    assert "--sync" in refused.stderr
    assert snapshot(venv) == before


def test_what_is_no_environment_of_vllm_is_named(tmp_path: Path) -> None:
    absent = run(tmp_path, RECIPE, "--venv", str(tmp_path / "none"), "--adopt", expect=5)
    assert "there is no environment to take over" in absent.stderr
    call(find_binary(), "venv", "--python", sys.executable, tmp_path / "empty")
    before = snapshot(tmp_path / "empty")
    empty = run(tmp_path, RECIPE, "--venv", str(tmp_path / "empty"), "--adopt", expect=5)
    assert "vllm is not installed here" in empty.stderr
    assert snapshot(tmp_path / "empty") == before
    for words in (("--rebuild",), ("--python", "3.12")):
        run(tmp_path, RECIPE, "--venv", str(tmp_path / "empty"), "--adopt", *words, expect=2)
    run(tmp_path, RECIPE, "--sync", "--bare", expect=2)
