"""Why a patch does not hold on a build: the nearest place, what differs there, what became of the function. Pure.

Of hunks that hold no more is learnt than the signature of their functions, with which those of other builds are
compared.
"""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from provisioner.drift.model import Cell, Column, HunkView, Row, Signature
from provisioner.patching.model import FileChange, FileFacts, FileVerdict, Hunk, HunkVerdict, Patch, PatchVerdict
from provisioner.patching.scope import map_scopes

_SHOWN = 90


@dataclass(frozen=True, kw_only=True)
class Account:
    """At most a few lines a file, a view of each hunk that does not hold, and the signatures around the hunks."""

    lines: tuple[str, ...] = ()
    views: tuple[HunkView, ...] = ()
    signatures: tuple[Signature, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The nearest place of a hunk: 0-based first line, how many old lines stand there, the first that does not."""

    start: int
    agreeing: int
    first_difference: int | None


def explain_patch(verdict: PatchVerdict, patch: Patch, facts: Mapping[str, FileFacts]) -> Account:
    """The account of one patch on one build, as this build alone shows it."""
    signatures = tuple(_signatures_around(verdict, facts))
    if verdict.verdict.fits:
        return Account(signatures=signatures)
    changes = {change.path: change for change in patch.changes}
    lines: list[str] = []
    views: list[HunkView] = []
    for file in verdict.files:
        if file.verdict.fits:
            continue
        content = _text_of(facts.get(file.path))
        if content is None or not file.hunks:
            lines.append(f"{file.path}: {file.why or file.verdict}")
            continue
        account = _explain_file(file, changes[file.path], content)
        lines += account.lines
        views += account.views
    return Account(lines=tuple(lines), views=tuple(views), signatures=signatures)


def tell_changes(columns: Sequence[Column]) -> tuple[Column, ...]:
    """Say of each patch that does not hold how signatures differ from the nearest build on which it holds.

    Of two equally near builds the older one counts. ``columns`` are oldest first.
    """
    held: dict[Row, list[tuple[int, Cell]]] = {}
    for index, column in enumerate(columns):
        for cell in column.cells:
            if cell.verdict.verdict.fits:
                held.setdefault(cell.row, []).append((index, cell))

    def told(index: int, cell: Cell) -> Cell:
        nearest = min(held.get(cell.row, ()), key=lambda item: (abs(item[0] - index), item[0]), default=None)
        if cell.verdict.verdict.fits or nearest is None:
            return replace(cell, changes=())
        return replace(cell, changes=compare_signatures(nearest[1], cell))

    return tuple(
        replace(column, cells=tuple(told(index, cell) for cell in column.cells)) for index, column in enumerate(columns)
    )


def compare_signatures(before: Cell, after: Cell) -> tuple[str, ...]:
    """A line for each function around a hunk whose signature differs between two builds."""
    old = {(item.path, item.scope): item.arguments for item in before.signatures}
    return tuple(
        f"{new.path}: the signature of {new.scope} changed: ({old[new.path, new.scope]}) became ({new.arguments})"
        for new in after.signatures
        if old.get((new.path, new.scope), new.arguments) != new.arguments
    )


def _explain_file(file: FileVerdict, change: FileChange, content: str) -> Account:
    hunks = {hunk.index: hunk for hunk in change.hunks}
    there = content.split("\n")
    lines: list[str] = []
    views: list[HunkView] = []
    for answer in file.hunks:
        if answer.verdict.fits:
            continue
        place = find_nearest(hunks[answer.index], there)
        views.append(_view(file.path, hunks[answer.index], answer, there, place))
        lines += [f"{file.path}, hunk {answer.index}: {line}" for line in _explain_hunk(answer, views[-1], place)]
        lines += [f"{file.path}: {line}" for line in _explain_scope(answer.scope, content)]
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
    if answer.displaced_by is not None:
        yield f"{answer.displaced_by} comes before it and changes these lines"
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


def _explain_scope(scope: str | None, content: str) -> Iterator[str]:
    """Whether the function that the hunk stands in is gone or renamed."""
    scopes = map_scopes(content.encode()) if scope else None
    if not scope or scopes is None or scopes.definition(scope) is not None:
        return
    import difflib

    near = difflib.get_close_matches(scope, dict.fromkeys(scopes.names()), n=1, cutoff=0.7)
    yield f"{scope} is no longer there" + (f"; the nearest name is {near[0]}" if near else "")


def _signatures_around(verdict: PatchVerdict, facts: Mapping[str, FileFacts]) -> Iterator[Signature]:
    """Around every hunk of a patch that holds; of another patch, around the hunks that do not."""
    patch_holds = verdict.verdict.fits
    for file in verdict.files:
        hunks = [hunk for hunk in file.hunks if hunk.scope and (patch_holds or not hunk.verdict.fits)]
        content = _text_of(facts.get(file.path)) if hunks else None
        if content is None:
            continue
        for scope in dict.fromkeys(hunk.scope for hunk in hunks if hunk.scope):
            arguments = find_signature(content, scope)
            if arguments is not None:
                yield Signature(path=file.path, scope=scope, arguments=arguments)


def find_signature(source: str, scope: str) -> str | None:
    """The arguments, as text, of the function ``scope`` in ``source`` (of a class, its bases); None where there is no
    such definition that Python understands."""
    scopes = map_scopes(source.encode())
    definition = scopes.definition(scope) if scopes is not None else None
    return _read_definition(definition) if definition is not None else None


@lru_cache(maxsize=256)
def _read_definition(definition: bytes) -> str | None:
    for body in (b"\n pass\n", b"\n"):
        try:
            return _arguments_of(ast.parse(definition + body).body[0])
        except (SyntaxError, ValueError):
            continue
    return None


def _arguments_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ast.unparse(node.args)
    return ", ".join(map(ast.unparse, node.bases)) if isinstance(node, ast.ClassDef) else None


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
