"""What can be said of the words of a command line before, or without, the command that they are for."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from provisioner.errors import UsageError

_MAY_BE_EMPTY = frozenset({"--root"})
_HANDS_ON = frozenset({"serve", "units"})


def wants_json(argv: Sequence[str]) -> bool:
    """Whether the answer, an error too, goes to a machine."""
    words = _own_words(argv)
    return "--json" in words or "--format=json" in words or ("--format", "json") in pairwise(words)


def refuse_empty(argv: Sequence[str]) -> None:
    """Raise UsageError for an empty word: mostly a shell's variable that is not set.

    As a path it would mean the current folder, which nobody means by it.
    """
    for before, word in pairwise(("", *_own_words(argv))):
        option, equals, value = word.partition("=")
        attached = word.startswith("--") and equals and not value
        if not (word == "" or attached) or (option or before) in _MAY_BE_EMPTY:
            continue
        name = option or (before if before.startswith("-") else "an argument")
        raise UsageError(
            f"{name} is empty",
            where=" ".join(word or "''" for word in ("provision", *argv)),
            hints=("if it comes from a variable of the shell, that is not set; . means the current folder",),
        )


def usage_error_of(error: Exception) -> UsageError | None:
    """The error that typer raises for a command line which it does not understand, as ours; None for any other."""
    import typer

    # Which package holds typer's UsageError changed with its releases; its place in the family did not.
    family = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "UsageError")
    if not isinstance(error, family):
        return None
    told: Any = error
    hints = (f"{told.ctx.command_path} --help",) if told.ctx is not None else ("provision --help",)
    return UsageError(told.format_message().rstrip("."), hints=hints)


def _own_words(argv: Sequence[str]) -> tuple[str, ...]:
    """The words that are for this tool: those after ``--`` are a server's with some commands."""
    words = tuple(argv)
    if words and words[0] in _HANDS_ON and "--" in words:
        return words[: words.index("--")]
    return words
