"""What went wrong for people who patch installed packages, one test each, with the right outcome."""

from dataclasses import replace
from itertools import pairwise

import pytest

from provisioner.errors import InvalidPatchError
from provisioner.patching.diff import manifest_of, parse_patch, print_patch
from provisioner.patching.hunks import Applied, reverse_change
from provisioner.patching.model import Create, Modify, SeriesPatch, Verdict
from provisioner.patching.plan import make_plan, plan_revert
from provisioner.patching.steps import ReplaceFile
from tests.support.small import (
    MATH,
    NEW,
    OPS,
    PRISTINE,
    carry_out,
    change,
    facts_of,
    file_of,
    judge,
    numbered,
    patch_of,
    series_of,
    verdicts,
)

ONE = change(PRISTINE, OPS, "load_4 = x + 4", "load_4 = x + 40")
TWO = change(ONE, OPS, "store_4 = x + 4", "store_4 = x + 40")
P1 = patch_of("p1", PRISTINE, ONE)
BOTH = patch_of("both", PRISTINE, TWO)


def test_1_each_patch_gets_a_verdict_though_the_first_is_obsolete() -> None:
    later = patch_of("later", ONE, TWO)
    found = judge(series_of(P1, later), ONE, pristine=ONE)
    assert verdicts(found) == {"p1": "probably-merged", "later": "applies"}
    assert [patch.id for patch in found.not_needed] == ["p1"]
    steps = make_plan(found, facts_of(series_of(P1, later), ONE, ONE)).steps
    assert carry_out(ONE, steps) == TWO


def test_2_the_bytes_decide_and_not_what_some_tool_reported() -> None:
    assert verdicts(judge(series_of(P1), PRISTINE)) == {"p1": "applies"}
    assert verdicts(judge(series_of(P1), ONE)) == {"p1": "applied"}


def test_3_an_anchor_that_is_gone_is_a_conflict_and_never_applied() -> None:
    upstream = change(PRISTINE, OPS, "load_4 = x + 4", "load_four = x + 4")
    found = judge(series_of(P1), upstream, pristine=upstream)
    assert verdicts(found) == {"p1": "conflict"}
    assert "old line 4 stands nowhere" in file_of(found, OPS).why


def test_4_a_refused_hunk_leaves_nothing_of_its_patch() -> None:
    upstream = change(PRISTINE, MATH, "sub_4 = x + 4", "other = x + 4")
    two_files = patch_of("two", PRISTINE, change(ONE, MATH, "sub_4 = x + 4", "sub_4 = 0"))
    for patch in (two_files, patch_of("one-file", PRISTINE, TWO)):
        broken = upstream if patch is two_files else change(PRISTINE, OPS, "store_4 = x + 4", "other = 4")
        found = judge(series_of(patch), broken, pristine=broken)
        assert found.patches[0].verdict is Verdict.CONFLICT
        assert found.final == {path: broken[path] for path in found.final}


def test_5_a_whole_pull_request_counts_only_where_the_wheel_ships_files() -> None:
    drifted = b"--- a/tests/test_ops.py\n+++ b/tests/test_ops.py\n@@ -100,2 +100,2 @@\n gone\n-a\n+b\n"
    compiled = b"--- a/csrc/ops.cu\n+++ b/csrc/ops.cu\n@@ -1 +1 @@\n-a\n+b\n"
    new_test = b"--- /dev/null\n+++ b/tests/test_new.py\n@@ -0,0 +1 @@\n+a\n"
    text = drifted + compiled + new_test + print_patch(P1)
    series = series_of(parse_patch(text, id="pr", source="pr.diff"))
    found = judge(series, PRISTINE)
    assert verdicts(found) == {"pr": "applies"}
    assert {file.path for file in found.patches[0].files if file.verdict is Verdict.NOT_SHIPPED} == {
        "tests/test_ops.py",
        "tests/test_new.py",
        "csrc/ops.cu",
    }
    assert "cannot take effect in a wheel" in file_of(found, "csrc/ops.cu").why
    assert carry_out(PRISTINE, make_plan(found, facts_of(series, PRISTINE)).steps) == ONE


def test_6_a_second_run_has_nothing_to_do() -> None:
    series = series_of(P1, patch_of("new", {}, {NEW: b"x = 1\n"}))
    done = carry_out(PRISTINE, make_plan(judge(series, PRISTINE), facts_of(series, PRISTINE)).steps)
    assert verdicts(judge(series, done)) == {"p1": "applied", "new": "applied"}
    assert make_plan(judge(series, done), facts_of(series, done)).steps == ()


def test_7_only_these_verdicts_let_a_series_go_on() -> None:
    assert {str(verdict) for verdict in Verdict if verdict.holds} == {
        "applies",
        "applies-at-offset",
        "applied",
        "probably-merged",
        "merged-upstream",
        "already-in-series",
    }


def test_8_a_text_that_lost_a_hunk_has_another_manifest() -> None:
    (whole,) = BOTH.changes
    assert isinstance(whole, Modify)
    lost = replace(BOTH, changes=(replace(whole, hunks=whole.hunks[:1]),))
    assert verdicts(judge(series_of(lost), PRISTINE)) == {"both": "applies"}
    assert manifest_of(lost) != manifest_of(BOTH)


@pytest.mark.parametrize("at_hand", [True, False])
def test_9_patches_of_one_neighbourhood_are_both_applied(at_hand: bool) -> None:
    near = change(ONE, OPS, "load_5 = x + 5", "load_5 = x + 50")
    series = series_of(P1, patch_of("near", ONE, near))
    assert not isinstance(reverse_change(near[OPS], P1.changes[0]), Applied)
    assert verdicts(judge(series, near, at_hand=at_hand)) == {"p1": "applied", "near": "applied"}


def test_10_a_present_first_hunk_is_partial_and_named() -> None:
    found = judge(series_of(BOTH), ONE)
    assert verdicts(found) == {"both": "partial"}
    assert [(hunk.index, str(hunk.verdict)) for hunk in file_of(found, OPS).hunks] == [(1, "applied"), (2, "applies")]


def test_11_every_removal_line_must_match_at_one_place() -> None:
    upstream = change(PRISTINE, OPS, "load_4 = x + 4", "load_4 = x + 4  # note")
    assert verdicts(judge(series_of(P1), upstream, pristine=upstream)) == {"p1": "conflict"}
    twins = {OPS: (numbered("f") + "\n\n" + numbered("f")).encode()}
    edited = {OPS: twins[OPS].replace(b"f_4 = x + 4", b"f_4 = 0", 1)}
    moved = {OPS: b"import os\n" + twins[OPS]}
    assert verdicts(judge(series_of(patch_of("p", twins, edited), base=twins), moved, pristine=moved)) == {
        "p": "ambiguous"
    }


def test_12_white_space_is_written_as_the_patch_has_it() -> None:
    spaced = change(PRISTINE, OPS, "load_4 = x + 4\n", "load_4 = x + 4 \t \n\x0c\n")
    series = series_of(patch_of("p", PRISTINE, spaced))
    assert carry_out(PRISTINE, make_plan(judge(series, PRISTINE), facts_of(series, PRISTINE)).steps) == spaced


def test_13_a_created_file_goes_with_the_patch() -> None:
    series = series_of(patch_of("new", {}, {NEW: b"x = 1\n"}))
    survivor = {**PRISTINE, NEW: b"x = 1\n"}
    found = judge(series, survivor)
    assert verdicts(found) == {"new": "applied"}
    assert carry_out(survivor, plan_revert(found, facts_of(series, survivor)).steps) == dict(PRISTINE)


# ---- measured with other tools


def test_a_an_exact_hunk_never_lands_in_a_twin_function_or_class() -> None:
    body = numbered("run").replace("\n", "\n    ").rstrip().encode()
    classes = {OPS: b"class A:\n    " + body + b"\n\n\nclass B:\n    " + body + b"\n"}
    fixed = {OPS: classes[OPS].replace(b"run_4 = x + 4", b"run_4 = 0", 1)}
    series = series_of(patch_of("p", classes, fixed), base=classes)
    upstream = {OPS: classes[OPS].replace(b"run_4 = x + 4", b"run_4 = 4", 1)}
    found = judge(series, upstream, pristine=upstream)
    assert verdicts(found) == {"p": "wrong-scope"}
    assert found.final[OPS] == upstream[OPS]
    (hunk,) = file_of(found, OPS).hunks
    assert (hunk.scope, hunk.found_scope) == ("A.run", "B.run")


def test_b_a_creation_without_dev_null_is_done_once_and_leaves_nothing_behind() -> None:
    text = b"--- a/v/new.py\n+++ b/v/new.py\n@@ -0,0 +1,2 @@\n+x = 1\n+y = 2\n"
    patch = parse_patch(text, id="p", source="p")
    assert isinstance(patch.changes[0], Create)
    series = series_of(patch)
    created = carry_out(PRISTINE, make_plan(judge(series, PRISTINE), facts_of(series, PRISTINE)).steps)
    assert created[NEW] == b"x = 1\ny = 2\n"
    again = judge(series, created)
    assert not make_plan(again, facts_of(series, created))
    assert carry_out(created, plan_revert(again, facts_of(series, created)).steps) == dict(PRISTINE)


def test_c_a_text_cut_off_between_files_is_caught_by_the_manifest() -> None:
    both = patch_of("p", PRISTINE, change(ONE, MATH, "sub_4 = x + 4", "sub_4 = 0"))
    text = print_patch(both)
    for end in range(len(text)):
        try:
            shorter = parse_patch(text[:end], id="p", source="p")
        except InvalidPatchError:
            continue
        assert manifest_of(shorter) != manifest_of(both)
    assert manifest_of(parse_patch(text, id="p", source="p")) == manifest_of(both)


def test_d_an_offset_writes_the_file_alone_and_leaves_its_mode() -> None:
    upstream = {**PRISTINE, OPS: b"import os\n\n\n" + PRISTINE[OPS]}
    facts = facts_of(series_of(P1), upstream, upstream, modes={OPS: 0o640})
    found = judge(series_of(P1), upstream, pristine=upstream)
    assert verdicts(found) == {"p1": "applies-at-offset"}
    (step,) = make_plan(found, facts).steps
    assert isinstance(step, ReplaceFile)
    assert step.path == OPS


@pytest.mark.parametrize("at_hand", [True, False])
def test_e_taking_any_one_hunk_out_of_a_finished_tree_is_noticed(at_hand: bool) -> None:
    trees = [dict(PRISTINE)]
    for name in ("load", "scale", "store"):
        trees.append(change(trees[-1], OPS, f"{name}_2 = x + 2", f"{name}_2 = 0"))
        trees.append(change(trees[-1], OPS, f"{name}_3 = x + 3", f"{name}_3 = 0\n    {name}_x = 1"))
    series = series_of(*(patch_of(f"p{n}", old, new) for n, (old, new) in enumerate(pairwise(trees))))
    final = trees[-1]
    assert set(verdicts(judge(series, final, at_hand=at_hand)).values()) == {"applied"}
    for name in ("load", "scale", "store"):
        for new, old in (
            (f"{name}_2 = 0", f"{name}_2 = x + 2"),
            (f"{name}_3 = 0\n    {name}_x = 1", f"{name}_3 = x + 3"),
        ):
            found = judge(series, change(final, OPS, new, old), at_hand=at_hand)
            assert any(patch.verdict is not Verdict.APPLIED for patch in found.patches)  # fmt: skip


def test_f_a_mixed_merge_is_told_per_file_and_hunk() -> None:
    wanted = {**change(TWO, MATH, "sub_4 = x + 4", "sub_4 = 0"), NEW: b"x = 1\n", "v/more.py": b"y = 1\n"}
    patch = patch_of("p", PRISTINE, wanted)
    upstream = {
        **change(ONE, OPS, "store_4 = x + 4", "store_4 = 7"),
        MATH: wanted[MATH],
        NEW: b"x = 1\n",
        "v/more.py": b"y = 2\n",
    }
    found = judge(series_of(patch), upstream, pristine=upstream)
    assert verdicts(found) == {"p": "conflict"}
    assert {file.path: str(file.verdict) for file in found.patches[0].files} == {
        OPS: "conflict",
        MATH: "probably-merged",
        NEW: "probably-merged",
        "v/more.py": "conflict",
    }
    assert [str(hunk.verdict) for hunk in file_of(found, OPS).hunks] == ["applied", "conflict"]


def test_26_one_matching_line_is_no_merge_and_the_text_alone_is_only_probable() -> None:
    one_line = change(PRISTINE, OPS, "load_9 = x + 9", "load_9 = x + 9\n    load_4 = x + 40")
    assert verdicts(judge(series_of(P1), one_line, pristine=one_line)) == {"p1": "applies"}
    item = series_of(P1)[0]
    assert verdicts(judge((item,), ONE, pristine=ONE)) == {"p1": "probably-merged"}
    assert verdicts(judge((replace(item, in_history=True),), ONE, pristine=ONE)) == {"p1": "merged-upstream"}
    gone = change(PRISTINE, OPS, "load_4 = x + 4", "load_four = 4")
    known = SeriesPatch(patch=P1, cuts=item.cuts, in_history=True)
    assert verdicts(judge((known,), gone, pristine=gone)) == {"p1": "probably-merged"}
