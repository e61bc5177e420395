"""A long search for texts that break the parser; not collected by the test run.

    python -m tests.fuzz_diff [SECONDS]

Every text must be refused with InvalidPatchError or be read so that printing and reading it again gives the same
changes, with every target a safe path and every hunk's counts those of its lines.
"""

import sys
import time
from collections.abc import Callable
from random import Random

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from provisioner.errors import InvalidPatchError
from provisioner.patching.diff import parse_patch, print_patch
from provisioner.patching.hunks import Applied, apply_change, reverse_of
from provisioner.patching.model import Patch, paths_of

PIECES = (
    *(b"diff --git a/x.py b/x.py\n", b"diff --git a/x.py b/y.py\n", b'diff --git "a/\\303\\251" "b/\\303\\251"\n'),
    *(b"index 1234567..89abcde 100644\n", b"index 0000000..e69de29\n", b"new file mode 100644\n"),
    *(b"deleted file mode 100644\n", b"old mode 100644\n", b"new mode 100755\n", b"similarity index 90%\n"),
    *(b"similarity index 100%\n", b"rename from x.py\n", b"rename to y.py\n", b"copy from x.py\n"),
    *(b"--- a/x.py\n", b"+++ b/x.py\n", b"--- x.py\n", b"+++ x.py\n", b"--- /dev/null\n", b"+++ /dev/null\n"),
    *(b"+++ b/y.py\n", b"--- a/../x\n", b"+++ b/../x\n", b"--- a/x.py\t1970-01-01 00:00:00 +0000\n"),
    *(b"+++ b/x.py\t1970-01-01 01:00:00.0 +0100\n", b"@@ -1 +1 @@\n", b"@@ -1,2 +1,2 @@ def f():\n"),
    *(b"@@ -0,0 +1 @@\n", b"@@ -1 +0,0 @@\n", b"@@ -9,2 +9,3 @@\n", b" a\n", b"-a\n", b"+a\n", b"-b\n", b"+b\n"),
    *(b"\n", b"+c\r\n", b"-a\r\n", b" a\r\n", b"\\ No newline at end of file\n", b"-- \n", b"2.39.5\n", b"prose\n"),
    *(b"Only in a: b\n", b"GIT binary patch\n", b"Binary files a/x and b/x differ\n", b"***************\n"),
    *(b"From 0123456789012345678901234567890123456789 x\n", b"\xff\xfe", b"\xef\xbb\xbf", b"\x00", b"\r"),
    *(b"-", b"+", b" ", b"@@"),
)
EDIT = b"@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
CREATION = b"@@ -0,0 +1,2 @@\n+a\n+b\n"
DELETION = b"@@ -1 +0,0 @@\n-a\n"
INSERTION = b"@@ -5 +5,2 @@\n a\n+b\n"
SECTIONS = (
    b"--- a/x.py\n+++ b/x.py\n" + EDIT + INSERTION,
    b"diff --git a/n.py b/n.py\nnew file mode 100644\n--- /dev/null\n+++ b/n.py\n" + CREATION,
    b"diff --git a/o.py b/p.py\nsimilarity index 90%\nrename from o.py\nrename to p.py\n--- a/o.py\n+++ b/p.py\n"
    + EDIT,
    b"diff --git a/g.py b/g.py\ndeleted file mode 100644\n--- a/g.py\n+++ /dev/null\n" + DELETION,
)
SPLINTERS = (b"", b"\n", b"\r", b"-", b"+", b" ", b"1", b"\x00")
TOKENS = (b"\n-- \n", b"\\ No", b"0", b"9", b",", b"@@", b"a/", b"/", b" b/", b"\t", b'"')


@st.composite
def pieced(draw: st.DrawFn) -> bytes:
    """Pieces of patches in any order."""
    return b"".join(draw(st.lists(st.sampled_from((*PIECES, EDIT, CREATION, DELETION, INSERTION)), max_size=14)))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A right patch with a few bytes changed, dropped or doubled."""
    text = bytearray(b"".join(draw(st.lists(st.sampled_from(SECTIONS), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(len(text) - 1, 0)))
        text[at : at + draw(st.integers(0, 3))] = draw(st.sampled_from(SPLINTERS))
    return bytes(text)


def read(text: bytes) -> Patch | InvalidPatchError:
    """The patch, or why there is none."""
    try:
        return parse_patch(text, id="p", source="p")
    except InvalidPatchError as error:
        return error


def check(text: bytes) -> None:
    """The law of the parser."""
    patch = read(text)
    if isinstance(patch, InvalidPatchError):
        assert patch.where is not None
        assert patch.where.startswith("p:")
        assert 1 <= int(patch.where[2:]) <= text.count(b"\n") + 1
        return
    again = parse_patch(print_patch(patch), id="p", source="p")
    assert again.changes == patch.changes
    for change in patch.changes:
        for path in paths_of(change):
            assert path
            assert not path.startswith("/")
            assert not {"", ".", ".."} & set(path.split("/"))
        for hunk in change.hunks:
            assert hunk.old_count == sum(line.kind != "+" for line in hunk.lines)
            assert hunk.new_count == sum(line.kind != "-" for line in hunk.lines)
        assert reverse_of(reverse_of(change)).hunks == change.hunks
        for content in (None, b"", b"a\nb\n", b"a\r\nb\r\n", b"a"):
            done = apply_change(content, change)
            if isinstance(done, Applied):
                assert done.content is None or isinstance(done.content, bytes)


def write_at_random(random: Random) -> bytes:
    """Pieces in any order, or a right patch with a few bytes changed; some ten times faster than a strategy."""
    if random.random() < 0.5:
        return b"".join(random.choices((*PIECES, EDIT, CREATION, DELETION, INSERTION), k=random.randrange(1, 14)))
    text = bytearray(b"".join(random.choices(SECTIONS, k=random.randrange(1, 4))))
    for _ in range(random.randrange(4)):
        at = random.randrange(len(text) + 1)
        text[at : at + random.randrange(4)] = random.choice((*SPLINTERS, *TOKENS))
    return bytes(text)


def main() -> None:
    """Search for as many seconds as given (600), and report how many texts were tried."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 600.0
    end = time.monotonic() + seconds
    random = Random(time.time_ns())
    tried = 0

    def counted(text: bytes) -> None:
        nonlocal tried
        tried += 1
        try:
            check(text)
        except Exception as error:
            error.add_note(repr(text))
            raise

    searches: list[Callable[[], None]] = [
        settings(
            max_examples=500,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )(given(text=strategy)(counted))
        for strategy in (pieced(), damaged(), st.binary(max_size=200))
    ]
    while time.monotonic() < end:
        for search in searches:
            search()
        for _ in range(20_000):
            counted(write_at_random(random))
    sys.stderr.write(f"{tried} texts in {seconds:.0f} s, none broke the parser\n")


if __name__ == "__main__":
    main()
