"""git's three-way merge of single files, in a clean surrounding: no repository, no configuration of the user's."""

import os
import subprocess
import tempfile
from pathlib import Path

from provisioner.errors import CannotObtainError
from provisioner.porting.refresh import Merged

_TIMEOUT_SECONDS = 60
_FAILED = 128
_CLEAN = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_DIR": "/nonexistent",
    "LC_ALL": "C",
}


def merge_with_git(base: bytes, patched: bytes, new: bytes) -> Merged:
    """Merge the change from ``base`` to ``patched`` into ``new``; conflicts carry all three texts.

    Raises CannotObtainError where git is missing or refuses.
    """
    with tempfile.TemporaryDirectory(prefix="provision-merge-") as name:
        folder = Path(name)
        for file, data in (("new", new), ("base", base), ("patched", patched)):
            (folder / file).write_bytes(data)
        labels = ["-L", "new build", "-L", "cut against", "-L", "patched"]
        command = ["git", "merge-file", "-p", "--diff3", *labels, "new", "base", "patched"]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env={"PATH": os.environ.get("PATH", os.defpath), **_CLEAN},
                capture_output=True,
                timeout=_TIMEOUT_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotObtainError("git could not be run", found=str(error), hints=("install git",)) from error
    if done.returncode < 0 or done.returncode >= _FAILED:
        raise CannotObtainError("git could not merge", found=done.stderr.decode("utf-8", "replace").strip())
    return Merged(content=done.stdout, conflicts=done.returncode)
