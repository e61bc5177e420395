"""The typer app: which command is which function. Command modules import nothing heavy until they are called."""

import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import typer

from provisioner.errors import EnvironmentConflictError, InterruptedRunError, ProvisionError
from provisioner.records import dataclass

HELP = """Turn a recipe into a proven vLLM environment, and tell which patches still hold on tomorrow's build.

Example: [bold]provision hynix-stable[/bold], then [bold]provision status hynix-stable[/bold]
"""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One command: its module under ``provisioner.cli`` and the name of its function there.

    ``group`` tells that the function returns a typer app with commands of its own.
    """

    name: str
    module: str
    function: str
    panel: str
    group: bool = False


ENTRIES = (
    Entry(name="up", module="up", function="up", panel="Environment"),
    Entry(name="status", module="status", function="status", panel="Environment"),
    Entry(name="revert", module="revert", function="revert", panel="Environment"),
    Entry(name="lock", module="lock", function="lock", panel="Environment"),
    Entry(name="bundle", module="bundle", function="bundle", panel="Environment"),
    Entry(name="drift", module="drift", function="drift", panel="Patches"),
    Entry(name="drift-issue", module="drift_issue", function="drift_issue", panel="Patches"),
    Entry(name="verify", module="verify", function="verify", panel="Environment"),
    Entry(name="serve", module="serve", function="serve", panel="Serving"),
    Entry(name="doctor", module="doctor", function="doctor", panel="Serving"),
    Entry(name="containerfile", module="containerfile", function="containerfile", panel="Serving"),
    Entry(name="units", module="units", function="units", panel="Serving"),
    Entry(name="booster", module="booster", function="booster", panel="Serving"),
    Entry(name="probe", module="probe", function="build_group", panel="Serving", group=True),
    Entry(name="patch", module="patch", function="build_group", panel="Environment", group=True),
    Entry(name="recipes", module="recipes", function="recipes", panel="Catalogue"),
    Entry(name="patches", module="patches", function="patches", panel="Catalogue"),
    Entry(name="cache", module="cache", function="cache", panel="Catalogue"),
)


def exiting(function: Callable[..., int]) -> Callable[..., None]:
    """A command whose returned integer is the exit code of the process (typer ignores what a command returns).

    Ctrl-C and a file that cannot be read or written become errors of ours here: typer would end without a word at the
    one, and the other is no defect. Whatever changes files translates its own failures; what comes here happened before
    or after.
    """

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> None:
        try:
            code = function(*args, **kwargs)
        except KeyboardInterrupt:
            raise InterruptedRunError from None
        except OSError as error:
            if error.filename is None:
                raise
            raise _explain(error) from error
        raise typer.Exit(code)

    command.__annotations__ = {**function.__annotations__, "return": None}
    return command


def _explain(error: OSError) -> ProvisionError:
    import shlex

    return EnvironmentConflictError(
        f"a file cannot be read or written: {error.strerror}",
        where=str(error.filename),
        hints=(f"ls -ld {shlex.quote(str(error.filename))}",),
    )


def build_command(argv: Sequence[str] = ()) -> Any:
    """The command line as a click-like command object, with ``main(args=…, prog_name=…)``.

    Where ``argv`` begins with a command's name, only that command is built: a run need not load the others.
    """
    app = typer.Typer(
        name="provision", help=HELP, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False
    )
    app.callback()(_take_version)
    wanted = argv[0] if argv and argv[0] in _names() else None
    for name in _recipe_names():
        if wanted in (None, name):
            _add_recipe(app, name)
    for entry in ENTRIES:
        if wanted in (None, entry.name):
            _add_entry(app, entry)
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


def _names() -> frozenset[str]:
    return frozenset({*(entry.name for entry in ENTRIES), *_recipe_names()})


def _recipe_names() -> tuple[str, ...]:
    from provisioner.resources import recipe_names

    return recipe_names()


def _add_recipe(app: typer.Typer, name: str) -> None:
    from provisioner.cli import up

    app.command(name, help=up.recipe_help(name), rich_help_panel="Recipes")(exiting(up.command_for(name)))


def _add_entry(app: typer.Typer, entry: Entry) -> None:
    function = getattr(import_module(f"provisioner.cli.{entry.module}"), entry.function)
    if entry.group:
        app.add_typer(function(), name=entry.name, rich_help_panel=entry.panel)
    else:
        app.command(entry.name, rich_help_panel=entry.panel)(exiting(function))
