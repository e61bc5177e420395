"""``provision doctor``: text, JSON, exit codes."""

import json
from functools import partial

import pytest

from provisioner.cli.main import main
from provisioner.doctor import examine
from provisioner.doctor.examine import Instruments
from provisioner.gpu.devices import NoDriverError, read_inventory
from provisioner.serve.cards import KernelLog
from tests.support.environments import PATCHED, make_environment
from tests.support.fake_nvml import FakeNvml

CHECK_KEYS = {"id", "title", "outcome", "looked_at", "findings"}


@pytest.fixture
def environment(tmp_path, monkeypatch):
    make_environment(tmp_path / "venv")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "home"))
    # Servers and a kernel log of the machine that the tests run on are none of theirs.
    quiet = partial(Instruments, servers=tuple, kernel_log=lambda: KernelLog(lines=(), source=None, why_not="closed"))
    monkeypatch.setattr(examine, "Instruments", quiet)
    return tmp_path / "venv"


def no_driver():
    raise NoDriverError("no driver")


@pytest.mark.parametrize(("cards", "code", "severity"), [(1, 1, "warning"), (0, 0, "note")])
def test_an_environment_that_is_well_but_was_never_verified(environment, capsys, monkeypatch, cards, code, severity):
    found = (lambda: read_inventory(FakeNvml())) if cards else no_driver
    monkeypatch.setattr(examine, "Instruments", partial(examine.Instruments, inventory=found))
    assert main(["doctor", "hynix-stable", "--venv", str(environment), "--json"]) == code
    values = json.loads(capsys.readouterr().out)
    assert values["schema"] == "provision/doctor/1"
    assert values["healthy"] is (code == 0)
    assert all(set(check) == CHECK_KEYS for check in values["checks"])
    found = [(item["id"], item["severity"]) for check in values["checks"] for item in check["findings"]]
    assert found == [("not-verified", severity)]


def test_an_environment_without_a_recipe_can_be_healthy(environment, capsys):
    assert main(["doctor", "--venv", str(environment)]) == 0
    text = capsys.readouterr().out
    assert "passed   environment of" in text
    assert text.splitlines()[-1].startswith("healthy in ")


def test_a_changed_file_is_found_with_its_evidence(environment, capsys):
    (next(environment.glob("lib/python*/site-packages")) / PATCHED).write_text("other\n")
    assert main(["doctor", "--venv", str(environment)]) == 1
    text = capsys.readouterr().out
    assert "error[files-changed]: patched files are not as the receipt says" in text
    assert f"found: {PATCHED}: expected" in text
    assert "next:  provision status RECIPE --venv" in text


def test_a_log_is_diagnosed_on_a_machine_without_anything(environment, tmp_path, capsys):
    log = tmp_path / "server.log"
    log.write_text("OSError: [Errno 98] Address already in use\n")
    assert main(["doctor", "--log", str(log)]) == 1
    assert "error[port]: the port was taken" in capsys.readouterr().out


def test_the_probe_without_a_card_is_not_a_pass(environment, capsys):
    pytest.importorskip("pynvml")
    from provisioner.errors import CardError
    from provisioner.gpu.devices import read_inventory

    try:
        read_inventory()
    except CardError:
        assert main(["doctor", "--gpu"]) == 8
        assert "error[card-missing]" in capsys.readouterr().out
    else:
        pytest.skip("this machine has a card")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["doctor", "--log", "/nonexistent"], "no such log"),
        (["doctor", "--log", "/dev/null", "--journal"], "two sources"),
        (["doctor", "--journal"], "the unit of one recipe"),
        (["doctor", "hynx"], "no recipe is called"),
    ],
)
def test_options_that_cannot_be_meant(environment, words, what, capsys):
    assert main(words) == 2
    assert what in capsys.readouterr().err


def test_next_commands_name_the_environment_that_was_given(environment, capsys):
    main(["doctor", "hynix-stable", "--venv", str(environment)])
    text = capsys.readouterr().out
    assert f"next:  provision verify hynix-stable --venv {environment}" in text
