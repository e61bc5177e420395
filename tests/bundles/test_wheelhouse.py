"""Fetching many wheels: found by the lock's digests, stopped and gone on with, never half of one under its name."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from provisioner.bundles.self_wheel import Need
from provisioner.bundles.wheelhouse import fetch_wheels, find_wheels
from provisioner.digests import digest_of
from provisioner.documents.lock import Pin, parse_requirements
from provisioner.errors import HashMismatchError, InvalidLockError, NoCompatibleWheelError, NoSuchBuildError
from provisioner.progress import Silence
from tests.support.index_server import IndexServer, Mood
from tests.support.shop import PYTHON, Shop
from tests.support.wheels import wheel_bytes, wheel_filename

LARGE = wheel_bytes({"large/data.bin": bytes(3_000_000)}, version="1.0", project="large", compression=0)


@pytest.fixture
def stocked(tmp_path: Path) -> Iterator[Shop]:
    with IndexServer() as server:
        shop = Shop(server=server, folder=tmp_path)
        shop.stock()
        server.add_package("large", {wheel_filename("1.0", project="large"): LARGE})
        yield shop


def pin_of(text: str) -> Pin:
    (pin,) = parse_requirements(text, where="test")
    return pin


def large(shop: Shop) -> Pin:
    return pin_of(f"large==1.0 --hash=sha256:{digest_of(LARGE)}")


def test_a_stopped_download_is_gone_on_with(stocked: Shop) -> None:
    found = find_wheels(
        [large(stocked), Need(name="torch", version=Version("2.13.0"))], PYTHON, stocked.settings, Silence()
    )
    path = f"packages/{found[0].filename}"
    stocked.server.set_mood(path, Mood(close_after=2_000_000, times=1), Mood(status=500, times=2))
    folder = stocked.folder / "parts"
    with pytest.raises(Exception, match="500"):
        fetch_wheels(found, folder, stocked.settings, Silence())
    assert not (folder / found[0].filename).exists()
    assert (folder / f"{found[0].filename}.part").stat().st_size == 2_000_000
    stocked.server.forget_requests()
    fetch_wheels(found, folder, stocked.settings, Silence())
    assert (folder / found[0].filename).read_bytes() == LARGE
    ranges = {request.range for request in stocked.server.requests if request.path.endswith(path)}
    assert ranges == {"bytes=2000000-"}


def test_one_that_fails_stops_the_others_at_once(stocked: Shop) -> None:
    found = find_wheels(
        [large(stocked), Need(name="torch", version=Version("2.13.0"))], PYTHON, stocked.settings, Silence()
    )
    stocked.server.set_mood(f"packages/{found[0].filename}", Mood(drip=0.01))
    stocked.server.set_mood(f"packages/{found[1].filename}", Mood(status=403, pause=0.3))
    begin = time.monotonic()
    with pytest.raises(NoSuchBuildError):
        fetch_wheels(found, stocked.folder / "parts", stocked.settings, Silence())
    assert time.monotonic() - begin < 10
    assert 0 < (stocked.folder / "parts" / f"{found[0].filename}.part").stat().st_size < len(LARGE)


def test_a_file_with_other_bytes_is_fetched_again(stocked: Shop) -> None:
    found = find_wheels([large(stocked)], PYTHON, stocked.settings, Silence())
    folder = stocked.folder / "parts"
    folder.mkdir()
    (folder / found[0].filename).write_bytes(LARGE[:-1] + b"!")
    fetch_wheels(found, folder, stocked.settings, Silence())
    assert (folder / found[0].filename).read_bytes() == LARGE
    stocked.server.forget_requests()
    fetch_wheels(found, folder, stocked.settings, Silence())
    assert stocked.server.requests == []


def test_what_is_not_there_is_said(stocked: Shop) -> None:
    wrong = pin_of(f"large==1.0 --hash=sha256:{'0' * 64}")
    with pytest.raises(HashMismatchError, match=r"no wheel of large 1\.0"):
        find_wheels([wrong], PYTHON, stocked.settings, Silence())
    with pytest.raises(NoSuchBuildError):
        find_wheels([Need(name="large", version=Version("2.0"))], PYTHON, stocked.settings, Silence())
    stocked.server.add_package("old", {"old-1.0-cp27-cp27m-win32.whl": LARGE})
    with pytest.raises(NoCompatibleWheelError):
        find_wheels([Need(name="old", version=Version("1.0"))], PYTHON, stocked.settings, Silence())


def test_a_url_with_two_hashes_names_no_file(stocked: Shop) -> None:
    hashes = " ".join(f"--hash=sha256:{digit * 64}" for digit in "12")
    pin = pin_of(f"large @ https://wheels.vllm.ai/large-1.0-py3-none-any.whl {hashes}")
    with pytest.raises(InvalidLockError, match="one hash"):
        find_wheels([pin], PYTHON, stocked.settings, Silence())
