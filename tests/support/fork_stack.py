"""A fork like the real one, over real files of vLLM 0.27.1: a git repository with thirteen patches and an overlay.

The patches are made as their authors make them, each on the result of the ones before, in the order of their names'
code points. Some of the names are there to be sorted wrongly: ``10-`` comes before ``9-``, a capital before a small
letter. For what the real fork does not show.
"""

import difflib
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from provisioner.patching.diff import parse_patch
from provisioner.patching.hunks import Applied, apply_change
from provisioner.resources import patches_folder

SCHEDULER = "vllm/v1/core/sched/scheduler.py"
OPS = "vllm/_custom_ops.py"
CACHE = "vllm/config/cache.py"
NEW = "vllm/v1/attention/ops/spec_decode_attn.py"
OVERLAY = "vllm/model_executor/layers/quantization/kvarn/config.py"
BOUNDS = "pr50021-gdn-spec-bounds"
GDN_FILES = (
    "vllm/model_executor/layers/mamba/ops/causal_conv1d.py",
    "vllm/model_executor/layers/mamba/ops/mamba_ssm.py",
    "vllm/third_party/flash_linear_attention/ops/fused_recurrent.py",
    "vllm/third_party/flash_linear_attention/ops/fused_sigmoid_gating.py",
    "vllm/models/kimi_k3/amd/ops/third_party/kda/fused_recurrent.py",
    "vllm/models/kimi_k3/nvidia/ops/third_party/kda/fused_recurrent.py",
    "vllm/v1/worker/mamba_utils.py",
)
REAL_FILES = (SCHEDULER, OPS, CACHE, *GDN_FILES)
LAUNCHER = """#!/bin/bash
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
exec venv/bin/vllm serve "$MODEL" --host 0.0.0.0 --port ${PORT:-18020} --gpu-memory-utilization $GPU_UTIL ${EXTRA_ARGS}
"""
_GIT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "n",
    "GIT_AUTHOR_EMAIL": "e",
    "GIT_COMMITTER_NAME": "n",
    "GIT_COMMITTER_EMAIL": "e",
}

Edit = Callable[[bytes], bytes]


@dataclass(kw_only=True)
class Stack:
    """The files as the patches so far leave them, and the patches' texts by their paths in the repository."""

    files: dict[str, bytes]
    texts: dict[str, str] = field(default_factory=dict)

    def change(self, name: str, edits: Mapping[str, Edit]) -> None:
        """Add a patch that makes these edits."""
        parts = []
        for path, edit in edits.items():
            before, after = self.files.get(path), edit(self.files.get(path, b""))
            parts.append(_diff(path, before, after))
            self.files[path] = after
        self.texts[name] = "Some words before the first file.\n\n" + "".join(parts)

    def take(self, name: str, patch_id: str) -> None:
        """Add a patch that makes the same change as one of our own."""
        ours = parse_patch((patches_folder() / patch_id / "0.27.patch").read_bytes(), id=patch_id, source=patch_id)
        edits: dict[str, Edit] = {}
        for change in ours.changes:
            result = apply_change(self.files.get(change.path), change)
            assert isinstance(result, Applied)
            content = result.content
            assert content is not None
            edits[change.path] = lambda _, content=content: content
        self.change(name, edits)


def make_stack(pristine: Mapping[str, bytes]) -> Stack:
    """Thirteen patches and an overlay over these files (all of ``REAL_FILES``)."""
    stack = Stack(files=dict(pristine))
    stack.change(
        "patches/0001-first.patch", {SCHEDULER: _after(b"logger = init_logger(__name__)\n", b"STEP_ONE = 1\n")}
    )
    # In the first one's neighbourhood: neither can be reversed alone.
    stack.change("patches/0002-near.patch", {SCHEDULER: _after(b"STEP_ONE = 1\n", b"STEP_TWO = STEP_ONE + 1\n")})
    stack.change(
        "patches/0003-new-file.patch",
        {NEW: lambda _: b'"""Split attention."""\n\nBLOCK = 64\n\n\ndef run():\n    return BLOCK\n'},
    )
    stack.change(
        "patches/0004-same-line.patch", {SCHEDULER: _swap(b"STEP_TWO = STEP_ONE + 1\n", b"STEP_TWO = STEP_ONE + 2\n")}
    )
    stack.take("patches/0005-pr50021.patch", BOUNDS)
    stack.change("patches/0006-far.patch", {OPS: _after(b"logger = init_logger(__name__)\n", b"FORK_OPS = True\n")})
    stack.change(
        "patches/0007-changes-the-new-file.patch",
        {
            NEW: _swap(b"BLOCK = 64\n", b"BLOCK = 128\n"),
            CACHE: _after(b"CacheDType = Literal[\n", b'    "fork_one",\n'),
        },
    )
    stack.change("patches/0008-two-files.patch", {
        OPS: _after(b"FORK_OPS = True\n", b"FORK_LEVEL = 8\n"),
        SCHEDULER: _swap(b"import itertools\n", b"import functools\nimport itertools\n"),
    })  # fmt: skip
    stack.change("patches/10-sorted-first.patch", {CACHE: _after(b'    "fork_one",\n', b'    "fork_ten",\n')})
    stack.change("patches/9-sorted-second.patch", {CACHE: _swap(b'    "fork_ten",\n', b'    "fork_nine",\n')})
    stack.change("patches/B-capital.patch", {NEW: _after(b"BLOCK = 128\n", b"CAPITAL = BLOCK\n")})
    stack.change("patches/a-small.patch", {NEW: _swap(b"CAPITAL = BLOCK\n", b"SMALL = BLOCK\n")})
    stack.change("patches/z-last.patch", {SCHEDULER: _after(b"STEP_TWO = STEP_ONE + 2\n", b"LAST = STEP_TWO\n")})
    assert len(stack.texts) == 13
    assert list(stack.texts) == sorted(stack.texts)
    stack.files[OVERLAY] = b"BITS = 4\n"
    stack.change("kvarn/kvarn-0.27.1.patch", {CACHE: _after(b'    "fork_nine",\n', b'    "kvarn_k4v2",\n')})
    stack.change("kvarn/kvarn-v2-runner.patch", {OVERLAY: lambda old: old + b"RUNNER = 2\n"})
    return stack


def make_repository(folder: Path, stack: Stack) -> str:
    """Commit the stack with its launcher, and one commit on top; returns the commit below, which is the pinned one."""
    folder.mkdir(parents=True)
    files = {
        **stack.texts,
        f"kvarn/files/{OVERLAY}": "BITS = 4\n",
        "kvarn/install.sh": "exit 1\n",
        "single-user/start_qwen.sh": LAUNCHER,
        ".gitignore": "venv/\nmodels/\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    pinned = commit_all(folder, "pinned")
    (folder / "README.md").write_text("newer\n", encoding="utf-8")
    commit_all(folder, "newer")
    return pinned


def commit_all(folder: Path, message: str) -> str:
    """Commit what is in ``folder``, made a repository where it is none; returns the commit."""
    _git(folder, "init", "--quiet", "-b", "main")
    _git(folder, "add", "--all")
    _git(folder, "commit", "--quiet", "-m", message)
    return _git(folder, "rev-parse", "HEAD")


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    environment = {"PATH": os.environ["PATH"], **_GIT}
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=30, env=environment
    ).stdout.strip()


def _diff(path: str, before: bytes | None, after: bytes) -> str:
    inner = path.removeprefix("vllm/")
    lines = difflib.unified_diff(
        (before or b"").decode().splitlines(keepends=True),
        after.decode().splitlines(keepends=True),
        "/dev/null" if before is None else f"a/{inner}",
        f"b/{inner}",
    )
    return "".join(lines)


def _after(anchor: bytes, added: bytes) -> Edit:
    return _swap(anchor, anchor + added)


def _swap(old: bytes, new: bytes) -> Edit:
    def edit(content: bytes) -> bytes:
        assert content.count(old) == 1, f"{old!r} stands {content.count(old)} times"
        return content.replace(old, new)

    return edit
