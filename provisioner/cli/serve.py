"""``provision serve``."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from provisioner.cli.shared import render
from provisioner.cli.shared.catalogue import open_recipe
from provisioner.cli.shared.context import find_places, read_context
from provisioner.cli.shared.findings import describe_finding, finding_lines
from provisioner.cli.shared.hints import Given, complete_findings
from provisioner.cli.shared.options import (
    Card,
    ForkDir,
    Host,
    KeyFile,
    Model,
    Port,
    RecipeName,
    RecipeVenv,
    ServerWords,
    WithoutFork,
)
from provisioner.documents.recipe import Recipe, Serve
from provisioner.errors import UsageError
from provisioner.serve.findings import Finding, Severity, Subject, exit_code_of
from provisioner.serve.flags import to_words
from provisioner.serve.launch import KEY_VARIABLE, REDACTED, Launch, printable_argv, redact, shell_script
from provisioner.serve.prepare import Prepared, ServeRequest, prepare
from provisioner.serve.start import become_server


def serve(
    recipe: RecipeName,
    extra: ServerWords = None,
    venv: RecipeVenv = None,
    fork_dir: ForkDir = None,
    without_fork: WithoutFork = False,
    model: Model = None,
    gpu: Card = None,
    memory_vendor: Annotated[str | None, typer.Option(help="hynix or samsung, where the guess is wrong.")] = None,
    host: Host = None,
    port: Port = None,
    env: Annotated[list[str] | None, typer.Option("--env", help="NAME=VALUE for the server.")] = None,
    key_file: KeyFile = None,
    generate_key: Annotated[bool, typer.Option("--generate-key", help="Make the key file if it is missing.")] = False,
    probe_card: Annotated[bool, typer.Option("--probe-card", help="Refuse to start on a wedged card.")] = False,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the command and environment; run nothing.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Print each argument's reason; run nothing.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The plan and exit code of a start as JSON; run nothing.")
    ] = False,
) -> int:
    """Start a recipe's server, if nothing speaks against it; else say everything that does.

    Exit 2 for the command line, 5 for the environment, 8 for the card. With --print and --explain only what the printed
    command itself can never do counts.

    Example: [bold]provision serve hynix --model ~/models/Qwen3.8-27B-Int8 --generate-key[/bold]
    """
    context, wanted = read_context(), open_recipe(recipe)
    fork_folder, folder = find_places(wanted, context, venv, fork_dir, without_fork=without_fork)
    request = ServeRequest(
        recipe=wanted,
        serve=choose_section(wanted, with_fork=fork_folder is not None),
        venv=folder,
        fork_folder=fork_folder,
        model=model,
        host=host,
        port=port,
        extra=tuple(extra or ()),
        variables=parse_assignments(env or ()),
        gpu=gpu,
        memory_vendor=check_vendor(memory_vendor),
        key_file=key_file.expanduser().absolute() if key_file else None,
        own_key_file=context.home.key_file(wanted.name),
        make_key=generate_key,
        probe=probe_card,
        environ=os.environ,
        cwd=Path.cwd(),
    )
    options = (("--venv", venv), ("--fork-dir", fork_dir))
    given = Given(recipe=recipe, options=tuple((name, str(path)) for name, path in options if path is not None))
    prepared = prepare(request)
    prepared = replace(prepared, findings=complete_findings(prepared.findings, given))
    if print_only or explain:
        prepared = replace(prepared, findings=soften(prepared.findings))
    if as_json:
        return _show_json(request, prepared)
    if print_only or explain:
        return _show(prepared, explain=explain, script=print_only)
    return _start(prepared)


def choose_section(recipe: Recipe, *, with_fork: bool) -> Serve:
    """The recipe's serve section. Raises UsageError where it has none."""
    section = recipe.serve if with_fork or recipe.fork is None else recipe.serve_without_fork
    if section is None:
        raise UsageError("the recipe says nothing about serving", where=recipe.where)
    return section


def parse_assignments(texts: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` texts as a mapping. Raises UsageError for another form."""
    pairs = [text.partition("=") for text in texts]
    for (name, equals, _), text in zip(pairs, texts, strict=True):
        if not equals or not name.isidentifier():
            shown = text if equals else f"{text!r}"
            raise UsageError("not an assignment", where="--env", expected="NAME=VALUE", found=shown.partition("=")[0])
    return {name: value for name, _, value in pairs}


def check_vendor(text: str | None) -> str | None:
    """``hynix``, ``samsung`` or nothing. Raises UsageError for anything else."""
    if text not in {None, "hynix", "samsung"}:
        raise UsageError("unknown memory vendor", where="--memory-vendor", expected="hynix | samsung", found=text)
    return text


def _show_json(request: ServeRequest, prepared: Prepared) -> int:
    code = exit_code_of(prepared.findings)
    shown = [describe_finding(finding) for finding in prepared.findings]
    payload = {"recipe": request.recipe.name, "exit": code, **describe_launch(prepared.launch), "findings": shown}
    render.print_json("serve", payload)
    return code


def _show(prepared: Prepared, *, explain: bool, script: bool) -> int:
    code = exit_code_of(prepared.findings)
    for line in finding_lines(prepared.findings):
        render.print_note(line)
    if explain:
        render.print_table(("SETTING", "FROM", "WHY"), explain_rows(prepared.launch))
    if script and not code:
        render.print_text(shell_script(prepared.launch))
    return code


def _start(prepared: Prepared) -> int:
    for line in finding_lines(prepared.findings):
        render.print_note(line)
    code = exit_code_of(prepared.findings)
    if not code:
        if prepared.key is not None and prepared.key.key.file is not None:
            render.print_note(f"the API key is in {prepared.key.key.file}")
        sys.stdout.flush()
        sys.stderr.flush()
        become_server(prepared.launch, prepared.key.secret if prepared.key else None)
    render.print_note("not started: mend what is marked error above, and run the same command again")
    return code


def soften(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Findings for printing alone: what whoever runs it can still mend is a warning.

    That is environment and card, the weights that were not named, and the key (the printed script asks for it).
    """
    return tuple(
        replace(finding, severity=Severity.WARNING)
        if finding.severity is Severity.ERROR and (finding.subject is not Subject.COMMAND or finding.id in _LATER)
        else finding
        for finding in findings
    )


_LATER = frozenset({"no-model", "no-key"})


def describe_launch(launch: Launch) -> dict[str, Any]:
    """A launch for JSON; the key is never in it."""
    environment = {variable.name: variable.value for variable in launch.variables}
    if launch.key is not None:
        environment[KEY_VARIABLE] = REDACTED
    return {
        "argv": list(printable_argv(launch)),
        "environment": environment,
        "unset": list(launch.unset),
        "path": str(launch.path_entry),
        "cwd": str(launch.cwd),
        "host": launch.host,
        "port": launch.port,
        "key_file": str(launch.key.file) if launch.key and launch.key.file else None,
    }


def explain_rows(launch: Launch) -> list[tuple[str, str, str]]:
    """Each argument and variable with where it comes from and why."""
    rows = [
        (" ".join(redact(to_words((setting,)))), str(setting.origin), setting.why or "given on the command line")
        for setting in launch.settings
    ]
    rows += [(f"{variable.name}={variable.value}", "environment", variable.why) for variable in launch.variables]
    return rows
