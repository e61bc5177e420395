import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a killed process loses nothing there that it would not lose on a disk,
    and a thousand fsyncs cost nothing."""
    if not os.access(SHARED_MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="provision-test-") as folder:
        yield Path(folder)
