"""What a wheel ships at all, and which paths of a patch can therefore not count or are missing. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from provisioner.digests import Digest
from provisioner.patching.model import Create, Cut, FileChange, FileFacts, Rename, SeriesPatch, Verdict
from provisioner.wheels.record import Record

_COMPILED = frozenset({"csrc", "cmake", "rust", "src"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """Why a patch's path is no file of the distribution: ``not-shipped`` (it does not count) or ``target-missing``."""

    verdict: Verdict
    why: str
    moved_to: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Shipment:
    """The shipped paths with their digests (all of them, if ``is_whole``), and what can be said of a path from them."""

    digests: Mapping[str, Digest | None]
    is_whole: bool
    roots: frozenset[str]
    suffixes: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, record: Record | None, facts: Mapping[str, FileFacts]) -> "Shipment":
        """From RECORD; without it, from the touched files alone."""
        if record is not None:
            digests = {entry.path: entry.digest for entry in record}
        else:
            digests = {path: fact.recorded for path, fact in facts.items() if fact.recorded is not None}
        packaged = [path for path in digests if not _top(path).endswith((".dist-info", ".data"))]
        return cls(
            digests=digests,
            is_whole=record is not None,
            roots=frozenset(_top(path) for path in packaged),
            suffixes=frozenset((_top(path), _suffix(path)) for path in packaged),
        )

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
            may_be_there = not self.is_whole or _top(change.path) in self.roots | item.new_roots
            return None if may_be_there else self._not_shipped(change.path)
        source = change.source if isinstance(change, Rename) else change.path
        if source in self.digests or source in present or (isinstance(change, Rename) and change.path in self.digests):
            return None
        if _top(source) not in self.roots or (_top(source), _suffix(source)) not in self.suffixes:
            return self._not_shipped(source)
        moved_to, sure = self._where_it_went(source, item.cuts.get(change.path, Cut()).digest)
        why = "the build does not ship this file"
        if moved_to is not None:
            why += f"; the same bytes are at {moved_to}" if sure else f"; a file of the same name is at {moved_to}"
        return Missing(verdict=Verdict.TARGET_MISSING, why=why, moved_to=moved_to)

    def _not_shipped(self, path: str) -> Missing:
        if _top(path) in _COMPILED:
            return Missing(verdict=Verdict.NOT_SHIPPED, why="compiled sources: a change cannot take effect in a wheel")
        return Missing(verdict=Verdict.NOT_SHIPPED, why="no wheel of the distribution ships such a path")

    def _where_it_went(self, path: str, digest: Digest | None) -> tuple[str | None, bool]:
        """Another path with the same bytes, else the only one with the same file name; and whether the bytes say so."""
        if digest is not None:
            same = [other for other, found in self.digests.items() if found == digest]
            if same:
                return min(same, key=lambda other: (_name(other) != _name(path), other)), True
        name = _name(path)
        alike = [other for other in self.digests if _name(other) == name]
        return (alike[0], False) if len(alike) == 1 and name != "__init__.py" else (None, False)


def _top(path: str) -> str:
    return path.partition("/")[0]


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _suffix(path: str) -> str:
    return _name(path).rpartition(".")[2]
