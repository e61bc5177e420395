"""The check on a card as a part of ``provision RECIPE``."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from provisioner.cli import up
from provisioner.cli.shared.catalogue import open_recipe
from provisioner.documents.owner import Owner
from provisioner.environment.site import find_site
from provisioner.environment.state import read_receipt, write_owner, write_receipt
from provisioner.gpu.devices import read_inventory
from provisioner.gpu.report import Verdict
from provisioner.gpu.verify import gather_facts, report_not_run
from provisioner.pipeline import preflight, verification
from tests.pipeline.test_verification import RECEIPT, make_venv
from tests.support.fake_nvml import FakeNvml

OPTIONS = up.UpOptions(
    recipe="hynix-stable",
    venv=None,
    python=None,
    dry_run=False,
    check=False,
    reapply_patches=False,
    keep_patches=False,
    without_patch=None,
    not_as_recipe=False,
    strict=False,
    bare=False,
    adopt=False,
    sync=False,
    require_lock=False,
    rebuild=False,
    downgrade=False,
    index_url=None,
    as_json=True,
    gpu=None,
    no_verify=False,
    from_bundle=None,
)


class Bed:
    """An environment that is as its recipe says, a card, and a check that comes out as told."""

    def __init__(self, venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.venv = venv
        self.site = find_site(venv)
        write_owner(self.site.state_dir, Owner(recipe="hynix-stable", tool="test"))
        write_receipt(self.site.state_dir, replace(RECEIPT, patches=()))
        self.nvml = FakeNvml()
        self.verdict = Verdict.BIT_EXACT
        self.checks = 0
        monkeypatch.setattr(verification, "read_inventory", lambda: read_inventory(self.nvml))
        monkeypatch.setattr(verification, "verify_card", self._check)
        monkeypatch.setattr(up, "look_at_card", self._look)

    def run(self, **options: Any) -> int:
        request = SimpleNamespace(recipe=open_recipe("hynix-stable"), venv=self.venv, bare=options.get("bare", False))
        outcome = SimpleNamespace(
            actions=(), verdict=SimpleNamespace(patches=(), not_needed=()), receipt=read_receipt(self.site.state_dir)
        )
        context = SimpleNamespace(uv=lambda: None)
        return up._carry_out(request, context, lambda *_: outcome, replace(OPTIONS, **options))  # type: ignore[arg-type]

    def _look(self, expected: Any) -> preflight.Preflight:
        return preflight.Preflight(warnings=(), card="a card" if self.nvml.cards else None)

    def _check(self, target: Any, card: Any, wish: Any, **rest: Any) -> Any:
        self.checks += 1
        report = report_not_run("as told", tool="test")
        return replace(report, verdict=self.verdict, bound=gather_facts(target, card), card=card)


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bed:
    return Bed(make_venv(tmp_path / "venv"), monkeypatch)


def test_a_pass_is_kept_and_not_repeated(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    assert bed.run() == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["verification"]["verdict"] == "bit-exact"
    assert answer["card"] == "a card"
    assert (answer["status"]["venv"], answer["status"]["verification"]) == (
        str(bed.venv),
        "bit-exact, health unobserved",
    )
    assert bed.run() == 0
    assert json.loads(capsys.readouterr().out)["verification"] is None
    assert bed.checks == 1


@pytest.mark.parametrize(
    ("verdict", "code"),
    [(Verdict.MISMATCH, 1), (Verdict.CARD_FAULT, 8), (Verdict.TOOLCHAIN, 4), (Verdict.NOT_RUN, 0)],
)
def test_what_the_check_says_is_the_exit_code(
    bed: Bed, verdict: Verdict, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    bed.verdict = verdict
    assert bed.run(as_json=False) == code
    assert f"on the card  {verdict}: as told" in capsys.readouterr().out
    assert bed.run() == code
    assert bed.checks == 2


def test_no_verify_is_in_the_receipt(bed: Bed) -> None:
    assert bed.run(no_verify=True) == 0
    receipt = read_receipt(bed.site.state_dir)
    assert receipt is not None
    assert receipt.verification is not None
    assert receipt.verification["why"] == "skipped with --no-verify"
    assert bed.checks == 0


def test_no_card_and_a_bare_environment_are_not_checked(bed: Bed) -> None:
    assert bed.run(bare=True) == 0
    bed.nvml.cards.clear()
    assert bed.run() == 0
    assert bed.checks == 0
    receipt = read_receipt(bed.site.state_dir)
    assert receipt is not None
    assert receipt.verification is None
