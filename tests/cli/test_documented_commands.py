"""Every command that the pages name exists, with every option that they give it."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import WrongLine, resolve

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        ROOT / "deploy" / "ansible" / "README.md",
    )
)
RECIPES = ("RECIPE", "NAME")
"""What the pages say for any recipe."""


def commands_of(page: str) -> Iterator[str]:
    """The shell commands of a page's fenced blocks and code spans that begin with ``provision``, wherever it lies."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    spans = [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose)]
    lines = [line for block in blocks for line in re.sub(r"\\\n", " ", block).splitlines()]
    for line in (*lines, *spans):
        for part in re.split(r"[|;]|&&", line):
            if found := re.match(r"\s*(?:\S*/)?provision (.+)", part):
                yield found[1]


def wrong_of(command: str) -> list[str]:
    """What a command line, without ``provision``, names that does not exist."""
    words = [word.strip("[]") for word in shlex.split(command, comments=True)]
    words = words[: words.index("--")] if "--" in words else words
    words[:1] = ["up" if word in RECIPES else word for word in words[:1]]
    try:
        found, rest = resolve(words)
    except WrongLine as error:
        return [error.format_message()]
    known = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help"}
    given = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    return [f"{found.name} has no {option}" for option in given if option not in known]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_command_of_the_pages_exists(path: Path) -> None:
    commands = list(commands_of(path.read_text(encoding="utf-8")))
    assert [wrong for command in commands for wrong in wrong_of(command)] == []


def test_a_page_that_is_wrong_is_noticed() -> None:
    page = """\
Say `provision patch lint FILE --cut-against VERSION`, or `provision
patch mend`:

```
./bin/provision hynix --dry-run --agains  # --nothing
cat x | provision serve hynix \\
    --modl DIR -- --max-model-len 1
```
"""
    assert [wrong for command in commands_of(page) for wrong in wrong_of(command)] == [
        "up has no --agains",
        "serve has no --modl",
        "lint has no --cut-against",
        "No such command 'mend'.",
    ]


def test_the_pages_name_commands() -> None:
    found = {command.split()[0] for path in PAGES for command in commands_of(path.read_text(encoding="utf-8"))}
    assert {"drift", "patch", "bundle", "verify", "hynix-stable", "up"} <= found
