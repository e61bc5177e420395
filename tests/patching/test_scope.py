"""The scope of every line agrees with the parser's, on this interpreter's own sources and on hard texts."""

import ast
import io
import sysconfig
import tokenize
from itertools import pairwise
from pathlib import Path

import pytest

from provisioner.patching.scope import column_of, map_scopes


def scopes_by_parser(source: bytes) -> dict[int, str]:
    """The scope of every line (from 1) that holds code, by ast and tokenize: a statement's first line is in what
    encloses it, its further lines are in the statement's own scope."""
    owners: dict[int, tuple[str, str]] = {}

    def walk(node: ast.AST, scope: str) -> None:
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            for child in getattr(node, field, None) or []:
                if isinstance(child, ast.excepthandler | ast.match_case):
                    walk(child, scope)
                    continue
                inner = scope
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    inner = f"{scope}.{child.name}" if scope else child.name
                    for decorator in child.decorator_list:
                        owners.setdefault(decorator.lineno, (scope, scope))
                assert isinstance(child, ast.stmt)
                owners.setdefault(child.lineno, (scope, inner))
                walk(child, inner)

    walk(ast.parse(source), "")
    found: dict[int, str] = {}
    start: int | None = None
    silent = {tokenize.ENCODING, tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type in silent:
            continue
        start = token.start[0] if start is None else start
        if token.type == tokenize.NEWLINE:
            if start in owners:
                outer, inner = owners[start]
                found |= dict.fromkeys(range(start + 1, token.start[0] + 1), inner)
                found[start] = outer
            start = None
    return found


def assert_agrees(source: bytes) -> int:
    scopes = map_scopes(source)
    assert scopes is not None
    wanted = scopes_by_parser(source)
    offset = 0
    for number, line in enumerate(source.split(b"\n"), start=1):
        if number in wanted:
            assert scopes.scope_at(offset, column_of(line)) == wanted[number], (number, line)
        offset += len(line) + 1
    return len(wanted)


def standard_library() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = ["ast", "argparse", "asyncio/tasks", "dataclasses", "enum", "functools", "inspect", "logging/__init__"]
    names += [
        "pathlib",
        "pdb",
        "pickle",
        "re/_parser",
        "subprocess",
        "tarfile",
        "tokenize",
        "turtle",
        "typing",
        "zipfile",
    ]
    found = [folder / f"{name}.py" for name in names]
    return [file for file in found if file.is_file()]


@pytest.mark.parametrize("file", standard_library(), ids=lambda file: file.name)
def test_scopes_of_real_sources_agree_with_the_parser(file: Path) -> None:
    source = file.read_bytes().replace(b"\r\n", b"\n")
    assert assert_agrees(source) > 100


HARD = b'''\
"""Module text
def not_this():
    pass
"""
import os
x = (
1,
    2)
if x:
    def in_if():
        return {
  "a": 1,
    }
else:
\tdef tabs():
\t\treturn 1

@decorate(
    a,
)
@other
class C(
    Base,
):
    """Text
class NotThis:
    """
    y = 'it\\'s' + "a \\
def nor_this(): \\
"
    async def m(
        self,
        z="def q(): pass",  # def r(): (
    ) -> int:
        def inner(): return 1
        # a comment (

        w = [
def_ for def_ in z
        ]
        return w \\
  or x
    v = 1
def last(): pass
class One: z = 1
\x0cdef after_form_feed():
    s = r"\\\\" + rb'\\\\' + f"{x}" + \'\'\'a"b\'\'\'
    return s
'''


def test_scopes_of_hard_sources_agree_with_the_parser() -> None:
    assert assert_agrees(HARD) > 30


def lines_of(source: bytes) -> list[int]:
    offsets = [0]
    for line in source.split(b"\n")[:-1]:
        offsets.append(offsets[-1] + len(line) + 1)
    return offsets


SOURCE = b"""\
class C:
    def f(self):
        return 1

    def g(self):
        return (
            2
        )
# end
"""


@pytest.mark.parametrize(
    ("line", "new", "scope"),
    [
        (4, b"        x = 1", "C.f"),
        (4, b"    def h(self):", "C"),
        (4, b"def top():", ""),
        (4, b"    # a comment", "C"),
        (4, b"", "C.f"),
        (5, b"    @decorated", "C"),
        (3, b"        x = 1", "C.f"),
        (7, b"x", "C.g"),
        (8, b"x", "C.g"),
        (9, b"        x = 1", "C.g"),
        (10, b"    def h(self):", "C"),
        (1, b"import os", ""),
        (2, b"    x = 1", "C"),
    ],
)
def test_a_new_line_lands_where_its_indentation_says(line: int, new: bytes, scope: str) -> None:
    scopes = map_scopes(SOURCE)
    assert scopes is not None
    offset = lines_of(SOURCE)[line - 1]
    indent = column_of(new) if new else None
    assert scopes.scope_at(offset, indent) == scope
    after = map_scopes(SOURCE[:offset] + new + b"\n" + SOURCE[offset:])
    assert after is not None
    assert after.scope_at(offset, indent) == scope


def test_the_end_of_a_file_without_newline_is_a_place() -> None:
    scopes = map_scopes(b"def f():\n    return 1")
    assert scopes is not None
    assert scopes.scope_at(21, 4) == "f"
    assert scopes.scope_at(21, 0) == ""


def test_lone_carriage_returns_leave_the_scopes_unknown() -> None:
    assert map_scopes(b"x = 1\rdef f():\n    pass\n") is None


def test_damaged_sources_still_get_an_answer() -> None:
    for cut in range(0, len(HARD), 7):
        scopes = map_scopes(HARD[:cut])
        assert scopes is not None
        assert isinstance(scopes.scope_at(cut, 4), str)


def test_columns_count_tabs_and_form_feeds_as_python_does() -> None:
    columns = [column_of(line) for line in (b"x", b"  x", b"\tx", b" \tx", b"\t x", b"  \x0c x")]
    assert columns == [0, 2, 8, 8, 9, 1]
    assert all(a <= b for a, b in pairwise(columns[:5]))


OVERLOADED = b'''\
class C(Base, metaclass=Meta):
    def f(self): return 1
    async def f(
        self, a="):", *, b=1,
    ) -> int:  # two lines
        """Doc."""
if True:
    def g(x): pass
'''


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("C", b"class C(Base, metaclass=Meta):"),
        ("C.f", b'async def f(\n        self, a="):", *, b=1,\n    ) -> int:  # two lines'),
        ("g", b"def g(x): pass\n"),
        ("f", None),
        ("C.g", None),
    ],
)
def test_the_last_definition_of_a_name(name: str, text: bytes | None) -> None:
    scopes = map_scopes(OVERLOADED)
    assert scopes is not None
    assert list(scopes.names()) == ["C", "C.f", "C.f", "g"]
    assert scopes.definition(name) == text
