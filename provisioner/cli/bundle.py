"""``provision bundle``."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from provisioner.bundles.check import CheckedBundle, check_bundle
from provisioner.bundles.create import BundleRequest, WrittenBundle, choose_minor, write_bundle
from provisioner.bundles.self_wheel import read_own_tool
from provisioner.cli.shared import render
from provisioner.cli.shared.catalogue import find_recipe_file, open_recipe
from provisioner.cli.shared.context import read_context
from provisioner.cli.shared.options import AsJson, Bare, IndexUrl, OptionalRecipe
from provisioner.cli.shared.progress import open_reporter
from provisioner.counts import count_text
from provisioner.documents.bundle_manifest import Manifest
from provisioner.documents.codec import to_builtins
from provisioner.documents.lock import LockScope
from provisioner.errors import UsageError
from provisioner.locks.first_use import FirstUse


def bundle(
    recipe: OptionalRecipe = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file to write, such as hynix.tar.")] = None,
    check: Annotated[Path | None, typer.Option(help="Read this bundle from end to end instead; write nothing.")] = None,
    python: Annotated[str | None, typer.Option(help="The target's Python (default: the recipe's own).")] = None,
    bare: Bare = False,
    without_tool: Annotated[bool, typer.Option("--without-tool", help="For hosts that have provision.")] = False,
    index_url: IndexUrl = None,
    as_json: AsJson = False,
) -> int:
    """Put a recipe's lock, wheels and patches, and provision itself, into one file for hosts without a network.

    Example: [bold]provision bundle hynix-stable -o hynix-stable.tar[/bold]
    """
    if check is not None:
        if recipe is not None or output is not None:
            raise UsageError("--check reads a bundle and takes neither a recipe nor --output")
        return _check(check.expanduser().absolute(), as_json=as_json)
    if recipe is None or output is None:
        raise UsageError(
            "a recipe and a file to write are needed",
            hints=("provision bundle hynix-stable -o hynix-stable.tar", "provision bundle --check FILE"),
        )
    return _write(recipe, output, python, index_url, bare=bare, without_tool=without_tool, as_json=as_json)


def _write(
    recipe: str,
    output: Path,
    python: str | None,
    index_url: str | None,
    *,
    bare: bool,
    without_tool: bool,
    as_json: bool,
) -> int:
    context, wanted = read_context(index_url), open_recipe(recipe)
    minor = choose_minor(wanted.python, python)
    tool = None if without_tool else read_own_tool(minor)
    request = BundleRequest(
        recipe=wanted,
        recipe_text=find_recipe_file(recipe).read_bytes(),
        lock=context.lock(wanted, LockScope.WHEEL_ALONE if bare else LockScope.COMPLETE, FirstUse.KEEP),
        python=minor,
        bare=bare,
        tool=tool,
    )
    with open_reporter() as reporter:
        written = write_bundle(request, output.expanduser().absolute(), context.settings(), reporter)
    _show_written(written, as_json=as_json)
    return 0


def _check(path: Path, *, as_json: bool) -> int:
    with open_reporter() as reporter:
        checked = check_bundle(path, reporter)
    if as_json:
        render.print_json("bundle-check", _facts(checked))
    else:
        render.print_text(f"{checked.path}: whole, every member as listed\n{_describe(checked)}")
    return 0


def _show_written(written: WrittenBundle, *, as_json: bool) -> None:
    if as_json:
        render.print_json("bundle-written", _facts(written))
        return
    render.print_text(f"{written.path}\n{_describe(written)}")
    render.print_note(f"next: {_next_command(written.manifest, written.path)}")


def _facts(bundle: WrittenBundle | CheckedBundle) -> dict[str, Any]:
    facts = {"path": str(bundle.path), "sha256": bundle.sha256, "size": bundle.size}
    return {**facts, "manifest": to_builtins(bundle.manifest)}


def _describe(bundle: WrittenBundle | CheckedBundle) -> str:
    manifest = bundle.manifest
    wheels = count_text(len(manifest.under("wheels")), "wheel")
    return (
        f"  recipe  {manifest.recipe}: {manifest.distribution} {manifest.version}\n"
        f"  sha256  {bundle.sha256}\n"
        f"  size    {bundle.size / 1e6:.0f} MB, {wheels} for Python {manifest.python}\n"
        f"  tool    {manifest.tool or 'left out'}"
    )


def _next_command(manifest: Manifest, path: Path) -> str:
    bare = ["--bare"] if manifest.bare else []
    return shlex.join(["provision", "up", manifest.recipe, "--from-bundle", str(path), *bare])
