"""Whether the commit as which upstream merged a patch is in the history of a build: what local witnesses know."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from provisioner.drift.model import Build, has_whole_text
from provisioner.errors import UsageError
from provisioner.index.commits import run_git
from provisioner.patching.model import PatchVerdict

_SHORTEST = 7


@dataclass(frozen=True, kw_only=True)
class Ancestry:
    """Whether a commit is an ancestor of a build's; ``is_ancestor`` None: not known, and ``why`` not."""

    is_ancestor: bool | None
    why: str = ""


Witness = Callable[[str, Build], Ancestry]
"""Asked for a full commit and a build. Never raises: who does not know says why."""


def ask_first_to_know(witnesses: Sequence[Witness]) -> Witness:
    """A witness that asks these in turn until one knows."""

    def ask(commit: str, build: Build) -> Ancestry:
        reasons: list[str] = []
        for witness in witnesses:
            ancestry = witness(commit, build)
            if ancestry.is_ancestor is not None:
                return ancestry
            reasons.append(ancestry.why)
        return Ancestry(is_ancestor=None, why="; ".join(reasons))

    return ask


class CloneHistory:
    """A local clone of upstream. A build without a commit of its own is looked up by its release's tag.

    A clone without file contents (``--filter=blob:none``) will do; nothing is fetched.
    """

    def __init__(self, clone: Path) -> None:
        self.folder = clone
        self._find = lru_cache(maxsize=None)(self._find_commit)

    def __call__(self, commit: str, build: Build) -> Ancestry:
        if self._find(commit) is None:
            return Ancestry(is_ancestor=None, why=f"the clone does not have {commit[:10]}")
        own = self._own(build)
        if own is None:
            return Ancestry(is_ancestor=None, why="the clone has neither commit nor tag of this build")
        done = run_git(self.folder, "merge-base", "--is-ancestor", commit, own)
        if done is None or done.returncode not in (0, 1):
            why = "git did not answer" if done is None else done.stderr.strip()
            return Ancestry(is_ancestor=None, why=f"the clone: {why}")
        if done.returncode == 1 and self._is_cut_off:
            return Ancestry(is_ancestor=None, why="the clone is shallow: its history is cut off")
        return Ancestry(is_ancestor=done.returncode == 0)

    def knows(self, build: Build) -> bool:
        """Whether the clone has the commit or the tag of a build."""
        return self._own(build) is not None

    def _own(self, build: Build) -> str | None:
        return self._find(build.commit or f"refs/tags/v{build.version.public}")

    def _find_commit(self, name: str) -> str | None:
        done = run_git(self.folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        found = done.stdout.strip() if done is not None and done.returncode == 0 else ""
        # A branch may have a name that looks like a commit.
        is_meant = bool(found) and (name.startswith("refs/") or found.startswith(name))
        return found if is_meant else None

    @cached_property
    def _is_cut_off(self) -> bool:
        done = run_git(self.folder, "rev-parse", "--is-shallow-repository")
        return done is None or done.stdout.strip() != "false"


def open_clone(clone: Path) -> CloneHistory:
    """The history that a clone has.

    Raises UsageError where the folder is no repository that git reads.
    """
    done = run_git(clone, "rev-parse", "--git-dir")
    if done is None or done.returncode != 0:
        raise UsageError(
            "this is no git repository that can be read",
            where=str(clone),
            expected="a clone of vLLM",
            found="git does not answer" if done is None else done.stderr.strip(),
            hints=("git clone --filter=blob:none --no-checkout https://github.com/vllm-project/vllm",),
        )
    return CloneHistory(clone)


def listed_history(commits: Sequence[str]) -> Witness:
    """A witness that knows the order of a list of upstream's commits, oldest first, of one line of history."""

    def ask(commit: str, build: Build) -> Ancestry:
        merged, own = _position(commits, commit), _position(commits, build.commit)
        if merged is None or own is None:
            missing = commit[:10] if merged is None else "the commit of this build"
            return Ancestry(is_ancestor=None, why=f"the list of commits does not have {missing}")
        return Ancestry(is_ancestor=merged <= own)

    return ask


def tell_history(verdict: PatchVerdict, commit: str, ancestry: Ancestry) -> tuple[str, ...]:
    """What an ancestry means beside what the text shows; nothing where there is nothing to say. Pure."""
    name = commit[:10]
    holds, is_there = verdict.verdict.fits, has_whole_text(verdict)
    if ancestry.is_ancestor is None:
        return () if holds else (f"whether the build has upstream's {name} is not known: {ancestry.why}",)
    if not ancestry.is_ancestor:
        line = f"its text is there, but upstream's {name}, which merged it, is not in the build's history"
        return (line,) if is_there else ()
    if is_there:
        return (f"merged as {name}, which is in the build's history, and its text is there: it can be dropped",)
    since = "yet its text is not there: taken back or rewritten" if holds else "its text has changed since"
    return (f"merged as {name}, which is in the build's history; {since}",)


def _position(commits: Sequence[str], wanted: str | None) -> int | None:
    if wanted is None:
        return None
    for index, commit in enumerate(commits):
        shared = min(len(commit), len(wanted))
        if shared >= _SHORTEST and commit[:shared] == wanted[:shared]:
            return index
    return None
