"""Is the environment the one that was proven? One fault at a time in a real small environment."""

import json
import shutil
from pathlib import Path

import pytest

from provisioner.documents.recipe import Recipe, parse_recipe
from provisioner.environment.state import write_receipt
from provisioner.gpu.devices import read_inventory
from provisioner.gpu.report import Change
from provisioner.resources import recipes_folder
from provisioner.serve.findings import Severity, exit_code_of
from provisioner.serve.readiness import changes_since_verified, examine_environment, judge_verification
from tests.support.environments import PATCHED, make_environment, make_receipt
from tests.support.fake_nvml import FakeCard, FakeNvml

MEND = "provision up hynix-stable"


def recipe(name: str = "hynix-stable") -> Recipe:
    return parse_recipe((recipes_folder() / f"{name}.toml").read_text(encoding="utf-8"), name=name, where=name)


@pytest.fixture
def environment(tmp_path):
    return tmp_path / "venv", make_environment(tmp_path / "venv")


def examine(venv: Path, name: str = "hynix-stable"):
    return examine_environment(recipe(name), venv, distribution="vllm", mend=MEND)


def write(venv: Path, **changes) -> None:
    write_receipt(venv / ".provision", make_receipt(**changes))


def test_a_proven_environment_has_no_findings(environment):
    ready = examine(environment[0])
    assert ready.findings == ()
    assert ready.patches == {"pr50021-gdn-spec-bounds", "sm80-cpu-repack"}


@pytest.mark.parametrize(
    ("spoil", "id_"),
    [
        (lambda venv, packages: shutil.rmtree(venv), "environment-conflict"),
        (lambda venv, packages: shutil.rmtree(next(packages.glob("vllm-*.dist-info"))), "environment-conflict"),
        (lambda venv, packages: (venv / ".provision" / "receipt.json").unlink(), "no-receipt"),
        (lambda venv, packages: (venv / ".provision" / "receipt.json").write_text("{}"), "invalid-receipt"),
        (lambda venv, packages: (packages / PATCHED).write_text("other\n"), "files-changed"),
        (lambda venv, packages: (packages / PATCHED).unlink(), "files-changed"),
        (lambda venv, packages: (venv / "bin" / "vllm").unlink(), "no-command"),
        (lambda venv, packages: write(venv, version="0.27.0"), "other-build"),
        (lambda venv, packages: write(venv, bare=True), "bare"),
        (lambda venv, packages: write(venv, recipe="hynix"), "other-recipe"),
        (lambda venv, packages: write(venv, patches=()), "patch-missing"),
    ],
)
def test_each_fault_is_an_error_with_the_command_that_mends_it(environment, spoil, id_):
    spoil(*environment)
    ready = examine(environment[0])
    assert [finding.id for finding in ready.findings] == [id_]
    assert ready.findings[0].next[-1].startswith(MEND)
    assert exit_code_of(ready.findings) == 5


def test_all_faults_stand_together(environment):
    venv, packages = environment
    (packages / PATCHED).write_text("other\n")
    (venv / "bin" / "vllm").unlink()
    write(venv, recipe="hynix", bare=True)
    assert [finding.id for finding in examine(venv).findings] == ["no-command", "bare", "files-changed", "other-recipe"]


def test_a_changed_recipe_is_a_warning(environment):
    write(environment[0], recipe_digest="0" * 64)
    (finding,) = examine(environment[0]).findings
    assert (finding.id, finding.severity) == ("recipe-changed", Severity.WARNING)


def test_an_interrupted_change_is_named(environment):
    venv, _ = environment
    journal = venv / ".provision" / "journal"
    journal.mkdir()
    (journal / "journal.jsonl").write_text("{}\n")
    assert "interrupted" in {finding.id for finding in examine(venv).findings}


DRIVER = Change(what="driver", then="610.43.03", now="620")
CARD = Change(what="card", then="GPU-1", now="GPU-2")


@pytest.mark.parametrize(
    ("verification", "changes", "found"),
    [
        (None, (), [("not-verified", Severity.WARNING)]),
        ({"verdict": "bit-exact", "health": "well"}, (), []),
        ({"verdict": "mismatch", "health": "well"}, (), [("verification", Severity.ERROR)]),
        ({"verdict": "not-run", "health": "well"}, (), [("not-verified", Severity.WARNING)]),
        ({"verdict": "bit-exact", "health": "well"}, (DRIVER, CARD), [("other-card", Severity.ERROR)]),
        (
            {"verdict": "bit-exact", "health": "unobserved"},
            (DRIVER,),
            [("verification-old", Severity.WARNING), ("health-unobserved", Severity.WARNING)],
        ),
    ],
)
def test_what_the_last_verification_says(verification, changes, found):
    findings = judge_verification(verification, changes, recipe="hynix")
    assert [(finding.id, finding.severity) for finding in findings] == found


def test_what_has_changed_since_the_verification(environment, tmp_path):
    venv, _ = environment
    card = read_inventory(FakeNvml(cards=[FakeCard(uuid="GPU-aaaa0002")])).cards[0]
    summary = {"verdict": "bit-exact", "health": "well", "why": "", "created": "", "form": "quick"}
    bound = {"vllm": "0.27.1", "allocator": "default", "card": "GPU-aaaa0001"}
    patches = {f"patch {patch.id}": patch.text for patch in make_receipt().patches}
    text = json.dumps({"schema": "provision/verify/1", **summary, "bound": {**bound, **patches}})
    (venv / ".provision" / "verify.json").write_text(text)
    write(venv, verification=summary)
    changed = changes_since_verified(examine(venv), card, None)
    assert [(change.what, change.then, change.now) for change in changed] == [("card", "GPU-aaaa0001", "GPU-aaaa0002")]
    assert changes_since_verified(examine(venv), None, None) == ()
    (venv / ".provision" / "verify.json").write_text("{")
    assert changes_since_verified(examine(venv), card, None) == ()
