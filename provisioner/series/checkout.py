"""The fork's checkout: cloned at a pinned commit, proven to be that commit, and read as patches and new files.

git is asked as little as possible: for the commit and for the object names of its files. Whether a file is as committed
is decided by hashing it here, as everywhere in this project, so that no index flag or ignore rule can hide an edit.
"""

import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from provisioner.documents.recipe import ForkStack
from provisioner.errors import CannotObtainError, EnvironmentConflictError, NetworkError, NoSuchBuildError
from provisioner.records import dataclass
from provisioner.series.model import FORK

QUICK_SECONDS = 30
CLONE_SECONDS = 600
_NO_SUCH_COMMIT = ("not our ref", "couldn't find remote ref", "unable to find", "did not match any", "bad object")
# The lines that name the object come first: what git and the other side say reaches us in any order.
_DAMAGED = ("unable to read", "bad tree object", "not send all necessary objects", "repository corruption")
# Nothing of the user's or the machine's git configuration, no prompts, no hooks, no file system monitor.
_NEUTRAL = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "core.autocrlf=false")
_NOT_OVERLAY = frozenset({".patch", ".md", ".sh", ".txt"})
_OVERLAY_FILES = "files"


@dataclass(frozen=True, kw_only=True)
class ForkEdit:
    """A file that is not as committed: ``what`` is edited, missing, or not part of the commit."""

    path: str
    what: str


@dataclass(frozen=True, kw_only=True)
class ForkPatch:
    """One patch file of the checkout, in series order."""

    id: str
    path: Path
    text: bytes


@dataclass(frozen=True, kw_only=True)
class ForkFile:
    """A new file of the overlay; ``path`` is posix, relative to site-packages."""

    path: str
    source: Path
    content: bytes


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """A fork's checkout as found. ``edits`` is empty where every file is as committed."""

    folder: Path
    commit: str
    edits: tuple[ForkEdit, ...]
    patches: tuple[ForkPatch, ...]
    overlay: tuple[ForkFile, ...]
    overlay_patches: tuple[ForkPatch, ...]

    @property
    def venv(self) -> Path:
        """The only environment that the fork's launcher runs."""
        return self.folder / "venv"


def clone_fork(url: str, commit: str, folder: Path, *, timeout_seconds: float = CLONE_SECONDS) -> None:
    """Check out ``commit`` of ``url`` into ``folder``, which must be absent or empty; it appears whole or not at all.

    Raises EnvironmentConflictError for a folder that exists, NoSuchBuildError for a commit that the repository lacks,
    NetworkError where the repository cannot be reached in time, CannotObtainError where git is not installed.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise EnvironmentConflictError("the folder for the checkout exists", where=str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        work = Path(temporary) / "checkout"
        _run_git(["init", "--quiet", str(work)], where=str(work), timeout_seconds=QUICK_SECONDS)
        _fetch_commit(work, url, commit, timeout_seconds)
        _git(work, ["checkout", "--quiet", "--detach", commit], timeout_seconds=timeout_seconds)
        _git(work, ["remote", "add", "origin", url], timeout_seconds=QUICK_SECONDS)
        work.replace(folder)


def read_checkout(folder: Path, fork: ForkStack) -> Checkout:
    """Read an existing checkout. Raises EnvironmentConflictError for a folder that is no git checkout."""
    if not (folder / ".git").exists():
        raise EnvironmentConflictError(
            "not a git checkout", where=str(folder), hints=(f"git clone {fork.url} {folder}",)
        )
    commit = _git(folder, ["rev-parse", "--verify", "HEAD"]).strip().decode("ascii")
    committed = _committed_files(folder)
    patches = _read_patches(folder, fork.patches)
    overlay = _read_overlay(folder, fork)
    overlay_patches = _read_patches(folder, fork.overlay_patches) if fork.overlay_patches else ()
    used = [patch.path for patch in (*patches, *overlay_patches)] + [file.source for file in overlay]
    return Checkout(
        folder=folder,
        commit=commit,
        edits=(*_find_edits(folder, committed), *_find_strangers(folder, committed, used)),
        patches=patches,
        overlay=overlay,
        overlay_patches=overlay_patches,
    )


def require_pinned(checkout: Checkout, fork: ForkStack, *, commit: str | None = None) -> None:
    """Refuse a checkout that is not exactly the pinned commit.

    Raises EnvironmentConflictError for another commit or for local edits.
    """
    wanted = commit or fork.commit
    if checkout.commit != wanted:
        raise EnvironmentConflictError(
            "the checkout is at another commit",
            where=str(checkout.folder),
            expected=wanted,
            found=checkout.commit,
            hints=(f"git -C {checkout.folder} checkout {wanted}", _take_as_is(checkout)),
        )
    if checkout.edits:
        listed = ", ".join(f"{edit.path} ({edit.what})" for edit in checkout.edits[:5])
        more = f" and {len(checkout.edits) - 5} more" if len(checkout.edits) > 5 else ""
        raise EnvironmentConflictError(
            "the checkout has local edits",
            where=str(checkout.folder),
            expected="the files as committed",
            found=listed + more,
            hints=(f"git -C {checkout.folder} stash --include-untracked", _take_as_is(checkout)),
        )


def _take_as_is(checkout: Checkout) -> str:
    return f"to take it as it is: provision up RECIPE --fork-dir {shlex.quote(str(checkout.folder))} --fork-any"


def find_drafter(folder: Path, fork: ForkStack, environ: Mapping[str, str]) -> Path | None:
    """The drafter's folder: what ``DRAFT`` names, else the first of the recipe's folders that holds weights."""
    named = environ.get("DRAFT")
    candidates = [Path(named)] if named else [folder / name for name in fork.drafters]
    # The launcher looks relative names up from the checkout.
    absolute = (path if path.is_absolute() else folder / path for path in candidates)
    return next((path for path in absolute if _has_weights(path)), None)


def drafter_hint(folder: Path) -> str:
    """The command that fetches the drafter, as far as this checkout has one."""
    script = folder / "prepare" / "fetch_dflash2.py"
    if script.is_file():
        return f"cd {folder} && venv/bin/python prepare/fetch_dflash2.py"
    return f"hf download incoai/Qwen3.8-27B-DFlash2 --local-dir {folder / 'models' / 'Qwen3.8-27B-DFlash2'}"


def blob_name(content: bytes) -> str:
    """git's object name (SHA-1) of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _fetch_commit(work: Path, url: str, commit: str, timeout_seconds: float) -> None:
    # A single commit is little to fetch, but not every server gives one that no branch points at: then everything.
    try:
        _fetch(work, url, ["--depth", "1", "--no-tags", url, commit], timeout_seconds)
    except NoSuchBuildError:
        _fetch(work, url, [url, "+refs/*:refs/fork/*"], timeout_seconds)
        if not _has_commit(work, commit):
            raise NoSuchBuildError(
                "the repository has no such commit",
                where=url,
                found=commit,
                hints=("--fork-commit SHA", "--fork-dir DIR"),
            ) from None


def _fetch(work: Path, url: str, arguments: list[str], timeout_seconds: float) -> None:
    """Fetch, the only step in which a network may be at fault, and only where the repository is not on this machine."""
    try:
        _git(work, ["fetch", "--quiet", *arguments], timeout_seconds=timeout_seconds)
    except _GitError as error:
        if any(mark in error.text.lower() for mark in _NO_SUCH_COMMIT):
            raise NoSuchBuildError(
                "git has no such commit", where=url, found=error.found, hints=("--fork-commit SHA",)
            ) from None
        told = next((line for mark in _DAMAGED for line in error.text.splitlines() if mark in line), None)
        if told is not None:
            raise CannotObtainError(
                "the repository is damaged: it lacks objects of the commit",
                where=url,
                found=told.strip(),
                hints=(f"git -C {shlex.quote(_path_of(url))} fsck",) if _is_local(url) else ("--fork-url URL",),
            ) from None
        if _is_local(url):
            raise CannotObtainError(
                "no repository can be read here",
                where=url,
                found=error.found,
                hints=(f"git -C {shlex.quote(_path_of(url))} log -1", "--fork-url URL"),
            ) from None
        raise NetworkError(
            "git failed", where=url, found=error.found, hints=("--fork-dir DIR", "--without-fork")
        ) from None


def _is_local(url: str) -> bool:
    return url.startswith("file://") or Path(url).is_absolute() or Path(url).exists()


def _path_of(url: str) -> str:
    return url.removeprefix("file://")


def _has_commit(work: Path, commit: str) -> bool:
    try:
        _git(work, ["cat-file", "-e", f"{commit}^{{commit}}"])
    except CannotObtainError:
        return False
    return True


def _git(folder: Path, arguments: list[str], *, timeout_seconds: float = QUICK_SECONDS) -> bytes:
    # Naming the repository keeps git from looking for one in the folders above.
    place = [f"--git-dir={folder / '.git'}", f"--work-tree={folder}"]
    return _run_git([*place, *arguments], where=str(folder), timeout_seconds=timeout_seconds)


def _run_git(arguments: list[str], *, where: str, timeout_seconds: float) -> bytes:
    try:
        done = subprocess.run(
            ["git", *_NEUTRAL, *arguments],
            capture_output=True,
            timeout=timeout_seconds,
            check=False,
            env=_neutral_environment(),
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise CannotObtainError("git is not installed", hints=("sudo apt-get install git", "--without-fork")) from None
    except subprocess.TimeoutExpired:
        raise NetworkError(
            f"git gave no answer in {timeout_seconds:.0f} s", where=where, hints=("--fork-dir DIR",)
        ) from None
    if done.returncode != 0:
        raise _GitError(done.stderr.decode("utf-8", "replace").strip(), where)
    return done.stdout


class _GitError(CannotObtainError):
    """git ended with an error; ``text`` is all that it said."""

    def __init__(self, text: str, where: str) -> None:
        lines = text.splitlines() or ["no message"]
        told = next((line for line in lines if "fatal: " in line), lines[-1])
        super().__init__("git failed", where=where, found=told.strip(), hints=(f"git -C {shlex.quote(where)} status",))
        self.text = text


def _neutral_environment() -> dict[str, str]:
    # Proxies, certificates and ssh keys are the user's; every GIT_ variable is not.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return kept | {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        "LC_ALL": "C",
    }


def _committed_files(folder: Path) -> dict[str, str]:
    """Path to object name of every file in HEAD; submodules are left out."""
    listing = _git(folder, ["ls-tree", "-r", "-z", "--full-tree", "HEAD"])
    files: dict[str, str] = {}
    for row in listing.split(b"\0"):
        if not row:
            continue
        head, _, path = row.partition(b"\t")
        _, kind, name = head.decode("ascii").split()
        if kind == "blob":
            files[os.fsdecode(path)] = name
    return files


def _find_edits(folder: Path, committed: Mapping[str, str]) -> Iterator[ForkEdit]:
    for path, name in committed.items():
        content = _read_content(folder / path)
        if content is None:
            yield ForkEdit(path=path, what="missing")
        elif blob_name(content) != name:
            yield ForkEdit(path=path, what="edited")


def _read_content(path: Path) -> bytes | None:
    """What git stores for a file: its bytes, or where a link leads."""
    try:
        return os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
    except OSError:
        return None


def _find_strangers(folder: Path, committed: Mapping[str, object], used: list[Path]) -> Iterator[ForkEdit]:
    for path in used:
        name = path.relative_to(folder).as_posix()
        if name not in committed:
            yield ForkEdit(path=name, what="not part of the commit")


def _read_patches(folder: Path, pattern: str) -> tuple[ForkPatch, ...]:
    # The names' own order (code points), the same on every machine, as a shell's glob gives in the C locale.
    paths, root = sorted(folder.glob(pattern), key=lambda path: path.name), folder.resolve()
    return tuple(
        ForkPatch(id=f"{FORK}/{path.stem}", path=path, text=_read_inside(root, path))
        for path in paths
        if path.is_file()
    )


def _read_overlay(folder: Path, fork: ForkStack) -> tuple[ForkFile, ...]:
    """The overlay's files: those under its ``files`` folder if it has one, else all but patches, texts and scripts.

    Paths that begin with the package's name count from site-packages, others from the package.
    """
    if fork.overlay is None or not (folder / fork.overlay).is_dir():
        return ()
    base = folder / fork.overlay
    if (base / _OVERLAY_FILES).is_dir():
        base = base / _OVERLAY_FILES
        paths = [path for path in base.rglob("*") if path.is_file()]
    else:
        paths = [path for path in base.rglob("*") if path.is_file() and path.suffix not in _NOT_OVERLAY]
    found, root = [], folder.resolve()
    for path in sorted(paths):
        if "__pycache__" in path.parts:
            continue
        inner = PurePosixPath(path.relative_to(base).as_posix())
        target = inner if inner.parts[0] == fork.root else PurePosixPath(fork.root) / inner
        found.append(ForkFile(path=str(target), source=path, content=_read_inside(root, path)))
    return tuple(found)


def _read_inside(root: Path, path: Path) -> bytes:
    place = path.resolve()
    if not place.is_relative_to(root):
        raise EnvironmentConflictError("a link leads out of the checkout", where=str(path), found=str(place))
    return path.read_bytes()


def _has_weights(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*.safetensors"))
