"""A recipe's fork: its checkout found or made, and its patches, new files and ours as one series."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from provisioner.documents.policy import LeftOut, Omission
from provisioner.documents.recipe import ForkStack, Recipe
from provisioner.errors import EnvironmentConflictError, InvalidRecipeError, UsageError
from provisioner.patching.model import SeriesPatch
from provisioner.progress import Reporter
from provisioner.records import dataclass
from provisioner.series.model import FORK, NamedPatch, Series
from provisioner.series.recipe import open_series

if TYPE_CHECKING:
    from provisioner.series.checkout import Checkout, ForkPatch

OVERLAY_ID = f"{FORK}/overlay"


@dataclass(frozen=True, kw_only=True)
class ForkWish:
    """Which checkout to use: ``folder`` is where it is or is made, ``url`` and ``commit`` replace the recipe's.

    ``any_state`` takes an existing checkout as it is; without ``overlay`` its new files and their patches stay out.
    """

    folder: Path
    url: str | None = None
    commit: str | None = None
    any_state: bool = False
    overlay: bool = True


def obtain_checkout(fork: ForkStack, wish: ForkWish, reporter: Reporter) -> "Checkout":
    """The checkout in the wish's folder, cloned if there is none, proven to be the pinned commit.

    Raises EnvironmentConflictError for another commit or local edits; what cloning raises.
    """
    from provisioner.series.checkout import clone_fork

    if not (wish.folder / ".git").exists():
        _refuse_occupied(wish.folder, fork)
        commit = wish.commit or fork.commit
        reporter.stage(f"clone {wish.url or fork.url} at {commit[:12]}")
        clone_fork(wish.url or fork.url, commit, wish.folder)
    return _read_pinned(wish.folder, fork, wish)


def peek_checkout(fork: ForkStack, wish: ForkWish, reporter: Reporter) -> "Checkout":
    """The same with nothing left behind: a checkout that is not there yet is read from a temporary clone."""
    import tempfile

    from provisioner.series.checkout import clone_fork

    if (wish.folder / ".git").exists():
        return _read_pinned(wish.folder, fork, wish)
    _refuse_occupied(wish.folder, fork)
    with tempfile.TemporaryDirectory(prefix="provision-fork-") as temporary:
        folder = Path(temporary) / "checkout"
        reporter.stage(f"look at {wish.url or fork.url}")
        clone_fork(wish.url or fork.url, wish.commit or fork.commit, folder)
        return _read_pinned(folder, fork, wish)


def open_fork_series(
    recipe: Recipe, checkout: "Checkout", version: Version, *, overlay: bool = True, left_out: Collection[LeftOut] = ()
) -> Series:
    """The whole series of a recipe with a fork, for one version. Raises what opening its two parts raises."""
    return with_fork(open_series(recipe, version), recipe, checkout, overlay=overlay, left_out=left_out)


def with_fork(
    own: Series,
    recipe: Recipe,
    checkout: "Checkout",
    *,
    overlay: bool = True,
    left_out: Collection[LeftOut] = (),
) -> Series:
    """The fork's patches, its overlay and that one's patches, then the recipe's own, without those that are left out.

    What one of the recipe's own replaces is left out, too, unless that one is. Raises InvalidPatchError, with file and
    line, for a patch that is not understood; InvalidRecipeError where the pinned commit has no patch that the recipe
    replaces.
    """
    fork = _require_fork(recipe)
    if checkout.commit == fork.commit:
        _refuse_unknown(recipe, unknown_replaced(fork, checkout))
    patches = [_parse(patch, checkout, fork) for patch in checkout.patches]
    added = _read_overlay(checkout, fork)
    whole = replace(own, patches=(*patches, *added, *own.patches))
    asked = {item.id for item in left_out}
    replaced = [
        LeftOut(id=f"{FORK}/{name}", omission=Omission.REPLACED, by=by)
        for name, by in fork.replaced.items()
        if by not in asked
    ]
    unwanted = [] if overlay else [LeftOut(id=item.id, omission=Omission.NO_OVERLAY) for item in added]
    return whole.without((*replaced, *unwanted, *left_out))


def _read_overlay(checkout: "Checkout", fork: ForkStack) -> list[NamedPatch]:
    """The new files as one patch, and the patches that come after it."""
    from provisioner.patching.compare import patch_between

    if not checkout.overlay:
        return []
    files = {file.path: file.content for file in checkout.overlay}
    created = patch_between({}, files, id=OVERLAY_ID, source=f"fork: {fork.overlay}")
    return [
        NamedPatch(patch=SeriesPatch(patch=created)),
        *(_parse(patch, checkout, fork) for patch in checkout.overlay_patches),
    ]


def unknown_replaced(fork: ForkStack, checkout: "Checkout") -> tuple[str, ...]:
    """The names that the recipe replaces and of which the checkout has no patch."""
    found = {patch.path.stem for patch in (*checkout.patches, *checkout.overlay_patches)}
    return tuple(name for name in fork.replaced if name not in found)


def _refuse_unknown(recipe: Recipe, names: tuple[str, ...]) -> None:
    if names:
        raise InvalidRecipeError(
            "the fork has no such patch at the commit that the recipe pins",
            where=f"{recipe.where}: fork.replaced",
            found=", ".join(names),
        )


def find_series(recipe: Recipe, venv: Path, version: Version, left_out: Collection[LeftOut] = ()) -> Series:
    """The series of an environment that exists, without what its receipt says was ``left_out``: with the fork's part
    where the environment lies in its checkout.

    Raises what reading the checkout and the store raises.
    """
    fork, own = recipe.fork, open_series(recipe, version)
    if fork is not None and (venv.parent / ".git").exists() and (venv.parent / fork.launcher).is_file():
        from provisioner.series.checkout import read_checkout  # most recipes have no fork

        return with_fork(own, recipe, read_checkout(venv.parent, fork), left_out=left_out)
    return own.without(left_out)


def _read_pinned(folder: Path, fork: ForkStack, wish: ForkWish) -> "Checkout":
    from provisioner.series.checkout import read_checkout, require_pinned

    checkout = read_checkout(folder, fork)
    if not wish.any_state:
        require_pinned(checkout, fork, commit=wish.commit)
    if not checkout.patches:
        raise EnvironmentConflictError("the checkout has no patches", where=str(folder / fork.patches))
    return checkout


def _refuse_occupied(folder: Path, fork: ForkStack) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise EnvironmentConflictError(
            "not a git checkout", where=str(folder), hints=(f"git clone {fork.url} DIR", "--fork-dir DIR")
        )


def _require_fork(recipe: Recipe) -> ForkStack:
    if recipe.fork is None:
        raise UsageError("the recipe names no fork", where=recipe.where)
    return recipe.fork


def _parse(patch: "ForkPatch", checkout: "Checkout", fork: ForkStack) -> NamedPatch:
    from provisioner.patching.diff import parse_patch

    source = f"fork: {patch.path.relative_to(checkout.folder).as_posix()}"
    return NamedPatch(patch=SeriesPatch(patch=parse_patch(patch.text, id=patch.id, source=source, root=fork.root)))
