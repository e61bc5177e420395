"""A fork's stack over real files of vLLM 0.27.1: thirteen patches, an overlay, and ours, in one transaction."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from packaging.version import Version

from provisioner.digests import digest_of
from provisioner.doctor.builds import Build, read_build
from provisioner.documents.lock import Lock
from provisioner.documents.recipe import Recipe, parse_recipe
from provisioner.environment.state import read_owner, read_receipt, state_of
from provisioner.errors import ConflictError, EnvironmentConflictError, ForeignBytesError
from provisioner.index.settings import read_settings
from provisioner.index.source import candidates, open_wheel, parse_spec
from provisioner.index.transport import Transport
from provisioner.patching.diff import parse_patch
from provisioner.patching.hunks import Applied, apply_change
from provisioner.patching.model import SeriesVerdict
from provisioner.pipeline.execute import Outcome, Request, plan_environment, provision
from provisioner.pipeline.inspect import inspect_environment
from provisioner.pipeline.plan import AdoptEnvironment, ChangeFiles
from provisioner.pipeline.revert import revert
from provisioner.pipeline.status import read_status
from provisioner.progress import Silence
from provisioner.resources import patches_folder
from provisioner.series.fork import ForkWish, find_series, obtain_checkout, open_fork_series, peek_checkout
from provisioner.series.recipe import open_series
from provisioner.series.store import open_stored_patch
from provisioner.wheels.names import Target, choose
from tests.support.fork_stack import NEW, OPS, OVERLAY, REAL_FILES, SCHEDULER, Stack, make_repository, make_stack
from tests.support.index_server import IndexServer
from tests.support.shop import PYTHON, RECIPE, Shop

pytestmark = pytest.mark.network
RELEASE = Version("0.27.1")
OURS = ("pr50021-gdn-spec-bounds", "sm80-cpu-repack")
FORK_RECIPE = (
    RECIPE
    + """
[[patch]]
id = "pr50021-gdn-spec-bounds"
policy = "required"
why = "w"

[[patch]]
id = "sm80-cpu-repack"
policy = "required"
why = "w"

[fork]
url = "file://{url}"
commit = "{commit}"
root = "vllm"
patches = "patches/*.patch"
overlay = "kvarn"
overlay-patches = "kvarn/*.patch"
launcher = "single-user/start_qwen.sh"
drafters = ["models/D"]
"""
)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """The real files, read lazily."""
    settings = read_settings(os.environ, Path.home(), cache=tmp_path_factory.mktemp("cache"))
    with Transport(settings) as transport:
        found = candidates(parse_spec("pypi:0.27.1"), settings, transport=transport)
        wheel = open_wheel(choose(found, Target()).chosen, settings, transport=transport)
        return wheel.read_many(REAL_FILES)


@dataclass(kw_only=True)
class Yard:
    """A shop with the real files, the fork's repository, and the place of the checkout."""

    shop: Shop
    recipe: Recipe
    stack: Stack
    folder: Path
    origin: Path
    lock: Lock

    def wish(self, **changes) -> ForkWish:
        return ForkWish(**({"folder": self.folder} | changes))

    @property
    def venv(self) -> Path:
        return self.folder / "venv"

    @property
    def packages(self) -> Path:
        return self.venv / "lib" / f"python{PYTHON}" / "site-packages"

    def request(self, *, reapply: bool = False, **wish) -> Request:
        assert self.recipe.fork is not None
        checkout = obtain_checkout(self.recipe.fork, self.wish(**wish), Silence())
        series = open_fork_series(self.recipe, checkout, self.lock.build.version, overlay=wish.get("overlay", True))
        made = self.shop.request(series, self.lock, reapply=reapply)
        return replace(made, recipe=self.recipe, venv=self.venv, adopts=True)

    def run(self, **options) -> Outcome:
        return provision(self.request(**options), self.shop.uv, Silence())

    def contents(self) -> dict[str, bytes | None]:
        return {path: _read(self.packages / path) for path in self.expected()}

    def expected(self) -> dict[str, bytes]:
        """What the fork's patches make, and ours on top, made here without the series engine."""
        files = dict(self.stack.files)
        ours = ("sm80-cpu-repack",) if "patches/0005-pr50021.patch" in self.stack.texts else OURS
        for patch_id in ours:
            stored = open_stored_patch(patches_folder(), patch_id)
            variant = stored.variant_for(RELEASE)
            assert variant is not None
            text = stored.file_of(variant)
            for change in parse_patch(text.read_bytes(), id=patch_id, source=patch_id).changes:
                done = apply_change(files.get(change.path), change)
                assert isinstance(done, Applied)
                assert done.content is not None
                files[change.path] = done.content
        return files


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def make_yard(tmp_path: Path, server: IndexServer, pristine: Mapping[str, bytes], *, copy: bool = True) -> Yard:
    stack = make_stack(pristine, with_copy_of_ours=copy)
    commit = make_repository(tmp_path / "origin", stack)
    text = FORK_RECIPE.format(url=tmp_path / "origin", commit=commit)
    recipe = parse_recipe(text, name="forked", where="forked.toml")
    shop = Shop(server=server, folder=tmp_path, recipe=recipe)
    shop.stock(files={"vllm/__init__.py": b"raise RuntimeError\n", **pristine})
    lock = shop.lock(open_series(recipe, RELEASE))
    return Yard(shop=shop, recipe=recipe, stack=stack, folder=tmp_path / "fork", origin=tmp_path / "origin", lock=lock)


@pytest.fixture
def server() -> Iterator[IndexServer]:
    with IndexServer() as made:
        yield made


@pytest.fixture
def yard(tmp_path: Path, server: IndexServer, pristine: Mapping[str, bytes]) -> Yard:
    return make_yard(tmp_path, server, pristine)


def verdicts(verdict: SeriesVerdict) -> dict[str, str]:
    return {patch.id: str(patch.verdict) for patch in verdict.patches}


def test_the_whole_stack_in_one_transaction(yard: Yard) -> None:
    outcome = yard.run()
    assert yard.contents() == yard.expected()
    assert len(outcome.verdict.patches) == 13 + 1 + 2 + 2
    assert verdicts(outcome.verdict)["pr50021-gdn-spec-bounds"] == "already-in-series"
    assert sum(isinstance(action, ChangeFiles) for action in outcome.actions) == 1
    receipt = read_receipt(state_of(yard.venv))
    assert receipt is not None
    assert {patch.id for patch in receipt.patches} >= set(OURS)
    assert set(receipt.created_files()) >= {NEW, OVERLAY}
    assert receipt.final_digests() == {path: digest_of(content) for path, content in yard.expected().items()}


def test_a_second_run_changes_nothing(yard: Yard) -> None:
    yard.run()
    assert yard.run().actions == ()
    assert not plan_environment(yard.request(), yard.shop.uv)


def test_a_stack_without_the_bounds_gets_ours(
    tmp_path: Path, server: IndexServer, pristine: Mapping[str, bytes]
) -> None:
    yard = make_yard(tmp_path, server, pristine, copy=False)
    outcome = yard.run()
    assert verdicts(outcome.verdict)["pr50021-gdn-spec-bounds"] == "applies"
    assert yard.contents() == yard.expected()


def rebuild(yard: Yard, version: str = "0.27.1") -> None:
    """What a user does by hand: a new venv in the fork with the plain release in it."""
    shutil.rmtree(yard.venv, ignore_errors=True)
    uv = yard.shop.uv
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "UV_CACHE_DIR": str(yard.shop.folder / "c")}
    index = ["--default-index", yard.shop.server.simple_url, "--no-config"]
    for words in (
        ["venv", "--python", sys.executable, str(yard.venv)],
        ["pip", "install", "--python", str(yard.venv / "bin" / "python"), *index, f"vllm=={version}"],
    ):
        command = [str(uv.binary), *words]
        subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment)


def test_a_rebuilt_environment_is_taken_over_and_gets_the_same_bytes(yard: Yard) -> None:
    yard.run()
    before = yard.contents()
    rebuild(yard)
    outcome = yard.run(reapply=True)
    assert isinstance(outcome.actions[0], AdoptEnvironment)
    assert yard.contents() == before
    owner = read_owner(state_of(yard.venv))
    assert owner is not None
    assert owner.adopted
    assert yard.run().actions == ()


@pytest.mark.skipif(shutil.which("patch") is None, reason="GNU patch is not installed")
def test_the_shell_way_is_recognized_as_applied(yard: Yard) -> None:
    obtain_checkout(yard.recipe.fork, yard.wish(), Silence())
    rebuild(yard)
    assert read_build(yard.venv) == Build(version=RELEASE, patches=frozenset())
    for patch in sorted((yard.folder / "patches").glob("*.patch"), key=lambda path: path.name):
        command = ["patch", "-p1", "-s", "--no-backup-if-mismatch", "-d", str(yard.packages / "vllm"), "-i", str(patch)]
        subprocess.run(command, check=True, timeout=30)
    assert _read(yard.packages / SCHEDULER) == yard.stack.files[SCHEDULER]
    assert read_build(yard.venv) == Build(version=RELEASE, patches=frozenset({"pr50021-gdn-spec-bounds"}))
    outcome = yard.run()
    found = verdicts(outcome.verdict)
    assert found["fork/0001-first"] == "applied"
    assert found["sm80-cpu-repack"] == "applies-at-offset"
    assert yard.contents() == yard.expected()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda packages: (packages / SCHEDULER).write_bytes(b"garbage\n"),
        lambda packages: (packages / SCHEDULER).unlink(),
        lambda packages: (packages / NEW).write_bytes(b"half a file\n"),
        lambda packages: (packages / OPS).write_bytes((packages / OPS).read_bytes() + b"# edit\n"),
    ],
)
def test_any_state_ends_in_the_same_bytes(yard: Yard, spoil) -> None:
    yard.run()
    spoil(yard.packages)
    with pytest.raises(ConflictError):
        yard.run()
    yard.run(reapply=True)
    assert yard.contents() == yard.expected()


def test_a_file_of_the_overlay_that_is_gone_comes_back(yard: Yard) -> None:
    yard.run()
    (yard.packages / OVERLAY).unlink()
    yard.run()
    assert yard.contents() == yard.expected()


def test_an_update_of_the_fork_takes_back_what_it_no_longer_has(yard: Yard) -> None:
    yard.run()
    assert yard.recipe.fork is not None
    without = yard.request(overlay=False)
    outcome = provision(without, yard.shop.uv, Silence())
    assert not (yard.packages / OVERLAY).exists()
    assert any(isinstance(action, ChangeFiles) for action in outcome.actions)
    assert b"kvarn_k4v2" not in (yard.packages / "vllm/config/cache.py").read_bytes()
    assert b"fork_nine" in (yard.packages / "vllm/config/cache.py").read_bytes()
    assert provision(without, yard.shop.uv, Silence()).actions == ()


def test_a_leftover_that_somebody_edited_is_not_thrown_away(yard: Yard) -> None:
    yard.run()
    (yard.packages / OVERLAY).write_bytes(b"MINE = 1\n")
    with pytest.raises(ForeignBytesError, match="changed since"):
        provision(yard.request(overlay=False), yard.shop.uv, Silence())
    assert (yard.packages / OVERLAY).read_bytes() == b"MINE = 1\n"
    provision(yard.request(overlay=False, reapply=True), yard.shop.uv, Silence())
    assert not (yard.packages / OVERLAY).exists()


def test_status_and_revert_know_the_forks_part(yard: Yard, pristine: Mapping[str, bytes]) -> None:
    yard.run()
    status = read_status(yard.recipe, yard.venv)
    assert status.proven, status.problems
    assert len(status.patches) == 18
    series = find_series(yard.recipe, yard.venv, RELEASE)
    revert("vllm", series, yard.venv)
    assert {path: _read(yard.packages / path) for path in pristine} == dict(pristine)
    assert not (yard.packages / NEW).exists()
    assert not read_status(yard.recipe, yard.venv).proven


def test_a_dry_run_of_a_fork_that_is_not_there_shows_the_end_and_leaves_nothing(yard: Yard) -> None:
    assert yard.recipe.fork is not None
    checkout = peek_checkout(yard.recipe.fork, yard.wish(), Silence())
    series = open_fork_series(yard.recipe, checkout, RELEASE)
    request = replace(yard.shop.request(series, yard.lock), recipe=yard.recipe, venv=yard.venv, adopts=True)
    plan = plan_environment(request, yard.shop.uv)
    assert plan.final == {path: digest_of(content) for path, content in yard.expected().items()}
    assert not yard.folder.exists()


def test_another_commit_is_refused_unless_any_will_do(yard: Yard) -> None:
    assert yard.recipe.fork is not None
    newer = subprocess.run(
        ["git", "-C", str(yard.origin), "rev-parse", "main"], check=True, capture_output=True, text=True, timeout=30
    ).stdout.strip()
    obtain_checkout(yard.recipe.fork, yard.wish(commit=newer), Silence())
    with pytest.raises(EnvironmentConflictError, match="another commit"):
        obtain_checkout(yard.recipe.fork, yard.wish(), Silence())
    (yard.folder / "patches" / "0001-first.patch").write_text("edited\n")
    with pytest.raises(EnvironmentConflictError, match="local edits"):
        obtain_checkout(yard.recipe.fork, yard.wish(commit=newer), Silence())
    assert obtain_checkout(yard.recipe.fork, yard.wish(any_state=True), Silence()).edits


def test_an_environment_of_another_version_is_not_taken_over(yard: Yard) -> None:
    obtain_checkout(yard.recipe.fork, yard.wish(), Silence())
    yard.shop.stock("0.27.0", files={"vllm/__init__.py": b""})
    rebuild(yard, "0.27.0")
    with pytest.raises(EnvironmentConflictError, match="is not the lock's"):
        yard.run()
    with pytest.raises(EnvironmentConflictError, match="was not made by provision"):
        inspect_environment(yard.venv, "vllm")
