"""The record on disk by which an interrupted transaction is undone or completed.

``<state dir>/journal/`` holds the bytes of every file before the change (``originals/<n>``) and one record that says
what is being changed. The record is named ``intent`` from before the first write until all writes are proven, then
``proven``: one rename decides between all-old and all-new. A folder without either belongs to a transaction that wrote
nothing.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from provisioner.digests import Digest
from provisioner.errors import NotRestoredError
from provisioner.records import dataclass
from provisioner.transaction.filesystem import FileSystem, Image
from provisioner.transaction.interrupted import JOURNAL_NAME

SCHEMA = "provision/journal/1"


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


class Journal:
    """The journal folder of one environment."""

    def __init__(self, state_dir: Path, *, filesystem: FileSystem) -> None:
        self.folder = state_dir / JOURNAL_NAME
        self._state_dir = state_dir
        self._filesystem = filesystem
        self._originals = self.folder / "originals"
        self._intent = self.folder / "intent"
        self._proven = self.folder / "proven"

    def exists(self) -> bool:
        return os.path.lexists(self.folder)

    def is_proven(self) -> bool:
        return self._proven.exists()

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
        draft = self.folder / "intent.draft"
        self._filesystem.create(draft, print_intent(intent))
        self._filesystem.fsync(draft)
        self._filesystem.replace(draft, self._intent)
        self._filesystem.fsync(self.folder)
        self._filesystem.fsync(self._state_dir)
        self._filesystem.fsync(self._state_dir.parent)  # which may have got its state folder just now

    def read_intent(self) -> Intent | None:
        """The intent of a transaction that is neither proven nor undone; None where there is none.

        Raises TornJournalError; NotRestoredError for the journal of another version.
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
        with suppress(FileNotFoundError):
            for original in sorted(self._originals.iterdir()):
                self._filesystem.unlink(original)
            self._filesystem.rmdir(self._originals)
        for leftover in sorted(self.folder.iterdir()):
            self._filesystem.unlink(leftover)
        self._filesystem.rmdir(self.folder)

    def set_aside(self) -> Path:
        """Give the journal another name, its originals included, and tell which."""
        number = 1
        while os.path.lexists(aside := self.folder.with_name(f"{JOURNAL_NAME}.unreadable-{number}")):
            number += 1
        self._filesystem.replace(self.folder, aside)
        return aside


def print_intent(intent: Intent) -> bytes:
    """The bytes of a record: a line with the digest of the rest, then JSON."""
    body = json.dumps({"schema": SCHEMA, **asdict(intent)}, indent=1).encode("utf-8")
    return sha256(body).hexdigest().encode("ascii") + b"\n" + body


def parse_intent(text: bytes, *, where: str) -> Intent:
    """Inverse of :func:`print_intent`. Raises TornJournalError; NotRestoredError for another schema."""
    digest, _, body = text.partition(b"\n")
    if sha256(body).hexdigest().encode("ascii") != digest:
        raise TornJournalError(where)
    fields = json.loads(body)
    if fields.get("schema") != SCHEMA:
        raise NotRestoredError(
            "an interrupted change was begun by another version of this program",
            where=where,
            expected=SCHEMA,
            found=str(fields.get("schema")),
            hints=("run the version that began it once more: it puts everything back first",),
        )
    return Intent(
        started=fields["started"],
        pid=fields["pid"],
        targets=tuple(_parse_target(target) for target in fields["targets"]),
        folders={path: _parse_image(image) for path, image in fields["folders"].items()},
    )


def _parse_target(fields: dict[str, Any]) -> Target:
    return Target(
        path=fields["path"],
        old=_parse_image(fields["old"]),
        new=_parse_image(fields["new"]),
        old_mtime_ns=fields["old_mtime_ns"],
        shipped=fields["shipped"],
    )


def _parse_image(fields: dict[str, Any] | None) -> Image | None:
    return Image(**fields) if fields is not None else None
