"""Hints name the recipe and the place of the user's own command, and work as they are printed."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from provisioner.cli.main import main
from provisioner.cli.shared.hints import Given, complete_hint, read_given

VENV = ("--venv", "/srv/my venv")


@pytest.mark.parametrize(
    ("argv", "given"),
    [
        (["up", "./mine.toml", "--venv", "v"], Given(recipe="./mine.toml", options=(("--venv", "v"),))),
        (["hynix", "--venv=v"], Given(recipe="hynix", options=(("--venv", "v"),))),
        (["status", "--venv", "v"], Given(options=(("--venv", "v"),))),
        (["patch", "check", "x", "--site-packages", "s", "--package", "p"],
         Given(options=(("--site-packages", "s"), ("--package", "p")))),
    ],
)  # fmt: skip
def test_what_a_command_line_names(argv: list[str], given: Given) -> None:
    assert read_given(argv, ["hynix"]) == given


@pytest.mark.parametrize(
    ("hint", "recipe", "options", "whole"),
    [
        ("provision patch diff", None, [VENV], "provision patch diff --venv '/srv/my venv'"),
        ("provision serve RECIPE -- -x", "hynix", [VENV], "provision serve hynix --venv '/srv/my venv' -- -x"),
        ("provision serve samsung", "hynix", [VENV], "provision serve samsung"),
        ("provision doctor --gpu", "hynix", [VENV], "provision doctor --gpu --venv '/srv/my venv'"),
        ("provision verify hynix", "hynix", [VENV], "provision verify hynix --venv '/srv/my venv'"),
        ("provision up mine --venv v", "./mine.toml", [VENV], "provision up ./mine.toml --venv v"),
        ("provision mine", "./mine.toml", [], "provision up ./mine.toml"),
        ("provision status", None, [VENV], "provision status"),
        ("provision recipes", "hynix", [VENV], "provision recipes"),
        ("provision patch check x --against pypi:1", None, [VENV], "provision patch check x --against pypi:1"),
        ("sudo reboot", "hynix", [VENV], "sudo reboot"),
        ("provision units RECIPE writes units", "hynix", [VENV], "provision units hynix writes units"),
    ],
)  # fmt: skip
def test_a_hint_is_made_whole(hint: str, recipe: str | None, options: list[tuple[str, str]], whole: str) -> None:
    assert complete_hint(hint, Given(recipe=recipe, options=tuple(options))) == whole


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment with a space in its name and no packages."""
    folder = tmp_path / "my venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "pyvenv.cfg").write_text(f"home = {Path(os.path.realpath(sys.executable)).parent}\n")
    return folder


def hints_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The hints that a command line which must fail ends with."""
    assert main(argv) not in (0, 70), argv
    err = capsys.readouterr().err
    return [line.removeprefix("hint: ") for line in err.splitlines() if line.startswith("hint: ")]


def test_an_environment_without_the_package_says_how_to_install_it(
    venv: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hints = hints_of(["patch", "check", "pr50021-gdn-spec-bounds", "--venv", str(venv)], capsys)
    assert hints[0] == f"uv pip install --python {shlex.quote(str(venv))} vllm"
    (venv / ".provision").mkdir()
    assert hints_of(["patch", "diff", "--venv", str(venv)], capsys) == [
        f"provision up RECIPE --venv {shlex.quote(str(venv))}"
    ]


def test_what_is_no_environment_is_called_what_it_is(venv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packages = venv / "packages"
    (packages / "x-1.dist-info").mkdir(parents=True)
    (gone,) = hints_of(["patch", "diff", "--venv", str(venv / "none")], capsys)
    (folder,) = hints_of(["patch", "diff", "--venv", str(packages)], capsys)
    assert (gone, folder) == ("provision status", f"provision patch diff --site-packages {shlex.quote(str(packages))}")
    (venv / "bin" / "python").unlink()
    assert "provision status" in hints_of(["patch", "diff", "--venv", str(venv)], capsys)
    (venv / "bin" / "python").symlink_to("/nowhere/python")
    (broken,) = hints_of(["patch", "diff", "--venv", str(venv)], capsys)
    assert broken.startswith(f"rm -r {shlex.quote(str(venv))}")


def test_a_missing_patch_file_names_the_near_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bounds.patch").write_text("")
    hints = hints_of(["patch", "lint", str(tmp_path / "bound.patch")], capsys)
    assert hints == [f"did you mean {tmp_path}/bounds.patch?", f"ls {tmp_path}"]


@pytest.mark.parametrize("text", ["schema = ", "schema = 2\n", "nonsense = 1\n"])
def test_a_bad_recipe_names_a_good_one(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.toml").write_text(text)
    (hint,) = hints_of(["up", str(tmp_path / "bad.toml")], capsys)
    assert Path(hint.rpartition(" ")[2]).is_file()
