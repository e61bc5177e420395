"""What a wheel ships at all, and which paths of a patch can therefore not count or are missing. Pure."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from provisioner.digests import Digest
from provisioner.patching.model import Create, Cut, FileChange, FileFacts, Rename, SeriesPatch, Verdict
from provisioner.records import dataclass
from provisioner.wheels.record import Record

_COMPILED = frozenset({"csrc", "cmake", "rust", "src"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """Why a patch's path is no file of the distribution: ``not-shipped`` (it does not count) or ``target-missing``."""

    verdict: Verdict
    why: str
    moved_to: str | None = None


class Shipment:
    """What can be said of a path from RECORD or, without it, from the touched files alone.

    RECORD has thousands of rows, so they are gone through only for a path that raises a question.
    """

    def __init__(self, record: Record | None, facts: Mapping[str, FileFacts]) -> None:
        self._record = record
        known = [fact for fact in facts.values() if fact.recorded is not None or fact.pristine is not None]
        self._touched = {fact.path: fact.recorded for fact in known}

    def missing_of(self, series: Sequence[SeriesPatch]) -> dict[int, dict[str, Missing]]:
        """Per patch number, the paths that are neither shipped nor made by an earlier patch of the series."""
        present: dict[str, bool] = {}
        out: dict[int, dict[str, Missing]] = {}
        for number, item in enumerate(series):
            for change in item.patch.changes:
                why = self._missing(change, item, present)
                if why is not None:
                    out.setdefault(number, {})[change.path] = why
                    continue
                if isinstance(change, Rename):
                    present[change.source] = False
                present[change.path] = True
        return out

    def _missing(self, change: FileChange, item: SeriesPatch, present: Mapping[str, bool]) -> Missing | None:
        if isinstance(change, Create):
            return None if self._may_create(change.path, item) else _not_shipped(change.path)
        source = change.source if isinstance(change, Rename) else change.path
        if source in present or self._ships(source) or (isinstance(change, Rename) and self._ships(change.path)):
            return None
        top, suffix = _top(source), _suffix(source)
        if not any(_top(path) == top and _suffix(path) == suffix for path in self._paths):
            return _not_shipped(source)
        moved_to, sure = self._where_it_went(source, item.cuts.get(change.path, Cut()).digest)
        why = "the build does not ship this file"
        if moved_to is not None:
            why += f"; the same bytes are at {moved_to}" if sure else f"; a file of the same name is at {moved_to}"
        return Missing(verdict=Verdict.TARGET_MISSING, why=why, moved_to=moved_to)

    def _ships(self, path: str) -> bool:
        return path in self._touched or (self._record is not None and path in self._record)

    def _may_create(self, path: str, item: SeriesPatch) -> bool:
        """Whether a new file may lie there: beside shipped ones, or where the series says so."""
        top = _top(path)
        if top in item.new_roots or any(_top(other) == top for other in self._touched):
            return True
        return not self._paths or any(_top(other) == top for other in self._paths)

    @cached_property
    def _paths(self) -> tuple[str, ...]:
        every = self._touched if self._record is None else self._record.entries
        return tuple(path for path in every if ".d" not in path or _is_own(path))

    def _where_it_went(self, path: str, digest: Digest | None) -> tuple[str | None, bool]:
        """Another path with the same bytes, else the only one with the same file name; and whether the bytes say so."""
        same = self._paths_of(digest) if digest is not None else []
        if same:
            return min(same, key=lambda other: (_name(other) != _name(path), other)), True
        name = _name(path)
        alike = [other for other in self._paths if other.endswith(name) and _name(other) == name]
        return (alike[0], False) if len(alike) == 1 and name != "__init__.py" else (None, False)

    def _paths_of(self, digest: Digest) -> list[str]:
        if self._record is not None:
            found = self._record.paths_of(digest)
        else:
            found = tuple(path for path, known in self._touched.items() if known == digest)
        return [path for path in found if _is_own(path)]


def _not_shipped(path: str) -> Missing:
    if _top(path) in _COMPILED:
        return Missing(verdict=Verdict.NOT_SHIPPED, why="compiled sources: a change cannot take effect in a wheel")
    return Missing(verdict=Verdict.NOT_SHIPPED, why="no wheel of the distribution ships such a path")


def _is_own(path: str) -> bool:
    return not _top(path).endswith((".dist-info", ".data"))


def _top(path: str) -> str:
    return path.partition("/")[0]


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _suffix(path: str) -> str:
    return _name(path).rpartition(".")[2]
