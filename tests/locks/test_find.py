from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from provisioner.documents.lock import Lock, LockedBuild, LockScope, parse_requirements, select_pin
from provisioner.documents.recipe import CommitBuild, Recipe, ReleaseBuild, parse_recipe
from provisioner.errors import InvalidLockError
from provisioner.home import find_home
from provisioner.locks.find import find_lock, lock_files, read_lock, write_lock
from provisioner.locks.first_use import FirstUse, describe_other_build, obtain_lock
from provisioner.resources import lockfiles_folder, recipe_names, recipes_folder


def test_home_follows_its_variable(tmp_path: Path):
    home = find_home({"PROVISION_HOME": str(tmp_path)})
    assert home.venv("hynix") == tmp_path / "venvs" / "hynix"
    assert home.cache == tmp_path / "cache"
    assert find_home({}).data.name == "provision"


def test_the_locks_that_travel_with_the_tool_are_sound():
    found = [path.stem for path in lockfiles_folder().glob("*.toml")]
    assert "hynix-stable" in found
    for name in found:
        assert name in recipe_names()
        lock = read_lock(lock_files(lockfiles_folder(), name))
        assert lock.recipe == name
        assert "://" not in lock.requirements


def test_the_users_own_lock_wins(tmp_path: Path):
    home = find_home({"PROVISION_HOME": str(tmp_path)})
    shipped = find_lock(home, "hynix-stable")
    assert shipped is not None
    lock = read_lock(shipped)
    own = lock_files(home.locks, "hynix-stable")
    assert write_lock(own, lock)
    assert not write_lock(own, lock)
    assert find_lock(home, "hynix-stable") == own
    assert read_lock(own) == lock
    assert find_lock(home, "unknown") is None


@pytest.mark.parametrize("lost", ["facts", "requirements"])
def test_half_a_lock_is_neither_passed_over_nor_made_anew(tmp_path: Path, lost: str):
    home = find_home({"PROVISION_HOME": str(tmp_path)})
    own = lock_files(home.locks, "hynix-stable")
    write_lock(own, read_lock(lock_files(lockfiles_folder(), "hynix-stable")))
    getattr(own, lost).unlink()
    with pytest.raises(InvalidLockError) as caught:
        obtain_lock(home, open_stable(), LockScope.COMPLETE, FirstUse.KEEP, make_none)
    assert caught.value.hints == ("provision lock hynix-stable",)


def test_an_incomplete_lock_does_not_hide_the_complete_one_of_its_wheel(tmp_path: Path):
    home, recipe = find_home({"PROVISION_HOME": str(tmp_path)}), open_stable()
    shipped = read_lock(lock_files(lockfiles_folder(), "hynix-stable"))
    bare = replace(shipped, requirements=select_pin(shipped, "vllm"), complete=False)
    own = lock_files(home.locks, "hynix-stable")
    write_lock(own, bare)
    assert obtain_lock(home, recipe, LockScope.COMPLETE, FirstUse.REFUSE, make_none) == shipped
    assert not obtain_lock(home, recipe, LockScope.WHEEL_ALONE, FirstUse.REFUSE, make_none).complete
    other = bare.requirements.replace(bare.build.sha256, "0" * 64)
    write_lock(own, replace(bare, build=replace(bare.build, sha256="0" * 64), requirements=other))
    with pytest.raises(InvalidLockError, match="without dependencies"):
        obtain_lock(home, recipe, LockScope.COMPLETE, FirstUse.REFUSE, make_none)


def make_none(_scope: LockScope, _known: LockedBuild | None) -> Lock:
    pytest.fail("a lock is made, although there is one")


def test_a_pair_that_lost_half_is_refused(tmp_path: Path):
    lock = read_lock(lock_files(lockfiles_folder(), "hynix-stable"))
    files = lock_files(tmp_path, "hynix-stable")
    write_lock(files, lock)
    files.requirements.unlink()
    with pytest.raises(InvalidLockError) as caught:
        read_lock(files)
    assert caught.value.hints == ("provision lock hynix-stable",)


def test_the_shipped_lock_pins_for_each_supported_python():
    lock = read_lock(lock_files(lockfiles_folder(), "hynix-stable"))
    pins = parse_requirements(lock.requirements, where="lock")
    assert len(pins) > 150
    assert all(pin.hashes for pin in pins)
    assert lock.build.torch_cuda == "13.0"


def open_stable() -> Recipe:
    text = (recipes_folder() / "hynix-stable.toml").read_text(encoding="utf-8")
    return parse_recipe(text, name="hynix-stable", where="hynix-stable.toml")


def test_a_lock_of_another_build_than_the_recipes_is_told_of():
    lock, recipe = read_lock(lock_files(lockfiles_folder(), "hynix-stable")), open_stable()
    assert describe_other_build(lock, recipe) is None
    edited = replace(recipe, build=ReleaseBuild(version=Version("0.27.2"), exclude_newer=None))
    assert describe_other_build(lock, edited) == "the lock holds vllm 0.27.1, the recipe says 0.27.2"
    commit = "1fe3a1571ac67581478a11743e55a306de1d136f"
    nightly = CommitBuild(version=Version("0.26.1"), commit=commit, variant=None, exclude_newer=None)
    of_commit = replace(lock, build=replace(lock.build, commit=commit, url="https://wheels.vllm.ai/x.whl"))
    assert describe_other_build(lock, replace(recipe, build=nightly)) is not None
    assert describe_other_build(of_commit, replace(recipe, build=nightly)) is None
    assert describe_other_build(of_commit, recipe) == (
        "the lock holds vllm commit 1fe3a1571 (0.27.1), the recipe says 0.27.1"
    )
