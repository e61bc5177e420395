"""Names in patch headers to paths: strip levels, prefixes, and which targets are refused. Pure."""

import re
from collections.abc import Iterator
from typing import NoReturn

from provisioner.errors import InvalidPatchError
from provisioner.patching.sections import Section, show, unquote

_BACKUPS = (b".orig", b".old", b".bak", b"~")
_QUOTED_PAIR = re.compile(rb'("(?:[^"\\]|\\.)*"|[^"]+) ("(?:[^"\\]|\\.)*"|[^"]+)')
_PREFIXES = frozenset({b"a", b"b", b"i", b"w", b"c", b"o", b"1", b"2"})


def strip_level(sections: list[Section], source: str) -> int:
    """The strip level that all headers of the text agree on."""
    levels = {level: section for section in reversed(sections) if (level := _level_of(section)) is not None}
    if len(levels) > 1:
        late = max(levels.values(), key=lambda section: section.line)
        refuse(late, source, "the file headers do not all need the same strip level", hints=("--strip N",))
    if levels:
        return next(iter(levels))
    return 1 if all(_looks_prefixed(section) for section in sections) else 0


def _level_of(section: Section) -> int | None:
    """The strip level of a section that names both of its sides; None where one side says nothing."""
    pair = _rename_pair(section) if b"rename to " in section.extended else None
    if pair is not None:
        return pair[2]
    old, new = _both_names(section)
    if old is None or new is None:
        return None
    old = _without_backup(old, new)
    if old == new:
        # A git header gives a new or deleted file one name twice, prefix and all.
        return 0 if section.old is not None and section.new is not None else None
    return 1 if _strip(old, 1) == _strip(new, 1) is not None else None


def _looks_prefixed(section: Section) -> bool:
    return all(name.split(b"/")[0] in _PREFIXES for name in _both_names(section) if name is not None)


def _both_names(section: Section) -> tuple[bytes | None, bytes | None]:
    """Names as written: of the ---/+++ lines, or of the git header where those are missing or say /dev/null."""
    if section.git_header is not None and (section.old is None or section.new is None):
        for old, new in _header_pairs(section.git_header):
            if old == new or (_strip(old, 1) == _strip(new, 1) is not None and _prefixes_differ(old, new)):
                return old, new
        return None, None
    return (section.old.raw if section.old else None), (section.new.raw if section.new else None)


def _prefixes_differ(old: bytes, new: bytes) -> bool:
    return old.split(b"/")[0] != new.split(b"/")[0]


def _header_pairs(header: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Every way to read the rest of a ``diff --git`` line as two names; names may hold spaces and be quoted."""
    if b'"' in header:
        quoted = _QUOTED_PAIR.fullmatch(header)
        if quoted:
            yield unquote(quoted[1]), unquote(quoted[2])
        return
    at = header.find(b" ")
    while at >= 0:
        yield header[:at], header[at + 1 :]
        at = header.find(b" ", at + 1)


def _rename_pair(section: Section) -> tuple[bytes, bytes, int] | None:
    """Old and new name of a rename as the git header writes them, and their strip level."""
    source = unquote(section.extended.get(b"rename from ", b""))
    target = unquote(section.extended.get(b"rename to ", b""))
    for old, new in _header_pairs(section.git_header or b""):
        for level in (1, 0):
            if _strip(old, level) == source and _strip(new, level) == target:
                return old, new, level
    return None


def _without_backup(old: bytes, new: bytes) -> bytes:
    """``old`` without the suffix of a backup copy, where that makes it the same file as ``new``."""
    for suffix in _BACKUPS:
        bare = old.removesuffix(suffix)
        if bare != old and (bare == new or _strip(bare, 1) == _strip(new, 1) is not None):
            return bare
    return old


def _strip(name: bytes, level: int) -> bytes | None:
    parts = re.split(rb"/+", name)
    return b"/".join(parts[level:]) if len(parts) > level else None


def refuse(
    section: Section, source: str, what: str, *, found: str | None = None, hints: tuple[str, ...] = ()
) -> NoReturn:
    expected = None if found is None else "a path inside the distribution"
    raise InvalidPatchError(what, where=f"{source}:{section.line}", expected=expected, found=found, hints=hints)


def _path_of(name: bytes, level: int, root: str, section: Section, source: str) -> str:
    stripped = _strip(name, level)
    if not stripped:
        refuse(section, source, f"{show(name)} has fewer parts than the strip level {level}", hints=("--strip N",))
    try:
        path = stripped.decode("utf-8")
    except UnicodeDecodeError:
        refuse(section, source, "a file name that is not UTF-8", found=show(stripped))
    while path.startswith("./"):
        path = path[2:]
    whole = f"{root.rstrip('/')}/{path}" if root.strip("/") else path
    reason = _why_unsafe(path) or _why_unsafe(whole)
    if reason:
        refuse(section, source, reason, found=whole)
    return whole


def _why_unsafe(path: str) -> str:
    parts = path.split("/")
    if parts[0] == "" or re.match(r"[A-Za-z]:$", parts[0]):
        return "an absolute path"
    if any(part in ("", ".", "..") for part in parts):
        return "a path with . or .. or an empty part"
    if any(ord(char) < 32 or char in '\\"\x7f' for char in path):
        return "a path with control characters, quotes or backslashes"
    if "__pycache__" in parts or path.endswith((".pyc", ".pyo")):
        return "a target that is compiled bytecode"
    if path.endswith((".orig", ".rej", "~")):
        return "a target that is a leftover of patching"
    if any(part.endswith((".dist-info", ".egg-info")) for part in parts):
        return "a target inside the distribution's own records"
    return ""


def target_paths(section: Section, level: int, root: str, source: str) -> tuple[str, str]:
    """The path before and the path after; the same where the header gives only one."""
    if b"rename to " in section.extended or b"rename from " in section.extended:
        pair = _rename_pair(section)
        if pair is None:
            refuse(section, source, "the rename and the git header name different files")
        old_name, new_name = pair[0], pair[1]
    else:
        old_name, new_name = _names_of(section, source)
    new = _path_of(new_name, level, root, section, source)
    old = new if old_name == new_name else _path_of(_without_backup(old_name, new_name), level, root, section, source)
    if section.git_header is not None and section.has_names:
        _refuse_disagreement(section, source)
    return old, new


def _names_of(section: Section, source: str) -> tuple[bytes, bytes]:
    if section.has_names:
        old = section.old or section.new
        new = section.new or section.old
        if old is not None and new is not None:
            return old.raw, new.raw
    header_old, header_new = _both_names(section)
    if header_old is None or header_new is None:
        refuse(section, source, "the git header's two names cannot be told apart or differ")
    return header_old, header_new


def _refuse_disagreement(section: Section, source: str) -> None:
    """The names of ---/+++ must be those of the git header."""
    old = section.old.raw if section.old else None
    new = section.new.raw if section.new else None
    for left, right in _header_pairs(section.git_header or b""):
        if old in (None, left) and new in (None, right):
            return
    refuse(section, source, "the git header and the file header name different files")
