"""Whether a transaction left something: all that a command which only looks needs to know of transactions."""

import os
from pathlib import Path

JOURNAL_NAME = "journal"


def is_interrupted(state_dir: Path) -> bool:
    """Whether a transaction is going on or was interrupted: files may be in any mixture of old and new."""
    return os.path.lexists(state_dir / JOURNAL_NAME)
