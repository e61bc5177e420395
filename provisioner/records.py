"""Frozen dataclasses whose methods are made when the first of them is called. Pure.

``dataclasses`` writes six methods as text and compiles each: half a millisecond for a class, and more with slots. A
command loads a hundred classes and makes objects of a third of them, so half of its own start-up time went into methods
that nobody called. For a type checker, and for everybody who asks an object or a class, these are dataclasses.
"""

import dataclasses
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(**options: bool) -> "Callable[[type], type]":
        """``dataclasses.dataclass`` for frozen classes without a base, whose methods are made later."""
        return lambda cls: _postpone(cls, dict(options))


_MADE = ("__repr__", "__eq__", "__hash__", "__match_args__", "__dataclass_params__", "__dataclass_fields__", "__init__")
"""What is taken from the real dataclass; ``__init__`` comes last, since a thread that sees it needs the others."""

_LOCK = threading.RLock()


def _postpone(cls: type, options: dict[str, bool]) -> type:
    if not options.get("frozen") or cls.__bases__ != (object,):
        return dataclasses.dataclass(**options)(cls)
    slots = options.pop("slots", False)
    body = {name: value for name, value in vars(cls).items() if name not in {"__dict__", "__weakref__"}}
    made = _with_slots(cls, body) if slots else cls
    complete = _Completion(made, body, options)
    for name in ("__init__", "__repr__", "__eq__", "__hash__"):
        setattr(made, name, _stand_in(complete, name))
    made.__setattr__ = _refuse_to_set  # type: ignore[assignment, method-assign]
    made.__delattr__ = _refuse_to_delete  # type: ignore[assignment, method-assign]
    made.__dataclass_fields__ = _Fields(complete)  # type: ignore[attr-defined]
    return made


def _with_slots(cls: type, body: dict[str, Any]) -> type:
    names = tuple(body.get("__annotations__", ()))
    rest = {name: value for name, value in body.items() if name not in names}
    state = {"__getstate__": _get_state, "__setstate__": _set_state}
    made = type(cls.__name__, (), {"__slots__": names, **state, **rest})
    made.__qualname__ = cls.__qualname__
    return made


class _Completion:
    """Turns a class into what the real dataclass of the same body is, once."""

    def __init__(self, cls: type, body: dict[str, Any], options: dict[str, bool]) -> None:
        self.cls = cls
        self._body = body
        self._options = options
        self._done = False

    def __call__(self) -> None:
        with _LOCK:
            if not self._done:
                self._take(dataclasses.dataclass(**self._options)(type(self.cls.__name__, (), self._body)))
                self._done = True

    def _take(self, real: type) -> None:
        # A default that field() described is the value itself from now on, and one that is made anew is no attribute.
        for name, value in self._body.items():
            if isinstance(value, dataclasses.Field) and name in vars(self.cls) and "__slots__" not in vars(self.cls):
                if name in vars(real):
                    setattr(self.cls, name, vars(real)[name])
                else:
                    delattr(self.cls, name)
        for name in _MADE:
            if name in vars(real):
                setattr(self.cls, name, vars(real)[name])
            elif name in vars(self.cls):  # a stand-in for what was not asked for
                delattr(self.cls, name)


class _Fields:
    """``__dataclass_fields__`` until they are asked for."""

    def __init__(self, complete: _Completion) -> None:
        self._complete = complete

    def __get__(self, instance: object, owner: type) -> Any:
        self._complete()
        return vars(self._complete.cls)["__dataclass_fields__"]


def _stand_in(complete: _Completion, name: str) -> Callable[..., Any]:
    def method(self: object, *args: Any, **kwargs: Any) -> Any:
        complete()
        return getattr(complete.cls, name)(self, *args, **kwargs)

    return method


def _refuse_to_set(_self: object, name: str, _value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(_self: object, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _get_state(self: Any) -> list[Any]:
    return [getattr(self, name) for name in self.__slots__]


def _set_state(self: Any, state: list[Any]) -> None:
    for name, value in zip(self.__slots__, state, strict=True):
        object.__setattr__(self, name, value)
