"""Post-conditions, read as text: nothing of the environment is imported."""

import hashlib
import os
import re
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from provisioner.environment.site import Site
from provisioner.wheels.record import RecordEntry

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


def check_record(site: Site, *, skip: Collection[str] = (), python_only: bool) -> tuple[RecordFinding, ...]:
    """Compare installed files with RECORD, but for ``skip``; all of them or the Python sources (0.6 s or 0.08 s).

    Rows that point outside site-packages (scripts) and rows without a hash are left out.
    """
    rows = [
        entry
        for entry in site.record
        if entry.digest is not None
        and entry.path not in skip
        and not entry.path.startswith(("..", "/"))
        and (entry.path.endswith(".py") or not python_only)
    ]
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda chunk: _check_rows(site.site_packages, chunk), _chunks(rows, 200))
        return tuple(finding for findings in found for finding in findings)


def _check_rows(folder: Path, rows: Iterable[RecordEntry]) -> list[RecordFinding]:
    findings = []
    for row in rows:
        found = _digest_file(folder / row.path)
        if row.digest is not None and found != row.digest:
            findings.append(RecordFinding(path=row.path, expected=row.digest, found=found))
    return findings


def _digest_file(path: Path) -> str | None:
    try:
        with path.open("rb", buffering=0) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _chunks(rows: list[RecordEntry], size: int) -> Iterable[list[RecordEntry]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
