"""The fork that ``samsung`` is for: its real files, beside the checkout or where ``PROVISION_FORK_CHECKOUT`` says."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

BESIDE = Path(__file__).parents[3] / "shared" / "fork"
REPLACED = "vllm-pr50021-gdn-spec-bounds"
GIT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "n",
    "GIT_AUTHOR_EMAIL": "e",
    "GIT_COMMITTER_NAME": "n",
    "GIT_COMMITTER_EMAIL": "e",
}


def fork_files() -> Path:
    """The folder of the fork's files; skips where there is none."""
    named = os.environ.get("PROVISION_FORK_CHECKOUT")
    folder = Path(named) if named else BESIDE
    if not (folder / "patches").is_dir():
        pytest.skip("the fork's files are not here: name a checkout with PROVISION_FORK_CHECKOUT")
    return folder


def final_digests() -> dict[str, str]:
    """Path to SHA-256 of each file that the fork's own loop changes on pristine 0.27.1."""
    file = fork_files() / "final-sha256.json"
    if not file.is_file():
        pytest.skip("the digests of the fork's own result are not here: final-sha256.json")
    found: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return found


def commit_fork(folder: Path, extra: Mapping[str, str] | None = None) -> str:
    """Make a git repository of the fork's files, and of ``extra`` ones, in ``folder``; its commit."""
    shutil.copytree(fork_files(), folder, ignore=shutil.ignore_patterns(".git", "venv", "models"))
    for name, text in (extra or {}).items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / ".gitignore").write_text("venv/\nmodels/\n", encoding="utf-8")
    git(folder, "init", "--quiet", "-b", "main")
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "-m", "the fork")
    return git(folder, "rev-parse", "HEAD")


def git(folder: Path, *words: str) -> str:
    """Run git in ``folder`` with nothing of the user's configuration; what it prints."""
    command = ["git", "-C", str(folder), *words]
    environment = {"PATH": os.environ["PATH"], **GIT}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, env=environment)
    return done.stdout.strip()


def run_own_loop(checkout: Path, package: Path, *, last: int | None = None) -> None:
    """Patch ``package`` as the fork's README does, with GNU patch; ``last`` stops after so many patches."""
    patches = sorted((checkout / "patches").glob("*.patch"), key=lambda path: path.name)
    for patch in patches[:last]:
        apply_with_gnu(package, patch)
    if last is None:
        shutil.copytree(checkout / "kvarn" / "files" / "vllm", package, dirs_exist_ok=True)
        for name in ("kvarn-0.27.1.patch", "kvarn-v2-runner.patch"):
            apply_with_gnu(package, checkout / "kvarn" / name)


def apply_with_gnu(package: Path, patch: Path) -> None:
    """``patch -p1 -N``, whose exit code its own users throw away."""
    with patch.open("rb") as text:
        subprocess.run(
            ["patch", "-p1", "-N", "-r", os.devnull, "--no-backup-if-mismatch", "-d", str(package)],
            stdin=text,
            capture_output=True,
            check=False,
            timeout=60,
        )
