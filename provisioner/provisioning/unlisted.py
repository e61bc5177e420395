"""Files in a distribution's folders that its RECORD does not list and that Python may import, perhaps instead of one
that it does."""

import os
import shlex
from collections.abc import Collection, Iterator
from contextlib import suppress

from provisioner.environment.site import Site
from provisioner.records import dataclass
from provisioner.wheels.record import Record

_EXTENSION = ".so"
_IMPORTABLE = (".py", _EXTENSION, ".pyc")
_BYTECODE = "__pycache__"


@dataclass(frozen=True, kw_only=True)
class Unlisted:
    """Paths of such files, sorted: those that Python prefers to a listed module, and the others."""

    shadowing: tuple[str, ...]
    others: tuple[str, ...]


def find_unlisted(site: Site, known: Collection[str] = ()) -> Unlisted:
    """The importable files beside those of RECORD, but for ``known``; by names alone (about 10 ms for vLLM).

    A bytecode folder is left aside. So is the top of site-packages, which belongs to all.
    """
    record = site.record
    roots = sorted({path.partition("/")[0] for path in record.entries if path.endswith(".py") and "/" in path})
    found = [
        path
        for root in roots
        if not root.startswith(".")
        for path in _walk(str(site.site_packages), root)
        if path not in record and path not in known
    ]
    modules = _modules(record, known) if found else frozenset()
    shadowing = {path for path in found if not modules.isdisjoint(_hidden_modules(path))}
    return Unlisted(shadowing=tuple(sorted(shadowing)), others=tuple(sorted(set(found) - shadowing)))


def removal_of(site: Site, unlisted: Unlisted) -> str:
    """The command that takes away what shadows a module."""
    return shlex.join(["rm", *(str(site.site_packages / path) for path in unlisted.shadowing)])


def _walk(base: str, folder: str, *, linked: bool = False) -> Iterator[str]:
    """The importable files below ``folder``. Links to folders are followed once: they may lead back."""
    with suppress(OSError), os.scandir(f"{base}/{folder}") as entries:
        for entry in entries:
            name = entry.name
            if name.endswith(_IMPORTABLE):
                yield f"{folder}/{name}"
            elif name != _BYTECODE and entry.is_dir() and not (linked and entry.is_symlink()):
                yield from _walk(base, f"{folder}/{name}", linked=linked or entry.is_symlink())


def _modules(record: Record, known: Collection[str]) -> frozenset[str]:
    """What is listed, each as its path up to the first dot of the file's name."""
    return frozenset(map(_stem, (path for path in (*record.entries, *known) if path.endswith(_IMPORTABLE))))


def _hidden_modules(path: str) -> Iterator[str]:
    """The modules that Python would not come to: an extension goes before a source, and a package before both."""
    if path.endswith(_EXTENSION):
        yield _stem(path)
    folder, _, name = path.rpartition("/")
    if name.partition(".")[0] == "__init__":
        yield folder


def _stem(path: str) -> str:
    folder, _, name = path.rpartition("/")
    return f"{folder}/{name.partition('.')[0]}"
