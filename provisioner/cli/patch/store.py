"""``provision patches``."""

import textwrap
from typing import Annotated, Any

import typer
from packaging.specifiers import SpecifierSet

from provisioner.cli.shared import render
from provisioner.cli.shared.catalogue import all_recipes
from provisioner.cli.shared.options import AsJson
from provisioner.resources import patches_folder
from provisioner.series.store import StoredPatch, open_stored_patch, read_store


def patches(
    patch_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Tell about this patch alone.")] = None,
    as_json: AsJson = False,
) -> int:
    """List the patches that travel with the tool: what each mends, for which versions, and who requires it.

    Example: [bold]provision patches sm80-cpu-repack[/bold]
    """
    folder = patches_folder()
    found = (open_stored_patch(folder, patch_id),) if patch_id else read_store(folder)
    uses = {(use.id, recipe.name): use for recipe in all_recipes() for use in recipe.patches}
    rows = [_describe(patch, uses) for patch in found]
    if as_json:
        render.print_json("patches", {"patches": rows})
    else:
        render.print_text("\n\n".join(_paragraph(row) for row in rows))
    return 0


def _describe(patch: StoredPatch, uses: dict[tuple[str, str], Any]) -> dict[str, Any]:
    return {
        "id": patch.id,
        "title": patch.title,
        "upstream": patch.upstream,
        "merged_as": patch.merged_as,
        "fixes": patch.fixes,
        "cause": patch.cause,
        "check": patch.check,
        "distribution": patch.distribution,
        "variants": [
            {"file": variant.file, "versions": _print_range(variant.versions), "cut_against": str(variant.cut_against)}
            for variant in patch.variants
        ],
        "recipes": [
            {"recipe": recipe, "policy": str(use.policy), "why": use.why}
            for (patch_id, recipe), use in uses.items()
            if patch_id == patch.id
        ],
    }


def _print_range(versions: SpecifierSet) -> str:
    """From the lowest to the highest; a set of specifiers has no order of its own."""
    return ",".join(sorted(map(str, versions), key=lambda text: text.startswith("<")))


def _paragraph(row: dict[str, Any]) -> str:
    versions = ", ".join(f"{variant['versions']} ({variant['file']})" for variant in row["variants"])
    lines = [f"{row['id']}: {row['title']}", f"  versions  {versions}"]
    lines += [f"  upstream  {row['upstream']}"] if row["upstream"] else []
    lines += [f"  merged as {row['merged_as']}"] if row["merged_as"] else []
    lines += [f"  {use['recipe']}: {use['policy']} - {use['why']}" for use in row["recipes"]]
    for key in ("fixes", "cause"):
        if row[key]:
            lines += textwrap.wrap(" ".join(row[key].split()), 100, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)
