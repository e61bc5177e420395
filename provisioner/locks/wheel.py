"""The locked wheel, wherever it can be read without installing it."""

from pathlib import Path

from packaging.specifiers import SpecifierSet

from provisioner.documents.lock import Lock
from provisioner.errors import HashMismatchError, NoSuchBuildError
from provisioner.index.lazy import RemoteWheel, Wheel
from provisioner.index.settings import IndexSettings
from provisioner.index.source import ReleaseSpec, candidates, fetch_wheel, mirror_url, open_cache, open_wheel
from provisioner.index.transport import Transport
from provisioner.progress import Reporter
from provisioner.wheels.names import Candidate


def open_locked_wheel(lock: Lock, settings: IndexSettings) -> Wheel:
    """The wheel that the lock names, found by its digest on the user's index, or by its own URL for a commit build.

    Raises NoSuchBuildError where the index has no such file; HashMismatchError where its RECORD is not the lock's.
    """
    build = lock.build
    transport = Transport(settings)
    if build.url is not None:
        wheel: Wheel = RemoteWheel(
            mirror_url(build.url, settings),
            transport,
            size=build.size,
            sha256=build.sha256,
            cache=open_cache(settings),
        )
    else:
        found = candidates(ReleaseSpec(specifier=SpecifierSet(f"=={build.version}")), settings, transport=transport)
        same = [candidate for candidate in found if candidate.sha256 == build.sha256]
        if not same:
            raise NoSuchBuildError(
                "the index does not have the locked wheel", where=build.filename, expected=build.sha256
            )
        wheel = open_wheel(same[0], settings, transport=transport)
    return insist_on_record(lock, wheel)


def fetch_locked_wheel(lock: Lock, settings: IndexSettings, reporter: Reporter) -> Path:
    """The wheel of a commit build as a file in the cache, downloaded where it is not there, and of the lock's digest.

    Raises HashMismatchError, NoSuchBuildError or NetworkError.
    """
    build = lock.build
    assert build.url is not None
    candidate = Candidate(
        filename=build.filename,
        version=build.version,
        url=mirror_url(build.url, settings),
        sha256=build.sha256,
        size=build.size,
    )
    with Transport(settings) as transport:
        return fetch_wheel(
            candidate,
            settings,
            transport=transport,
            progress=lambda done, total: reporter.amount(done, total, "bytes"),
        ).path


def insist_on_record(lock: Lock, wheel: Wheel) -> Wheel:
    """``wheel``, if its RECORD is the lock's. Raises HashMismatchError."""
    from provisioner.digests import digest_of

    found = digest_of(wheel.record_text().encode())
    if found != lock.build.record:
        raise HashMismatchError(
            "the wheel is not the locked one",
            where=lock.build.filename,
            expected=lock.build.record,
            found=found,
        )
    return wheel
