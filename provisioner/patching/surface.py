"""One file's content and one change's hunks, made ready to be matched and put together. Pure.

Line ends are set aside where the patch says nothing about them: a change whose lines all end alike (LF or CRLF) is
matched without CRs, and the file keeps its own ends; a change whose lines end differently is matched and written byte
for byte.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Literal

from provisioner.patching.model import FileChange, Hunk, HunkLine
from provisioner.patching.scope import ScopeMap, column_of, map_scopes
from provisioner.records import dataclass

MOST_PLACES = 256
"""A text that stands at more places than these is not searched further; it tells nothing."""
NAMED = re.compile(rb"[ \t]*(?:class|(?:async[ \t]+)?def)[ \t]+([\w\x80-\xff]+)")
_TELLING_LINES = 3

Side = Literal["old", "new"]
Ends = Literal["lf", "crlf", "mixed"]


@dataclass(frozen=True, slots=True)
class Block:
    """A hunk as bytes: both sides for matching, and both as the patch has them. ``lead_old`` and ``lead_new`` are the
    bytes of each side above the run of changed lines that decides the scope, ``indent`` is the column of the first of
    them that is not blank. ``is_telling`` where the new side, if it stands somewhere, says that the hunk was applied:
    it has text of its own, or enough lines that were parted before."""

    hunk: Hunk
    index: int
    old: bytes
    new: bytes
    old_verbatim: bytes
    new_verbatim: bytes
    lead_old: int
    lead_new: int
    indent: int | None
    is_telling: bool


@dataclass(frozen=True, slots=True)
class Surface:
    """Content and hunks with line ends set aside, or as they are where the change is about line ends."""

    content: bytes
    text: bytes
    blocks: tuple[Block, ...]
    is_python: bool

    @property
    def added_names(self) -> frozenset[str]:
        """The names of classes and functions whose first lines the change adds."""
        lines = (line for block in self.blocks for line in block.hunk.lines if line.kind == "+")
        found = (NAMED.match(line.text) for line in lines)
        return frozenset(match[1].decode("utf-8", "replace") for match in found if match is not None)

    @property
    def scopes(self) -> ScopeMap | None:
        """The scopes of the content without CRs; None where it is not Python. Worked out only if asked for."""
        return map_scopes(without_cr(self.content)) if self.is_python else None


def prepare(content: bytes, change: FileChange) -> Surface:
    exact = ends_of(change) == "mixed"
    text = content if exact else without_cr(content)
    blocks = tuple(_block_of(hunk, exact=exact) for hunk in change.hunks)
    return Surface(content, text, blocks, is_python(change.path))


def is_python(path: str) -> bool:
    return path.endswith((".py", ".pyi"))


def without_cr(content: bytes) -> bytes:
    """The content with LF line ends; the same object where it has no others."""
    # The search for one byte is far faster than that for two, and mostly enough.
    has_crlf = b"\r" in content and b"\r\n" in content
    return content.replace(b"\r\n", b"\n") if has_crlf else content


def ends_of(change: FileChange) -> Ends:
    ends = {line.text.endswith(b"\r") for hunk in change.hunks for line in hunk.lines if line.ends}
    if len(ends) > 1:
        return "mixed"
    return "crlf" if True in ends else "lf"


def _block_of(hunk: Hunk, *, exact: bool) -> Block:
    lines = [(line.kind, _bytes_of(line, exact=exact), line.text) for line in hunk.lines]
    first = next((at for at, (kind, _, text) in enumerate(lines) if kind != " " and text.strip()), None)
    run = next(at for at, (kind, _, _) in enumerate(lines) if kind != " ") if first is None else first
    while run and lines[run - 1][0] != " ":
        run -= 1
    return Block(
        hunk=hunk,
        index=hunk.old_start - 1 if hunk.old_count else hunk.old_start,
        old=b"".join(data for kind, data, _ in lines if kind != "+"),
        new=b"".join(data for kind, data, _ in lines if kind != "-"),
        old_verbatim=b"".join(_bytes_of(line, exact=True) for line in hunk.lines if line.kind != "+"),
        new_verbatim=b"".join(_bytes_of(line, exact=True) for line in hunk.lines if line.kind != "-"),
        lead_old=sum(len(data) for kind, data, _ in lines[:run] if kind != "+"),
        lead_new=sum(len(data) for kind, data, _ in lines[:run] if kind != "-"),
        indent=None if first is None else column_of(lines[first][2]),
        is_telling=_is_telling(lines),
    )


def _is_telling(lines: Sequence[tuple[str, bytes, bytes]]) -> bool:
    written = [kind for kind, _, text in lines if kind != "-" and text.strip()]
    return "+" in written or len(written) >= _TELLING_LINES


def _bytes_of(line: HunkLine, *, exact: bool) -> bytes:
    if not line.ends:
        return line.text
    return (line.text if exact else line.text.removesuffix(b"\r")) + b"\n"


def line_of(text: bytes, offset: int) -> int:
    """The index from 0 of the line that starts at ``offset``."""
    return text.count(b"\n", 0, offset)


def offset_of(text: bytes, line: int) -> int | None:
    """Where line ``line`` (from 0) starts; the end of the text for the line after the last; None beyond."""
    at = 0
    for _ in range(line):
        at = text.find(b"\n", at) + 1
        if at == 0:
            return None
    return at


def own_place(text: bytes, block: Block) -> int | None:
    """Where the hunk's own line starts, if its old text stands there."""
    found = find_all(text, block.old)
    if 0 < len(found) < MOST_PLACES:
        return next((at for at in found if line_of(text, at) == block.index), None)
    at = offset_of(text, block.index)
    return at if at is not None and _stands_at(text, at, block.old) else None


def _stands_at(text: bytes, at: int, block: bytes) -> bool:
    if not text.startswith(block, at):
        return False
    return not block or block.endswith(b"\n") or at + len(block) == len(text)


def find_all(text: bytes, block: bytes) -> list[int]:
    """Where ``block`` stands as whole lines, up to a bound; nowhere if it is empty."""
    found: list[int] = []
    at = text.find(block) if block else -1
    while at >= 0 and len(found) < MOST_PLACES:
        if (at == 0 or text[at - 1] == 10) and (block.endswith(b"\n") or at + len(block) == len(text)):
            found.append(at)
        at = text.find(block, at + 1)
    return found


def scope_at_place(surface: Surface, block: Block, at: int, side: Side) -> str | None:
    scopes = surface.scopes
    if scopes is None:
        return None
    lead = block.lead_old if side == "old" else block.lead_new
    return scopes.scope_at(_plain_offset(surface, at + lead), block.indent)


def _plain_offset(surface: Surface, at: int) -> int:
    """An offset in the text as one in the text without CRs, which is what scopes are counted in."""
    return at - surface.text.count(b"\r\n", 0, at) if b"\r" in surface.text else at


def splice(surface: Surface, places: Sequence[tuple[int, Block]]) -> bytes:
    has_crlf = surface.text is not surface.content
    if has_crlf and surface.content.count(b"\n") != surface.content.count(b"\r\n"):
        return _splice_mixed(surface, places)
    has_newline = b"\n" in surface.text
    parts: list[bytes] = []
    end = 0
    for at, block in places:
        # A file without any newline has no line ends of its own to keep.
        parts += (surface.text[end:at], block.new if has_newline else block.new_verbatim)
        end = at + len(block.old)
    parts.append(surface.text[end:])
    out = b"".join(parts)
    return out.replace(b"\n", b"\r\n") if has_crlf else out


def _splice_mixed(surface: Surface, places: Sequence[tuple[int, Block]]) -> bytes:
    """In a file whose lines end differently kept lines keep their ends; a hunk that matches to the byte is written so,
    else a new line takes the end of the line above it (of the line below at the top of the file)."""
    lines = re.findall(rb"[^\n]*\n|[^\n]+", surface.content)
    out: list[bytes] = []
    at = 0
    for offset, block in places:
        start = line_of(surface.text, offset)
        end = start + block.hunk.old_count
        out += lines[at:start]
        if b"".join(lines[start:end]) == block.old_verbatim and block.old_verbatim:
            out.append(block.new_verbatim)
        else:
            out += _borrow_ends(block.hunk, lines[start - 1] if start else lines[0], lines[start:end])
        at = end
    return b"".join(out + lines[at:])


def _borrow_ends(hunk: Hunk, above: bytes, old: Sequence[bytes]) -> Iterator[bytes]:
    """The hunk's new lines, each kept one as it is, each added one with the end of the old line above it."""
    rest = iter(old)
    for line in hunk.lines:
        if line.kind == "+":
            end = b"\r\n" if above.endswith(b"\r\n") else b"\n"
            yield line.text.removesuffix(b"\r") + end if line.ends else line.text
            continue
        above = next(rest)
        if line.kind == " ":
            yield above
