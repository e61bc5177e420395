"""The fork's checkout: cloned whole or not at all, proven by content, read in series order."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from provisioner.documents.recipe import ForkStack
from provisioner.errors import CannotObtainError, EnvironmentConflictError, NetworkError, NoSuchBuildError
from provisioner.series.checkout import (
    blob_name,
    clone_fork,
    drafter_hint,
    find_drafter,
    read_checkout,
    require_pinned,
)

FILES = {
    "patches/0002-second.patch": "second\n",
    "patches/0001-first.patch": "first\n",
    "patches/a-last.patch": "last\n",
    "patches/README.md": "no patch\n",
    "kvarn/files/vllm/new/module.py": "new = 1\n",
    "kvarn/files/vllm/new/data.json": "{}\n",
    "kvarn/kvarn-0.27.1.patch": "k1\n",
    "kvarn/kvarn-v2.patch": "k2\n",
    "kvarn/install.sh": "exit 1\n",
    "single-user/start_qwen.sh": "#!/bin/bash\n",
    ".gitignore": "venv/\nmodels/\nignored.patch\n",
}


def git(folder: Path, *arguments: str) -> str:
    environment = {
        "PATH": os.environ["PATH"],
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "n",
        "GIT_AUTHOR_EMAIL": "e",
        "GIT_COMMITTER_NAME": "n",
        "GIT_COMMITTER_EMAIL": "e",
    }
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=30, env=environment
    ).stdout.strip()


def commit_files(folder: Path, files: dict[str, str], message: str) -> str:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "-m", message)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def origin(tmp_path):
    folder = tmp_path / "origin"
    folder.mkdir()
    git(folder, "init", "--quiet", "-b", "main")
    pinned = commit_files(folder, FILES, "pinned")
    newer = commit_files(folder, {"patches/0003-third.patch": "third\n"}, "newer")
    return folder, pinned, newer


def stack(origin, **changes) -> ForkStack:
    folder, pinned, _ = origin
    fork = ForkStack(
        url=f"file://{folder}",
        commit=pinned,
        root="vllm",
        patches="patches/*.patch",
        overlay="kvarn",
        overlay_patches="kvarn/*.patch",
        launcher="single-user/start_qwen.sh",
        drafters=("models/D-W4A16", "models/D"),
    )
    return replace(fork, **changes)


@pytest.fixture
def checkout(origin, tmp_path):
    fork = stack(origin)
    folder = tmp_path / "place" / "fork"
    clone_fork(fork.url, fork.commit, folder)
    return folder, fork


def test_a_clone_is_at_the_pinned_commit_and_proven(checkout):
    folder, fork = checkout
    found = read_checkout(folder, fork)
    assert (found.commit, found.edits) == (fork.commit, ())
    require_pinned(found, fork)
    assert [patch.id for patch in found.patches] == ["fork/0001-first", "fork/0002-second", "fork/a-last"]
    assert [patch.text for patch in found.overlay_patches] == [b"k1\n", b"k2\n"]
    assert [(file.path, file.content) for file in found.overlay] == [
        ("vllm/new/data.json", b"{}\n"),
        ("vllm/new/module.py", b"new = 1\n"),
    ]
    assert found.venv == folder / "venv"


def test_a_commit_in_the_middle_of_a_branch_is_found(origin, tmp_path):
    folder, _, newer = origin
    later = commit_files(folder, {"x": "1"}, "later")
    assert later != newer
    clone_fork(f"file://{folder}", newer, tmp_path / "c")
    assert read_checkout(tmp_path / "c", stack(origin)).commit == newer


def test_no_half_made_checkout_is_left(origin, tmp_path):
    place = tmp_path / "place"
    with pytest.raises(NoSuchBuildError, match="no such commit"):
        clone_fork(f"file://{origin[0]}", "0" * 40, place / "fork")
    with pytest.raises(NetworkError, match="no answer"):
        clone_fork(f"file://{origin[0]}", origin[1], place / "fork", timeout_seconds=0.0001)
    assert list(place.iterdir()) == []


def test_a_mirror_on_this_machine_is_never_called_a_network(origin, tmp_path):
    folder, pinned, _ = origin
    with pytest.raises(CannotObtainError, match="no repository can be read here") as nowhere:
        clone_fork(f"file://{tmp_path}/nowhere", pinned, tmp_path / "fork")
    name = git(folder, "rev-parse", f"{pinned}:patches/0001-first.patch")
    (folder / ".git" / "objects" / name[:2] / name[2:]).unlink()
    for url in (f"file://{folder}", str(folder)):
        with pytest.raises(CannotObtainError, match="lacks objects") as damaged:
            clone_fork(url, pinned, tmp_path / "fork")
        assert damaged.value.hints == (f"git -C {folder} fsck",)
        assert name in (damaged.value.found or "")
    assert not any(isinstance(caught.value, NetworkError) for caught in (nowhere, damaged))
    with pytest.raises(NetworkError, match="git failed"):
        clone_fork("http://127.0.0.1:9/fork.git", pinned, tmp_path / "fork")


def test_a_folder_that_exists_is_left_alone(origin, tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mine").touch()
    with pytest.raises(EnvironmentConflictError, match="exists"):
        clone_fork(f"file://{origin[0]}", origin[1], tmp_path / "c")


def test_another_commit_is_refused(checkout, origin):
    folder, fork = checkout
    found = read_checkout(folder, fork)
    with pytest.raises(EnvironmentConflictError, match="another commit") as caught:
        require_pinned(found, fork, commit=origin[2])
    assert caught.value.found == origin[1]
    assert caught.value.hints[0] == f"git -C {folder} checkout {origin[2]}"


@pytest.mark.parametrize(
    ("spoil", "path", "what"),
    [
        (lambda f: (f / "patches/0001-first.patch").write_text("other\n"), "patches/0001-first.patch", "edited"),
        (lambda f: (f / "single-user/start_qwen.sh").write_text(""), "single-user/start_qwen.sh", "edited"),
        (lambda f: (f / "kvarn/kvarn-v2.patch").unlink(), "kvarn/kvarn-v2.patch", "missing"),
        (lambda f: (f / "patches/ignored.patch").write_text("x"), "patches/ignored.patch", "not part of the commit"),
        (lambda f: (f / "kvarn/files/more.py").write_text("x"), "kvarn/files/more.py", "not part of the commit"),
    ],
)
def test_local_edits_are_refused_by_name(checkout, spoil, path, what):
    folder, fork = checkout
    spoil(folder)
    found = read_checkout(folder, fork)
    assert [(edit.path, edit.what) for edit in found.edits] == [(path, what)]
    with pytest.raises(EnvironmentConflictError, match="local edits") as caught:
        require_pinned(found, fork)
    assert path in (caught.value.found or "")


def test_an_edit_that_git_was_told_to_overlook_is_seen(checkout):
    folder, fork = checkout
    git(folder, "update-index", "--assume-unchanged", "patches/0001-first.patch")
    (folder / "patches/0001-first.patch").write_text("hidden\n")
    assert git(folder, "status", "--porcelain") == ""
    assert [edit.path for edit in read_checkout(folder, fork).edits] == ["patches/0001-first.patch"]


def test_models_and_the_environment_are_no_edits(checkout):
    folder, fork = checkout
    for name in ("venv/bin/python", "models/D/model.safetensors", "api_key.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    assert read_checkout(folder, fork).edits == ()


def test_git_is_not_led_astray(checkout, monkeypatch):
    folder, fork = checkout
    marker = folder / "ran"
    git(folder, "config", "core.fsmonitor", f"touch {marker}")
    monkeypatch.setenv("GIT_DIR", "/nonexistent")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    assert read_checkout(folder, fork).commit == fork.commit
    assert not marker.exists()


def test_a_folder_inside_another_checkout_is_no_checkout(checkout):
    folder, fork = checkout
    (folder / "inner").mkdir()
    with pytest.raises(EnvironmentConflictError, match="not a git checkout"):
        read_checkout(folder / "inner", fork)


def test_a_link_that_leads_out_is_refused(checkout, tmp_path):
    folder, fork = checkout
    (tmp_path / "secret").write_text("x")
    (folder / "patches/z.patch").symlink_to(tmp_path / "secret")
    with pytest.raises(EnvironmentConflictError, match="out of the checkout"):
        read_checkout(folder, fork)


def test_an_overlay_without_a_files_folder(origin, tmp_path):
    folder, _, _ = origin
    commit = commit_files(folder, {"flat/vllm/a.py": "a\n", "flat/b.py": "b\n", "flat/README.md": ""}, "flat")
    clone_fork(f"file://{folder}", commit, tmp_path / "c")
    found = read_checkout(tmp_path / "c", stack(origin, overlay="flat", overlay_patches=None))
    assert [file.path for file in found.overlay] == ["vllm/b.py", "vllm/a.py"]
    assert found.overlay_patches == ()


def test_a_stack_without_the_overlay(origin, tmp_path):
    clone_fork(f"file://{origin[0]}", origin[1], tmp_path / "c")
    found = read_checkout(tmp_path / "c", stack(origin, overlay="missing", overlay_patches="missing/*.patch"))
    assert (found.overlay, found.overlay_patches) == ((), ())


def test_the_drafter_is_looked_for_as_the_launcher_does(checkout, tmp_path):
    folder, fork = checkout
    assert find_drafter(folder, fork, {}) is None
    (folder / "models/D").mkdir(parents=True)
    assert find_drafter(folder, fork, {}) is None
    (folder / "models/D/model.safetensors").write_text("")
    assert find_drafter(folder, fork, {}) == folder / "models/D"
    assert find_drafter(folder, fork, {"DRAFT": str(tmp_path / "none")}) is None
    assert find_drafter(folder, fork, {"DRAFT": "models/D"}) == folder / "models/D"


def test_the_command_that_fetches_the_drafter(checkout):
    folder, _ = checkout
    assert drafter_hint(folder).startswith("hf download ")
    (folder / "prepare").mkdir()
    (folder / "prepare/fetch_dflash2.py").write_text("")
    assert drafter_hint(folder) == f"cd {folder} && venv/bin/python prepare/fetch_dflash2.py"


def test_object_names_are_gits(checkout):
    folder, _ = checkout
    path = folder / "single-user/start_qwen.sh"
    assert blob_name(path.read_bytes()) == git(folder, "hash-object", str(path))
