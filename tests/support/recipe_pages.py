"""The tables of docs/recipes, made from the recipes. Run as a program, it writes them into the pages."""

import re
from pathlib import Path

from provisioner.documents.recipe import Recipe, Serve, parse_recipe
from provisioner.resources import recipes_folder

PAGES = Path(__file__).parents[2] / "docs" / "recipes"
_PLACE = re.compile(r"(<!-- generated: (?P<section>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def load_recipe(name: str) -> Recipe:
    text = (recipes_folder() / f"{name}.toml").read_text(encoding="utf-8")
    return parse_recipe(text, name=name, where=f"{name}.toml")


def table_of(serve: Serve) -> str:
    """A Markdown table of a section's arguments and variables with their reasons."""
    rows = [(" ".join(filter(None, (flag.name, flag.value))), flag.why) for flag in serve.flags]
    rows += [(f"{variable.name}={variable.value}", variable.why) for variable in serve.variables]
    lines = [
        "| setting | why |",
        "|---|---|",
        *(f"| `{setting.replace('|', chr(92) + '|')}` | {why} |" for setting, why in rows),
    ]
    return "\n".join(lines) + f"\n\nPort {serve.port}, host {serve.host}.\n"


def fill(page: str, recipe: Recipe) -> str:
    """The text of a page with its tables as the recipe has them now."""

    def replace(match: re.Match[str]) -> str:
        serve = recipe.serve if match["section"] == "serve" else recipe.serve_without_fork
        assert serve is not None, f"{recipe.name} has no section {match['section']}"
        return match[1] + table_of(serve) + match[3]

    return _PLACE.sub(replace, page)


if __name__ == "__main__":
    for path in sorted(PAGES.glob("*.md")):
        if path.stem != "README":
            path.write_text(fill(path.read_text(encoding="utf-8"), load_recipe(path.stem)), encoding="utf-8")
