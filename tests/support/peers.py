"""git and GNU patch, run on small trees in neutral surroundings: makers of real diffs, and peers to compare with."""

import os
import subprocess
from collections.abc import Collection, Mapping
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


def gnu_diff(folder: Path, old: Tree, new: Tree, *options: str) -> bytes:
    """The diff that GNU diff makes of two trees; a file that one side lacks counts as empty there."""
    for name, tree in (("a", old), ("b", new)):
        (folder / name).mkdir()
        write_tree(folder / name, tree)
    done = subprocess.run(
        ["diff", "-ruN", "--text", *options, "a", "b"],
        cwd=folder,
        env=neutral_environment(folder),
        capture_output=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


class GitTrees:
    """Makes the diffs that git makes between two trees, from a repository of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run("init", "--quiet", "--bare", ".")

    def diff(self, old: Tree, new: Tree, *options: str, executable: Collection[str] = ()) -> bytes:
        """The diff of two trees; empty where they are the same. ``executable`` holds new files with mode 755."""
        stream = self._commit("old", old, ()) + self._commit("new", new, executable)
        self._run("fast-import", "--quiet", "--force", stdin=stream)
        return self._run("diff", "--no-color", "--no-ext-diff", *options, "refs/heads/old", "refs/heads/new")

    def _commit(self, name: str, tree: Tree, executable: Collection[str]) -> bytes:
        parts = [b"commit refs/heads/%b\ncommitter T <t@example.org> 0 +0000\ndata 0\ndeleteall\n" % name.encode()]
        for path, content in tree.items():
            mode = b"100755" if path in executable else b"100644"
            parts.append(b"M %b inline %b\ndata %d\n%b\n" % (mode, path.encode(), len(content), content))
        return b"".join(parts)

    def _run(self, *command: str, stdin: bytes = b"") -> bytes:
        done = subprocess.run(
            ["git", *command],
            cwd=self._folder,
            env=neutral_environment(self._folder),
            input=stdin,
            capture_output=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
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
    command = ["patch", "-p1", "-F0", "--force", "--no-backup-if-mismatch", "--binary", "--reject-file=-", *options]
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
