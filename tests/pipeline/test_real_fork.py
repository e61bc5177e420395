"""``provision samsung`` on the real files of its fork and the real wheel of vLLM 0.27.1."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from packaging.version import Version

from provisioner.cli.main import main
from provisioner.digests import digest_of
from provisioner.environment.site import find_site
from provisioner.index.settings import read_settings
from provisioner.patching.compare import patch_between
from provisioner.patching.diff import print_patch
from provisioner.pipeline.shipped import open_shipped
from provisioner.resources import patches_folder
from provisioner.series.store import open_stored_patch
from tests.support.fork_stack import commit_all
from tests.support.real_fork import REPLACED, commit_fork, final_digests, run_own_loop

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(600)]

OWN = "pr50021-gdn-spec-bounds"
GDN_FILES = {
    "vllm/model_executor/layers/mamba/ops/causal_conv1d.py",
    "vllm/model_executor/layers/mamba/ops/mamba_ssm.py",
    "vllm/third_party/flash_linear_attention/ops/fused_recurrent.py",
    "vllm/third_party/flash_linear_attention/ops/fused_sigmoid_gating.py",
}


class Samsung:
    """The recipe's environment in a checkout of the fork."""

    def __init__(self, folder: Path, commit: str) -> None:
        self.folder, self.commit, self.venv = folder, commit, folder / "venv"

    def run(self, *words: str) -> int:
        return main(["samsung", "--bare", "--fork-dir", str(self.folder), "--fork-commit", self.commit, *words])

    @property
    def packages(self) -> Path:
        return find_site(self.venv, "vllm").site_packages

    def digests(self, paths: Mapping[str, object]) -> dict[str, str | None]:
        files = {path: self.packages / path for path in paths}
        return {path: digest_of(file.read_bytes()) if file.exists() else None for path, file in files.items()}

    def restore(self, path: str) -> None:
        """Give a file the bytes that the wheel has, as an untouched environment holds them."""
        assert main(["revert", "samsung", "--venv", str(self.venv)]) == 0
        assert self.digests({path: None})[path] == find_site(self.venv, "vllm").record.digest(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Samsung:
    """The proven environment, made once: the tests leave it as they find it."""
    folder = tmp_path_factory.mktemp("fork") / "checkout"
    found = Samsung(folder, commit_fork(folder))
    assert found.run() == 0
    return found


@pytest.fixture
def expected(made: Samsung) -> dict[str, str | None]:
    """What each file of the series must be: the fork's own result, but for the four that our text changes."""
    theirs = final_digests()
    receipt = json.loads((made.venv / ".provision" / "receipt.json").read_text())
    ours = {file["path"]: file["after"] for patch in receipt["patches"] for file in patch["files"]}
    assert set(theirs) <= set(ours)
    return ours | {path: digest for path, digest in theirs.items() if path not in GDN_FILES}


def test_fifty_files_are_the_forks_and_four_are_ours(made: Samsung) -> None:
    theirs = final_digests()
    found = made.digests(theirs)
    assert {path for path in theirs if found[path] != theirs[path]} == GDN_FILES
    assert len(theirs) - len(GDN_FILES) == 50


def test_the_four_are_as_our_text_alone_leaves_them(made: Samsung, tmp_path: Path) -> None:
    alone = tmp_path / "packages"
    record = find_site(made.venv, "vllm").record
    for path in GDN_FILES:
        kept = made.venv / ".provision" / "objects" / str(record.digest(path))
        (alone / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(kept, alone / path)
    theirs = Path(__file__).parents[2] / "patches" / OWN / "0.27.patch"
    subprocess.run(
        ["git", "apply", *(f"--include={path}" for path in GDN_FILES), str(theirs)], cwd=alone, check=True, timeout=60
    )
    assert {path: digest_of((alone / path).read_bytes()) for path in GDN_FILES} == made.digests(
        dict.fromkeys(GDN_FILES)
    )


def test_it_says_what_takes_the_place_of_what(made: Samsung, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"fork/{REPLACED}: replaced by {OWN}"
    capsys.readouterr()
    assert made.run("--dry-run") == 0
    assert line in capsys.readouterr().out
    assert main(["status", "samsung", "--venv", str(made.venv)]) == 0
    assert line in capsys.readouterr().out
    assert made.run("--dry-run", "--json") == 0
    wanted = [{"id": f"fork/{REPLACED}", "omission": "replaced", "by": OWN}]
    assert json.loads(capsys.readouterr().out)["left_out"] == wanted
    assert json.loads((made.venv / ".provision" / "receipt.json").read_text())["left_out"] == wanted


def test_a_second_run_writes_nothing(made: Samsung, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.venv.rglob("*") if path.is_file()}
    assert made.run("--check") == 0
    assert made.run() == 0
    after = {path: path.stat().st_mtime_ns for path in made.venv.rglob("*") if path.is_file()}
    changed = {path.name for path in {**before, **after} if before.get(path) != after.get(path)}
    assert changed <= {"lock"}


def test_serve_names_the_forks_launcher(made: Samsung, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    main(["serve", "samsung", "--fork-dir", str(made.folder), "--model", "m", "--print"])
    assert str(made.folder / "single-user" / "start_qwen.sh") in capsys.readouterr().out


def half(made: Samsung) -> None:
    run_own_loop(made.folder, made.packages / "vllm", last=6)


def whole(made: Samsung) -> None:
    run_own_loop(made.folder, made.packages / "vllm")


def by_hand(made: Samsung) -> None:
    for path in [*sorted(GDN_FILES)[:2], "vllm/envs.py"]:
        file = made.packages / path
        text = file.read_bytes()
        file.unlink()  # the installed file is a hard link into uv's cache
        file.write_bytes(text + b"# mine\n")


@pytest.mark.parametrize(
    "patched", [lambda made: None, half, whole, by_hand], ids=["untouched", "half", "whole", "edit"]
)
def test_reapplying_over_any_state_gives_the_same_bytes(
    made: Samsung, expected: dict[str, str | None], patched: Callable[[Samsung], None]
) -> None:
    made.restore("vllm/envs.py")
    patched(made)
    assert made.run("--reapply-patches") == 0
    assert made.digests(expected) == expected
    assert main(["status", "samsung", "--venv", str(made.venv)]) == 0


def test_revert_leaves_what_the_wheel_shipped(made: Samsung, expected: dict[str, str | None]) -> None:
    assert main(["revert", "samsung", "--venv", str(made.venv)]) == 0
    record = find_site(made.venv, "vllm").record
    assert made.digests(expected) == {path: record.digest(path) for path in expected}
    assert made.run() == 0
    assert made.digests(expected) == expected


def test_a_patch_on_our_lines_is_named_with_the_way_out(
    tmp_path: Path, made: Samsung, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = (made.folder / "patches" / f"{REPLACED}.patch").read_text()
    folder = tmp_path / "checkout"
    commit = commit_fork(folder, {"patches/unknown-bounds.patch": unknown})
    other = Samsung(folder, commit)
    assert other.run("--dry-run") == 5
    said = capsys.readouterr().err
    assert "fork/unknown-bounds comes before it and changes these lines" in said
    assert "--without-patch fork/unknown-bounds" in said
    assert other.run("--dry-run", "--without-patch", "fork/unknown-bounds") == 0
    assert "fork/unknown-bounds: left out by --without-patch" in capsys.readouterr().out


def test_a_required_patch_is_left_out_in_plain_words_alone(made: Samsung, capsys: pytest.CaptureFixture[str]) -> None:
    assert made.run("--dry-run", "--without-patch", OWN) == 2
    assert "--not-as-recipe" in capsys.readouterr().err
    assert made.run("--without-patch", OWN, "--not-as-recipe") == 0
    assert "samsung: not as the recipe says" in capsys.readouterr().out
    assert main(["status", "samsung", "--venv", str(made.venv)]) == 1
    assert f"{OWN} is required and was left out: not as the recipe says" in capsys.readouterr().out
    assert main(["serve", "samsung", "--fork-dir", str(made.folder), "--model", "m"]) != 0
    assert f"the required patch {OWN} is not applied" in capsys.readouterr().err
    assert made.run() == 0


def test_the_stack_is_judged_on_other_releases(made: Samsung, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    words = ["drift", "samsung", "--fork-dir", str(made.folder), "--json"]
    assert main([*words, "--against", "pypi:0.27.1"]) == 0
    (build,) = json.loads(capsys.readouterr().out)["builds"]
    assert {patch["verdict"] for patch in build["patches"]} <= {"applies", "applies-at-offset"}
    assert len(build["patches"]) == 17
    assert main([*words, "--against", "pypi:0.30.0"]) == 1
    (build,) = json.loads(capsys.readouterr().out)["builds"]
    verdicts = {patch["id"]: patch["verdict"] for patch in build["patches"]}
    assert verdicts["fork/kvarn-v2-runner"] == "conflict"
    assert verdicts["pr50021-gdn-spec-bounds"].startswith("applies")


def test_drift_says_which_fork_it_judged_and_which_patch_is_in_the_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later commit calls its text by another name, and ours finds it where its own is to go."""
    folder = tmp_path / "checkout"
    commit_fork(folder)
    (folder / "patches" / f"{REPLACED}.patch").rename(folder / "patches" / "bounds-v2.patch")
    commit = commit_all(folder, "later")
    assert main(["drift", "samsung", "--fork-dir", str(folder), "--against", "pypi:0.27.1", "--json"]) == 1
    said = capsys.readouterr()
    (build,) = json.loads(said.out)["builds"]
    (ours,) = (patch for patch in build["patches"] if patch["id"] == OWN)
    line = "hunk 1: fork/bounds-v2 comes before it and changes these lines"
    assert f"vllm/model_executor/layers/mamba/ops/causal_conv1d.py, {line}" in ours["account"]
    assert f"is at {commit[:12]}, not the pinned commit" in " ".join(said.err.split())


def test_drift_knows_the_recipes_own_checkout(
    made: Samsung, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    (tmp_path / "forks").mkdir()
    (tmp_path / "forks" / "samsung").symlink_to(made.folder)
    assert main(["drift", "samsung", "--against", "pypi:0.27.1"]) == 0
    assert "samsung: fork/speed-knobs-envs " in capsys.readouterr().out
    assert main(["drift", "hynix", "--fork-dir", str(made.folder)]) == 2


def test_the_forks_folder_with_ours_names_the_one_in_the_way(made: Samsung, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["patch", "check", str(made.folder / "patches"), OWN, "--root", "vllm", "--against", "pypi:0.27.1"]
    assert main(words) == 5
    said = capsys.readouterr()
    assert f"{REPLACED} comes before it and changes these lines" in said.out
    assert f"run again with --without-patch {REPLACED}, which leaves it out" in said.err
    assert main([*words, "--without-patch", REPLACED]) == 0


def test_a_change_that_the_release_has_is_left_out_of_a_users_series(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that 0.27.1 changed in the sources of 0.27.0."""
    path = "vllm/model_executor/models/qwen3_dspark.py"
    files = [read_shipped(f"pypi:{version}", path, tmp_path) for version in ("0.27.0", "0.27.1")]
    assert files[0] != files[1]
    merged = tmp_path / "merged.patch"
    merged.write_bytes(print_patch(patch_between(*files, id="merged", source="merged")))
    words = ["patch", "check", str(merged), OWN, "--against", "pypi:0.27.1"]
    assert main(words) == 0
    assert "merged: not needed here, the build has it already" in capsys.readouterr().err
    assert main([*words, "--strict"]) == 5


def read_shipped(spec: str, path: str, cache: Path) -> dict[str, bytes]:
    with closing(open_shipped(spec, "vllm", read_settings(os.environ, cache)).wheel) as wheel:
        return dict(wheel.read_many([path]))


def test_no_case_of_the_behaviour_check_is_red(made: Samsung, tmp_path: Path) -> None:
    """vLLM's kernels as the whole stack leaves them, against those of the wheel: all seven files."""
    for needed in ("torch", "triton", "numpy"):
        pytest.importorskip(needed)
    patch = open_stored_patch(patches_folder(), OWN)
    variant = patch.variant_for(Version("0.27.1"))
    assert variant is not None
    assert len(variant.manifest.files) == 7
    record = find_site(made.venv, "vllm").record
    for file in variant.manifest.files:
        place = tmp_path / "pristine" / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made.venv / ".provision" / "objects" / str(record.digest(file.path)), place)
    done = subprocess.run(
        [sys.executable, "-I", "check.py", "--pristine", str(tmp_path / "pristine"), "--patched", str(made.packages)],
        cwd=patch.folder,
        env={"OMP_NUM_THREADS": "1", "HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert [case for case in cases if not case["ok"]] == []
    assert (done.returncode, len({case["kernel"] for case in cases})) == (0, 8), done.stderr
    assert len(cases) > 150
