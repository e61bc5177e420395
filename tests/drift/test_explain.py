import argparse
import ast
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version

from provisioner.digests import digest_of
from provisioner.documents.recipe import DriftResponse, PatchPolicy
from provisioner.drift.explain import explain_patch, find_nearest, find_signature, tell_changes
from provisioner.drift.model import Cell, Column
from provisioner.drift.scan import build_of
from provisioner.patching.diff import parse_patch
from provisioner.patching.model import Cut, FileFacts, SeriesPatch
from provisioner.patching.series import judge_series
from provisioner.wheels.names import Candidate

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


def cell_on(content: bytes) -> Cell:
    patch = parse_patch(PATCH, id="p", source="p.patch")
    item = SeriesPatch(patch=patch, cuts={"m/ops.py": Cut(scopes=("Op.scale",))})
    facts = {"m/ops.py": fact(content)}
    (verdict,) = judge_series([item], facts).patches
    account = explain_patch(verdict, patch, facts)
    return Cell(
        recipe="r",
        place=0,
        text=patch.digest,
        policy=PatchPolicy.REQUIRED,
        verdict=verdict,
        response=DriftResponse.FAIL,
        key="",
        reasons=account.lines,
        views=account.views,
        signatures=account.signatures,
    )


def account_on(content: bytes, before: bytes = BASE) -> Cell:
    """The cell of ``content`` beside one on which the patch holds."""
    cells = (cell_on(before), cell_on(content))
    columns = [
        Column(build=build_of(Candidate(filename="", version=Version(str(age)))), recipes=("r",), cells=(cell,))
        for age, cell in enumerate(cells)
    ]
    return tell_changes(columns)[1].cells[0]


def fact(content: bytes) -> FileFacts:
    return FileFacts(path="m/ops.py", content=content, pristine=content, recorded=digest_of(content))


def test_what_holds_needs_no_account():
    cell = account_on(BASE)
    assert (cell.account, cell.views) == ((), ())


def test_changed_context_is_shown_with_its_line():
    account = account_on(b"# above\n" + BASE.replace(b"y = x * 2", b"y = x * 3"))
    assert account.account == (
        "m/ops.py, hunk 1: cut for line 5 in Op.scale; nearest place is line 6, 2 of 3 lines agree",
        "m/ops.py, hunk 1: line 7 is 'y = x * 3', wanted 'y = x * 2'",
    )
    (view,) = account.views
    assert view.line == 6
    assert view.wanted[1] != view.found[1]
    assert view.wanted[0] == view.found[0]


def test_a_changed_signature_is_named():
    account = account_on(BASE.replace(b"def scale(self, x):", b"def scale(self, x, *, by=2):"))
    assert account.account[-1] == "m/ops.py: the signature of Op.scale changed: (self, x) became (self, x, *, by=2)"


def test_a_renamed_function_is_named():
    account = account_on(BASE.replace(b"def scale(", b"def scaled("))
    assert "m/ops.py: Op.scale is no longer there; the nearest name is Op.scaled" in account.account


def test_a_file_with_none_of_it():
    account = account_on(b"nothing = 1\n")
    assert "not one of its lines stands in the file" in account.account[0]
    assert account.views[0].found == ()


def test_the_nearest_of_equal_places_is_the_own_one():
    (change,) = parse_patch(PATCH, id="p", source="p").changes
    lines = (BASE.decode() + BASE.decode()).split("\n")
    place = find_nearest(change.hunks[0], lines)
    assert place is not None
    assert (place.start, place.first_difference) == (4, None)


def test_signatures_compare_where_files_are_searched_and_parsed():
    source = """\
class One:
    def scale(self, x: int = 1, *, by: "str" = ":"  # a colon: here
    ) -> int:
        return x

    def twice(self): ...

class Two(One, metaclass=type):
    def twice(self, again): ...

async def alone(first, /, *rest): return "def alone(no):"
"""
    wanted = {
        "One.scale": "self, x: int=1, *, by: 'str'=':'",
        "One.twice": "self",
        "Two.twice": "self, again",
        "Two": "One",
        "alone": "first, /, *rest",
        "One.absent": None,
    }
    assert {scope: find_signature(source, scope) for scope in wanted} == wanted
    assert find_signature("def broken(:\n", "broken") is None


@pytest.mark.parametrize("module", [argparse, typing])
def test_signatures_are_those_of_the_parser(module: ModuleType) -> None:
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    wanted = dict(signatures_by_parser(ast.parse(source), ""))
    assert len(wanted) > 50
    assert {scope: find_signature(source, scope) for scope in wanted} == wanted


def signatures_by_parser(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}", ast.unparse(child.args)
            inner = f"{prefix}{child.name}."
        elif isinstance(child, ast.ClassDef):
            yield f"{prefix}{child.name}", ", ".join(map(ast.unparse, child.bases))
            inner = f"{prefix}{child.name}."
        yield from signatures_by_parser(child, inner)
