"""The command line as the tests look at it: every command by its words, and what a command line names."""

from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from provisioner.cli.app import ENTRIES, build_command, load_command

WrongLine: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "UsageError")
"""typer's error for a command line that it does not understand; which package holds it depends on its release."""


def every_command() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command with the words that name it, those of groups one by one."""
    for entry in ENTRIES:
        command = load_command(entry.name)
        if not entry.group:
            yield (entry.name,), command
        else:
            yield from (((entry.name, name), child) for name, child in command.commands.items())


def resolve(argv: Sequence[str]) -> tuple[Any, list[str]]:
    """The command that the words after ``provision`` name, and the words that are for it.

    Raises typer's UsageError for a name that is none.
    """
    command, words = build_command(), list(argv)
    while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
        _, command, words = command.resolve_command(typer.Context(command), words)
    return command, words


def parse(argv: Sequence[str]) -> None:
    """Parse the words after ``provision`` without running anything; raises as ``resolve``."""
    command, words = resolve(argv)
    command.make_context("command", words)
