"""Steps to disk, all or none: whatever fails or dies, an environment is in its old state or in its new one.

Order of a transaction: every target is looked at, and refused or accepted; originals and intent go to the journal and
to the disk; new bytes are made ready beside their targets; each is renamed into place and its bytecode dropped; every
target is read back; the record is renamed to say so; the journal goes. Whoever holds the environment next
(:func:`recover`) undoes what was not proven.
"""

import errno
import os
import shlex
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import assert_never

from provisioner.digests import Digest, digest_of
from provisioner.errors import ConflictError, ForeignBytesError, NotRestoredError, RefusedTargetError, RestoredError
from provisioner.patching.steps import CreateFile, DeleteFile, FileStep, ReplaceFile, SetMode
from provisioner.records import dataclass
from provisioner.transaction.filesystem import (
    REAL,
    FileSystem,
    Image,
    dress,
    drop_bytecode,
    is_folder,
    read_folder_image,
    read_image,
    remove_if_empty,
    resolve_target,
    take_owner,
    temporary_sibling,
)
from provisioner.transaction.folders import canonical, look_at
from provisioner.transaction.interrupted import is_interrupted
from provisioner.transaction.journal import Intent, Journal, RejectedJournalError, Target, TornJournalError
from provisioner.transaction.lockfile import Holder, hold_environment, read_holder
from provisioner.wheels.record import Record

__all__ = [
    "REAL",
    "FileOutcome",
    "FileSystem",
    "Holder",
    "Recovery",
    "RecoveryKind",
    "execute",
    "hold_environment",
    "is_interrupted",
    "read_holder",
    "recover",
]


@dataclass(frozen=True, kw_only=True)
class FileOutcome:
    """A proven change: digests of the bytes before and after, None where there is no file."""

    path: str
    before: Digest | None
    after: Digest | None


class RecoveryKind(StrEnum):
    """What was left of an interrupted transaction, and so what was done."""

    NOTHING_WRITTEN = "nothing-written"
    UNDONE = "undone"
    COMPLETED = "completed"
    SET_ASIDE = "set-aside"


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """A recovered transaction; ``paths`` were put back, ``aside`` is the folder that keeps an unreadable journal."""

    kind: RecoveryKind
    paths: tuple[str, ...] = ()
    started: str | None = None
    aside: Path | None = None


@dataclass(frozen=True, kw_only=True)
class _Work:
    """A target with its new bytes (None: gone) and its old ones (None: not there)."""

    target: Target
    place: Path
    content: bytes | None = field(repr=False)
    original: bytes | None = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class _Unrestored:
    path: str
    why: str


class _ProofError(Exception):
    """A file that was written is not what it must be."""

    def __init__(self, path: str, expected: Image | None, found: Image | None) -> None:
        super().__init__(path)
        self.path = path
        self.expected = expected
        self.found = found


def execute(
    site_packages: Path,
    state_dir: Path,
    steps: Sequence[FileStep],
    *,
    record: Record,
    may_create: Container[str],
    filesystem: FileSystem = REAL,
) -> tuple[FileOutcome, ...]:
    """Do all steps or none, and prove it. The caller holds the environment and has recovered it.

    A path must stand in ``record`` or in ``may_create`` (what the series makes). No steps: nothing at all is touched.

    Raises ConflictError (ForeignBytesError, RefusedTargetError) before anything is written; RestoredError where a
    change failed and everything is as before; NotRestoredError, with the journal kept, where that failed, too.
    """
    if not steps:
        return ()
    site_packages, journal = canonical(site_packages), Journal(state_dir, filesystem=filesystem)
    if journal.exists():
        raise NotRestoredError("an interrupted change has not been put right yet", where=str(journal.folder))
    try:
        works = _survey(site_packages, steps, record=record, may_create=may_create, filesystem=filesystem)
        intent = _make_intent(site_packages, works)
        _open_journal(journal, intent, works, filesystem=filesystem)
    except OSError as failure:
        raise _restored(failure, site_packages, journal) from failure
    try:
        _stage(site_packages, works, intent, filesystem=filesystem)
        _publish(site_packages, works, filesystem=filesystem)
        _prove(works, filesystem=filesystem)
        journal.mark_proven()
    except BaseException as failure:
        _take_back(site_packages, journal, intent, failure, filesystem=filesystem)
        raise
    _close_quietly(journal)
    return tuple(_outcome_of(work.target) for work in works)


def recover(
    site_packages: Path, state_dir: Path, *, record: Record, made: Container[str], filesystem: FileSystem = REAL
) -> Recovery | None:
    """Put an interrupted transaction right; None where there is none. The caller holds the environment.

    A file is brought back only where it stands in ``record`` or in ``made`` (what patches applied before have made); a
    journal that asks for another, or that does not decode, is set aside and never carried out (NotRestoredError).

    Raises ConflictError (RefusedTargetError, EnvironmentConflictError) where journal or state folder is not ours;
    NotRestoredError, with the journal kept, where a file cannot be put back or was changed by somebody since, or where
    the disk refuses the work (nothing is worse than before).
    """
    site_packages, journal = canonical(site_packages), Journal(state_dir, filesystem=filesystem)
    if not journal.exists():
        return None
    try:
        return _recover(site_packages, journal, record=record, made=made, filesystem=filesystem)
    except OSError as error:
        raise NotRestoredError(
            f"an interrupted change cannot be put right: {_say(error)}",
            where=_where(error, journal),
            hints=_mend_hints(error, site_packages),
        ) from error


def _recover(
    site_packages: Path, journal: Journal, *, record: Record, made: Container[str], filesystem: FileSystem
) -> Recovery:
    if journal.is_proven():
        journal.close()
        return Recovery(kind=RecoveryKind.COMPLETED)
    try:
        intent = journal.read_intent()
    except TornJournalError:
        return Recovery(kind=RecoveryKind.SET_ASIDE, aside=journal.set_aside("unreadable"))
    except RejectedJournalError as error:
        raise _rejected(error.what, site_packages, journal) from error
    if intent is None:
        journal.close()
        return Recovery(kind=RecoveryKind.NOTHING_WRITTEN)
    if strange := _strange_target(intent, record, made):
        raise _rejected(f"{strange!r} is neither shipped nor made by a patch", site_packages, journal)
    paths, unrestored = _restore(site_packages, journal, intent, filesystem=filesystem)
    if unrestored:
        raise _not_restored("an interrupted change cannot be undone", journal, intent, unrestored)
    journal.close()
    return Recovery(kind=RecoveryKind.UNDONE, paths=paths, started=intent.started)


def _strange_target(intent: Intent, record: Record, made: Container[str]) -> str | None:
    """A file that would be brought back and that nobody knows. One that the change made is only ever removed."""
    paths = (target.path for target in intent.targets if target.old is not None)
    return next((path for path in paths if path not in record and path not in made), None)


def _rejected(why: str, site_packages: Path, journal: Journal) -> NotRestoredError:
    return NotRestoredError(
        f"the journal of an interrupted change is none that belongs here ({why}): it is set aside and not carried out",
        where=str(journal.reject()),
        hints=(f"look whether files changed: provision patch check --site-packages {shlex.quote(str(site_packages))}",),
    )


# Looking, before anything is written


def _survey(
    site_packages: Path,
    steps: Iterable[FileStep],
    *,
    record: Record,
    may_create: Container[str],
    filesystem: FileSystem,
) -> tuple[_Work, ...]:
    works: dict[str, _Work] = {}
    for step in steps:
        work = works.get(step.path)
        if work is None:
            if step.path not in record and step.path not in may_create:
                raise RefusedTargetError("the file is neither shipped nor made by the series", where=step.path)
            work = _look_at(site_packages, step.path, record.digest(step.path), filesystem=filesystem)
        works[step.path] = _add_step(work, step)
    return tuple(works.values())


def _look_at(site_packages: Path, path: str, shipped: Digest | None, *, filesystem: FileSystem) -> _Work:
    place = resolve_target(site_packages, path)
    found = read_image(place, filesystem=filesystem)
    image, content = found or (None, None)
    mtime_ns = _mtime_of(place)
    target = Target(path=path, old=image, new=image, old_mtime_ns=mtime_ns, shipped=shipped)
    return _Work(target=target, place=place, content=content, original=content)


def _mtime_of(place: Path) -> int:
    status = look_at(place)
    return status.st_mtime_ns if status is not None else 0


def _add_step(work: _Work, step: FileStep) -> _Work:
    now = work.target.new
    match step:
        case ReplaceFile(before=before, content=content):
            image = _require(now, before, step.path)
            return _changed(work, replace(image, digest=digest_of(content)), content)
        case CreateFile(content=content, mode=mode):
            if now is not None:
                raise ForeignBytesError("the file to be made exists", where=step.path, found=now.digest)
            owner = _nearest_folder(work.place)
            image = Image(digest=digest_of(content), mode=mode, uid=owner.uid, gid=owner.gid)
            return _changed(work, image, content)
        case DeleteFile(before=before):
            _require(now, before, step.path)
            return _changed(work, None, None)
        case SetMode(before=mode_before, after=mode):
            if now is None or now.mode != mode_before:
                raise ConflictError(
                    "the permissions are not those expected",
                    where=step.path,
                    expected=oct(mode_before),
                    found=oct(now.mode) if now else "no file",
                )
            return _changed(work, replace(now, mode=mode), work.content)
        case _:
            assert_never(step)


def _require(now: Image | None, before: Digest, path: str) -> Image:
    if now is None or now.digest != before:
        raise ForeignBytesError(
            "the file changed since it was judged",
            where=path,
            expected=before,
            found=now.digest if now else "no file",
            hints=("run the command again",),
        )
    return now


def _changed(work: _Work, image: Image | None, content: bytes | None) -> _Work:
    return replace(work, target=replace(work.target, new=image), content=content)


def _nearest_folder(place: Path) -> Image:
    for folder in place.parents:
        if image := read_folder_image(folder):
            return image
    raise ConflictError("no folder above the file exists", where=str(place))


def _make_intent(site_packages: Path, works: Sequence[_Work]) -> Intent:
    paths = {parent.as_posix() for work in works for parent in PurePosixPath(work.target.path).parents}
    return Intent(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        pid=os.getpid(),
        targets=tuple(work.target for work in works),
        folders={path: read_folder_image(site_packages / path) for path in sorted(paths - {"."})},
    )


# Writing


def _open_journal(journal: Journal, intent: Intent, works: Sequence[_Work], *, filesystem: FileSystem) -> None:
    try:
        if not is_folder(journal.folder.parent):
            filesystem.mkdir(journal.folder.parent)
        journal.open(intent, {n: work.original for n, work in enumerate(works) if work.original is not None})
    except BaseException:
        _close_quietly(journal)
        raise


def _close_quietly(journal: Journal) -> None:
    """Remove a journal that no file depends on any more; what stays of it is removed by the next command."""
    with suppress(OSError):
        if journal.exists():
            journal.close()


def _stage(site_packages: Path, works: Sequence[_Work], intent: Intent, *, filesystem: FileSystem) -> None:
    for path, image in intent.folders.items():
        if image is None and _is_needed(path, works):
            _make_folder(site_packages / path, _nearest_folder(site_packages / path), filesystem=filesystem)
    for work in works:
        if work.content is not None and work.target.new is not None and _differs(work.target):
            temporary = temporary_sibling(work.place)
            with suppress(FileNotFoundError):
                filesystem.unlink(temporary)
            filesystem.create(temporary, work.content)
            dress(temporary, work.target.new, newer_than_ns=work.target.old_mtime_ns, filesystem=filesystem)
            _prove_image(work, _image_at(temporary, filesystem=filesystem))


def _is_needed(folder: str, works: Iterable[_Work]) -> bool:
    return any(work.target.new is not None and work.target.path.startswith(f"{folder}/") for work in works)


def _make_folder(folder: Path, image: Image, *, filesystem: FileSystem) -> None:
    filesystem.mkdir(folder)
    take_owner(folder, image, filesystem=filesystem)
    filesystem.chmod(folder, image.mode)


def _publish(site_packages: Path, works: Sequence[_Work], *, filesystem: FileSystem) -> None:
    changed = [work for work in works if _differs(work.target)]
    for work in changed:
        if work.target.new is not None:
            filesystem.replace(temporary_sibling(work.place), work.place)
        else:
            filesystem.unlink(work.place)
        drop_bytecode(work.place, filesystem=filesystem)
    for work in changed:
        if work.target.new is None:
            _prune(site_packages, work.place.parent, filesystem=filesystem)
    _sync_folders(site_packages, (work.place.parent for work in changed), filesystem=filesystem)


def _differs(target: Target) -> bool:
    return target.old != target.new


def _prune(site_packages: Path, folder: Path, *, filesystem: FileSystem) -> None:
    """Remove folders that hold nothing any more: an empty one is importable as a namespace package."""
    while folder != site_packages and remove_if_empty(folder, filesystem=filesystem):
        folder = folder.parent


def _sync_folders(site_packages: Path, folders: Iterable[Path], *, filesystem: FileSystem) -> None:
    """Bring the names in each folder to the disk, and in those above it, where folders come and go."""
    chains = {site_packages}
    for folder in folders:
        while folder not in chains and folder != site_packages:
            chains.add(folder)
            folder = folder.parent
    for folder in sorted(chains):
        if is_folder(folder):
            filesystem.fsync(folder)


def _prove(works: Iterable[_Work], *, filesystem: FileSystem) -> None:
    for work in works:
        _prove_image(work, _image_at(work.place, filesystem=filesystem))


def _prove_image(work: _Work, image: Image | None) -> None:
    if not _agree(image, work.target.new):
        raise _ProofError(work.target.path, work.target.new, image)


def _image_at(place: Path, *, filesystem: FileSystem) -> Image | None:
    found = read_image(place, filesystem=filesystem)
    return found[0] if found else None


def _agree(image: Image | None, other: Image | None) -> bool:
    return image is other or (image is not None and image.agrees_with(other))


def _outcome_of(target: Target) -> FileOutcome:
    return FileOutcome(
        path=target.path,
        before=target.old.digest if target.old else None,
        after=target.new.digest if target.new else None,
    )


# Taking back


def _take_back(
    site_packages: Path, journal: Journal, intent: Intent, failure: BaseException, *, filesystem: FileSystem
) -> None:
    """Undo after ``failure``, and raise what it means; returns where ``failure`` itself is to be raised."""
    _, unrestored = _restore(site_packages, journal, intent, filesystem=filesystem)
    if unrestored:
        raise _not_restored(f"a change failed ({_say(failure)})", journal, intent, unrestored) from failure
    _close_quietly(journal)
    if isinstance(failure, OSError | _ProofError):
        raise _restored(failure, site_packages, journal) from failure


def _restore(
    site_packages: Path, journal: Journal, intent: Intent, *, filesystem: FileSystem
) -> tuple[tuple[str, ...], tuple[_Unrestored, ...]]:
    """Put every target back, last one first; tell which were, and which could not be and why."""
    restored: list[str] = []
    unrestored: list[_Unrestored] = []
    for index, target in reversed(list(enumerate(intent.targets))):
        try:
            if _restore_target(site_packages, journal, index, target, intent.folders, filesystem=filesystem):
                restored.append(target.path)
        except (OSError, RefusedTargetError) as error:
            unrestored.append(_Unrestored(path=target.path, why=_say(error)))
        except _ProofError as error:
            unrestored.append(_Unrestored(path=target.path, why=_say_found(error)))
    try:
        _restore_folders(site_packages, intent, filesystem=filesystem)
    except OSError as error:
        unrestored.append(_Unrestored(path=str(error.filename or site_packages), why=_say(error)))
    return tuple(reversed(restored)), tuple(unrestored)


def _restore_folders(site_packages: Path, intent: Intent, *, filesystem: FileSystem) -> None:
    for path, image in sorted(intent.folders.items(), reverse=True):
        if image is None:
            remove_if_empty(site_packages / path, filesystem=filesystem)
    places = (site_packages / target.path for target in intent.targets)
    _sync_folders(site_packages, (place.parent for place in places), filesystem=filesystem)


def _restore_target(
    site_packages: Path,
    journal: Journal,
    index: int,
    target: Target,
    folders: Mapping[str, Image | None],
    *,
    filesystem: FileSystem,
) -> bool:
    place = resolve_target(site_packages, target.path)
    with suppress(FileNotFoundError, NotADirectoryError):
        filesystem.unlink(temporary_sibling(place))
    image = _image_at(place, filesystem=filesystem)
    if _is_settled(image, target):
        return False
    if (image.digest if image else None) != (target.new.digest if target.new else None):
        raise _ProofError(target.path, target.old, image)
    if target.old is None:
        filesystem.unlink(place)
    else:
        _bring_back(site_packages, journal.original(index), place, target, target.old, folders, filesystem=filesystem)
    drop_bytecode(place, filesystem=filesystem)
    again = _image_at(place, filesystem=filesystem)
    if not _agree(again, target.old):
        raise _ProofError(target.path, target.old, again)
    return True


def _is_settled(image: Image | None, target: Target) -> bool:
    """Whether a file needs nothing: it is as before, or was installed anew since and is as shipped."""
    if image is None or target.old is None:
        return image is target.old
    if image.digest == target.old.digest:
        only_mode_changes = target.new is not None and target.new.digest == image.digest
        return not only_mode_changes or image.mode == target.old.mode
    return image.digest == target.shipped and (target.new is None or image.digest != target.new.digest)


def _bring_back(
    site_packages: Path,
    original: Path,
    place: Path,
    target: Target,
    image: Image,
    folders: Mapping[str, Image | None],
    *,
    filesystem: FileSystem,
) -> None:
    """Rename the original into place: that needs no space, which a full disk does not have."""
    kept, status = filesystem.read(original), look_at(original)
    if status is None or status.st_nlink != 1:
        raise RefusedTargetError("the bytes in the journal have another name, too", where=str(original))
    if digest_of(kept) != image.digest:
        raise _ProofError(target.path, image, replace(image, digest=digest_of(kept)))
    for parent in reversed(PurePosixPath(target.path).parents[:-1]):
        folder, folder_image = site_packages / parent, folders.get(parent.as_posix())
        if not is_folder(folder):
            _make_folder(folder, folder_image or _nearest_folder(folder), filesystem=filesystem)
    newer_than_ns = max(target.old_mtime_ns, _mtime_of(place))
    dress(original, image, newer_than_ns=newer_than_ns, filesystem=filesystem)
    try:
        filesystem.replace(original, place)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        temporary = temporary_sibling(place)
        filesystem.create(temporary, kept)
        dress(temporary, image, newer_than_ns=newer_than_ns, filesystem=filesystem)
        filesystem.replace(temporary, place)


# Saying


def _say(failure: BaseException) -> str:
    match failure:
        case OSError(strerror=str(text), filename=name):
            return f"{text}: {name}" if name else text
        case _ProofError(path=path):
            return f"{path} was written, but read back otherwise"
        case KeyboardInterrupt():
            return "interrupted"
        case _:
            return str(failure) or type(failure).__name__


def _say_found(error: _ProofError) -> str:
    if error.found is None:
        return "the file is gone"
    if error.expected is not None and error.found.digest == error.expected.digest:
        return f"permissions are {error.found.mode:o}"
    return f"it holds bytes of neither state (sha256 {error.found.digest})"


def _where(error: OSError, journal: Journal) -> str:
    return str(error.filename or journal.folder)


def _restored(failure: OSError | _ProofError, site_packages: Path, journal: Journal) -> RestoredError:
    if isinstance(failure, _ProofError):
        return RestoredError(
            "a file was written, but read back otherwise; everything is as before",
            where=failure.path,
            expected=failure.expected.digest if failure.expected else "no file",
            found=failure.found.digest if failure.found else "no file",
            hints=("look for disk errors with: dmesg | tail",),
        )
    return RestoredError(
        f"a change could not be made: {failure.strerror}; everything is as before",
        where=_where(failure, journal),
        hints=_mend_hints(failure, site_packages),
    )


def _mend_hints(failure: OSError, site_packages: Path) -> tuple[str, ...]:
    match failure.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return (f"make room on its file system (df -h {site_packages}) and run the command again",)
        case errno.EROFS:
            return ("make the file system writable and run the command again",)
        case errno.EACCES | errno.EPERM:
            return (f"run the command again as the owner of {site_packages} (ls -ld {site_packages})",)
        case _:
            return ("run the command again",)


def _not_restored(what: str, journal: Journal, intent: Intent, unrestored: Sequence[_Unrestored]) -> NotRestoredError:
    details = "; ".join(f"{item.path}: {item.why}" for item in unrestored)
    numbers = {target.path: number for number, target in enumerate(intent.targets)}
    copies = tuple(
        f"the bytes before the change: {journal.original(numbers[item.path])}"
        for item in unrestored
        if item.path in numbers and look_at(journal.original(numbers[item.path])) is not None
    )
    return NotRestoredError(
        f"{what}, and not everything could be put back: {details}",
        where=str(journal.folder),
        hints=(
            "mend the cause and run the command again: the journal is kept, and it puts the rest back first",
            *copies,
            f"or take the files as they are now: rm -r {journal.folder}",
        ),
    )
