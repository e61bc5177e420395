"""What a verdict means is said once, on the verdict."""

import ast
from pathlib import Path

import pytest

import provisioner
from provisioner.patching.model import Verdict

PACKAGE = Path(provisioner.__file__).parent
HOME = PACKAGE / "patching" / "model.py"
OWN_VERDICTS = {PACKAGE / "gpu" / "verify.py", PACKAGE / "gpu" / "report.py"}
"""The check on a card has another enum of this name."""


def groups_of_verdicts(source: str) -> list[int]:
    """The lines on which a set, list or tuple holds two verdicts or more."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Set | ast.List | ast.Tuple) and sum(map(is_verdict, node.elts)) > 1
    ]


def is_verdict(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Verdict"


@pytest.mark.parametrize("path", sorted(set(PACKAGE.rglob("*.py")) - OWN_VERDICTS - {HOME}), ids=str)
def test_no_module_groups_verdicts_of_its_own(path: Path) -> None:
    assert groups_of_verdicts(path.read_text(encoding="utf-8")) == []


def test_the_look_for_groups_finds_them() -> None:
    assert groups_of_verdicts(
        "A = frozenset({Verdict.APPLIES, Verdict.APPLIED})\nif v in (Verdict.A, Verdict.B): ..."
    ) == [1, 2]


def test_each_verdict_either_holds_or_says_what_is_in_the_way() -> None:
    assert {verdict for verdict in Verdict if verdict.settled or verdict.applies} == {v for v in Verdict if v.holds}
    assert all(verdict.holds for verdict in Verdict if verdict.fits or verdict.remains)
    assert not any(verdict.holds for verdict in Verdict if verdict.resettable)
