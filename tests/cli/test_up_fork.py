"""``provision samsung``: the options of its fork."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from provisioner.cli.main import main


def text_of(capsys) -> str:
    captured = capsys.readouterr()
    return re.sub(r"\s+", " ", captured.out + captured.err)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["samsung", "--without-fork", "--fork-any"], "does not go with other options"),
        (["samsung", "--without-fork", "--fork-dir", "/x"], "does not go with other options"),
        (["samsung", "--fork-dir", "/x", "--venv", "/y"], "the venv of its own checkout"),
        (["up", "hynix-stable", "--fork-any"], "the recipe has no fork"),
    ],
)
def test_options_that_cannot_be_meant(words, what, capsys):
    assert main(words) == 2
    assert what in text_of(capsys)


def test_the_options_of_a_fork_have_a_panel_that_says_whom_they_are_for(capsys):
    assert main(["samsung", "--help"]) == 0
    options, panel, fork = text_of(capsys).partition("Fork, for recipes that have one (samsung)")
    assert panel
    assert "--fork-commit" in fork
    assert "--fork" not in options
    assert main(["hynix", "--fork-commit", "1"]) == 2


def test_a_commit_that_the_fork_lacks(tmp_path: Path, capsys, own_home: Path):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    origin = tmp_path / "origin"
    environment = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "HOME": str(own_home)}
    subprocess.run(["git", "init", "--quiet", str(origin)], check=True, timeout=30, env=environment)
    assert main(["samsung", "--fork-url", f"file://{origin}", "--fork-commit", "1" * 40, "--dry-run"]) == 4
    assert "no such commit" in text_of(capsys)
    assert not (own_home / ".local").exists()


def test_a_mirror_and_where_to_put_it_go_together(tmp_path: Path, capsys, own_home: Path):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    words = ["samsung", "--fork-url", f"file://{tmp_path}/mirror", "--fork-dir", str(tmp_path / "put"), "--bare"]
    assert main(words) == 4
    shown = text_of(capsys)
    assert f"clone file://{tmp_path}/mirror" in shown
    assert "no repository can be read here" in shown


def test_a_hint_for_the_help_page_is_a_command(tmp_path: Path, capsys):
    assert main(["samsung", "--without-fork", "--fork-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("provision samsung --help")


def test_a_folder_that_is_no_checkout_is_left_alone(tmp_path: Path, capsys):
    (tmp_path / "mine").touch()
    assert main(["samsung", "--fork-dir", str(tmp_path)]) == 5
    assert "not a git checkout" in text_of(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
