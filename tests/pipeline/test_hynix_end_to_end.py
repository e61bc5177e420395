"""``provision hynix`` from a local copy of the vLLM index to a proven environment, and from build to build."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from provisioner.cli.main import main
from provisioner.documents.lock import Lock
from provisioner.home import find_home
from provisioner.index.settings import read_settings
from provisioner.index.source import candidates, open_wheel, parse_spec
from provisioner.locks.find import lock_files, read_lock
from provisioner.resources import patches_folder, recipes_folder
from provisioner.wheels.names import Target, choose
from tests.support.index_server import IndexServer, Mood
from tests.support.wheels import select_files, version_file, wheel_bytes, wheel_filename

COMMIT = "1fe3a1571ac67581478a11743e55a306de1d136f"
NEXT = "2ae239fc0250cd29d37f35c6a31e9eae749ef1c8"
VERSION = "0.26.1rc1.dev1024+g1fe3a1571"
NEWER = "0.26.1rc1.dev1030+g2ae239fc0"
ARM = "cp38-abi3-manylinux_2_28_aarch64"
USER_ENVIRON, USER_HOME = dict(os.environ), Path.home()
FILES: Mapping[str, bytes] = {"vllm/__init__.py": b"raise RuntimeError('imported')\n", "vllm/ops.py": b"OPS = 1\n"}


def vllm_wheel(version: str, commit: str, files: Mapping[str, bytes] = FILES) -> bytes:
    contents = {**files, "vllm/_version.py": version_file(version, commit)}
    return wheel_bytes(contents, version=version, requires=["torch==2.13.0"])


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A user's machine whose indexes are ``index``; ``home`` is where the tool keeps its things."""

    index: IndexServer
    home: Path

    def run(self, *words: str) -> int:
        return main(words)

    def hynix(self, *words: str) -> int:
        return main(["hynix", "--index-url", self.index.url, *words])

    @property
    def venv(self) -> Path:
        return self.home / "venvs" / "hynix"

    @property
    def lock(self) -> Lock:
        return read_lock(lock_files(self.home / "locks", "hynix"))

    @property
    def site_packages(self) -> Path:
        (folder,) = self.venv.glob("lib/python3*/site-packages")
        return folder

    def publish(self, version: str, commit: str, files: Mapping[str, bytes] = FILES, *, nightly: bool = True) -> bytes:
        data = vllm_wheel(version, commit, files)
        self.index.add_build(commit, {wheel_filename(version): data}, nightly=nightly)
        return data


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with IndexServer() as index:
        home = tmp_path / "provision"
        monkeypatch.setenv("PROVISION_HOME", str(home))
        monkeypatch.setenv("PROVISION_GITHUB_API", index.github_url)
        monkeypatch.setenv("PROVISION_RETRIES", "1")
        monkeypatch.setenv("PROVISION_BACKOFF", "0.001")
        monkeypatch.setenv("UV_DEFAULT_INDEX", index.simple_url)
        # These wheels come again and again under the same names with other bytes.
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
        torch = {"torch/version.py": b"__version__ = '2.13.0+cu130'\ncuda: str | None = '13.0'\n"}
        data = wheel_bytes(torch, version="2.13.0", project="torch")
        index.add_package("torch", {wheel_filename("2.13.0", project="torch"): data})
        made = Machine(index=index, home=home)
        made.publish(VERSION, COMMIT)
        yield made


def answer(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_first_use_makes_a_lock_and_every_later_run_insists_on_it(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert machine.hynix() == 0
    lock = machine.lock
    assert lock.complete
    assert lock.build.commit == COMMIT
    assert (str(lock.build.version), lock.build.variant) == (VERSION, None)
    assert (
        lock.build.url
        == f"https://wheels.vllm.ai/{COMMIT}/vllm-0.26.1rc1.dev1024%2Bg1fe3a1571-{lock.build.filename[-35:]}"
    )
    assert machine.index.url not in lock.requirements
    assert [pin.name for pin in lock.pins] == ["torch", "vllm"]
    assert (machine.site_packages / "vllm/ops.py").read_bytes() == FILES["vllm/ops.py"]

    downloads = [request for request in machine.index.requests if request.path.endswith(".whl") and not request.range]
    assert sum("vllm" in request.path for request in downloads) == 1, "hashed while it was downloaded, once"

    capsys.readouterr()
    assert machine.run("status", "hynix", "--json") == 0
    status = answer(capsys)
    assert (status["proven"], status["version"], status["commit"]) == (True, VERSION, COMMIT[:9])

    machine.index.forget_requests()
    assert machine.hynix("--require-lock", "--json") == 0
    assert answer(capsys)["actions"] == []
    assert not machine.index.requests, "nothing to do, nothing to ask"


def test_another_wheel_under_the_locked_name_is_refused(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert machine.run("lock", "hynix", "--index-url", machine.index.url) == 0
    machine.run("cache", "--clear")
    machine.publish(VERSION, COMMIT, {**FILES, "vllm/ops.py": b"OPS = 2\n"})
    assert machine.hynix() == 4
    shown = capsys.readouterr().err
    assert "error[hash-mismatch]" in shown
    assert machine.lock.build.sha256 in shown


def test_a_nightly_travels_in_a_bundle(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "hynix.tar")
    words = ("bundle", "hynix", "--index-url", machine.index.url, "--without-tool", "-o", file, "--json")
    assert machine.run(*words) == 0
    written = answer(capsys)
    assert machine.run("bundle", "--check", file, "--json") == 0
    checked = answer(capsys)
    assert checked.pop("schema") == "provision/bundle-check/1"
    assert written.pop("schema") == "provision/bundle-written/1"
    assert checked == written

    machine.index.forget_requests()
    for name in ("PROVISION_HOME", "UV_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "another" / name))
    assert machine.run("hynix", "--from-bundle", file, "--json") == 0
    made = answer(capsys)
    assert made["receipt"]["build"]["version"] == VERSION  # type: ignore[index]
    assert machine.run("hynix", "--from-bundle", file, "--check") == 0
    assert not machine.index.requests


def test_a_bundle_is_named_or_written_but_not_both(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((), ("hynix",), ("-o", "x.tar"), ("hynix", "--check", "x.tar"), ("--check", "x.tar", "-o", "y.tar")):
        assert machine.run("bundle", *words) == 2
    assert "hint: provision bundle --check FILE" in capsys.readouterr().err
    assert machine.run("bundle", "--check", "nothing.tar", "--json") == 4
    assert answer(capsys)["code"] == "cannot-obtain"


def test_require_lock_refuses_the_first_use(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert machine.hynix("--require-lock") == 3
    shown = capsys.readouterr().err
    assert "error[invalid-lock]: there is no lock for this recipe yet" in shown
    assert "hint: provision lock hynix" in shown
    assert not machine.venv.exists()
    assert not machine.index.requests


def test_half_a_lock_is_refused_and_the_named_command_mends_it(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = ("lock", "hynix", "--index-url", machine.index.url)
    assert machine.run(*lock) == 0
    (machine.home / "locks" / "hynix.toml").unlink()
    assert machine.hynix("--dry-run") == 3
    assert "hint: provision lock hynix" in capsys.readouterr().err
    assert machine.run(*lock) == 0
    assert "it counts as no lock" in capsys.readouterr().err
    assert machine.hynix("--dry-run", "--require-lock") == 0


def test_a_lock_of_a_bare_run_never_counts_as_complete(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert machine.hynix("--bare") == 0
    bare = machine.lock
    assert not bare.complete
    assert [pin.name for pin in bare.pins] == ["vllm"]
    assert not (machine.site_packages / "torch").exists()
    assert machine.hynix("--require-lock") == 3
    assert "made by a run without dependencies" in capsys.readouterr().err
    assert machine.hynix() == 0
    assert machine.lock.complete
    assert machine.lock.build.sha256 == bare.build.sha256
    assert (machine.site_packages / "torch").exists()


def test_the_full_lock_insists_on_the_wheel_of_the_bare_run(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert machine.hynix("--bare") == 0
    machine.publish(VERSION, COMMIT, {**FILES, "vllm/ops.py": b"OPS = 2\n"})
    machine.run("cache", "--clear")
    assert machine.hynix() == 4
    assert "error[hash-mismatch]" in capsys.readouterr().err
    assert not machine.lock.complete


def test_a_dry_run_keeps_no_lock(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert machine.hynix("--dry-run", "--json") == 0
    plan = answer(capsys)
    assert [line.split()[0] for line in plan["actions"]] == ["create", "install", "check", "write"]  # type: ignore[attr-defined]
    assert not (machine.home / "locks").exists()
    assert not machine.venv.exists()


def test_the_same_inputs_give_the_same_lock(machine: Machine, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert machine.run("lock", "hynix", "--index-url", machine.index.url, "--output", str(tmp_path / name)) == 0
        machine.run("cache", "--clear")
    for file in ("hynix.txt", "hynix.toml"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_a_commit_without_a_build(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVISION_GITHUB_API", "")
    assert machine.run("lock", "hynix", "--commit", "0" * 40, "--index-url", machine.index.url) == 4
    shown = capsys.readouterr().err
    assert f"error[no-such-build]: the index has no build of commit {'0' * 40}: not built (yet) or not on main" in shown
    assert "hint: provision lock RECIPE --latest" in shown


def test_lock_of_another_commit_and_of_the_latest_one(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert machine.hynix() == 0
    machine.publish(NEWER, NEXT)
    for words in (("--commit", NEXT[:9]), ("--latest",)):
        capsys.readouterr()
        assert machine.run("lock", "hynix", *words, "--dry-run", "--index-url", machine.index.url, "--json") == 0
        found = answer(capsys)
        assert found["build"]["commit"] == NEXT  # type: ignore[index]
        assert [row["name"] for row in found["changes"]] == ["vllm"]  # type: ignore[attr-defined]
        assert [(row["id"], row["verdict"]) for row in found["patches"]] == [  # type: ignore[attr-defined]
            ("pr50021-gdn-spec-bounds", "not-shipped")
        ]
    assert machine.lock.build.commit == COMMIT, "a dry run writes nothing"


def test_a_newer_lock_moves_an_environment_only_with_rebuild(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert machine.hynix() == 0
    inode = machine.venv.stat().st_ino
    machine.publish(NEWER, NEXT)
    assert machine.run("lock", "hynix", "--latest", "--index-url", machine.index.url) == 0
    capsys.readouterr()
    assert machine.hynix() == 5
    shown = capsys.readouterr().err
    assert "error[environment-conflict]: vllm in this environment is not the lock's" in shown
    assert "hint: run the same command with --rebuild, to replace it" in shown
    assert machine.venv.stat().st_ino == inode

    assert machine.hynix("--rebuild") == 0
    assert machine.venv.stat().st_ino != inode
    assert [path.name for path in machine.venv.parent.iterdir()] == ["hynix"], "the former one is gone"
    capsys.readouterr()
    assert machine.run("status", "hynix", "--json") == 0
    assert answer(capsys)["version"] == NEWER
    assert machine.hynix("--json") == 0
    assert answer(capsys)["actions"] == []


def test_an_edited_file_outside_the_series_is_mended_by_rebuild_and_every_hint_says_so(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert machine.hynix() == 0
    edited = machine.site_packages / "vllm" / "__init__.py"
    shipped = edited.read_bytes()
    edited.unlink()  # a hard link to what others use
    edited.write_bytes(shipped + b"# mine\n")
    capsys.readouterr()
    for words in ((), ("--reapply-patches",), ("--dry-run",)):
        assert machine.hynix(*words) == 5
        assert "hint: run the same command with --rebuild, to replace it" in capsys.readouterr().err
    assert machine.run("status", "hynix") == 1
    assert f"hint: provision up hynix --venv {machine.venv} --rebuild\n" in capsys.readouterr().out
    assert machine.hynix("--rebuild", "--dry-run") == 0
    assert machine.hynix("--rebuild", "--check") == 1
    assert edited.read_bytes() != shipped
    assert machine.hynix("--rebuild") == 0
    assert edited.read_bytes() == shipped
    assert machine.run("status", "hynix") == 0
    inode = machine.venv.stat().st_ino
    assert machine.hynix("--rebuild") == 0
    assert machine.venv.stat().st_ino == inode, "nothing is in the way any more"


def test_an_older_lock_needs_downgrade_too(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.publish(NEWER, NEXT)
    assert machine.run("lock", "hynix", "--latest", "--index-url", machine.index.url) == 0
    assert machine.hynix() == 0
    assert machine.run("lock", "hynix", "--index-url", machine.index.url) == 0
    for words in ((), ("--rebuild",)):
        capsys.readouterr()
        assert machine.hynix(*words) == 5
        shown = capsys.readouterr().err
        assert "error[environment-conflict]: the lock's vllm is older than the one in this environment" in shown
        assert "--rebuild --downgrade" in shown
    assert machine.hynix("--rebuild", "--downgrade") == 0
    capsys.readouterr()
    machine.run("status", "hynix", "--json")
    assert answer(capsys)["version"] == VERSION


def test_a_rebuild_that_fails_leaves_the_old_environment(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert machine.hynix() == 0
    machine.publish(NEWER, NEXT)
    assert machine.run("lock", "hynix", "--latest", "--index-url", machine.index.url) == 0
    machine.run("cache", "--clear")
    machine.index.set_mood(f"{NEXT}/{wheel_filename(NEWER).replace('+', '%2B')}", Mood(status=404))
    assert machine.hynix("--rebuild") == 4
    capsys.readouterr()
    machine.run("status", "hynix", "--json")
    status = answer(capsys)
    assert (status["version"], status["proven"]) == (VERSION, True)

    machine.index.set_mood(f"{NEXT}/{wheel_filename(NEWER).replace('+', '%2B')}")
    assert machine.hynix("--rebuild") == 0
    assert [path.name for path in machine.venv.parent.iterdir()] == ["hynix"]


def test_a_rebuild_killed_between_its_renames_is_put_right(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert machine.hynix() == 0
    machine.venv.rename(machine.venv.with_name(".hynix.former"))
    assert machine.hynix("--json") == 0
    capsys.readouterr()
    assert [path.name for path in machine.venv.parent.iterdir()] == ["hynix"]


BAD_MOODS = {
    "listed but 404": (Mood(status=404), "error[no-such-build]: the server does not have this wheel"),
    "truncated": (Mood(close_after=0), "error[network]: the answer ended"),
    "reset": (Mood(reset_after=0), "error[network]: the connection was reset"),
    "wrong length": (Mood(claim_length=99_999), "error[network]: the download ended early"),
    "503": (Mood(status=503, headers={"Retry-After": "9999"}), "the server asks to wait 9999 s"),
    "not a wheel": (Mood(body=b"<html>maintenance</html>"), "error[invalid-wheel]: this is not a whole wheel"),
}


@pytest.mark.parametrize(("mood", "message"), BAD_MOODS.values(), ids=BAD_MOODS)
def test_bad_moods_of_the_wheel_end_with_a_message_and_leave_nothing(
    machine: Machine, capsys: pytest.CaptureFixture[str], mood: Mood, message: str
) -> None:
    machine.index.set_mood(f"{COMMIT}/{wheel_filename(VERSION).replace('+', '%2B')}", mood)
    code = machine.hynix()
    shown = capsys.readouterr().err
    assert message in shown
    assert code == 4
    assert not machine.venv.exists()
    assert not (machine.home / "locks").exists()


INDEX_MOODS = {
    "half written": (
        {"metadata.json": Mood(cut_file_at=120), "": Mood(cut_file_at=120)},
        "error[network]: the index file is not complete JSON; it may be being written",
    ),
    "500": ({"metadata.json": Mood(status=500)}, "error[network]: the server answered 500"),
    "503": ({"metadata.json": Mood(status=503, headers={"Retry-After": "9999"})}, "the server asks to wait 9999 s"),
    "reset": ({"metadata.json": Mood(reset_after=5)}, "error[network]: the connection was reset"),
    "silent": ({"metadata.json": Mood(pause=3.0)}, "error[network]: no answer within 0.5 s"),
    "refused": ({"metadata.json": Mood(status=401)}, "error[cannot-obtain]: the server refused access (401)"),
    "circle": (
        {"metadata.json": Mood(status=302, headers={"Location": f"/{COMMIT}/vllm/metadata.json"})},
        "error[network]: the server redirects in a circle",
    ),
}


@pytest.mark.parametrize(("moods", "message"), INDEX_MOODS.values(), ids=INDEX_MOODS)
def test_bad_moods_of_the_index_end_with_a_message_and_leave_nothing(
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    moods: dict[str, Mood],
    message: str,
) -> None:
    monkeypatch.setenv("PROVISION_TIMEOUT", "0.5")
    for name, mood in moods.items():
        machine.index.set_mood(f"{COMMIT}/vllm/{name}", mood)
    assert machine.hynix() == 4
    shown = capsys.readouterr().err
    assert message in shown
    assert "hint: " in shown or "circle" in message
    assert not machine.venv.exists()


def test_without_a_network_it_says_so(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert machine.run("hynix", "--index-url", "http://127.0.0.1:1") == 4
    shown = capsys.readouterr().err
    assert "error[network]: the connection was refused" in shown
    assert "hint: check the network and the proxy settings, then run the command again" in shown


def test_an_interrupted_download_is_gone_on_with(machine: Machine) -> None:
    big = {**FILES, "vllm/_C.so": random.Random(1).randbytes(300_000)}
    wheel = machine.publish(VERSION, COMMIT, big)
    path = f"{COMMIT}/{wheel_filename(VERSION).replace('+', '%2B')}"
    machine.index.set_mood(path, Mood(drip=0.02))
    command = (sys.executable, "-m", "provisioner", "hynix", "--bare", "--index-url", machine.index.url)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        deadline = time.monotonic() + 30
        while not any(part.stat().st_size for part in machine.home.rglob("*.part")):
            assert time.monotonic() < deadline, "the download did not begin"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert "interrupted; run the same command again to go on" in said
    assert not machine.venv.exists()

    machine.index.set_mood(path)
    machine.index.forget_requests()
    assert machine.hynix("--bare") == 0
    (resumed,) = (request for request in machine.index.requests if request.headers.get("if-range"))
    assert 0 < int((resumed.range or "").removeprefix("bytes=").removesuffix("-")) < len(wheel)


@pytest.mark.parametrize("mood", [Mood(ignore_ranges=True), Mood(refuse_head=True), Mood(refuse_suffixes=True)])
def test_servers_with_fewer_abilities_will_do(machine: Machine, mood: Mood) -> None:
    machine.index.set_mood(f"{COMMIT}/{wheel_filename(VERSION).replace('+', '%2B')}", mood)
    assert machine.hynix() == 0
    assert machine.lock.build.commit == COMMIT


def test_a_build_for_another_platform_says_so(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.index.files.clear()
    machine.index.add_build(COMMIT, {wheel_filename(VERSION, tag=ARM): wheel_bytes({}, version=VERSION, tag=ARM)})
    assert machine.hynix() == 4
    shown = capsys.readouterr().err
    assert "error[no-compatible-wheel]: no wheel fits: only manylinux_2_28_aarch64" in shown


def test_a_variant_of_a_users_recipe_is_proven(
    machine: Machine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = (
        (recipes_folder() / "hynix.toml")
        .read_text()
        .replace(f'commit = "{COMMIT}"', f'commit = "{COMMIT}"\nvariant = "cu129"')
    )
    (tmp_path / "mine.toml").write_text(text)
    words = ("up", str(tmp_path / "mine.toml"), "--index-url", machine.index.url, "--json")
    assert machine.run(*words) == 4
    assert "no wheel fits: variant cu129 wanted, has: default" in capsys.readouterr().err
    version = f"{VERSION}.cu129"
    both = {wheel_filename(v): vllm_wheel(v, COMMIT) for v in (VERSION, version)}
    machine.index.add_build(COMMIT, both)
    assert machine.run(*words) == 0
    build = answer(capsys)["receipt"]["build"]  # type: ignore[index]
    assert (build["version"], build["variant"], build["commit"]) == (version, "cu129", COMMIT)


def test_a_wheel_of_another_commit_is_refused(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    data = vllm_wheel(VERSION, NEXT)
    machine.index.add_build(COMMIT, {wheel_filename(VERSION): data})
    assert machine.hynix() == 4
    shown = capsys.readouterr().err
    assert "error[no-such-build]: the wheel is of another commit" in shown
    assert NEXT[:9] in shown
    assert not machine.venv.exists()


def test_a_wheel_that_disagrees_with_its_name_is_reported(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    contents = {**FILES, "vllm/_version.py": version_file(VERSION, COMMIT)}
    data = wheel_bytes(contents, version=VERSION, metadata_version="0.26.1rc1.dev1023")
    machine.index.add_build(COMMIT, {wheel_filename(VERSION): data})
    assert machine.hynix("--bare") != 0
    assert "says in its METADATA that it is version 0.26.1rc1.dev1023" in capsys.readouterr().err


@pytest.mark.network
def test_status_judges_the_fix_on_real_files(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    settings = read_settings(USER_ENVIRON, USER_HOME, cache=find_home(os.environ).cache)
    real = open_wheel(choose(candidates(parse_spec("pypi:0.27.1"), settings), Target()).chosen, settings)
    text = (patches_folder() / "pr50021-gdn-spec-bounds" / "0.27.patch").read_text()
    touched = [line.removeprefix("+++ b/").split("\t")[0] for line in text.splitlines() if line.startswith("+++ b/")]
    files = select_files(real, touched, version=VERSION, commit=COMMIT)
    machine.publish(VERSION, COMMIT, files)
    assert machine.hynix() == 0
    capsys.readouterr()
    assert machine.run("status", "hynix", "--json") == 0
    (patch,) = answer(capsys)["patches"]  # type: ignore[misc]
    assert (patch["policy"], patch["verdict"]) == ("not-needed", "applies")
