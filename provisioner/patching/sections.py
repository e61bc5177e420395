"""Patch text to sections: what each file's part of the text says, line by line, before it is given a meaning. Pure.

Lines end at LF alone. A line's text keeps a carriage return only where it belongs to the patched file: when the header
lines of a section end in CRLF, the whole section was carried with CRLF and one CR is taken off each line.
"""

import re
from dataclasses import field, replace
from typing import NoReturn

from provisioner.errors import InvalidPatchError
from provisioner.patching.model import Hunk, HunkLine
from provisioner.records import dataclass

INDEX = re.compile(rb"([0-9a-f]{4,64})\.\.([0-9a-f]{4,64})(?: (\d{6}))?")
_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@(?:[ \t](.*))?")
_BOUNDARY = re.compile(rb"(?:From [0-9a-f]{40,64} |commit [0-9a-f]{40,64}\b)")
_ONLY_IN = re.compile(rb"Only in [^\s:]+: \S+")
_BINARY = re.compile(rb"(?:GIT binary patch|Binary files .+ and .+ differ)")
_TIME = re.compile(rb"[ \t]+\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d.*")
_EPOCH = re.compile(rb"[ \t](?:1970-01-01|1969-12-31)[ T](\d\d):(\d\d):00(?:\.0+)?(?: ([-+])(\d\d):?(\d\d))?[ \t]*$")
_EMPTY_BLOBS = (
    b"e69de29bb2d1d6434b8b29ae775ad8c2e48c5391",
    b"473a0f4c3be8a93681a267e3b1e9a7dcda1185436fe141f7749120a303721813",
)
_EXTENDED = (
    b"old mode ",
    b"new mode ",
    b"deleted file mode ",
    b"new file mode ",
    b"copy from ",
    b"copy to ",
    b"rename from ",
    b"rename to ",
    b"similarity index ",
    b"dissimilarity index ",
    b"index ",
)
_ESCAPES = {b"a": 7, b"b": 8, b"t": 9, b"n": 10, b"v": 11, b"f": 12, b"r": 13, b'"': 34, b"\\": 92}
_QUOTED = re.compile(rb'"((?:[^"\\]|\\(?:[abtnvfr"\\]|[0-3][0-7]{2}))*)"')


@dataclass(frozen=True, kw_only=True)
class Name:
    """A file name of a header, as written there; ``epoch`` where its timestamp says that there is no such file."""

    raw: bytes
    epoch: bool = False


@dataclass(kw_only=True)
class Section:
    """All that one file's part of the text says. Names are None for /dev/null; lines count from 1."""

    line: int
    commit: int
    crlf: bool
    old: Name | None = None
    new: Name | None = None
    git_header: bytes | None = None
    has_names: bool = False
    extended: dict[bytes, bytes] = field(default_factory=dict)
    hunks: list[Hunk] = field(default_factory=list)


def read_sections(text: bytes, source: str) -> list[Section]:
    """All sections of a patch text, in order; at least one.

    Raises InvalidPatchError, ``where`` being ``source:line``, at the first line that is not understood.
    """
    return _Parser(text, source).sections()


class _Parser:
    """Reads the lines of one text once, from top to bottom."""

    def __init__(self, text: bytes, source: str) -> None:
        self._source = source
        self._refuse_other_encodings(text)
        text = text.removeprefix(b"\xef\xbb\xbf")
        self._lines = text.split(b"\n")
        self._is_whole = self._lines[-1] == b""
        if self._is_whole:
            self._lines.pop()
        self._at = 0
        self._commit = 0

    def sections(self) -> list[Section]:
        found: list[Section] = []
        prose_is_free = True
        after_hunk = False
        while self._at < len(self._lines):
            line = self._line()
            section = self._read_section(line)
            if section is not None:
                found.append(section)
                prose_is_free, after_hunk = False, True
                continue
            self._refuse_what_is_no_unified_diff(line)
            if _BOUNDARY.match(line):
                self._commit += 1
                prose_is_free, after_hunk = True, False
            elif not prose_is_free:
                self._refuse_stray(line, after_hunk=after_hunk)
                after_hunk = False
            self._at += 1
        if not found:
            self._refuse_empty()
        return found

    # what stands between sections

    def _line(self, ahead: int = 0) -> bytes:
        at = self._at + ahead
        return self._lines[at].removesuffix(b"\r") if at < len(self._lines) else b""

    def _refuse_stray(self, line: bytes, *, after_hunk: bool) -> None:
        if line in (b"-- ", b"--") or line.strip() == b"":
            return
        if line[:1] in (b" ", b"+", b"-", b"\\", b"@"):
            self._fail("this line belongs to no hunk: the hunk before it says that it is complete")
        if after_hunk and not line.startswith((b"diff ", b"Index: ")):
            self._fail("text directly after a hunk")

    def _refuse_what_is_no_unified_diff(self, line: bytes) -> None:
        if line.startswith(b"@@ -"):
            self._fail("a hunk without a file header (--- and +++)")
        if line.startswith((b"diff --cc ", b"diff --combined ", b"@@@ ")):
            self._fail("a combined diff of a merge cannot be applied", hints=("git diff FIRST_PARENT MERGE",))
        if _BINARY.fullmatch(line):
            self._fail("a binary patch")
        if _ONLY_IN.fullmatch(line) and not self._commit:
            self._fail("the patch names a file without its content", hints=("make the patch again with: diff -ruN",))
        if line == b"***************":
            self._fail("a context diff, not a unified one", hints=("make the patch again with: diff -u",))

    def _refuse_empty(self) -> NoReturn:
        self._at = 0
        if all(not line.strip() for line in self._lines):
            self._fail("the patch is empty")
        self._at = len(self._lines) - 1
        self._fail("no file header (--- and +++, or diff --git) anywhere in the text")

    def _refuse_other_encodings(self, text: bytes) -> None:
        if text.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise InvalidPatchError(
                "the text is UTF-16", where=f"{self._source}:1", hints=("iconv -f UTF-16 -t UTF-8 OLD > NEW",)
            )

    # one section

    def _read_section(self, line: bytes) -> Section | None:
        if line.startswith(b"diff --git "):
            return self._read_git_section(line)
        if line.startswith(b"--- ") and self._line(1).startswith(b"+++ "):
            section = self._new_section()
            self._read_names(section)
            self._read_hunks(section)
            return section
        if line.startswith(b"--- ") and self._line(1).startswith(b"@@ -"):
            self._at += 1
            self._fail("a hunk without the second line of its file header (+++)")
        return None

    def _new_section(self) -> Section:
        crlf = self._lines[self._at].endswith(b"\r")
        return Section(line=self._at + 1, commit=self._commit, crlf=crlf)

    def _read_git_section(self, line: bytes) -> Section:
        section = self._new_section()
        section.git_header = line.removeprefix(b"diff --git ")
        self._at += 1
        self._read_extended_headers(section)
        line = self._line()
        if line.startswith(b"--- "):
            if not self._line(1).startswith(b"+++ "):
                self._at += 1
                self._fail("the second line of the file header (+++) is missing")
            self._read_names(section)
            self._read_hunks(section)
        else:
            self._refuse_what_is_no_unified_diff(line)
            self._refuse_after_headers(line)
            self._refuse_lost_hunks(section)
        return section

    def _read_extended_headers(self, section: Section) -> None:
        while self._at < len(self._lines):
            line = self._line()
            key = next((key for key in _EXTENDED if line.startswith(key)), None)
            if key is None:
                return
            if key in section.extended:
                self._fail(f"{key.decode().strip()} stands twice in one header")
            if key.startswith(b"copy "):
                self._fail(
                    "a copied file: the patch does not show what the copy holds",
                    hints=("make the patch again without copy detection: git diff --no-renames",),
                )
            section.extended[key] = line[len(key) :]
            self._at += 1

    def _refuse_after_headers(self, line: bytes) -> None:
        if self._at >= len(self._lines) or line.strip() == b"" or line in (b"-- ", b"--"):
            return
        if not (line.startswith(b"diff ") or _BOUNDARY.match(line)):
            self._fail("this line is no git header that is known")

    def _refuse_lost_hunks(self, section: Section) -> None:
        index = section.extended.get(b"index ")
        match = INDEX.fullmatch(index) if index is not None else None
        if match is None or match[1] == match[2]:
            return
        left = match[2] if b"new file mode " in section.extended else match[1]
        gone = b"deleted file mode " in section.extended or b"new file mode " in section.extended
        if gone and any(blob.startswith(left) for blob in _EMPTY_BLOBS):
            return
        self._at = section.line - 1
        self._fail("the header says that the content changes, but there is no hunk: the text is cut off")

    def _read_names(self, section: Section) -> None:
        section.crlf = self._lines[self._at].endswith(b"\r")
        section.old = self._read_name(b"--- ")
        section.new = self._read_name(b"+++ ")
        section.has_names = True
        if section.old is None and section.new is None:
            self._at -= 1
            self._fail("both sides of the file header are /dev/null")

    def _read_name(self, mark: bytes) -> Name | None:
        rest = self._line()[len(mark) :]
        raw = _bare_name(rest)
        if not raw:
            self._fail("the file header names no file, or its quotes are not understood")
        self._at += 1
        return None if raw == b"/dev/null" else Name(raw=raw, epoch=_is_epoch(rest))

    def _read_hunks(self, section: Section) -> None:
        if not self._line().startswith(b"@@"):
            self._fail("no hunk after the file header: the text is cut off or malformed")
        while self._line().startswith(b"@@"):
            section.hunks.append(self._read_hunk(section.hunks, crlf=section.crlf))

    def _read_hunk(self, before: list[Hunk], *, crlf: bool) -> Hunk:
        match = _HUNK.fullmatch(self._line())
        if match is None:
            self._fail("a malformed hunk header", expected="@@ -LINE,COUNT +LINE,COUNT @@", found=show(self._line()))
        old_start, new_start = int(match[1]), int(match[3])
        old_count = 1 if match[2] is None else int(match[2])
        new_count = 1 if match[4] is None else int(match[4])
        if (old_start == 0 and old_count) or (new_start == 0 and new_count):
            self._fail("a hunk cannot start at line 0 and hold lines")
        self._refuse_disorder(old_start, old_count, before)
        header = self._at
        self._at += 1
        lines = self._read_body(old_count, new_count, crlf=crlf)
        self._refuse_bad_body(lines, header)
        return Hunk(
            index=len(before) + 1,
            old_start=old_start,
            old_count=old_count,
            new_start=new_start,
            new_count=new_count,
            heading=(match[5] or b"").strip(),
            lines=lines,
        )

    def _refuse_disorder(self, old_start: int, old_count: int, before: list[Hunk]) -> None:
        if not before:
            return
        last = before[-1]
        if first_index(old_start, old_count) < first_index(last.old_start, last.old_count) + last.old_count:
            self._fail("hunks overlap or are out of order", expected=f"a start after line {last.old_start}")
        if any(not line.ends for line in last.lines):
            self._fail("a hunk after the end of the file")

    def _read_body(self, old_left: int, new_left: int, *, crlf: bool) -> tuple[HunkLine, ...]:
        out: list[HunkLine] = []
        lines = self._lines
        while old_left or new_left:
            if self._at >= len(lines):
                self._at = len(lines) - 1
                self._fail("the text ends inside a hunk", expected=f"{old_left} more old and {new_left} more new lines")
            line = lines[self._at]
            if crlf:
                line = line.removesuffix(b"\r")
            kind = line[:1]
            if kind == b"+" and new_left:
                out.append(HunkLine(kind="+", text=line[1:]))
                new_left -= 1
            elif kind == b"-" and old_left:
                out.append(HunkLine(kind="-", text=line[1:]))
                old_left -= 1
            elif (kind == b" " or line in (b"", b"\r")) and old_left and new_left:
                out.append(HunkLine(kind=" ", text=line[1:] if kind == b" " else line))
                old_left -= 1
                new_left -= 1
            elif kind == b"\\" and out and out[-1].ends:
                out[-1] = replace(out[-1], ends=False)
            else:
                self._fail(
                    "the hunk's counts disagree with its lines",
                    expected=f"{old_left} more old and {new_left} more new lines",
                    found=show(line),
                )
            self._at += 1
        self._refuse_half_a_line()
        if self._line().startswith(b"\\ ") and out and out[-1].ends:
            out[-1] = replace(out[-1], ends=False)
            self._at += 1
        return tuple(out)

    def _refuse_half_a_line(self) -> None:
        if self._at == len(self._lines) and not self._is_whole:
            self._at -= 1
            self._fail(
                "the last line has no newline, so the text may be cut off",
                hints=("if it is whole, end it: echo >> FILE",),
            )

    def _refuse_bad_body(self, lines: tuple[HunkLine, ...], header: int) -> None:
        old = [(line.text, line.ends) for line in lines if line.kind != "+"]
        new = [(line.text, line.ends) for line in lines if line.kind != "-"]
        if old == new:
            self._at = header
            self._fail("a hunk that changes nothing")
        for side in (old, new):
            if any(not ends for _, ends in side[:-1]):
                self._at = header
                self._fail("a line without newline that is not the last of the file")

    def _fail(
        self, what: str, *, expected: str | None = None, found: str | None = None, hints: tuple[str, ...] = ()
    ) -> NoReturn:
        where = f"{self._source}:{self._at + 1}"
        raise InvalidPatchError(what, where=where, expected=expected, found=found, hints=hints)


def show(line: bytes) -> str:
    text = line.decode("utf-8", "replace")
    return text if len(text) <= 60 else text[:57] + "..."


def first_index(start: int, count: int) -> int:
    """Index from 0 of the first line of a range as hunk headers write it."""
    return start - 1 if count else start


def _is_epoch(header: bytes) -> bool:
    """Whether a header's timestamp is the start of 1970 in UTC, which diff -N writes for a file that does not exist."""
    match = _EPOCH.search(header)
    if match is None:
        return False
    minutes = int(match[1]) * 60 + int(match[2])
    zone = int(match[4] or 0) * 60 + int(match[5] or 0)
    local = zone if match[3] != b"-" else -zone
    return (minutes - local) % (24 * 60) == 0


def _bare_name(header: bytes) -> bytes:
    """The file name of a ---/+++ line without quotes and timestamp; empty where there is none."""
    if header.startswith(b'"'):
        quoted = _QUOTED.match(header)
        return unquote(quoted[0]) if quoted else b""
    name, tab, _ = header.partition(b"\t")
    return name if tab else _TIME.sub(b"", name).rstrip(b" ")


def unquote(name: bytes) -> bytes:
    """A file name as git writes it, which is in quotes with C escapes where it holds unusual bytes."""
    quoted = _QUOTED.fullmatch(name)
    return re.sub(rb"\\([0-3][0-7]{2}|.)", _unescape, quoted[1]) if quoted else name


def _unescape(match: re.Match[bytes]) -> bytes:
    code = match[1]
    return bytes([int(code, 8) if code.isdigit() else _ESCAPES[code]])
