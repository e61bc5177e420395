"""The error boundary and the frame: exit codes, where text goes, help."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from provisioner import errors
from provisioner.cli.app import ENTRIES, load_command
from provisioner.cli.main import main
from provisioner.resources import recipe_names
from tests.support.commands import every_command

COMMANDS = dict(every_command())


def test_every_entry_is_a_command():
    names = {words[0] for words in COMMANDS}
    assert names == {entry.name for entry in ENTRIES}


@pytest.mark.parametrize("words", sorted(COMMANDS), ids=" ".join)
def test_help_teaches_with_an_example(words):
    command = COMMANDS[words]
    assert "Example" in (command.help or ""), words


@pytest.mark.parametrize("words", sorted(COMMANDS), ids=" ".join)
def test_every_option_has_help(words):
    missing = [param.name for param in COMMANDS[words].params if not getattr(param, "help", None)]
    assert missing == []


def test_the_list_of_commands_says_what_each_says_itself(capsys):
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f" {name} " in listed for name in (*recipe_names(), *(entry.name for entry in ENTRIES)))
    for entry in ENTRIES:
        assert load_command(entry.name).help.partition("\n\n")[0].replace("\n", " ") == entry.summary


@pytest.mark.parametrize("typed", ["provision hynix --with", "provision up hynix --with", "provision samsung --with"])
def test_the_options_of_a_recipe_are_completed(typed):
    assert {"--without-patch", "--without-fork"} <= completed(typed)


def test_recipes_and_commands_are_completed():
    assert completed("provision h") == {"hynix", "hynix-stable"}
    assert completed("provision patch re") == {"revert", "refresh"}


def completed(typed: str) -> set[str]:
    """What a shell is offered for a command line whose last word is not complete."""
    environ = {**os.environ, "_PROVISION_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": typed}
    program = [sys.executable, "-c", "from provisioner.cli.main import run; run()"]
    done = subprocess.run(program, env=environ, capture_output=True, text=True, check=True, timeout=60)
    return set(re.findall(r'"([\w-]+)":', done.stdout))


def test_a_recipes_name_is_short_for_up(capsys):
    assert main(["hynix", "--downgrade"]) == main(["up", "hynix", "--downgrade"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[: len(told) // 2] == told[len(told) // 2 :]
    assert main(["hynix", "--help"]) == 0
    assert "short for up NAME" in capsys.readouterr().out


def test_the_list_of_commands_loads_none_of_them():
    script = "import sys; from provisioner.cli.main import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name for name in done.stdout.split() if name.startswith("provisioner.cli.")}
    assert loaded <= {f"provisioner.cli.{name}" for name in ("app", "main", "shared", "shared.render", "shared.argv")}


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--version"], 0),
        (["--help"], 0),
        (["recipes"], 0),
        (["nonsense"], 2),
        (["status", "--nonsense"], 2),
        (["up", "nonsense"], 2),
        (["up", "./missing.toml"], 2),
        (["patches", "nonsense"], 2),
    ],
)
def test_exit_codes_of_the_frame(argv, code, capsys):
    assert main(argv) == code


def test_an_error_says_what_and_hints_on_stderr_only(capsys):
    assert main(["up", "hynx"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error[usage]: no recipe is called 'hynx'\nhint: did you mean 'hynix'?\nhint: provision recipes\n"


def test_an_error_is_json_too_when_asked(capsys):
    assert main(["up", "hynx", "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "provision/error/1"
    assert (answer["code"], answer["exit"]) == ("usage", 2)


def test_an_invalid_recipe_names_its_key(tmp_path: Path, capsys):
    recipe = tmp_path / "mine.toml"
    recipe.write_text('schema = 1\ntitle = "T"\n[build]\nreleese = "1"\nrelease = "1"\n')
    assert main(["up", str(recipe)]) == 3
    assert f"where:    {recipe}: build.releese" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidLockError("x"), 3),
        (errors.NetworkError("x"), 4),
        (errors.ForeignBytesError("x"), 5),
        (errors.RestoredError("x"), 6),
        (errors.NotRestoredError("x"), 7),
        (errors.CardError("x"), 8),
        (KeyboardInterrupt(), 130),
        (RuntimeError("x"), 70),
    ],
)
def test_every_ending_has_its_exit_code(error, code, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr("provisioner.cli.recipes.all_recipes", fail)
    assert main(["recipes"]) == code
    assert capsys.readouterr().err


def test_exit_codes_stand_on_the_classes():
    codes = {cls.code: cls.exit_code for cls in vars(errors).values() if isinstance(cls, type)}
    assert len(codes) > 15
    assert set(codes.values()) == {2, 3, 4, 5, 6, 7, 8, 70, 130}


def test_recipes_as_json(capsys):
    assert main(["recipes", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "provision/recipes/1"
    assert {"name", "title", "summary", "distribution", "build", "commit", "card", "python", "fork", "patches"} == set(
        answer["recipes"][0]
    )


def test_patches_as_json(capsys):
    assert main(["patches", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    patches = {patch["id"]: patch for patch in answer["patches"]}
    assert {"pr50021-gdn-spec-bounds", "sm80-cpu-repack"} <= set(patches)
    ranges = {variant["file"]: variant["versions"] for variant in patches["pr50021-gdn-spec-bounds"]["variants"]}
    assert ranges["0.27.patch"] == ">=0.27,<0.28"


def test_status_of_nothing_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    assert main(["status"]) == 0
    assert "no environment yet" in capsys.readouterr().err
    assert main(["status", "hynix-stable"]) == 1
    assert "hint: provision up hynix-stable" in capsys.readouterr().out


def test_a_reader_that_goes_away_is_no_error():
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m provisioner patches --json | head -c 1 >/dev/null"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr


def test_texts_that_are_no_version_and_no_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    assert main(["lock", "hynix-stable", "--version", "abc", "--dry-run"]) == 2
    (tmp_path / "b.toml").write_bytes(b"title = '\xff'")
    assert main(["up", str(tmp_path / "b.toml")]) == 3
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["status", "--venv", ""],
        ["status", "--venv="],
        ["patch", "check", "--site-packages", "", "x"],
        ["drift", "-o", ""],
        ["verify", "--report", ""],
        ["drift", "--patches", ""],
        ["verify", "--model", ""],
        ["serve", "hynix", "--model", ""],
        ["up", "hynix", "--python", ""],
        ["up", ""],
        ["patch", "lint", "--", ""],
        ["bundle", "hynix", "--output", ""],
        ["containerfile", "hynix", "--bundle="],
    ],
    ids=" ".join,
)
def test_an_empty_word_is_never_the_current_folder(argv, capsys):
    assert main(argv) == 2
    assert "is empty" in capsys.readouterr().err


def test_a_servers_own_words_may_be_empty(capsys):
    main(["serve", "hynix", "--json", "--", "--chat-template", ""])
    assert "" in json.loads(capsys.readouterr().out)["argv"]


def test_a_root_may_be_empty_since_that_is_its_default(capsys):
    assert main(["patch", "lint", "pr50021-gdn-spec-bounds", "--root", ""]) == 0
    assert "pr50021" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["status", "--nonsense", "--json"], "provision status --help"),
        (["up", "--json"], "provision up --help"),
        (["units", "hynix", "--port", "x", "--json"], "provision units --help"),
        (["nonsense", "--json"], "provision --help"),
    ],
    ids=str,
)
def test_a_wrong_command_line_is_json_too_when_asked(argv, hint, capsys):
    assert main(argv) == 2
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["exit"], answer["hints"]) == ("provision/error/1", 2, [hint])


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), "interrupted"), (RuntimeError("x"), "bug"), (errors.NetworkError("x"), "network")],
    ids=str,
)
def test_every_ending_is_one_json_object_when_asked(error, code, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr("provisioner.cli.recipes.all_recipes", fail)
    assert main(["recipes", "--json"]) == json.loads(capsys.readouterr().out)["exit"]
    main(["recipes", "--json"])
    assert json.loads(capsys.readouterr().out)["code"] == code


def test_a_file_that_cannot_be_written_is_no_defect(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["verify", "hynix", "--report", str(tmp_path / "file" / "x.json")]) == 5
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert f"hint: ls -ld {tmp_path / 'file'}" in err


@pytest.mark.parametrize("words", ["patches", "recipes --json", "patches sm80-cpu-repack 2>&1"])
def test_a_reader_that_goes_away_changes_no_exit_code(words):
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m provisioner {words} | true"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "argv",
    [
        ["status", "--venv", "FILE"],
        ["drift", "--variant", "sm80-cpu-repack@x"],
        ["drift", "--variant", "nothing@0.29.0"],
        ["drift", "hynix", "--strip", "1"],
        ["drift-issue", "LIST", "--repository", "a/b"],
        ["doctor", "--url", "nonsense"],
        ["doctor", "--log", "MISSING"],
        ["units", "hynix", "--user", "me"],
        ["up", "hynix", "--downgrade"],
        ["up", "hynix", "--keep-patches", "--reapply-patches"],
        ["lock", "hynix", "--export-pylock", "x", "--dry-run"],
        ["lock", "hynix", "--output", "x", "--write-here"],
        ["serve", "hynix", "--env", "A"],
        ["verify", "hynix", "--occupancy", "200%"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_meant_is_refused_with_a_hint(argv, tmp_path, capsys):
    (tmp_path / "file").write_text("hello\n")
    (tmp_path / "list").write_text("[]")
    places = {"FILE": tmp_path / "file", "LIST": tmp_path / "list", "MISSING": tmp_path / "none"}
    assert main([str(places.get(word, word)) for word in argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error[usage]")
    assert "hint: " in err


def test_a_user_without_a_home_is_told_so(monkeypatch, capsys):
    def have_none(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", have_none)
    assert main(["patch", "diff", "--venv", "~/v"]) == 2
    assert "hint: export HOME=" in capsys.readouterr().err


def test_ctrl_c_while_the_command_line_is_loaded_is_an_interruption_too(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("provisioner.cli.app.build_command", interrupt)
    assert main(["recipes", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["code"] == "interrupted"


@pytest.mark.parametrize(
    ("words", "code"),
    [("recipes > /dev/full", 5), ("recipes --json > /dev/full", 5), ("recipes >&-", 0), ("up hynx 2>&-", 2)],
)
def test_streams_that_take_nothing_are_no_defect(words, code):
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m provisioner {words}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_what_a_file_in_the_place_of_an_environment_is_called(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["status", "hynix", "--venv", str(tmp_path / "file")]) == 5
    assert "a file stands in the environment's place" in capsys.readouterr().err
