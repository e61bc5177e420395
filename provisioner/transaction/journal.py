"""The record on disk by which an interrupted transaction is undone or completed.

``<state dir>/journal/`` holds the bytes of every file before the change (``originals/<n>``) and one record that says
what is being changed. The record is named ``intent`` from before the first write until all writes are proven, then
``proven``: one rename decides between all-old and all-new. A folder without either belongs to a transaction that wrote
nothing.
"""

import json
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from provisioner.digests import Digest
from provisioner.errors import InvalidReceiptError, NotRestoredError, RefusedTargetError
from provisioner.records import dataclass
from provisioner.tables import Table, open_json
from provisioner.transaction.filesystem import MODE_MASK, FileSystem, Image, is_folder, is_plain
from provisioner.transaction.folders import JOURNAL_NAME, look_at, names_in, read_file, state_file

SCHEMA = "provision/journal/1"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NUMBER = re.compile(r"0|[1-9][0-9]*")
_LARGEST_ID = 2**32 - 2
_LARGEST_TIME_NS = 2**62


@dataclass(frozen=True, kw_only=True)
class Target:
    """One file of a transaction: its image before (None: not there), after (None: gone), and what RECORD says of it.

    ``old_mtime_ns`` is the time of change before, 0 where there was no file.
    """

    path: str
    old: Image | None
    new: Image | None
    old_mtime_ns: int
    shipped: Digest | None


@dataclass(frozen=True, kw_only=True)
class Intent:
    """All of a transaction: its files in order, and each folder on the way to one with its image (None: to be made)."""

    started: str
    pid: int
    targets: tuple[Target, ...]
    folders: Mapping[str, Image | None]


class TornJournalError(Exception):
    """The record is not whole. It is written and synced before anything else, so such a transaction wrote nothing."""


class RejectedJournalError(InvalidReceiptError):
    """The record is whole, and is none that this program writes for this environment."""


class Journal:
    """The journal folder of one environment. Raises EnvironmentConflictError for a state folder not to be trusted."""

    def __init__(self, state_dir: Path, *, filesystem: FileSystem) -> None:
        self.folder = state_file(state_dir, JOURNAL_NAME)
        self._filesystem = filesystem
        self._originals = self.folder / "originals"
        self._intent = self.folder / "intent"
        self._draft = self.folder / "intent.draft"
        self._proven = self.folder / "proven"

    def exists(self) -> bool:
        """Whether there is one. Raises RefusedTargetError for what this program did not make: a link, or no folder."""
        for folder in (self.folder, self._originals):
            if look_at(folder) is None:
                return folder != self.folder
            if not is_folder(folder):
                shown = shlex.quote(str(folder))
                raise RefusedTargetError(
                    "the journal of changes is a link or no folder, so nobody knows whose it is",
                    where=str(folder),
                    hints=(f"look at it and take it away: ls -ld {shown}; rm {shown}",),
                )
        return True

    def is_proven(self) -> bool:
        return look_at(self._proven) is not None

    def original(self, index: int) -> Path:
        """Where the bytes before the change of target number ``index`` lie, if it had any."""
        return self._originals / str(index)

    def open(self, intent: Intent, originals: Mapping[int, bytes]) -> None:
        """Bring the originals and then the intent to the disk; nothing outside the journal has changed before."""
        self._filesystem.mkdir(self.folder)
        self._filesystem.mkdir(self._originals)
        for index, content in originals.items():
            self._filesystem.create(self.original(index), content)
            self._filesystem.fsync(self.original(index))
        self._filesystem.fsync(self._originals)
        self._filesystem.create(self._draft, print_intent(intent))
        self._filesystem.fsync(self._draft)
        self._filesystem.replace(self._draft, self._intent)
        self._filesystem.fsync(self.folder)
        self._filesystem.fsync(self.folder.parent)
        self._filesystem.fsync(self.folder.parent.parent)  # which may have got its state folder just now

    def read_intent(self) -> Intent | None:
        """The intent of a transaction that is neither proven nor undone; None where there is none.

        Raises TornJournalError; RejectedJournalError; NotRestoredError for the journal of another version.
        """
        try:
            text = self._filesystem.read(self._intent)
        except FileNotFoundError:
            return None
        return parse_intent(text, where=str(self._intent))

    def mark_proven(self) -> None:
        """From here on the new state stands. Where the mark cannot be made durable it is taken back."""
        self._filesystem.replace(self._intent, self._proven)
        try:
            self._filesystem.fsync(self.folder)
        except BaseException:
            self._filesystem.replace(self._proven, self._intent)
            raise

    def close(self) -> None:
        """Remove the journal, its record first: originals alone say nothing."""
        for record in (self._intent, self._proven):
            with suppress(FileNotFoundError):
                self._filesystem.unlink(record)
        self._filesystem.fsync(self.folder)
        for name in names_in(self._originals):
            if _NUMBER.fullmatch(name):
                self._filesystem.unlink(self._originals / name)
        with suppress(FileNotFoundError):
            self._filesystem.rmdir(self._originals)
        if look_at(self._draft) is not None:
            self._filesystem.unlink(self._draft)
        self._filesystem.rmdir(self.folder)

    def set_aside(self, name: str) -> Path:
        """Give the journal another name, its originals included, and tell which."""
        aside, number = self.folder.with_name(f"{JOURNAL_NAME}.{name}"), 1
        while look_at(aside) is not None:
            number += 1
            aside = self.folder.with_name(f"{JOURNAL_NAME}.{name}-{number}")
        self._filesystem.replace(self.folder, aside)
        return aside

    def reject(self) -> Path:
        """Set aside a journal that is never carried out, under the digest of its record."""
        return self.set_aside(f"rejected-{sha256(read_file(self._intent)).hexdigest()[:12]}")


def print_intent(intent: Intent) -> bytes:
    """The bytes of a record: a line with the digest of the rest, then JSON."""
    body = json.dumps({"schema": SCHEMA, **asdict(intent)}, indent=1).encode("utf-8")
    return sha256(body).hexdigest().encode("ascii") + b"\n" + body


def parse_intent(text: bytes, *, where: str) -> Intent:
    """Inverse of :func:`print_intent`. Raises TornJournalError; RejectedJournalError; NotRestoredError for another
    schema."""
    digest, _, body = text.partition(b"\n")
    if sha256(body).hexdigest().encode("ascii") != digest:
        raise TornJournalError(where)
    try:
        table = open_json(body.decode("utf-8"), where=where, error=RejectedJournalError)
    except UnicodeDecodeError as error:
        raise RejectedJournalError("not UTF-8", where=where) from error
    if (schema := table.take("schema", str)) != SCHEMA:
        raise NotRestoredError(
            "an interrupted change was begun by another version of this program",
            where=where,
            expected=SCHEMA,
            found=schema,
            hints=(
                "run the version that began it once more: it puts everything back first",
                f"or take the files as they are now: rm -r {shlex.quote(str(Path(where).parent))}",
            ),
        )
    intent = Intent(
        started=_take_time(table),
        pid=table.take("pid", int),
        targets=tuple(_parse_target(_table(fields, where)) for fields in table.take_list("targets", dict)),
        folders={path: _parse_folder(image, where) for path, image in table.take("folders", dict).items()},
    )
    table.close()
    _require_coherent(intent, where)
    return intent


def _require_coherent(intent: Intent, where: str) -> None:
    """Each file once, at a plain path; no folder that is not on the way to one."""
    paths = [target.path for target in intent.targets]
    for path in paths:
        if not is_plain(path):
            raise RejectedJournalError(f"{path!r} is not a plain path inside site-packages", where=where)
    if len(set(paths)) < len(paths):
        raise RejectedJournalError("a file is listed twice", where=where)
    parents = {parent.as_posix() for path in paths for parent in PurePosixPath(path).parents} - {"."}
    if strange := sorted(intent.folders.keys() - parents):
        raise RejectedJournalError(f"{strange[0]!r} is not a folder on the way to a file", where=where)


def _parse_target(table: Table) -> Target:
    target = Target(
        path=table.take("path", str),
        old=_take_image(table, "old"),
        new=_take_image(table, "new"),
        old_mtime_ns=_take_number(table, "old_mtime_ns", most=_LARGEST_TIME_NS),
        shipped=_take_digest(table, "shipped") if "shipped" in table else None,
    )
    table.close()
    return target


def _take_image(table: Table, key: str) -> Image | None:
    if key not in table:
        return None
    image = table.take_table(key)
    return _parse_image(image, _take_digest(image, "digest"))


def _parse_folder(fields: Any, where: str) -> Image | None:
    if fields is None:
        return None
    if not isinstance(fields, dict):
        raise RejectedJournalError("a folder that is none", where=where)
    table = _table(fields, where)
    if table.take("digest", str):
        raise table.fail("a folder has no digest", "digest")
    return _parse_image(table, "")


def _parse_image(table: Table, digest: Digest) -> Image:
    image = Image(
        digest=digest,
        mode=table.take("mode", int) & MODE_MASK,
        uid=_take_number(table, "uid", most=_LARGEST_ID),
        gid=_take_number(table, "gid", most=_LARGEST_ID),
    )
    table.close()
    return image


def _table(fields: Mapping[str, Any], where: str) -> Table:
    """A table in which a null is an absent key."""
    values = {key: value for key, value in fields.items() if value is not None}
    return Table(values, where=where, error=RejectedJournalError)


def _take_digest(table: Table, key: str) -> Digest:
    digest = table.take(key, str)
    if not _DIGEST.fullmatch(digest):
        raise table.fail("not a SHA-256", key)
    return digest


def _take_number(table: Table, key: str, *, most: int) -> int:
    number = table.take(key, int)
    if not 0 <= number <= most:
        raise table.fail("a number out of range", key)
    return number


def _take_time(table: Table) -> str:
    text = table.take("started", str)
    try:
        return datetime.fromisoformat(text).isoformat(timespec="seconds")
    except ValueError:
        raise table.fail("not a time", "started") from None
