"""Locks on disk: where they are looked for, read and written."""

from pathlib import Path

from provisioner.documents.lock import Lock, parse_lock, print_facts
from provisioner.errors import InvalidLockError
from provisioner.home import Home
from provisioner.records import dataclass
from provisioner.resources import lockfiles_folder


@dataclass(frozen=True, kw_only=True)
class LockFiles:
    """The pair of files of one lock."""

    requirements: Path
    facts: Path


def lock_files(folder: Path, recipe: str) -> LockFiles:
    """The pair in ``folder``."""
    return LockFiles(requirements=folder / f"{recipe}.txt", facts=folder / f"{recipe}.toml")


def find_lock(home: Home, recipe: str) -> LockFiles | None:
    """The user's own lock of a recipe, else the one that travels with the tool, else None.

    Half a pair is found as well, so that reading refuses it and no other build comes in silence.
    """
    for folder in (home.locks, lockfiles_folder()):
        files = lock_files(folder, recipe)
        if files.facts.exists() or files.requirements.exists():
            return files
    return None


def read_lock(files: LockFiles) -> Lock:
    """Read both files.

    Raises InvalidLockError where one is missing, unreadable or contradicts the other.
    """
    try:
        facts = files.facts.read_text(encoding="utf-8")
        requirements = files.requirements.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidLockError(
            f"the lock cannot be read: {error}",
            where=str(files.facts),
            hints=(f"provision lock {files.facts.stem}",),
        ) from error
    return parse_lock(facts, requirements, where=files.facts.name)


def write_lock(files: LockFiles, lock: Lock) -> bool:
    """Write both files, each whole or not at all; False where they already held these bytes.

    The facts go last: they hold the digest of the requirements, so a half-written pair is refused, never believed.
    """
    from provisioner.files import write_whole

    texts = ((files.requirements, lock.requirements.encode()), (files.facts, print_facts(lock).encode()))
    if all(path.is_file() and path.read_bytes() == data for path, data in texts):
        return False
    for path, data in texts:
        write_whole(path, data)
    return True
