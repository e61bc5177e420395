"""A report from its JSON, schemas ``provision/drift/1`` and ``provision/drift-bisect/1``; the inverse of ``data``."""

import json
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar

from packaging.version import InvalidVersion, Version

from provisioner.documents.recipe import DriftResponse, PatchPolicy
from provisioner.drift.model import (
    Bisection,
    Build,
    Cell,
    Column,
    Cost,
    DriftReport,
    HunkView,
    Signature,
    Turn,
    Unread,
)
from provisioner.drift.reports.data import describe_findings
from provisioner.errors import InvalidReportError
from provisioner.patching.model import FileVerdict, HunkVerdict, PatchVerdict, Verdict
from provisioner.tables import Table

REPORT, BISECTION = "provision/drift/1", "provision/drift-bisect/1"
_NOTHING = Cost(requests=0, received=0, seconds=0.0, reused=0)
_Word = TypeVar("_Word", bound=StrEnum)


def parse_report(text: str, *, where: str) -> DriftReport:
    """The report that a JSON text is of; that of a bisection is a report with nothing else.

    Raises InvalidReportError, with an address, for anything that is not understood.
    """
    try:
        values = json.loads(text, object_hook=_without_nulls)
    except (ValueError, RecursionError) as error:
        raise InvalidReportError(f"not JSON, or cut off: {error}", where=where) from error
    if not isinstance(values, dict):
        raise InvalidReportError("not a JSON object", where=where)
    table = Table(values, where=where, error=InvalidReportError)
    schema = table.take("schema", str)
    if schema == REPORT:
        return _parse_report(table)
    if schema == BISECTION:
        return DriftReport(against=(), columns=(), cost=_NOTHING, bisections=(_parse_bisection(table),))
    raise table.fail("not a report of provision drift", "schema", expected=f"{REPORT} or {BISECTION}", found=schema)


def _parse_report(table: Table) -> DriftReport:
    findings = {key: table.take(key, list) for key in ("failing", "not_judged")}
    report = DriftReport(
        against=_strings(table, "against"),
        columns=tuple(_parse_column(entry) for entry in _tables(table, "builds")),
        cost=_parse_cost(table.take_table("cost")),
        bisections=tuple(_parse_bisection(entry) for entry in _tables(table, "bisections")),
    )
    table.close()
    if not report.columns and not report.bisections:
        raise table.fail("a report of no build", "builds")
    for key, found in describe_findings(report).items():
        if findings[key] != found:
            raise table.fail("this does not follow from the builds", key)
    return report


def _parse_cost(table: Table) -> Cost:
    cost = Cost(
        requests=table.take("requests", int),
        received=table.take("received", int),
        seconds=table.take("seconds", float),
        reused=table.take("reused", int),
    )
    table.close()
    return cost


def _parse_column(table: Table) -> Column:
    table.take_optional("failure", str)
    column = Column(
        recipes=_strings(table, "recipes"),
        unread=tuple(_parse_unread(entry) for entry in _tables(table, "unread")),
        cells=tuple(_parse_cell(entry) for entry in _tables(table, "patches")),
        build=_parse_build(table),
    )
    if stray := sorted({cell.recipe for cell in column.cells}.difference(column.recipes)):
        raise table.fail("a patch of a recipe that was not judged", "patches", found=", ".join(stray))
    if bare := sorted(set(column.recipes).difference(cell.recipe for cell in column.cells)):
        raise table.fail("a recipe that was judged without a patch", "recipes", found=", ".join(bare))
    if not column.cells and not column.unread:
        raise table.fail("a build on which nothing was judged", "patches")
    return column


def _parse_unread(table: Table) -> Unread:
    unread = Unread(recipe=table.take("recipe", str), why=table.take("why", str))
    table.close()
    return unread


def _parse_build(table: Table) -> Build:
    build = Build(
        label=table.take("label", str),
        version=_take_version(table),
        filename=table.take("filename", str),
        commit=table.take_optional("commit", str),
        variant=table.take_optional("variant", str),
        uploaded=_take_time(table),
    )
    table.close()
    return build


def _parse_bisection(table: Table) -> Bisection:
    found = Bisection(
        good=_parse_build(table.take_table("good")),
        bad=_parse_build(table.take_table("bad")),
        turns=tuple(_parse_turn(entry) for entry in _tables(table, "turns")),
        between=table.take("between", int),
        judged=table.take("judged", int),
    )
    table.close()
    return found


def _parse_turn(table: Table) -> Turn:
    turn = Turn(
        recipe=table.take("recipe", str),
        patch=table.take("patch", str),
        last=_parse_build(table.take_table("last")),
        first=_parse_build(table.take_table("first")),
        before=_parse_cell(table.take_table("before")),
        after=_parse_cell(table.take_table("after")),
    )
    table.close()
    return turn


def _parse_cell(table: Table) -> Cell:
    account, changes = _strings(table, "account"), _strings(table, "changes")
    if account[len(account) - len(changes) :] != changes:
        raise table.fail("the changes are not the end of the account", "changes")
    return Cell(
        recipe=table.take("recipe", str),
        place=table.take("place", int),
        text=table.take("text", str),
        policy=_take_word(table, "policy", PatchPolicy),
        response=_take_word(table, "response", DriftResponse),
        key=table.take("key", str),
        merged_as=table.take_optional("merged_as", str),
        in_history=table.take_optional("in_history", bool),
        reasons=account[: len(account) - len(changes)],
        changes=changes,
        views=tuple(_parse_view(entry) for entry in _tables(table, "views")),
        signatures=tuple(_parse_signature(entry) for entry in _tables(table, "signatures")),
        verdict=_parse_verdict(table),
    )


def _parse_view(table: Table) -> HunkView:
    view = HunkView(
        path=table.take("path", str),
        index=table.take("index", int),
        verdict=table.take("verdict", str),
        wanted=_strings(table, "wanted"),
        found=_strings(table, "found"),
        line=table.take_optional("line", int),
    )
    table.close()
    return view


def _parse_signature(table: Table) -> Signature:
    signature = Signature(
        path=table.take("path", str), scope=table.take("scope", str), arguments=table.take("arguments", str)
    )
    table.close()
    return signature


def _parse_verdict(table: Table) -> PatchVerdict:
    verdict = PatchVerdict(
        id=table.take("id", str),
        source=table.take("source", str),
        verdict=_take_word(table, "verdict", Verdict),
        files=tuple(_parse_file(entry) for entry in _tables(table, "files")),
        why=table.take("why", str),
        same_as=table.take_optional("same_as", str),
    )
    table.close()
    if not verdict.files:
        raise table.fail("a patch of no file", "files")
    return verdict


def _parse_file(table: Table) -> FileVerdict:
    file = FileVerdict(
        path=table.take("path", str),
        verdict=_take_word(table, "verdict", Verdict),
        before=table.take_optional("before", str),
        after=table.take_optional("after", str),
        hunks=tuple(_parse_hunk(entry) for entry in _tables(table, "hunks")),
        why=table.take("why", str),
        moved_to=table.take_optional("moved_to", str),
    )
    table.close()
    return file


def _parse_hunk(table: Table) -> HunkVerdict:
    hunk = HunkVerdict(
        index=table.take("index", int),
        verdict=_take_word(table, "verdict", Verdict),
        line=table.take("line", int),
        found=table.take_optional("found", int),
        offset=table.take_optional("offset", int),
        scope=table.take_optional("scope", str),
        found_scope=table.take_optional("found_scope", str),
        why=table.take("why", str),
        displaced_by=table.take_optional("displaced_by", str),
    )
    table.close()
    return hunk


def _strings(table: Table, key: str) -> tuple[str, ...]:
    _require(table, key)
    return table.take_list(key, str)


def _tables(table: Table, key: str) -> tuple[Table, ...]:
    _require(table, key)
    return table.take_tables(key)


def _require(table: Table, key: str) -> None:
    # A list that is absent would read as one without entries: as a report in which nothing fails.
    if key not in table:
        raise table.fail("a required key is missing", key)


def _take_word(table: Table, key: str, words: type[_Word]) -> _Word:
    text = table.take(key, str)
    try:
        return words(text)
    except ValueError:
        raise table.fail("an unknown word", key, expected=", ".join(words), found=text) from None


def _take_version(table: Table) -> Version:
    text = table.take("version", str)
    try:
        return Version(text)
    except InvalidVersion:
        raise table.fail("not a version", "version", found=text) from None


def _take_time(table: Table) -> datetime | None:
    text = table.take_optional("uploaded", str)
    try:
        return None if text is None else datetime.fromisoformat(text)
    except ValueError:
        raise table.fail("not a time", "uploaded", found=text) from None


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Absent and null mean the same in a report."""
    return {key: value for key, value in values.items() if value is not None}
