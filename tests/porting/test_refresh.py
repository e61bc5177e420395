"""Three-way refresh with git's real merge, on small files."""

from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from provisioner.digests import digest_of
from provisioner.errors import ConflictError, InvalidPatchError
from provisioner.patching.diff import parse_patch, print_patch
from provisioner.patching.hunks import apply_change
from provisioner.patching.model import SeriesPatch
from provisioner.porting.merge import merge_with_git
from provisioner.porting.refresh import Fate, refresh_patch
from provisioner.series.refresh import (
    bases_of,
    continue_refresh,
    prove_refresh,
    variant_range,
    write_conflicts,
    write_variant,
)
from provisioner.series.store import load_series_patch, open_stored_patch

BASE = b"".join(b"line %d\n" % number for number in range(1, 21))
PATCH = b"""\
--- a/m/a.py
+++ b/m/a.py
@@ -2,3 +2,4 @@
 line 2
 line 3
+added = 1
 line 4
@@ -16,3 +17,3 @@
 line 16
-line 17
+changed = 17
 line 18
"""
ITEM = SeriesPatch(patch=parse_patch(PATCH, id="p", source="p.patch"))


def refresh(new: bytes | None, *, moved: dict[str, str] | None = None):
    target = (moved or {}).get("m/a.py", "m/a.py")
    return refresh_patch(ITEM, {"m/a.py": BASE}, {target: new}, moved or {}, merge_with_git)


def apply_to(patch, content: bytes) -> bytes | None:
    (change,) = patch.changes
    applied = apply_change(content, change)
    return getattr(applied, "content", None)


def test_an_unchanged_build_gives_the_same_change():
    found = refresh(BASE)
    assert found.files[0].fate is Fate.CARRIED
    assert found.lost == ()
    assert apply_to(found.patch, BASE) == found.files[0].merged


def test_changed_surroundings_are_merged_and_exact_afterwards():
    new = b"# above\n" + BASE.replace(b"line 15\n", b"line fifteen\n")
    found = refresh(new)
    assert found.lost == ()
    assert b"line fifteen" in print_patch(found.patch)
    item = prove_refresh(found, found.patch)
    assert apply_to(item.patch, new) == found.files[0].merged


def test_a_hunk_that_upstream_has_is_no_loss_but_is_told():
    new = BASE.replace(b"line 17\n", b"changed = 17\n")
    found = refresh(new)
    assert found.files[0].fate is Fate.CARRIED
    assert found.lost == ("m/a.py: -line 17", "m/a.py: +changed = 17")


def test_a_patch_that_upstream_has_whole_is_a_no_op():
    merged = refresh(BASE).files[0].merged
    found = refresh(merged + b"more\n")
    assert found.files[0].fate is Fate.MERGED_UPSTREAM
    assert found.patch is None
    assert found.lost == ()


def test_a_moved_file_is_followed():
    found = refresh(BASE, moved={"m/a.py": "n/b.py"})
    assert found.files[0].fate is Fate.MOVED
    assert b"+++ b/n/b.py" in print_patch(found.patch)


def test_a_file_that_is_gone_loses_its_lines_and_says_so():
    found = refresh(None)
    assert found.files[0].fate is Fate.TARGET_MISSING
    assert found.patch is None
    assert len(found.lost) == 3


def test_a_real_conflict_waits_for_a_person(tmp_path: Path):
    new = BASE.replace(b"line 17\n", b"line seventeen\n")
    found = refresh(new)
    assert [file.fate for file in found.files] == [Fate.CONFLICT]
    write_conflicts(found, tmp_path)
    place = tmp_path / "merged" / "m" / "a.py"
    assert b"<<<<<<< new build" in place.read_bytes()
    assert (tmp_path / "versions" / "base" / "m" / "a.py").read_bytes() == BASE
    with pytest.raises(ConflictError, match="not merged yet"):
        continue_refresh(ITEM, found, tmp_path)
    place.write_bytes(new.replace(b"line 3\n", b"line 3\nadded = 1\n").replace(b"line seventeen\n", b"changed = 17\n"))
    done = continue_refresh(ITEM, found, tmp_path)
    assert done.lost == ("m/a.py: -line 17",)
    assert prove_refresh(done, done.patch).patch == done.patch


def test_a_patch_that_never_fitted_its_own_base_is_refused():
    with pytest.raises(ConflictError, match="cut against"):
        refresh_patch(ITEM, {"m/a.py": b"other\n"}, {"m/a.py": BASE}, {}, merge_with_git)


def test_the_users_git_configuration_does_not_matter(monkeypatch: pytest.MonkeyPatch, own_home: Path):
    (own_home / ".gitconfig").write_text("[merge]\n\tconflictStyle = nonsense\n[core]\n\tautocrlf = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(own_home / ".gitconfig"))
    result = merge_with_git(b"a\r\nb\n", b"a\r\nB\n", b"x\na\r\nb\n")
    assert (result.content, result.conflicts) == (b"x\na\r\nB\n", 0)


SOURCE = b"def kernel(x, signal):\n    y = x + 1\n\n\n    z = y\n    return z\n"
USES_SIGNAL = b"""\
--- a/m/a.py
+++ b/m/a.py
@@ -5,2 +5,4 @@
     z = y
+    if signal:
+        z = 0
     return z
"""


def carry_signal(new: bytes):
    item = SeriesPatch(patch=parse_patch(USES_SIGNAL, id="p", source="p.patch"))
    return item, refresh_patch(item, {"m/a.py": SOURCE}, {"m/a.py": new}, {}, merge_with_git)


def test_a_clean_merge_that_uses_a_name_of_the_old_build_is_a_conflict(tmp_path: Path):
    item, found = carry_signal(SOURCE.replace(b"x, signal", b"x"))
    assert found.files[0].fate is Fate.CONFLICT
    assert "signal" in found.files[0].why
    write_conflicts(found, tmp_path)
    with pytest.raises(ConflictError, match="signal"):
        continue_refresh(item, found, tmp_path)
    merged = tmp_path / "merged" / "m" / "a.py"
    merged.write_bytes(merged.read_bytes().replace(b"if signal:", b"if x < 0:"))
    done = continue_refresh(item, found, tmp_path)
    assert apply_to(done.patch, found.files[0].new) == merged.read_bytes()


def test_names_that_the_new_build_itself_leaves_unbound_are_its_own_affair():
    _, found = carry_signal(SOURCE + b"\n\nprint(nobody_binds_this)\n")
    assert found.files[0].fate is Fate.CARRIED


STORE = """\
schema = 1
id = "p"
title = "A small patch"
fixes = "Nothing."
distribution = "vllm"

[[variant]]
file = "1.0.patch"
versions = ">=1.0,<1.1"
cut_against = "1.0.0"
sha256 = "{sha256}"
former = []

[[variant.files]]
path = "m/a.py"
hunks = 2
added = 2
removed = 1
scopes = ["", ""]
"""


def test_a_written_variant_is_the_one_that_the_store_opens_for_that_release(tmp_path: Path):
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / "1.0.patch").write_bytes(PATCH)
    (folder / "patch.toml").write_text(STORE.format(sha256=digest_of(PATCH)))
    new = b"# above\n" + BASE
    found = refresh(new)
    stored = open_stored_patch(tmp_path, "p")
    item = prove_refresh(found, found.patch)
    write_variant(stored, item, bases_of(found), Version("1.1.2"), stored.variants[0])
    again = open_stored_patch(tmp_path, "p")
    variant = again.variant_for(Version("1.1.0"))
    assert again.variant_for(Version("1.1.3rc1.dev7+g1234567")) is None
    assert [each.file for each in again.variants] == ["1.1.patch", "1.0.patch"]
    assert variant.bases == {"m/a.py": digest_of(new)}
    assert apply_to(load_series_patch(again, variant).patch, new) == found.files[0].merged
    with pytest.raises(InvalidPatchError, match="already"):
        write_variant(again, item, bases_of(found), Version("1.1.2"), variant)


@pytest.mark.parametrize(
    ("cut_against", "within", "outside"),
    [
        ("0.26.0", ["0.26.0", "0.26.0.post1"], ["0.26.1rc1.dev1024+g1fe3a1571", "0.26.1", "0.27.0"]),
        ("0.25.1", ["0.25.0", "0.25.1"], ["0.25.2rc1.dev3+gabc", "0.24.0"]),
        ("0.26.1rc1.dev1024+g1fe3a1571", ["0.26.1rc1.dev1+gabc", "0.26.1"], ["0.26.0", "0.27.0"]),
    ],
)
def test_a_release_and_the_builds_of_main_after_it_are_different_texts(
    cut_against: str, within: list[str], outside: list[str]
):
    versions = SpecifierSet(variant_range(Version(cut_against)))
    assert [text for text in within if not versions.contains(text, prereleases=True)] == []
    assert [text for text in outside if versions.contains(text, prereleases=True)] == []
