"""Whether a transaction left something: all that a command which only looks needs to know of transactions."""

from pathlib import Path

from provisioner.transaction.folders import JOURNAL_NAME, look_at, state_file


def is_interrupted(state_dir: Path) -> bool:
    """Whether a transaction is going on or was interrupted: files may be in any mixture of old and new.

    Raises EnvironmentConflictError for a state folder that is not to be trusted.
    """
    return look_at(state_file(state_dir, JOURNAL_NAME)) is not None
