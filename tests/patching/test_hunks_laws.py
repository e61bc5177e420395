"""Laws of one patch on a tree, on random trees whose diffs git makes."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from provisioner.patching.diff import manifest_of, parse_patch, print_patch
from provisioner.patching.hunks import NO_CUT, Applied, Refused, apply_change, cut_of, reverse_of
from provisioner.patching.model import Create, Cut, Modify, Patch, Rename, Verdict
from tests.support.peers import GitTrees, gnu_diff

CODE = (b"def f():", b"    a = 1", b"    return a", b"", b"class C:", b"    def g(self):", b"x = (", b")")
ODD = (
    b"\x0c",
    b"a\rb",
    b"caf\xe9",
    b"  \t",
    b"--- a",
    b"+++ b",
    b"@@ -1 +1 @@",
    b"-- ",
    b"\\ No newline at end of file",
)
LINES = st.sampled_from(CODE + ODD)


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    lines = draw(st.lists(LINES, max_size=25))
    end = draw(st.sampled_from([b"\n", b"\n", b"\r\n"]))
    text = end.join(lines)
    return text + end if draw(st.booleans()) and lines else text


@st.composite
def edits(draw: st.DrawFn, content: bytes) -> bytes:
    lines = content.split(b"\n")
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines)))
        drop = draw(st.integers(0, 3))
        end = b"\r" if b"\r\n" in content else b""
        lines[at : at + drop] = [line + end for line in draw(st.lists(LINES, max_size=3))]
    return b"\n".join(lines)


@st.composite
def tree_pairs(draw: st.DrawFn) -> tuple[dict[str, bytes], dict[str, bytes]]:
    names = draw(st.lists(st.sampled_from(["p/a.py", "p/b.py", "p/q/c.txt", "p/d e.py"]), unique=True, min_size=1))
    old: dict[str, bytes] = {}
    new: dict[str, bytes] = {}
    for name in names:
        content = draw(contents())
        kind = draw(st.sampled_from(["edit", "edit", "edit", "create", "delete"]))
        if kind != "create":
            old[name] = content
        if kind != "delete":
            new[name] = draw(edits(content)) if kind == "edit" else content
    return old, new


def apply_patch(tree: dict[str, bytes], patch: Patch, cuts: dict[str, Cut]) -> dict[str, bytes]:
    out = dict(tree)
    for change in patch.changes:
        source = change.source if isinstance(change, Rename) else change.path
        done = apply_change(tree.get(source), change, cuts.get(source, Cut()))
        assert isinstance(done, Applied), done
        out.pop(source, None)
        if done.content is not None:
            out[change.path] = done.content
    return out


def cuts_of(tree: dict[str, bytes], patch: Patch) -> dict[str, Cut]:
    found: dict[str, Cut] = {}
    for change in patch.changes:
        if isinstance(change, Modify | Rename):
            source = change.source if isinstance(change, Rename) else change.path
            cut = cut_of(tree[source], change)
            assert cut is not None
            found[source] = cut
    return found


def reversed_patch(patch: Patch) -> Patch:
    return replace(patch, changes=tuple(reverse_of(change) for change in patch.changes))


@pytest.fixture(scope="module")
def git(tmp_path_factory: pytest.TempPathFactory) -> GitTrees:
    return GitTrees(tmp_path_factory.mktemp("git"))


RELAXED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
CONTEXT = st.sampled_from(["-U3", "-U3", "-U1", "-U0", "-U10"])


@RELAXED
@given(pair=tree_pairs(), context=CONTEXT)
def test_forward_gives_the_second_tree_and_backward_the_first(
    git: GitTrees, pair: tuple[dict[str, bytes], dict[str, bytes]], context: str
) -> None:
    old, new = pair
    text = git.diff(old, new, "--text", context)
    if not text:
        assert old == new
        return
    patch = parse_patch(text, id="p", source="p.patch")
    forward = apply_patch(old, patch, cuts_of(old, patch))
    assert forward == new
    back = reversed_patch(patch)
    assert apply_patch(new, back, cuts_of(new, back)) == old


@RELAXED
@given(pair=tree_pairs(), context=CONTEXT)
def test_what_gnu_diff_makes_is_read_as_well(pair: tuple[dict[str, bytes], dict[str, bytes]], context: str) -> None:
    """Timestamps tell creations and deletions; empty files are beyond what such a diff can say."""
    old, new = ({name: data for name, data in tree.items() if data} for tree in pair)
    with tempfile.TemporaryDirectory() as folder:
        text = gnu_diff(Path(folder), old, new, context)
    if not text:
        return
    patch = parse_patch(text, id="p", source="p.patch")
    assert apply_patch(old, patch, cuts_of(old, patch)) == new
    back = reversed_patch(patch)
    assert apply_patch(new, back, cuts_of(new, back)) == old


@RELAXED
@given(pair=tree_pairs(), context=CONTEXT, renames=st.booleans())
def test_printing_and_parsing_again_gives_the_same_patch(
    git: GitTrees, pair: tuple[dict[str, bytes], dict[str, bytes]], context: str, renames: bool
) -> None:
    old, new = pair
    text = git.diff(old, new, "--text", context, "-M20%" if renames else "--no-renames")
    if not text:
        return
    patch = parse_patch(text, id="p", source="p.patch")
    again = parse_patch(print_patch(patch), id="p", source="p.patch")
    assert again.changes == patch.changes
    assert print_patch(again) == print_patch(patch)
    assert manifest_of(again) == manifest_of(patch)


@RELAXED
@given(content=contents(), data=st.data())
def test_a_second_application_never_changes_anything(git: GitTrees, content: bytes, data: st.DataObject) -> None:
    wanted = data.draw(edits(content))
    text = git.diff({"m.py": content}, {"m.py": wanted}, "--text")
    if not text:
        return
    (change,) = parse_patch(text, id="p", source="p.patch").changes
    cut = cut_of(content, change)
    assert cut is not None
    once = apply_change(content, change, cut)
    assert isinstance(once, Applied)
    twice = apply_change(wanted, change, Cut(scopes=cut.scopes))
    # Where the same text stands once more, the hunk may go there: that is a new place, not a second time at the first.
    if isinstance(twice, Applied):
        assert any(hunk.offset for hunk in twice.hunks)


@RELAXED
@given(content=contents(), above=st.lists(st.just(b"# above"), min_size=1, max_size=5), data=st.data())
def test_offsets_are_found_and_given(git: GitTrees, content: bytes, above: list[bytes], data: st.DataObject) -> None:
    wanted = data.draw(edits(content))
    text = git.diff({"m.py": content}, {"m.py": wanted}, "--text")
    if not text or b"\r" in content:
        return
    (change,) = parse_patch(text, id="p", source="p.patch").changes
    cut = cut_of(content, change)
    assert cut is not None
    head = b"".join(line + b"\n" for line in above)
    moved = apply_change(head + content, change, Cut(scopes=cut.scopes))
    if isinstance(moved, Refused):
        twins = {Verdict.AMBIGUOUS, Verdict.APPLIED, Verdict.PARTIAL, Verdict.CONFLICT}
        assert moved.verdict in twins
        return
    if moved.content == head + wanted:
        assert {hunk.offset for hunk in moved.hunks} == {len(above)}


@RELAXED
@given(content=contents(), data=st.data())
def test_a_patch_on_a_file_with_other_line_ends_keeps_the_files_own(
    git: GitTrees, content: bytes, data: st.DataObject
) -> None:
    content = content.replace(b"\r", b"")
    wanted = data.draw(edits(content)).replace(b"\r", b"")
    text = git.diff({"m.txt": content}, {"m.txt": wanted}, "--text", "-U100")
    if not text or b"\n" not in content or b"\n" not in wanted:
        return
    for carried in (text, text.replace(b"\n", b"\r\n")):
        (change,) = parse_patch(carried, id="p", source="p.patch").changes
        there = content.replace(b"\n", b"\r\n")
        # Known to be the file that it was cut against: lines that stand there twice leave no doubt then.
        done = apply_change(there, change, cut_of(there, change) or NO_CUT)
        assert isinstance(done, Applied)
        assert done.content == wanted.replace(b"\n", b"\r\n")
        back = reverse_of(change)
        undone = apply_change(done.content, back, cut_of(done.content, back) or NO_CUT)
        assert isinstance(undone, Applied)
        assert undone.content == content.replace(b"\n", b"\r\n")


@RELAXED
@given(content=contents())
def test_creating_is_done_once(git: GitTrees, content: bytes) -> None:
    if not content or b"\r\n" in content:
        return
    text = git.diff({}, {"m.py": content}, "--text")
    plain = text[text.index(b"--- ") :].replace(b"--- /dev/null", b"--- a/m.py")
    for diff, fills in ((text, False), (plain, True)):
        (change,) = parse_patch(diff, id="p", source="p.patch").changes
        assert isinstance(change, Create)
        assert change.fills_empty is fills
        once = apply_change(None, change)
        assert isinstance(once, Applied)
        assert once.content == content
        twice = apply_change(content, change)
        assert isinstance(twice, Refused)
        assert twice.verdict is Verdict.APPLIED
