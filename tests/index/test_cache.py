import os
import time
from pathlib import Path

import pytest

from provisioner.digests import digest_of
from provisioner.errors import CannotObtainError
from provisioner.index.cache import WheelCache, clear_cache, summarize_cache, trim_folder


def test_entries_come_back_whole(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path)
    cache.store("heads", "key", {"size": 3}, b"one\ntwo")
    entry = cache.load("heads", "key")
    assert entry is not None
    assert (entry.facts, entry.data) == ({"size": 3}, b"one\ntwo")
    assert cache.load("heads", "other") is None


@pytest.mark.parametrize("damage", [b"", b"{", b"[]\nx", b'{"schema": 0, "crc": 0}\n', b'{"schema": 1, "crc": 1}\nx'])
def test_broken_entries_are_dropped(tmp_path: Path, damage: bytes) -> None:
    cache = WheelCache(tmp_path)
    cache.store("heads", "key", {}, b"data")
    (tmp_path / "heads/key").write_bytes(damage)
    assert cache.load("heads", "key") is None
    assert not (tmp_path / "heads/key").exists()


def test_members_are_checked_by_their_digest(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path)
    digest = digest_of(b"data")
    cache.store_member(digest, b"data")
    assert cache.load_member(digest) == b"data"
    (path,) = (tmp_path / "members").rglob(digest)
    path.write_bytes(b"Data")
    assert cache.load_member(digest) is None
    assert not path.exists()


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path, limit=2500)
    digests = [digest_of(bytes([number])) for number in range(4)]
    for age, digest in enumerate(digests):
        cache.store_member(digest, b"x" * 1000)
        (path,) = (tmp_path / "members").rglob(digest)
        os.utime(path, (time.time() - 1000 * (4 - age),) * 2)
    cache.trim()
    left = {path.name for path in (tmp_path / "members").rglob("*") if path.is_file()}
    assert left == set(digests[2:])


def test_a_wheel_in_use_stays(tmp_path: Path) -> None:
    for name, hours in (("old.whl", 2), ("new.whl", 0)):
        path = tmp_path / "wheels" / name / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 1000)
        os.utime(path, (time.time() - 3600 * hours,) * 2)
    trim_folder(tmp_path, 10)
    assert [path.name for path in (tmp_path / "wheels").rglob("*.whl") if path.is_file()] == ["new.whl"]


def test_leftovers_of_broken_runs_go_after_a_day(tmp_path: Path) -> None:
    for name, hours in (("old.tmp", 30), ("new.part", 1), ("old.part", 30)):
        path = tmp_path / "wheels" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
        os.utime(path, (time.time() - 3600 * hours,) * 2)
    trim_folder(tmp_path, 1 << 20)
    assert [path.name for path in (tmp_path / "wheels").iterdir()] == ["new.part"]


def test_a_cache_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, where the folder should be")
    cache = WheelCache(tmp_path / "cache")
    cache.store("heads", "key", {}, b"data")
    cache.store_member(digest_of(b"data"), b"data")
    cache.trim()
    assert cache.load("heads", "key") is None


def test_what_is_there_and_away_with_it(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path / "c")
    assert summarize_cache(tmp_path / "c").files == 0
    cache.store_member(digest_of(b"data"), b"data")
    cache.store("pages", "p", {}, b"x")
    (tmp_path / "c/mine.txt").write_text("not an entry")
    summary = clear_cache(tmp_path / "c")
    assert (summary.files, summary.kinds["members"]) == (2, (4, 1))
    assert summarize_cache(tmp_path / "c").bytes == 0
    assert (tmp_path / "c/mine.txt").exists()


def test_one_process_at_a_time_downloads_a_wheel(tmp_path: Path) -> None:
    first, second = WheelCache(tmp_path), WheelCache(tmp_path)
    with (
        first.hold_wheel("key", wait=1.0),
        pytest.raises(CannotObtainError, match="another process"),
        second.hold_wheel("key", wait=0.05),
    ):
        pytest.fail("must not be entered")
