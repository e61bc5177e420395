"""``provision verify``: what it asks for, prints, writes and exits with."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from provisioner.cli.main import main
from provisioner.gpu.devices import read_inventory
from provisioner.gpu.report import Form, Health, Verdict
from provisioner.gpu.verify import FixedOccupancy, ShareOfFree, Wish, report_not_run
from provisioner.pipeline import verification
from tests.pipeline.test_verification import make_venv
from tests.support.fake_nvml import GIB, FakeNvml


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    nvml = FakeNvml()
    monkeypatch.setattr(verification, "read_inventory", lambda: read_inventory(nvml))
    return nvml


@pytest.fixture
def wishes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Wish, Any]]:
    """Every check that is asked for; each comes out bit-exact."""
    asked: list[tuple[Wish, Any]] = []

    def check(target: Any, card: Any, wish: Wish, **rest: Any) -> Any:
        asked.append((wish, target))
        report = report_not_run("", tool="test", form=wish.form)
        return replace(report, verdict=Verdict.BIT_EXACT, why="all agree", health=Health.WELL, card=card)

    monkeypatch.setattr(verification, "verify_card", check)
    return asked


def test_no_card_is_not_run_and_exit_8_before_any_environment_is_looked_for(
    cards: FakeNvml, capsys: pytest.CaptureFixture[str]
) -> None:
    cards.cards.clear()
    assert main(["verify", "samsung", "--full", "--json"]) == 8
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["verdict"], answer["exit"]) == ("provision/verify/1", "not-run", 8)
    assert "no usable NVIDIA card" in answer["why"]
    assert answer["form"] == "full"


def test_no_driver_is_not_run(cards: FakeNvml, capsys: pytest.CaptureFixture[str]) -> None:
    cards.broken = True
    assert main(["verify"]) == 8
    out = capsys.readouterr().out
    assert out.startswith("not-run: the NVIDIA driver is not there")
    assert "health: unobserved: nothing was run" in out


def test_the_check_of_an_environment(
    cards: FakeNvml, wishes: list[tuple[Wish, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    venv = make_venv(tmp_path / "venv")
    written = tmp_path / "out" / "report.md"
    assert main(["verify", "--venv", str(venv), "--report", str(written)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("bit-exact: all agree\ncard: NVIDIA CMP 170HX")
    assert written.read_text().startswith("# bit-exact: all agree")
    assert json.loads((venv / ".provision" / "verify.json").read_text())["verdict"] == "bit-exact"
    assert [wish for wish, _ in wishes] == [Wish()]


@pytest.mark.parametrize(
    ("arguments", "wish"),
    [
        (["--quick"], Wish()),
        (["--full", "--occupancy", "27GiB"], Wish(form=Form.FULL, occupancy=FixedOccupancy(bytes=27 * GIB))),
        (["--occupancy", "95%", "--model", "m"], Wish(occupancy=ShareOfFree(share=0.95), model=Path("m").absolute())),
    ],
)
def test_what_the_options_ask_for(
    cards: FakeNvml, wishes: list[tuple[Wish, Any]], tmp_path: Path, arguments: list[str], wish: Wish
) -> None:
    venv = make_venv(tmp_path / "venv")
    assert main(["verify", "samsung", "--venv", str(venv), *arguments, "--json"]) == 0
    ((asked, target),) = wishes
    assert asked == wish
    assert target.allocator == "expandable_segments:False"
    assert target.python == venv / "bin" / "python"


@pytest.mark.parametrize(
    "arguments", [["--quick", "--full"], ["--occupancy", "much"], ["--gpu", "the big one"], ["nonsense"]]
)
def test_usage(cards: FakeNvml, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 2
    assert "error" in capsys.readouterr().err


def test_an_environment_that_is_not_there(cards: FakeNvml, tmp_path: Path) -> None:
    assert main(["verify", "--venv", str(tmp_path / "none")]) == 5


def test_the_real_machine_gives_a_documented_exit_code(own_home: Path) -> None:
    assert main(["verify", "--json", "--venv", str(own_home / "none")]) in (5, 8), os.uname()
