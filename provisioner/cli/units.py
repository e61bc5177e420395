"""``provision units``."""

import getpass
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from provisioner.cli.serve import choose_section
from provisioner.cli.shared import render
from provisioner.cli.shared.catalogue import open_recipe
from provisioner.cli.shared.context import find_places, read_context
from provisioner.cli.shared.options import (
    AsJson,
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
from provisioner.documents.recipe import CommitBuild, Recipe
from provisioner.errors import EnvironmentConflictError, UsageError
from provisioner.files import write_whole
from provisioner.serve.units import Manager, Unit, UnitPlan, install_commands, render_units, unit_folder

_PASSED_ON = ("PROVISION_HOME", "PROVISION_VLLM_INDEX")


def units(
    recipe: RecipeName,
    extra: ServerWords = None,
    system: Annotated[bool, typer.Option("--system", help="Units of the system's manager (default: yours).")] = False,
    user: Annotated[str | None, typer.Option(help="With --system: the user that runs them (default: you).")] = None,
    venv: RecipeVenv = None,
    fork_dir: ForkDir = None,
    without_fork: WithoutFork = False,
    model: Model = None,
    gpu: Annotated[str | None, typer.Option(help="The card: UUID or PCI address.")] = None,
    host: Host = None,
    port: Port = None,
    key_file: KeyFile = None,
    booster_port: Annotated[int, typer.Option(min=1, max=65535, help="The booster's port.")] = 8013,
    write: Annotated[bool, typer.Option("--write", help="Write them where systemd looks.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write them into this folder.")] = None,
    as_json: AsJson = False,
) -> int:
    """Print or write systemd units: the server, its booster, and a daily drift check.

    Example: [bold]provision units hynix --model ~/models/Qwen3.8-27B-Int8 --write[/bold]
    """
    if user is not None and not system:
        raise UsageError(
            "--user names who runs units of the system's manager", hints=(f"add --system: --system --user {user}",)
        )
    wanted = open_recipe(recipe)
    fork_folder, folder = find_places(wanted, read_context(), venv, fork_dir, without_fork=without_fork)
    section = choose_section(wanted, with_fork=fork_folder is not None)
    options = {"--model": model, "--gpu": gpu, "--host": host, "--port": str(port) if port else None}
    places = {"--fork-dir": fork_folder, "--venv": folder if fork_folder is None else None, "--key-file": key_file}
    manager = Manager.SYSTEM if system else Manager.USER
    plan = UnitPlan(
        name=wanted.name,
        recipe=_name_on_command_line(wanted, recipe),
        command=_own_command(),
        manager=manager,
        user=user or (_own_name() if system else None),
        folder=folder if fork_folder is None else fork_folder,
        port=port or section.port,
        serve_options=(
            *(word for name, value in options.items() if value for word in (name, _whole_model(name, value))),
            *(word for name, value in places.items() if value for word in (name, str(value.expanduser().absolute()))),
            *(("--without-fork",) if without_fork else ()),
            "--generate-key",
        ),
        extra=tuple(extra or ()),
        environment=tuple((name, os.environ[name]) for name in _PASSED_ON if name in os.environ),
        booster_port=booster_port,
        drift_source="nightly" if isinstance(wanted.build, CommitBuild) else "pypi",
    )
    if plan.port == booster_port:
        raise UsageError(
            "the server and its booster cannot both listen there",
            where=f"port {booster_port}",
            hints=(shlex.join(["provision", "units", recipe, "--booster-port", str(_other_port(booster_port))]),),
        )
    rendered = render_units(plan)
    searched = unit_folder(manager, config_home=_config_home())
    target = output.expanduser().absolute() if output else searched
    if write or output:
        _write_units(rendered, target)
    commands = install_commands(rendered, plan, target, searched=searched)
    if as_json:
        texts = [{"name": unit.name, "text": unit.text} for unit in rendered]
        render.print_json("units", {"recipe": wanted.name, "folder": str(target), "units": texts, "next": commands})
        return 0
    if not (write or output):
        render.print_text("\n".join(f"# {target / unit.name}\n{unit.text}" for unit in rendered))
        render.print_note(f"hint: provision units {recipe} --write")
        return 0
    render.print_text("\n".join(str(target / unit.name) for unit in rendered))
    for command in commands:
        render.print_note(f"next: {command}")
    return 0


def _write_units(rendered: tuple[Unit, ...], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for unit in rendered:
            write_whole(folder / unit.name, unit.text.encode())
    except OSError as error:
        raise EnvironmentConflictError(
            "the units cannot be written", where=str(folder), found=error.strerror, hints=("--output DIR", "sudo")
        ) from error


def _other_port(port: int) -> int:
    return port + 1 if port < 65535 else port - 1


def _own_command() -> tuple[str, ...]:
    """The words that run this tool again: its script if it was started by one, else the module."""
    script = Path(sys.argv[0]).absolute()
    if script.name == "provision" and script.is_file():
        return (str(script),)
    return (sys.executable, "-m", "provisioner")


def _name_on_command_line(recipe: Recipe, given: str) -> str:
    return given if given == recipe.name else str(Path(given).absolute())


def _whole_model(name: str, value: str) -> str:
    # A unit runs in another folder than this command.
    path = Path(value).expanduser()
    return str(path.absolute()) if name == "--model" and path.is_dir() else value


def _own_name() -> str:
    return getpass.getuser()


def _config_home() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
