"""Patches from elsewhere: files, folders in glob order or with a quilt ``series`` file, and overlays of new files."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path, PurePosixPath

from provisioner.digests import digest_of
from provisioner.errors import InvalidPatchError, UsageError
from provisioner.nearest import nearest_name
from provisioner.patching.compare import change_between
from provisioner.patching.diff import parse_patch, print_patch
from provisioner.patching.model import Create, Patch, SeriesPatch
from provisioner.records import dataclass

SERIES_FILE = "series"
SUFFIXES = (".patch", ".diff")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How the paths in a text are meant: ``strip`` leading parts go (None: found out), then ``root`` comes before."""

    strip: int | None = None
    root: str = ""


@dataclass(frozen=True, kw_only=True)
class NewFile:
    """A file that an overlay brings."""

    content: bytes = field(repr=False)
    executable: bool = False


def read_stack(folder: Path, reading: Reading) -> tuple[SeriesPatch, ...]:
    """The patches of a folder: those of its ``series`` file where there is one, else all by name.

    Raises InvalidPatchError, with file and line; UsageError for a folder without patches.
    """
    series = folder / SERIES_FILE
    if series.is_file():
        return tuple(_read_listed(folder, series, reading))
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())
    if not files:
        raise UsageError(
            "the folder holds no patches",
            where=str(folder),
            expected=f"files that end in {' or '.join(SUFFIXES)}, or a file called {SERIES_FILE}",
            hints=(f"ls {shlex.quote(str(folder))}",),
        )
    return read_patch_files(files, reading)


def read_patch_files(files: Iterable[Path], reading: Reading) -> tuple[SeriesPatch, ...]:
    """One patch a file, in the order given.

    Raises InvalidPatchError, with file and line; UsageError for a file that cannot be read.
    """
    return tuple(SeriesPatch(patch=read_patch_file(file, reading)) for file in files)


def read_patch_file(path: Path, reading: Reading) -> Patch:
    """The patch in a file, called by its name without suffix.

    Raises InvalidPatchError, with the line; UsageError for a file that cannot be read.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"the patch cannot be read: {error.strerror}", where=str(path), hints=_look_beside(path)
        ) from error
    return parse_patch(text, id=path.stem, source=str(path), strip=reading.strip, root=reading.root)


def _look_beside(path: Path) -> tuple[str, ...]:
    """The file of nearly this name, and the command that shows what there is."""
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    near = nearest_name(path.name, (entry.name for entry in folder.iterdir()))
    shown = f"ls {shlex.quote(str(folder))}"
    return (f"did you mean {path.parent / near}?", shown) if near and folder == path.absolute().parent else (shown,)


def read_overlay(folder: Path, reading: Reading) -> SeriesPatch:
    """A folder of new files as one patch that creates each of them under ``reading.root``.

    Patches, compiled files and hidden ones in it do not count. Raises InvalidPatchError for a symbolic link or a folder
    without files, UsageError where there is no such folder.
    """
    if not folder.is_dir():
        raise UsageError("there is no such overlay folder", where=str(folder), hints=_look_beside(folder))
    files = dict(_read_new_files(folder, reading.root))
    if not files:
        raise InvalidPatchError("the overlay holds no files", where=str(folder))
    return make_overlay(files, id=folder.name, source=str(folder))


def make_overlay(files: Mapping[str, NewFile], *, id: str, source: str) -> SeriesPatch:  # noqa: A002
    """New files, by path relative to site-packages, as one patch that creates them."""
    changes = tuple(_creation(path, file) for path, file in sorted(files.items()))
    patch = Patch(id=id, source=source, digest="", changes=changes)
    roots = frozenset(PurePosixPath(path).parts[0] for path in files)
    return SeriesPatch(patch=replace(patch, digest=digest_of(print_patch(patch))), new_roots=roots)


def _creation(path: str, file: NewFile) -> Create:
    change = change_between(path, None, file.content)
    assert isinstance(change, Create)
    return replace(change, mode=0o755) if file.executable else change


def name_apart(patches: Iterable[SeriesPatch]) -> tuple[SeriesPatch, ...]:
    """The same patches, with a number after each id that an earlier one has."""
    seen: set[str] = set()
    named: list[SeriesPatch] = []
    for item in patches:
        name, number = item.patch.id, 1
        while name in seen:
            number += 1
            name = f"{item.patch.id}-{number}"
        seen.add(name)
        named.append(item if name == item.patch.id else replace(item, patch=replace(item.patch, id=name)))
    return tuple(named)


def _read_listed(folder: Path, series: Path, reading: Reading) -> Iterator[SeriesPatch]:
    listed = tuple(_parse_series(series.read_text(encoding="utf-8", errors="surrogateescape"), reading, str(series)))
    if not listed:
        raise InvalidPatchError("the series names no patch", where=str(series))
    names = [name for _, name, _ in listed]
    for line, name, own in listed:
        if names.count(name) > 1:
            raise InvalidPatchError(f"{name} stands in the series twice", where=f"{series}:{line}")
        if not (folder / name).is_file():
            raise InvalidPatchError(f"the series names {name}, and there is no such file", where=f"{series}:{line}")
        yield SeriesPatch(patch=read_patch_file(folder / name, own))


def _parse_series(text: str, reading: Reading, where: str) -> Iterator[tuple[int, str, Reading]]:
    """Line number, name and reading of each patch, as quilt reads its file: comments, and ``-pN`` after a name."""
    for number, line in enumerate(text.splitlines(), start=1):
        words = _without_comment(line).split()
        if not words:
            continue
        name, *options = words
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise InvalidPatchError(f"{name} is not a path inside the folder", where=f"{where}:{number}")
        yield number, name, _read_options(options, reading, f"{where}:{number}")


def _without_comment(line: str) -> str:
    """quilt's rule: a hash at the start of a word begins a comment."""
    return re.split(r"(?:^|\s)#", line, maxsplit=1)[0]


def _read_options(options: list[str], reading: Reading, where: str) -> Reading:
    for option in options:
        level = option.removeprefix("-p")
        if level == option or not (level.isdigit() or level == "ab"):
            raise InvalidPatchError(
                f"the option {option} of a series is not understood", where=where, expected="-pN after the name"
            )
        reading = replace(reading, strip=1 if level == "ab" else int(level))
    return reading


def _read_new_files(folder: Path, root: str) -> Iterator[tuple[str, NewFile]]:
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if any(part.startswith(".") or part == "__pycache__" for part in relative.parts):
            continue
        if path.suffix in (*SUFFIXES, ".pyc"):
            continue
        if path.is_symlink():
            raise InvalidPatchError("an overlay holds files, no symbolic links", where=str(path))
        if path.is_file():
            executable = bool(path.stat().st_mode & 0o100)
            target = (PurePosixPath(root) / relative).as_posix()
            yield target, NewFile(content=path.read_bytes(), executable=executable)
