"""The lock that a run goes by: the one there is, or, where a recipe has none yet, one made on the first use."""

from collections.abc import Callable
from enum import StrEnum
from typing import assert_never

from provisioner.documents.lock import Lock, LockedBuild, LockScope
from provisioner.documents.recipe import CommitBuild, Recipe, ReleaseBuild
from provisioner.errors import InvalidLockError
from provisioner.home import Home
from provisioner.locks.find import find_lock, lock_files, read_lock, write_lock
from provisioner.resources import lockfiles_folder

MakeLock = Callable[[LockScope, LockedBuild | None], Lock]
"""Makes a lock of a scope, of the wheel that an incomplete lock insists on, if there is one."""


class FirstUse(StrEnum):
    """What a run without a lock does."""

    KEEP = "make a lock and keep it for every later run"
    FORGET = "make a lock for this run alone"
    REFUSE = "refuse to run"


def obtain_lock(home: Home, recipe: Recipe, scope: LockScope, first_use: FirstUse, make: MakeLock) -> Lock:
    """The recipe's lock, which holds ``scope`` at least.

    Raises InvalidLockError where it must exist and does not; and whatever making it raises.
    """
    files = find_lock(home, recipe.name)
    former = read_lock(files) if files else None
    if former is not None and scope is LockScope.COMPLETE:
        former = _completed_by_shipped(former)
    if former is not None and (former.complete or scope is LockScope.WHEEL_ALONE):
        return former
    if first_use is FirstUse.REFUSE:
        raise InvalidLockError(
            "there is no lock for this recipe yet"
            if former is None
            else "the recipe's lock was made by a run without dependencies and holds none",
            where=str(files.facts) if files else recipe.where,
            hints=(f"provision lock {recipe.name}", "leave --require-lock out, to make one on this first use"),
        )
    made = make(scope, former.build if former else None)
    if first_use is FirstUse.KEEP:
        write_lock(lock_files(home.locks, recipe.name), made)
    return made


def _completed_by_shipped(own: Lock) -> Lock:
    """The lock that travels with the tool where it is complete and the user's own, of the same wheel, is not."""
    files = lock_files(lockfiles_folder(), own.recipe)
    if own.complete or not files.facts.exists():
        return own
    shipped = read_lock(files)
    return shipped if shipped.complete and shipped.build.sha256 == own.build.sha256 else own


def describe_other_build(lock: Lock, recipe: Recipe) -> str | None:
    """How the lock's build is another one than the recipe's, as after an edit of the recipe; None where it is not.

    That is allowed (``provision lock --version``): a run goes by the lock, and should say so.
    """
    locked = lock.build
    match recipe.build:
        case ReleaseBuild(version=version):
            wanted, is_same = f"{version}", locked.url is None and locked.version == version
        case CommitBuild(commit=commit):
            wanted, is_same = f"commit {commit[:9]}", locked.commit == commit
        case _:
            assert_never(recipe.build)
    if is_same:
        return None
    held = f"{locked.version}" if locked.url is None else f"commit {locked.commit[:9]} ({locked.version})"
    return f"the lock holds {locked.distribution} {held}, the recipe says {wanted}"
