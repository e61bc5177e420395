from pathlib import Path

import pytest
from packaging.version import Version

from provisioner.digests import digest_of
from provisioner.errors import InvalidPatchError, UsageError
from provisioner.patching.model import Create, Cut, Modify
from provisioner.resources import patches_folder
from provisioner.series.store import (
    find_text,
    load_series_patch,
    open_stored_patch,
    parse_patch_toml,
    read_store,
    read_stored_patch,
)

TEXT = b"""--- a/pkg/a.py
+++ b/pkg/a.py
@@ -1,2 +1,3 @@
 def f():
+    x = 1
     return 2
--- /dev/null
+++ b/pkg/new.py
@@ -0,0 +1 @@
+y = 1
"""
FORMER = TEXT.replace(b"x = 1", b"x = 0")

TOML = f"""
schema = 1
id = "p1"
title = "A title"
upstream = "https://example.org/pull/1"
fixes = "Something\\n  that was broken."

[[variant]]
file = "1.patch"
versions = ">=1.2,<2"
cut_against = "1.2.3"
sha256 = "{digest_of(TEXT)}"
former = ["{digest_of(FORMER)}"]

[[variant.files]]
path = "pkg/a.py"
hunks = 1
added = 1
removed = 0
scopes = ["f"]

[[variant.files]]
path = "pkg/new.py"
hunks = 1
added = 1
removed = 0
"""


def _make_patch(store: Path, toml: str = TOML, text: bytes = TEXT, former: bytes = FORMER) -> Path:
    folder = store / "p1"
    (folder / "former").mkdir(parents=True)
    (folder / "patch.toml").write_text(toml)
    (folder / "1.patch").write_bytes(text)
    (folder / "former" / f"{digest_of(FORMER)}.patch").write_bytes(former)
    return folder


def test_a_patch_with_its_text_scopes_and_former_texts(tmp_path: Path) -> None:
    stored = read_stored_patch(_make_patch(tmp_path))
    assert (stored.id, stored.fixes, stored.distribution) == ("p1", "Something that was broken.", "vllm")
    variant = stored.variant_for(Version("1.9"))
    assert variant is not None
    series_patch = load_series_patch(stored, variant)
    assert [type(change) for change in series_patch.patch.changes] == [Modify, Create]
    assert series_patch.patch.source == "p1/1.patch"
    assert series_patch.patch.digest == digest_of(TEXT)
    assert series_patch.cuts["pkg/a.py"] == Cut(scopes=("f",))
    assert [former.digest for former in series_patch.former] == [digest_of(FORMER)]


def test_a_text_is_found_by_its_digest(tmp_path: Path) -> None:
    _make_patch(tmp_path)
    now, former = find_text(tmp_path, "p1", digest_of(TEXT)), find_text(tmp_path, "p1", digest_of(FORMER))
    assert now is not None
    assert (now[1], now[0].cuts["pkg/a.py"]) == (TEXT, Cut(scopes=("f",)))
    assert former is not None
    assert (former[1], former[0].patch.digest) == (FORMER, digest_of(FORMER))
    assert find_text(tmp_path, "p1", digest_of(b"")) is None
    assert find_text(tmp_path, "p2", digest_of(TEXT)) is None


def test_a_digest_of_the_file_cut_against_is_taken(tmp_path: Path) -> None:
    base = digest_of(b"base")
    toml = TOML.replace('path = "pkg/a.py"', f'path = "pkg/a.py"\nbefore = "{base}"')
    stored = read_stored_patch(_make_patch(tmp_path, toml))
    assert load_series_patch(stored, stored.variants[0]).cuts["pkg/a.py"].digest == base


@pytest.mark.parametrize(
    ("version", "covered"),
    [
        ("1.1.9", False),
        ("1.2", True),
        ("1.2.0rc1", True),
        ("1.2.0rc1.dev5+gabcdef0.cu130", True),
        ("1.9.9.post1", True),
        ("1.10+local", True),
        ("2", False),
        ("2.0.0rc1.dev3+g1234567", False),
    ],
)
def test_which_versions_a_variant_is_for(version: str, covered: bool) -> None:
    stored = parse_patch_toml(TOML, folder=Path("p1"), where="p1")
    assert (stored.variant_for(Version(version)) is not None) is covered


def test_the_first_variant_that_covers_a_version_is_taken() -> None:
    more = TOML[TOML.index("[[variant]]") :].replace("1.patch", "2.patch").replace(">=1.2,<2", ">=1,<3")
    stored = parse_patch_toml(TOML + more, folder=Path("p1"), where="p1")
    chosen = {version: stored.variant_for(Version(version)) for version in ("1.2", "2.5")}
    assert {version: variant.file if variant else None for version, variant in chosen.items()} == {
        "1.2": "1.patch",
        "2.5": "2.patch",
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema = 1", "schema = 2", "p1: schema: unknown patch schema (expected 1, found 2)"),
        ('title = "A title"', "", "p1: title: a required key is missing"),
        ('title = "A title"', "title = 3", "p1: title: a value of the wrong type (expected str, found int)"),
        ('id = "p1"', 'id = "p2"', "p1: id: the id is not the name of the folder (expected p1, found p2)"),
        (
            'id = "p1"',
            'id = "P 1"',
            "p1: id: an id is lower-case letters and digits, single hyphens or dots between (found P 1)",
        ),
        ('title = "A title"', 'title = "A"\ntitel = "B"', "p1: titel: unknown key 'titel'"),
        (
            "added = 1\nremoved = 0\nscopes",
            "add = 1\nremoved = 0\nscopes",
            "p1: variant[0].files[0].added: a required key is missing",
        ),
        (
            'scopes = ["f"]',
            'scopes = ["f", "g"]',
            "p1: variant[0].files[0].scopes: a scope is given for each hunk (expected 1, found 2)",
        ),
        (
            ">=1.2,<2",
            "1.x",
            "p1: variant[0].versions: not a version range (expected a form such as >=0.27,<0.28, found 1.x)",
        ),
        ("1.2.3", "one", "p1: variant[0].cut_against: not a version (found one)"),
        (
            'file = "1.patch"',
            'file = "../1.patch"',
            "p1: variant[0].file: a variant's text lies beside patch.toml (found ../1.patch)",
        ),
        (digest_of(TEXT), "abc", "p1: variant[0].sha256: not a SHA-256 (expected 64 lower-case hex digits, found abc)"),
        ("pkg/new.py", "pkg/a.py", "p1: variant[0].files: pkg/a.py stands twice"),
        ("[[variant.files]]", "[[variant.sth]]", "p1: variant[0].sth: unknown key 'sth'"),
        ("schema = 1", "schema 1", "p1: not TOML: Expected '=' after a key in a key/value pair (at line 2, column 8)"),
    ],
)
def test_what_is_not_understood_is_an_error_with_its_address(old: str, new: str, message: str) -> None:
    assert old in TOML
    with pytest.raises(InvalidPatchError) as caught:
        parse_patch_toml(TOML.replace(old, new), folder=Path("p1"), where="p1")
    assert str(caught.value) == message


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(InvalidPatchError) as caught:
        parse_patch_toml(TOML.replace("upstream", "upsteam"), folder=Path("p1"), where="p1")
    assert caught.value.hints == ("did you mean 'upstream'?",)


def test_a_patch_without_texts_is_an_error() -> None:
    with pytest.raises(InvalidPatchError, match="needs a text"):
        parse_patch_toml(TOML[: TOML.index("[[variant]]")], folder=Path("p1"), where="p1")


def test_a_changed_text_is_not_taken(tmp_path: Path) -> None:
    stored = read_stored_patch(_make_patch(tmp_path, text=TEXT + b"\n"))
    with pytest.raises(InvalidPatchError, match="not the one that") as caught:
        load_series_patch(stored, stored.variants[0])
    assert caught.value.where == "p1/1.patch"
    assert caught.value.found == "sha256 " + digest_of(TEXT + b"\n")


def test_a_changed_former_text_is_not_taken(tmp_path: Path) -> None:
    stored = read_stored_patch(_make_patch(tmp_path, former=b""))
    with pytest.raises(InvalidPatchError, match="not the one that"):
        load_series_patch(stored, stored.variants[0])


@pytest.mark.parametrize(
    ("text", "path", "expected", "found"),
    [
        (
            TEXT[: TEXT.index(b"--- /dev/null")],
            "pkg/new.py",
            "1 hunk, 1 line added, 0 removed",
            "nothing",
        ),
        (
            TEXT + b"--- a/pkg/b.py\n+++ b/pkg/b.py\n@@ -1 +1 @@\n-1\n+2\n",
            "pkg/b.py",
            "nothing",
            "1 hunk, 1 line added, 1 removed",
        ),
        (
            TEXT.replace(b"@@ -1,2 +1,3 @@", b"@@ -1,2 +1,4 @@").replace(b"+    x = 1\n", b"+    x = 1\n+    z = 1\n"),
            "pkg/a.py",
            "1 hunk, 1 line added, 0 removed",
            "1 hunk, 2 lines added, 0 removed",
        ),
    ],
    ids=["a file lost", "a file more", "a line more"],
)
def test_a_text_that_lost_or_gained_something_is_not_taken(
    tmp_path: Path, text: bytes, path: str, expected: str, found: str
) -> None:
    toml = TOML.replace(digest_of(TEXT), digest_of(text))
    stored = read_stored_patch(_make_patch(tmp_path, toml, text))
    with pytest.raises(InvalidPatchError) as caught:
        load_series_patch(stored, stored.variants[0])
    assert caught.value.what == f"the patch does not hold for {path} what patch.toml says"
    assert (caught.value.expected, caught.value.found) == (expected, found)


def test_a_missing_text_is_an_error(tmp_path: Path) -> None:
    folder = _make_patch(tmp_path)
    (folder / "1.patch").unlink()
    stored = read_stored_patch(folder)
    with pytest.raises(InvalidPatchError, match="cannot be read"):
        load_series_patch(stored, stored.variants[0])


def test_a_folder_without_patch_toml_is_an_error_and_hidden_ones_do_not_count(tmp_path: Path) -> None:
    _make_patch(tmp_path)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "README").write_text("")
    assert [patch.id for patch in read_store(tmp_path)] == ["p1"]
    (tmp_path / "half").mkdir()
    with pytest.raises(InvalidPatchError, match=r"needs a readable patch\.toml"):
        read_store(tmp_path)


def test_an_unknown_id_names_the_nearest(tmp_path: Path) -> None:
    _make_patch(tmp_path)
    with pytest.raises(UsageError, match="no patch is called 'p11'") as caught:
        open_stored_patch(tmp_path, "p11")
    assert caught.value.hints == ("did you mean 'p1'?", "provision patches")


def test_every_patch_that_travels_with_the_tool_is_whole() -> None:
    patches = read_store(patches_folder())
    assert patches
    for patch in patches:
        for variant in patch.variants:
            loaded = load_series_patch(patch, variant)
            assert loaded.patch.changes
            assert loaded.cuts.keys() == {file.path for file in variant.manifest.files}


@pytest.mark.parametrize("text", ["abc1234", "A" * 40, "g" * 40, "a" * 41, " " + "a" * 40, ""])
def test_the_commit_of_a_merge_is_a_full_one(text):
    toml = TOML.replace("fixes =", f'merged_as = "{text}"\nfixes =')
    with pytest.raises(InvalidPatchError, match="not a full commit") as caught:
        parse_patch_toml(toml, folder=Path("p1"), where="p1")
    assert caught.value.where == "p1: merged_as"


def test_the_commit_of_a_merge_comes_with_the_text(tmp_path):
    folder = tmp_path / "p1"
    (folder / "former").mkdir(parents=True)
    (folder / "1.patch").write_bytes(TEXT)
    (folder / "former" / f"{digest_of(FORMER)}.patch").write_bytes(FORMER)
    (folder / "patch.toml").write_text(TOML.replace("fixes =", f'merged_as = "{"a" * 40}"\nfixes ='))
    patch = read_stored_patch(folder)
    assert patch.merged_as == load_series_patch(patch, patch.variants[0]).merged_as == "a" * 40


def test_a_byte_order_mark_before_a_patch_toml_is_passed_over():
    plain, marked = (parse_patch_toml(text, folder=Path("p1"), where="p1") for text in (TOML, "\ufeff" + TOML))
    assert marked == plain
