"""The verdict of each patch in the context of its series."""

from dataclasses import replace

import pytest

from provisioner.digests import digest_of
from provisioner.errors import ConflictError, ForeignBytesError, HashMismatchError, UsageError
from provisioner.patching.diff import parse_patch, print_patch
from provisioner.patching.model import FileFacts, Rename, SeriesPatch, Verdict
from provisioner.patching.plan import foreign_paths, make_plan, plan_revert, plan_without, reset_foreign, steps_to
from provisioner.patching.series import judge_series, touched_paths
from provisioner.patching.steps import CreateFile, DeleteFile, SetMode
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
    record_of,
    series_of,
    verdicts,
)

ONE = change(PRISTINE, OPS, "load_4 = x + 4", "load_4 = x + 40")
TWO = change(ONE, OPS, "load_5 = x + 5", "load_5 = x + 50")
THREE = {**change(TWO, MATH, "add_4 = x + 4", "add_4 = x + 40"), NEW: b"COUNT = 0\n"}
FOUR = change(THREE, NEW, "COUNT = 0", "COUNT = 1")
P1, P2 = patch_of("p1", PRISTINE, ONE), patch_of("p2", ONE, TWO)
P3, P4 = patch_of("p3", TWO, THREE), patch_of("p4", THREE, FOUR)
SERIES = series_of(P1, P2, P3, P4)


def test_overlapping_patches_are_judged_on_their_predecessors_output() -> None:
    assert verdicts(judge(SERIES, PRISTINE)) == dict.fromkeys(("p1", "p2", "p3", "p4"), "applies")
    found = judge(SERIES, FOUR)
    assert verdicts(found) == dict.fromkeys(("p1", "p2", "p3", "p4"), "applied")
    assert found.final[OPS] == FOUR[OPS]
    assert found.final_digests[NEW] == digest_of(b"COUNT = 1\n")
    assert found.pristine[OPS] == PRISTINE[OPS]
    assert found.states[OPS] == (PRISTINE[OPS], ONE[OPS], TWO[OPS])


def test_digests_before_and_after_are_those_of_the_series() -> None:
    p1, p2, *_ = judge(SERIES, FOUR).patches
    assert (file_of(p1, OPS).before, file_of(p1, OPS).after) == (digest_of(PRISTINE[OPS]), digest_of(ONE[OPS]))
    assert (file_of(p2, OPS).before, file_of(p2, OPS).after) == (digest_of(ONE[OPS]), digest_of(TWO[OPS]))


@pytest.mark.parametrize("at_hand", [True, False])
def test_a_subset_that_was_applied_by_hand_is_recognised(at_hand: bool) -> None:
    far = change(ONE, OPS, "store_4 = x + 4", "store_4 = x + 40")
    series = series_of(P1, patch_of("far", ONE, far))
    only_far = change(PRISTINE, OPS, "store_4 = x + 4", "store_4 = x + 40")
    found = judge(series, only_far, at_hand=at_hand)
    assert verdicts(found) == {"p1": "applies", "far": "applied"}
    assert found.final[OPS] == far[OPS]


@pytest.mark.parametrize("at_hand", [True, False])
def test_an_older_text_of_a_patch_is_a_stale_version(at_hand: bool) -> None:
    older = change(PRISTINE, OPS, "load_4 = x + 4", "load_4 = x + 41")
    former = (patch_of("p1", PRISTINE, older),)
    series = (replace(SERIES[0], former=former), *SERIES[1:])
    disk = {**older, NEW: b"COUNT = 0\n"}
    found = judge(series, disk, at_hand=at_hand)
    assert verdicts(found) == {"p1": "stale-version", "p2": "applies", "p3": "applies", "p4": "applies"}
    assert file_of(found.patches[2], NEW).verdict is Verdict.APPLIED
    with pytest.raises(ConflictError):
        make_plan(found, facts_of(series, disk))
    steps = steps_to(found.final, facts_of(series, disk), found.final_modes)
    assert carry_out(disk, steps) == FOUR


def test_a_stale_text_that_made_a_file_which_the_present_one_does_not() -> None:
    former = (patch_of("p1", PRISTINE, {**ONE, "v/old.py": b"OLD = 1\n"}),)
    series = (replace(SERIES[0], former=former),)
    disk = {**ONE, "v/old.py": b"OLD = 1\n"}
    found = judge(series, disk)
    assert verdicts(found) == {"p1": "stale-version"}
    assert found.final["v/old.py"] is None


@pytest.mark.parametrize("at_hand", [True, False])
def test_some_hunks_present_is_partial_and_names_them(at_hand: bool) -> None:
    both = change(ONE, OPS, "store_4 = x + 4", "store_4 = x + 40")
    series = series_of(patch_of("two-hunks", PRISTINE, both))
    found = judge(series, ONE, at_hand=at_hand)
    assert verdicts(found) == {"two-hunks": "partial"}
    assert [hunk.verdict for hunk in file_of(found, OPS).hunks] == [Verdict.APPLIED, Verdict.APPLIES]
    assert found.final[OPS] == both[OPS]


@pytest.mark.parametrize("at_hand", [True, False])
def test_foreign_bytes_are_foreign_and_stop_the_series(at_hand: bool) -> None:
    disk = change(TWO, OPS, "load_0 = x + 0", "load_0 = 7")
    found = judge(SERIES, disk, at_hand=at_hand)
    assert verdicts(found) == {"p1": "foreign", "p2": "foreign", "p3": "applies", "p4": "applies"}
    assert [hunk.verdict for hunk in file_of(found.patches[1], OPS).hunks] == [Verdict.APPLIED]
    assert foreign_paths(found) == (OPS,)
    facts = facts_of(SERIES, disk, at_hand=at_hand)
    with pytest.raises(ForeignBytesError):
        make_plan(found, facts)
    with pytest.raises(ForeignBytesError):
        plan_revert(found, facts)
    if not at_hand:
        with pytest.raises(ForeignBytesError):
            reset_foreign(facts, [OPS])
        return
    anew = judge_series(SERIES, reset_foreign(facts, [OPS]), record_of(PRISTINE))
    assert carry_out(disk, make_plan(anew, facts).steps) == FOUR


def test_a_shipped_file_that_is_gone_is_foreign() -> None:
    disk = {path: data for path, data in PRISTINE.items() if path != OPS}
    found = judge(SERIES, disk)
    assert found.patches[0].verdict is Verdict.FOREIGN
    assert "nothing is there" in file_of(found.patches[0], OPS).why


def test_the_whole_change_upstream_is_merged_by_one_or_two_signals() -> None:
    series = series_of(P1, patch_of("far", ONE, change(ONE, OPS, "store_4 = x + 4", "store_4 = 0")))
    found = judge(series, ONE, pristine=ONE)
    assert verdicts(found) == {"p1": "probably-merged", "far": "applies"}
    assert [hunk.verdict for hunk in file_of(found.patches[0], OPS).hunks] == [Verdict.PROBABLY_MERGED]
    known = (replace(series[0], in_history=True), series[1])
    assert verdicts(judge(known, ONE, pristine=ONE)) == {"p1": "merged-upstream", "far": "applies"}
    assert make_plan(judge(known, ONE, pristine=ONE), facts_of(known, ONE, ONE))


def test_a_merge_of_only_some_files_is_partial() -> None:
    both = change(ONE, MATH, "add_4 = x + 4", "add_4 = x + 40")
    found = judge(series_of(patch_of("both", PRISTINE, both)), ONE, pristine=ONE)
    assert verdicts(found) == {"both": "partial"}
    assert file_of(found, OPS).verdict is Verdict.PROBABLY_MERGED
    assert file_of(found, MATH).verdict is Verdict.APPLIES


def test_the_same_change_twice_is_already_in_the_series() -> None:
    again = replace(P1, id="theirs")
    for order in ((P1, again, P2), (P1, P2, again)):
        series = series_of(*order)
        for disk in (PRISTINE, ONE, TWO):
            found = judge(series, disk)
            theirs = found.patches[order.index(again)]
            assert (theirs.verdict, theirs.same_as) == (Verdict.ALREADY_IN_SERIES, "p1")
            assert not found.blocking
            assert found.final[OPS] == TWO[OPS]


def test_text_that_stands_through_another_patch_is_no_merge() -> None:
    more = change(ONE, OPS, "store_4 = x + 4", "store_4 = x + 40")
    found = judge(series_of(patch_of("more", PRISTINE, more), replace(P1, id="less")), PRISTINE)
    assert found.patches[1].verdict is Verdict.CONFLICT
    assert "through earlier patches" in found.patches[1].why
    assert found.patches[1].displaced_by == ("more",)


def test_a_refusal_names_the_earlier_patch_that_changed_the_lines() -> None:
    """Cut against the files as shipped, after a patch on the same lines: of three earlier ones the one that is in the
    way, for each hunk."""
    near = change(PRISTINE, OPS, "load_4 = x + 4", "load_4 = near(x)")
    far = change(near, OPS, "store_4 = x + 4", "store_4 = near(x)")
    elsewhere = change(far, OPS, "scale_4 = x + 4", "scale_4 = near(x)")
    series = [patch_of(name, *trees) for name, trees in {
        "near": (PRISTINE, near), "far": (near, far), "elsewhere": (far, elsewhere)}.items()]  # fmt: skip
    whole = patch_of("whole", PRISTINE, change(ONE, OPS, "store_4 = x + 4", "store_4 = 1"))
    for disk in (PRISTINE, near, elsewhere):
        found = judge(series_of(*series, P1, whole), disk)
        one, both = found.patches[3:]
        assert (one.verdict, one.displaced_by) == (Verdict.CONFLICT, ("near",))
        assert "near comes before it and changes these lines; its old line 4 stands nowhere" in one.why
        assert (both.verdict, both.displaced_by) == (Verdict.CONFLICT, ("near", "far"))
        assert [hunk.displaced_by for hunk in both.files[0].hunks] == ["near", "far"]
        assert not any(patch.displaced_by for patch in found.patches[:3])


def test_a_file_that_an_earlier_patch_made_or_deleted_names_it() -> None:
    makes, again = (patch_of(name, {}, {NEW: text}) for name, text in (("makes", b"a = 1\n"), ("again", b"b = 1\n")))
    gone = {path: data for path, data in PRISTINE.items() if path != OPS}
    found = judge(series_of(makes, patch_of("gone", PRISTINE, gone), again, P1), PRISTINE)
    assert [patch.displaced_by for patch in found.patches] == [(), (), ("makes",), ("gone",)]


def test_nobody_is_named_where_the_build_itself_is_another() -> None:
    upstream = change(PRISTINE, OPS, "load_4 = x + 4", "load_four = x + 4")
    far = patch_of("far", PRISTINE, change(PRISTINE, OPS, "store_4 = x + 4", "store_4 = 0"))
    found = judge(series_of(far, P1), upstream, pristine=upstream)
    assert verdicts(found) == {"far": "applies", "p1": "conflict"}
    assert found.patches[1].displaced_by == ()
    assert "comes before it" not in found.patches[1].why


def test_a_patch_is_whole_or_not_at_all() -> None:
    other = change(PRISTINE, MATH, "add_4 = x + 4", "add_4 = 0")
    patch = patch_of("both", other, {**change(other, MATH, "add_4 = 0", "add_4 = 1"), OPS: ONE[OPS]})
    found = judge(series_of(patch), PRISTINE)
    assert verdicts(found) == {"both": "conflict"}
    assert file_of(found, OPS).verdict is Verdict.APPLIES
    assert found.final[OPS] == PRISTINE[OPS]


def test_each_patch_gets_a_verdict_after_one_that_fails() -> None:
    broken = patch_of("broken", change(PRISTINE, OPS, "load_1 = x + 1", "load_1 = 0"), PRISTINE)
    found = judge(series_of(broken, P1), PRISTINE)
    assert verdicts(found) == {"broken": "probably-merged", "p1": "applies"}
    gone = patch_of(
        "gone", change(PRISTINE, OPS, "load_1 = x + 1", "load_1 = 0"), change(PRISTINE, OPS, "load_1 = x + 1", "y")
    )
    assert verdicts(judge(series_of(gone, P1), PRISTINE)) == {"gone": "conflict", "p1": "applies"}  # fmt: skip


# ---- paths


def test_paths_that_no_wheel_ships_do_not_count() -> None:
    text = b"".join(
        b"--- a/%b\n+++ b/%b\n@@ -1 +1 @@\n-a\n+b\n" % (path, path)
        for path in (b"tests/test_x.py", b"csrc/x.cu", b"v/notes.md")
    )
    item = SeriesPatch(patch=parse_patch(text, id="p", source="p"))
    found = judge((item,), PRISTINE)
    assert verdicts(found) == {"p": "not-shipped"}
    assert "cannot take effect in a wheel" in file_of(found, "csrc/x.cu").why
    assert dict(found.final) == {}


def test_new_files_beside_the_distribution_need_leave() -> None:
    item = SeriesPatch(patch=patch_of("p", {}, {"tests/new.py": b"x = 1\n"}))
    assert verdicts(judge((item,), PRISTINE)) == {"p": "not-shipped"}
    assert verdicts(judge((replace(item, new_roots=frozenset({"tests"})),), PRISTINE)) == {"p": "applies"}


def test_a_missing_target_says_where_the_same_bytes_went() -> None:
    moved = {"v/core/ops.py" if path == OPS else path: data for path, data in PRISTINE.items()}
    found = judge(series_of(P1), moved, pristine=moved)
    assert verdicts(found) == {"p1": "target-missing"}
    assert file_of(found, OPS).moved_to == "v/core/ops.py"
    assert "the same bytes" in file_of(found, OPS).why
    edited = {**moved, "v/core/ops.py": b"other\n"}
    assert "same name" in file_of(judge(series_of(P1), edited, pristine=edited), OPS).why


def test_a_file_that_is_not_shipped_is_no_target_though_it_is_there() -> None:
    item = SeriesPatch(patch=patch_of("p", {"v/gen.py": b"a\n"}, {"v/gen.py": b"b\n"}))
    found = judge((item,), {**PRISTINE, "v/gen.py": b"a\n"})
    assert verdicts(found) == {"p": "target-missing"}


def test_pristine_bytes_must_be_the_recorded_ones() -> None:
    facts = {OPS: FileFacts(path=OPS, content=ONE[OPS], pristine=ONE[OPS], recorded=digest_of(PRISTINE[OPS]))}
    with pytest.raises(HashMismatchError):
        judge_series(SERIES[:1], facts)


def test_scopes_hold_through_a_series() -> None:
    twins = {OPS: (numbered("f") + "\n\nclass C:\n" + numbered("g")).encode().replace(b"g_", b"f_")}
    body = twins[OPS].replace(b"    f_4 = x + 4\n", b"    f_4 = 0\n", 1)
    series = series_of(patch_of("p", twins, {OPS: body}), base=twins)
    without_first = {OPS: twins[OPS].replace(b"    f_4 = x + 4\n", b"    f_4 = 4\n", 1)}
    found = judge(series, without_first, pristine=without_first)
    assert verdicts(found) == {"p": "wrong-scope"}
    (hunk,) = file_of(found, OPS).hunks
    assert (hunk.scope, hunk.found_scope) == ("f", "g")


# ---- creation, deletion, rename, modes


def test_a_survivor_of_a_rebuilt_environment_is_recognised_by_its_bytes() -> None:
    found = judge(SERIES, {**PRISTINE, NEW: b"COUNT = 1\n"})
    assert file_of(found.patches[2], NEW).verdict is Verdict.APPLIED
    assert verdicts(found)["p3"] == "applies"
    other = judge(SERIES, {**PRISTINE, NEW: b"COUNT = 2\n"})
    assert file_of(other.patches[2], NEW).verdict is Verdict.FOREIGN


@pytest.mark.parametrize("at_hand", [True, False])
def test_a_deletion_is_proven_by_the_bytes_that_it_took_away(at_hand: bool) -> None:
    gone = {path: data for path, data in PRISTINE.items() if path != MATH}
    series = series_of(patch_of("p", PRISTINE, gone))
    assert verdicts(judge(series, PRISTINE, at_hand=at_hand)) == {"p": "applies"}
    found = judge(series, gone, at_hand=at_hand)
    assert verdicts(found) == {"p": "applied"}
    assert carry_out(gone, plan_revert(found, facts_of(series, gone)).steps) == dict(PRISTINE)
    # With other bytes recorded the missing file is not what the patch took away.
    other = change(PRISTINE, MATH, "add_0 = x + 0", "add_0 = 0")
    assert judge(series, gone, pristine=other, at_hand=at_hand).patches[0].verdict is not Verdict.APPLIED


@pytest.mark.parametrize("at_hand", [True, False])
def test_a_rename_with_hunks_moves_both_ways(at_hand: bool) -> None:
    (inner,) = P1.changes
    patch = replace(P1, changes=(Rename(source=OPS, path="v/kernels.py", hunks=inner.hunks, similarity=90),))
    series = series_of(patch, patch_of("next", {"v/kernels.py": ONE[OPS]}, {"v/kernels.py": TWO[OPS]}))
    final = {**{path: data for path, data in PRISTINE.items() if path != OPS}, "v/kernels.py": TWO[OPS]}
    found = judge(series, PRISTINE, at_hand=at_hand)
    assert verdicts(found) == {"p1": "applies", "next": "applies"}
    plan = make_plan(found, facts_of(series, PRISTINE))
    assert [type(step) for step in plan.steps] == [CreateFile, DeleteFile]
    assert carry_out(PRISTINE, plan.steps) == final
    found = judge(series, final, at_hand=at_hand)
    assert verdicts(found) == {"p1": "applied", "next": "applied"}
    assert carry_out(final, plan_revert(found, facts_of(series, final)).steps) == dict(PRISTINE)


def test_modes_are_set_and_put_back() -> None:
    text = b"diff --git a/v/ops.py b/v/ops.py\nold mode 100644\nnew mode 100755\n"
    series = (SeriesPatch(patch=parse_patch(text, id="p", source="p")),)
    plain = facts_of(series, PRISTINE, modes={OPS: 0o640})
    found = judge_series(series, plain)
    assert verdicts(found) == {"p": "applies"}
    assert make_plan(found, plain).steps == (SetMode(path=OPS, before=0o640, after=0o750),)
    done = facts_of(series, PRISTINE, modes={OPS: 0o750})
    found = judge_series(series, done)
    assert verdicts(found) == {"p": "applied"}
    assert not make_plan(found, done)
    assert plan_revert(found, done).steps == (SetMode(path=OPS, before=0o750, after=0o640),)
    assert verdicts(judge_series(series, facts_of(series, PRISTINE))) == {"p": "applies"}


def test_an_empty_file_is_filled_and_emptied_again() -> None:
    text = b"--- a/v/__init__.py\n+++ b/v/__init__.py\n@@ -0,0 +1 @@\n+x = 1\n"
    series = series_of(parse_patch(text, id="p", source="p"))
    full = {**PRISTINE, "v/__init__.py": b"x = 1\n"}
    assert verdicts(judge(series, PRISTINE)) == {"p": "applies"}
    found = judge(series, full)
    assert verdicts(found) == {"p": "applied"}
    assert carry_out(full, plan_revert(found, facts_of(series, full)).steps) == dict(PRISTINE)


def test_a_text_of_several_commits_is_judged_as_one_patch() -> None:
    head = b"From 0123456789012345678901234567890123456789 Mon Sep 17 00:00:00 2001\n\n"
    body = b"--- a/v/data.json\n+++ b/v/data.json\n@@ -1 +1 @@\n-%b\n+%b\n"
    text = head + body % (b'{"a": 1}', b'{"a": 2}') + b"-- \n2.39\n\n" + head + body % (b'{"a": 2}', b'{"a": 3}')
    series = (SeriesPatch(patch=parse_patch(text, id="p", source="p")),)
    assert verdicts(judge(series, PRISTINE)) == {"p": "applies"}
    assert verdicts(judge(series, {**PRISTINE, "v/data.json": b'{"a": 3}\n'})) == {"p": "applied"}
    half = judge(series, {**PRISTINE, "v/data.json": b'{"a": 2}\n'})
    assert half.patches[0].verdict is not Verdict.APPLIED


def test_cuts_are_learnt_for_each_commit_of_a_text() -> None:
    head = b"From 0123456789012345678901234567890123456789 Mon Sep 17 00:00:00 2001\n\n"
    text = head + print_patch(P1) + b"-- \n2.39\n\n" + head + print_patch(P2)
    (item,) = series_of(parse_patch(text, id="p", source="p"))
    assert item.cuts[OPS].scopes == ("load", "load")
    assert item.cuts[OPS].digest == digest_of(PRISTINE[OPS])
    moved = {**PRISTINE, OPS: b"import os\n" + PRISTINE[OPS]}
    assert verdicts(judge((item,), moved, pristine=moved)) == {"p": "applies-at-offset"}


def test_a_hunk_without_old_lines_learns_no_place_from_two_states() -> None:
    """Cut against pristine or against the first patch's output: both have the line, and nothing says which is meant."""
    first = patch_of("first", PRISTINE, {**PRISTINE, OPS: b"import os\n" + PRISTINE[OPS]})
    bare = parse_patch(b"--- a/v/ops.py\n+++ b/v/ops.py\n@@ -4,0 +5 @@\n+    new = 1\n", id="bare", source="bare")
    assert verdicts(judge(series_of(bare), PRISTINE)) == {"bare": "applies"}
    assert verdicts(judge(series_of(first, bare), PRISTINE)) == {"first": "applies", "bare": "ambiguous"}


# ---- plans


def test_a_plan_is_empty_when_everything_is_as_wanted() -> None:
    assert not make_plan(judge(SERIES, FOUR), facts_of(SERIES, FOUR))
    assert not plan_revert(judge(SERIES, PRISTINE), facts_of(SERIES, PRISTINE))


def test_reverting_removes_what_was_created() -> None:
    plan = plan_revert(judge(SERIES, FOUR), facts_of(SERIES, FOUR))
    assert carry_out(FOUR, plan.steps) == dict(PRISTINE)
    assert [step.path for step in plan.steps if isinstance(step, DeleteFile)] == [NEW]


def test_one_patch_is_taken_out_if_its_successors_do_not_need_it() -> None:
    facts = facts_of(SERIES, FOUR)
    found = judge(SERIES, FOUR)
    plan = plan_without(SERIES, found, facts, ["p4"], record_of(PRISTINE))
    assert carry_out(FOUR, plan.steps) == THREE
    with pytest.raises(ConflictError, match="p3 cannot be taken out alone: p4 would no longer apply"):
        plan_without(SERIES, found, facts, ["p3"], record_of(PRISTINE))
    with pytest.raises(ConflictError, match="p1 cannot be taken out alone: p2"):
        plan_without(SERIES, found, facts, ["p1"], record_of(PRISTINE))
    plan = plan_without(SERIES, found, facts, ["p1", "p2"], record_of(PRISTINE))
    assert carry_out(FOUR, plan.steps) == {**FOUR, OPS: PRISTINE[OPS]}
    with pytest.raises(UsageError):
        plan_without(SERIES, found, facts, ["p9"], record_of(PRISTINE))


def test_taking_a_patch_out_does_not_lose_another_that_is_there_in_an_older_text() -> None:
    older = change(PRISTINE, OPS, "load_4 = x + 4", "load_4 = x + 41")
    series = (replace(SERIES[0], former=(patch_of("p1", PRISTINE, older),)), *SERIES[2:])
    disk = {**older, **{path: THREE[path] for path in (MATH, NEW)}}
    found = judge(series, disk)
    assert verdicts(found) == {"p1": "stale-version", "p3": "applied", "p4": "applies"}
    with pytest.raises(ConflictError, match="p1 would be lost"):
        plan_without(series, found, facts_of(series, disk), ["p3"], record_of(PRISTINE))


def test_steps_come_in_the_order_of_paths_with_deletions_last() -> None:
    facts = {path: FileFacts(path=path, content=content) for path, content in (("a", b"1"), ("b", None), ("c", b"3"))}
    steps = steps_to({"a": None, "b": b"2", "c": b"4"}, facts, {})
    assert [step.path for step in steps] == ["b", "c", "a"]


def test_touched_paths_hold_those_of_former_texts() -> None:
    former = (patch_of("p1", {}, {"v/old.py": b"x\n"}),)
    assert touched_paths([replace(SERIES[0], former=former)]) == ("v/old.py", OPS)
