"""``provision verify``."""

import os
from pathlib import Path
from typing import Annotated

import typer

from provisioner.cli.shared import render
from provisioner.cli.shared.catalogue import open_recipe
from provisioner.cli.shared.context import read_context
from provisioner.cli.shared.options import AsJson, Card, OptionalRecipe, RecipeVenv
from provisioner.cli.shared.progress import open_reporter
from provisioner.documents.recipe import Recipe
from provisioner.environment.site import find_site
from provisioner.environment.state import read_owner, state_of
from provisioner.errors import UsageError
from provisioner.files import resolve_output, write_output
from provisioner.gpu.report import Form, VerifyReport, describe, print_markdown, print_report
from provisioner.gpu.verify import Wish, parse_occupancy
from provisioner.pipeline.verification import allocator_of, find_card, verify_site
from provisioner.resources import recipe_names


def verify(
    recipe: OptionalRecipe = None,
    venv: RecipeVenv = None,
    gpu: Card = None,
    quick: Annotated[bool, typer.Option("--quick", help="Some twenty seconds; this is the default.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Minutes: every shape, one above 2 GiB, all memory.")] = False,
    occupancy: Annotated[
        str | None, typer.Option(help="How full the card is made: 27GiB, or 95% of what is free.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Compare the weights in this folder, layer by layer.")] = None,
    as_json: AsJson = False,
    report: Annotated[Path | None, typer.Option(help="Also write the report here: JSON, or Markdown for .md.")] = None,
) -> int:
    """Prove on the card that will serve that compiled repack, CPU repack and reference give the same bits.

    Exit 0 bit-exact, 1 mismatch, 4 toolchain or unsupported, 8 card fault, wedged, lost or not run.

    Example: [bold]provision verify samsung --full --report samsung.md[/bold]
    """
    if quick and full:
        raise UsageError("--quick and --full exclude each other")
    if report is not None:
        resolve_output(report.expanduser().absolute())  # refused now, not after the card's work
    found = _verify(recipe, venv, gpu, _make_wish(full=full, occupancy=occupancy, model=model))
    if report is not None:
        _write(found, report)
    return _show(found, as_json=as_json)


def _make_wish(*, full: bool, occupancy: str | None, model: Path | None) -> Wish:
    return Wish(
        form=Form.FULL if full else Form.QUICK,
        occupancy=parse_occupancy(occupancy) if occupancy is not None else None,
        model=model.expanduser().absolute() if model is not None else None,
    )


def _verify(recipe: str | None, venv: Path | None, gpu: str | None, wish: Wish) -> VerifyReport:
    card = find_card(gpu, os.environ, form=wish.form)
    if isinstance(card, VerifyReport):
        return card
    chosen, folder = _find_environment(recipe, venv)
    site = find_site(folder, chosen.distribution if chosen else "vllm")
    with open_reporter() as reporter:
        return verify_site(site, card, wish, allocator=allocator_of(chosen), reporter=reporter)


def _find_environment(recipe: str | None, venv: Path | None) -> tuple[Recipe | None, Path]:
    context = read_context()
    if recipe is not None:
        wanted = open_recipe(recipe)
        return wanted, context.venv(wanted, venv)
    if venv is not None:
        folder = venv.expanduser().absolute()
        owner = read_owner(state_of(folder))
        return (open_recipe(owner.recipe) if owner else None), folder
    known = [open_recipe(name) for name in recipe_names()]
    made = [(item, context.venv(item, None)) for item in known if context.venv(item, None).exists()]
    if len(made) != 1:
        names = tuple(f"provision verify {item.name}" for item, _ in made)
        raise UsageError("name the recipe or the environment to check", hints=names or ("provision recipes",))
    return made[0]


def _write(found: VerifyReport, path: Path) -> None:
    text = print_markdown(found) if path.suffix == ".md" else print_report(found)
    write_output(path.expanduser().absolute(), text.encode())


def _show(found: VerifyReport, *, as_json: bool) -> int:
    render.print_text(print_report(found) if as_json else "\n".join(describe(found)))
    return found.verdict.exit_code
