"""``provision drift-issue``."""

import os
from pathlib import Path
from typing import Annotated

import requests
import typer

from provisioner.cli.shared import render
from provisioner.drift.issue import Tracker, print_body, update_issue
from provisioner.drift.reports.parse import parse_report
from provisioner.errors import UsageError
from provisioner.loading import load_json


def drift_issue(
    report: Annotated[Path, typer.Argument(help="A report of provision drift --json.")],
    repository: Annotated[str, typer.Option(help="The repository whose issue is kept, as OWNER/NAME.")],
    api: Annotated[
        str, typer.Option(help="Address of the issue API.", envvar="GITHUB_API_URL")
    ] = "https://api.github.com",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the issue's text; ask nobody.")] = False,
) -> int:
    """Keep one issue up to date with a drift report; the token comes from GITHUB_TOKEN.

    Example: [bold]provision drift-issue drift.json --repository me/patches[/bold]
    """
    found = _read(report)
    if dry_run:
        render.print_text(print_body(found))
        return 0
    token = os.environ.get("GITHUB_TOKEN")
    if not token:
        raise UsageError("GITHUB_TOKEN is not set", hints=("provision drift-issue REPORT --repository R --dry-run",))
    with requests.Session() as session:
        deed = update_issue(found, Tracker(api=api, repository=repository, token=token), session)
    render.print_note(f"issue: {deed}")
    return 0


def _read(path: Path) -> dict[str, object]:
    hints = ("provision drift --format json --output FILE",)
    try:
        text = path.read_text(encoding="utf-8")
        found: dict[str, object] = load_json(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"not a report: {error}", where=str(path), hints=hints) from error
    if not isinstance(found, dict) or found.get("schema") != "provision/drift/1":
        raise UsageError("not a drift report", where=str(path), expected="schema provision/drift/1", hints=hints)
    parse_report(text, where=str(path))
    return found
