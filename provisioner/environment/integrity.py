"""Post-conditions, read as text: nothing of the environment is imported."""

import hashlib
import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from packaging.version import InvalidVersion, Version

from provisioner.digests import Digest
from provisioner.documents.receipt import Receipt
from provisioner.environment.site import Site
from provisioner.environment.verified import SIZE, Identity, identify, keep_verified, read_clock, read_verified
from provisioner.records import dataclass
from provisioner.wheels.record import Record, RecordEntry

_PIECE = 1 << 20
_LARGEST = 32
_VERSION = re.compile(r"^__version__(?:\s*=\s*version)?\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_COMMIT = re.compile(r"^__commit_id__(?:\s*=\s*commit_id)?\s*=\s*['\"]g?([0-9a-f]{7,40})['\"]", re.MULTILINE)
_CUDA = re.compile(r"^cuda\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class BuildText:
    """What ``_version.py`` of the distribution says: version and (short) commit, None where it says nothing."""

    version: str | None
    commit: str | None


@dataclass(frozen=True, kw_only=True)
class TorchText:
    """What ``torch/version.py`` says; ``cuda`` is None for a CPU build."""

    version: str
    cuda: str | None


def parse_build(text: str) -> BuildText:
    """Version and commit from the text of a ``_version.py``. Pure."""
    version, commit = _VERSION.search(text), _COMMIT.search(text)
    return BuildText(version=version.group(1) if version else None, commit=commit.group(1) if commit else None)


def parse_torch(text: str) -> TorchText | None:
    """Version and CUDA from the text of ``torch/version.py``. Pure."""
    version, cuda = _VERSION.search(text), _CUDA.search(text)
    return TorchText(version=version.group(1), cuda=cuda.group(1) if cuda else None) if version else None


def read_build(site: Site) -> BuildText:
    """The build of the installed distribution, as its text says."""
    text = _read(site.site_packages / site.distribution.replace("-", "_") / "_version.py")
    return parse_build(text) if text else BuildText(version=None, commit=None)


def read_torch(site_packages: Path) -> TorchText | None:
    """The installed torch, or None where there is none."""
    text = _read(site_packages / "torch" / "version.py")
    return parse_torch(text) if text else None


def commits_agree(found: str | None, expected: str) -> bool:
    """Whether two commits, either of which may be shortened, are the same."""
    return found is not None and (expected.startswith(found) or found.startswith(expected))


def versions_agree(found: str | None, expected: Version) -> bool:
    """Whether a version text names ``expected`` (a local part that only one of them has does not count)."""
    if found is None:
        return False
    try:
        version = Version(found)
    except InvalidVersion:
        return False
    return version == expected or version.public == expected.public


@dataclass(frozen=True, kw_only=True)
class RecordFinding:
    """One shipped file that is not as RECORD says; ``found`` is None where it is missing."""

    path: str
    expected: str
    found: str | None


class SourceCheck(Protocol):
    """A way of comparing installed files with RECORD."""

    def __call__(self, site: Site, *, skip: Collection[str] = ()) -> tuple[RecordFinding, ...]:
        """The files that are not as RECORD says, but for ``skip``."""


def check_files(site: Site, *, skip: Collection[str] = ()) -> tuple[RecordFinding, ...]:
    """Read every installed file and compare it with RECORD, but for ``skip``."""
    return check_record(site, skip=skip, python_only=False)


def check_record(site: Site, *, skip: Collection[str] = (), python_only: bool) -> tuple[RecordFinding, ...]:
    """Compare installed files with RECORD, but for ``skip``; all of them or the Python sources (0.6 s or 0.15 s).

    Rows that point outside site-packages (scripts) and rows without a hash are left out.
    """
    return _compare(site, [path for path in inside_paths(site.record, skip) if path.endswith(".py") or not python_only])


def check_install(site: Site, *, skip: Collection[str] = ()) -> tuple[RecordFinding, ...]:
    """Read every installed file as :func:`check_files` does. What the sources look like that are right is kept with the
    environment, for :func:`check_sources`."""
    paths = list(inside_paths(site.record, skip))
    findings = _compare(site, [path for path in paths if not path.endswith(".py")])
    # The sources last: by then the clock has moved on since they were linked, and what they look like can be kept.
    sources = [path for path in paths if path.endswith(".py")]
    now, began = identify(site.site_packages, sources), read_clock(site.state_dir)
    wrong = _compare(site, sources)
    _keep(site, now, wrong, began)
    return tuple(sorted((*findings, *wrong), key=lambda item: item.path))


def check_sources(site: Site, *, skip: Collection[str] = ()) -> tuple[RecordFinding, ...]:
    """Compare the Python sources with RECORD, but for ``skip``; those that were right before and have not changed since
    are not read. What is right now is kept for the next time. Of all other files only the sizes are compared."""
    now, unknown = _find_unknown(site, skip)
    began = read_clock(site.state_dir) if unknown else None
    findings = _compare(site, unknown)
    _keep(site, now, findings, began)
    return findings


def peek_sources(site: Site, *, skip: Collection[str] = ()) -> tuple[RecordFinding, ...]:
    """The same with nothing written."""
    return _compare(site, _find_unknown(site, skip)[1])


def is_record_edited(site: Site, receipt: Receipt | None) -> bool:
    """Whether RECORD is another than when the receipt was written; False where nobody kept what it was."""
    kept = receipt.record if receipt else None
    return kept is not None and site.record.shipped_digest != kept


def _find_unknown(site: Site, skip: Collection[str]) -> tuple[dict[str, Identity], list[str]]:
    """What the sources look like now, and the files that must be read to tell whether they are right: sources that are
    not known, and others that are gone or of another size."""
    paths = list(inside_paths(site.record, skip))
    known, found = read_verified(site), identify(site.site_packages, paths)
    now = {path: identity for path, identity in found.items() if path.endswith(".py")}
    sources = [path for path in paths if path.endswith(".py") and (path not in now or known.get(path) != now[path])]
    others = [path for path in paths if not path.endswith(".py") and not _has_size(site.record, path, found.get(path))]
    return now, sources + others


def _has_size(record: Record, path: str, identity: Identity | None) -> bool:
    return identity is not None and record.size(path) in {identity[SIZE], None}


def _keep(site: Site, now: Mapping[str, Identity], findings: Iterable[RecordFinding], began: int | None) -> None:
    wrong = {finding.path for finding in findings}
    if began is not None:
        keep_verified(site, {path: identity for path, identity in now.items() if path not in wrong}, began=began)


def inside_paths(record: Record, skip: Collection[str] = ()) -> Iterable[str]:
    """The paths that are compared: those in site-packages, but for ``skip``."""
    return (path for path in record.entries if path not in skip and not path.startswith(("..", "/")))


def _compare(site: Site, paths: Iterable[str]) -> tuple[RecordFinding, ...]:
    """Read and compare ``paths``, the largest first: one of them has 40 % of vLLM's bytes and comes late in RECORD."""
    entries = (site.record.entries[path] for path in paths)
    rows = sorted((entry for entry in entries if entry.digest is not None), key=lambda entry: -(entry.size or 0))
    if not rows:
        return ()
    from concurrent.futures import ThreadPoolExecutor  # most runs find nothing to read

    tasks = [*_chunks(rows[:_LARGEST], 1), *_chunks(rows[_LARGEST:], 200)]
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda task: _check_rows(site.site_packages, task), tasks)
        return tuple(sorted((item for findings in found for item in findings), key=lambda item: item.path))


def _check_rows(folder: Path, rows: Iterable[RecordEntry]) -> list[RecordFinding]:
    found = ((row, _digest_file(f"{folder}/{row.path}")) for row in rows)
    return [
        RecordFinding(path=row.path, expected=row.digest, found=digest)
        for row, digest in found
        if row.digest is not None and row.digest != digest
    ]


def _digest_file(path: str) -> Digest | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return _digest_open(descriptor)
    finally:
        os.close(descriptor)


def _digest_open(descriptor: int) -> Digest | None:
    """The digest of an open file; None where it is none that can be read, such as a folder or a pipe."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        return None
    digest = hashlib.sha256()
    # Most files are read whole, at once; the last read tells that the end was reached.
    while piece := os.read(descriptor, min(found.st_size + 1, _PIECE)):
        digest.update(piece)
    return digest.hexdigest()


def _chunks(rows: list[RecordEntry], size: int) -> Iterable[list[RecordEntry]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
