"""The typer app: which command is which function. A command's module is imported when it is run or completed."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from provisioner.errors import EnvironmentConflictError, InterruptedRunError, ProvisionError, UsageError
from provisioner.records import dataclass
from provisioner.resources import recipe_names

HELP = """Turn a recipe into a proven vLLM environment, and tell which patches still hold on tomorrow's build.

Example: [bold]provision hynix-stable[/bold], then [bold]provision status hynix-stable[/bold]
"""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One command: its module under ``provisioner.cli`` and the name of its function there.

    ``group`` tells that the function returns a typer app with commands of its own. ``summary`` is how its help begins:
    the list of all commands is printed from it, without loading any.
    """

    name: str
    module: str
    function: str
    panel: str
    summary: str
    group: bool = False


ENTRIES = (
    Entry(
        name="up",
        module="up",
        function="up",
        panel="Environment",
        summary="Build, patch and prove the environment of a recipe; a second run finds nothing to do.",
    ),
    Entry(
        name="status",
        module="status",
        function="status",
        panel="Environment",
        summary="Say what an environment is and whether its files are still what the receipt says; exit 1 if not.",
    ),
    Entry(
        name="revert",
        module="revert",
        function="revert",
        panel="Environment",
        summary="Restore every patched file to its bytes as shipped and remove what the patches added.",
    ),
    Entry(
        name="lock",
        module="lock",
        function="lock",
        panel="Environment",
        summary="Resolve a recipe's build and write its lock: hashed requirements and what the build is.",
    ),
    Entry(
        name="bundle",
        module="bundle",
        function="bundle",
        panel="Environment",
        summary=(
            "Put a recipe's lock, wheels and patches, and provision itself, into one file for hosts without a network."
        ),
    ),
    Entry(
        name="wheel",
        module="wheel",
        function="wheel",
        panel="Environment",
        summary="Make one wheel of a build and a series of patches, which says what is in it; or verify one.",
    ),
    Entry(
        name="drift",
        module="drift.command",
        function="drift",
        panel="Patches",
        summary="Judge patches on builds that nobody has installed yet; exit 1 where a required patch does not hold.",
    ),
    Entry(
        name="drift-issue",
        module="drift.issue",
        function="drift_issue",
        panel="Patches",
        summary="Keep one issue up to date with a drift report; the token comes from GITHUB_TOKEN.",
    ),
    Entry(
        name="verify",
        module="verify",
        function="verify",
        panel="Environment",
        summary="Prove on the card that will serve that compiled repack, CPU repack and reference give the same bits.",
    ),
    Entry(
        name="serve",
        module="serve",
        function="serve",
        panel="Serving",
        summary="Start a recipe's server, if nothing speaks against it; else say everything that does.",
    ),
    Entry(
        name="doctor",
        module="doctor",
        function="doctor",
        panel="Serving",
        summary=(
            "Find out why a server does not do what it should: 0 healthy, 1 findings, 8 the card is "
            "missing, lost or wedged."
        ),
    ),
    Entry(
        name="containerfile",
        module="containerfile",
        function="containerfile",
        panel="Serving",
        summary=(
            "Print a Containerfile: built from a bundle without any index, proven while it is built, run without root."
        ),
    ),
    Entry(
        name="units",
        module="units",
        function="units",
        panel="Serving",
        summary="Print or write systemd units: the server, its booster, and a daily drift check.",
    ),
    Entry(
        name="booster",
        module="booster",
        function="booster",
        panel="Serving",
        summary="Forward to a server, and between turns have it compute what the next turn starts with.",
    ),
    Entry(
        name="probe",
        module="probe.commands",
        function="build_group",
        panel="Serving",
        summary="Measure a live server, and compare two measurements.",
        group=True,
    ),
    Entry(
        name="patch",
        module="patch.commands",
        function="build_group",
        panel="Environment",
        summary="Judge, apply and take back patches in any environment.",
        group=True,
    ),
    Entry(
        name="recipes",
        module="recipes",
        function="recipes",
        panel="Catalogue",
        summary="List the built-in recipes: card, build, and the policy of each patch.",
    ),
    Entry(
        name="patches",
        module="patch.store",
        function="patches",
        panel="Catalogue",
        summary="List the patches that travel with the tool: what each mends, for which versions, and who requires it.",
    ),
    Entry(
        name="cache",
        module="cache",
        function="cache",
        panel="Catalogue",
        summary="Show what was read of wheels and is kept on disk, or clear it.",
    ),
)


class Commands(TyperGroup):
    """All commands, listed by their summaries; one is loaded when it is run, explained or completed.

    A recipe's name in front is short for ``up NAME``.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._recipes = recipe_names()
        # In typer's own order, which has groups after commands.
        rows = [(name, _recipe_help(name), "Recipes") for name in self._recipes]
        rows += [(entry.name, entry.summary, entry.panel) for entry in sorted(ENTRIES, key=lambda entry: entry.group)]
        for name, summary, panel in rows:
            self.add_command(TyperCommand(name, help=summary, rich_help_panel=panel))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that ``args`` begin with, and the words after it; typer's UsageError for an unknown one."""
        name, listed, rest = super().resolve_command(ctx, args)
        if name in self._recipes:
            return "up", load_command("up"), args
        return name, listed and load_command(str(name)), rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command, whose returned integer is the exit code of the process.

        Ctrl-C and a file that cannot be read or written become errors of ours here: typer would end without a word at
        the one, and the other is no defect. Whatever changes files translates its own failures.
        """
        try:
            code = super().invoke(ctx)
        except KeyboardInterrupt:
            raise InterruptedRunError from None
        except OSError as error:
            if error.filename is None:
                raise
            raise _explain(error) from error
        except RuntimeError as error:
            if "home directory" not in str(error):
                raise
            raise _miss_home() from error
        raise typer.Exit(code)


def build_command() -> Any:
    """The command line as a click-like command object, with ``main(args=…, prog_name=…)``."""
    app = typer.Typer(name="provision", cls=Commands, help=HELP, no_args_is_help=True, rich_markup_mode="rich")
    app.callback()(_take_version)
    return typer.main.get_command(app)


def load_command(name: str) -> Any:
    """The command, or group of commands, of one entry."""
    entry = next(entry for entry in ENTRIES if entry.name == name)
    function = getattr(import_module(f"provisioner.cli.{entry.module}"), entry.function)
    if entry.group:
        return typer.main.get_command(function())
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(name)(function)
    return typer.main.get_command(app)


def _explain(error: OSError) -> ProvisionError:
    import shlex

    return EnvironmentConflictError(
        f"a file cannot be read or written: {error.strerror}",
        where=str(error.filename),
        hints=(f"ls -ld {shlex.quote(str(error.filename))}",),
    )


def _miss_home() -> ProvisionError:
    """pathlib and platformdirs both have but a RuntimeError for it."""
    return UsageError(
        "no home folder: HOME is not set, or ~ names nobody, and this user has no entry that tells one",
        hints=("export HOME=/path/to/a/folder", "export PROVISION_HOME=/path/to/a/folder"),
    )


def _recipe_help(name: str) -> str:
    return f"Provision the recipe [bold]{name}[/bold]. Example: [bold]provision {name} --dry-run[/bold]"


def _print_version(wanted: bool) -> None:
    if wanted:
        from provisioner import __version__

        typer.echo(f"provision {__version__}")
        raise typer.Exit


def _take_version(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass
