"""The typer app: which command is which function. Command modules import nothing heavy until they are called."""

import functools
from collections.abc import Callable
from typing import Any

import typer

HELP = """Turn a recipe into a proven vLLM environment, and tell which patches still hold on tomorrow's build.

Example: [bold]provision hynix-stable[/bold], then [bold]provision status hynix-stable[/bold]
"""


def exiting(function: Callable[..., int]) -> Callable[..., None]:
    """A command whose returned integer is the exit code of the process (typer ignores what a command returns)."""

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> None:
        raise typer.Exit(function(*args, **kwargs))

    command.__annotations__ = {**function.__annotations__, "return": None}
    return command


def build_command() -> Any:
    """The whole command line as a click-like command object, with ``main(args=…, prog_name=…)``."""
    app = typer.Typer(
        name="provision", help=HELP, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False
    )
    app.callback()(_take_version)
    _add_commands(app)
    return typer.main.get_command(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        from provisioner import __version__

        typer.echo(f"provision {__version__}")
        raise typer.Exit


def _take_version(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def _add_commands(app: typer.Typer) -> None:
    from provisioner.cli import cache, probe, recipes

    app.command("recipes", rich_help_panel="Catalogue")(exiting(recipes.recipes))
    app.command("cache", rich_help_panel="Catalogue")(exiting(cache.cache))
    app.add_typer(probe.build_group(), name="probe", rich_help_panel="Serving")
