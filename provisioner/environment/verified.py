"""Which sources were found to be as RECORD says, so that a later look need not read those that did not change since.

A file is known again by size, mtime, ctime and inode. A write, a rename over the file and other times all set its ctime
to the kernel's clock, and no program can set it back. Two gaps stay. A file that is read, and written again within the
same tick of the clock, keeps its ctime, as with git's index: so what had changed just before it was read is not kept.
And bytes that are stored through a mapping in memory, opened for writing before and still held, may come without a new
ctime; some file systems set it when the page is written back, some never. Only ``provision status --rehash``, which
reads every file, sees those.
"""

import json
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from provisioner.environment.site import Site
from provisioner.errors import ConflictError
from provisioner.loading import load_json
from provisioner.transaction.folders import opened, read_file, state_file, state_folder, write_whole

FILE_NAME = "verified.json"
SCHEMA = "provision/verified/1"
# Linux stamps files with a clock that moves a hundred times a second or more often, some file systems keep whole (or,
# FAT, even) seconds of it.
FINE_NS = 10**8
COARSE_NS = 2 * 10**9

Identity = list[int]
"""Size in bytes, mtime and ctime in ns, inode: a list, as JSON has no tuples."""

SIZE, CTIME = 0, 2


def read_verified(site: Site) -> Mapping[str, Identity]:
    """What each source looked like when its bytes were as RECORD says; empty where nothing is known for this RECORD."""
    try:
        values = load_json(read_file(state_file(site.state_dir, FILE_NAME)))
    except (OSError, ConflictError, ValueError):
        return {}
    if not isinstance(values, dict) or (values.get("schema"), values.get("record")) != _key(site):
        return {}
    files = values.get("files")
    return files if isinstance(files, dict) else {}


def keep_verified(site: Site, files: Mapping[str, Identity], *, began: int) -> None:
    """Keep what ``files``, which were all read after ``began`` (the file system's time in ns), looked like before.

    Those that had just changed then are left out. What cannot be written costs the next look time and no more.
    """
    kept = {path: identity for path, identity in files.items() if is_settled(identity, began)}
    if kept == read_verified(site):
        return
    schema, record = _key(site)
    text = json.dumps({"schema": schema, "record": record, "files": kept}, separators=(",", ":"))
    with suppress(OSError, ConflictError):
        write_whole(state_file(site.state_dir, FILE_NAME), text.encode())


def is_settled(identity: Identity, began: int) -> bool:
    """Whether a file had been left alone for a while at ``began``. Parts of a second tell a fine clock."""
    ctime = identity[CTIME]
    return ctime < began - (FINE_NS if ctime % 10**9 else COARSE_NS)


def identify(folder: Path, paths: Iterable[str]) -> dict[str, Identity]:
    """What each of ``paths`` below ``folder`` looks like now; those that are no regular files are left out."""
    found = {}
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for path in paths:
            try:
                now = os.stat(path, dir_fd=descriptor)
            except OSError:
                continue
            if stat.S_ISREG(now.st_mode):
                found[path] = [now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino]
    finally:
        os.close(descriptor)
    return found


def read_clock(folder: Path) -> int | None:
    """The time of the file system of ``folder`` in ns, which may be another machine's; None where nothing can be
    written there."""
    import tempfile

    try:
        with (
            opened(state_folder(folder)) as descriptor,
            tempfile.TemporaryFile(dir=f"/proc/self/fd/{descriptor}") as file,
        ):
            return os.fstat(file.fileno()).st_ctime_ns
    except (OSError, ConflictError):
        return None


def _key(site: Site) -> tuple[str, str]:
    # Under the same RECORD each file has the same digest, so the digests need not be kept.
    return SCHEMA, site.record.text_digest
