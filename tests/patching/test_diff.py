"""Patch texts as people have them, and texts that are refused with file and line."""

import pytest

from provisioner.errors import InvalidPatchError
from provisioner.patching.diff import manifest_of, parse_patch, print_patch
from provisioner.patching.model import Create, Delete, FileManifest, Modify, Patch, Rename

HUNK = "@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
BODY = HUNK.encode()


def parse(text: str | bytes, *, strip: int | None = None, root: str = "") -> Patch:
    data = text if isinstance(text, bytes) else text.encode()
    return parse_patch(data, id="p", source="x.patch", strip=strip, root=root)


def only_path(text: str, *, strip: int | None = None, root: str = "") -> str:
    (change,) = parse(text, strip=strip, root=root).changes
    return change.path


# ---- names


@pytest.mark.parametrize(
    ("header", "path"),
    [
        ("--- a/v/x.py\n+++ b/v/x.py\n", "v/x.py"),
        ("--- v/x.py\n+++ v/x.py\n", "v/x.py"),
        ("--- v/x.py.orig\n+++ v/x.py\n", "v/x.py"),
        ("--- v/x.py~\t2024-01-02 03:04:05\n+++ v/x.py\t2024-01-02 03:04:05\n", "v/x.py"),
        ("--- v-old/v/x.py\n+++ v-new/v/x.py\n", "v/x.py"),
        ("--- i/v/x.py\n+++ w/v/x.py\n", "v/x.py"),
        ("--- a/v/x.py\t2024-01-02 03:04:05.123456789 +0100\n+++ b/v/x.py\t2024-01-02 03:04:05 +0100\n", "v/x.py"),
        ("--- a/v/x.py 2024-01-02 03:04:05\n+++ b/v/x.py 2024-01-02 03:04:05\n", "v/x.py"),
        ("--- a/v/x y.py\t\n+++ b/v/x y.py\t\n", "v/x y.py"),
        ('--- "a/v/caf\\303\\251.py"\n+++ "b/v/caf\\303\\251.py"\n', "v/café.py"),
        ("--- ./v/x.py\n+++ ./v/x.py\n", "v/x.py"),
        ("diff --git a/v/x.py b/v/x.py\nindex 1234567..89abcde 100644\n--- a/v/x.py\n+++ b/v/x.py\n", "v/x.py"),
        ("diff --git v/x.py v/x.py\nindex 1234567..89abcde 100644\n--- v/x.py\n+++ v/x.py\n", "v/x.py"),
        ("diff -ruN v-old/v/x.py v-new/v/x.py\n--- v-old/v/x.py\n+++ v-new/v/x.py\n", "v/x.py"),
        ("Index: v/x.py\n=====\n--- v/x.py\t(revision 1)\n+++ v/x.py\t(working copy)\n", "v/x.py"),
    ],
)
def test_names_become_paths(header: str, path: str) -> None:
    assert only_path(header + HUNK) == path


@pytest.mark.parametrize(
    ("strip", "root", "path"),
    [(0, "", "a/v/x.py"), (1, "", "v/x.py"), (2, "", "x.py"), (2, "w", "w/x.py"), (None, "vllm/", "vllm/v/x.py")],
)
def test_strip_and_root_are_taken_as_given(strip: int | None, root: str, path: str) -> None:
    names = "--- a/v/x.py\n+++ b/v/x.py\n" if strip != 0 else "--- a/v/x.py\n+++ a/v/x.py\n"
    assert only_path(names + HUNK, strip=strip, root=root) == path


def test_absolute_names_need_a_strip_level() -> None:
    text = "--- /home/me/old/v/x.py\n+++ /home/me/new/v/x.py\n" + HUNK
    with pytest.raises(InvalidPatchError):
        parse(text)
    assert only_path(text, strip=4) == "v/x.py"


def test_a_new_file_takes_its_strip_level_from_the_other_sections() -> None:
    text = "--- old/v/x.py\n+++ new/v/x.py\n" + HUNK + "--- /dev/null\n+++ new/v/y.py\n@@ -0,0 +1 @@\n+a\n"
    assert [change.path for change in parse(text).changes] == ["v/x.py", "v/y.py"]


# ---- kinds of change

NEW = "diff --git a/v/n.py b/v/n.py\nnew file mode 100755\nindex 0000000..1234567\n--- /dev/null\n+++ b/v/n.py\n"
ONE = "@@ -0,0 +1 @@\n+a\n"
GONE = "diff --git a/v/g.py b/v/g.py\ndeleted file mode 100644\nindex 1234567..0000000\n--- a/v/g.py\n+++ /dev/null\n"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (NEW + "@@ -0,0 +1 @@\n+a\n", Create),
        ("diff --git a/v/n.py b/v/n.py\nnew file mode 100644\nindex 0000000..e69de29\n", Create),
        ("--- /dev/null\n+++ b/v/n.py\n@@ -0,0 +1 @@\n+a\n", Create),
        ("--- a/v/n.py\n+++ b/v/n.py\n@@ -0,0 +1 @@\n+a\n", Create),
        ("--- a/v/n.py\t1970-01-01 01:00:00.0 +0100\n+++ b/v/n.py\t2024-01-01 01:00:00 +0100\n" + ONE, Create),
        ("diff --git a/v/n.py b/v/n.py\nindex e69de29..1234567 100644\n--- a/v/n.py\n+++ b/v/n.py\n" + ONE, Modify),
        (GONE + "@@ -1 +0,0 @@\n-a\n", Delete),
        ("diff --git a/v/n.py b/v/n.py\ndeleted file mode 100644\nindex e69de29..0000000\n", Delete),
        ("--- a/v/g.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n", Delete),
        ("--- a/v/g.py\t2024-01-01 00:00:00\n+++ b/v/g.py\t1970-01-01 00:00:00\n@@ -1 +0,0 @@\n-a\n", Delete),
        ("--- a/v/g.py\n+++ b/v/g.py\n@@ -1 +0,0 @@\n-a\n", Modify),
        ("diff --git a/v/m.py b/v/m.py\nold mode 100644\nnew mode 100755\n", Modify),
        ("diff --git a/v/o.py b/v/n.py\nsimilarity index 100%\nrename from v/o.py\nrename to v/n.py\n", Rename),
        ("diff --git v/o.py v/n.py\nsimilarity index 100%\nrename from v/o.py\nrename to v/n.py\n", Rename),
        ("diff --git a/v/o.py b/v/n.py\nsimilarity index 90%\nrename from v/o.py\nrename to v/n.py\n"
         "index 1234567..89abcde 100644\n--- a/v/o.py\n+++ b/v/n.py\n" + HUNK, Rename),
    ],
)  # fmt: skip
def test_kinds_of_change(text: str, kind: type) -> None:
    patch = parse(text)
    (change,) = patch.changes
    assert type(change) is kind
    again = parse_patch(print_patch(patch), id="p", source="x.patch")
    assert again.changes == patch.changes


def test_a_creation_that_names_the_old_file_may_fill_an_empty_one() -> None:
    named, absent = (parse(f"--- {old}\n+++ b/n.py\n@@ -0,0 +1 @@\n+a\n").changes[0] for old in ("a/n.py", "/dev/null"))
    assert isinstance(named, Create)
    assert isinstance(absent, Create)
    assert (named.fills_empty, absent.fills_empty) == (True, False)


def test_modes_and_similarity_are_kept() -> None:
    text = (
        "diff --git a/o.py b/n.py\nold mode 100644\nnew mode 100755\nsimilarity index 95%\n"
        "rename from o.py\nrename to n.py\n--- a/o.py\n+++ b/n.py\n" + HUNK
    )
    (change,) = parse(text).changes
    assert isinstance(change, Rename)
    assert (change.old_mode, change.new_mode, change.similarity) == (0o644, 0o755, 95)


# ---- lines


def body_lines(text: bytes) -> list[tuple[str, bytes, bool]]:
    (change,) = parse(text).changes
    return [(line.kind, line.text, line.ends) for hunk in change.hunks for line in hunk.lines]


HEAD = b"--- a/x.py\n+++ b/x.py\n"


@pytest.mark.parametrize(
    ("hunk", "lines"),
    [
        (b"@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+a\n", [("-", b"a", False), ("+", b"a", True)]),
        (b"@@ -1 +1 @@\n-a\n+a\n\\ Kein Zeilenumbruch am Dateiende.\n", [("-", b"a", True), ("+", b"a", False)]),
        (b"@@ -1 +1,2 @@\n a\n+\xe9\x00\n", [(" ", b"a", True), ("+", b"\xe9\x00", True)]),
        (b"@@ -1 +1,2 @@\n a\x0cb\n+c\rd\n", [(" ", b"a\x0cb", True), ("+", b"c\rd", True)]),
        (b"@@ -1,2 +1,3 @@\n\n+b\n c\n", [(" ", b"", True), ("+", b"b", True), (" ", b"c", True)]),
        (b"@@ -1 +1 @@\n-a\r\n+b\r\n", [("-", b"a\r", True), ("+", b"b\r", True)]),
        (b"@@ -1 +1 @@\n--- a\n+++ b\n", [("-", b"-- a", True), ("+", b"++ b", True)]),
        (b"@@ -1 +1 @@\n-a\n+b\n\\ No newline", [("-", b"a", True), ("+", b"b", False)]),
    ],
)
def test_lines_are_bytes_that_end_at_newline_alone(hunk: bytes, lines: list[tuple[str, bytes, bool]]) -> None:
    assert body_lines(HEAD + hunk) == lines


def test_a_patch_carried_with_crlf_is_the_same_patch() -> None:
    text = HEAD + b"@@ -1 +1,2 @@ def f():\n-a\n+a\n+b\n\\ No newline at end of file\n"
    assert parse(text.replace(b"\n", b"\r\n")).changes == parse(text).changes


def test_a_byte_order_mark_does_not_hide_the_header() -> None:
    assert parse(b"\xef\xbb\xbf" + HEAD + BODY).changes == parse(HEAD + BODY).changes


MAIL = (
    "From 0123456789012345678901234567890123456789 Mon Sep 17 00:00:00 2001\nFrom: A <a@example.org>\n"
    "Subject: [PATCH] x\n\n- a list\n+ of changes\n@ all\n---\n v/x.py | 2 +-\n 1 file changed\n\n"
)


def test_prose_may_stand_before_a_header_and_after_a_signature() -> None:
    text = (
        MAIL
        + "diff --git a/v/x.py b/v/x.py\n--- a/v/x.py\n+++ b/v/x.py\n"
        + HUNK
        + "-- \n2.39.5\n\n_____\nlist footer\n"
    )
    assert parse(text).changes == parse("--- a/v/x.py\n+++ b/v/x.py\n" + HUNK).changes


def test_a_text_of_several_commits_may_change_a_file_twice() -> None:
    one = "--- a/v/x.py\n+++ b/v/x.py\n" + HUNK + "-- \n2.39.5\n\n"
    patch = parse(MAIL + one + MAIL + one)
    assert [hunk.index for change in patch.changes for hunk in change.hunks] == [1, 2]
    assert parse_patch(print_patch(patch), id="p", source="x").changes == patch.changes


def test_a_header_without_hunks_keeps_apart_from_a_plain_one_when_printed() -> None:
    """Found by the fuzzer."""
    empty = "diff --git a/g.py b/g.py\ndeleted file mode 100644\n"
    patch = parse(empty + "\n--- a/h.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n")
    assert [change.path for change in patch.changes] == ["g.py", "h.py"]
    assert parse(print_patch(patch)).changes == patch.changes


def test_the_manifest_counts_what_each_path_gets() -> None:
    text = "--- a/x.py\n+++ b/x.py\n" + HUNK + "@@ -9,2 +9,3 @@\n a\n+b\n c\n" + NEW + "@@ -0,0 +1,2 @@\n+a\n+b\n"
    manifest = manifest_of(parse(text), {"x.py": ("f", "C.g")})
    assert manifest.files == (
        FileManifest(path="x.py", hunks=2, added=2, removed=1, scopes=("f", "C.g")),
        FileManifest(path="v/n.py", hunks=1, added=2, removed=0),
    )


# ---- refusals

NAMES = "--- a/v/x.py\n+++ b/v/x.py\n"
GIT = "diff --git a/v/x.py b/v/x.py\n"


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("", 1, "the patch is empty"),
        ("\n\n", 1, "the patch is empty"),
        ("just prose\nand more\n", 2, "no file header"),
        (HUNK, 1, "a hunk without a file header"),
        ("prose\n" + HUNK, 2, "a hunk without a file header"),
        ("--- a/v/x.py\n" + HUNK, 2, "without the second line of its file header"),
        (NAMES, 3, "no hunk after the file header"),
        (NAMES + "prose\n", 3, "no hunk after the file header"),
        (NAMES + "@@ -1,2 +1,2\n a\n", 3, "a malformed hunk header"),
        (NAMES + "@@ -1,2 1,2 @@\n a\n", 3, "a malformed hunk header"),
        (NAMES + "@@ -1,2 +1,2 @@\n a\n-b\n", 5, "the text ends inside a hunk"),
        (NAMES + "@@ -1,3 +1,2 @@\n a\n-b\n+c\n" + GIT + NAMES + HUNK, 7, "counts disagree"),
        (NAMES + "@@ -1,1 +1,2 @@\n a\n-b\n+c\n", 5, "counts disagree"),
        (NAMES + "@@ -1,1 +1,1 @@\n-a\n+b\n+c\n", 6, "this line belongs to no hunk"),
        (NAMES + "@@ -1 +1 @@\n-a\n+b", 5, "the last line has no newline"),
        (NAMES + HUNK + " stray\n", 7, "this line belongs to no hunk"),
        (NAMES + HUNK + "\n stray\n", 8, "this line belongs to no hunk"),
        (NAMES + HUNK + "prose\n", 7, "text directly after a hunk"),
        (NAMES + "@@ -1,2 +1,2 @@\n a\n b\n", 3, "a hunk that changes nothing"),
        (NAMES + "@@ -1 +1 @@\n-a\n+a\n", 3, "a hunk that changes nothing"),
        (NAMES + "@@ -0,2 +1,2 @@\n a\n-b\n+c\n", 3, "cannot start at line 0"),
        (NAMES + "@@ -5,2 +5,2 @@\n a\n-b\n+c\n" + HUNK, 7, "overlap or are out of order"),
        (NAMES + "@@ -5,2 +5,2 @@\n a\n-b\n+c\n@@ -6,2 +6,2 @@\n a\n-b\n+c\n", 7, "overlap or are out of order"),
        (NAMES + "@@ -1,2 +1,2 @@\n a\n\\ No newline\n-b\n+c\n", 3, "not the last of the file"),
        (NAMES + "@@ -1 +1 @@\n-a\n\\ No newline\n+b\n\\ No newline\n@@ -9 +9 @@\n-a\n+b\n", 8, "after the end"),
        ("--- /dev/null\n+++ /dev/null\n" + HUNK, 2, "both sides of the file header are /dev/null"),
        ("--- /dev/null\n+++ b/x.py\n" + HUNK, 1, "a new file must be one hunk"),
        ("--- a/x.py\n+++ /dev/null\n" + HUNK, 1, "a deleted file must be one hunk"),
        ("--- /dev/null\n+++ b/x.py\n@@ -3,0 +4 @@\n+a\n", 1, "a new file must start at line 1"),
        ("--- a/v/x.py\n+++ b/w/y.py\n" + HUNK, 1, "names two files"),
        (NAMES + HUNK + NAMES + HUNK, 7, "v/x.py stands twice in one patch (first at line 1)"),
        (NAMES + HUNK + "--- /dev/null\n+++ b/v/x.py\n@@ -0,0 +1 @@\n+a\n", 7, "stands twice"),
        (NAMES + HUNK + "--- /dev/null\n+++ b/v/x.py/z.py\n@@ -0,0 +1 @@\n+a\n", 7, "lies inside another file"),
        ("--- a/../x.py\n+++ b/../x.py\n" + HUNK, 1, "a path with . or .."),
        ("--- a/v/../../x.py\n+++ b/v/../../x.py\n" + HUNK, 1, "a path with . or .."),
        ("--- /etc/passwd\n+++ /etc/passwd\n" + HUNK, 1, "an absolute path"),
        ("--- C:/x.py\n+++ C:/x.py\n" + HUNK, 1, "an absolute path"),
        ("--- a/v\\x.py\n+++ b/v\\x.py\n" + HUNK, 1, "backslashes"),
        ("--- a/v/x.py.orig\n+++ b/v/x.py.orig\n" + HUNK, 1, "a leftover of patching"),
        ("--- a/v/x.py.rej\n+++ b/v/x.py.rej\n" + HUNK, 1, "a leftover of patching"),
        ("--- a/v/__pycache__/x.py\n+++ b/v/__pycache__/x.py\n" + HUNK, 1, "compiled bytecode"),
        ("--- a/v/x.pyc\n+++ b/v/x.pyc\n" + HUNK, 1, "compiled bytecode"),
        ("--- a/v-1.dist-info/RECORD\n+++ b/v-1.dist-info/RECORD\n" + HUNK, 1, "the distribution's own records"),
        (GIT + "index 1234567..89abcde 100644\nBinary files a/v/x.py and b/v/x.py differ\n", 3, "a binary patch"),
        (GIT + "index 1234567..89abcde 100644\nGIT binary patch\nliteral 3\nxyz\n", 3, "a binary patch"),
        (NAMES + HUNK + GIT + "index 1234567..89abcde 100644\n", 7, "the text is cut off"),
        (GIT + "new file mode 100644\nindex 0000000..89abcde\n", 1, "the text is cut off"),
        (GIT + "index 1234567..89abcde 100644\n--- a/v/x.py\n", 4, "(+++) is missing"),
        (GIT + "index 1234567..89abcde 120000\n" + NAMES + HUNK, 1, "only regular files"),
        (GIT + "new file mode 160000\n", 1, "only regular files"),
        (GIT + "old mode 100644\n", 1, "a mode change with one side only"),
        (GIT + "old mode 100644\nnew mode 100644\n", 1, "without any change"),
        (GIT, 1, "without any change"),
        (GIT + "unknown header\n", 2, "no git header that is known"),
        (GIT + "new mode 100644\nnew mode 100644\n", 3, "stands twice in one header"),
        (GIT + "copy from v/y.py\ncopy to v/x.py\n", 2, "a copied file"),
        (GIT + "--- a/v/x.py\n+++ b/v/y.py\n" + HUNK, 1, "name different files"),
        ("diff --git a/v/x.py b/v/y.py\nrename from v/x.py\nrename to v/z.py\n", 1, "name different files"),
        ("diff --git a/v/x.py b/v/y.py\n", 1, "cannot be told apart or differ"),
        ("diff --git a/x b/y\nsimilarity index 90%\nrename from x\nrename to y\n", 1, "there is no hunk"),
        ("diff --cc v/x.py\n@@@ -1 -1 +1 @@@\n", 1, "a combined diff"),
        ("*** a/v/x.py\n--- b/v/x.py\n***************\n*** 1 ****\n", 3, "a context diff"),
        ("Only in new/v: y.py\n", 1, "names a file without its content"),
        (NAMES + HUNK + "--- v/y.py\n+++ v/y.py\n" + HUNK, 7, "strip level"),
    ],
)  # fmt: skip
def test_refusals_name_file_and_line(text: str, line: int, what: str) -> None:
    with pytest.raises(InvalidPatchError) as caught:
        parse(text)
    assert what in caught.value.what
    assert caught.value.where == f"x.patch:{line}"
    assert caught.value.exit_code == 3


def test_a_strip_level_beyond_the_path_is_refused() -> None:
    with pytest.raises(InvalidPatchError, match="fewer parts than the strip level 3"):
        parse(NAMES + HUNK, strip=3)


def test_a_root_that_leaves_the_tree_is_refused() -> None:
    with pytest.raises(InvalidPatchError, match=r"\. or \.\."):
        parse(NAMES + HUNK, root="../other")


def test_utf_16_is_refused_with_a_way_out() -> None:
    with pytest.raises(InvalidPatchError) as caught:
        parse((NAMES + HUNK).encode("utf-16"))
    assert caught.value.hints == ("iconv -f UTF-16 -t UTF-8 OLD > NEW",)
