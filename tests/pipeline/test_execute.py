"""The main job end to end over a small wheel: every state it can find, every way it can fail."""

import errno
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from provisioner.digests import digest_of, digest_to_record
from provisioner.documents.owner import Owner
from provisioner.documents.recipe import PatchPolicy, parse_recipe
from provisioner.environment.integrity import check_files, check_sources
from provisioner.environment.state import read_owner, read_receipt, state_of, write_owner
from provisioner.environment.uv import create_venv
from provisioner.errors import (
    BusyError,
    CannotObtainError,
    ConflictError,
    EnvironmentConflictError,
    ForeignBytesError,
    HashMismatchError,
    NetworkError,
    NoInterpreterError,
    ResolutionError,
    RestoredError,
)
from provisioner.pipeline import execute
from provisioner.pipeline.execute import plan_environment, provision
from provisioner.pipeline.plan import AdoptEnvironment, ChangeFiles, CreateEnvironment, InstallPackages, WriteReceipt
from provisioner.pipeline.preflight import check_disk
from provisioner.pipeline.revert import revert
from provisioner.pipeline.status import read_status
from provisioner.progress import Silence
from provisioner.series.model import Series
from provisioner.transaction.lockfile import LOCK_NAME, hold_environment
from tests.support.shop import BOUNDS, FILES, NEW_FILE, OPS, RECIPE, TORCH, Shop, series_of
from tests.support.wheels import wheel_bytes, wheel_filename

PATCHED = OPS.replace(b"    return x * 2\n", b"    if x < 0:\n        return 0\n    return x * 2\n")
SERIES = series_of(BOUNDS, NEW_FILE)


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def test_first_run_builds_patches_and_proves(shop: Shop) -> None:
    outcome = provision(shop.request(SERIES), shop.uv, Silence())
    assert (shop.site_packages / "vllm/ops.py").read_bytes() == PATCHED
    assert (shop.site_packages / "vllm/added.py").read_bytes() == b"ADDED = 1\n"
    assert [type(action) for action in outcome.actions][:2] == [CreateEnvironment, InstallPackages]
    receipt = read_receipt(state_of(shop.folder / "venv"))
    assert receipt == outcome.receipt
    first = receipt.patches[0].files[0]
    assert (first.before, first.after) == (digest_of(OPS), digest_of(PATCHED))
    assert receipt.created_files() == ("vllm/added.py",)
    assert (receipt.torch, receipt.torch_cuda) == ("2.13.0+cu130", "13.0")


def test_second_run_changes_nothing(shop: Shop) -> None:
    request = shop.request(SERIES)
    provision(request, shop.uv, Silence())
    before = snapshot(shop.folder / "venv")
    assert provision(request, shop.uv, Silence()).actions == ()
    assert not plan_environment(request, shop.uv)
    assert snapshot(shop.folder / "venv") == before


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_an_environment_that_may_not_be_written_does_where_nothing_is_to_be_done(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    request, lock_file = shop.request(SERIES), state_of(shop.folder / "venv") / LOCK_NAME
    made = provision(request, shop.uv, Silence())
    forbid_writing(lock_file, monkeypatch, number)
    again = provision(request, shop.uv, Silence())
    assert (again.receipt, again.actions) == (made.receipt, ())
    with pytest.raises(RestoredError, match="cannot be locked"):
        provision(replace(request, series=series_of(BOUNDS)), shop.uv, Silence())
    assert (shop.site_packages / "vllm/added.py").exists()


def forbid_writing(path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """As a file system does that may only be read, which no test can mount."""
    real = os.open

    def refuse(name: str | Path, flags: int, *rest: int, **more: int) -> int:
        folder = Path(f"/proc/self/fd/{more['dir_fd']}").resolve() if "dir_fd" in more else Path()
        if folder / name == path and flags & os.O_RDWR:
            raise OSError(number, os.strerror(number))
        return real(name, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)


def test_a_bare_wish_is_content_with_a_full_environment(shop: Shop) -> None:
    request = shop.request(SERIES)
    full = provision(request, shop.uv, Silence())
    bare = replace(request, bare=True)
    assert not plan_environment(bare, shop.uv)
    assert provision(bare, shop.uv, Silence()).actions == ()
    assert read_receipt(state_of(request.venv)) == full.receipt
    # Another series is written down, and the packages stay what they are.
    other = provision(replace(bare, series=series_of(BOUNDS)), shop.uv, Silence()).receipt
    assert (other.bare, other.packages, other.lock_digest) == (False, full.receipt.packages, full.receipt.lock_digest)
    assert [patch.id for patch in other.patches] == ["p1"]


def test_a_bare_run_that_installs_anew_is_bare(shop: Shop) -> None:
    request = shop.request(SERIES)
    provision(request, shop.uv, Silence())
    for folder in shop.site_packages.glob("vllm*"):
        shutil.rmtree(folder)
    made = provision(replace(request, bare=True), shop.uv, Silence()).receipt
    assert (made.bare, made.packages, made.torch) == (True, {}, None)


def test_a_dry_run_writes_nothing_and_shows_the_final_digests(shop: Shop) -> None:
    plan = plan_environment(shop.request(SERIES), shop.uv)
    assert not (shop.folder / "venv").exists()
    assert plan.final == {"vllm/ops.py": digest_of(PATCHED), "vllm/added.py": digest_of(b"ADDED = 1\n")}
    assert [type(action) for action in plan.actions][-2:] == [ChangeFiles, WriteReceipt]


def test_two_environments_of_one_cache_do_not_touch_each_other(shop: Shop) -> None:
    plain = replace(shop.request(series_of()), venv=shop.folder / "plain")
    provision(plain, shop.uv, Silence())
    provision(shop.request(SERIES), shop.uv, Silence())
    other = shop.folder / "plain" / shop.site_packages.relative_to(shop.folder / "venv")
    assert (other / "vllm/ops.py").read_bytes() == OPS
    shutil.rmtree(shop.folder / "plain")
    provision(plain, shop.uv, Silence())
    assert (other / "vllm/ops.py").read_bytes() == OPS


def test_a_foreign_edit_is_named_and_left_alone(shop: Shop) -> None:
    request = shop.request(SERIES)
    provision(request, shop.uv, Silence())
    edited = shop.site_packages / "vllm/ops.py"
    edited.write_bytes(PATCHED + b"# mine\n")
    before = snapshot(shop.site_packages)
    with pytest.raises(ConflictError) as caught:
        provision(request, shop.uv, Silence())
    assert caught.value.exit_code == 5
    assert "vllm/ops.py" in (caught.value.found or "")
    assert snapshot(shop.site_packages) == before


def test_reapply_restores_and_applies_over_any_state(shop: Shop) -> None:
    request = shop.request(SERIES)
    provision(request, shop.uv, Silence())
    (shop.site_packages / "vllm/ops.py").write_bytes(b"nothing of it is left\n")
    (shop.site_packages / "vllm/added.py").unlink()
    provision(replace(request, reapply=True), shop.uv, Silence())
    assert (shop.site_packages / "vllm/ops.py").read_bytes() == PATCHED
    assert (shop.site_packages / "vllm/added.py").read_bytes() == b"ADDED = 1\n"
    assert not plan_environment(request, shop.uv)


def test_an_edit_outside_the_series_is_found(shop: Shop) -> None:
    request = shop.request(SERIES)
    provision(request, shop.uv, Silence())
    (shop.site_packages / "vllm/other.py").write_bytes(b"OTHER = 2\n")
    with pytest.raises(ForeignBytesError, match="1 installed file is not as RECORD says") as caught:
        provision(request, shop.uv, Silence())
    assert caught.value.hints == ("run the same command with --rebuild, to replace it",)
    write_owner(state_of(request.venv), Owner(recipe="r", tool="t", adopted=True))
    with pytest.raises(ForeignBytesError) as adopted:
        provision(request, shop.uv, Silence())
    look, mend = adopted.value.hints
    assert look == f"provision patch diff --venv {request.venv}"
    assert mend.endswith("--no-deps --reinstall-package vllm vllm==0.27.1")


def test_a_series_that_makes_no_python_is_refused_before_anything_is_written(shop: Shop) -> None:
    broken = BOUNDS.replace(b"if x < 0:", b"if x < 0")
    provision(shop.request(series_of(NEW_FILE)), shop.uv, Silence())
    before, request = snapshot(shop.folder / "venv"), shop.request(series_of(NEW_FILE, broken))
    for run in (partial(plan_environment, request, shop.uv), partial(provision, request, shop.uv, Silence())):
        with pytest.raises(ConflictError, match="no Python") as caught:
            run()
        assert (caught.value.exit_code, caught.value.where) == (5, "vllm/ops.py:2")
        assert caught.value.found == "vllm/ops.py:2: expected ':' (changed by p2)"
        assert snapshot(shop.folder / "venv") == before
    with pytest.raises(ConflictError, match="no Python"):
        plan_environment(replace(request, venv=shop.folder / "another"), shop.uv)


def test_a_patch_that_does_not_apply_leaves_the_files_as_shipped(shop: Shop) -> None:
    series = series_of(BOUNDS, BOUNDS.replace(b"return x * 2", b"return x * 3").replace(b"x < 0", b"x < 1"))
    with pytest.raises(ConflictError) as caught:
        provision(shop.request(series), shop.uv, Silence())
    assert "p2: conflict" in (caught.value.found or "")
    assert (shop.site_packages / "vllm/ops.py").read_bytes() == OPS


def test_an_optional_patch_that_does_not_apply_is_left_out(shop: Shop) -> None:
    broken = BOUNDS.replace(b"return x * 2", b"return x * 3")
    required, optional = series_of(NEW_FILE, broken).patches
    series = Series(patches=(required, replace(optional, policy=PatchPolicy.OPTIONAL)))
    outcome = provision(shop.request(series), shop.uv, Silence())
    assert [patch.id for patch in outcome.receipt.patches] == ["p1"]
    assert (shop.site_packages / "vllm/added.py").exists()


def test_the_packages_of_others_change_only_when_asked(shop: Shop) -> None:
    old = b"__version__ = '2.12.0+cu130'\ncuda: str | None = '13.0'\n"
    wheels = {
        wheel_filename(version, project="torch"): wheel_bytes(
            {"torch/version.py": text}, version=version, project="torch"
        )
        for version, text in (("2.13.0", TORCH), ("2.12.0", old))
    }
    shop.server.add_package("torch", wheels)
    mine = wheel_bytes({"mine.py": b""}, version="1.0", project="mine")
    shop.server.add_package("mine", {wheel_filename("1.0", project="mine"): mine})
    request = replace(shop.request(SERIES), adopts=True)
    python = request.venv / "bin" / "python"
    create_venv(shop.uv, request.venv, Path(sys.executable))
    command = [
        shop.uv.binary,
        "pip",
        "install",
        "--no-deps",
        "--python",
        python,
        "vllm==0.27.1",
        "torch==2.12.0",
        "mine",
    ]
    subprocess.run(command, env=shop.uv.environment, check=True, capture_output=True, timeout=60)
    before = snapshot(request.venv)
    for run in (partial(plan_environment, request, shop.uv), partial(provision, request, shop.uv, Silence())):
        with pytest.raises(EnvironmentConflictError, match="torch is not the one") as caught:
            run()
        assert caught.value.found == "2.12.0+cu130 with CUDA 13.0"
        assert snapshot(request.venv) == before
        assert not state_of(request.venv).exists()
    synced = replace(request, sync=True)
    plan = plan_environment(synced, shop.uv)
    outcome = provision(synced, shop.uv, Silence())
    assert outcome.actions[:2] == plan.actions[:2]
    assert plan.actions[:2] == (
        AdoptEnvironment(venv=str(request.venv), differing=("torch 2.12.0 (lock: 2.13.0)",)),
        InstallPackages(count=1, reasons=("torch",)),
    )
    assert (shop.site_packages / "torch/version.py").read_bytes() == TORCH
    assert (shop.site_packages / "mine.py").exists()
    assert outcome.receipt.packages == {}
    assert not plan_environment(shop.request(SERIES), shop.uv)
    assert not plan_environment(replace(shop.request(SERIES), sync=True), shop.uv)


def test_a_checkout_that_was_taken_as_it_is_stays_in_the_receipt(shop: Shop) -> None:
    request = replace(shop.request(SERIES), fork_any=True)
    provision(request, shop.uv, Silence())
    receipt = read_receipt(state_of(request.venv))
    assert receipt is not None
    assert receipt.fork_any
    assert provision(request, shop.uv, Silence()).actions == ()
    assert [type(action) for action in provision(shop.request(SERIES), shop.uv, Silence()).actions] == [WriteReceipt]


def test_a_folder_that_is_not_ours_is_refused(shop: Shop) -> None:
    (shop.folder / "venv").mkdir()
    (shop.folder / "venv" / "precious").write_text("mine")
    with pytest.raises(EnvironmentConflictError, match="not made by provision"):
        provision(shop.request(SERIES), shop.uv, Silence())
    assert (shop.folder / "venv" / "precious").read_text() == "mine"


def test_another_version_in_the_environment_is_refused(shop: Shop) -> None:
    request = shop.request(SERIES)
    provision(request, shop.uv, Silence())
    info = next(shop.site_packages.glob("vllm-*.dist-info"))
    info.rename(info.with_name("vllm-0.26.0.dist-info"))
    with pytest.raises(EnvironmentConflictError) as caught:
        provision(request, shop.uv, Silence())
    assert (caught.value.expected, caught.value.found) == ("0.27.1", "0.26.0")


def test_an_editable_vllm_is_refused(shop: Shop) -> None:
    request = shop.request(SERIES)
    provision(request, shop.uv, Silence())
    info = next(shop.site_packages.glob("vllm-*.dist-info"))
    (info / "direct_url.json").write_text('{"url": "file:///src", "dir_info": {"editable": true}}')
    with pytest.raises(EnvironmentConflictError, match="editable"):
        provision(request, shop.uv, Silence())


def test_a_wheel_that_changed_since_the_lock_is_refused(shop: Shop) -> None:
    request = shop.request(SERIES)
    shop.stock(files={**FILES, "vllm/ops.py": OPS + b"# other\n"})
    shutil.rmtree(shop.folder / "uv-cache", ignore_errors=True)
    with pytest.raises(HashMismatchError):
        provision(request, shop.uv, Silence())
    assert not list(shop.folder.glob("venv/lib/python*/site-packages/vllm*"))


def test_no_network_is_said_and_the_next_run_completes(shop: Shop) -> None:
    request = shop.request(SERIES)
    shutil.rmtree(shop.folder / "uv-cache", ignore_errors=True)
    gone = replace(
        shop.uv,
        environment={**shop.uv.environment, "UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "UV_HTTP_RETRIES": "0"},
    )
    with pytest.raises((NetworkError, ResolutionError)) as caught:
        provision(request, gone, Silence())
    assert caught.value.exit_code == 4
    assert read_owner(state_of(shop.folder / "venv")) is not None
    provision(request, shop.uv, Silence())
    assert (shop.site_packages / "vllm/ops.py").read_bytes() == PATCHED


def test_no_python_is_said_before_anything_is_made(shop: Shop) -> None:
    request = replace(shop.request(SERIES), python="3.99")
    with pytest.raises(NoInterpreterError):
        provision(request, shop.uv, Silence())
    with pytest.raises(NoInterpreterError):
        plan_environment(request, shop.uv)


def test_a_poisoned_cache_is_found(shop: Shop) -> None:
    request = shop.request(SERIES)
    provision(replace(request, venv=shop.folder / "first"), shop.uv, Silence())
    # What a shell script's in-place edit does: the file is a hard link to uv's cache.
    with (shop.folder / "first" / shop.site_packages.relative_to(shop.folder / "venv") / "vllm/other.py").open(
        "ab"
    ) as f:
        f.write(b"# poison\n")
    with pytest.raises(HashMismatchError) as caught:
        provision(request, shop.uv, Silence())
    clean, remove = caught.value.hints
    assert "uv cache clean vllm: " in clean
    assert remove.startswith(f"rm -r {shop.folder / 'venv'}")
    # Every later run says the same, since the way out is the same.
    with pytest.raises(ForeignBytesError) as later:
        provision(request, shop.uv, Silence())
    assert later.value.hints[0] == clean
    assert len(later.value.hints) == 2


def test_another_cuda_than_the_wheels_is_found(shop: Shop) -> None:
    shop.stock(torch=TORCH.replace(b"13.0'", b"12.9'"))
    with pytest.raises(HashMismatchError, match="another CUDA"):
        provision(shop.request(SERIES), shop.uv, Silence())


def test_a_package_that_left_the_lock_is_installed_again(shop: Shop) -> None:
    request = shop.request(SERIES)
    provision(request, shop.uv, Silence())
    shutil.rmtree(next(shop.site_packages.glob("torch-*.dist-info")))
    shutil.rmtree(shop.site_packages / "torch")
    outcome = provision(request, shop.uv, Silence())
    assert [action.reasons for action in outcome.actions if isinstance(action, InstallPackages)] == [("torch",)]
    assert (shop.site_packages / "vllm/ops.py").read_bytes() == PATCHED


def test_bare_leaves_the_dependencies_out(shop: Shop) -> None:
    outcome = provision(shop.request(SERIES, bare=True), shop.uv, Silence())
    assert outcome.receipt.bare
    assert not (shop.site_packages / "torch").exists()
    assert (shop.site_packages / "vllm/ops.py").read_bytes() == PATCHED


def test_a_bare_environment_becomes_whole(shop: Shop) -> None:
    provision(shop.request(SERIES, bare=True), shop.uv, Silence())
    outcome = provision(shop.request(SERIES), shop.uv, Silence())
    assert (shop.site_packages / "torch/version.py").read_bytes() == TORCH
    assert not outcome.receipt.bare


def test_a_second_process_waits_or_says_who_holds_it(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    request = shop.request(SERIES)
    provision(request, shop.uv, Silence())
    monkeypatch.setattr(execute, "WAIT_SECONDS", 0.1)
    with hold_environment(state_of(shop.folder / "venv"), wait_seconds=0), pytest.raises(BusyError) as caught:
        provision(request, shop.uv, Silence())
    assert str(os.getpid()) in f"{caught.value} {caught.value.found} {caught.value.hints}"


def test_a_full_disk_restores_everything(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    request = shop.request(series_of())
    provision(request, shop.uv, Silence())
    before = snapshot(shop.site_packages)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("provisioner.transaction.filesystem.RealFileSystem.replace", fail)
    with pytest.raises(RestoredError):
        provision(shop.request(SERIES), shop.uv, Silence())
    assert snapshot(shop.site_packages) == before


def test_too_little_disk_is_said_with_the_figures(tmp_path: Path) -> None:
    with pytest.raises(CannotObtainError) as caught:
        check_disk(tmp_path / "not" / "there", 1 << 60)
    assert caught.value.where == str(tmp_path)
    assert "PROVISION_HOME" in caught.value.hints[0]


def test_an_interrupted_install_is_completed(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    request = shop.request(SERIES)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("provisioner.environment.uv.sync_requirements", interrupt)
        with pytest.raises(KeyboardInterrupt):
            provision(request, shop.uv, Silence())
    provision(request, shop.uv, Silence())
    assert (shop.site_packages / "vllm/ops.py").read_bytes() == PATCHED


@pytest.mark.parametrize("package", ["vllm-0.27.1", "torch-2.13.0"])
def test_a_package_that_a_killed_run_installed_in_part_is_completed(shop: Shop, package: str) -> None:
    request = shop.request(SERIES)
    provision(request, shop.uv, Silence())
    (shop.site_packages / f"{package}.dist-info" / "INSTALLER").unlink()
    for path in ("vllm/other.py", "vllm/ops.py", "torch/version.py"):
        if path.startswith(package[:4]):
            (shop.site_packages / path).unlink()
    (state_of(request.venv) / "receipt.json").unlink()
    provision(request, shop.uv, Silence())
    assert read_status(shop.recipe, request.venv).torch == "2.13.0+cu130"
    assert provision(request, shop.uv, Silence()).actions == ()


def test_status_and_check_see_an_edit_outside_every_patch(shop: Shop) -> None:
    request = shop.request(series_of())
    provision(request, shop.uv, Silence())
    assert read_status(shop.recipe, request.venv).proven
    (shop.site_packages / "vllm/other.py").unlink()
    status = read_status(shop.recipe, request.venv)
    assert not status.proven
    assert status.problems == ("vllm/other.py is missing",)
    with pytest.raises(ForeignBytesError) as caught:
        plan_environment(request, shop.uv)
    assert caught.value.hints == ("run the same command with --rebuild, to replace it",)
    assert status.hints == (f"provision up {shop.recipe.name} --venv {request.venv} --rebuild",)


NOT_NEEDED = """
[[patch]]
id = "pr50021-gdn-spec-bounds"
policy = "not-needed"
why = "no use is made of it"
"""


def test_status_sees_an_edit_in_a_file_of_a_patch_that_is_not_needed(shop: Shop) -> None:
    path = "vllm/v1/worker/mamba_utils.py"
    shop.stock(files={**FILES, path: b"A = 1\n"})
    recipe = parse_recipe(RECIPE + NOT_NEEDED, name="small", where="small.toml")
    request = replace(shop.request(series_of()), recipe=recipe)
    provision(request, shop.uv, Silence())
    assert read_status(recipe, request.venv).proven
    (shop.site_packages / path).unlink()
    (shop.site_packages / path).write_bytes(b"A = 2\n")
    assert read_status(recipe, request.venv).problems == (f"{path} is not as shipped",)


def test_status_sees_that_torch_went_away_and_a_run_says_what_to_do(shop: Shop) -> None:
    request = shop.request(series_of())
    provision(request, shop.uv, Silence())
    shutil.rmtree(shop.site_packages / "torch")
    assert "torch is None" in read_status(shop.recipe, request.venv).problems[0]
    with pytest.raises(EnvironmentConflictError, match="torch is not there"):
        provision(request, shop.uv, Silence())


def test_status_and_check_see_another_version_of_a_package_and_one_that_is_gone(shop: Shop) -> None:
    request = shop.request(series_of())
    provision(request, shop.uv, Silence())
    assert plan_environment(request, shop.uv).actions == ()
    info = shop.site_packages / "torch-2.13.0.dist-info"
    other = info.rename(shop.site_packages / "torch-2.12.0.dist-info")
    assert read_status(shop.recipe, request.venv).problems == ("torch 2.13.0 is not what is installed",)
    assert plan_environment(request, shop.uv).actions == (InstallPackages(count=1, reasons=("torch",)),)
    shutil.rmtree(other)
    assert read_status(shop.recipe, request.venv).problems == ("torch 2.13.0 is not what is installed",)


def test_status_and_check_see_an_edit_that_record_was_made_to_agree_with(shop: Shop) -> None:
    request = shop.request(series_of())
    provision(request, shop.uv, Silence())
    record, edited = shop.site_packages / "vllm-0.27.1.dist-info/RECORD", b"OTHER = 22\n"
    lines = record.read_text().splitlines(keepends=True)
    row = f"vllm/other.py,{digest_to_record(digest_of(edited))},{len(edited)}\n"
    (shop.site_packages / "vllm/other.py").unlink()
    (shop.site_packages / "vllm/other.py").write_bytes(edited)
    kept = [line for line in lines if not line.startswith("vllm/other.py")]
    for text in ("".join(kept), "".join([*kept, row])):
        record.write_text(text)
        for check in (check_sources, check_files):
            problems = read_status(shop.recipe, request.venv, check).problems
            assert problems == ("RECORD was edited since the install, so it proves nothing",)
        with pytest.raises(ForeignBytesError, match="RECORD was edited"):
            plan_environment(request, shop.uv)
        with pytest.raises(ForeignBytesError, match="RECORD was edited"):
            provision(request, shop.uv, Silence())


def test_an_edited_record_is_seen_where_other_packages_are_installed_again(shop: Shop) -> None:
    request = shop.request(series_of())
    provision(request, shop.uv, Silence())
    record = shop.site_packages / "vllm-0.27.1.dist-info/RECORD"
    record.write_text("".join(line for line in record.read_text().splitlines(keepends=True) if "other" not in line))
    shutil.rmtree(shop.site_packages / "torch-2.13.0.dist-info")
    with pytest.raises(ForeignBytesError, match="RECORD was edited"):
        provision(request, shop.uv, Silence())


def test_status_and_check_see_what_would_be_imported_instead_of_a_listed_module(shop: Shop) -> None:
    request = shop.request(SERIES)
    provision(request, shop.uv, Silence())
    assert read_status(shop.recipe, request.venv).notes == ()
    package = shop.site_packages / "vllm/ops/__init__.py"
    package.parent.mkdir()
    package.write_text("")
    (shop.site_packages / "vllm/extra.py").write_text("")
    status = read_status(shop.recipe, request.venv)
    shown = "vllm/ops/__init__.py is not of the distribution, and Python prefers it to a module that is"
    assert shown in status.problems
    assert status.notes == ("vllm/extra.py is neither of the distribution nor of a patch",)
    for run in (plan_environment, partial(provision, reporter=Silence())):
        with pytest.raises(ForeignBytesError, match="would be imported instead") as caught:
            run(request, shop.uv)
        assert caught.value.hints == (f"rm {package}",)
    package.unlink()
    assert provision(request, shop.uv, Silence()).actions == ()


def test_revert_names_files_that_it_did_not_bring_back(shop: Shop) -> None:
    request = shop.request(SERIES)
    provision(request, shop.uv, Silence())
    other = shop.site_packages / "vllm/other.py"
    other.unlink()
    other.write_bytes(b"OTHER = 2\n")
    done = revert("vllm", SERIES, request.venv)
    assert len(done.files) == 2
    assert done.others == ("vllm/other.py",)


@pytest.mark.parametrize("kind", ["a file above", "a dangling link"])
def test_a_place_where_no_environment_can_be_made_is_named(shop: Shop, kind: str) -> None:
    place = shop.folder / "taken" / "venv"
    if kind == "a file above":
        place.parent.write_text("mine")
    else:
        place.parent.mkdir()
        place.symlink_to(shop.folder / "nowhere" / "at all")
    with pytest.raises(EnvironmentConflictError):
        provision(replace(shop.request(series_of()), venv=place), shop.uv, Silence())
