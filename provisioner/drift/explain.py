"""Why a patch does not hold on a build: the nearest place, what differs there, what became of the function. Pure.

Everything here runs only for hunks that do not hold, so it may parse whole files.
"""

import ast
import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from provisioner.drift.model import HOLDS, HunkView
from provisioner.patching.model import FileChange, FileFacts, FileVerdict, Hunk, HunkVerdict, Patch, PatchVerdict

_SHOWN = 90


@dataclass(frozen=True, kw_only=True)
class Account:
    """At most a few lines a file, and a view of each hunk that does not hold."""

    lines: tuple[str, ...] = ()
    views: tuple[HunkView, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The nearest place of a hunk: 0-based first line, how many old lines stand there, the first that does not."""

    start: int
    agreeing: int
    first_difference: int | None


def explain_patch(
    verdict: PatchVerdict, patch: Patch, facts: Mapping[str, FileFacts], before: Mapping[str, FileFacts]
) -> Account:
    """The account of one patch on one build; ``before`` are the files of the nearest build on which it holds."""
    if verdict.verdict in HOLDS:
        return Account()
    changes = {change.path: change for change in patch.changes}
    lines: list[str] = []
    views: list[HunkView] = []
    for file in verdict.files:
        if file.verdict in HOLDS:
            continue
        content = _text_of(facts.get(file.path))
        if content is None or not file.hunks:
            lines.append(f"{file.path}: {file.why or file.verdict}")
            continue
        account = _explain_file(file, changes[file.path], content, _text_of(before.get(file.path)))
        lines += account.lines
        views += account.views
    return Account(lines=tuple(lines), views=tuple(views))


def _explain_file(file: FileVerdict, change: FileChange, content: str, before: str | None) -> Account:
    hunks = {hunk.index: hunk for hunk in change.hunks}
    lines: list[str] = []
    views: list[HunkView] = []
    for answer in file.hunks:
        if answer.verdict in HOLDS:
            continue
        place = find_nearest(hunks[answer.index], content.split("\n"))
        views.append(_view(file.path, hunks[answer.index], answer, content.split("\n"), place))
        lines += [f"{file.path}, hunk {answer.index}: {line}" for line in _explain_hunk(answer, views[-1], place)]
        lines += [f"{file.path}: {line}" for line in _explain_scope(answer.scope, content, before)]
    return Account(lines=tuple(dict.fromkeys(lines)), views=tuple(views))


def find_nearest(hunk: Hunk, lines: list[str]) -> _Place | None:
    """Where most of the hunk's old lines stand in their order, by a vote of the single lines; None where none does.

    Linear in the file: blank lines do not vote, and of equally good places the one nearest to the hunk's own line wins.
    """
    wanted = _old_lines(hunk)
    places: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        places.setdefault(line, []).append(number)
    votes = Counter(
        number - offset
        for offset, line in enumerate(wanted)
        if line.strip()
        for number in places.get(line, ())
        if number >= offset
    )
    if not votes:
        return None
    start = max(votes, key=lambda at: (votes[at], -abs(at - hunk.old_start + 1)))
    differing = [offset for offset, line in enumerate(wanted) if _line(lines, start + offset) != line]
    return _Place(
        start=start, agreeing=len(wanted) - len(differing), first_difference=differing[0] if differing else None
    )


def _explain_hunk(answer: HunkVerdict, view: HunkView, place: _Place | None) -> Iterator[str]:
    where = f" in {answer.scope}" if answer.scope else ""
    if place is None or view.line is None:
        yield f"cut for line {answer.line}{where}; not one of its lines stands in the file"
        return
    share = f"{place.agreeing} of {len(view.wanted)} lines agree"
    yield f"cut for line {answer.line}{where}; nearest place is line {view.line}, {share}"
    if place.first_difference is None:
        yield answer.why or f"its text stands there, and yet: {answer.verdict}"
        return
    at = place.first_difference
    found = view.found[at] if at < len(view.found) else "(end of file)"
    yield f"line {view.line + at} is {_short(found)}, wanted {_short(view.wanted[at])}"


def _explain_scope(scope: str | None, content: str, before: str | None) -> Iterator[str]:
    """What became of the function that the hunk stands in: gone, renamed, or with another signature."""
    if not scope:
        return
    new, old = _signatures(content), _signatures(before) if before is not None else {}
    if scope not in new:
        near = difflib.get_close_matches(scope, new, n=1, cutoff=0.7)
        yield f"{scope} is no longer there" + (f"; the nearest name is {near[0]}" if near else "")
    elif scope in old and old[scope] != new[scope]:
        yield f"the signature of {scope} changed: ({old[scope]}) became ({new[scope]})"


def _signatures(source: str) -> dict[str, str]:
    """Qualified name to the arguments as text, of every function; empty where the text is not Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return {}
    return dict(_walk(tree, ""))


def _walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}", ast.unparse(child.args)
            yield from _walk(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield f"{prefix}{child.name}", ", ".join(map(ast.unparse, child.bases))
            yield from _walk(child, f"{prefix}{child.name}.")
        else:
            yield from _walk(child, prefix)


def _view(path: str, hunk: Hunk, answer: HunkVerdict, lines: list[str], place: _Place | None) -> HunkView:
    wanted = _old_lines(hunk)
    found = [] if place is None else [_line(lines, place.start + offset) or "" for offset in range(len(wanted))]
    return HunkView(
        path=path,
        index=hunk.index,
        verdict=str(answer.verdict),
        wanted=tuple(wanted),
        found=tuple(found),
        line=None if place is None else place.start + 1,
    )


def _old_lines(hunk: Hunk) -> list[str]:
    return [line.text.decode("utf-8", "replace").rstrip("\r") for line in hunk.lines if line.kind != "+"]


def _line(lines: list[str], number: int) -> str | None:
    return lines[number] if 0 <= number < len(lines) else None


def _text_of(fact: FileFacts | None) -> str | None:
    if fact is None or fact.content is None:
        return None
    return fact.content.decode("utf-8", "replace").replace("\r\n", "\n")


def _short(line: str) -> str:
    text = line.strip()
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")
