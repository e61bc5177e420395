"""The real fork over real files of vLLM 0.27.1, its patches, overlay and ours in one transaction.

What the real one does not show (names that sort wrongly, a copy of ours under another name) is shown by a made-up one.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from packaging.version import Version

from provisioner.digests import digest_of
from provisioner.doctor.builds import Build, read_build
from provisioner.documents.lock import Lock
from provisioner.documents.policy import LeftOut, Omission
from provisioner.documents.recipe import Recipe, parse_recipe
from provisioner.environment.state import read_owner, read_receipt, state_of
from provisioner.errors import ConflictError, EnvironmentConflictError, ForeignBytesError, InvalidRecipeError
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
from provisioner.serve.readiness import examine_environment
from provisioner.wheels.names import Target, choose
from tests.support.fork_stack import OPS, SCHEDULER, Stack, commit_all, make_repository, make_stack
from tests.support.fork_stack import REAL_FILES as MADE_UP_FILES
from tests.support.index_server import IndexServer
from tests.support.real_fork import REPLACED, apply_with_gnu, commit_fork, fork_files, run_own_loop
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
REPLACEMENT = f'replaced = {{ "{REPLACED}" = "pr50021-gdn-spec-bounds" }}\n'
ENVS, CACHE = "vllm/envs.py", "vllm/config/cache.py"
NEW, OVERLAY = "vllm/v1/sample/ops/row_softmax.py", "vllm/v1/attention/ops/kvarn_store.py"


def read_shipped(paths: Iterable[str], cache: Path) -> dict[str, bytes]:
    """Those of the files that the wheel has, read lazily."""
    settings = read_settings(os.environ, Path.home(), cache=cache)
    with Transport(settings) as transport:
        found = candidates(parse_spec("pypi:0.27.1"), settings, transport=transport)
        wheel = open_wheel(choose(found, Target()).chosen, settings, transport=transport)
        record = wheel.record()
        return dict(wheel.read_many([path for path in paths if path in record]))


@dataclass(frozen=True, kw_only=True)
class Trees:
    """The files that the fork's patches and ours touch: as shipped, by the fork's own way, and with ours in it."""

    pristine: Mapping[str, bytes]
    by_the_fork: Mapping[str, bytes]
    with_ours: Mapping[str, bytes]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    fork = fork_files()
    texts = [*fork.glob("patches/*.patch"), *fork.glob("kvarn/*.patch")]
    paths = {f"vllm/{path}" for text in texts for path in re.findall(r"^--- a/(\S+)", text.read_text(), re.MULTILINE)}
    ours = [
        patches_folder() / patch_id / name for patch_id, name in zip(OURS, ("0.27.patch", "0.24.patch"), strict=True)
    ]
    paths |= {path for text in ours for path in re.findall(r"^--- a/(\S+)", text.read_text(), re.MULTILINE)}
    pristine = read_shipped(sorted(paths), tmp_path_factory.mktemp("cache"))
    made = []
    for name, without in (("fork", ""), ("ours", REPLACED)):
        folder = tmp_path_factory.mktemp(name)
        write_files(folder, pristine)
        run_own_loop(fork, folder / "vllm", without=without)
        if without:
            for text in ours:
                apply_with_gnu(folder, text)
        made.append({path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.py")})
    return Trees(pristine=pristine, by_the_fork=made[0], with_ours=made[1])


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).unlink(missing_ok=True)
        (folder / path).write_bytes(content)


@dataclass(kw_only=True)
class Yard:
    """A shop with the real files, the fork's repository, and the place of the checkout."""

    shop: Shop
    recipe: Recipe
    folder: Path
    origin: Path
    lock: Lock
    expected: Mapping[str, bytes]

    def wish(self, **changes) -> ForkWish:
        return ForkWish(**({"folder": self.folder} | changes))

    @property
    def venv(self) -> Path:
        return self.folder / "venv"

    @property
    def packages(self) -> Path:
        return self.venv / "lib" / f"python{PYTHON}" / "site-packages"

    def request(self, *, reapply: bool = False, without: tuple[str, ...] = (), **wish) -> Request:
        assert self.recipe.fork is not None
        checkout = obtain_checkout(self.recipe.fork, self.wish(**wish), Silence())
        overlay = wish.get("overlay", True)
        left_out = tuple(LeftOut(id=name, omission=Omission.ASKED) for name in without)
        series = open_fork_series(self.recipe, checkout, RELEASE, overlay=overlay, left_out=left_out)
        made = self.shop.request(series, self.lock, reapply=reapply)
        return replace(made, recipe=self.recipe, venv=self.venv, adopts=True)

    def run(self, **options) -> Outcome:
        return provision(self.request(**options), self.shop.uv, Silence())

    def contents(self) -> dict[str, bytes | None]:
        return {path: _read(self.packages / path) for path in self.expected}


def with_our_patches(files: Mapping[str, bytes], patch_ids: Iterable[str]) -> dict[str, bytes]:
    """The files with ours on top, made here without the series engine."""
    files = dict(files)
    for patch_id in patch_ids:
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


def make_yard(
    tmp_path: Path,
    server: IndexServer,
    commit: str,
    expected: Mapping[str, bytes],
    pristine: Mapping[str, bytes],
    words: str,
) -> Yard:
    """A yard around the repository that lies in ``origin``."""
    text = FORK_RECIPE.format(url=tmp_path / "origin", commit=commit) + words
    recipe = parse_recipe(text, name="forked", where="forked.toml")
    shop = Shop(server=server, folder=tmp_path, recipe=recipe)
    shop.stock(files={"vllm/__init__.py": b"raise RuntimeError\n", **pristine})
    return Yard(
        shop=shop,
        recipe=recipe,
        folder=tmp_path / "fork",
        origin=tmp_path / "origin",
        lock=shop.lock(open_series(recipe, RELEASE)),
        expected=expected,
    )


@pytest.fixture
def server() -> Iterator[IndexServer]:
    with IndexServer() as made:
        yield made


@pytest.fixture
def yard(tmp_path: Path, server: IndexServer, trees: Trees) -> Yard:
    commit = commit_fork(tmp_path / "origin")
    return make_yard(tmp_path, server, commit, trees.with_ours, trees.pristine, REPLACEMENT)


@pytest.fixture
def made_up(tmp_path: Path, server: IndexServer) -> tuple[Yard, Stack]:
    """Thirteen patches whose names sort wrongly, and among them ours under another name."""
    pristine = read_shipped(MADE_UP_FILES, tmp_path / "cache")
    stack = make_stack(pristine)
    commit = make_repository(tmp_path / "origin", stack)
    expected = with_our_patches(stack.files, ["sm80-cpu-repack"])
    return make_yard(tmp_path, server, commit, expected, pristine, ""), stack


def verdicts(verdict: SeriesVerdict) -> dict[str, str]:
    return {patch.id: str(patch.verdict) for patch in verdict.patches}


def test_the_whole_stack_in_one_transaction(yard: Yard) -> None:
    outcome = yard.run()
    assert yard.contents() == yard.expected
    assert len(outcome.verdict.patches) == 12 + 1 + 2 + 2
    assert sum(isinstance(action, ChangeFiles) for action in outcome.actions) == 1
    receipt = read_receipt(state_of(yard.venv))
    assert receipt is not None
    assert {patch.id for patch in receipt.patches} >= set(OURS)
    assert [str(item) for item in receipt.left_out] == [f"fork/{REPLACED}: replaced by pr50021-gdn-spec-bounds"]
    assert set(receipt.created_files()) >= {NEW, OVERLAY}
    assert receipt.final_digests() == {path: digest_of(content) for path, content in yard.expected.items()}


def test_a_second_run_changes_nothing(yard: Yard) -> None:
    yard.run()
    assert yard.run().actions == ()
    assert not plan_environment(yard.request(), yard.shop.uv)


def test_patches_go_by_the_code_points_of_their_names_and_a_copy_of_ours_counts(made_up: tuple[Yard, Stack]) -> None:
    yard, _ = made_up
    outcome = yard.run()
    assert yard.contents() == yard.expected
    assert len(outcome.verdict.patches) == 13 + 1 + 2 + 2
    assert verdicts(outcome.verdict)["pr50021-gdn-spec-bounds"] == "already-in-series"


def test_the_forks_own_text_comes_back_where_ours_is_left_out(yard: Yard, trees: Trees) -> None:
    yard.run(without=("pr50021-gdn-spec-bounds",))
    expected = with_our_patches(trees.by_the_fork, ["sm80-cpu-repack"])
    assert {path: _read(yard.packages / path) for path in expected} == expected
    status = read_status(yard.recipe, yard.venv)
    assert not status.proven
    assert status.problems == ("pr50021-gdn-spec-bounds is required and was left out: not as the recipe says",)
    assert status.left_out == (LeftOut(id="pr50021-gdn-spec-bounds", omission=Omission.ASKED),)


def test_an_unknown_patch_on_the_lines_of_ours_is_named_with_the_flag_that_leaves_it_out(
    tmp_path: Path, server: IndexServer, trees: Trees
) -> None:
    """A later commit of the fork that calls its text by another name."""
    patches = tmp_path / "origin" / "patches"
    commit_fork(patches.parent)
    (patches / f"{REPLACED}.patch").rename(patches / "bounds-v2.patch")
    yard = make_yard(
        tmp_path, server, commit_all(patches.parent, "later"), trees.with_ours, trees.pristine, REPLACEMENT
    )
    yard = replace(yard, recipe=replace(yard.recipe, fork=replace(yard.recipe.fork, replaced={})))
    with pytest.raises(ConflictError, match="1 of 18 patches cannot be applied") as caught:
        yard.run()
    assert caught.value.found is not None
    assert caught.value.found.count("fork/bounds-v2 comes before it and changes these lines") == 1 + 4
    assert caught.value.hints == ("run again with --without-patch fork/bounds-v2, which leaves it out",)
    yard.run(without=("fork/bounds-v2",))
    assert yard.contents() == yard.expected
    assert read_status(yard.recipe, yard.venv).proven


def test_a_replaced_patch_that_the_pinned_commit_lacks_is_the_recipes_fault(yard: Yard) -> None:
    assert yard.recipe.fork is not None
    wrong = replace(yard.recipe, fork=replace(yard.recipe.fork, replaced={"nothing": OURS[0]}))
    checkout = obtain_checkout(yard.recipe.fork, yard.wish(), Silence())
    with pytest.raises(InvalidRecipeError, match=r"forked.toml: fork.replaced: the fork has no such patch") as caught:
        open_fork_series(wrong, checkout, RELEASE)
    assert caught.value.found == "nothing"
    assert not open_fork_series(wrong, replace(checkout, commit="1" * 40), RELEASE).left_out


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


def test_the_shell_way_is_recognized_as_applied(made_up: tuple[Yard, Stack]) -> None:
    yard, stack = made_up
    obtain_checkout(yard.recipe.fork, yard.wish(), Silence())
    rebuild(yard)
    assert read_build(yard.venv) == Build(version=RELEASE, patches=frozenset())
    for patch in sorted((yard.folder / "patches").glob("*.patch"), key=lambda path: path.name):
        apply_with_gnu(yard.packages / "vllm", patch)
    assert _read(yard.packages / SCHEDULER) == stack.files[SCHEDULER]
    assert read_build(yard.venv) == Build(version=RELEASE, patches=frozenset({"pr50021-gdn-spec-bounds"}))
    outcome = yard.run()
    found = verdicts(outcome.verdict)
    assert found["fork/0001-first"] == "applied"
    assert found["sm80-cpu-repack"] == "applies-at-offset"
    assert yard.contents() == yard.expected


def test_the_forks_own_loop_is_recognized_and_only_its_text_of_ours_is_foreign(yard: Yard) -> None:
    yard.run()
    expected = yard.contents()
    revert("vllm", find_series(yard.recipe, yard.venv, RELEASE), yard.venv)
    run_own_loop(yard.folder, yard.packages / "vllm")
    with pytest.raises(ConflictError, match="1 of 17 patches cannot be applied") as caught:
        yard.run()
    assert caught.value.found is not None
    assert caught.value.found.count("foreign") == 1 + 4
    yard.run(reapply=True)
    assert yard.contents() == expected


@pytest.mark.parametrize(
    "spoil",
    [
        lambda packages: (packages / ENVS).write_bytes(b"garbage\n"),
        lambda packages: (packages / ENVS).unlink(),
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
    assert yard.contents() == yard.expected


def test_a_file_of_the_overlay_that_is_gone_comes_back(yard: Yard) -> None:
    yard.run()
    (yard.packages / OVERLAY).unlink()
    yard.run()
    assert yard.contents() == yard.expected


def test_an_update_of_the_fork_takes_back_what_it_no_longer_has(yard: Yard) -> None:
    yard.run()
    assert yard.recipe.fork is not None
    without = yard.request(overlay=False)
    outcome = provision(without, yard.shop.uv, Silence())
    assert not (yard.packages / OVERLAY).exists()
    assert any(isinstance(action, ChangeFiles) for action in outcome.actions)
    assert b"kvarn_k4v2" not in (yard.packages / CACHE).read_bytes()
    assert (yard.packages / NEW).exists()
    assert read_status(yard.recipe, yard.venv).proven
    assert provision(without, yard.shop.uv, Silence()).actions == ()


def test_a_leftover_that_somebody_edited_is_not_thrown_away(yard: Yard) -> None:
    yard.run()
    (yard.packages / OVERLAY).write_bytes(b"MINE = 1\n")
    with pytest.raises(ForeignBytesError, match="changed since"):
        provision(yard.request(overlay=False), yard.shop.uv, Silence())
    assert (yard.packages / OVERLAY).read_bytes() == b"MINE = 1\n"
    provision(yard.request(overlay=False, reapply=True), yard.shop.uv, Silence())
    assert not (yard.packages / OVERLAY).exists()


def test_status_and_revert_know_the_forks_part(yard: Yard, trees: Trees) -> None:
    yard.run()
    status = read_status(yard.recipe, yard.venv)
    assert status.proven, status.problems
    assert len(status.patches) == 17
    series = find_series(yard.recipe, yard.venv, RELEASE)
    revert("vllm", series, yard.venv)
    assert {path: _read(yard.packages / path) for path in trees.pristine} == dict(trees.pristine)
    assert not (yard.packages / NEW).exists()
    assert not read_status(yard.recipe, yard.venv).proven


def test_a_dry_run_of_a_fork_that_is_not_there_shows_the_end_and_leaves_nothing(yard: Yard) -> None:
    assert yard.recipe.fork is not None
    checkout = peek_checkout(yard.recipe.fork, yard.wish(), Silence())
    series = open_fork_series(yard.recipe, checkout, RELEASE)
    request = replace(yard.shop.request(series, yard.lock), recipe=yard.recipe, venv=yard.venv, adopts=True)
    plan = plan_environment(request, yard.shop.uv)
    assert plan.final == {path: digest_of(content) for path, content in yard.expected.items()}
    assert not yard.folder.exists()


def test_another_commit_is_refused_unless_any_will_do(yard: Yard) -> None:
    assert yard.recipe.fork is not None
    (yard.origin / "README.md").write_text("newer\n", encoding="utf-8")
    newer = commit_all(yard.origin, "newer")
    obtain_checkout(yard.recipe.fork, yard.wish(commit=newer), Silence())
    with pytest.raises(EnvironmentConflictError, match="another commit"):
        obtain_checkout(yard.recipe.fork, yard.wish(), Silence())
    (yard.folder / "patches" / "speed-knobs-envs.patch").write_text("edited\n")
    with pytest.raises(EnvironmentConflictError, match="local edits"):
        obtain_checkout(yard.recipe.fork, yard.wish(commit=newer), Silence())
    assert obtain_checkout(yard.recipe.fork, yard.wish(any_state=True), Silence()).edits


def test_required_patches_that_the_build_has_are_satisfied(tmp_path: Path, server: IndexServer, trees: Trees) -> None:
    recipe = parse_recipe(FORK_RECIPE.partition("[fork]")[0], name="small", where="small.toml")
    shop = Shop(server=server, folder=tmp_path, recipe=recipe)
    shop.stock(files={"vllm/__init__.py": b"", **with_our_patches(trees.pristine, OURS)})
    series = open_series(recipe, RELEASE)
    request = shop.request(series)
    outcome = provision(request, shop.uv, Silence())
    assert verdicts(outcome.verdict) == dict.fromkeys(OURS, "probably-merged")
    assert [(patch.id, patch.verdict, patch.files) for patch in outcome.receipt.patches] == [
        (patch_id, "not-needed", ()) for patch_id in OURS
    ]
    assert not any(isinstance(action, ChangeFiles) for action in outcome.actions)
    status = read_status(recipe, request.venv)
    assert status.proven, status.problems
    ready = examine_environment(recipe, request.venv, distribution="vllm", mend="mend")
    assert "patch-missing" not in {finding.id for finding in ready.findings}
    assert provision(request, shop.uv, Silence()).actions == ()


def test_an_environment_of_another_version_is_not_taken_over(yard: Yard) -> None:
    obtain_checkout(yard.recipe.fork, yard.wish(), Silence())
    yard.shop.stock("0.27.0", files={"vllm/__init__.py": b""})
    rebuild(yard, "0.27.0")
    with pytest.raises(EnvironmentConflictError, match="is not the lock's"):
        yard.run()
    with pytest.raises(EnvironmentConflictError, match="was not made by provision"):
        inspect_environment(yard.venv, "vllm")
