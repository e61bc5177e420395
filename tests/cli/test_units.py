"""``provision units``: printed, written, understood by systemd."""

import json
import shutil
import subprocess

import pytest

from provisioner.cli.main import main


def test_printed_units_name_where_they_would_lie(capsys, own_home):
    assert main(["units", "hynix", "--model", "org/q"]) == 0
    out = capsys.readouterr().out
    assert f"# {own_home}/.config/systemd/user/provision-hynix.service" in out
    assert "serve hynix --probe-card --model org/q --venv" in out
    assert "drift hynix --against nightly --last 1" in out


def test_written_units_are_understood_by_systemd(capsys, tmp_path):
    assert main(["units", "samsung", "--output", str(tmp_path), "--fork-dir", "/srv/fork", "--", "--seed", "1"]) == 0
    captured = capsys.readouterr()
    paths = captured.out.split()
    assert [path.rpartition("/")[2] for path in paths] == [
        "provision-samsung.service",
        "provision-samsung-booster.service",
        "provision-samsung-drift.service",
        "provision-samsung-drift.timer",
    ]
    assert "next: systemctl --user link" in captured.err
    text = (tmp_path / "provision-samsung.service").read_text()
    assert "--fork-dir /srv/fork --generate-key -- --seed 1" in text
    assert "http://127.0.0.1:18020" in (tmp_path / "provision-samsung-booster.service").read_text()
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (Debian package systemd)")
    command = ["systemd-analyze", "--user", "--man=no", "verify", *paths]
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert [line for line in done.stderr.splitlines() if "provision-" in line] == []


def test_units_as_json(capsys):
    assert main(["units", "hynix-stable", "--system", "--user", "ai", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["schema"] == "provision/units/1"
    assert values["folder"] == "/etc/systemd/system"
    assert len(values["units"]) == 4
    assert "User=ai" in values["units"][0]["text"]
    assert values["next"][0] == "sudo systemctl daemon-reload"


def test_units_written_where_systemd_looks(own_home, capsys):
    assert main(["units", "hynix", "--write"]) == 0
    assert (own_home / ".config" / "systemd" / "user" / "provision-hynix.service").is_file()
    assert "next: systemctl --user enable --now" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["units", "serve"])
@pytest.mark.parametrize("port", ["0", "65536", "-1"])
def test_what_is_no_port_is_refused(command, port, capsys):
    assert main([command, "hynix", "--port", port]) == 2
    assert "--port" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["0", "65536", "-1"])
def test_what_is_no_port_of_a_booster_is_refused(port, capsys):
    assert main(["units", "hynix", "--booster-port", port]) == 2
    assert "--booster-port" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--port", "8013"], ["--booster-port", "8012"]])
def test_server_and_booster_at_one_port_are_refused(words, capsys):
    assert main(["units", "hynix", *words]) == 2
    hint = capsys.readouterr().err.rpartition("hint: ")[2].split()
    assert main(hint[1:] if "--port" not in words else [*hint[1:], *words]) == 0
