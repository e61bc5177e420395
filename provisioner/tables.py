"""Strict reading of tables: every key is asked for by name and type; a key that nobody asked for is an error. Pure."""

from collections.abc import Mapping
from typing import Any, TypeVar

from provisioner.errors import InvalidInputError
from provisioner.loading import load_json
from provisioner.nearest import near_names, nearest_name

T = TypeVar("T")


def open_json(text: str, *, where: str, error: "type[InvalidInputError]") -> "Table":
    """The object that a JSON text is, as a table in which a null is an absent key.

    Raises ``error`` for a text that is no JSON object.
    """
    try:
        values = load_json(text)
    except ValueError as cause:
        raise error(f"not JSON: {cause}", where=where) from cause
    if not isinstance(values, dict):
        raise error("not a JSON object", where=where)
    return Table({key: value for key, value in values.items() if value is not None}, where=where, error=error)


class Table:
    """One table at an address. ``take`` methods remove what they return; ``close`` refuses what is left.

    Every error is of the class given, carries the address of the key (``hynix.toml: build.release``) and, for an
    unknown key, the nearest known one.
    """

    def __init__(
        self, values: Mapping[str, Any], *, where: str, path: str = "", error: type[InvalidInputError]
    ) -> None:
        self._values = dict(values)
        self._known: set[str] = set()
        self._where = where
        self._path = path
        self._error = error

    def __contains__(self, key: str) -> bool:
        self._known.add(key)
        return key in self._values

    def address(self, key: str = "") -> str:
        """The address of ``key``, or of the table itself."""
        path = ".".join(part for part in (self._path, key) if part)
        return f"{self._where}: {path}" if path else self._where

    def fail(
        self, what: str, key: str = "", *, expected: str | None = None, found: str | None = None
    ) -> InvalidInputError:
        """An error at ``key``, to be raised by the caller."""
        return self._error(what, where=self.address(key), expected=expected, found=found)

    def take(self, key: str, kind: type[T]) -> T:
        """The required value of ``key``."""
        if key not in self:
            raise self._error("a required key is missing", where=self.address(key), hints=self._misspelt(key))
        return self._typed(key, self._values.pop(key), kind)

    def _misspelt(self, key: str) -> tuple[str, ...]:
        """A hint at the key that stands there and may be meant."""
        near = nearest_name(key, set(self._values) - self._known)
        return () if near is None else (f"{near!r} stands there; did you mean {key!r}?",)

    def take_or(self, key: str, kind: type[T], default: T) -> T:
        """The value of ``key``, or ``default`` where the key is absent."""
        return self.take(key, kind) if key in self else default

    def take_optional(self, key: str, kind: type[T]) -> T | None:
        """The value of ``key``, or None where the key is absent."""
        return self.take(key, kind) if key in self else None

    def take_list(self, key: str, kind: type[T]) -> tuple[T, ...]:
        """The values of a list, empty where the key is absent."""
        values = self.take_or(key, list, [])
        return tuple(self._typed(f"{key}[{index}]", value, kind) for index, value in enumerate(values))

    def take_table(self, key: str) -> "Table":
        """A sub-table, empty where the key is absent."""
        return self._table(key, self.take_or(key, dict, {}))

    def take_tables(self, key: str) -> tuple["Table", ...]:
        """A list of sub-tables, empty where the key is absent."""
        return tuple(self._table(f"{key}[{index}]", value) for index, value in enumerate(self.take_list(key, dict)))

    def take_strings(self, key: str) -> dict[str, str]:
        """A table of free keys with string values, empty where the key is absent."""
        values = self.take_or(key, dict, {})
        return {str(name): self._typed(f"{key}.{name}", value, str) for name, value in values.items()}

    def close(self) -> None:
        """Refuse any key that was not asked for."""
        for key in self._values:
            hints = near_names(key, self._known) or (f"known keys: {', '.join(sorted(self._known))}",)
            raise self._error(f"unknown key {key!r}", where=self.address(key), hints=hints)

    def _table(self, key: str, values: Mapping[str, Any]) -> "Table":
        path = f"{self._path}.{key}" if self._path else key
        return Table(values, where=self._where, path=path, error=self._error)

    def _typed(self, key: str, value: Any, kind: type[T]) -> T:
        # bool is an int to Python, never to a reader of TOML.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.fail("a value of the wrong type", key, expected=kind.__name__, found=type(value).__name__)
        return value
