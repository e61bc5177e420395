"""Which class or function encloses a place in Python source, found without parsing the file. Pure.

The scope of a place (the start of a line) is what encloses the line that stands, or would be put, there:

* Take the nearest code above, comments and blank lines skipped. Where the place continues that statement (an open
  bracket or string, a backslash), the scope is the statement's own; for a ``def`` or ``class`` line that is itself.
* Otherwise the scope is the innermost class or function around that statement, itself included, which is indented less
  than the line in question. So a line of a body belongs to its function, a ``def`` line to what encloses it, and a new
  function after another to the class or module of both.

Only what is above the place matters, so the scope of a hunk's first change is the same before and after the change.
A qualified name joins names by dots ("Class.method"); "" is module level.

Finding the ``def`` and ``class`` lines outside of strings is one pass of one regular expression. Brackets are counted
only in the stretch between two such lines that holds the place: no such line can stand inside a bracket, so counting
may start afresh at each.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import field
from functools import lru_cache

from provisioner.records import dataclass

# A string ends at its quote, or, damaged, with its line. A backslash takes the next byte along, a newline included.
_STRING = rb"\"\"\"(?:[^\"\\]++|\\.|\"(?!\"\"))*+(?:\"\"\"|\Z)|'''(?:[^'\\]++|\\.|'(?!''))*+(?:'''|\Z)"
_STRING += rb"|\"(?:[^\"\\\n]++|\\.)*+(?:\"|(?=\n)|\Z)|'(?:[^'\\\n]++|\\.)*+(?:'|(?=\n)|\Z)"
_HEADER = rb"(?:async[ \t]+)?(?:def|class)[ \t]+([\w\x80-\xff]+)"
_NEXT_HEADER = re.compile(
    rb"(?:[^\"'#\n\\]++|\n[ \t\f]*+(?!%b)|%b|\\.|#[^\n]*+)*+\n([ \t\f]*+)%b"
    % (_HEADER.replace(b"([", b"(?:["), _STRING, _HEADER),
    re.DOTALL,
)
_NEXT_MARK = re.compile(
    rb"(?:[^\"'#\n\\()\[\]{}]++|%b|\\.|#[^\n]*+)*+(?:([(\[{])|([)\]}])|\n([ \t\f]*+))" % _STRING, re.DOTALL
)
_ANY_LINE = re.compile(rb"\n([ \t\f]*+)[^\s#]")


@dataclass(frozen=True, slots=True)
class _Header:
    """A def or class line: the offset of the newline before it, its indentation in columns, its name."""

    at: int
    indent: int
    name: str


@dataclass(frozen=True, slots=True)
class _Stretch:
    """From one header to the next: the newlines outside of brackets and strings, and those of them that start code."""

    free: frozenset[int]
    starts: list[int]
    indents: list[int]


@dataclass(frozen=True, slots=True)
class ScopeMap:
    """Answers for one source text, which is held with a newline in front, so that each line starts with one."""

    _text: bytes = field(repr=False)
    _headers: list[_Header] = field(repr=False)
    _offsets: list[int] = field(repr=False)
    _stretches: dict[int, _Stretch] = field(repr=False, default_factory=dict)

    def scope_at(self, offset: int, indent: int | None) -> str:
        """The scope of the line that starts at byte ``offset`` of the source.

        ``indent`` is the column of that line's first character (see :func:`column_of`); None, for a line without any,
        takes the scope of the code above. ``offset`` may be the length of the source.
        """
        number = bisect_left(self._offsets, offset) - 1
        stretch = self._stretch(number)
        last = bisect_left(stretch.starts, offset) - 1
        if last < 0:
            return ""
        chain = self._enclosing(number, stretch.starts[last], stretch.indents[last])
        if number >= 0 and stretch.starts[last] == self._offsets[number]:
            chain.append(self._headers[number])
        continued = offset < len(self._text) - 1 and offset not in stretch.free
        if indent is not None and not continued:
            chain = [header for header in chain if header.indent < indent]
        return ".".join(header.name for header in chain)

    def names(self) -> Iterator[str]:
        """The qualified name of each def and class line, in their order."""
        return map(self._name_of, range(len(self._headers)))

    def definition(self, name: str) -> bytes | None:
        """The last def or class statement of that qualified name, without its body; None where there is none.

        Comments may follow, and a body that begins on the statement's own line.
        """
        last = name.rpartition(".")[2]
        for number in range(len(self._headers) - 1, -1, -1):
            header = self._headers[number]
            if header.name == last and self._name_of(number) == name:
                starts = self._stretch(number).starts
                end = starts[1] if len(starts) > 1 else self._end_of(number)
                return self._text[header.at + 1 : end].lstrip(b" \t\f")
        return None

    def _name_of(self, number: int) -> str:
        header = self._headers[number]
        scope = self.scope_at(header.at, header.indent)
        return f"{scope}.{header.name}" if scope else header.name

    def _enclosing(self, number: int, start: int, limit: int) -> list[_Header]:
        """The headers around the statement whose newline is at ``start``, outermost first."""
        chain: list[_Header] = []
        for index in range(number, -1, -1):
            header = self._headers[index]
            if header.at >= start or header.indent >= limit:
                continue
            floor = self._lowest_indent(header, start)
            if floor > header.indent:
                chain.append(header)
                limit = header.indent
            else:
                limit = floor
            if limit == 0:
                break
        return chain[::-1]

    def _lowest_indent(self, header: _Header, end: int) -> int:
        """The least indentation of a statement between a header and ``end``, as far as it ends the header's body."""
        lowest = header.indent + 1
        for match in _lines_up_to(self._text, header.indent).finditer(self._text, header.at + 1, end + 1):
            indent = column_of(match[1])
            if indent < lowest and self._starts_code(match.start()):
                lowest = indent
                if lowest == 0:
                    break
        return lowest

    def _starts_code(self, at: int) -> bool:
        index = bisect_left(self._offsets, at)
        if index < len(self._offsets) and self._offsets[index] == at:
            return True
        starts = self._stretch(index - 1).starts
        found = bisect_left(starts, at)
        return found < len(starts) and starts[found] == at

    def _stretch(self, number: int) -> _Stretch:
        """The stretch that starts with header ``number``; -1 is what stands above the first."""
        known = self._stretches.get(number)
        if known is None:
            begin = self._offsets[number] if number >= 0 else 0
            known = self._stretches[number] = _read_stretch(self._text, begin, self._end_of(number))
        return known

    def _end_of(self, number: int) -> int:
        return self._offsets[number + 1] if number + 1 < len(self._offsets) else len(self._text)


def _read_stretch(text: bytes, begin: int, end: int) -> _Stretch:
    free: list[int] = []
    starts: list[int] = []
    indents: list[int] = []
    depth = 0
    at = begin
    while match := _NEXT_MARK.match(text, at):
        at = match.end()
        if match[1]:
            depth += 1
        elif match[2]:
            depth = max(depth - 1, 0)
        else:
            newline = match.start(3) - 1
            if newline >= end:
                free.append(newline)
                break
            if depth == 0:
                free.append(newline)
                if text[at : at + 1] not in b"\n#\r":
                    starts.append(newline)
                    indents.append(column_of(match[3]))
    return _Stretch(frozenset(free), starts, indents)


def _lines_up_to(text: bytes, indent: int) -> re.Pattern[bytes]:
    """A pattern for lines of code that may be indented by ``indent`` columns or less; group 1 is the white space."""
    return _ANY_LINE if b"\t" in text or b"\f" in text else _lines_of_spaces(indent)


@lru_cache(maxsize=64)
def _lines_of_spaces(indent: int) -> re.Pattern[bytes]:
    return re.compile(rb"\n( {0,%d}+)[^\s#]" % indent)


def column_of(line: bytes) -> int:
    """The column of the first character of ``line`` that is no white space, as Python counts: tabs to multiples of 8, a
    form feed back to 0."""
    bare = line.lstrip(b" \t\f")
    white = line[: len(line) - len(bare)]
    if not white.strip(b" "):
        return len(white)
    return len(white.rpartition(b"\f")[2].expandtabs(8))


@lru_cache(maxsize=128)  # several wheels with a dozen files each are judged at a time
def map_scopes(source: bytes) -> ScopeMap | None:
    """The scopes of Python source with LF line ends; None where a lone CR makes its lines another matter for Python."""
    if b"\r" in source:
        return None
    text = b"\n" + source
    headers: list[_Header] = []
    at = 0
    while match := _NEXT_HEADER.match(text, at):
        name = match[2].decode("utf-8", "replace")
        headers.append(_Header(match.start(1) - 1, column_of(match[1]), name))
        at = match.end()
    return ScopeMap(text, headers, [header.at for header in headers])
