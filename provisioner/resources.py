"""Where the recipes, patches and locks that travel with the tool lie: in the built wheel, or in a checkout."""

from pathlib import Path

_PACKAGE = Path(__file__).parent


def package_folder() -> Path:
    """The folder of the tool's own modules."""
    return _PACKAGE


def recipes_folder() -> Path:
    """The folder of the built-in recipes, ``NAME.toml`` each."""
    return _PACKAGE / "recipes"


def patches_folder() -> Path:
    """The patch store, a folder for each patch."""
    return _travelling("patches")


def lockfiles_folder() -> Path:
    """The locks that travel with the tool, ``RECIPE.txt`` and ``RECIPE.toml``."""
    return _travelling("lockfiles")


def recipe_names() -> tuple[str, ...]:
    """The names of the built-in recipes, sorted."""
    return tuple(sorted(path.stem for path in recipes_folder().glob("*.toml")))


def stored_patch_names() -> tuple[str, ...]:
    """The ids of the patches that travel with the tool, sorted."""
    return tuple(sorted(path.name for path in patches_folder().iterdir() if is_stored_patch(path)))


def is_stored_patch(folder: Path) -> bool:
    """Whether ``folder`` holds a patch in the form of the store."""
    return (folder / "patch.toml").is_file()


def _travelling(name: str) -> Path:
    # The wheel carries the folder as package data; an editable install reads it from the checkout.
    installed = _PACKAGE / "_data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
