"""Changes made from two contents, and the known content nearest to an unknown one."""

from hypothesis import assume, given
from hypothesis import strategies as st

from provisioner.digests import digest_of
from provisioner.patching.compare import change_between, nearest_state, patch_between
from provisioner.patching.diff import parse_patch, print_patch
from provisioner.patching.hunks import Applied, apply_change, cut_of, reverse_change, reverse_of
from provisioner.patching.model import Create, Cut, Delete, Modify

LINES = st.sampled_from([b"a\n", b"b\n", b"\n", b"def f():\n", b"c\r\n", b"\xff\n"])
CONTENT = st.builds(
    lambda lines, end: b"".join(lines) + end, st.lists(LINES, max_size=30), st.sampled_from([b"", b"z"])
)


@given(old=st.none() | CONTENT, new=st.none() | CONTENT, context=st.integers(0, 4))
def test_a_change_gives_the_new_content_and_back_the_old(old: bytes | None, new: bytes | None, context: int) -> None:
    change = change_between("p/m.txt", old, new, context=context)
    if change is None:
        assert old == new
        return
    # Without a line around it, a change whose lines all end in CRLF is one of a CRLF patch, and the file keeps its own.
    assume(context > 0 or b"\r" not in (old or b"") + (new or b""))
    patch = patch_between({"p/m.txt": old}, {"p/m.txt": new}, id="p", source="p")
    assert parse_patch(print_patch(patch), id="p", source="p") == patch
    cut = cut_of(old, change) if isinstance(change, Modify) and old is not None else Cut()
    assert cut is not None
    done = apply_change(old, change, cut)
    assert isinstance(done, Applied)
    assert done.content == new
    back = reverse_of(change)
    known = cut_of(new, back) if isinstance(back, Modify) and new is not None else Cut()
    undone = apply_change(new, back, known or Cut())
    assert isinstance(undone, Applied)
    assert undone.content == old


def test_kinds_and_headings() -> None:
    assert isinstance(change_between("m", None, b"a\n"), Create)
    assert isinstance(change_between("m", b"a\n", None), Delete)
    source = b"class C:\n" + b"    x = 1\n" * 9
    change = change_between("m.py", source, source + b"    y = 2\n")
    assert isinstance(change, Modify)
    (hunk,) = change.hunks
    assert (hunk.old_start, hunk.old_count, hunk.new_count, hunk.heading) == (8, 3, 4, b"class C:")
    assert not isinstance(reverse_change(source, change), Applied)


def test_a_patch_between_trees_has_their_paths_in_order_and_its_own_digest() -> None:
    patch = patch_between(
        {"b": b"1\n", "a": b"1\n", "c": b"1\n"}, {"b": b"2\n", "a": b"1\n", "d": b"1\n"}, id="p", source="s"
    )
    assert [change.path for change in patch.changes] == ["b", "c", "d"]
    assert patch.digest == digest_of(print_patch(patch))


def test_the_nearest_state_shares_the_most_lines() -> None:
    states = (b"a\nb\nc\n", None, b"a\nb\nc\nd\n")
    assert nearest_state(b"a\nb\nc\nd\nx\n", states) == states[2]
    assert nearest_state(b"a\nx\nc\n", states) == states[0]
    assert nearest_state(None, states) == states[0]
    assert nearest_state(b"a\n", (None,)) is None
