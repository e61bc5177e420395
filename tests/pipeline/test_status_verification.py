"""What ``status`` says of the last check on a card."""

from dataclasses import replace

from provisioner.pipeline.status import _describe_verification
from tests.pipeline.test_verification import RECEIPT

BOUND = {"vllm": "0.27.1", "patch pr50021-gdn-spec-bounds": "c" * 64, "torch": "2.13.0+cu130", "driver": "610.43.03"}
CHECKED = replace(RECEIPT, verification={"verdict": "bit-exact", "health": "well", "bound": BOUND})


def test_never_checked() -> None:
    assert _describe_verification(RECEIPT, "2.13.0+cu130") is None


def test_nothing_has_changed() -> None:
    assert _describe_verification(CHECKED, "2.13.0+cu130") == "bit-exact"


def test_what_has_changed_is_named() -> None:
    without_patch = replace(CHECKED, patches=())
    text = _describe_verification(without_patch, "2.14.0+cu130")
    assert text == "bit-exact; changed since: patch pr50021-gdn-spec-bounds, torch"


def test_health_that_nobody_saw_is_said() -> None:
    blind = replace(RECEIPT, verification={"verdict": "bit-exact", "health": "unobserved", "bound": BOUND})
    assert _describe_verification(blind, None) == "bit-exact, health unobserved"


def test_a_check_that_was_not_made_has_nothing_to_change() -> None:
    skipped = replace(RECEIPT, verification={"verdict": "not-run", "health": "well", "bound": {}})
    assert _describe_verification(skipped, "2.14.0") == "not-run"
