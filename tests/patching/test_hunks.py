"""Where a hunk goes: to one proven place, or nowhere."""

from dataclasses import replace

import pytest

from provisioner.digests import digest_of
from provisioner.patching.compare import change_between
from provisioner.patching.diff import parse_patch
from provisioner.patching.hunks import Applied, Refused, apply_change, cut_of, reverse_change
from provisioner.patching.model import Create, Cut, Delete, FileChange, Hunk, Modify, Verdict
from provisioner.patching.places import Shift

BODY = b"        a = 1\n        b = 2\n        c = 3\n        d = 4\n        e = 5\n        f = 6\n        g = 7\n"
TWINS = b"class C:\n    def one(self):\n" + BODY + b"\n    def two(self):\n" + BODY
ONLY_TWO = TWINS.replace(BODY, BODY.replace(b"d = 4", b"d = 5"), 1)


def change_of(old: bytes | None, new: bytes | None, path: str = "m.py") -> FileChange:
    change = change_between(path, old, new)
    assert change is not None
    return change


def without_headings(change: FileChange) -> FileChange:
    return replace(change, hunks=tuple(replace(hunk, heading=b"") for hunk in change.hunks))


IN_ONE = without_headings(change_of(TWINS, TWINS.replace(b"d = 4", b"d = 40", 1)))
SCOPE_ONE = Cut(scopes=("C.one",))


def applied(content: bytes | None, change: FileChange, cut: Cut = Cut()) -> Applied:  # noqa: B008
    done = apply_change(content, change, cut)
    assert isinstance(done, Applied), done
    return done


def refused(content: bytes | None, change: FileChange, cut: Cut = Cut()) -> Refused:  # noqa: B008
    done = apply_change(content, change, cut)
    assert isinstance(done, Refused), done
    return done


def test_own_line_and_scope_applies() -> None:
    done = applied(TWINS, IN_ONE, SCOPE_ONE)
    assert done.verdict is Verdict.APPLIES
    assert done.content == TWINS.replace(b"d = 4", b"d = 40", 1)
    (hunk,) = done.hunks
    assert (hunk.line, hunk.found, hunk.offset, hunk.scope, hunk.found_scope) == (3, 3, 0, "C.one", "C.one")


def test_another_line_of_the_same_scope_applies_at_an_offset() -> None:
    moved = b"import os\n\n" + TWINS
    done = applied(moved, IN_ONE, SCOPE_ONE)
    assert done.verdict is Verdict.APPLIES_AT_OFFSET
    assert done.content == moved.replace(b"d = 4", b"d = 40", 1)
    (hunk,) = done.hunks
    assert (hunk.line, hunk.found, hunk.offset) == (3, 5, 2)


def test_a_twin_in_another_function_is_never_taken_though_it_is_unique() -> None:
    """The original is gone, its twin stands alone: GNU patch and git apply both change the twin."""
    done = refused(ONLY_TWO, IN_ONE, SCOPE_ONE)
    assert done.verdict is Verdict.WRONG_SCOPE
    (hunk,) = done.hunks
    assert (hunk.found, hunk.found_scope, hunk.scope) == (12, "C.two", "C.one")


def test_without_a_known_scope_only_a_place_that_is_the_only_one_will_do() -> None:
    assert refused(TWINS, IN_ONE).verdict is Verdict.AMBIGUOUS
    single = TWINS.replace(BODY, b"        pass\n")
    change = without_headings(change_of(single + b"x = 1\n", single + b"x = 2\n"))
    (hunk,) = applied(single + b"x = 1\n", change).hunks
    assert hunk.why == "scope unknown"
    assert hunk.scope is None


def test_the_very_file_it_was_cut_against_needs_no_scope() -> None:
    done = applied(TWINS, IN_ONE, Cut(digest=digest_of(TWINS)))
    assert done.content == TWINS.replace(b"d = 4", b"d = 40", 1)


def test_a_patch_that_contradicts_the_file_it_names_is_a_conflict() -> None:
    (hunk,) = IN_ONE.hunks
    off = replace(IN_ONE, hunks=(replace(hunk, old_start=hunk.old_start + 1),))
    assert refused(TWINS, off, Cut(digest=digest_of(TWINS), scopes=("C.one",))).verdict is Verdict.CONFLICT


def test_twins_in_one_scope_are_ambiguous_off_their_own_line() -> None:
    content = b"def f():\n" + b"    a\n    b\n    c\n    d\n    e\n    f\n    g\n" * 2
    change = change_of(content, content.replace(b"    d\n", b"    D\n", 1))
    assert applied(content, change, Cut(scopes=("f",))).verdict is Verdict.APPLIES
    moved = refused(b"import os\n" + content, change, Cut(scopes=("f",)))
    assert moved.verdict is Verdict.AMBIGUOUS
    assert "lines 3, 10" in moved.why


def test_a_shift_by_an_earlier_patch_tells_twins_apart() -> None:
    content = b"def f():\n" + b"    a\n    b\n    c\n    d\n    e\n    f\n    g\n" * 2
    change = change_of(content, content.replace(b"    d\n", b"    D\n", 1))
    done = apply_change(b"import os\n" + content, change, Cut(scopes=("f",)), ((Shift(after=0, by=1),),))
    assert isinstance(done, Applied)
    assert done.content == b"import os\n" + content.replace(b"    d\n", b"    D\n", 1)
    # Where the text stands at its own line and at the shifted one, nothing tells them apart.
    both = apply_change(content, change, Cut(scopes=("f",)), ((Shift(after=0, by=7),),))
    assert isinstance(both, Refused)


def test_own_line_yields_where_the_other_hunks_have_moved() -> None:
    period = b"    a\n    b\n    c\n    d\n    e\n    f\n    g\n"
    old = b"import os\n" + b"x = 1\n" * 9 + b"def f():\n" + period * 2
    new = old.replace(b"import os\n", b"import sys\n").replace(b"    d\n", b"    D\n", 1)
    change = change_of(old, new)
    cut = cut_of(old, change)
    assert cut is not None
    moved = b"# new\n" * 7 + old[: -len(period) * 2] + period * 2
    assert refused(moved, change, Cut(scopes=cut.scopes)).verdict is Verdict.AMBIGUOUS


def test_the_order_of_hunks_is_kept() -> None:
    old = b"".join(b"line %d\n" % n for n in range(40))
    new = old.replace(b"line 5\n", b"five\n").replace(b"line 30\n", b"thirty\n")
    change = change_of(old, new, "m.txt")
    lines = old.splitlines(keepends=True)
    swapped = b"".join(lines[20:] + lines[:20])
    assert refused(swapped, change).verdict is Verdict.CONFLICT


def test_every_line_must_be_equal() -> None:
    change = change_of(TWINS, TWINS.replace(b"d = 4", b"d = 40", 1))
    done = refused(TWINS.replace(b"        c = 3\n", b"        c =  3\n"), change, SCOPE_ONE)
    assert done.verdict is Verdict.CONFLICT
    assert "old line 3 stands nowhere" in done.why


def test_a_heading_must_be_the_nearest_class_or_function_above() -> None:
    old = b"class A:\n    x = 1\n    y = 2\n    z = 3\n    v = 4\n    w = 5\n\nclass B:\n    pass\n"
    change = change_of(old, old.replace(b"    w = 5\n", b"    w = 6\n"))
    assert change.hunks[0].heading == b"class A:"
    assert applied(old, change).verdict is Verdict.APPLIES
    other = old.replace(b"class A:", b"class Other:")
    assert refused(other, change).verdict is Verdict.WRONG_SCOPE
    assert applied(other, change, Cut(scopes=("Other",))).verdict is Verdict.APPLIES


@pytest.mark.parametrize("change", [change_of(b"a\nb\n", b"a\nb\nc\n"), change_of(b"a\nb\n", b"z\na\nb\n")])
def test_text_at_the_edge_of_a_file_is_not_put_in_twice(change: FileChange) -> None:
    once = applied(b"a\nb\n", change)
    assert refused(once.content, change).verdict is Verdict.APPLIED


def test_a_result_that_stands_there_and_a_twin_are_ambiguous() -> None:
    content = b"def f():\n" + b"    a\n    b\n    c\n    d\n" * 2
    change = change_of(content, content.replace(b"    b\n    c\n", b"    b\n    new\n    c\n", 1))
    cut = Cut(scopes=("f",))
    done = applied(content, change, cut)
    assert done.content is not None
    assert refused(done.content, change, cut).verdict is Verdict.APPLIED
    assert refused(b"#\n" + done.content, replace(change, hunks=change.hunks), cut).verdict in (
        Verdict.APPLIED,
        Verdict.AMBIGUOUS,
    )


def test_partly_present_hunks_are_named() -> None:
    old = b"".join(b"line %d\n" % n for n in range(40))
    half = old.replace(b"line 5\n", b"five\n")
    change = change_of(old, half.replace(b"line 30\n", b"thirty\n"), "m.txt")
    done = refused(half, change)
    assert done.verdict is Verdict.PARTIAL
    assert [hunk.verdict for hunk in done.hunks] == [Verdict.APPLIED, Verdict.APPLIES]


def test_an_insertion_without_any_context_goes_nowhere_unless_the_file_is_known() -> None:
    (change,) = parse_patch(b"--- a/m.py\n+++ b/m.py\n@@ -2,0 +3 @@\n+x\n", id="p", source="p").changes
    assert refused(b"a\nb\nc\n", change).verdict is Verdict.AMBIGUOUS
    assert applied(b"a\nb\nc\n", change, Cut(digest=digest_of(b"a\nb\nc\n"))).content == b"a\nb\nx\nc\n"


# ---- line ends


@pytest.mark.parametrize("patch_ends", [b"\n", b"\r\n"])
@pytest.mark.parametrize("file_ends", [b"\n", b"\r\n"])
def test_a_file_keeps_its_line_ends_whatever_the_patch_has(patch_ends: bytes, file_ends: bytes) -> None:
    old, new = b"a\nb\nc\n", b"a\nB\nnew\nc\n"
    change = change_of(old.replace(b"\n", patch_ends), new.replace(b"\n", patch_ends))
    assert applied(old.replace(b"\n", file_ends), change).content == new.replace(b"\n", file_ends)


def test_a_change_of_line_ends_is_made_byte_for_byte() -> None:
    change = change_of(b"a\r\nb\r\nc\n", b"a\r\nb\nc\n")
    assert applied(b"a\r\nb\r\nc\n", change).content == b"a\r\nb\nc\n"
    assert refused(b"a\nb\nc\n", change).verdict is Verdict.CONFLICT


def test_in_a_mixed_file_new_lines_take_the_end_of_the_line_above() -> None:
    change = change_of(b"a\nb\nc\nd\n", b"a\nb\nX\nc\nd\n")
    assert applied(b"a\nb\r\nc\nd\r\n", change).content == b"a\nb\r\nX\r\nc\nd\r\n"


def test_a_missing_newline_at_the_end_is_part_of_the_text() -> None:
    change = change_of(b"a\nb", b"a\nc")
    assert applied(b"a\nb", change).content == b"a\nc"
    assert refused(b"a\nb\n", change).verdict is Verdict.CONFLICT
    assert refused(b"a\nb\nc\n", change).verdict is Verdict.CONFLICT


# ---- whole files


def test_a_creation_conflicts_with_any_other_content() -> None:
    change = change_of(None, b"a\n")
    assert applied(None, change).content == b"a\n"
    assert refused(b"a\n", change).verdict is Verdict.APPLIED
    assert refused(b"b\n", change).verdict is Verdict.CONFLICT
    assert refused(b"", change).verdict is Verdict.CONFLICT
    assert isinstance(change, Create)
    assert applied(b"", replace(change, fills_empty=True)).content == b"a\n"


def test_a_deletion_needs_the_whole_content() -> None:
    change = change_of(b"a\nb\n", None)
    assert isinstance(change, Delete)
    assert applied(b"a\nb\n", change).content is None
    assert applied(b"a\r\nb\r\n", change).content is None
    assert refused(b"a\n", change).verdict is Verdict.CONFLICT
    assert refused(None, change).verdict is Verdict.APPLIED


def test_a_missing_file_is_a_missing_target() -> None:
    assert refused(None, IN_ONE).verdict is Verdict.TARGET_MISSING


def test_reversal_keeps_the_scope() -> None:
    done = applied(TWINS, IN_ONE, SCOPE_ONE)
    back = reverse_change(done.content, IN_ONE, SCOPE_ONE)
    assert isinstance(back, Applied)
    assert back.content == TWINS
    wrong = TWINS[: -len(BODY)] + BODY.replace(b"d = 4", b"d = 40")
    assert isinstance(reverse_change(wrong, IN_ONE, SCOPE_ONE), Refused)


def test_hunks_keep_their_type() -> None:
    assert isinstance(IN_ONE, Modify)
    assert all(isinstance(hunk, Hunk) for hunk in IN_ONE.hunks)


def test_the_result_of_a_change_that_renames_what_encloses_it_is_found() -> None:
    old = b"def f(x):\n" + b"".join(b"    f_%d = x\n" % n for n in range(20))
    new = old.replace(b"def f(", b"def g(").replace(b"    f_15 = x\n", b"    f_15 = 0\n")
    change = change_of(old, new)
    cut = cut_of(old, change)
    assert cut is not None
    assert cut.scopes == ("", "f")
    assert refused(new, change, cut).verdict is Verdict.APPLIED


def test_a_deletion_that_upstream_made_is_not_made_again_in_a_twin() -> None:
    """With its own lines gone, the only place left is the twin: without a scope that looks like a unique match."""
    gone = TWINS.replace(b"        d = 4\n", b"", 1)
    change = without_headings(change_of(TWINS, gone))
    assert refused(gone, change).verdict is Verdict.AMBIGUOUS
    assert refused(gone, change, SCOPE_ONE).verdict is Verdict.APPLIED


def test_scopes_mean_nothing_for_files_that_are_not_python() -> None:
    change = replace(IN_ONE, path="m.txt")
    assert refused(TWINS, change, SCOPE_ONE).verdict is Verdict.AMBIGUOUS
    assert refused(TWINS + b"x\ry\n", IN_ONE, SCOPE_ONE).verdict is Verdict.AMBIGUOUS


def test_taking_out_one_of_equal_lines_is_not_taken_for_done() -> None:
    change = change_of(b"f\nf\nf\nf\n", b"f\nf\nf\n", "m.txt")
    assert applied(b"f\nf\nf\nf\n", change).content == b"f\nf\nf\n"
