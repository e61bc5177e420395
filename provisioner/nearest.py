"""The known name that a wrong one may have been meant for. Pure."""

from collections.abc import Iterable


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that is nearest to ``name``; None where none is near."""
    import difflib  # only errors need it

    return next(iter(difflib.get_close_matches(name, tuple(known), n=1)), None)


def near_names(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """A hint with the nearest known name; none where none is near."""
    near = nearest_name(name, known)
    return () if near is None else (f"did you mean {near!r}?",)
