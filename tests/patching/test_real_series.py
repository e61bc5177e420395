"""Fifteen patches on the real files of vLLM 0.27.1, and real upstream changes on the releases around them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from provisioner.index.lazy import Wheel
from provisioner.index.settings import IndexSettings, read_settings
from provisioner.index.source import candidates, open_wheel, parse_spec
from provisioner.index.transport import Transport
from provisioner.patching.compare import patch_between
from provisioner.patching.diff import parse_patch, print_patch
from provisioner.patching.hunks import apply_change, reverse_of
from provisioner.patching.model import FileFacts, Modify, Patch, SeriesPatch, Verdict
from provisioner.patching.plan import make_plan, plan_revert, plan_without
from provisioner.patching.series import judge_series, learn_cuts, touched_paths
from provisioner.wheels.names import Target, choose
from provisioner.wheels.record import Record
from tests.support.real_series import OPS, SHIPPED, make_series
from tests.support.small import Tree, carry_out, verdicts

pytestmark = pytest.mark.network

UPSTREAM = (
    "vllm/v1/worker/mamba_utils.py",
    "vllm/v1/core/kv_cache_manager.py",
    "vllm/v1/core/sched/async_scheduler.py",
    "vllm/model_executor/layers/mamba/ops/causal_conv1d.py",
    "vllm/_custom_ops.py",
)
RELEASES = ("0.25.0", "0.26.0", "0.27.0", "0.27.1", "0.28.0")


@dataclass(frozen=True, kw_only=True)
class Shop:
    """The user's package index."""

    settings: IndexSettings
    transport: Transport

    def release(self, version: str) -> Wheel:
        listed = candidates(parse_spec(f"pypi:{version}"), self.settings, transport=self.transport)
        return open_wheel(choose(listed, Target(python=(3, 12))).chosen, self.settings, transport=self.transport)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    settings = read_settings(os.environ, Path.home(), cache=tmp_path_factory.mktemp("cache"))
    with Transport(settings) as opened:
        yield Shop(settings=settings, transport=opened)


@pytest.fixture(scope="module")
def wheel(shop: Shop) -> Wheel:
    return shop.release("0.27.1")


@pytest.fixture(scope="module")
def record(wheel: Wheel) -> Record:
    return wheel.record()


@pytest.fixture(scope="module")
def pristine(wheel: Wheel) -> Tree:
    return dict(wheel.read_many(SHIPPED))


@pytest.fixture(scope="module")
def made(pristine: Tree) -> tuple[tuple[Patch, ...], tuple[dict[str, bytes], ...]]:
    return make_series(pristine)


@pytest.fixture(scope="module")
def series(made: tuple[tuple[Patch, ...], object], pristine: Tree) -> tuple[SeriesPatch, ...]:
    texts = [(patch, print_patch(patch)) for patch in made[0]]
    parsed = [SeriesPatch(patch=parse_patch(text, id=patch.id, source=patch.source)) for patch, text in texts]
    return learn_cuts(parsed, pristine)


def facts(
    series: Sequence[SeriesPatch], disk: Mapping[str, bytes], pristine: Tree | None, record: Record
) -> dict[str, FileFacts]:
    return {
        path: FileFacts(
            path=path,
            content=disk.get(path),
            pristine=pristine.get(path) if pristine is not None else None,
            recorded=record.digest(path),
        )
        for path in touched_paths(series)
    }


@pytest.mark.parametrize("at_hand", [True, False])
@pytest.mark.parametrize("by_digest", [True, False])
def test_every_prefix_of_the_series_is_recognised(
    series: tuple[SeriesPatch, ...],
    made: tuple[object, tuple[dict[str, bytes], ...]],
    pristine: Tree,
    record: Record,
    at_hand: bool,
    by_digest: bool,
) -> None:
    """With the digests of the files that it was cut against, and with nothing but scopes."""
    if not by_digest:
        series = tuple(
            replace(item, cuts={path: replace(cut, digest=None) for path, cut in item.cuts.items()}) for item in series
        )
    trees = made[1]
    for count in range(0, len(trees), 3):
        found = facts(series, trees[count], pristine if at_hand else None, record)
        verdict = judge_series(series, found, record)
        assert not verdict.blocking
        applied = [patch.verdict is Verdict.APPLIED for patch in verdict.patches]
        assert applied == [True] * count + [False] * (len(series) - count)
        assert carry_out(trees[count], make_plan(verdict, found).steps) == trees[-1]
        assert carry_out(trees[count], plan_revert(verdict, found).steps) == pristine


@pytest.mark.parametrize("at_hand", [True, False])
def test_random_subsets_are_recognised(
    series: tuple[SeriesPatch, ...],
    made: tuple[object, tuple[dict[str, bytes], ...]],
    pristine: Tree,
    record: Record,
    at_hand: bool,
) -> None:
    needs = {
        "04-setting-on-by-default": "03-setting",
        "09-runner-clamp": "08-runner-counts",
        "11-report-from-scheduler": "10-report",
    }
    random = Random(7)
    final = made[1][-1]
    for _ in range(8):
        names = {item.patch.id for item in series if random.random() < 0.5}
        names -= {name for name, need in needs.items() if need not in names}
        chosen = [item for item in series if item.patch.id in names]
        fresh = facts(series, pristine, pristine, record)
        disk = carry_out(pristine, make_plan(judge_series(chosen, fresh, record), fresh).steps)
        found = facts(series, disk, pristine if at_hand else None, record)
        verdict = judge_series(series, found, record)
        assert not verdict.blocking
        assert {patch.id for patch in verdict.patches if patch.verdict is Verdict.APPLIED} == names
        assert carry_out(disk, make_plan(verdict, found).steps) == final


def test_single_patches_come_out_if_nothing_needs_them(
    series: tuple[SeriesPatch, ...], made: tuple[object, tuple[dict[str, bytes], ...]], record: Record
) -> None:
    final = made[1][-1]
    found = facts(series, final, None, record)
    verdict = judge_series(series, found, record)
    for item in series:
        if item.patch.id in ("03-setting", "08-runner-counts", "10-report"):
            continue
        left = carry_out(final, plan_without(series, verdict, found, [item.patch.id], record).steps)
        again = judge_series(series, facts(series, left, None, record), record)
        assert [p.id for p in again.patches if p.verdict is not Verdict.APPLIED] == [item.patch.id]


def test_any_one_missing_hunk_of_the_finished_tree_is_noticed_and_named(
    series: tuple[SeriesPatch, ...],
    made: tuple[object, tuple[dict[str, bytes], ...]],
    pristine: Tree,
    record: Record,
) -> None:
    final = made[1][-1]
    seen = 0
    for item in series:
        for change in item.patch.changes:
            if not isinstance(change, Modify):
                continue
            for hunk in change.hunks:
                back = reverse_of(replace(change, hunks=(hunk,)))
                cut = item.cuts[change.path]
                undone = apply_change(final[change.path], back, replace(cut, digest=None))
                content = getattr(undone, "content", None)
                if content is None:
                    continue
                disk = {**final, change.path: content}
                verdict = judge_series(series, facts(series, disk, pristine, record), record)
                (judged,) = (patch for patch in verdict.patches if patch.id == item.patch.id)
                assert judged.verdict in (Verdict.PARTIAL, Verdict.APPLIES, Verdict.APPLIES_AT_OFFSET)
                seen += 1
    assert seen >= 10


def test_upstreams_own_changes_are_judged_on_the_releases_around(shop: Shop) -> None:
    """From one release to the next as one patch each: applied forward they give the next release's bytes; on a release
    that has them they are merged; never are they called applied on bytes that they did not make."""
    trees = []
    for version in RELEASES:
        wheel = shop.release(version)
        digests = wheel.digests(UPSTREAM)
        trees.append((version, wheel.read_many([path for path in UPSTREAM if digests[path] is not None])))
    for (old_version, old), (new_version, new) in pairwise(trees):
        patch = patch_between(old, new, id=f"to-{new_version}", source=f"{old_version}..{new_version}")
        if not patch.changes:
            continue
        series = learn_cuts([SeriesPatch(patch=patch)], dict(old))
        for version, tree in trees:
            found = {
                path: FileFacts(path=path, content=tree.get(path), pristine=tree.get(path))
                for path in touched_paths(series)
            }
            verdict = judge_series(series, found).patches[0].verdict
            assert verdict is not Verdict.APPLIED, (patch.id, version)
            if version == old_version:
                assert verdict is Verdict.APPLIES
            if version == new_version:
                assert verdict in (Verdict.PROBABLY_MERGED, Verdict.PARTIAL, Verdict.AMBIGUOUS), (patch.id, version)


def test_a_twin_function_of_the_real_file_is_wrong_scope(pristine: Tree, record: Record) -> None:
    """gptq_marlin_repack and its neighbour hold the same block; the hunk's own function has lost it."""
    old = b"    num_experts = b_q_weight.shape[0]\n    assert size_k % 16 == 0\n    output = torch.empty(\n"
    source = pristine[OPS]
    assert source.count(old) == 2
    new = source.replace(b"    assert size_k % 16 == 0\n    output = torch.empty(\n", b"    output = torch.empty(\n", 1)
    series = learn_cuts(
        [SeriesPatch(patch=patch_between({OPS: source}, {OPS: new}, id="p", source="p"))], {OPS: source}
    )
    upstream = source.replace(b"    assert size_k % 16 == 0\n", b"    assert size_k % 16 == 0, size_k\n", 1)
    found = {OPS: FileFacts(path=OPS, content=upstream, pristine=upstream)}
    assert verdicts(judge_series(series, found)) == {"p": "wrong-scope"}
