"""``provision recipes``."""

from typing import Any

from provisioner.cli.shared import render
from provisioner.cli.shared.catalogue import all_recipes
from provisioner.cli.shared.options import AsJson
from provisioner.documents.recipe import Build, CommitBuild, Recipe


def recipes(
    as_json: AsJson = False,
) -> int:
    """List the built-in recipes: card, build, and the policy of each patch.

    Example: [bold]provision recipes[/bold]
    """
    found = all_recipes()
    if as_json:
        render.print_json("recipes", {"recipes": [_describe(recipe) for recipe in found]})
    else:
        render.print_table(("RECIPE", "CARD", "BUILD", "PATCHES", "TITLE"), map(_row, found))
    return 0


def _describe(recipe: Recipe) -> dict[str, Any]:
    fork = recipe.fork
    return {
        "name": recipe.name,
        "title": recipe.title,
        "summary": recipe.summary,
        "distribution": recipe.distribution,
        "build": build_text(recipe.build),
        "commit": getattr(recipe.build, "commit", None),
        "card": _card_text(recipe),
        "python": recipe.python.preferred,
        "fork": {"url": fork.url, "commit": fork.commit, "replaced": dict(fork.replaced)} if fork else None,
        "patches": [{"id": use.id, "policy": use.policy, "why": use.why} for use in recipe.patches],
    }


def _row(recipe: Recipe) -> tuple[str, ...]:
    patches = ", ".join(f"{use.id} ({use.policy})" for use in recipe.patches) or "none"
    return recipe.name, _card_text(recipe), build_text(recipe.build), patches, recipe.title


def _card_text(recipe: Recipe) -> str:
    card = recipe.card
    return f"{card.name} {card.memory_gib} GB" if card else "any"


def build_text(build: Build) -> str:
    """The build in a word."""
    return f"{build.version}+g{build.commit[:9]}" if isinstance(build, CommitBuild) else str(build.version)
