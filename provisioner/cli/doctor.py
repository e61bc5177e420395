"""``provision doctor``."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from provisioner.cli.shared import render
from provisioner.cli.shared.catalogue import all_recipes, open_recipe
from provisioner.cli.shared.context import Context, read_context
from provisioner.cli.shared.findings import describe_finding, finding_lines
from provisioner.cli.shared.hints import Given, complete_findings
from provisioner.cli.shared.options import AsJson, ForkDir, OptionalRecipe, RecipeVenv
from provisioner.counts import count_text
from provisioner.doctor.examine import Examination, Target, diagnose
from provisioner.doctor.readers import JournalUnit, LogFile, LogSource
from provisioner.doctor.report import Diagnosis, Outcome
from provisioner.documents.recipe import Recipe
from provisioner.errors import UsageError


def doctor(
    recipe: OptionalRecipe = None,
    venv: RecipeVenv = None,
    fork_dir: ForkDir = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Probe the card: does it still give out memory?")] = False,
    card: Annotated[str | None, typer.Option(help="The card: UUID, PCI address or number in bus order.")] = None,
    log: Annotated[Path | None, typer.Option(help="A server's log to read.")] = None,
    journal: Annotated[bool, typer.Option("--journal", help="Read the log of the recipe's systemd unit.")] = False,
    url: Annotated[list[str] | None, typer.Option(help="A running server to ask for its metrics.")] = None,
    as_json: AsJson = False,
) -> int:
    """Find out why a server does not do what it should: 0 healthy, 1 findings, 8 the card is missing, lost or wedged.

    Example: [bold]provision doctor hynix --log server.log[/bold], [bold]provision doctor --gpu[/bold]
    """
    targets = _choose_targets(recipe, venv, fork_dir, read_context())
    examination = Examination(
        targets=targets,
        environ=os.environ,
        cwd=Path.cwd(),
        probe=gpu,
        card=card,
        log=_choose_log(log, targets, journal=journal),
        urls=tuple(map(_checked_url, url or ())),
    )
    diagnosis = diagnose(examination)
    if len(targets) == 1:
        diagnosis = _complete(diagnosis, targets[0], recipe, named=venv is not None or fork_dir is not None)
    if as_json:
        render.print_json("doctor", describe_diagnosis(diagnosis))
    else:
        render.print_text("\n".join(diagnosis_lines(diagnosis)))
    return diagnosis.exit_code


def _complete(diagnosis: Diagnosis, target: Target, recipe: str | None, *, named: bool) -> Diagnosis:
    """With next commands for the environment that was looked at; with its place where the user ``named`` one."""
    place = ("--fork-dir", str(target.fork_folder)) if target.fork_folder else ("--venv", str(target.venv))
    known = recipe or (target.recipe.name if target.recipe is not None else None)
    given = Given(recipe=known, options=(place,) if named else ())
    checks = (replace(check, findings=complete_findings(check.findings, given)) for check in diagnosis.checks)
    return replace(diagnosis, checks=tuple(checks))


def describe_diagnosis(diagnosis: Diagnosis) -> dict[str, Any]:
    """A diagnosis for JSON."""
    checks = [
        {
            "id": check.id,
            "title": check.title,
            "outcome": str(check.outcome),
            "looked_at": check.looked_at,
            "findings": [describe_finding(finding) for finding in check.findings],
        }
        for check in diagnosis.checks
    ]
    return {"exit": diagnosis.exit_code, "healthy": diagnosis.exit_code == 0, "checks": checks}


def diagnosis_lines(diagnosis: Diagnosis) -> list[str]:
    """A diagnosis for people: each check in a line, its findings under it, and the sum of it at the end."""
    lines: list[str] = []
    for check in diagnosis.checks:
        lines.append(f"{check.outcome:<8} {check.title}: {check.looked_at}")
        lines += finding_lines(check.findings, indent="         ")
    skipped = sum(check.outcome is Outcome.SKIPPED for check in diagnosis.checks)
    made = len(diagnosis.checks) - skipped
    if not made:
        return [
            *lines,
            "nothing could be checked: name a recipe, an environment (--venv), a log (--log) or a server (--url)",
        ]
    verdict = "healthy" if diagnosis.exit_code == 0 else count_text(len(diagnosis.findings), "finding")
    lines.append(f"{verdict} in {count_text(made, 'check')}" + (f"; {skipped} could not be made" if skipped else ""))
    return lines


def _choose_targets(name: str | None, venv: Path | None, fork_dir: Path | None, context: Context) -> tuple[Target, ...]:
    """What was named; else every recipe's default environment that exists."""
    if name is not None:
        return (_target_of(open_recipe(name), venv, fork_dir, context),)
    if venv is not None:
        return (Target(venv=venv.expanduser().absolute(), recipe=None),)
    if fork_dir is not None:
        return (Target(venv=fork_dir.expanduser().absolute() / "venv", recipe=None),)
    targets = (_target_of(recipe, None, None, context) for recipe in all_recipes())
    return tuple(target for target in targets if target.venv.exists())


def _checked_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise UsageError(
            "not an http address", where=f"--url {text}", hints=("provision doctor --url http://127.0.0.1:8012",)
        )
    return text


def _target_of(recipe: Recipe, venv: Path | None, fork_dir: Path | None, context: Context) -> Target:
    folder = fork_dir.expanduser().absolute() / "venv" if fork_dir else context.venv(recipe, venv)
    is_fork = recipe.fork is not None and (folder.parent / recipe.fork.launcher).is_file()
    return Target(venv=folder, recipe=recipe, fork_folder=folder.parent if is_fork else None)


def _choose_log(log: Path | None, targets: tuple[Target, ...], *, journal: bool) -> LogSource | None:
    if log is not None and journal:
        raise UsageError("--log and --journal are two sources; name one")
    if log is not None:
        if not log.is_file():
            raise UsageError("no such log", where=str(log), hints=("provision doctor RECIPE --journal",))
        return LogFile(path=log)
    if not journal:
        return None
    named = [target.recipe.name for target in targets if target.recipe is not None]
    if len(named) != 1:
        raise UsageError("--journal reads the unit of one recipe", hints=("provision doctor RECIPE --journal",))
    return JournalUnit(unit=f"provision-{named[0]}.service")
