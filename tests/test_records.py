"""Records are dataclasses, whenever and however one looks at them."""

import copy
import dataclasses
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from provisioner import records
from provisioner.records import dataclass


def make(kind: Callable[..., Any], slots: bool = False) -> type:
    @kind(frozen=True, kw_only=True, slots=slots)
    class Thing:
        """A thing."""

        name: str
        size: int = 3
        parts: tuple[str, ...] = dataclasses.field(default_factory=tuple, repr=False)
        note: str = dataclasses.field(default="", compare=False)

        @property
        def loud(self) -> str:
            return self.name.upper()

    return Thing


@pytest.fixture(params=[False, True], ids=["plain", "slots"])
def slots(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def thing(slots: bool) -> Any:
    return make(dataclass, slots)


def test_nothing_is_made_before_it_is_needed(monkeypatch: pytest.MonkeyPatch, slots: bool) -> None:
    made: list[str] = []
    real = dataclasses.dataclass
    monkeypatch.setattr(records.dataclasses, "dataclass", lambda **options: made.append("one") or real(**options))
    thing = make(dataclass, slots)
    assert made == []
    assert thing(name="a") == thing(name="a")
    assert made == ["one"]


@pytest.mark.parametrize(
    "look",
    [
        lambda cls: repr(cls(name="a", parts=("p",))).rpartition(".")[2],
        lambda cls: (cls(name="a") == cls(name="a", note="x"), cls(name="a") == cls(name="b"), cls(name="a") == 1),
        lambda cls: len({cls(name="a"), cls(name="a", note="x"), cls(name="a", size=4)}),
        lambda cls: [field.name for field in dataclasses.fields(cls)],
        lambda cls: [(field.name, field.repr, field.compare) for field in dataclasses.fields(cls(name="a"))],
        lambda cls: dataclasses.asdict(cls(name="a", parts=("p", "q"))),
        lambda cls: dataclasses.asdict(dataclasses.replace(cls(name="a"), size=9)),
        lambda cls: dataclasses.is_dataclass(cls),
        lambda cls: (
            (cls.__name__, cls.__qualname__, cls.__module__, cls.__doc__, cls.__match_args__)
            if dataclasses.is_dataclass(cls) and cls(name="a")
            else None
        ),
        lambda cls: cls(name="a").loud,
        lambda cls: dataclasses.asdict(copy.deepcopy(cls(name="a", parts=("p",)))),
        lambda cls: (copy.copy(cls(name="a")) == cls(name="a"), hasattr(cls(name="a"), "__dict__")),
    ],
)
def test_it_is_what_the_real_one_is(look: Callable[[Any], Any], slots: bool) -> None:
    assert look(make(dataclass, slots)) == look(make(dataclasses.dataclass, slots))


@pytest.mark.parametrize("arguments", [{}, {"name": "a", "colour": "b"}])
def test_arguments_are_checked(thing: Any, arguments: dict[str, str]) -> None:
    with pytest.raises(TypeError):
        thing(**arguments)
    with pytest.raises(TypeError):
        thing("a")


def test_it_is_frozen(thing: Any) -> None:
    one = thing(name="a")
    for change in (lambda: setattr(one, "name", "b"), lambda: setattr(one, "other", 1), lambda: delattr(one, "name")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert one.name == "a"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """At the top of a module, where pickle finds it."""

    name: str


def test_an_object_that_was_not_made_here_is_equal_too() -> None:
    bare = object.__new__(Kept)
    bare.__setstate__(["a"])  # type: ignore[attr-defined]
    assert bare == Kept(name="a")
    assert pickle.loads(pickle.dumps(bare)) == bare


def test_threads_that_come_at_once_all_get_one(slots: bool) -> None:
    for _ in range(30):
        thing = make(dataclass, slots)
        start, got = threading.Barrier(4), []

        def run(thing: Any = thing, start: threading.Barrier = start, got: list[Any] = got) -> None:
            start.wait()
            got.append(thing(name="a"))

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == [thing(name="a")] * 4


def test_a_method_of_its_own_stays() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Loud:
        name: str

        def __repr__(self) -> str:
            return self.name.upper()

    assert repr(Loud(name="a")) == "A"


def test_what_was_not_asked_for_is_not_there() -> None:
    @dataclass(frozen=True, eq=False, repr=False)
    class One:
        name: str

    one = One("a")
    assert one != One("a")
    assert repr(one) == object.__repr__(one)
    assert hash(one) == object.__hash__(one)


def test_what_is_not_frozen_or_has_a_base_is_made_at_once() -> None:
    @dataclass(kw_only=True)
    class Open:
        name: str

    @dataclass(frozen=True, kw_only=True)
    class Base:
        name: str

    @dataclass(frozen=True, kw_only=True)
    class Child(Base):
        size: int

    one = Open(name="a")
    one.name = "b"
    assert (one.name, Child(name="a", size=1)) == ("b", Child(name="a", size=1))
