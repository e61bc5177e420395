"""The main job on the real wheel of vLLM 0.27.1, through the real command line, real uv and the user's own index."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from provisioner.environment.integrity import check_record
from provisioner.environment.site import find_site
from provisioner.resources import lockfiles_folder

pytestmark = [pytest.mark.network, pytest.mark.slow]

RECIPE = "hynix-stable"
PATCH = "pr50021-gdn-spec-bounds"
ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "provisioner", *arguments]


def run(home: Path, *arguments: str, expect: int = 0) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, "PROVISION_HOME": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command(*arguments), env=environ, cwd=home, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == expect, done.stderr
    return done


def answer(home: Path, *arguments: str, expect: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(home, *arguments, "--json", expect=expect).stdout)
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the bare environment of hynix-stable; tests that change it put it back."""
    folder = tmp_path_factory.mktemp("home")
    made = answer(folder, RECIPE, "--bare")
    assert made["schema"] == "provision/up/1"
    return folder


@pytest.fixture(scope="module")
def venv(home: Path) -> Path:
    return home / "venvs" / RECIPE


def test_status_proves_the_patch_by_digests(home: Path, venv: Path) -> None:
    status = answer(home, "status", RECIPE)
    site = find_site(venv)
    (patch,) = status["patches"]
    assert (patch["id"], patch["verdict"], status["proven"]) == (PATCH, "applied", True)
    assert len(patch["files"]) == 7
    for file in patch["files"]:
        assert file["before"] == file["pristine"] == site.record.digest(file["path"])
        assert file["after"] == file["now"] != file["before"]


def test_a_second_run_changes_no_byte_and_no_time(home: Path, venv: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in venv.rglob("*") if path.is_file() and path.name != "lock"}
    assert answer(home, RECIPE, "--bare")["actions"] == []
    assert run(home, RECIPE, "--bare", "--check").stdout.startswith("nothing to do")
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_second_run_that_reads_a_file_again_writes_nothing_either(home: Path, venv: Path) -> None:
    kept, source = venv / ".provision" / "verified.json", find_site(venv).site_packages / "vllm" / "envs.py"
    before, times = kept.stat(), source.stat()
    # As when another environment is linked from the same cache: the same bytes and time, another ctime.
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert answer(home, RECIPE, "--bare")["actions"] == []
    after = kept.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_the_dry_run_promised_the_digests_that_are_there_now(home: Path) -> None:
    plan = answer(home, RECIPE, "--dry-run", "--venv", str(home / "elsewhere"))
    files = answer(home, "status", RECIPE)["patches"][0]["files"]
    assert plan["final"] == {file["path"]: file["now"] for file in files}
    assert not (home / "elsewhere").exists()


def test_a_second_environment_of_the_same_cache_is_pristine(home: Path) -> None:
    made = answer(home, RECIPE, "--bare", "--venv", str(home / "second"))
    assert made["receipt"]["patches"][0]["verdict"] == "applied"
    run(home, "revert", RECIPE, "--venv", str(home / "second"))
    assert check_record(find_site(home / "second"), python_only=False) == ()
    assert answer(home, "status", RECIPE)["proven"]
    shutil.rmtree(home / "second")
    third = answer(home, RECIPE, "--bare", "--venv", str(home / "second"))
    assert any("files against RECORD" in action for action in third["actions"])
    shutil.rmtree(home / "second")


def test_revert_gives_back_a_tree_whose_record_verifies(home: Path, venv: Path) -> None:
    assert len(answer(home, "revert", RECIPE)["files"]) == 7
    assert check_record(find_site(venv), python_only=False) == ()
    assert answer(home, "revert", RECIPE)["files"] == []
    assert answer(home, "status", RECIPE, expect=1)["patches"][0]["verdict"] == "applies"
    run(home, RECIPE, "--bare", "--check", expect=1)
    run(home, RECIPE, "--bare")
    assert answer(home, "status", RECIPE)["proven"]


def test_a_foreign_edit_is_refused_then_reset_on_request(home: Path, venv: Path) -> None:
    edited = find_site(venv).site_packages / "vllm/v1/worker/mamba_utils.py"
    good = edited.read_bytes()
    edited.unlink()  # a hard link to uv's cache may not be written to
    edited.write_bytes(good + b"# mine\n")
    error = answer(home, RECIPE, "--bare", expect=5)
    assert error["schema"] == "provision/error/1"
    assert "mamba_utils.py: foreign" in error["found"]
    assert edited.read_bytes() == good + b"# mine\n"
    run(home, RECIPE, "--bare", "--reapply-patches")
    assert edited.read_bytes() == good


def test_two_runs_at_once_end_in_one_proven_environment(home: Path) -> None:
    venv = home / "twice"
    environ = {**os.environ, "PROVISION_HOME": str(home), "PYTHONPATH": str(ROOT)}
    both = [
        subprocess.Popen(
            command(RECIPE, "--bare", "--venv", str(venv)), env=environ, stderr=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    assert [process.communicate(timeout=300) and process.returncode for process in both] == [0, 0]
    assert answer(home, "status", RECIPE, "--venv", str(venv))["proven"]
    shutil.rmtree(venv)


@pytest.mark.parametrize("seconds", [0.4, 1.2, 2.5, 5.0])
def test_a_killed_first_run_is_completed_by_the_next(home: Path, seconds: float) -> None:
    venv = home / f"killed-{seconds}"
    environ = {**os.environ, "PROVISION_HOME": str(home), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command(RECIPE, "--bare", "--venv", str(venv)),
        env=environ,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    run(home, RECIPE, "--bare", "--venv", str(venv))
    assert answer(home, "status", RECIPE, "--venv", str(venv))["proven"]
    shutil.rmtree(venv)


def test_locking_again_gives_the_same_bytes(home: Path) -> None:
    run(home, "lock", RECIPE, "--output", str(home / "relock"))
    made, stored = home / "relock", lockfiles_folder()
    assert (made / f"{RECIPE}.txt").read_bytes() == (stored / f"{RECIPE}.txt").read_bytes()
    # The facts name the uv that made the lock, which may be a newer one here.
    uv_line = f'uv = "{metadata.version("uv")}"'
    then = re.sub(r'^uv = ".*"$', uv_line, (stored / f"{RECIPE}.toml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert (made / f"{RECIPE}.toml").read_text(encoding="utf-8") == then


def test_the_built_wheel_works_outside_a_checkout(tmp_path: Path) -> None:
    from uv import find_uv_bin

    uv = find_uv_bin()
    subprocess.run([uv, "build", "--wheel", "--out-dir", str(tmp_path), str(ROOT)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([uv, "venv", "--python", sys.executable, str(tmp_path / "v")], check=True, timeout=60)
    python = str(tmp_path / "v" / "bin" / "python")
    subprocess.run([uv, "pip", "install", "--python", python, str(wheel)], check=True, timeout=300)
    provision = str(tmp_path / "v" / "bin" / "provision")
    environ = {**os.environ, "PROVISION_HOME": str(tmp_path / "home")}

    def ask(*arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [provision, *arguments, "--json"], env=environ, cwd=tmp_path, capture_output=True, check=True, timeout=120
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    assert len(ask("recipes")["recipes"]) == 3
    assert PATCH in {patch["id"] for patch in ask("patches")["patches"]}
    assert ask(RECIPE, "--dry-run")["patches"][0]["verdict"] == "applies"
