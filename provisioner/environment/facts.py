"""The facts that judging needs, read from an environment: only the files that the series touches, and RECORD."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from provisioner.digests import digest_of
from provisioner.patching.model import FileFacts
from provisioner.wheels.record import Record

if TYPE_CHECKING:
    from provisioner.environment.site import Site
    from provisioner.transaction.objects import ObjectStore


class PristineSource(Protocol):
    """Where bytes as shipped can be had: a wheel, local or read lazily."""

    def read_many(self, paths: Iterable[str]) -> Mapping[str, bytes]:
        """The members at ``paths``, each checked against the wheel's RECORD."""


def gather_facts(
    site: Site, paths: Iterable[str], *, objects: ObjectStore | None = None, wheel: PristineSource | None = None
) -> dict[str, FileFacts]:
    """What stands at ``paths`` in an environment. Pristine bytes come from the file itself where it still has RECORD's
    digest, else from ``objects``, else from ``wheel``, else they are not known."""
    facts = {path: _facts_of(site, path, objects) for path in paths}
    missing = [path for path, fact in facts.items() if fact.recorded is not None and fact.pristine is None]
    if wheel is None or not missing:
        return facts
    fetched = wheel.read_many(missing)
    return facts | {path: _with_pristine(facts[path], fetched[path]) for path in missing}


def shipped_facts(record: Record, paths: Iterable[str], wheel: PristineSource) -> dict[str, FileFacts]:
    """The same for an environment that holds a wheel as shipped, before it exists."""
    paths = tuple(paths)
    fetched = wheel.read_many([path for path in paths if path in record])
    return {
        path: FileFacts(
            path=path, content=fetched.get(path), pristine=fetched.get(path), recorded=record.digest(path), mode=None
        )
        for path in paths
    }


def _facts_of(site: Site, path: str, objects: ObjectStore | None) -> FileFacts:
    content, mode = _read(site.site_packages / path)
    recorded = site.record.digest(path)
    return FileFacts(
        path=path,
        content=content,
        pristine=_pristine_of(content, recorded, objects),
        recorded=recorded,
        mode=mode,
    )


def _pristine_of(content: bytes | None, recorded: str | None, objects: ObjectStore | None) -> bytes | None:
    if recorded is None:
        return None
    if content is not None and digest_of(content) == recorded:
        return content
    return objects.get(recorded) if objects else None


def _with_pristine(facts: FileFacts, pristine: bytes) -> FileFacts:
    return FileFacts(
        path=facts.path, content=facts.content, pristine=pristine, recorded=facts.recorded, mode=facts.mode
    )


def _read(path: Path) -> tuple[bytes | None, int | None]:
    """Bytes and permission bits of a file; nothing where there is none. A pipe is never opened: that could wait."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None, None
        with path.open("rb") as stream:
            return stream.read(), os.fstat(stream.fileno()).st_mode & 0o7777
    except (FileNotFoundError, NotADirectoryError):
        return None, None
