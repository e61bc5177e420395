"""What commands share: the user's folders and settings, and the pieces that a recipe needs. Read here, at the edge."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from provisioner.errors import InvalidLockError
from provisioner.provisioning.home import Home, find_home
from provisioner.recipe import Recipe

if TYPE_CHECKING:
    from provisioner.environment.lock import Lock
    from provisioner.environment.uv import Uv
    from provisioner.wheels.lazy import Wheel
    from provisioner.wheels.settings import IndexSettings


@dataclass(frozen=True, kw_only=True)
class Context:
    """One user's surroundings."""

    home: Home
    index_url: str | None = None

    def settings(self) -> "IndexSettings":
        """Which indexes are asked."""
        from provisioner.wheels.settings import read_settings

        return read_settings(os.environ, Path.home(), index_url=self.index_url, cache=self.home.cache)

    def uv(self) -> "Uv":
        """uv, isolated, with the user's index."""
        from provisioner.environment.uv import find_uv

        return find_uv(os.environ, index=self.settings().pypi)

    def venv(self, recipe: Recipe, given: Path | None) -> Path:
        """The environment meant: the given one or the recipe's default, never resolved through links.

        A recipe's fork runs the environment in its checkout, so that one is meant unless only the plain one exists.
        """
        if given is not None:
            return given.expanduser().absolute()
        plain = self.home.venv(recipe.name).absolute()
        if recipe.fork is None or (plain.exists() and not self.fork_venv(recipe).exists()):
            return plain
        return self.fork_venv(recipe)

    def fork_venv(self, recipe: Recipe) -> Path:
        """The environment in the default checkout of a recipe's fork."""
        return self.home.fork(recipe.name).absolute() / "venv"

    def lock(self, recipe: Recipe) -> "Lock":
        """The recipe's lock.

        Raises InvalidLockError where there is none yet.
        """
        from provisioner.provisioning.locks import find_lock, read_lock

        files = find_lock(self.home, recipe.name)
        if files is None:
            raise InvalidLockError(
                "there is no lock for this recipe yet", where=recipe.where, hints=(f"provision lock {recipe.name}",)
            )
        return read_lock(files)

    def locked_wheel(self, lock: "Lock") -> "Callable[[], Wheel]":
        """Opens the locked wheel where it lies; nothing is asked before it is called."""

        def open_it() -> "Wheel":
            from provisioner.provisioning.wheel import open_locked_wheel

            return open_locked_wheel(lock, self.settings())

        return open_it


def read_context(index_url: str | None = None) -> Context:
    """The context of this process's environment."""
    return Context(home=find_home(os.environ), index_url=index_url)
