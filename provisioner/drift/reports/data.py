"""The report as JSON, schema ``provision/drift/1``. Pure."""

import json
from dataclasses import asdict
from typing import Any

from provisioner.drift.model import Bisection, Build, Cell, Column, DriftReport, Turn


def print_report_json(report: DriftReport) -> str:
    """The report as JSON text."""
    return _print("provision/drift/1", describe_report(report))


def print_bisection_json(found: Bisection) -> str:
    """A bisection as JSON text, schema ``provision/drift-bisect/1``."""
    return _print("provision/drift-bisect/1", describe_bisection(found))


def describe_report(report: DriftReport) -> dict[str, Any]:
    """All of the report, for machines."""
    return {
        "against": list(report.against),
        "builds": [_describe_column(column) for column in report.columns],
        **describe_findings(report),
        "bisections": [describe_bisection(found) for found in report.bisections],
        "cost": asdict(report.cost),
    }


def describe_findings(report: DriftReport) -> dict[str, Any]:
    """What follows from the cells: those that fail, and the places that nobody judged."""
    return {
        "failing": [
            {"build": build.label, "recipe": cell.recipe, "patch": cell.verdict.id, "key": cell.key}
            for build, cell in report.failing
        ],
        "not_judged": [
            {"build": build.label, "recipe": recipe, "patch": patch} for build, (recipe, patch) in report.not_judged
        ],
    }


def describe_cell(cell: Cell) -> dict[str, Any]:
    """One cell, for machines; ``changes`` are the last lines of ``account``."""
    return {
        "recipe": cell.recipe,
        "place": cell.place,
        "text": cell.text,
        "policy": str(cell.policy),
        "response": str(cell.response),
        "key": cell.key,
        "merged_as": cell.merged_as,
        "in_history": cell.in_history,
        "account": list(cell.account),
        "changes": list(cell.changes),
        "views": [asdict(view) for view in cell.views],
        "signatures": [asdict(signature) for signature in cell.signatures],
        **asdict(cell.verdict),
    }


def describe_bisection(found: Bisection) -> dict[str, Any]:
    """One bisection, for machines."""
    return {
        "good": _describe_build(found.good),
        "bad": _describe_build(found.bad),
        "turns": [_describe_turn(turn) for turn in found.turns],
        "between": found.between,
        "judged": found.judged,
    }


def _describe_turn(turn: Turn) -> dict[str, Any]:
    return {
        "recipe": turn.recipe,
        "patch": turn.patch,
        "last": _describe_build(turn.last),
        "first": _describe_build(turn.first),
        "before": describe_cell(turn.before),
        "after": describe_cell(turn.after),
    }


def _describe_column(column: Column) -> dict[str, Any]:
    return {
        **_describe_build(column.build),
        "failure": column.failure,
        "recipes": list(column.recipes),
        "unread": [asdict(item) for item in column.unread],
        "patches": [describe_cell(cell) for cell in column.cells],
    }


def _describe_build(build: Build) -> dict[str, Any]:
    return {
        "label": build.label,
        "version": str(build.version),
        "filename": build.filename,
        "commit": build.commit,
        "variant": build.variant,
        "uploaded": build.uploaded.isoformat() if build.uploaded else None,
    }


def _print(schema: str, payload: dict[str, Any]) -> str:
    return json.dumps({"schema": schema, **payload}, indent=2) + "\n"
