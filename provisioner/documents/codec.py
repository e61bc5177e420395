"""Documents as frozen Structs: decoded strictly, every error at its address, and encoded by one function. Pure.

A Struct's tag is its schema (``tag_field="schema"``). An unknown key is refused, and a boolean is no number.
"""

import json
import re
from collections.abc import Mapping
from datetime import datetime
from enum import EnumMeta
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import msgspec
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from provisioner.digests import Digest
from provisioner.errors import InvalidInputError
from provisioner.loading import load_json, load_toml
from provisioner.nearest import near_names


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a document. Name the keys of a subclass in plain words; ``rename`` says how a file spells them."""


HexDigest = Annotated[Digest, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64, title="a SHA-256")]
"""A SHA-256, as lower-case hex."""
CommitId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40}$", max_length=40, title="a commit of 40 hex digits")]
"""A commit, in full."""
Moment = Annotated[datetime, msgspec.Meta(tz=True, title="a time with its offset, such as 2026-08-21T00:00:00Z")]
"""A time that is the same everywhere."""

_D = TypeVar("_D")
_FROM_TEXT = {Version: "a version", SpecifierSet: "a version range"}
# What msgspec says; anything else that it says is passed on.
_ADDRESS = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_WRONG_TYPE = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")
_STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")


class ContradictionError(ValueError):
    """What ``__post_init__`` of a document raises for values that cannot all be meant; ``key`` is the wrong one."""

    def __init__(self, what: str, key: str = "", *, expected: str | None = None, found: str | None = None) -> None:
        super().__init__(what)
        self.key = key
        self.compared = {"expected": expected, "found": found}


def decode_json(text: str | bytes, kind: type[_D], *, where: str, error: type[InvalidInputError]) -> _D:
    """The document that a JSON text is.

    Raises ``error`` at the file and key for a text that is no JSON, has another schema than ``kind``, lacks a key or
    has an unknown or wrong one.
    """
    try:
        values = load_json(text)
    except ValueError as cause:
        raise error(f"not JSON: {cause}", where=where) from cause
    return convert(values, kind, where=where, error=error)


def decode_toml(text: str, kind: type[_D], *, where: str, error: type[InvalidInputError]) -> _D:
    """The document that a TOML text is. Raises as :func:`decode_json`; text that is no TOML is told with its line."""
    try:
        values = load_toml(text)
    except ValueError as cause:
        raise error(f"not TOML: {cause}", where=where) from cause
    return convert(values, kind, where=where, error=error, native=(datetime,))


def convert(
    values: Any, kind: type[_D], *, where: str, error: type[InvalidInputError], native: tuple[type, ...] = ()
) -> _D:
    """The document that plain values are. ``native``: types that the values hold as such and not as text."""
    tag = kind.__struct_config__.tag if issubclass(kind, msgspec.Struct) else None
    if tag is not None and isinstance(values, dict):
        if "schema" not in values:
            raise error("a required key is missing", where=f"{where}: schema")
        if values["schema"] != tag:
            raise error("unknown schema", where=f"{where}: schema", expected=str(tag), found=str(values["schema"]))
    try:
        return msgspec.convert(values, kind, dec_hook=_from_text, builtin_types=native)
    except msgspec.ValidationError as cause:
        _Failure(cause, where, error).tell(values, kind)


def encode_json(document: Any) -> str:
    """The JSON text of a document, its schema first; inverse of :func:`decode_json`."""
    return json.dumps(to_builtins(document), indent=2) + "\n"


def to_builtins(document: Any) -> Any:
    """The same as dicts, lists and plain values; what JSON does not know becomes text."""
    return msgspec.to_builtins(document, enc_hook=str)


def _from_text(kind: type[_D], value: Any) -> _D:
    if not isinstance(value, str):
        raise TypeError(f"Expected `str`, got `{type(value).__name__}`")
    return kind(value)  # type: ignore[call-arg]


class _Failure:
    """msgspec's error as ours. This is the only place that knows its words."""

    def __init__(self, cause: msgspec.ValidationError, where: str, error: type[InvalidInputError]) -> None:
        match = _ADDRESS.fullmatch(str(cause))
        self._what, self._path = (match["what"], match["path"] or "") if match else (str(cause), "")
        self._cause = cause
        self._where = where
        self._error = error

    def tell(self, values: Any, kind: Any) -> NoReturn:
        path, kind, value = _follow(_STEP.findall(self._path), values, kind)
        if unknown := _UNKNOWN.fullmatch(self._what):
            known = _fields(kind)
            hints = near_names(unknown[1], known) or (f"known keys: {', '.join(sorted(known))}",)
            raise self._make(f"unknown key {unknown[1]!r}", path, unknown[1], hints=hints)
        if missing := _MISSING.fullmatch(self._what):
            raise self._make("a required key is missing", path, missing[1])
        if wrong := _WRONG_TYPE.fullmatch(self._what):
            raise self._make("a value of the wrong type", path, expected=wrong[1], found=wrong[2])
        if choices := _choices(kind):
            raise self._make("unknown value", path, expected=" | ".join(choices), found=str(value))
        if title := _title(kind):
            raise self._make(f"not {title}", path, found=str(value))
        if isinstance(cause := self._cause.__cause__, ContradictionError):
            raise self._make(self._what, path, cause.key, **cause.compared)
        raise self._make(self._what[:1].lower() + self._what[1:], path)

    def _make(self, what: str, path: str, key: str = "", **more: Any) -> InvalidInputError:
        full = ".".join(filter(None, (path, key)))
        made = self._error(what, where=f"{self._where}: {full}" if full else self._where, **more)
        made.__cause__ = self._cause
        return made


def _follow(steps: list[str], value: Any, kind: Any) -> tuple[str, Any, Any]:
    """The address, type and value at the end of msgspec's path, which leaves out the keys of free tables."""
    path = ""
    for step in steps:
        kind = _bare(kind)
        if step == "[...]":
            kind = get_args(kind)[-1]
            step, value = next(item for item in value.items() if not _is_valid(item[1], kind))
        elif step.startswith("["):
            kind = next(item for item in get_args(kind)[::-1] if item is not Ellipsis)
            value = value[int(step[1:-1])]
            path += step
            continue
        else:
            kind, value = _fields(kind)[step], value[step]
        path = f"{path}.{step}" if path else step
    return path, kind, value


def _is_valid(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind, dec_hook=_from_text)
    except msgspec.ValidationError:
        return False
    return True


def _fields(kind: Any) -> Mapping[str, Any]:
    """The type of each key of a table."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(_bare(kind))}


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in {Union, UnionType}:  # a document has no other union
        return next(item for item in get_args(kind) if item is not type(None))
    return kind


def _bare(kind: Any) -> Any:
    """A type without None and annotations."""
    kind = _without_none(kind)
    return _without_none(get_args(kind)[0]) if get_origin(kind) is Annotated else kind


def _choices(kind: Any) -> tuple[str, ...]:
    kind = _bare(kind)
    if isinstance(kind, EnumMeta):
        return tuple(map(str, kind.__members__.values()))
    return tuple(str(item) for item in get_args(kind)) if get_origin(kind) is Literal else ()


def _title(kind: Any) -> str | None:
    kind = _without_none(kind)
    notes = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return next((note.title for note in notes if note.title), _FROM_TEXT.get(_bare(kind)))
