"""A patch that a user applied beside the recipe's is never taken out without a word, and can be kept or had back."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from provisioner.cli import up
from provisioner.cli.main import main
from provisioner.environment.state import read_receipt, state_of
from provisioner.patching.compare import patch_between
from provisioner.patching.diff import print_patch
from provisioner.pipeline.execute import Request, plan_environment, provision
from provisioner.pipeline.plan import taken_out
from provisioner.pipeline.rebuild import rebuild_environment
from provisioner.pipeline.revert import revert
from provisioner.pipeline.user_patches import with_beside
from provisioner.progress import Silence
from tests.pipeline.test_execute import PATCHED
from tests.support.shop import BOUNDS, OPS, Shop, series_of

MINE = b"--- a/vllm/other.py\n+++ b/vllm/other.py\n@@ -1 +1 @@\n-OTHER = 1\n+OTHER = 7\n"


class Listener(Silence):
    """Keeps the warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture
def request_with_mine(shop: Shop, tmp_path: Path) -> Request:
    """A proven environment in which the user applied my-fix, and the request that made it."""
    request = shop.request(series_of(BOUNDS))
    provision(request, shop.uv, Silence())
    (tmp_path / "my-fix.patch").write_bytes(MINE)
    assert main(["patch", "apply", str(tmp_path / "my-fix.patch"), "--venv", str(request.venv)]) == 0
    return request


def test_it_is_named_before_and_after_and_can_be_had_back(
    shop: Shop, request_with_mine: Request, capsys: pytest.CaptureFixture[str]
) -> None:
    request, listener = request_with_mine, Listener()
    assert taken_out(plan_environment(request, shop.uv).actions) == ("my-fix",)
    outcome = provision(request, shop.uv, listener)
    assert taken_out(outcome.actions) == ("my-fix",)
    assert (shop.site_packages / "vllm/other.py").read_bytes() == b"OTHER = 1\n"
    (warning,) = listener.warnings
    saved = Path(warning.rpartition("kept as ")[2])
    assert main(["patch", "apply", str(saved), "--venv", str(request.venv)]) == 0
    assert (shop.site_packages / "vllm/other.py").read_bytes() == b"OTHER = 7\n"
    assert taken_out(provision(shop.request(series_of(BOUNDS)), shop.uv, Listener()).actions) == ("my-fix",)
    assert not taken_out(provision(request, shop.uv, Listener()).actions)


def test_a_check_names_it_in_text_and_json(
    shop: Shop, request_with_mine: Request, capsys: pytest.CaptureFixture[str]
) -> None:
    context = SimpleNamespace(uv=lambda: shop.uv)
    capsys.readouterr()
    assert up._show_plan(request_with_mine, context, check=True, as_json=False) == 1
    out, err = capsys.readouterr()
    assert "take out my-fix: applied here, and not the recipe's" in out
    assert "hint: to keep my-fix: run with --keep-patches" in err
    assert up._show_plan(request_with_mine, context, check=True, as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["taken_out"] == ["my-fix"]


def test_it_stays_where_that_is_asked(shop: Shop, request_with_mine: Request) -> None:
    request = request_with_mine
    keeping = replace(request, series=with_beside(request.series, request.venv, "vllm"))
    assert not taken_out(plan_environment(keeping, shop.uv).actions)
    for _ in range(2):
        provision(keeping, shop.uv, Silence())
    assert (shop.site_packages / "vllm/other.py").read_bytes() == b"OTHER = 7\n"
    assert (shop.site_packages / "vllm/ops.py").read_bytes() == PATCHED
    receipt = read_receipt(state_of(request.venv))
    assert receipt is not None
    assert [patch.id for patch in receipt.patches] == ["p1", "my-fix"]
    assert main(["patch", "revert", "my-fix", "--venv", str(request.venv)]) == 0


def test_a_rebuild_names_it_and_keeps_its_text(shop: Shop, request_with_mine: Request) -> None:
    listener = Listener()
    outcome = rebuild_environment(request_with_mine, shop.uv, listener)
    assert taken_out(outcome.actions) == ("my-fix",)
    assert any("my-fix" in warning for warning in listener.warnings)
    assert (state_of(request_with_mine.venv) / "taken-out" / "my-fix.patch").read_bytes().endswith(MINE)


def test_reverting_the_recipe_leaves_it_where_it_is(shop: Shop, request_with_mine: Request) -> None:
    done = revert("vllm", series_of(BOUNDS), request_with_mine.venv)
    assert {file.path for file in done.files} == {"vllm/ops.py"}
    assert done.others == ()
    assert (shop.site_packages / "vllm/other.py").read_bytes() == b"OTHER = 7\n"
    receipt = read_receipt(state_of(request_with_mine.venv))
    assert receipt is not None
    assert [patch.id for patch in receipt.patches] == ["my-fix"]
    assert main(["patch", "revert", "--venv", str(request_with_mine.venv)]) == 0
    assert (shop.site_packages / "vllm/other.py").read_bytes() == b"OTHER = 1\n"


def test_reverting_the_recipe_explains_a_file_that_both_change(shop: Shop, tmp_path: Path) -> None:
    request = shop.request(series_of(BOUNDS))
    provision(request, shop.uv, Silence())
    patched = (shop.site_packages / "vllm/ops.py").read_bytes()
    both = patch_between({"vllm/ops.py": patched}, {"vllm/ops.py": patched + b"MINE = 1\n"}, id="mine", source="mine")
    (tmp_path / "mine.patch").write_bytes(print_patch(both))
    assert main(["patch", "apply", str(tmp_path / "mine.patch"), "--venv", str(request.venv)]) == 0
    revert("vllm", series_of(BOUNDS), request.venv)
    assert (shop.site_packages / "vllm/ops.py").read_bytes() == OPS + b"MINE = 1\n"
    receipt = read_receipt(state_of(request.venv))
    assert receipt is not None
    assert [patch.id for patch in receipt.patches] == ["mine"]
    assert main(["patch", "revert", "mine", "--venv", str(request.venv)]) == 0
    assert (shop.site_packages / "vllm/ops.py").read_bytes() == OPS
