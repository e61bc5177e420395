"""Files in a distribution's folders that its RECORD does not list and that Python may import, perhaps instead of one
that it does."""

import os
import shlex
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from provisioner.environment.site import Site
from provisioner.records import dataclass

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
    listed = {*site.record.entries, *known}
    roots = {path.partition("/")[0] for path in site.record.entries if path.endswith(".py") and "/" in path}
    walked = _walk(str(site.site_packages), sorted(root for root in roots if not root.startswith(".")))
    found = [path for path in walked if path not in listed]
    modules = _modules(listed) if found else frozenset()
    shadowing = {path for path in found if not modules.isdisjoint(_hidden_modules(path))}
    return Unlisted(shadowing=tuple(sorted(shadowing)), others=tuple(sorted(set(found) - shadowing)))


def removal_of(site: Site, unlisted: Unlisted) -> str:
    """The command that takes away what shadows a module."""
    return shlex.join(["rm", *(str(site.site_packages / path) for path in unlisted.shadowing)])


def _walk(base: str, roots: list[str]) -> list[str]:
    """The importable files below ``roots``. Links to folders are followed once: they may lead back."""
    found, waiting = [], [(root, False) for root in roots]
    while waiting:
        folder, linked = waiting.pop()
        with suppress(OSError), os.scandir(f"{base}/{folder}") as entries:
            for entry in entries:
                name = entry.name
                if name.endswith(_IMPORTABLE):
                    found.append(f"{folder}/{name}")
                elif name != _BYTECODE and entry.is_dir() and not (linked and entry.is_symlink()):
                    waiting.append((f"{folder}/{name}", linked or entry.is_symlink()))
    return found


def _modules(listed: Iterable[str]) -> frozenset[str]:
    """What is listed, each as its path up to the first dot of the file's name."""
    return frozenset(_stem(path) for path in listed if path.endswith(_IMPORTABLE))


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
