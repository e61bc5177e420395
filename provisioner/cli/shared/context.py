"""What commands share: the user's folders and settings, and the pieces that a recipe needs. Read here, at the edge."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from provisioner.documents.recipe import Recipe
from provisioner.errors import UsageError
from provisioner.home import Home, find_home
from provisioner.records import dataclass

if TYPE_CHECKING:
    from provisioner.documents.lock import Lock, LockedBuild, LockScope
    from provisioner.environment.uv import Uv
    from provisioner.index.lazy import Wheel
    from provisioner.index.settings import IndexSettings
    from provisioner.locks.first_use import FirstUse
    from provisioner.progress import Reporter


@dataclass(frozen=True, kw_only=True)
class Context:
    """One user's surroundings."""

    home: Home
    index_url: str | None = None

    def settings(self) -> "IndexSettings":
        """Which indexes are asked."""
        from provisioner.index.settings import read_settings

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

    def lock(self, recipe: Recipe, scope: "LockScope", first_use: "FirstUse") -> "Lock":
        """The recipe's lock; made on the first use, unless that is refused. A lock of another build is told of.

        Raises InvalidLockError where there must be one and is none.
        """
        from provisioner.locks.first_use import describe_other_build, obtain_lock

        lock = obtain_lock(
            self.home, recipe, scope, first_use, lambda wanted, known: self._make_lock(recipe, wanted, known)
        )
        other = describe_other_build(lock, recipe)
        if other is not None:
            from provisioner.cli.shared import render

            word = shlex.quote(recipe.where) if "/" in recipe.where else recipe.name
            render.print_warning(f"{other}; to follow the recipe: provision lock {word}")
        return lock

    def _make_lock(self, recipe: Recipe, scope: "LockScope", known: "LockedBuild | None") -> "Lock":
        from provisioner.cli.shared.progress import open_reporter
        from provisioner.locks.make import LockRequest, make_lock
        from provisioner.series.recipe import touched_by

        request = LockRequest(
            recipe=recipe,
            build=recipe.build,
            exclude_newer=None,
            touched=lambda found: touched_by(recipe, found),
            scope=scope,
            known=known,
        )
        with open_reporter() as reporter:
            return make_lock(request, self.settings(), self.uv(), reporter)

    def wheel_file(self, lock: "Lock") -> "Callable[[Reporter], Path] | None":
        """Fetches the wheel of a commit build; None for a release, which uv takes from the user's index."""
        if lock.build.url is None:
            return None
        from provisioner.locks.wheel import fetch_locked_wheel

        return lambda reporter: fetch_locked_wheel(lock, self.settings(), reporter)

    def locked_wheel(self, lock: "Lock") -> "Callable[[], Wheel]":
        """Opens the locked wheel where it lies; nothing is asked before it is called."""

        def open_it() -> "Wheel":
            from provisioner.locks.wheel import open_locked_wheel

            return open_locked_wheel(lock, self.settings())

        return open_it


def read_context(index_url: str | None = None) -> Context:
    """The context of this process's environment."""
    return Context(home=find_home(os.environ), index_url=index_url)


def find_places(
    recipe: Recipe, context: Context, venv: Path | None, fork_dir: Path | None, *, without_fork: bool
) -> tuple[Path | None, Path]:
    """The fork's checkout (None where none is used) and the environment that goes with it.

    Raises UsageError for options that contradict each other or the recipe.
    """
    if fork_dir is not None and (without_fork or recipe.fork is None):
        why = "--without-fork" if without_fork else f"the recipe {recipe.name}"
        raise UsageError(f"--fork-dir does not go with {why}")
    if recipe.fork is None or without_fork:
        return None, venv.expanduser().absolute() if venv else context.home.venv(recipe.name).absolute()
    if fork_dir is None and venv is not None:
        fork_dir = venv.expanduser().absolute().parent
    folder = fork_dir.expanduser().absolute() if fork_dir else context.home.fork(recipe.name)
    if venv is not None and venv.expanduser().absolute() != folder / "venv":
        raise UsageError(
            "the fork's launcher runs the venv of its own checkout and no other",
            expected=str(folder / "venv"),
            found=str(venv),
            hints=("leave --venv out, or serve --without-fork",),
        )
    return folder, folder / "venv"
