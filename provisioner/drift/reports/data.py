"""The report as JSON, schema ``provision/drift/1``."""

import json
from dataclasses import asdict
from typing import Any

from provisioner.drift.bisect import Bisection
from provisioner.drift.model import Build, Cell, Column, DriftReport


def print_report_json(report: DriftReport) -> str:
    """The report as JSON text."""
    return _print("provision/drift/1", describe_report(report))


def print_bisection_json(found: Bisection) -> str:
    """A bisection as JSON text, schema ``provision/drift-bisect/1``."""
    turns = [
        {
            "recipe": turn.recipe,
            "patch": turn.patch,
            "last": _describe_build(turn.last),
            "first": _describe_build(turn.first),
            "before": _describe_cell(turn.before),
            "after": _describe_cell(turn.after),
        }
        for turn in found.turns
    ]
    payload = {"good": _describe_build(found.good), "bad": _describe_build(found.bad), "turns": turns}
    return _print("provision/drift-bisect/1", {**payload, "between": found.between, "judged": found.judged})


def describe_report(report: DriftReport) -> dict[str, Any]:
    """All of the report, for machines."""
    return {
        "against": list(report.against),
        "builds": [_describe_column(column) for column in report.columns],
        "failing": [
            {"build": build.label, "recipe": cell.recipe, "patch": cell.verdict.id, "key": cell.key}
            for build, cell in report.failing
        ],
        "cost": asdict(report.cost),
    }


def _describe_column(column: Column) -> dict[str, Any]:
    patches = [_describe_cell(cell) for cell in column.cells]
    return {**_describe_build(column.build), "failure": column.failure, "patches": patches}


def _describe_build(build: Build) -> dict[str, Any]:
    return {
        "label": build.label,
        "version": str(build.version),
        "filename": build.filename,
        "commit": build.commit,
        "variant": build.variant,
        "uploaded": build.uploaded.isoformat() if build.uploaded else None,
    }


def _describe_cell(cell: Cell) -> dict[str, Any]:
    return {
        "recipe": cell.recipe,
        "policy": str(cell.policy),
        "response": str(cell.response),
        "key": cell.key,
        "account": list(cell.account),
        **asdict(cell.verdict),
    }


def _print(schema: str, payload: dict[str, Any]) -> str:
    return json.dumps({"schema": schema, **payload}, indent=2) + "\n"
