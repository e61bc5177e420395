from pathlib import Path

import pytest

from provisioner.environment.lock import parse_requirements
from provisioner.errors import InvalidLockError
from provisioner.provisioning.home import find_home
from provisioner.provisioning.locks import find_lock, lock_files, read_lock, write_lock
from provisioner.resources import lockfiles_folder, recipe_names


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
