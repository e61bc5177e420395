"""Reading a distribution's files while the installer is still at work on others: half a second that nobody waits for.

Nothing is believed that is not true at the end: each file is known with what it looked like and the digest that it had,
and the check after the install reads whatever looks different by then.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from provisioner.digests import Digest
from provisioner.environment.integrity import check_files, inside_paths
from provisioner.environment.site import STATE_FOLDER, open_site_packages
from provisioner.environment.verified import FINE_NS, Identity, identify, is_settled, read_clock
from provisioner.errors import ProvisionError

Ahead = Mapping[str, tuple[Identity, Digest]]
"""By path: what a file looked like before it was read, and the digest that it had, which was RECORD's."""

_POLL_SECONDS = 0.02


@contextmanager
def reading_ahead(venv: Path, wheel: str) -> Iterator[Callable[[], Ahead]]:
    """Read the files of the wheel called ``wheel`` while the block runs, once they are all there. What is given tells,
    after the block, which were right.
    """
    done = Event()
    distribution, version = wheel.split("-")[:2]
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        found = pool.submit(_read_ahead, venv, distribution, version, done)
        try:
            yield lambda: _result_of(found)
        finally:
            done.set()


def _result_of(found: "Future[Ahead]") -> Ahead:
    """What could not be read ahead, for whatever reason, is read by the check, which says what is wrong."""
    try:
        return found.result()
    except (OSError, ValueError, ProvisionError):
        return {}


def _read_ahead(venv: Path, distribution: str, version: str, done: Event) -> Ahead:
    folder = _await_files(venv, f"{distribution}-{version}.dist-info", done)
    # By the end of the wait the last of the files has been left alone for long enough.
    if folder is None or done.wait(1.1 * FINE_NS / 1e9):
        return {}
    began = read_clock(venv / STATE_FOLDER)
    site = open_site_packages(folder, distribution)
    now = identify(folder, inside_paths(site.record))
    wrong = {finding.path for finding in check_files(site)}
    return {
        path: (identity, digest)
        for path, identity in now.items()
        if path not in wrong and began is not None and is_settled(identity, began)
        if (digest := site.record.digest(path)) is not None
    }


def _await_files(venv: Path, dist_info: str, done: Event) -> Path | None:
    """The site-packages where a wheel's files are all there; None where the installer ended first."""
    # uv links a wheel's files in any order, RECORD among them; what it says of itself follows when that is done.
    folders = list(venv.glob("lib/python*/site-packages"))
    while not done.is_set():
        for folder in folders:
            if (folder / dist_info / "INSTALLER").exists():
                return folder
        done.wait(_POLL_SECONDS)
    return None
