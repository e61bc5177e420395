"""Recipes by name or path, for every command that takes one."""

import shlex
from pathlib import Path

from provisioner.documents.recipe import Recipe, parse_recipe
from provisioner.errors import InvalidRecipeError, UsageError
from provisioner.nearest import near_names
from provisioner.resources import recipe_names, recipes_folder


def open_recipe(name: str) -> Recipe:
    """The built-in recipe of this name, or the recipe file at this path.

    Raises UsageError, naming the nearest known recipe, where there is neither; InvalidRecipeError for what it holds.
    """
    path = find_recipe_file(name)
    return _read(path, where=path.name if name in recipe_names() else name)


def recipe_of(venv: Path, command: str) -> Recipe:
    """The recipe that an environment was made or taken over by.

    Raises UsageError, naming how ``command`` goes on from there, where the environment is not ours.
    """
    from provisioner.environment.state import read_owner, state_of

    owner = read_owner(state_of(venv))
    if owner is None:
        raise UsageError(
            "this environment was not made by provision; name the recipe to judge it by",
            where=str(venv),
            hints=(f"provision {command} RECIPE --venv {shlex.quote(str(venv))}", "provision recipes"),
        )
    return open_recipe(owner.recipe)


def find_recipe_file(name: str) -> Path:
    """The file of a recipe. Raises UsageError where there is none."""
    if name in recipe_names():
        return recipes_folder() / f"{name}.toml"
    path = Path(name)
    if path.suffix == ".toml" or "/" in name:
        if path.is_file():
            return path
        raise UsageError("no such recipe file", where=name, hints=(f"ls -ld {shlex.quote(name)}", "provision recipes"))
    file = ("a recipe file is named by its path: ./" + name,) if path.is_file() else ()
    raise UsageError(f"no recipe is called {name!r}", hints=(*file, _nearest(name), "provision recipes"))


def all_recipes() -> tuple[Recipe, ...]:
    """Every built-in recipe, by name."""
    return tuple(open_recipe(name) for name in recipe_names())


def _read(path: Path, *, where: str) -> Recipe:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRecipeError(
            f"the recipe cannot be read: {error}", where=where, hints=(f"file {shlex.quote(str(path))}",)
        ) from error
    try:
        return parse_recipe(text, name=path.stem, where=where)
    except InvalidRecipeError as error:
        error.hints = error.hints or (
            f"a recipe that holds, to compare with: cat {recipes_folder()}/hynix-stable.toml",
        )
        raise


def _nearest(name: str) -> str:
    known = recipe_names()
    return next(iter(near_names(name, known)), f"known recipes: {', '.join(known)}")
