"""What a local clone or GitHub knows of a commit of vLLM: its full hash, and whether it is on main."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from provisioner.errors import CannotObtainError, NetworkError, NoSuchBuildError
from provisioner.index.settings import IndexSettings
from provisioner.index.transport import Transport
from provisioner.loading import load_json

if TYPE_CHECKING:
    import subprocess

_GIT_SECONDS = 30.0


class Standing(StrEnum):
    """Where a commit stands."""

    ON_MAIN = "on main"
    NOT_ON_MAIN = "not on main"
    UNKNOWN_COMMIT = "unknown commit"
    NOBODY_ANSWERS = "nobody answers"


def resolve_commit(commit: str, settings: IndexSettings, transport: Transport, *, known: Iterable[str] = ()) -> str:
    """The 40 digits of ``commit``: as given, one of ``known`` (a recipe's own), or what a local clone or GitHub says.

    Raises NoSuchBuildError where there is no such commit or several, NetworkError where nobody could be asked.
    """
    if len(commit) == 40:
        return commit
    matches = sorted({full for full in known if full.startswith(commit)})
    if not matches and settings.clone is not None:
        matches = _ask_clone(settings.clone, commit)
    if len(matches) == 1:
        return matches[0]
    if len(matches) > 1:
        raise NoSuchBuildError(
            f"several commits begin with {commit}",
            found=", ".join(matches),
            hints=("give all 40 digits of the commit",),
        )
    return _ask_github(commit, settings, transport)


class Witnesses:
    """Those who know whether a commit is on vLLM's main. Never raises: this only explains why a build is missing."""

    def __init__(self, settings: IndexSettings) -> None:
        self._settings = settings
        self._github_answers = settings.github_api is not None

    def ask_standing(self, commit: str) -> Standing:
        """Where a full ``commit`` stands. GitHub is not asked again once it did not answer."""
        if self._settings.clone is not None:
            standing = _standing_in_clone(self._settings.clone, commit)
            if standing is Standing.ON_MAIN:
                return standing  # a clone that does not have a commit may only be behind
        if not self._github_answers:
            return Standing.NOBODY_ANSWERS
        standing = _standing_on_github(commit, self._settings)
        self._github_answers = standing is not Standing.NOBODY_ANSWERS
        return standing


def _ask_github(commit: str, settings: IndexSettings, transport: Transport) -> str:
    hints = (
        "give all 40 digits of the commit",
        "export PROVISION_VLLM_CLONE=/path/to/a/clone/of/vllm",
    )
    if settings.github_api is None:
        raise NoSuchBuildError(f"the abbreviated commit {commit} cannot be completed: nobody may be asked", hints=hints)
    try:
        reply = transport.fetch(
            f"{_repository(settings)}/commits/{commit}",
            accept=frozenset({200, 403, 404, 409, 422, 429}),
            headers=_github_headers(settings),
        )
        full = _field(reply.body, "sha") if reply.status == 200 else None
    except CannotObtainError as error:
        raise NetworkError(
            f"the abbreviated commit {commit} cannot be completed: {error.what}", where=error.where, hints=hints
        ) from error
    if reply.status in (403, 429):
        raise NetworkError(
            f"the abbreviated commit {commit} cannot be completed: GitHub's limit for requests is reached",
            where=settings.github_api,
            hints=(*hints, "export GITHUB_TOKEN=TOKEN"),
        )
    if full is None or len(full) != 40 or not full.startswith(commit):
        raise NoSuchBuildError(
            f"{settings.github_repository} has no commit {commit}, or several that begin so", hints=hints[:1]
        )
    return full


def _standing_on_github(commit: str, settings: IndexSettings) -> Standing:
    hasty = Transport(replace(settings, retries=0, timeout=min(5.0, settings.timeout), deadline=10.0))
    # The second page of a comparison has no list of files, which can be megabytes.
    url = f"{_repository(settings)}/compare/{quote(f'{commit}...main')}?per_page=1&page=2"
    with hasty:
        try:
            reply = hasty.fetch(url, accept=frozenset({200, 404}), headers=_github_headers(settings))
        except CannotObtainError:
            return Standing.NOBODY_ANSWERS
    if reply.status == 404:
        return Standing.UNKNOWN_COMMIT
    match _field(reply.body, "status"):
        case "ahead" | "identical":
            return Standing.ON_MAIN
        case "behind" | "diverged":
            return Standing.NOT_ON_MAIN
        case _:
            return Standing.NOBODY_ANSWERS


def _ask_clone(clone: Path, commit: str) -> list[str]:
    done = run_git(clone, "rev-parse", f"--disambiguate={commit}")
    if done is None or done.returncode != 0:
        return []
    commits = []
    for full in done.stdout.split():
        kind = run_git(clone, "cat-file", "-t", full)
        if kind is not None and kind.stdout.strip() == "commit":
            commits.append(full)
    return commits


def _standing_in_clone(clone: Path, commit: str) -> Standing:
    for main in ("origin/main", "upstream/main", "main"):
        done = run_git(clone, "merge-base", "--is-ancestor", commit, main)
        if done is not None and done.returncode == 0:
            return Standing.ON_MAIN
    return Standing.NOBODY_ANSWERS


def run_git(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str] | None:
    """Ask git of a clone; None where there is no git, or no answer in time. Never fetches what the clone lacks."""
    import subprocess

    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.run(
            ("git", "--no-pager", "-c", "protocol.allow=never", "-C", str(clone), *arguments),
            env=kept | {"LC_ALL": "C", "GIT_NO_LAZY_FETCH": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _repository(settings: IndexSettings) -> str:
    return f"{settings.github_api}/repos/{settings.github_repository}"


def _github_headers(settings: IndexSettings) -> dict[str, str]:
    headers = {"Accept": "application/vnd.github+json"}
    return headers | ({"Authorization": f"Bearer {settings.github_token}"} if settings.github_token else {})


def _field(body: bytes, name: str) -> str | None:
    try:
        answer: Any = load_json(body)
    except ValueError:
        return None
    value = answer.get(name) if isinstance(answer, dict) else None
    return value if isinstance(value, str) else None
