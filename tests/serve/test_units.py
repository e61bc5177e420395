"""systemd units: what they promise, that systemd understands them, and that words survive its quoting."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.serve.units import HOPELESS, Manager, Unit, UnitPlan, install_commands, quote_word, render_units

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (Debian package systemd)"
)


def make_plan(tmp_path: Path, **changes) -> UnitPlan:
    program = tmp_path / "bin" / "provision"
    program.parent.mkdir(exist_ok=True)
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    values = {
        "name": "hynix",
        "recipe": "hynix",
        "command": (str(program),),
        "manager": Manager.USER,
        "user": None,
        "folder": tmp_path,
        "port": 8012,
        "serve_options": ("--key-file", "/srv/the key", "--gpu", "GPU-1"),
        "extra": ("--served-model-name", "100% $HOME"),
    }
    return UnitPlan(**(values | changes))


def value_of(unit: Unit, key: str) -> str:
    match = re.search(rf"^{key}=(.*)$", unit.text, re.MULTILINE)
    assert match, f"{key} is missing in {unit.name}"
    return match[1]


@needs_systemd
@pytest.mark.parametrize("manager", list(Manager))
def test_systemd_understands_every_unit(tmp_path, manager):
    user = "root" if manager is Manager.SYSTEM else None
    units = render_units(make_plan(tmp_path, manager=manager, user=user, environment=(("A", 'b "c" %d'),)))
    for unit in units:
        (tmp_path / unit.name).write_text(unit.text, encoding="utf-8")
    command = ["systemd-analyze", f"--{manager}", "--man=no", "verify", *(str(tmp_path / unit.name) for unit in units)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={"XDG_RUNTIME_DIR": str(tmp_path)}
    )
    ours = [line for line in done.stderr.splitlines() if "provision-" in line]
    assert ours == []


@needs_systemd
def test_a_broken_unit_would_be_noticed(tmp_path):
    unit = render_units(make_plan(tmp_path))[0]
    (tmp_path / unit.name).write_text(unit.text.replace("Restart=on-failure", "Restart=perhaps"), encoding="utf-8")
    command = ["systemd-analyze", "--user", "--man=no", "verify", str(tmp_path / unit.name)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={"XDG_RUNTIME_DIR": str(tmp_path)}
    )
    assert "perhaps" in done.stderr


def test_a_wedged_card_is_not_started_on_again(tmp_path):
    server = render_units(make_plan(tmp_path))[0]
    assert "--probe-card" in value_of(server, "ExecStart")
    assert value_of(server, "Restart") == "on-failure"
    assert "8" in value_of(server, "RestartPreventExitStatus").split()
    assert value_of(server, "RestartPreventExitStatus") == " ".join(map(str, HOPELESS))
    # A start that loads for seven minutes and fails must reach the limit within its interval.
    attempt = 7 * 60 + int(value_of(server, "RestartSec"))
    assert value_of(server, "StartLimitIntervalSec") == "2h"
    assert int(value_of(server, "StartLimitBurst")) * attempt < 2 * 3600


def test_the_key_is_named_by_its_file_alone(tmp_path):
    server = render_units(make_plan(tmp_path))[0]
    assert '--key-file "/srv/the key"' in server.text
    assert "VLLM_API_KEY" not in server.text


def test_the_booster_is_watched_by_systemd(tmp_path):
    booster = render_units(make_plan(tmp_path))[1]
    assert (value_of(booster, "Type"), value_of(booster, "WatchdogSec")) == ("notify", "30")
    assert value_of(booster, "ExecStart").endswith("booster --upstream http://127.0.0.1:8012 --port 8013")
    assert value_of(booster, "After") == "provision-hynix.service"


def test_drift_runs_daily(tmp_path):
    _, _, drift, timer = render_units(make_plan(tmp_path, drift_source="nightly"))
    assert value_of(drift, "Type") == "oneshot"
    assert value_of(drift, "ExecStart").endswith("drift hynix --against nightly --last 1")
    assert value_of(timer, "OnCalendar") == "daily"
    assert timer.name.removesuffix(".timer") == drift.name.removesuffix(".service")


def test_a_system_unit_runs_as_the_user_and_starts_at_boot(tmp_path):
    server = render_units(make_plan(tmp_path, manager=Manager.SYSTEM, user="ai"))[0]
    assert value_of(server, "User") == "ai"
    assert value_of(server, "WantedBy") == "multi-user.target"
    assert "User=" not in render_units(make_plan(tmp_path))[0].text


def test_the_commands_that_install_them(tmp_path):
    plan = make_plan(tmp_path)
    units = render_units(plan)
    linked = install_commands(units, plan, Path("/my units"), searched=Path("/units"))
    assert linked[0].startswith("systemctl --user link '/my units/provision-hynix.service'")
    in_place = install_commands(units, plan, Path("/units"), searched=Path("/units"))
    assert in_place == linked[1:]
    assert in_place == (
        "systemctl --user daemon-reload",
        "systemctl --user enable --now provision-hynix.service provision-hynix-booster.service "
        "provision-hynix-drift.timer",
        "loginctl enable-linger",
    )


def unquote(text: str) -> str:
    """What systemd makes of one quoted word (systemd.service, "Command lines")."""
    if text.startswith('"'):
        text = text[1:-1]
        text = re.sub(r"\\(.)", lambda match: {"n": "\n", "t": "\t"}.get(match[1], match[1]), text)
    return text.replace("$$", "$").replace("%%", "%")


@given(st.text(alphabet=st.sampled_from("ab$%\\\"' \t\n{}:,;*"), max_size=12))
def test_a_word_survives_the_quoting(word):
    quoted = quote_word(word)
    assert unquote(quoted) == word
    assert "\n" not in quoted


@pytest.mark.parametrize(
    ("word", "quoted"),
    [("plain-1.0", "plain-1.0"), ("", '""'), ("a b", '"a b"'), ("50%", '"50%%"'), ("$HOME", '"$$HOME"'), (";", '";"')],
)
def test_quoting_by_example(word, quoted):
    assert quote_word(word) == quoted
