"""A rebuild whose new environment cannot be proven in its place."""

from dataclasses import replace
from pathlib import Path

import pytest

from provisioner.environment.state import read_receipt, state_of
from provisioner.errors import EnvironmentConflictError, HashMismatchError, NotRestoredError, RestoredError
from provisioner.pipeline import rebuild
from provisioner.pipeline.execute import Outcome, Request, provision
from provisioner.pipeline.rebuild import plan_rebuild, rebuild_environment, settle_rebuild
from provisioner.progress import Reporter, Silence
from tests.support.shop import BOUNDS, Shop, series_of

SERIES = series_of(BOUNDS)


@pytest.fixture
def request_in_place(shop: Shop) -> Request:
    wanted = shop.request(SERIES)
    provision(wanted, shop.uv, Silence())
    return wanted


def fail_in_place(monkeypatch: pytest.MonkeyPatch, venv: Path, *, also: str | None = None) -> None:
    def pretend(request: Request, uv: object, reporter: Reporter) -> Outcome:
        if request.venv != venv:
            return provision(request, uv, reporter)  # type: ignore[arg-type]
        if also:
            (venv.parent / also).rename(venv.parent / "taken-away")
        raise HashMismatchError("not as it was")

    monkeypatch.setattr(rebuild, "provision", pretend)


def test_the_old_one_comes_back(shop: Shop, request_in_place: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    venv = request_in_place.venv
    inode = venv.stat().st_ino
    fail_in_place(monkeypatch, venv)
    with pytest.raises(RestoredError) as caught:
        rebuild_environment(request_in_place, shop.uv, Silence())
    assert caught.value.exit_code == 6
    assert caught.value.found == "not as it was"
    assert venv.stat().st_ino == inode
    assert provision(request_in_place, shop.uv, Silence()).actions == ()


def test_what_cannot_be_put_back_is_said(
    shop: Shop, request_in_place: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in_place(monkeypatch, request_in_place.venv, also=".venv.former")
    with pytest.raises(NotRestoredError) as caught:
        rebuild_environment(request_in_place, shop.uv, Silence())
    assert caught.value.exit_code == 7
    assert caught.value.hints == (f"mv {shop.folder}/.venv.former {request_in_place.venv}",)


def test_the_new_one_works_where_it_was_moved_to(shop: Shop, request_in_place: Request) -> None:
    planned = plan_rebuild(request_in_place, shop.uv)
    assert not (shop.folder / ".venv.new").exists()
    done = rebuild_environment(request_in_place, shop.uv, Silence())
    assert [type(action) for action in done.actions] == [type(action) for action in planned.actions]
    assert (shop.site_packages / "vllm/ops.py").read_bytes().count(b"if x < 0") == 1
    assert read_receipt(state_of(request_in_place.venv)) is not None
    assert "relocatable = true" in (request_in_place.venv / "pyvenv.cfg").read_text()
    assert not settle_rebuild(request_in_place.venv)


def test_leftovers_go_but_only_ours(shop: Shop, request_in_place: Request) -> None:
    (shop.folder / ".venv.new").mkdir()
    (shop.folder / ".venv.new" / "mine.txt").write_text("keep me")
    with pytest.raises(EnvironmentConflictError, match="not ours is in the way"):
        rebuild_environment(request_in_place, shop.uv, Silence())
    assert (shop.folder / ".venv.new" / "mine.txt").exists()
    (shop.folder / ".venv.new" / "mine.txt").unlink()
    (shop.folder / ".venv.new").rmdir()
    provision(replace(request_in_place, venv=shop.folder / ".venv.new"), shop.uv, Silence())
    rebuild_environment(request_in_place, shop.uv, Silence())
    assert not (shop.folder / ".venv.new").exists()
