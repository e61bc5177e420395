"""git and GNU patch, run on small trees in neutral surroundings: makers of real diffs, and peers to compare with."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

Tree = Mapping[str, bytes]
TIME_LIMIT_S = 60


def write_tree(folder: Path, tree: Tree) -> None:
    """Write every file of ``tree`` under ``folder``."""
    for path, content in tree.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def read_tree(folder: Path) -> dict[str, bytes]:
    """Every file under ``folder``."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def neutral_environment(home: Path) -> dict[str, str]:
    """An environment in which no setting of the user reaches git or patch."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CEILING_DIRECTORIES": str(home),
        "LC_ALL": "C",
    }


def git_diff(folder: Path, old: Tree, new: Tree, *options: str) -> bytes:
    """The diff that git makes of two trees, with a/ and b/ prefixes; empty where they are the same."""
    write_tree(folder / "a", old)
    write_tree(folder / "b", new)
    (folder / "a").mkdir(exist_ok=True)
    (folder / "b").mkdir(exist_ok=True)
    command = ["git", "diff", "--no-index", "--no-prefix", "--no-color", "--no-ext-diff", *options, "a", "b"]
    done = subprocess.run(
        command, cwd=folder, env=neutral_environment(folder), capture_output=True, timeout=TIME_LIMIT_S, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def git_apply(folder: Path, tree: Tree, diff: bytes, *options: str) -> dict[str, bytes] | None:
    """The tree after ``git apply``; None where git refuses."""
    write_tree(folder, tree)
    command = ["git", "--git-dir=/nonexistent", "apply", "--whitespace=nowarn", "--unsafe-paths", *options, "-"]
    done = subprocess.run(
        command,
        cwd=folder,
        env=neutral_environment(folder),
        input=diff,
        capture_output=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    return read_tree(folder) if done.returncode == 0 else None


def gnu_patch(folder: Path, tree: Tree, diff: bytes, *options: str) -> dict[str, bytes] | None:
    """The tree after ``patch -p1 -F0`` without what it leaves behind; None where it refuses any hunk."""
    write_tree(folder, tree)
    command = ["patch", "-p1", "-F0", "--batch", "--no-backup-if-mismatch", "--binary", "--reject-file=-", *options]
    done = subprocess.run(
        command,
        cwd=folder,
        env=neutral_environment(folder),
        input=diff,
        capture_output=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    return read_tree(folder) if done.returncode == 0 else None
