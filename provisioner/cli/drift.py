"""``provision drift``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from provisioner.drift.model import DriftReport
    from provisioner.progress import Reporter


def drift(
    recipes: Annotated[list[str] | None, typer.Argument(help="Recipes by name or path (default: all).")] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(help="nightly, commit:SHA, commits:FILE, pypi, pypi:VERSION, pypi:RANGE, a wheel or a folder."),
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, help="Only the newest N builds.")] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="Freeze one text of a patch: ID@VERSION.", metavar="ID@VERSION")
    ] = None,
    build_variant: Annotated[str | None, typer.Option(help="The build's variant, such as cu129.")] = None,
    form: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the report to this file.")] = None,
    index_url: Annotated[str | None, typer.Option(help="A mirror of the vLLM wheel index.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> int:
    """Judge patches on builds that nobody has installed yet; exit 1 where a required patch does not hold.

    Example: [bold]provision drift hynix-stable --against 'pypi:>=0.26' --last 5[/bold]
    """
    from provisioner.cli.progress import open_reporter
    from provisioner.drift.policy import exit_code

    with open_reporter() as reporter:
        reporter.stage("judge the patches")
        report = _scan(recipes or [], against or ["pypi"], last, variant or [], build_variant, index_url, reporter)
    _write(_print(report, "json" if as_json else form), output)
    return exit_code(report)


def _scan(
    names: list[str],
    against: list[str],
    last: int | None,
    frozen: list[str],
    build_variant: str | None,
    index_url: str | None,
    reporter: "Reporter",
) -> "DriftReport":
    from provisioner.cli.catalogue import all_recipes, open_recipe
    from provisioner.cli.context import read_context
    from provisioner.drift.builds import find_builds
    from provisioner.drift.scan import scan
    from provisioner.drift.subjects import parse_frozen, recipe_subject

    settings = read_context(index_url).settings()
    texts = parse_frozen(frozen)
    chosen = [open_recipe(name) for name in names] or all_recipes()
    subjects = [recipe_subject(recipe, texts) for recipe in chosen]
    builds = find_builds(against, settings, last=last, variant=build_variant)
    return scan(subjects, builds, settings, against=against, reporter=reporter)


def _print(report: "DriftReport", form: str) -> str:
    import json

    from provisioner.drift.reports.data import SCHEMA, describe_report
    from provisioner.drift.reports.text import print_text

    match form:
        case "text":
            return print_text(report)
        case "json":
            payload = {"schema": f"provision/{SCHEMA}/1", **describe_report(report)}
            return json.dumps(payload, indent=2, default=str) + "\n"
        case _:
            raise typer.BadParameter("not a form of the report", param_hint="--format")


def _write(text: str, output: Path | None) -> None:
    from provisioner.cli import render
    from provisioner.files import write_whole

    if output is None:
        render.print_text(text)
    else:
        write_whole(output, text.encode())
        render.print_note(f"wrote {output}")
