"""``provision up RECIPE`` and the command of each built-in recipe."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

Venv = Annotated[Path | None, typer.Option("--venv", help="The environment's folder (default: one a recipe).")]
Python = Annotated[str | None, typer.Option(help="The Python to use: a version or a path.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and its final digests; write nothing.")]
Check = Annotated[bool, typer.Option("--check", help="Exit 1 if anything would be done; write nothing.")]
Reapply = Annotated[bool, typer.Option("--reapply-patches", help="Restore the files as shipped, then apply.")]
Bare = Annotated[bool, typer.Option("--bare", help="The wheel alone, without dependencies (for CI and patch work).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
IndexUrl = Annotated[str | None, typer.Option("--index-url", help="A mirror of the vLLM wheel index.")]


def recipe_help(name: str) -> str:
    """Help text of a recipe's own command."""
    return f"Provision the recipe [bold]{name}[/bold]. Example: [bold]provision {name} --dry-run[/bold]"


def command_for(name: str) -> Callable[..., int]:
    """The command function of a built-in recipe."""

    def command(
        venv: Venv = None,
        python: Python = None,
        dry_run: DryRun = False,
        check: Check = False,
        reapply_patches: Reapply = False,
        bare: Bare = False,
        index_url: IndexUrl = None,
        as_json: AsJson = False,
    ) -> int:
        return up(name, venv, python, dry_run, check, reapply_patches, bare, index_url, as_json)

    return command


def up(
    recipe: Annotated[str, typer.Argument(help="A built-in recipe's name, or the path of a recipe file.")],
    venv: Venv = None,
    python: Python = None,
    dry_run: DryRun = False,
    check: Check = False,
    reapply_patches: Reapply = False,
    bare: Bare = False,
    index_url: IndexUrl = None,
    as_json: AsJson = False,
) -> int:
    """Build, patch and prove the environment of a recipe; a second run finds nothing to do.

    Example: [bold]provision up hynix-stable --venv ~/vllm[/bold]
    """
    from provisioner.cli.catalogue import open_recipe
    from provisioner.cli.context import read_context
    from provisioner.provisioning.execute import Request
    from provisioner.provisioning.preflight import check_platform
    from provisioner.provisioning.store import open_series

    context = read_context(index_url)
    wanted = open_recipe(recipe)
    check_platform()
    lock = context.lock(wanted)
    request = Request(
        recipe=wanted,
        lock=lock,
        series=open_series(wanted, lock.build.version),
        venv=context.venv(wanted, venv),
        python=python,
        bare=bare,
        reapply=reapply_patches,
        open_wheel=context.locked_wheel(lock),
        environ=os.environ,
    )
    if dry_run or check:
        return _show_plan(request, context, check=check, as_json=as_json)
    return _carry_out(request, context, as_json=as_json)


def _show_plan(request: Any, context: Any, *, check: bool, as_json: bool) -> int:
    from provisioner.cli import render
    from provisioner.cli.verdicts import describe_verdict, verdict_rows
    from provisioner.provisioning.execute import plan_environment
    from provisioner.provisioning.plan import describe_action

    plan = plan_environment(request, context.uv())
    lines = [describe_action(action) for action in plan.actions]
    if as_json:
        payload = {"recipe": request.recipe.name, "venv": str(request.venv), "actions": lines, "final": plan.final}
        render.print_json("plan", {**payload, "patches": describe_verdict(plan.verdict)})
    else:
        render.print_text("\n".join(lines) if lines else "nothing to do: everything is as the recipe says")
        render.print_table(("PATCH", "VERDICT", "FILE", "FINAL DIGEST"), verdict_rows(plan.verdict))
    return 1 if check and plan else 0


def _carry_out(request: Any, context: Any, *, as_json: bool) -> int:
    from dataclasses import asdict

    from provisioner.cli import render
    from provisioner.cli.progress import open_reporter
    from provisioner.cli.verdicts import describe_verdict
    from provisioner.provisioning.execute import provision
    from provisioner.provisioning.plan import describe_action
    from provisioner.provisioning.preflight import look_at_card

    with open_reporter() as reporter:
        for warning in look_at_card(request.recipe.card).warnings:
            reporter.warn(warning)
        outcome = provision(request, context.uv(), reporter)
    lines = [describe_action(action) for action in outcome.actions]
    if as_json:
        payload = {"recipe": request.recipe.name, "venv": str(request.venv), "actions": lines}
        details = {"patches": describe_verdict(outcome.verdict), "receipt": asdict(outcome.receipt)}
        render.print_json("up", {**payload, **details})
        return 0
    patches = ", ".join(patch.id for patch in outcome.receipt.patches) or "none"
    render.print_text(
        f"{request.recipe.name}: {'proven' if lines else 'already proven'}\n"
        f"  environment  {request.venv}\n"
        f"  build        {outcome.receipt.build.distribution} {outcome.receipt.build.version}"
        f" (commit {outcome.receipt.build.commit}), torch {outcome.receipt.torch or 'none'}\n"
        f"  patches      {patches}\n"
        f"next: provision status {request.recipe.name}"
    )
    return 0
