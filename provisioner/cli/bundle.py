"""``provision bundle``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from provisioner.counts import count_text

if TYPE_CHECKING:
    from provisioner.provisioning.bundling import WrittenBundle


def bundle(
    recipe: Annotated[str, typer.Argument(help="A built-in recipe's name, or the path of a recipe file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write, such as hynix.tar.")],
    python: Annotated[str | None, typer.Option(help="The target's Python (default: the recipe's own).")] = None,
    bare: Annotated[bool, typer.Option("--bare", help="The wheel alone, without dependencies.")] = False,
    without_tool: Annotated[bool, typer.Option("--without-tool", help="For hosts that have provision.")] = False,
    index_url: Annotated[str | None, typer.Option(help="A mirror of the vLLM wheel index.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> int:
    """Put a recipe's lock, wheels and patches, and provision itself, into one file for hosts without a network.

    Example: [bold]provision bundle hynix-stable -o hynix-stable.tar[/bold]
    """
    from provisioner.cli.catalogue import find_recipe_file, open_recipe
    from provisioner.cli.context import read_context
    from provisioner.cli.progress import open_reporter
    from provisioner.environment.lock import LockScope
    from provisioner.provisioning.bundling import BundleRequest, add_own_tool, choose_minor, write_bundle
    from provisioner.provisioning.first_use import FirstUse

    context, wanted = read_context(index_url), open_recipe(recipe)
    minor = choose_minor(wanted.python, python)
    settings, uv = context.settings(), context.uv()
    lock = context.lock(wanted, LockScope.WHEEL_ALONE if bare else LockScope.COMPLETE, FirstUse.KEEP)
    with open_reporter() as reporter:
        request = BundleRequest(
            recipe=wanted,
            recipe_text=find_recipe_file(recipe).read_bytes(),
            lock=lock,
            python=minor,
            bare=bare,
            add_tool=None if without_tool else lambda folder: add_own_tool(folder, minor, settings, uv, reporter),
        )
        written = write_bundle(request, output.expanduser().absolute(), settings, reporter)
    _show(written, as_json=as_json)
    return 0


def _show(written: "WrittenBundle", *, as_json: bool) -> None:
    from dataclasses import asdict

    from provisioner.cli import render

    manifest = written.manifest
    if as_json:
        facts = {"path": str(written.path), "sha256": written.sha256, "size": written.size}
        render.print_json("bundle-written", {**facts, "manifest": asdict(manifest)})
        return
    wheels = count_text(len(manifest.under("wheels")), "wheel")
    render.print_text(
        f"{written.path}\n"
        f"  sha256  {written.sha256}\n"
        f"  size    {written.size / 1e6:.0f} MB, {wheels} for Python {manifest.python}\n"
        f"  tool    {manifest.tool or 'left out'}"
    )
    bare = " --bare" if manifest.bare else ""
    render.print_note(f"next: provision up {manifest.recipe} --from-bundle {written.path}{bare}")
