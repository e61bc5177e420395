"""``provision containerfile``."""

from pathlib import Path
from typing import Annotated

import typer

from provisioner.bundles.use import Bundle, insist_on_recipe, open_bundle, unpacking
from provisioner.cli.shared import render
from provisioner.cli.shared.context import read_context
from provisioner.errors import UsageError
from provisioner.files import write_output
from provisioner.series.recipe import open_series
from provisioner.serve.containerfile import ImagePlan, build_command, default_base, render_containerfile


def containerfile(
    recipe: Annotated[str, typer.Argument(help="The bundle's recipe.")],
    bundle: Annotated[Path, typer.Option(help="A file of provision bundle, which the image is built from.")],
    base: Annotated[
        str | None, typer.Option(help="The base image, best by digest (default: Python on Debian).")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write it here, beside the bundle (default: print it).")
    ] = None,
) -> int:
    """Print a Containerfile: built from a bundle without any index, proven while it is built, run without root.

    Example: [bold]provision containerfile hynix-stable --bundle hynix-stable.tar -o Containerfile[/bold]
    """
    opened = open_bundle(bundle.expanduser().absolute())
    insist_on_recipe(opened, Path(recipe).stem if recipe.endswith(".toml") else recipe, bare=opened.manifest.bare)
    plan = _plan(opened, base)
    text = render_containerfile(plan)
    if plan.bare:
        render.print_warning("the bundle is bare, so the image can be built and looked at, and serves nothing")
    if "@sha256:" not in plan.base:
        render.print_warning(
            f"{plan.base} is another image after each of its updates; pull it once and name what you got: "
            f"--base $(podman inspect --format '{{{{index .RepoDigests 0}}}}' {plan.base})"
        )
    if output is None:
        render.print_text(text)
        return 0
    write_output(output.expanduser().absolute(), text.encode())
    render.print_text(str(output))
    folder = opened.path.parent
    render.print_note(f"next: {build_command(str(output), plan.recipe, str(folder))}")
    return 0


def _plan(bundle: Bundle, base: str | None) -> ImagePlan:
    manifest, wanted = bundle.manifest, bundle.recipe()
    if manifest.tool is None:
        raise UsageError(
            "the bundle lacks the tool, which the image needs",
            where=str(bundle.path),
            hints=(f"provision bundle {manifest.recipe} -o {bundle.path}",),
        )
    serve = wanted.serve_without_fork or wanted.serve
    if serve is None:
        raise UsageError("the recipe says nothing of a server", where=wanted.where)
    with unpacking(bundle, read_context().home.cache / "bundles") as unpacked:
        series = open_series(wanted, manifest.version, unpacked.patches())
    return ImagePlan(
        recipe=manifest.recipe,
        recipe_digest=manifest.recipe_digest,
        lock_digest=manifest.lock_digest,
        patches={item.patch.id: item.patch.digest for item in series.texts},
        version=str(manifest.version),
        tool=manifest.tool,
        bundle=bundle.path.name,
        base=base or default_base(manifest.python),
        bare=manifest.bare,
        without_fork=wanted.fork is not None,
        port=serve.port,
    )
