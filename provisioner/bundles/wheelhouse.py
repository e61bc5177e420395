"""A folder of wheels from the user's index: each found by what is wanted of it, fetched once, of the promised digest.

What was fetched stays when a run is stopped, half a wheel too, and the next run goes on from there.
"""

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from packaging.specifiers import SpecifierSet

from provisioner.bundles.self_wheel import Need
from provisioner.digests import Digest
from provisioner.documents.lock import Pin
from provisioner.errors import HashMismatchError, InvalidLockError, NoCompatibleWheelError
from provisioner.index.settings import IndexSettings
from provisioner.index.source import find_releases, mirror_url
from provisioner.index.transport import Transport
from provisioner.progress import Reporter
from provisioner.wheels.names import Candidate, Target, choose, parse_wheel_name

_OLDEST_GLIBC = (2, 28)
"""What vLLM's own wheels ask for: a wheel that runs there is taken before one that needs a newer system."""
_WORKERS = 8


def find_wheels(
    wanted: Sequence[Pin | Need], python: str, settings: IndexSettings, reporter: Reporter
) -> tuple[Candidate, ...]:
    """The file on the index for each of ``wanted``, in their order, for Linux x86_64 and a Python such as ``3.12``.

    Each candidate has a URL and a digest. Raises NoCompatibleWheelError, NoSuchBuildError, HashMismatchError where no
    file is the locked one, or NetworkError.
    """
    with Transport(settings) as transport, ThreadPoolExecutor(_WORKERS, thread_name_prefix="find") as pool:
        running = [pool.submit(_find, item, python, settings, transport) for item in wanted]
        try:
            found = []
            for answer in running:
                found.append(answer.result())
                reporter.amount(len(found), len(wanted), "wheels")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return tuple(found)


def fetch_wheels(wheels: Sequence[Candidate], folder: Path, settings: IndexSettings, reporter: Reporter) -> None:
    """Every wheel as a file in ``folder``; one that lies there with the right digest is not fetched again.

    Raises what a download raises. The others are stopped then, and where the user interrupts; what they have so far
    stays for the next run.
    """
    counter = _Counter(sum(wheel.size or 0 for wheel in wheels), reporter)
    stopped = threading.Event()

    def fetch(wheel: Candidate) -> None:
        def count(now: int, _: int | None) -> None:
            if stopped.is_set():
                raise _StoppedError
            counter.note(wheel.filename, now)

        assert wheel.url is not None
        target = folder / wheel.filename
        if stopped.is_set():
            return
        if target.exists() and digest_of_file(target) == wheel.sha256:
            counter.note(wheel.filename, wheel.size or 0)
            return
        transport.download(wheel.url, target, expected=wheel.sha256, size=wheel.size, progress=count)

    folder.mkdir(parents=True, exist_ok=True)
    # The largest begin first: none of them is left alone at the end.
    ordered = sorted(wheels, key=lambda wheel: -(wheel.size or 0))
    with Transport(settings) as transport, ThreadPoolExecutor(_WORKERS, thread_name_prefix="fetch") as pool:
        running = [pool.submit(fetch, wheel) for wheel in ordered]
        try:
            for future in as_completed(running):
                future.result()
        finally:
            stopped.set()


def digest_of_file(path: Path) -> Digest:
    """SHA-256 of a file, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class _StoppedError(Exception):
    """Ends a download because another one failed or the user interrupted. Never leaves this module."""


class _Counter:
    """Bytes of all downloads together."""

    def __init__(self, total: int, reporter: Reporter) -> None:
        self._total = total
        self._reporter = reporter
        self._guard = threading.Lock()
        self._counts: dict[str, int] = {}

    def note(self, filename: str, count: int) -> None:
        with self._guard:
            self._counts[filename] = count
            self._reporter.amount(sum(self._counts.values()), self._total, "bytes")


def _find(wanted: Pin | Need, python: str, settings: IndexSettings, transport: Transport) -> Candidate:
    if isinstance(wanted, Need):
        listed = find_releases(wanted.name, SpecifierSet(f"=={wanted.version}"), settings, transport=transport)
        return _best([candidate for candidate in listed if candidate.sha256 is not None], python)
    url = wanted.requirement.url
    if url is not None:
        return _named(wanted, url, settings)
    listed = find_releases(wanted.name, SpecifierSet(f"=={wanted.version}"), settings, transport=transport)
    same = [candidate for candidate in listed if candidate.sha256 in wanted.hashes]
    if not same:
        raise HashMismatchError(
            f"no wheel of {wanted.name} {wanted.version} on the index is the locked one",
            found=", ".join(candidate.filename for candidate in listed),
            hints=("provision lock RECIPE, if the index really moved",),
        )
    return _best(same, python)


def _named(pin: Pin, url: str, settings: IndexSettings) -> Candidate:
    """The one file that the lock names by its URL; its size is not known yet."""
    if len(pin.hashes) != 1:
        raise InvalidLockError("a URL names one file, and has one hash", where=pin.name)
    name = parse_wheel_name(url.rpartition("/")[2])
    return Candidate(
        filename=name.filename, version=name.version, url=mirror_url(url, settings), sha256=pin.hashes[0]
    )  # fmt: skip


def _best(same: Sequence[Candidate], python: str) -> Candidate:
    target = _target(python)
    variant = same[0].variant if same else None
    try:
        return choose(same, replace(target, glibc=_OLDEST_GLIBC), variant=variant).chosen
    except NoCompatibleWheelError:
        return choose(same, target, variant=variant).chosen


def _target(python: str) -> Target:
    major, minor = (int(part) for part in python.split("."))
    return Target(python=(major, minor))
