from provisioner.digests import digest_of
from provisioner.drift.explain import explain_patch, find_nearest
from provisioner.patching.diff import parse_patch
from provisioner.patching.model import Cut, FileFacts, SeriesPatch
from provisioner.patching.series import judge_series

BASE = b"""\
import os


class Op:
    def scale(self, x):
        y = x * 2
        return y

    def shift(self, x):
        return x
"""
PATCH = b"""\
--- a/m/ops.py
+++ b/m/ops.py
@@ -5,3 +5,4 @@ class Op:
     def scale(self, x):
         y = x * 2
+        y = max(y, 0)
         return y
"""


def account_on(content: bytes, before: bytes = BASE):
    patch = parse_patch(PATCH, id="p", source="p.patch")
    item = SeriesPatch(patch=patch, cuts={"m/ops.py": Cut(scopes=("Op.scale",))})
    facts = {"m/ops.py": fact(content)}
    (verdict,) = judge_series([item], facts).patches
    return explain_patch(verdict, patch, facts, {"m/ops.py": fact(before)})


def fact(content: bytes) -> FileFacts:
    return FileFacts(path="m/ops.py", content=content, pristine=content, recorded=digest_of(content))


def test_what_holds_needs_no_account():
    account = account_on(BASE)
    assert (account.lines, account.views) == ((), ())


def test_changed_context_is_shown_with_its_line():
    account = account_on(b"# above\n" + BASE.replace(b"y = x * 2", b"y = x * 3"))
    assert account.lines == (
        "m/ops.py, hunk 1: cut for line 5 in Op.scale; nearest place is line 6, 2 of 3 lines agree",
        "m/ops.py, hunk 1: line 7 is 'y = x * 3', wanted 'y = x * 2'",
    )
    (view,) = account.views
    assert view.line == 6
    assert view.wanted[1] != view.found[1]
    assert view.wanted[0] == view.found[0]


def test_a_changed_signature_is_named():
    account = account_on(BASE.replace(b"def scale(self, x):", b"def scale(self, x, *, by=2):"))
    assert account.lines[-1] == "m/ops.py: the signature of Op.scale changed: (self, x) became (self, x, *, by=2)"


def test_a_renamed_function_is_named():
    account = account_on(BASE.replace(b"def scale(", b"def scaled("))
    assert "m/ops.py: Op.scale is no longer there; the nearest name is Op.scaled" in account.lines


def test_a_file_with_none_of_it():
    account = account_on(b"nothing = 1\n")
    assert "not one of its lines stands in the file" in account.lines[0]
    assert account.views[0].found == ()


def test_the_nearest_of_equal_places_is_the_own_one():
    (change,) = parse_patch(PATCH, id="p", source="p").changes
    lines = (BASE.decode() + BASE.decode()).split("\n")
    place = find_nearest(change.hunks[0], lines)
    assert place is not None
    assert (place.start, place.first_difference) == (4, None)
