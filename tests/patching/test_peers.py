"""The same patches through git apply and GNU patch -F0: where all agree, and why we differ where we do."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from provisioner.errors import InvalidPatchError
from provisioner.patching.diff import parse_patch
from provisioner.patching.hunks import Applied, apply_change
from provisioner.patching.model import Cut, Rename
from tests.support.peers import GitTrees, Tree, git_apply, gnu_patch

pytestmark = pytest.mark.skipif(
    not (shutil.which("git") and shutil.which("patch")), reason="git and GNU patch are not installed"
)

REFUSED = None
OLD = b"class A:\n    def f(self):\n        a = 1\n        b = 2\n        c = 3\n        return a\n"
TWIN = OLD + b"\n    def g(self):\n        a = 1\n        b = 2\n        c = 3\n        return a\n"


def ours(tree: Tree, diff: bytes, scopes: tuple[str, ...] = ()) -> dict[str, bytes] | None:
    """The tree after our own application, each hunk in its scope where one is given."""
    try:
        patch = parse_patch(diff, id="p", source="p")
    except InvalidPatchError:
        return REFUSED
    out = dict(tree)
    for change in patch.changes:
        source = change.source if isinstance(change, Rename) else change.path
        if source != change.path and change.path in out:
            return REFUSED
        done = apply_change(out.get(source), change, Cut(scopes=scopes))
        if not isinstance(done, Applied):
            return REFUSED
        out.pop(source, None)
        if done.content is not None:
            out[change.path] = done.content
    return out


@dataclass(frozen=True, kw_only=True)
class Case:
    """One patch on one tree. ``us``, ``git`` and ``gnu`` are the outcomes (None: refused), ``why`` why they differ."""

    name: str
    tree: Tree
    diff: bytes
    us: Tree | None
    git: Tree | None
    gnu: Tree | None
    why: str = ""
    scopes: tuple[str, ...] = ()


def one(old: bytes, new: bytes, hunk: bytes, name: bytes = b"m.py") -> tuple[dict[str, bytes], bytes, dict[str, bytes]]:
    path = name.decode()
    return {path: old}, b"--- a/%b\n+++ b/%b\n" % (name, name) + hunk, {path: new}


def agreeing(name: str, tree: Tree, diff: bytes, after: Tree | None) -> Case:
    return Case(name=name, tree=tree, diff=diff, us=after, git=after, gnu=after)


SET_B = b"@@ -3,4 +3,4 @@\n         a = 1\n-        b = 2\n+        b = 9\n         c = 3\n         return a\n"
LESS_BELOW = b"@@ -2,4 +2,4 @@\n     def f(self):\n         a = 1\n-        b = 2\n+        b = 9\n         c = 3\n"
NO_END = b"@@ -1,2 +1,2 @@\n a\n-b\n\\ No newline at end of file\n+c\n\\ No newline at end of file\n"
NO_ONE = TWIN.replace(b"        b = 2\n", b"        b = 3\n", 1)
IN_F = b"@@ -3,4 +3,4 @@\n         a = 1\n-        b = 2\n+        b = 9\n         c = 3\n         return a\n"
APPEND = b"@@ -1,2 +1,3 @@\n a\n b\n+c\n"
DOUBLE = b"--- a/n.py\n+++ b/n.py\n@@ -0,0 +1 @@\n+x\n"

CASES = [
    agreeing("own line", *one(OLD, OLD.replace(b"b = 2", b"b = 9"), SET_B)),
    agreeing("offset", *one(b"#\n" + OLD, b"#\n" + OLD.replace(b"b = 2", b"b = 9"), SET_B)),
    agreeing("changed context", *one(OLD.replace(b"a = 1", b"a = 2"), b"", SET_B)[:2], None),
    agreeing("new file", {}, b"--- /dev/null\n+++ b/n.py\n@@ -0,0 +1 @@\n+x\n", {"n.py": b"x\n"}),
    agreeing("missing file", {}, one(b"", b"", SET_B)[1], None),
    agreeing("no newline", *one(b"a\nb", b"a\nc", NO_END)),
    agreeing("latin-1", *one(b"caf\xe9\nb\n", b"caf\xe9\nc\n", b"@@ -1,2 +1,2 @@\n caf\xe9\n-b\n+c\n")),
    Case(
        name="a twin in another function",
        tree={"m.py": NO_ONE}, diff=one(b"", b"", IN_F)[1], scopes=("A.f",),
        us=REFUSED, git={"m.py": NO_ONE.replace(b"b = 2", b"b = 9")}, gnu={"m.py": NO_ONE.replace(b"b = 2", b"b = 9")},
        why="the text is there once, but in A.g; the hunk is for A.f, whose line upstream changed",
    ),
    Case(
        name="twins",
        tree={"m.py": b"#\n#\n" + TWIN}, diff=one(b"", b"", IN_F)[1],
        us=REFUSED, git={"m.py": b"#\n#\n" + TWIN.replace(b"b = 2", b"b = 9", 1)},
        gnu={"m.py": b"#\n#\n" + TWIN.replace(b"b = 2", b"b = 9", 1)},
        why="both take the nearest of two equal places; without a scope nothing says which it is",
    ),
    agreeing("an appended line, twice", {"m.py": b"a\nb\nc\n"}, one(b"", b"", APPEND)[1], None),
    Case(
        name="an appended line in a file that grew",
        tree={"m.py": b"a\nb\nz\n"}, diff=one(b"", b"", APPEND)[1],
        us={"m.py": b"a\nb\nc\nz\n"}, git=REFUSED, gnu=REFUSED,
        why="every line of the hunk matches at its own line; both others take missing context for the end of the file",
    ),
    Case(
        name="a creation without /dev/null, twice",
        tree={"n.py": b"x\n"}, diff=DOUBLE,
        us=REFUSED, git=REFUSED, gnu={"n.py": b"x\nx\n"},
        why="GNU patch takes a hunk without old lines for an insertion and doubles the file",
    ),
    agreeing("a creation without /dev/null", {}, DOUBLE, {"n.py": b"x\n"}),
    Case(
        name="less context below than above",
        tree={"m.py": OLD}, diff=one(b"", b"", LESS_BELOW)[1],
        us={"m.py": OLD.replace(b"b = 2", b"b = 9")}, git={"m.py": OLD.replace(b"b = 2", b"b = 9")}, gnu=REFUSED,
        why="GNU patch takes missing context for the end of the file",
    ),
    Case(
        name="CRLF file, LF patch",
        tree={"m.txt": b"a\r\nb\r\n"}, diff=one(b"", b"", b"@@ -1,2 +1,2 @@\n a\n-b\n+c\n", b"m.txt")[1],
        us={"m.txt": b"a\r\nc\r\n"}, git=REFUSED, gnu=REFUSED,
        why="line ends are not what the patch is about; the file keeps its own",
    ),
    Case(
        name="CRLF patch, LF file",
        tree={"m.txt": b"a\nb\n"},
        diff=one(b"", b"", b"@@ -1,2 +1,2 @@\n a\n-b\n+c\n", b"m.txt")[1].replace(b"\n", b"\r\n"),
        us={"m.txt": b"a\nc\n"}, git=REFUSED, gnu=REFUSED,
        why="the patch was carried with CRLF",
    ),
    Case(
        name="text after a hunk",
        tree={"m.txt": b"a\nb\n"}, diff=one(b"", b"", b"@@ -1,2 +1,2 @@\n a\n-b\n+c\n+d\n", b"m.txt")[1],
        us=REFUSED, git={"m.txt": b"a\nc\n"}, gnu={"m.txt": b"a\nc\n"},
        why="the counts leave one line over; both others drop it as garbage",
    ),
    Case(
        name="a line too few",
        tree={"m.txt": b"a\nb\n"}, diff=one(b"", b"", b"@@ -1,3 +1,3 @@\n a\n-b\n+c\n", b"m.txt")[1],
        us=REFUSED, git=REFUSED, gnu=REFUSED,
    ),
    Case(
        name="the same file twice",
        tree={"m.txt": b"a\n"},
        diff=b"--- a/m.txt\n+++ b/m.txt\n@@ -1 +1 @@\n-a\n+b\n--- a/m.txt\n+++ b/m.txt\n@@ -1 +1 @@\n-b\n+c\n",
        us=REFUSED, git={"m.txt": b"c\n"}, gnu={"m.txt": b"c\n"},
        why="in one diff a file stands once; two texts glued together are to be given as two patches",
    ),
    Case(
        name="hunks without context",
        tree={"m.txt": b"a\nb\n"}, diff=one(b"", b"", b"@@ -1,0 +2 @@\n+x\n", b"m.txt")[1],
        us=REFUSED, git=REFUSED, gnu={"m.txt": b"a\nx\nb\n"},
        why="no old line says where the hunk goes, and the file is not known to be the one it was cut against",
    ),
    Case(
        name="a rename onto a file",
        tree={"a.py": b"x\n", "b.py": b"y\n"},
        diff=b"diff --git a/a.py b/b.py\nsimilarity index 100%\nrename from a.py\nrename to b.py\n",
        us=REFUSED, git=REFUSED, gnu={"b.py": b"x\n"},
        why="GNU patch overwrites the file that is there",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_outcomes_beside_those_of_git_and_gnu_patch(case: Case, tmp_path: Path) -> None:
    (tmp_path / "git").mkdir()
    (tmp_path / "gnu").mkdir()
    assert ours(case.tree, case.diff, case.scopes) == case.us
    assert git_apply(tmp_path / "git", case.tree, case.diff) == case.git
    assert gnu_patch(tmp_path / "gnu", case.tree, case.diff) == case.gnu
    assert bool(case.why) == (not case.us == case.git == case.gnu)


@pytest.fixture(scope="module")
def git(tmp_path_factory: pytest.TempPathFactory) -> GitTrees:
    return GitTrees(tmp_path_factory.mktemp("git"))


LINE = st.sampled_from([b"one\n", b"two\n", b"three\n", b"    four\n", b"\n"])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(head=st.lists(LINE, max_size=4), lines=st.lists(LINE, min_size=8, max_size=20), data=st.data())
def test_where_we_apply_to_unknown_files_git_and_gnu_patch_do_the_same(
    git: GitTrees, head: list[bytes], lines: list[bytes], data: st.DataObject
) -> None:
    """We never apply what both refuse, and never with another result; that we refuse more is what scopes are for."""
    old = [line if line == b"\n" else b"%d %b" % (at // 2, line) for at, line in enumerate(lines)]
    at = data.draw(st.integers(3, len(old) - 4))
    new = [*old[:at], *data.draw(st.lists(LINE, max_size=3)), *old[at + data.draw(st.integers(0, 1)) :]]
    diff = git.diff({"m.txt": b"".join(old)}, {"m.txt": b"".join(new)})
    if not diff:
        return
    tree = {"m.txt": b"".join(head + old)}
    mine = ours(tree, diff)
    if mine is None:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "git").mkdir()
        (folder / "gnu").mkdir()
        theirs = [git_apply(folder / "git", tree, diff), gnu_patch(folder / "gnu", tree, diff)]
    assert mine in theirs
    assert mine["m.txt"] == b"".join(head + new) or theirs[0] == theirs[1] == mine
