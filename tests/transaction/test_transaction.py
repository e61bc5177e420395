import errno
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from provisioner.digests import digest_of
from provisioner.errors import (
    BusyError,
    ConflictError,
    ForeignBytesError,
    NotRestoredError,
    RefusedTargetError,
    RestoredError,
)
from provisioner.patching.steps import CreateFile, DeleteFile, FileStep, ReplaceFile, SetMode
from provisioner.transaction.filesystem import FileSystem, RealFileSystem
from provisioner.transaction.journal import Journal
from provisioner.transaction.transaction import (
    REAL,
    FileOutcome,
    RecoveryKind,
    execute,
    hold_environment,
    is_interrupted,
    recover,
)
from provisioner.wheels.record import Record
from tests.support.trees import (
    CREATED,
    ERRORS,
    RECORD,
    SHIPPED,
    STEPS,
    CountingFileSystem,
    ForgetfulDisk,
    TearingFileSystem,
    attempt,
    dying_at,
    failing_at,
    make_site,
    new_snapshot,
    record_of,
    snapshot,
)


def _run(
    site: Path,
    steps: tuple[FileStep, ...] = STEPS,
    *,
    filesystem: FileSystem = REAL,
    record: Record = RECORD,
    may_create: frozenset[str] = CREATED,
) -> tuple[FileOutcome, ...]:
    return execute(site, site.parent / ".provision", steps, record=record, may_create=may_create, filesystem=filesystem)


def _recover(site: Path, filesystem: FileSystem = REAL) -> RecoveryKind | None:
    recovery = recover(site, site.parent / ".provision", record=RECORD, made=CREATED, filesystem=filesystem)
    return recovery.kind if recovery else None


def _count_operations(folder: Path) -> int:
    counting = CountingFileSystem(lambda _count, _name: None)
    _run(make_site(folder), filesystem=counting)
    return counting.count


def _no_leftovers(site: Path) -> bool:
    return not list(site.rglob(".provision-*")) and not is_interrupted(site.parent / ".provision")


# All of it


def test_every_kind_of_step(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a")
    outcomes = _run(site)
    assert snapshot(site) == new_snapshot(tmp_path / "b")
    assert _no_leftovers(site)
    assert FileOutcome(path="pkg/gone.py", before=digest_of(b"gone = True\n"), after=None) in outcomes
    assert FileOutcome(path="pkg/made.py", before=None, after=digest_of(b"")) in outcomes
    assert [outcome.path for outcome in outcomes] == list(dict.fromkeys(step.path for step in STEPS))


def test_no_steps_touch_nothing_not_even_the_state_folder(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    assert _run(site, ()) == ()
    assert not (tmp_path / ".provision").exists()


def test_steps_on_one_path_follow_each_other(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    steps = (
        ReplaceFile(path="pkg/changed.py", before=digest_of(b"value = 1\n"), content=b"value = 2\n"),
        ReplaceFile(path="pkg/changed.py", before=digest_of(b"value = 2\n"), content=b"value = 3\n"),
        DeleteFile(path="pkg/gone.py", before=digest_of(b"gone = True\n")),
        CreateFile(path="pkg/gone.py", content=b"again = True\n", mode=0o755),
    )
    outcomes = _run(site, steps)
    assert (site / "pkg/changed.py").read_bytes() == b"value = 3\n"
    assert (site / "pkg/gone.py").read_bytes() == b"again = True\n"
    assert (site / "pkg/gone.py").stat().st_mode & 0o777 == 0o755
    assert len(outcomes) == 2


def test_a_file_that_ends_as_it_began_is_not_written(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    before = (site / "pkg/changed.py").stat()
    there = ReplaceFile(path="pkg/changed.py", before=digest_of(b"value = 1\n"), content=b"value = 2\n")
    back = ReplaceFile(path="pkg/changed.py", before=digest_of(b"value = 2\n"), content=b"value = 1\n")
    _run(site, (there, back))
    after = (site / "pkg/changed.py").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_hard_links_into_a_cache_keep_their_bytes_and_permissions(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    cache = tmp_path / "cache"
    cache.mkdir()
    for number, path in enumerate(SHIPPED):
        os.link(site / path, cache / str(number))
    _run(site)
    for number, content in enumerate(SHIPPED.values()):
        assert (cache / str(number)).read_bytes() == content
        assert (cache / str(number)).stat().st_mode & 0o777 == 0o644


def test_hard_links_keep_their_bytes_when_a_change_is_undone(fast_path: Path) -> None:
    total = _count_operations(fast_path / "count")
    for number in range(1, total + 1, 3):
        site = make_site(fast_path / str(number))
        cache = fast_path / f"cache-{number}"
        cache.mkdir()
        os.link(site / "pkg/changed.py", cache / "changed")
        os.link(site / "pkg/mode.py", cache / "mode")
        try:
            _run(site, filesystem=failing_at(number, errno.EIO))
        except RestoredError:
            assert (cache / "changed").read_bytes() == b"value = 1\n"
            assert (cache / "mode").stat().st_mode & 0o777 == 0o644


def test_bytecode_of_every_kind_is_dropped(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    compiled = [
        site / "pkg/__pycache__" / f"changed.{tag}.pyc" for tag in ("cpython-311", "cpython-312.opt-2", "pypy311")
    ]
    compiled.append(site / "pkg/changed.pyc")
    kept = [site / "pkg/__pycache__/changed_not.cpython-312.pyc", site / "pkg/__pycache__/other.cpython-312.pyc"]
    for place in (*compiled, *kept):
        place.write_bytes(b"bytecode")
    _run(site)
    assert [place for place in compiled if place.exists()] == []
    assert all(place.exists() for place in kept)


@pytest.mark.parametrize("age_seconds", [0, 0.2, 5, 1e6, -3600], ids=lambda age: f"{age} s old")
def test_the_new_time_is_a_whole_second_or_more_after_the_old(tmp_path: Path, age_seconds: float) -> None:
    site = make_site(tmp_path)
    place = site / "pkg/changed.py"
    old = time.time() - age_seconds
    os.utime(place, (old, old))
    _run(site)
    assert place.stat().st_mtime - old >= 0.999999
    assert int(place.stat().st_mtime) > int(old)


def test_python_does_not_run_stale_bytecode(tmp_path: Path) -> None:
    import py_compile
    import subprocess
    import sys

    site = make_site(tmp_path)
    py_compile.compile(
        str(site / "pkg/changed.py"), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH, doraise=True
    )
    program = "from pkg.changed import value; print(value)"

    def ask() -> str:
        command = [sys.executable, "-c", program]
        return subprocess.run(command, cwd=site, capture_output=True, text=True, check=True, timeout=60).stdout

    assert ask() == "1\n"
    _run(site)
    assert ask() == "2\n"


def test_permissions_and_owner_are_kept(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    place = site / "pkg/changed.py"
    place.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(place, 1234, 4321)
        os.chown(site / "pkg", 1234, 4321)
    owner = (place.stat().st_uid, place.stat().st_gid)
    _run(site)
    assert place.stat().st_mode & 0o777 == 0o640
    assert (place.stat().st_uid, place.stat().st_gid) == owner
    made = (site / "pkg/new/deep/made.py").stat()
    assert (made.st_uid, made.st_gid) == ((site / "pkg").stat().st_uid, (site / "pkg").stat().st_gid)


def test_folders_of_a_reverted_creation_go_with_their_bytecode(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    before = snapshot(site)
    _run(site, (CreateFile(path="pkg/new/deep/made.py", content=b"x = 1\n"),))
    (site / "pkg/new/deep/__pycache__").mkdir()
    (site / "pkg/new/deep/__pycache__/made.cpython-312.pyc").write_bytes(b"bytecode")
    _run(site, (DeleteFile(path="pkg/new/deep/made.py", before=digest_of(b"x = 1\n")),))
    assert snapshot(site) == before
    assert not (site / "pkg/new").exists()


# Refusals


def _refused(site: Path, step: FileStep, error: type[ConflictError], match: str) -> None:
    before = snapshot(site)
    good = ReplaceFile(path="pkg/changed.py", before=digest_of(b"value = 1\n"), content=b"value = 2\n")
    with pytest.raises(error, match=match) as caught:
        _run(site, (good, step), may_create=frozenset({*CREATED, step.path}))
    assert caught.value.exit_code == 5
    assert snapshot(site) == before
    assert _no_leftovers(site)


def test_bytes_other_than_those_judged_are_foreign(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    _refused(site, ReplaceFile(path="pkg/gone.py", before=digest_of(b"?"), content=b""), ForeignBytesError, "changed")
    _refused(site, DeleteFile(path="pkg/gone.py", before=digest_of(b"?")), ForeignBytesError, "changed")
    _refused(site, DeleteFile(path="pkg/absent.py", before=digest_of(b"?")), ForeignBytesError, "changed")
    _refused(site, CreateFile(path="pkg/gone.py", content=b""), ForeignBytesError, "exists")
    _refused(site, SetMode(path="pkg/gone.py", before=0o600, after=0o644), ConflictError, "permissions")


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../outside.py", "pkg/../../x.py", "./pkg/x.py", "pkg//x.py", "", "a\0b"]
)
def test_a_path_that_is_not_plain_is_refused(tmp_path: Path, path: str) -> None:
    _refused(make_site(tmp_path), CreateFile(path=path, content=b""), RefusedTargetError, "not a plain path")


def test_a_path_neither_shipped_nor_of_the_series_is_refused(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    with pytest.raises(RefusedTargetError, match="neither shipped nor made"):
        _run(site, (CreateFile(path="pkg/surprise.py", content=b""),))
    assert not (site / "pkg/surprise.py").exists()


def test_a_script_outside_site_packages_is_refused_although_recorded(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    script = tmp_path / "bin"
    script.write_bytes(b"#!")
    step = ReplaceFile(path="../bin", before=digest_of(b"#!"), content=b"")
    with pytest.raises(RefusedTargetError):
        _run(site, (step,), record=record_of({"../bin": b"#!"}))
    assert script.read_bytes() == b"#!"


def test_symlinks_are_refused_as_target_and_on_the_way(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "x.py").write_bytes(b"x = 1\n")
    (site / "pkg/link.py").symlink_to(elsewhere / "x.py")
    (site / "pkg/way").symlink_to(elsewhere)
    (site / "pkg/dangling.py").symlink_to(elsewhere / "none")
    x = digest_of(b"x = 1\n")
    _refused(site, ReplaceFile(path="pkg/link.py", before=x, content=b""), RefusedTargetError, "symbolic link")
    _refused(site, ReplaceFile(path="pkg/way/x.py", before=x, content=b""), RefusedTargetError, "symbolic link")
    _refused(site, CreateFile(path="pkg/way/y.py", content=b""), RefusedTargetError, "symbolic link")
    _refused(site, CreateFile(path="pkg/dangling.py", content=b""), RefusedTargetError, "symbolic link")
    assert (elsewhere / "x.py").read_bytes() == b"x = 1\n"


def test_folders_and_pipes_are_refused(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    os.mkfifo(site / "pkg/pipe.py")
    for step in (DeleteFile(path="pkg/pipe.py", before=""), DeleteFile(path="pkg/sub", before="")):
        with pytest.raises(RefusedTargetError, match="not a regular file"):
            _run(site, (step,), may_create=frozenset({step.path}))
    path = "pkg/gone.py/x.py"
    with pytest.raises(RefusedTargetError, match="no folder"):
        _run(site, (CreateFile(path=path, content=b""),), may_create=frozenset({path}))


# Failing


@pytest.mark.parametrize("code", ERRORS.values(), ids=ERRORS.keys())
def test_any_one_operation_that_fails_leaves_all_old_or_all_new(fast_path: Path, code: int) -> None:
    total = _count_operations(fast_path / "count")
    old, new = snapshot(make_site(fast_path / "old")), new_snapshot(fast_path / "new")
    failed = 0
    for number in range(1, total + 1):
        site = make_site(fast_path / str(number))
        filesystem = failing_at(number, code)
        error = attempt(lambda site=site, filesystem=filesystem: _run(site, filesystem=filesystem))
        if error is None:
            assert snapshot(site) == new, f"operation {number}"
        else:
            failed += 1
            assert isinstance(error, RestoredError)
            assert error.exit_code == 6
            assert error.hints
            assert snapshot(site) == old, f"operation {number}"
            assert not list(site.rglob(".provision-*"))
        assert filesystem.count >= number, "the failure was injected"
        assert _recover(site) in {None, RecoveryKind.NOTHING_WRITTEN, RecoveryKind.COMPLETED, RecoveryKind.UNDONE}
        assert _no_leftovers(site)
        assert snapshot(site) in (old, new)
    assert failed > total * 0.7


@pytest.mark.parametrize("code", ERRORS.values(), ids=ERRORS.keys())
def test_a_disk_that_fails_for_good_keeps_the_journal_and_the_next_command_recovers(fast_path: Path, code: int) -> None:
    total = _count_operations(fast_path / "count")
    old, new = snapshot(make_site(fast_path / "old")), new_snapshot(fast_path / "new")
    not_restored = 0
    for number in range(1, total + 1):
        site = make_site(fast_path / str(number))
        filesystem = failing_at(number, code, for_good=True)
        error = attempt(lambda site=site, filesystem=filesystem: _run(site, filesystem=filesystem))
        match error:
            case None:
                assert snapshot(site) == new
            case RestoredError():
                assert snapshot(site) == old, f"operation {number}"
            case _:
                not_restored += 1
                assert isinstance(error, NotRestoredError)
                assert error.exit_code == 7
                assert is_interrupted(site.parent / ".provision")
                assert isinstance(attempt(lambda site=site: _run(site)), NotRestoredError)
        _recover(site)
        assert snapshot(site) in (old, new), f"operation {number}"
        assert _no_leftovers(site)
    assert not_restored > 10


def test_undo_that_fails_at_any_operation_is_completed_by_the_next_command(fast_path: Path) -> None:
    total = _count_operations(fast_path / "count")
    old = snapshot(make_site(fast_path / "old"))
    at_the_end = total - 20
    seen: set[str] = set()
    for second in range(1, 60):
        site = make_site(fast_path / str(second))

        def fail(count: int, _name: str, second: int = second) -> None:
            if count in (at_the_end, at_the_end + second):
                raise OSError(errno.EIO, "Input/output error")

        filesystem = CountingFileSystem(fail)
        error = attempt(lambda site=site, filesystem=filesystem: _run(site, filesystem=filesystem))
        seen.add(type(error).__name__)
        if isinstance(error, NotRestoredError):
            assert error.__cause__ is not None
            assert _recover(site) in {RecoveryKind.UNDONE, RecoveryKind.NOTHING_WRITTEN}
        assert snapshot(site) == old, f"second failure {second} after the first"
    assert seen == {"RestoredError", "NotRestoredError"}


def test_bytes_that_read_back_otherwise_are_taken_back(tmp_path: Path) -> None:
    class LyingDisk(RealFileSystem):
        def create(self, path: Path, data: bytes) -> None:
            super().create(path, data.replace(b"value = 2", b"value = 3"))

    site = make_site(tmp_path)
    before = snapshot(site)
    with pytest.raises(RestoredError, match="read back otherwise") as caught:
        _run(site, filesystem=LyingDisk())
    assert caught.value.where == "pkg/changed.py"
    assert caught.value.expected == digest_of(b"value = 2\n")
    assert caught.value.found == digest_of(b"value = 3\n")
    # What stands there is nobody's bytes: it is put back all the same, since this transaction wrote it.
    assert snapshot(site) == before


def test_an_original_that_rots_in_the_journal_is_not_put_back(tmp_path: Path) -> None:
    class RottenJournal(RealFileSystem):
        def create(self, path: Path, data: bytes) -> None:
            super().create(path, data.replace(b"value = 1", b"value = 0"))

        def fsync(self, path: Path) -> None:
            if path.name == "sub":
                raise OSError(errno.EIO, "Input/output error")
            super().fsync(path)

    site = make_site(tmp_path)
    with pytest.raises(NotRestoredError, match=r"pkg/changed\.py") as caught:
        _run(site, filesystem=RottenJournal())
    assert (site / "pkg/changed.py").read_bytes() == b"value = 2\n"
    assert (site / "pkg/gone.py").read_bytes() == b"gone = True\n", "the others are put back"
    assert caught.value.hints[-1].startswith("or take the files as they are now: rm -r ")


@pytest.mark.parametrize("moment", range(5, 75, 6))
def test_interrupted_by_the_user(tmp_path: Path, moment: int) -> None:
    def interrupt(count: int, _name: str) -> None:
        if count == moment:
            raise KeyboardInterrupt

    site = make_site(tmp_path / "a")
    old, new = snapshot(site), new_snapshot(tmp_path / "b")
    with pytest.raises(KeyboardInterrupt):
        _run(site, filesystem=CountingFileSystem(interrupt))
    assert snapshot(site) in (old, new)
    _recover(site)
    assert snapshot(site) in (old, new)
    assert _no_leftovers(site)


def test_originals_come_back_from_another_file_system(tmp_path: Path) -> None:
    class TwoDisks(RealFileSystem):
        def replace(self, source: Path, target: Path) -> None:
            if ".provision" in source.parts and ".provision" not in target.parts:
                raise OSError(errno.EXDEV, "Invalid cross-device link")
            super().replace(source, target)

        def fsync(self, path: Path) -> None:
            if path.name == "sub":
                raise OSError(errno.EIO, "Input/output error", str(path))
            super().fsync(path)

    site = make_site(tmp_path)
    before = snapshot(site)
    with pytest.raises(NotRestoredError):
        _run(site, filesystem=TwoDisks())  # sub cannot be synced in the undo, either
    assert snapshot(site) == before
    assert _recover(site) == RecoveryKind.UNDONE
    assert snapshot(site) == before


# Dying


def _in_child(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def _killed(child: int) -> bool:
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_killed_at_200_points_and_recovered(fast_path: Path) -> None:
    """At every operation, in the middle of every file, and at random times; then while recovering, too."""
    total = _count_operations(fast_path / "count")
    old, new = snapshot(make_site(fast_path / "old")), new_snapshot(fast_path / "new")
    chance = random.Random(20261130)
    deaths: list[Callable[[], FileSystem]] = []
    deaths += [lambda number=number: dying_at(number) for number in range(1, total + 1)]
    deaths += [lambda number=number: TearingFileSystem(number) for number in range(1, 14)]
    wanted = len(deaths) + max(200 - len(deaths), 60)
    kinds: set[RecoveryKind | None] = set()
    killed, longest = 0, 0.02
    for number in itertools.count():
        if killed == wanted:
            break
        site = make_site(fast_path / str(number))
        if number < len(deaths):
            child = _in_child(lambda number=number, site=site: _run(site, filesystem=deaths[number]()))
            killed += _killed(child)
        else:
            child = _in_child(lambda site=site: _run(site))
            time.sleep(chance.uniform(0, longest))
            os.kill(child, signal.SIGKILL)
            hit = _killed(child)
            killed += hit
            # As long as a run takes here and now: about one in three comes too late.
            longest *= 1.1 if hit else 0.8
        if chance.random() < 0.3:
            _killed(_in_child(lambda site=site: _recover(site, dying_at(chance.randrange(1, 40)))))
        kinds.add(_recover(site))
        found = snapshot(site)
        assert found in (old, new), f"death {number}"
        assert _no_leftovers(site)
        if found == old:
            _run(site)
            assert snapshot(site) == new
    assert kinds >= {None, RecoveryKind.UNDONE, RecoveryKind.NOTHING_WRITTEN}


def test_power_cuts_that_lose_what_was_not_synced(fast_path: Path) -> None:
    total = _count_operations(fast_path / "count")
    old, new = snapshot(make_site(fast_path / "old")), new_snapshot(fast_path / "new")
    chance = random.Random(7)
    found_new = 0
    for number in range(1, total + 1):
        site = make_site(fast_path / str(number))
        _killed(_in_child(lambda site=site, n=number: _run(site, filesystem=ForgetfulDisk(n, chance))))
        if chance.random() < 0.5:
            again = chance.randrange(1, 40)
            _killed(_in_child(lambda site=site, n=again: _recover(site, ForgetfulDisk(n, chance))))
        _recover(site)
        assert snapshot(site) in (old, new), f"power cut {number}"
        assert _no_leftovers(site)
        found_new += snapshot(site) == new
    assert 0 < found_new < total


def test_two_processes_at_once_take_turns(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a")
    new = new_snapshot(tmp_path / "b")

    def work(mark: Path) -> None:
        with hold_environment(tmp_path / "a/.provision", wait_seconds=20):
            recover(site, tmp_path / "a/.provision", record=RECORD, made=CREATED)
            if (site / "pkg/changed.py").read_bytes() == b"value = 1\n":
                _run(site)
                mark.write_text("did it")

    marks = [tmp_path / f"mark-{number}" for number in range(4)]
    children = [_in_child(lambda mark=mark: work(mark)) for mark in marks]
    assert [_killed(child) for child in children] == [False] * 4
    assert snapshot(site) == new
    assert sum(mark.exists() for mark in marks) == 1


def test_a_process_that_must_not_wait_is_busy(tmp_path: Path) -> None:
    with (
        hold_environment(tmp_path, wait_seconds=0),
        pytest.raises(BusyError),
        hold_environment(tmp_path, wait_seconds=0),
    ):
        pytest.fail("held twice")


# Recovering


def _dying_before_the_first(operation: str) -> FileSystem:
    def die(_count: int, name: str) -> None:
        if name == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    return CountingFileSystem(die)


def _interrupted(folder: Path) -> Path:
    """A site whose process died when all files were changed, and nothing was proven."""
    site = make_site(folder / "site")
    assert _killed(_in_child(lambda: _run(site, filesystem=_dying_before_the_first("rmdir"))))
    assert (site / "pkg/changed.py").read_bytes() == b"value = 2\n"
    return site


def test_nothing_to_recover(tmp_path: Path) -> None:
    assert recover(make_site(tmp_path), tmp_path / ".provision", record=RECORD, made=CREATED) is None


def test_recovery_names_what_it_put_back(tmp_path: Path) -> None:
    site = _interrupted(tmp_path)
    recovery = recover(site, site.parent / ".provision", record=RECORD, made=CREATED)
    assert recovery is not None
    assert recovery.kind == RecoveryKind.UNDONE
    assert "pkg/changed.py" in recovery.paths
    assert recovery.started is not None


def test_an_edit_after_the_crash_is_not_overwritten(tmp_path: Path) -> None:
    site = _interrupted(tmp_path)
    (site / "pkg/changed.py").write_bytes(b"value = 'mine'\n")
    with pytest.raises(NotRestoredError) as caught:
        _recover(site)
    assert (site / "pkg/changed.py").read_bytes() == b"value = 'mine'\n"
    assert (site / "pkg/gone.py").exists(), "the others are put back"
    copy = next(hint for hint in caught.value.hints if hint.startswith("the bytes before")).rpartition(" ")[2]
    assert Path(copy).read_bytes() == b"value = 1\n"
    (site / "pkg/changed.py").write_bytes(b"value = 1\n")
    assert _recover(site) == RecoveryKind.UNDONE
    assert _no_leftovers(site)


def test_a_file_installed_anew_after_the_crash_is_left_as_shipped(tmp_path: Path) -> None:
    site = make_site(tmp_path / "site")
    patched = b"value = 10\n"
    (site / "pkg/changed.py").write_bytes(patched)
    steps: tuple[FileStep, ...] = (
        ReplaceFile(path="pkg/changed.py", before=digest_of(patched), content=b"value = 11\n"),
        DeleteFile(path="pkg/lonely/only.py", before=digest_of(SHIPPED["pkg/lonely/only.py"])),
    )

    assert _killed(_in_child(lambda: _run(site, steps, filesystem=_dying_before_the_first("rmdir"))))
    assert (site / "pkg/changed.py").read_bytes() == b"value = 11\n"
    (site / "pkg/changed.py").write_bytes(SHIPPED["pkg/changed.py"])
    _recover(site)
    assert (site / "pkg/changed.py").read_bytes() == SHIPPED["pkg/changed.py"]
    assert _no_leftovers(site)


def test_a_torn_record_is_set_aside_with_its_originals(tmp_path: Path) -> None:
    site = _interrupted(tmp_path)
    intent = site.parent / ".provision/journal/intent"
    intent.write_bytes(intent.read_bytes()[:-20])
    recovery = recover(site, site.parent / ".provision", record=RECORD, made=CREATED)
    assert recovery is not None
    assert recovery.kind == RecoveryKind.SET_ASIDE
    assert recovery.aside is not None
    assert any((recovery.aside / "originals").iterdir())
    assert not is_interrupted(site.parent / ".provision")


def test_a_record_of_another_version_is_left_to_it(tmp_path: Path) -> None:
    site = _interrupted(tmp_path)
    intent = site.parent / ".provision/journal/intent"
    _, _, body = intent.read_bytes().partition(b"\n")
    body = json.dumps({**json.loads(body), "schema": "provision/journal/2"}).encode()
    intent.write_bytes(digest_of(body).encode() + b"\n" + body)
    with pytest.raises(NotRestoredError, match="another version"):
        _recover(site)
    assert Journal(site.parent / ".provision", filesystem=REAL).exists()


# Somebody else's environment


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_a_user_who_may_not_write_changes_nothing(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    before = snapshot(site)
    for folder in (*tmp_path.parents, tmp_path):
        if folder.stat().st_uid == 0 and folder.is_relative_to(tmp_path.parents[2]):
            folder.chmod(folder.stat().st_mode | 0o055)
    told, tell = os.pipe()

    def work() -> None:
        os.setgid(65534)
        os.setuid(65534)
        try:
            _run(site)
        except RestoredError as error:
            os.write(tell, f"{error.exit_code} {error.what}\n".encode())
        try:
            with hold_environment(tmp_path / ".provision", wait_seconds=0):
                os.write(tell, b"held")
        except RestoredError as error:
            os.write(tell, f"{error.exit_code} {error.what}\n".encode())
        assert _run(site, ()) == ()
        os.write(tell, b"nothing to do\n")

    assert not _killed(_in_child(work))
    assert os.read(told, 4096).decode().splitlines() == [
        "6 a change could not be made: Permission denied; everything is as before",
        "6 the environment cannot be locked: Permission denied; nothing was written",
        "nothing to do",
    ]
    assert snapshot(site) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_one_folder_that_may_not_be_written_takes_everything_back(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    for folder in (tmp_path, site, *site.rglob("*")):
        os.chown(folder, 65534, 65534)
    os.chown(site / "pkg/sub", 0, 0)
    for folder in tmp_path.parents:
        if folder.is_relative_to(tmp_path.parents[2]):
            folder.chmod(folder.stat().st_mode | 0o055)
    before = snapshot(site)
    told, tell = os.pipe()

    def work() -> None:
        os.setgid(65534)
        os.setuid(65534)
        try:
            _run(site)
        except RestoredError as error:
            os.write(tell, f"{error.exit_code} {error.where}".encode())

    assert not _killed(_in_child(work))
    code, _, where = os.read(told, 4096).decode().partition(" ")
    assert code == "6"
    assert where.startswith(str(site / "pkg/sub"))
    assert snapshot(site) == before
    assert _no_leftovers(site)
