"""The locked wheel, wherever it can be read without installing it."""

from pathlib import Path

from packaging.specifiers import SpecifierSet

from provisioner.documents.lock import Lock
from provisioner.errors import HashMismatchError, NoSuchBuildError
from provisioner.index.lazy import Wheel
from provisioner.index.settings import IndexSettings
from provisioner.index.source import ReleaseSpec, candidates, fetch_wheel, mirror_url, open_wheel
from provisioner.index.transport import Transport
from provisioner.progress import Reporter
from provisioner.wheels.names import Candidate


def open_locked_wheel(lock: Lock, settings: IndexSettings) -> Wheel:
    """The wheel that the lock names, found by its digest on the user's index, or by its own URL for a commit build.

    Raises NoSuchBuildError where the index has no such file; HashMismatchError where its RECORD is not the lock's.
    """
    transport = Transport(settings)
    wheel = open_wheel(_locked_candidate(lock, settings, transport), settings, transport=transport)
    return insist_on_record(lock, wheel)


def fetch_locked_wheel(lock: Lock, settings: IndexSettings, reporter: Reporter) -> Path:
    """The locked wheel as a file in the cache, downloaded where it is not there, and of the lock's digest.

    Raises HashMismatchError, NoSuchBuildError or NetworkError.
    """
    with Transport(settings) as transport:
        return fetch_wheel(
            _locked_candidate(lock, settings, transport),
            settings,
            transport=transport,
            progress=lambda done, total: reporter.amount(done, total, "bytes"),
        ).path


def _locked_candidate(lock: Lock, settings: IndexSettings, transport: Transport) -> Candidate:
    build = lock.build
    if build.url is not None:
        return Candidate(
            filename=build.filename,
            version=build.version,
            url=mirror_url(build.url, settings),
            sha256=build.sha256,
            size=build.size,
        )
    found = candidates(ReleaseSpec(specifier=SpecifierSet(f"=={build.version}")), settings, transport=transport)
    same = next((candidate for candidate in found if candidate.sha256 == build.sha256), None)
    if same is None:
        raise NoSuchBuildError("the index does not have the locked wheel", where=build.filename, expected=build.sha256)
    return same


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
