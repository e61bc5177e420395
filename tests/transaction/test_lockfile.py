import json
import os
import signal
import time
from pathlib import Path

import pytest

from provisioner.errors import BusyError, RestoredError
from provisioner.transaction.lockfile import Holder, hold_environment, read_holder


def _hold_in_child(state_dir: Path) -> int:
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with hold_environment(state_dir, wait_seconds=5):
            os.write(tell, b"x")
            time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    os.close(ready)
    os.close(tell)
    return child


def test_a_second_process_is_told_who_holds_the_environment(tmp_path: Path) -> None:
    child = _hold_in_child(tmp_path / "state")
    waited: list[Holder | None] = []
    try:
        with (
            pytest.raises(BusyError) as caught,
            hold_environment(tmp_path / "state", wait_seconds=0.2, on_wait=waited.append),
        ):
            pytest.fail("both hold it")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    holder = waited[0]
    assert holder is not None
    assert (holder.pid, holder.host) == (child, os.uname().nodename)
    assert len(waited) == 1
    assert caught.value.what == f"the environment is in use by {holder}"
    assert f"ps -fp {child}" in caught.value.hints[1]
    assert caught.value.exit_code == 5


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    child = _hold_in_child(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert read_holder(tmp_path) is not None, "the dead one left its name"
    with hold_environment(tmp_path, wait_seconds=0):
        holder = read_holder(tmp_path)
        assert holder is not None
        assert holder.pid == os.getpid()
    assert read_holder(tmp_path) is None


def test_one_waits_for_the_other(tmp_path: Path) -> None:
    child = _hold_in_child(tmp_path)
    started = time.monotonic()

    def let_go(_holder: Holder | None) -> None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    with hold_environment(tmp_path, wait_seconds=10, on_wait=let_go):
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', json.dumps({"pid": 1})])
def test_an_unreadable_holder_is_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / "lock").write_text(text)
    assert read_holder(tmp_path) is None


def test_a_lock_that_cannot_be_made_is_an_error_and_nothing_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RestoredError, match="cannot be locked"), hold_environment(tmp_path / "file", wait_seconds=0):
        pytest.fail("held")


def test_a_symlink_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(RestoredError), hold_environment(tmp_path, wait_seconds=0):
        pytest.fail("held")
    assert victim.read_text() == "precious"
