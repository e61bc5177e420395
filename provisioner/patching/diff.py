"""Patch text to a :class:`Patch` and back: unified diffs as people have them; what is not wholly understood is refused.

Pure.

Accepted: plain unified diffs and git's, with or without prefixes, at any strip level, with timestamps, prose before the
first header, and after a hunk once a blank line or a mail signature stands between; several commits in one text; CRLF
line ends of the patch itself; empty context lines that lost their one space; a last line without newline.

Refused, with the line: everything else. Copies (``copy from``) are refused, too: what they make depends on a second
file that the patch does not show; the same diff without copy detection says it in full.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from provisioner.digests import digest_of
from provisioner.patching.headers import refuse, strip_level, target_paths
from provisioner.patching.model import (
    Create,
    Delete,
    FileChange,
    FileManifest,
    Hunk,
    LineKind,
    Manifest,
    Modify,
    Patch,
    Rename,
    paths_of,
)
from provisioner.patching.sections import INDEX, Section, read_sections, show

_MODES = {b"100644": 0o644, b"100755": 0o755}
_COMMIT_LINE = b"From " + b"0" * 40 + b" Mon Sep 17 00:00:00 2001\n"


def parse_patch(text: bytes, *, id: str, source: str, strip: int | None = None, root: str = "") -> Patch:  # noqa: A002
    """The patch that ``text`` says.

    ``strip`` is the number of leading path parts to take off (as in ``patch -p``); None works it out from the headers.
    ``root`` is put before every path. Raises InvalidPatchError, ``where`` being ``source:line``, for anything that is
    not understood or that no patch of an installed distribution can mean.
    """
    sections = read_sections(text, source)
    level = strip_level(sections, source) if strip is None else strip
    changes = _number_hunks([_change_of(section, level, root, source) for section in sections])
    _refuse_repeated_targets(sections, changes, source)
    return Patch(id=id, source=source, digest=digest_of(text), changes=changes)


def print_patch(patch: Patch) -> bytes:
    """A text that :func:`parse_patch` reads as the same changes."""
    return b"".join(_print_changes(patch.changes))


def manifest_of(patch: Patch, scopes: Mapping[str, tuple[str, ...]] | None = None) -> Manifest:
    """What the patch holds for each path, in order of first appearance; ``scopes`` are written in where given."""
    hunks: dict[str, list[Hunk]] = {}
    for change in patch.changes:
        hunks.setdefault(change.path, []).extend(change.hunks)
    return Manifest(
        files=tuple(
            FileManifest(
                path=path,
                hunks=len(found),
                added=_count(found, "+"),
                removed=_count(found, "-"),
                scopes=(scopes or {}).get(path, ()),
            )
            for path, found in hunks.items()
        )
    )


def _count(hunks: Iterable[Hunk], kind: LineKind) -> int:
    return sum(line.kind == kind for hunk in hunks for line in hunk.lines)


def _change_of(section: Section, level: int, root: str, source: str) -> FileChange:
    old, new = target_paths(section, level, root, source)
    modes = _modes(section, source)
    hunks = tuple(section.hunks)
    if b"rename to " in section.extended or b"rename from " in section.extended:
        return _rename_of(section, old, new, modes, source)
    kind = _kind_of(section)
    if kind == "create":
        _require_one_sided(section, source, "+", "a new file")
        fills_empty = section.old is not None and not section.old.epoch and section.git_header is None
        return Create(path=new, hunks=hunks, mode=modes.get(b"new file mode "), fills_empty=fills_empty)
    if kind == "delete":
        _require_one_sided(section, source, "-", "a deleted file")
        return Delete(path=old, hunks=hunks, mode=modes.get(b"deleted file mode "))
    if old != new:
        refuse(section, source, f"the header names two files, {old} and {new}", hints=("--strip N",))
    old_mode, new_mode = modes.get(b"old mode "), modes.get(b"new mode ")
    if not hunks and old_mode == new_mode:
        refuse(section, source, "a file header without any change")
    return Modify(path=new, hunks=hunks, old_mode=old_mode, new_mode=new_mode)


def _kind_of(section: Section) -> str:
    if b"new file mode " in section.extended or (section.has_names and section.old is None):
        return "create"
    if b"deleted file mode " in section.extended or (section.has_names and section.new is None):
        return "delete"
    if section.git_header is None:
        first = section.hunks[0]
        if first.old_start == first.old_count == 0:
            return "create"
        if first.new_start == first.new_count == 0 and section.new is not None and section.new.epoch:
            return "delete"
    return "modify"


def _modes(section: Section, source: str) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    extended = section.extended
    for key in (b"old mode ", b"new mode ", b"new file mode ", b"deleted file mode "):
        if key in extended:
            found[key] = _mode(extended[key], section, source)
    index = extended.get(b"index ")
    if index is not None:
        match = INDEX.fullmatch(index)
        if match is None:
            refuse(section, source, "a malformed index line")
        if match[3] is not None:
            _mode(match[3], section, source)
    if (b"old mode " in found) != (b"new mode " in found):
        refuse(section, source, "a mode change with one side only")
    if sum(key in extended for key in (b"new mode ", b"new file mode ", b"deleted file mode ")) > 1:
        refuse(section, source, "a header that contradicts itself: new, deleted or changed mode together")
    return found


def _mode(text: bytes, section: Section, source: str) -> int:
    mode = _MODES.get(text.strip())
    if mode is None:
        refuse(section, source, f"file mode {show(text)}: only regular files (100644, 100755) can be patched")
    return mode


def _rename_of(section: Section, old: str, new: str, modes: Mapping[bytes, int], source: str) -> Rename:
    if old == new:
        refuse(section, source, "a rename to the same name")
    if section.has_names and (section.old is None or section.new is None):
        refuse(section, source, "a rename from or to /dev/null")
    if b"new file mode " in modes or b"deleted file mode " in modes:
        refuse(section, source, "a rename of a new or deleted file")
    similarity = section.extended.get(b"similarity index ", b"").rstrip(b"%")
    if similarity and not similarity.isdigit():
        refuse(section, source, "a malformed similarity index")
    if similarity == b"100" and section.hunks:
        refuse(section, source, "a rename that says 100% similar and has hunks")
    if similarity and similarity != b"100" and not section.hunks:
        refuse(section, source, "a rename that says that the content changes, but there is no hunk")
    return Rename(
        source=old,
        path=new,
        hunks=tuple(section.hunks),
        old_mode=modes.get(b"old mode "),
        new_mode=modes.get(b"new mode "),
        similarity=int(similarity) if similarity else None,
    )


def _require_one_sided(section: Section, source: str, kind: LineKind, what: str) -> None:
    if len(section.hunks) > 1 or any(line.kind != kind for hunk in section.hunks for line in hunk.lines):
        refuse(section, source, f"{what} must be one hunk of lines that all start with {kind}")
    if kind == "+" and section.has_names and section.new is None:
        refuse(section, source, "a new file whose new name is /dev/null")
    if kind == "-" and section.has_names and section.old is None:
        refuse(section, source, "a deleted file whose old name is /dev/null")
    for hunk in section.hunks:
        gone = hunk.old_start if kind == "+" else hunk.new_start
        here = hunk.new_start if kind == "+" else hunk.old_start
        if gone != 0 or here != 1:
            refuse(section, source, f"{what} must start at line 1 of nothing", found=None)


def _number_hunks(changes: list[FileChange]) -> tuple[FileChange, ...]:
    """Let the hunks' indices run on where a path has several changes."""
    seen: dict[str, int] = {}
    out: list[FileChange] = []
    for change in changes:
        start = seen.get(change.path, 0)
        seen[change.path] = start + len(change.hunks)
        if start:
            hunks = tuple(replace(hunk, index=start + hunk.index) for hunk in change.hunks)
            change = replace(change, hunks=hunks)
        out.append(change)
    return tuple(out)


def _refuse_repeated_targets(sections: list[Section], changes: tuple[FileChange, ...], source: str) -> None:
    """Within one commit a path stands once; and a file cannot be a folder of another."""
    seen: dict[tuple[int, str], Section] = {}
    every = {path for change in changes for path in paths_of(change)}
    for section, change in zip(sections, changes, strict=True):
        for path in paths_of(change):
            first = seen.setdefault((section.commit, path), section)
            if first is not section:
                refuse(
                    section,
                    source,
                    f"{path} stands twice in one patch (first at line {first.line})",
                    hints=("give the two texts as two patches",),
                )
            if any(parent in every for parent in _parents(path)):
                refuse(section, source, f"{path} lies inside another file of the patch")


def _parents(path: str) -> Iterator[str]:
    at = path.find("/")
    while at >= 0:
        yield path[:at]
        at = path.find("/", at + 1)


def _print_changes(changes: Iterable[FileChange]) -> Iterator[bytes]:
    seen: set[str] = set()
    is_open = False
    for change in changes:
        if not seen.isdisjoint(paths_of(change)):
            yield _COMMIT_LINE
            seen.clear()
        seen.update(paths_of(change))
        headers = b"".join(_print_headers(change))
        if is_open and headers.startswith(b"--- "):
            # Without a line between, names would be taken for those of the git header above.
            yield b"\n"
        is_open = not change.hunks
        yield headers
        for hunk in change.hunks:
            yield from _print_hunk(hunk)


def _print_headers(change: FileChange) -> Iterator[bytes]:
    new = change.path.encode()
    match change:
        case Create(mode=None):
            old_name = b"a/" + new if change.fills_empty else b"/dev/null"
            yield from _print_names(old_name, b"b/" + new)
        case Create(mode=int(mode)):
            yield b"diff --git a/%b b/%b\nnew file mode 100%o\n" % (new, new, mode)
            if change.hunks:
                yield from _print_names(b"/dev/null", b"b/" + new)
        case Delete(mode=None):
            yield from _print_names(b"a/" + new, b"/dev/null")
        case Delete(mode=int(mode)):
            yield b"diff --git a/%b b/%b\ndeleted file mode 100%o\n" % (new, new, mode)
            if change.hunks:
                yield from _print_names(b"a/" + new, b"/dev/null")
        case Modify():
            yield b"diff --git a/%b b/%b\n" % (new, new)
            yield from _print_modes(change.old_mode, change.new_mode)
            if change.hunks:
                yield from _print_names(b"a/" + new, b"b/" + new)
        case Rename():
            old = change.source.encode()
            yield b"diff --git a/%b b/%b\n" % (old, new)
            yield from _print_modes(change.old_mode, change.new_mode)
            if change.similarity is not None:
                yield b"similarity index %d%%\n" % change.similarity
            yield b"rename from %b\nrename to %b\n" % (old, new)
            if change.hunks:
                yield from _print_names(b"a/" + old, b"b/" + new)


def _print_modes(old: int | None, new: int | None) -> Iterator[bytes]:
    if old is not None and new is not None:
        yield b"old mode 100%o\nnew mode 100%o\n" % (old, new)


def _print_names(old: bytes, new: bytes) -> Iterator[bytes]:
    for mark, name in ((b"---", old), (b"+++", new)):
        # A tab after a name with spaces keeps readers from taking its end for a timestamp.
        yield b"%b %b%b\n" % (mark, name, b"\t" if b" " in name else b"")


_MARKS: Mapping[LineKind, bytes] = {" ": b" ", "-": b"-", "+": b"+"}
_NO_END = b"\n\\ No newline at end of file\n"


def _print_hunk(hunk: Hunk) -> Iterator[bytes]:
    heading = b" " + hunk.heading if hunk.heading else b""
    old = _print_range(hunk.old_start, hunk.old_count)
    new = _print_range(hunk.new_start, hunk.new_count)
    yield b"@@ -%b +%b @@%b\n" % (old, new, heading)
    yield b"".join([_MARKS[line.kind] + line.text + (b"\n" if line.ends else _NO_END) for line in hunk.lines])


def _print_range(start: int, count: int) -> bytes:
    return b"%d" % start if count == 1 else b"%d,%d" % (start, count)
