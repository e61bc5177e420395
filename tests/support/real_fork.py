"""The fork that ``samsung`` is for: its real files, beside the checkout or where ``PROVISION_FORK_CHECKOUT`` says."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.fork_stack import commit_all

BESIDE = Path(__file__).parents[3] / "shared" / "fork"
REPLACED = "vllm-pr50021-gdn-spec-bounds"


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
    return commit_all(folder, "the fork")


def run_own_loop(checkout: Path, package: Path, *, last: int | None = None, without: str = "") -> None:
    """Patch ``package`` as the fork's README does, with GNU patch; ``last`` stops after so many patches."""
    patches = sorted((checkout / "patches").glob("*.patch"), key=lambda path: path.name)
    for patch in patches[:last]:
        if patch.stem != without:
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
