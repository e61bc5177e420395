"""Arguments of a vLLM server, read as the server reads them. Pure.

The server's parser takes hyphens and underscores alike, ``--name value`` and ``--name=value``, ``--no-name`` for a
switch, abbreviations that are unique, short names such as ``-tp``, ``-O3``, and dotted parts of a JSON argument
(``--speculative-config.num_speculative_tokens 3``). A rule that missed one of these forms could be walked around.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from provisioner.loading import load_json

_SHORT = MappingProxyType(
    {
        "-q": "--quantization",
        "-tp": "--tensor-parallel-size",
        "-pp": "--pipeline-parallel-size",
        "-dp": "--data-parallel-size",
        "-sc": "--speculative-config",
        "-cc": "--compilation-config",
        "-ac": "--attention-config",
        "-O": "--optimization-level",
    }
)
# Names that rules look at, so an abbreviation of one of them must not hide it.
_WATCHED = (
    "--api-key",
    "--async-scheduling",
    "--compilation-config",
    "--enable-prefix-caching",
    "--gpu-memory-utilization",
    "--kv-cache-dtype",
    "--mamba-ssm-cache-dtype",
    "--max-model-len",
    "--max-num-batched-tokens",
    "--max-num-scheduled-tokens",
    "--max-num-seqs",
    "--prefix-match-unit",
    "--speculative-config",
)
_SHORTEST_ABBREVIATION = 7
_SCALE = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_SCALED = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])?")


class Origin(StrEnum):
    """Where a setting came from; a later one overrides an earlier one."""

    RECIPE = "recipe"
    OPTION = "option"
    EXTRA = "extra"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One argument: its full name with hyphens, its values (none for a switch), and whether the switch is on.

    ``path`` is the dotted rest of a JSON argument's name.
    """

    name: str
    values: tuple[str, ...] = ()
    on: bool = True
    path: tuple[str, ...] = ()
    origin: Origin = Origin.RECIPE
    why: str = ""

    @property
    def value(self) -> str | None:
        return self.values[0] if self.values else None


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Parsed arguments, and the words that belong to none of them."""

    settings: tuple[Setting, ...]
    stray: tuple[str, ...] = ()


def parse_arguments(words: Sequence[str], *, origin: Origin) -> Arguments:
    """Read the words of a command line. Nothing is refused here: what is not understood stays as it was written."""
    settings: list[Setting] = []
    stray: list[str] = []
    for word in words:
        if _is_name(word):
            settings.append(_start_setting(word, origin))
        elif settings:
            settings[-1] = replace(settings[-1], values=(*settings[-1].values, word))
        else:
            stray.append(word)
    return Arguments(settings=tuple(settings), stray=tuple(stray))


def override(base: Iterable[Setting], changes: Iterable[Setting]) -> tuple[Setting, ...]:
    """``base`` with ``changes`` on top: a later setting of a name takes the earlier one's place.

    A dotted part is put into the JSON that is there, so that the rest of it stays (the server itself would drop it).
    """
    result: list[Setting] = []
    for change in (*base, *changes):
        index = next((i for i, setting in enumerate(result) if setting.name == change.name), None)
        if index is None:
            result.append(_whole(change))
        else:
            result[index] = _put_into(result[index], change)
    return tuple(result)


def to_words(settings: Iterable[Setting]) -> tuple[str, ...]:
    """The settings as words of a command line; inverse of :func:`parse_arguments` for full names."""
    words: list[str] = []
    for setting in settings:
        dotted = ".".join((setting.name, *setting.path))
        name = dotted if setting.on else f"--no-{setting.name.removeprefix('--')}"
        # A value that looks like a name would be taken for one.
        if len(setting.values) == 1 and setting.values[0].startswith("-") and name.startswith("--"):
            words.append(f"{name}={setting.values[0]}")
        else:
            words += [name, *setting.values]
    return tuple(words)


def find(settings: Iterable[Setting], name: str) -> Setting | None:
    """The setting called ``name``; None where it is absent."""
    return next((setting for setting in settings if setting.name == name), None)


def is_on(settings: Iterable[Setting], name: str) -> bool:
    """Whether a switch is given and on."""
    setting = find(settings, name)
    return setting is not None and setting.on and setting.value not in {"False", "false", "0"}


def integer_of(setting: Setting) -> int | None:
    """A whole number as the server reads it (``8192``, ``8k`` = 8000, ``8K`` = 8192); None for anything else."""
    match = _SCALED.fullmatch((setting.value or "").strip())
    if match is None:
        return None
    number, suffix = match.groups()
    if suffix is None:
        return int(number) if number.isdigit() else None
    return int(float(number) * _SCALE[suffix])


def object_of(setting: Setting) -> Mapping[str, Any] | None:
    """The object of a JSON argument; None where it is not one."""
    try:
        value = load_json(setting.value or "")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _is_name(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NUMBER.fullmatch(word)


def _start_setting(word: str, origin: Origin) -> Setting:
    if word.startswith("-O") and not word.startswith("-O=") and len(word) > 2 and word[2:].isalnum():
        return Setting(name="--optimization-level", values=(word[2:],), origin=origin)
    written, equals, value = word.partition("=")
    head, *path = written.split(".")
    name = _full_name(head)
    on = True
    if name.startswith("--no-"):
        name, on = _full_name("--" + name.removeprefix("--no-")), False
    return Setting(name=name, values=(value,) if equals else (), on=on, path=tuple(path), origin=origin)


def _full_name(written: str) -> str:
    if not written.startswith("--"):
        return _SHORT.get(written, written)
    name = written.replace("_", "-")
    if name in _WATCHED or len(name) < _SHORTEST_ABBREVIATION:
        return name
    meant = [full for full in _WATCHED if full.startswith(name)]
    return meant[0] if len(meant) == 1 else name


def _put_into(old: Setting, change: Setting) -> Setting:
    if not change.path:
        return change
    whole = object_of(old)
    if whole is None:
        return _whole(change)
    merged = _with_part(whole, change.path, _read_part(change))
    return replace(old, values=(_write_json(merged),), origin=change.origin)


def _whole(setting: Setting) -> Setting:
    if not setting.path:
        return setting
    return replace(setting, path=(), values=(_write_json(_with_part({}, setting.path, _read_part(setting))),))


def _with_part(whole: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    key, *rest = path
    inner = whole.get(key)
    if rest:
        return {**whole, key: _with_part(inner if isinstance(inner, dict) else {}, rest, value)}
    if key.endswith("+"):
        listed = whole.get(key[:-1])
        return {**whole, key[:-1]: [*(listed if isinstance(listed, list) else []), *str(value).split(",")]}
    return {**whole, key: value}


def _read_part(setting: Setting) -> Any:
    text = setting.value or ""
    try:
        return load_json(text)
    except ValueError:
        scaled = integer_of(setting)
        return text if scaled is None else scaled


def _write_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
