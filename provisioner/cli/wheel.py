"""``provision wheel``."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from packaging.version import Version

from provisioner.cli.shared import render
from provisioner.cli.shared.catalogue import open_recipe
from provisioner.cli.shared.context import read_context
from provisioner.cli.shared.options import AsJson, CutAgainst, IndexUrl, OptionalRecipe, Overlay, Package, Root, Strip
from provisioner.cli.shared.progress import open_reporter
from provisioner.counts import count_text
from provisioner.documents.lock import LockScope
from provisioner.documents.patched_wheel import PatchedWheel
from provisioner.documents.recipe import Recipe
from provisioner.errors import UsageError
from provisioner.locks.first_use import FirstUse
from provisioner.locks.wheel import fetch_locked_wheel
from provisioner.patched_wheel.build import BuiltWheel, WheelRequest, build_wheel
from provisioner.patched_wheel.verify import VerifiedWheel, verify_wheel
from provisioner.pipeline.shipped import cut_against_release, fetch_shipped
from provisioner.progress import Reporter
from provisioner.records import dataclass
from provisioner.series.files import Reading
from provisioner.series.model import Series
from provisioner.series.sources import Wanted, read_series
from provisioner.wheels.names import parse_wheel_name


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What the command line names."""

    recipe: str | None
    patches: tuple[str, ...]
    overlays: tuple[Path, ...]
    root: str
    strip: int | None
    cut_against: str | None
    against: str | None
    package: str
    index_url: str | None

    def reading(self) -> Reading:
        return Reading(strip=self.strip, root=self.root)


def wheel(
    recipe: OptionalRecipe = None,
    patches: Annotated[
        list[str] | None,
        typer.Option(help="Patches that come before the recipe's: ids, files or folders.", metavar="ID|FILE|DIR"),
    ] = None,
    root: Root = "",
    strip: Strip = None,
    cut_against: CutAgainst = None,
    overlay: Overlay = None,
    against: Annotated[
        str | None,
        typer.Option(help="The build to patch: pypi:VERSION, commit:SHA or a wheel (default: the recipe's lock)."),
    ] = None,
    package: Package = "vllm",
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder for the wheel.", metavar="DIR")] = Path(),
    verify: Annotated[Path | None, typer.Option(help="Make nothing: prove this patched wheel.", metavar="FILE")] = None,
    origin: Annotated[
        Path | None, typer.Option(help="With --verify: the wheel it was made from, to prove the rest.", metavar="WHEEL")
    ] = None,
    index_url: IndexUrl = None,
    as_json: AsJson = False,
) -> int:
    """Make one wheel of a build and a series of patches, which says what is in it; or verify one.

    Equal input gives equal bytes. With --verify, exit 1 where something is not as it must be.

    Example: [bold]provision wheel hynix-stable -o dist[/bold]
    """
    if origin is not None and verify is None:
        raise UsageError("--origin goes with --verify")
    if verify is not None:
        if recipe or patches or overlay or against:
            raise UsageError("--verify makes nothing: it takes --origin alone")
        return _verify(verify, origin, as_json=as_json)
    if recipe is None and not (patches or overlay):
        raise UsageError("name a recipe, or patches", hints=("provision recipes", "provision wheel --patches FILE …"))
    wanted = _Wanted(
        recipe=recipe, patches=tuple(patches or ()), overlays=tuple(overlay or ()), root=root, strip=strip,
        cut_against=cut_against, against=against, package=package, index_url=index_url,
    )  # fmt: skip
    return _build(wanted, output, as_json=as_json)


def _build(wanted: _Wanted, output: Path, *, as_json: bool) -> int:
    recipe = open_recipe(wanted.recipe) if wanted.recipe is not None else None
    with open_reporter() as reporter:
        origin = _fetch_origin(wanted, recipe, reporter)
        series = _read_series(wanted, recipe, str(parse_wheel_name(origin.name).version))
        request = WheelRequest(origin=origin, series=series, label=recipe.name if recipe else "patched")
        built = build_wheel(request, output.expanduser().absolute(), reporter)
    _show_built(built, as_json=as_json)
    return 0


def _fetch_origin(wanted: _Wanted, recipe: Recipe | None, reporter: Reporter) -> Path:
    context = read_context(wanted.index_url)
    if wanted.against is not None:
        reporter.stage(f"fetch {wanted.against}")
        return fetch_shipped(wanted.against, wanted.package, context.settings(), reporter)
    if recipe is None:
        raise UsageError("patches alone name no build", hints=("--against pypi:VERSION", "--against WHEEL"))
    lock = context.lock(recipe, LockScope.WHEEL_ALONE, FirstUse.KEEP)
    reporter.stage(f"fetch {lock.build.filename}")
    return fetch_locked_wheel(lock, context.settings(), reporter)


def _read_series(wanted: _Wanted, recipe: Recipe | None, version: str) -> Series:
    names = (*wanted.patches, *([recipe.name] if recipe else []))
    named = Wanted(names=names, reading=wanted.reading(), overlays=wanted.overlays)
    series = read_series(named, Version(version), {recipe.name: recipe} if recipe else None)
    if wanted.cut_against is None:
        return series
    return cut_against_release(series, wanted.cut_against, wanted.package, read_context(wanted.index_url).settings())


def _verify(path: Path, origin: Path | None, *, as_json: bool) -> int:
    with open_reporter() as reporter:
        verified = verify_wheel(path, origin, reporter)
    _show_verified(verified, as_json=as_json)
    return 1 if verified.problems else 0


def _show_built(built: BuiltWheel, *, as_json: bool) -> None:
    if as_json:
        facts = {"path": str(built.path), "sha256": built.sha256, "size": built.size, "version": str(built.version)}
        render.print_json("wheel", {**facts, "unchanged": built.unchanged, "holds": asdict(built.facts)})
        return
    render.print_text(f"{built.path}\n{_describe(built.facts)}\n  sha256   {built.sha256}")
    render.print_text(f"  size     {built.size / 1e6:.0f} MB{', unchanged' if built.unchanged else ''}")
    if built.signatures:
        render.print_note(f"left out, since they sign the origin alone: {', '.join(built.signatures)}")
    render.print_note(f"note: an attestation or signature of {built.facts.origin.filename} does not cover this file")
    render.print_note(f"next: provision wheel --verify {shlex.quote(str(built.path))}")


def _show_verified(verified: VerifiedWheel, *, as_json: bool) -> None:
    if as_json:
        render.print_json("wheel-verify", asdict(verified))
        return
    for problem in verified.problems:
        render.print_text(f"problem: {problem}")
    if not verified.problems:
        proven = "and what the series makes of its origin" if verified.with_origin else "by RECORD and its own account"
        render.print_text(f"{verified.path}: whole, {proven}")
    render.print_text(f"{_describe(verified.facts)}\n  sha256   {verified.sha256}")
    if not verified.with_origin:
        file = shlex.quote(str(verified.path))
        render.print_note(f"next: provision wheel --verify {file} --origin {verified.facts.origin.filename}")


def _describe(facts: PatchedWheel) -> str:
    return (
        f"  origin   {facts.origin.filename}, sha256 {facts.origin.sha256}\n"
        f"  patches  {', '.join(patch.id for patch in facts.patches)}\n"
        f"  changed  {count_text(len(facts.files), 'file')}"
    )
