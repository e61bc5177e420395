"""Whoever wrote what is in an environment, nothing outside of it is touched: whole trees, before and after."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from provisioner.digests import digest_of
from provisioner.documents.owner import Owner
from provisioner.environment.state import objects_of, read_receipt, write_owner, write_receipt
from provisioner.errors import ConflictError, EnvironmentConflictError, NotRestoredError, ProvisionError, RestoredError
from provisioner.patching.steps import ReplaceFile
from provisioner.transaction.filesystem import Image
from provisioner.transaction.interrupted import is_interrupted
from provisioner.transaction.journal import SCHEMA, Intent, Target, print_intent
from provisioner.transaction.lockfile import hold_environment
from provisioner.transaction.transaction import execute, recover
from tests.support.environments import make_receipt
from tests.support.trees import CREATED, RECORD, SHIPPED, STEPS, attempt, make_site

NOBODY = 65534
STARTED = "2026-12-01T00:00:00+00:00"


@dataclass(frozen=True)
class Place:
    """An environment, which ``owner`` may have filled, beside a tree that nothing may touch."""

    folder: Path
    owner: int

    @property
    def site(self) -> Path:
        return self.folder / "env/site-packages"

    @property
    def state(self) -> Path:
        return self.folder / "env/.provision"

    @property
    def outside(self) -> Path:
        return self.folder / "outside"

    def look_outside(self) -> dict[str, tuple[Any, ...]]:
        found: dict[str, tuple[Any, ...]] = {}
        for path in (self.outside, *sorted(self.outside.rglob("*"))):
            now = path.lstat()
            data = path.read_bytes() if path.is_file() else b""
            found[str(path)] = (now.st_mode, now.st_uid, now.st_gid, now.st_nlink, now.st_ino, now.st_mtime_ns, data)
        return found

    def give(self) -> None:
        """What is in the environment by now belongs to its owner."""
        for path in (self.folder / "env", *(self.folder / "env").rglob("*")):
            os.chown(path, self.owner, self.owner, follow_symlinks=False)

    def forge(self, *targets: Target, originals: tuple[bytes, ...] = (), **fields: Any) -> None:
        """A journal with a right checksum; ``fields`` replace those of the intent."""
        (self.state / "journal/originals").mkdir(parents=True)
        for number, data in enumerate(originals):
            (self.state / f"journal/originals/{number}").write_bytes(data)
        intent = asdict(Intent(started=STARTED, pid=1, targets=targets, folders={}))
        self.write_record(json.dumps({"schema": SCHEMA, **intent, **fields}).encode())

    def write_record(self, body: bytes) -> None:
        (self.state / "journal").mkdir(parents=True, exist_ok=True)
        (self.state / "journal/intent").write_bytes(digest_of(body).encode() + b"\n" + body)

    def recover(self) -> ProvisionError | None:
        self.give()
        return attempt(lambda: recover(self.site, self.state, record=RECORD, made=CREATED))

    def aside(self) -> list[Path]:
        return list(self.state.glob("journal.rejected-*"))


@pytest.fixture(
    params=[
        pytest.param(None, id="owner"),
        pytest.param(NOBODY, id="root-over-a-user's", marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root")),
    ]
)
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(tmp_path, os.geteuid() if request.param is None else request.param)
    make_site(tmp_path / "env")
    for path in ("empty", "pkg/__pycache__"):
        (made.outside / path).mkdir(parents=True)
    for path in ("precious.txt", "0", "intent", "proven", "m0.cpython-312.pyc", "changed.cpython-312.pyc"):
        (made.outside / path).write_bytes(b"precious\n")
        (made.outside / path).chmod(0o600)
    made.give()
    before = made.look_outside()
    yield made
    assert made.look_outside() == before


def image_of(data: bytes, mode: int = 0o644) -> Image:
    return Image(digest=digest_of(data), mode=mode, uid=os.geteuid(), gid=os.getegid())


def changed(old: bytes = b"value = 1\n", *, path: str = "pkg/changed.py", mode: int = 0o644) -> Target:
    """The target of a change that was made and not proven; the new file is SHIPPED's."""
    new = image_of(SHIPPED.get(path, b"planted\n"))
    return Target(path=path, old=image_of(old, mode), new=new, old_mtime_ns=0, shipped=None)


# S1


@pytest.mark.parametrize("name", ["journal", "journal/originals"])
def test_a_journal_that_is_a_link_is_refused(place: Place, name: str) -> None:
    (place.state / name).parent.mkdir(parents=True)
    (place.state / name).symlink_to(place.outside)
    error = place.recover()
    assert isinstance(error, ConflictError)
    assert error.exit_code == 5
    assert error.hints
    assert isinstance(attempt(lambda: _change(place)), ConflictError)
    assert (place.state / name).is_symlink()


@pytest.mark.parametrize("name", ["originals", "."])
def test_what_the_journal_does_not_name_stays(place: Place, name: str) -> None:
    (place.state / "journal/originals").mkdir(parents=True)
    (place.state / "journal" / name / "mine.txt").write_bytes(b"mine")
    assert isinstance(place.recover(), NotRestoredError)
    assert (place.state / "journal" / name / "mine.txt").read_bytes() == b"mine"


# S2


def test_an_original_that_is_a_link_is_not_followed(place: Place) -> None:
    place.forge(changed(b"precious\n", mode=0o4777))
    (place.state / "journal/originals/0").symlink_to(place.outside / "precious.txt")
    assert isinstance(place.recover(), NotRestoredError)
    assert (place.site / "pkg/changed.py").read_bytes() == SHIPPED["pkg/changed.py"]
    assert not (place.site / "pkg/changed.py").is_symlink()


def test_an_original_that_is_another_file_as_well_is_not_used(tmp_path: Path) -> None:
    place = Place(tmp_path, os.geteuid())
    make_site(tmp_path / "env")
    place.outside.mkdir()
    (place.outside / "precious.txt").write_bytes(b"precious\n")
    place.forge(changed(b"precious\n", mode=0o777))
    os.link(place.outside / "precious.txt", place.state / "journal/originals/0")
    before = place.look_outside()
    assert isinstance(place.recover(), NotRestoredError)
    assert place.look_outside() == before


def test_no_bit_but_the_permissions_is_given(place: Place) -> None:
    place.forge(changed(b"value = 0\n", mode=0o6755), originals=(b"value = 0\n",))
    assert place.recover() is None
    assert (place.site / "pkg/changed.py").stat().st_mode & 0o7777 == 0o755


# S3


@pytest.mark.parametrize("folder", ["../../outside/empty", "/outside/empty", "pkg/../../../outside/empty", "other"])
def test_folders_that_lead_nowhere_near_a_target_are_rejected(place: Place, folder: str) -> None:
    (place.site / "other").mkdir()
    place.forge(changed(), folders={folder: None})
    error = place.recover()
    assert isinstance(error, NotRestoredError)
    assert (place.site / "other").is_dir()
    assert len(place.aside()) == 1


def test_a_folder_of_a_target_that_is_a_link_is_not_followed(place: Place) -> None:
    shutil.rmtree(place.site / "pkg/lonely")
    (place.site / "pkg/lonely").symlink_to(place.outside / "empty")
    target = changed(b"only = 0\n", path="pkg/lonely/only.py")
    place.forge(target, originals=(b"only = 0\n",), folders={"pkg/lonely": None, "pkg": None})
    assert isinstance(place.recover(), NotRestoredError)
    assert (place.site / "pkg/lonely").is_symlink()


# S4


def _change(place: Place) -> object:
    return execute(place.site, place.state, STEPS, record=RECORD, may_create=CREATED)


def test_a_bytecode_folder_that_is_a_link_is_not_followed(place: Place) -> None:
    shutil.rmtree(place.site / "pkg/__pycache__")
    (place.site / "pkg/__pycache__").symlink_to(place.outside)
    error = attempt(lambda: _change(place))
    assert isinstance(error, ConflictError)
    assert (place.site / "pkg/changed.py").read_bytes() == SHIPPED["pkg/changed.py"]
    place.forge(changed(b"value = 0\n"), originals=(b"value = 0\n",))
    assert isinstance(place.recover(), NotRestoredError)


# S5


def _hold(place: Place) -> None:
    with hold_environment(place.state, wait_seconds=0):
        pass


USES: dict[str, Callable[[Place], object]] = {
    "lock": _hold,
    "owner": lambda place: write_owner(place.state, Owner(recipe="r", tool="1")),
    "receipt": lambda place: write_receipt(place.state, make_receipt()),
    "read": lambda place: read_receipt(place.state),
    "objects": lambda place: objects_of(place.state).put(b"data"),
    "change": _change,
    "look": lambda place: is_interrupted(place.state),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_state_folder_that_is_a_link_is_refused(place: Place, use: Callable[[Place], object]) -> None:
    place.state.symlink_to(place.outside)
    with pytest.raises(EnvironmentConflictError, match="is a link") as caught:
        use(place)
    assert caught.value.exit_code == 5
    assert caught.value.hints


def test_objects_that_are_a_link_are_refused(place: Place) -> None:
    place.state.mkdir()
    (place.state / "objects").symlink_to(place.outside)
    with pytest.raises(ConflictError):
        objects_of(place.state).put(b"data")


def test_files_of_the_state_that_are_links_are_neither_read_nor_written_through(place: Place) -> None:
    place.state.mkdir()
    for name in ("receipt.json", "environment.json", "lock"):
        (place.state / name).symlink_to(place.outside / "precious.txt")
    with pytest.raises(ConflictError):
        read_receipt(place.state)
    with pytest.raises(RestoredError):
        _hold(place)
    write_owner(place.state, Owner(recipe="r", tool="1"))
    assert not (place.state / "environment.json").is_symlink()


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("mode", [0o757, 0o777])
def test_a_state_folder_that_anybody_may_write_is_refused(
    place: Place, mode: int, use: Callable[[Place], object]
) -> None:
    place.state.mkdir()
    place.state.chmod(mode)
    with pytest.raises(EnvironmentConflictError, match="has mode") as caught:
        use(place)
    assert "chmod" in caught.value.hints[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give folders away")
def test_whose_a_state_folder_may_be(tmp_path: Path) -> None:
    env = tmp_path / "env"
    (env / ".provision").mkdir(parents=True)
    for around, state, allowed in ((0, 0, True), (0, NOBODY, False), (NOBODY, NOBODY, True), (NOBODY, 0, True)):
        os.chown(env, around, around)
        os.chown(env / ".provision", state, state)
        error = attempt(lambda: is_interrupted(env / ".provision"))
        assert (error is None) == allowed, (around, state)
        assert error is None or error.exit_code == 5


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give folders away")
def test_the_group_that_may_write_is_the_owners_own(tmp_path: Path) -> None:
    state = tmp_path / ".provision"
    state.mkdir()
    state.chmod(0o775)
    assert attempt(lambda: is_interrupted(state)) is None
    os.chown(state, 0, 12345)
    assert isinstance(attempt(lambda: is_interrupted(state)), EnvironmentConflictError)


# S6


def test_a_file_that_nobody_knows_is_not_planted(place: Place) -> None:
    planted = Target(path="sitecustomize.py", old=image_of(b"evil\n"), new=None, old_mtime_ns=0, shipped=None)
    place.forge(planted, originals=(b"evil\n",))
    error = place.recover()
    assert isinstance(error, NotRestoredError)
    assert error.exit_code == 7
    assert "sitecustomize.py" in str(error)
    assert not (place.site / "sitecustomize.py").exists()
    assert len(place.aside()) == 1
    assert place.recover() is None, "later commands work again"


def test_a_file_that_a_patch_had_made_comes_back(place: Place) -> None:
    gone = Target(path="pkg/made.py", old=image_of(b"made\n"), new=None, old_mtime_ns=0, shipped=None)
    place.forge(gone, originals=(b"made\n",))
    assert place.recover() is None
    assert (place.site / "pkg/made.py").read_bytes() == b"made\n"


def test_bytes_that_the_record_does_not_promise_are_not_brought_back(place: Place) -> None:
    place.forge(changed(b"value = 0\n"), originals=(b"value = 'evil'\n",))
    assert isinstance(place.recover(), NotRestoredError)
    assert (place.site / "pkg/changed.py").read_bytes() == SHIPPED["pkg/changed.py"]


# S7

GOOD: dict[str, Any] = {"schema": SCHEMA, **asdict(Intent(started=STARTED, pid=1, targets=(changed(),), folders={}))}


def _with_target(**fields: Any) -> bytes:
    return json.dumps({**GOOD, "targets": [{**GOOD["targets"][0], **fields}]}).encode()


BODIES = {
    "list": b"[]",
    "number": b"7",
    "no-json": b"{",
    "no-utf-8": b"\xff",
    "deep": b"[" * 100_000,
    "empty": b"{}",
    "schema": json.dumps({**GOOD, "schema": 1}).encode(),
    "targets": json.dumps({**GOOD, "targets": {}}).encode(),
    "target": json.dumps({**GOOD, "targets": [7]}).encode(),
    "folders": json.dumps({**GOOD, "folders": []}).encode(),
    "folder": json.dumps({**GOOD, "folders": {"pkg": 7}}).encode(),
    "more": json.dumps({**GOOD, "more": 1}).encode(),
    "started": json.dumps({**GOOD, "started": "\x1b[2J"}).encode(),
    "twice": json.dumps({**GOOD, "targets": GOOD["targets"] * 2}).encode(),
    "path": _with_target(path="../x"),
    "null-byte": _with_target(path="pkg/\0"),
    "absolute": _with_target(path="/etc/passwd"),
    "time": _with_target(old_mtime_ns=10**30),
    "old": _with_target(old="x"),
    "owner": _with_target(old={**GOOD["targets"][0]["old"], "uid": 10**20}),
    "digest": _with_target(old={**GOOD["targets"][0]["old"], "digest": "../../x"}),
    "shipped": _with_target(shipped="x"),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_journal_that_does_not_decode_is_set_aside(place: Place, body: bytes) -> None:
    place.write_record(body)
    error = place.recover()
    assert isinstance(error, NotRestoredError)
    assert error.exit_code == 7
    assert error.hints
    (aside,) = place.aside()
    assert error.where == str(aside)
    assert (aside / "intent").read_bytes().endswith(body)
    assert place.recover() is None, "later commands work again"
    place.write_record(body)
    assert isinstance(place.recover(), NotRestoredError), "and a second one like it has its own place"
    assert len(place.aside()) == 2


def test_what_is_printed_decodes(place: Place) -> None:
    intent = Intent(started=STARTED, pid=1, targets=(changed(b"value = 0\n"),), folders={"pkg": image_of(b"x")})
    text = print_intent(intent)
    place.write_record(text.partition(b"\n")[2].replace(digest_of(b"x").encode(), b""))
    (place.state / "journal/originals").mkdir()
    (place.state / "journal/originals/0").write_bytes(b"value = 0\n")
    assert place.recover() is None
    assert (place.site / "pkg/changed.py").read_bytes() == b"value = 0\n"


def test_a_root_that_the_user_named_may_be_a_link(place: Place) -> None:
    link = place.folder / "named"
    link.symlink_to(place.folder / "env")
    step = ReplaceFile(path="pkg/changed.py", before=digest_of(SHIPPED["pkg/changed.py"]), content=b"value = 2\n")
    execute(link / "site-packages", link / ".provision", (step,), record=RECORD, may_create=CREATED)
    assert (place.site / "pkg/changed.py").read_bytes() == b"value = 2\n"
