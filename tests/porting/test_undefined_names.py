"""Names that a module uses and binds nowhere."""

import pytest

from provisioner.porting.undefined_names import find_unbound


@pytest.mark.parametrize(
    ("source", "unbound"),
    [
        (b"x = y\n", {"y"}),
        (b"def f(a):\n    return a + b\n", {"b"}),
        (b"def f():\n    return later\n\nlater = 1\n", set()),
        (b"def f():\n    global made\n    made = 1\n\ndef g():\n    return made\n", set()),
        (b"import os.path as p, sys\nprint(p, sys, len)\n", set()),
        (b"from os import *\nprint(whatever)\n", set()),
        (b"class C:\n    a = 1\n    b = a\n    def m(self):\n        return a\n", {"a"}),
        (b"def f(n):\n    return [i + n for i in range(n)] + [i]\n", {"i"}),
        (b"def f():\n    def g():\n        return held\n    held = 1\n    return g\n", set()),
        (b"try:\n    1\nexcept E as e:\n    print(e)\n", {"E"}),
        (b"def f(a: T) -> U: ...\n", {"T", "U"}),
        (b"from __future__ import annotations\nprint(__name__, __file__)\n", set()),
        (b"if (n := 3) and n: pass\n", set()),
    ],
)
def test_unbound_names(source: bytes, unbound: set[str]):
    assert find_unbound(source, "m.py") == unbound


def test_what_is_no_python_is_refused():
    with pytest.raises(SyntaxError):
        find_unbound(b"def (:\n", "m.py")
