"""``provision status``."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from provisioner.cli.shared import render
from provisioner.cli.shared.catalogue import open_recipe, recipe_of
from provisioner.cli.shared.context import read_context
from provisioner.cli.shared.hints import Given, complete_hint
from provisioner.cli.shared.options import AsJson, OptionalRecipe, RecipeVenv
from provisioner.environment.integrity import check_files, check_sources
from provisioner.pipeline.status import Status, read_status
from provisioner.resources import recipe_names


def status(
    recipe: OptionalRecipe = None,
    venv: RecipeVenv = None,
    rehash: Annotated[
        bool, typer.Option("--rehash", help="Read every file again, the binaries too, whatever was found before.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Say what an environment is and whether its files are still what the receipt says; exit 1 if not.

    Example: [bold]provision status hynix-stable --json[/bold]
    """
    check = check_files if rehash else check_sources
    found = [_complete(read_status(*target, check), recipe) for target in _targets(recipe, venv)]
    if as_json:
        payload = [describe(item) for item in found]
        render.print_json("status", payload[0] if recipe or venv else {"environments": payload})
    else:
        for item in found:
            render.print_text("\n".join(_lines(item)))
    if not found:
        render.print_note("no environment yet\nhint: provision recipes")
    return 0 if all(item.proven for item in found) else 1


def _complete(found: Status, recipe: str | None) -> Status:
    return replace(found, hints=tuple(complete_hint(hint, Given(recipe=recipe)) for hint in found.hints))


def _targets(recipe: str | None, venv: Path | None) -> list[tuple[Any, Path]]:
    context = read_context()
    if recipe is not None:
        wanted = open_recipe(recipe)
        return [(wanted, context.venv(wanted, venv))]
    if venv is None:
        known = [open_recipe(name) for name in recipe_names()]
        return [(item, context.venv(item, None)) for item in known if context.venv(item, None).exists()]
    folder = venv.expanduser().absolute()
    return [(recipe_of(folder, "status"), folder)]


def describe(status: Status) -> dict[str, Any]:
    """The status as JSON has it."""
    return asdict(status) | {"venv": str(status.venv), "proven": status.proven}


def _lines(status: Status) -> list[str]:
    mark = "proven" if status.proven else "NOT as the recipe says"
    lines = [
        f"{status.recipe}: {mark}",
        f"  environment  {status.venv}" + ("  (bare)" if status.bare else ""),
        f"  build        {status.distribution} {status.version} (commit {status.commit})",
        f"  python       {status.python}   torch {status.torch or 'none'} (CUDA {status.torch_cuda or 'none'})",
        f"  verified     {status.verification or 'not on a card'}",
    ]
    for patch in status.patches:
        lines.append(
            f"  patch        {patch.id}: {patch.verdict} ({patch.policy})" + (f" - {patch.why}" if patch.why else "")
        )
    lines += [f"  left out     {item}" for item in status.left_out]
    lines += [f"  problem      {problem}" for problem in status.problems]
    lines += [f"  note         {note}" for note in status.notes]
    lines += [f"hint: {hint}" for hint in status.hints]
    return lines
