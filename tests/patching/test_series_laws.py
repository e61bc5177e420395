"""Laws of a series on random trees: every state of it is recognised, and nothing else ever passes for applied."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from provisioner.digests import digest_of
from provisioner.patching.diff import parse_patch
from provisioner.patching.hunks import NO_CUT, Applied, apply_change
from provisioner.patching.model import FileFacts, Rename, SeriesPatch, SeriesVerdict, Verdict
from provisioner.patching.plan import make_plan, plan_revert, steps_to
from provisioner.patching.series import judge_series, learn_cuts, touched_paths
from provisioner.patching.steps import CreateFile, DeleteFile, ReplaceFile, SetMode
from tests.support.peers import GitTrees

Tree = dict[str, bytes]
NAMES = ("p/a.py", "p/b.py", "p/c.py")
LINE = st.sampled_from(
    [b"def f():", b"    a = 1", b"    return a", b"", b"class C:", b"    def g(self):", b"        x"]
)
RELAXED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def git(tmp_path_factory: pytest.TempPathFactory) -> GitTrees:
    return GitTrees(tmp_path_factory.mktemp("git"))


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    lines = draw(st.lists(LINE, min_size=1, max_size=20))
    return b"".join(line + b" # %d\n" % number for number, line in enumerate(lines))


@st.composite
def edited(draw: st.DrawFn, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(lines)))
        fresh = [line + b"\n" for line in draw(st.lists(LINE, max_size=3))]
        lines[at : at + draw(st.integers(0, 2))] = fresh
    return b"".join(lines)


@st.composite
def histories(draw: st.DrawFn) -> list[Tree]:
    """A tree and its successors, each changed in some files."""
    tree: Tree = {name: draw(texts()) for name in NAMES[:2]}
    trees = [tree]
    for _ in range(draw(st.integers(1, 4))):
        tree = dict(tree)
        for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True)):
            if name in tree and draw(st.integers(0, 9)) == 0:
                del tree[name]
            else:
                tree[name] = draw(edited(tree[name])) if name in tree else draw(texts())
        if tree != trees[-1]:
            trees.append(tree)
    return trees


def series_of(git: GitTrees, trees: Sequence[Tree]) -> tuple[SeriesPatch, ...]:
    texts = [git.diff(old, new) for old, new in pairwise(trees)]
    patches = [
        SeriesPatch(patch=parse_patch(t, id=f"p{n}", source=f"p{n}.patch")) for n, t in enumerate(texts, start=1)
    ]
    return learn_cuts(patches, trees[0])


def facts_of(
    series: Sequence[SeriesPatch], pristine: Mapping[str, bytes], disk: Mapping[str, bytes], *, at_hand: bool
) -> dict[str, FileFacts]:
    return {
        path: FileFacts(
            path=path,
            content=disk.get(path),
            pristine=pristine.get(path) if at_hand else None,
            recorded=digest_of(pristine[path]) if path in pristine else None,
        )
        for path in touched_paths(series)
    }


def carry_out(tree: Mapping[str, bytes], steps: Sequence[object]) -> Tree:
    out = dict(tree)
    for step in steps:
        match step:
            case ReplaceFile(path=path, before=before, content=content):
                assert digest_of(out[path]) == before
                assert out[path] != content
                out[path] = content
            case CreateFile(path=path, content=content):
                assert path not in out
                out[path] = content
            case DeleteFile(path=path, before=before):
                assert digest_of(out.pop(path)) == before
            case SetMode():
                pass
    return out


def on_subset(pristine: Tree, series: Sequence[SeriesPatch]) -> Tree | None:
    """The tree after some patches of a series; None where one of them does not go on without the others."""
    tree = dict(pristine)
    for item in series:
        for change in item.patch.changes:
            source = change.source if isinstance(change, Rename) else change.path
            done = apply_change(tree.get(source), change, item.cuts.get(change.path, item.cuts.get(source)) or NO_CUT)
            if not isinstance(done, Applied):
                return None
            tree.pop(source, None)
            if done.content is not None:
                tree[change.path] = done.content
    return tree


def assert_truth(verdict: SeriesVerdict, disk: Tree, series: Sequence[SeriesPatch]) -> None:
    """``applied`` for every patch means that every touched file has its final bytes."""
    settled = {Verdict.APPLIED, Verdict.PROBABLY_MERGED, Verdict.ALREADY_IN_SERIES, Verdict.MERGED_UPSTREAM}
    if all(patch.verdict in settled for patch in verdict.patches):
        assert set(verdict.final) == set(touched_paths(series))
        assert all(disk.get(path) == content for path, content in verdict.final.items())


@RELAXED
@given(trees=histories(), data=st.data())
def test_every_prefix_is_recognised_with_and_without_pristine_bytes(
    git: GitTrees, trees: list[Tree], data: st.DataObject
) -> None:
    series = series_of(git, trees)
    count = data.draw(st.integers(0, len(series)))
    disk = trees[count]
    for at_hand in (True, False):
        facts = facts_of(series, trees[0], disk, at_hand=at_hand)
        verdict = judge_series(series, facts)
        assert not verdict.blocking, verdict.blocking
        assert {path: verdict.final[path] for path in facts} == {path: trees[-1].get(path) for path in facts}
        assert {path: verdict.pristine[path] for path in facts} == {path: trees[0].get(path) for path in facts}
        if len({tuple(tree.items()) for tree in trees}) == len(trees):
            for patch in verdict.patches[:count]:
                assert patch.verdict is Verdict.APPLIED
        assert_truth(verdict, disk, series)
        plan = make_plan(verdict, facts)
        assert carry_out(disk, plan.steps) == trees[-1]
        assert bool(plan) == (disk != trees[-1])
        assert carry_out(disk, plan_revert(verdict, facts).steps) == trees[0]


@RELAXED
@given(trees=histories(), data=st.data())
def test_every_subset_is_recognised_with_pristine_bytes_and_never_mistaken_without(
    git: GitTrees, trees: list[Tree], data: st.DataObject
) -> None:
    series = series_of(git, trees)
    chosen = [item for item in series if data.draw(st.booleans())]
    disk = on_subset(trees[0], chosen)
    assume(disk is not None and not judge_series(series, facts_of(series, trees[0], trees[0], at_hand=True)).blocking)
    assert disk is not None
    facts = facts_of(series, trees[0], disk, at_hand=True)
    verdict = judge_series(series, facts)
    assert not verdict.blocking, verdict.blocking
    assert carry_out(disk, make_plan(verdict, facts).steps) == trees[-1]
    assert carry_out(disk, plan_revert(verdict, facts).steps) == trees[0]
    assert_truth(verdict, disk, series)
    facts = facts_of(series, trees[0], disk, at_hand=False)
    verdict = judge_series(series, facts)
    assert_truth(verdict, disk, series)
    if not verdict.blocking:
        assert carry_out(disk, make_plan(verdict, facts).steps) == trees[-1]


@RELAXED
@given(trees=histories(), data=st.data())
def test_a_foreign_edit_is_never_taken_for_a_state_of_the_series(
    git: GitTrees, trees: list[Tree], data: st.DataObject
) -> None:
    series = series_of(git, trees)
    count = data.draw(st.integers(0, len(series)))
    disk = dict(trees[count])
    path = data.draw(st.sampled_from(sorted(set(disk) & set(touched_paths(series))) or ["-"]))
    assume(path != "-")
    disk[path] = data.draw(edited(disk[path]))
    assume(all(disk[path] != tree.get(path) for tree in trees))
    for at_hand in (True, False):
        verdict = judge_series(series, facts_of(series, trees[0], disk, at_hand=at_hand))
        assert_truth(verdict, disk, series)
        touching = [f for patch in verdict.patches for f in patch.files if f.path == path]
        assert all(file.verdict is not Verdict.APPLIED or file.after is not None for file in touching)
        assert any(patch.verdict is not Verdict.APPLIED for patch in verdict.patches)
        if verdict.blocking:
            continue
        assert steps_to(verdict.final, facts_of(series, trees[0], disk, at_hand=at_hand), {}) != ()
