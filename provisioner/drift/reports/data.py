"""The report as JSON, schema ``provision/drift/1``."""

from dataclasses import asdict
from typing import Any

from provisioner.drift.model import Cell, Column, DriftReport

SCHEMA = "drift"


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
    build = column.build
    return {
        "label": build.label,
        "version": str(build.version),
        "filename": build.filename,
        "commit": build.commit,
        "variant": build.variant,
        "uploaded": build.uploaded.isoformat() if build.uploaded else None,
        "failure": column.failure,
        "patches": [_describe_cell(cell) for cell in column.cells],
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
