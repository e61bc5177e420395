"""Files that are to be written compile, by real interpreters."""

import sys
from pathlib import Path

import pytest

from provisioner.environment.syntax import SyntaxFinding, find_broken
from provisioner.errors import EnvironmentConflictError

OWN = Path(sys.executable)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (b"def f(:\n", 1),
        (b"x = 1\nreturn x\n", 2),  # found by the compiler, not by the grammar
        (b"x = 1\n  y = 2\n", 2),
        (b"# coding: utf-8\ns = '\xff'\n", 2),
        (b"x = '\0'\n", 1),
        (b"x = " + b"(" * 300 + b")" * 300 + b"\n", 1),
        (b"<<<<<<< ours\nx = 1\n=======\n", 1),
    ],
)
def test_what_is_no_python_is_found_with_its_line(source: bytes, line: int) -> None:
    (found,) = find_broken(OWN, {"a/good.py": b"x = 1\n", "a/b c.py": source, "a/other.py": b""})
    assert (found.path, found.line) == ("a/b c.py", line)
    assert found.message


def test_what_is_python_is_not_run(tmp_path: Path) -> None:
    sources = {
        "a.py": f"open({str(tmp_path / 'ran')!r}, 'w')\n".encode(),
        "latin.py": b"# -*- coding: latin-1 -*-\ns = '\xe9'\n",
        "bom.py": b"\xef\xbb\xbfx = 1\r\ny = '\\d'\r\n",
        "no_end.py": b"x = 1",
    }
    assert find_broken(OWN, sources) == ()
    assert list(tmp_path.iterdir()) == []


def test_the_named_python_decides() -> None:
    """Its grammar counts, not ours: ``type X = int`` is Python from 3.12 on."""
    newer = sorted(Path(sys.base_prefix).parent.glob("3.1[2-9]*/bin/python3"))
    if not newer or sys.version_info >= (3, 12):
        pytest.skip("needs a Python before 3.12 here and a later one beside it")
    source = {"x.py": b"type X = int\n"}
    assert find_broken(newer[0], source) == ()
    assert find_broken(OWN, source) == (SyntaxFinding(path="x.py", line=1, message="invalid syntax"),)


def test_a_python_that_does_not_answer(tmp_path: Path) -> None:
    for program in (tmp_path / "none", Path("/bin/false")):
        with pytest.raises(EnvironmentConflictError, match="cannot compile"):
            find_broken(program, {"x.py": b""})


def test_no_file_takes_no_process() -> None:
    assert find_broken(Path("/nowhere"), {}) == ()
