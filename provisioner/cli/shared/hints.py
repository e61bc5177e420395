"""Hints made whole: what a room says to run next, with the recipe and the place that the user's own command named."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from provisioner.records import dataclass

if TYPE_CHECKING:
    from provisioner.errors import ProvisionError
    from provisioner.serve.findings import Finding

_COMMAND = re.compile(r"\bprovision (patch \w+|[\w-]+)(?: ('[^']*'|\S+))?")
_OF_RECIPES = ("up", "status", "revert", "serve")
_PLACES = ("--venv", "--fork-dir", "--site-packages", "--package")
_ELSEWHERE = (*_PLACES, "--against", "--from-bundle")


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a command line names: a recipe, and options that say where, with their values."""

    recipe: str | None = None
    options: tuple[tuple[str, str], ...] = ()


def read_given(argv: Sequence[str], recipes: Sequence[str]) -> Given:
    """What ``argv`` names; ``recipes`` are commands themselves."""
    words = [part for word in argv for part in _split(word)]
    recipe = None
    if words and words[0] in recipes:
        recipe = words[0]
    elif words[1:] and words[0] in (*_OF_RECIPES, "verify", "doctor") and not words[1].startswith("-"):
        recipe = words[1]
    return Given(
        recipe=recipe, options=tuple((name, value) for name, value in pairwise(words) if name in _PLACES and value)
    )


def complete_hint(hint: str, given: Given) -> str:
    """The hint with the recipe for ``RECIPE``, and with the place where its command takes one and names none.

    A command for another recipe than the one given is for another place, too.
    """
    text = _with_recipe(hint, given.recipe) if given.recipe else hint
    found = _COMMAND.search(text)
    if found is None or any(option in text for option in (*_ELSEWHERE, "--help")):
        return text
    taken = _places_of(found.group(1), found.group(2), given)
    words = [word for name, value in given.options if name in taken for word in (name, value)]
    if not words:
        return text
    command, dashes, rest = text.partition(" -- ")
    return f"{command} {shlex.join(words)}{dashes}{rest}"


def _with_recipe(hint: str, recipe: str) -> str:
    """A room knows a recipe by its name alone; one that was given as a file is found by its path alone."""
    text = hint.replace("RECIPE", shlex.quote(recipe))
    if not recipe.endswith(".toml"):
        return text
    name = recipe.rpartition("/")[2].removesuffix(".toml")
    return re.sub(
        rf"\bprovision (?:({'|'.join((*_OF_RECIPES, 'verify', 'doctor', 'lock'))}) )?{re.escape(name)}(?= |$)",
        lambda found: f"provision {found.group(1) or 'up'} {shlex.quote(recipe)}",
        text,
    )


def fallback_hints(error: "ProvisionError", argv: Sequence[str]) -> tuple[str, ...]:
    """What can be run where the room that refused knows no better: the help page, or a look at what it names."""
    from provisioner.errors import UsageError

    if error.hints or error.exit_code in (70, 130):
        return error.hints
    if isinstance(error, UsageError):
        words = argv[:2] if argv[:1] in (["patch"], ["probe"]) else argv[:1]
        return (f"{shlex.join(['provision', *words])} --help",)
    name, _, line = (error.where or "").partition(":")
    if line.isdigit() and Path(name).is_file():
        return (f"sed -n {line}p {shlex.quote(name)}",)
    return (f"ls -ld {shlex.quote(name)}",) if Path(name).exists() or "/" in name else ()


def complete_findings(findings: "Sequence[Finding]", given: Given) -> "tuple[Finding, ...]":
    """Findings whose next commands are whole."""
    return tuple(
        replace(finding, next=tuple(complete_hint(line, given) for line in finding.next)) for finding in findings
    )


def _places_of(command: str, following: str | None, given: Given) -> tuple[str, ...]:
    """The options that say where and that the command takes."""
    about = (shlex.quote(given.recipe or "RECIPE"), "RECIPE")
    if command.startswith("patch "):
        return ("--venv", "--site-packages", "--package") if command not in ("patch show", "patch refresh") else ()
    if command in about:
        return ("--venv", "--fork-dir")
    if command in ("verify", "doctor") and (following is None or following.startswith("-") or following in about):
        return ("--venv", "--fork-dir") if command == "doctor" else ("--venv",)
    if command in _OF_RECIPES and following in about:
        return ("--venv", "--fork-dir") if command in ("up", "serve") else ("--venv",)
    return ()


def _split(word: str) -> tuple[str, ...]:
    """``--venv=DIR`` as two words."""
    option, equals, value = word.partition("=")
    return (option, value) if equals and option in _PLACES else (word,)
