"""``provision revert``."""

from dataclasses import asdict
from typing import Annotated

import typer

from provisioner.cli.shared import render
from provisioner.cli.shared.catalogue import open_recipe, recipe_of
from provisioner.cli.shared.context import read_context
from provisioner.cli.shared.options import AsJson, RecipeVenv
from provisioner.counts import count_text
from provisioner.environment.site import find_site
from provisioner.environment.state import read_receipt
from provisioner.errors import UsageError
from provisioner.pipeline.revert import revert as restore
from provisioner.series.fork import find_series


def revert(
    recipe: Annotated[
        str | None, typer.Argument(help="A built-in recipe's name, or a recipe file's path (default: the venv's own).")
    ] = None,
    venv: RecipeVenv = None,
    as_json: AsJson = False,
) -> int:
    """Restore every patched file to its bytes as shipped and remove what the patches added.

    Example: [bold]provision revert hynix-stable[/bold]
    """
    if recipe is not None:
        wanted = open_recipe(recipe)
    elif venv is not None:
        wanted = recipe_of(venv.expanduser().absolute(), "revert")
    else:
        raise UsageError("name a recipe or an environment", hints=("provision status", "provision revert --venv DIR"))
    folder = read_context().venv(wanted, venv)
    site = find_site(folder, wanted.distribution)
    receipt = read_receipt(site.state_dir)
    series = find_series(wanted, folder, site.version, receipt.left_out if receipt else ())
    done = restore(wanted.distribution, series, folder)
    if as_json:
        files = [asdict(item) for item in done.files]
        render.print_json("revert", {"venv": str(done.venv), "files": files, "others": list(done.others)})
    elif done.files:
        render.print_text(count_text(len(done.files), "file is as shipped again", "files are as shipped again"))
    else:
        render.print_text("nothing to do: every file of the recipe's patches is as shipped")
    if not done.others:
        return 0
    for path in done.others:
        render.print_warning(f"{path} is not as RECORD says, and no patch of the recipe touches it")
    return 1
