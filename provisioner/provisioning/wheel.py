"""The locked wheel, wherever it can be read without installing it."""

from packaging.specifiers import SpecifierSet

from provisioner.environment.lock import Lock
from provisioner.errors import HashMismatchError, NoSuchBuildError
from provisioner.wheels.lazy import RemoteWheel, Wheel
from provisioner.wheels.settings import IndexSettings
from provisioner.wheels.source import ReleaseSpec, candidates, open_wheel
from provisioner.wheels.transport import Transport


def open_locked_wheel(lock: Lock, settings: IndexSettings) -> Wheel:
    """The wheel that the lock names, found by its digest on the user's index, or by its own URL for a commit build.

    Raises NoSuchBuildError where the index has no such file; HashMismatchError where its RECORD is not the lock's.
    """
    build = lock.build
    transport = Transport(settings)
    if build.url is not None:
        wheel: Wheel = RemoteWheel(build.url, transport, size=build.size, sha256=build.sha256)
    else:
        found = candidates(ReleaseSpec(specifier=SpecifierSet(f"=={build.version}")), settings, transport=transport)
        same = [candidate for candidate in found if candidate.sha256 == build.sha256]
        if not same:
            raise NoSuchBuildError(
                "the index does not have the locked wheel", where=build.filename, expected=build.sha256
            )
        wheel = open_wheel(same[0], settings, transport=transport)
    _refuse_other_record(lock, wheel)
    return wheel


def _refuse_other_record(lock: Lock, wheel: Wheel) -> None:
    from provisioner.digests import digest_of

    found = digest_of(wheel.record_text().encode())
    if found != lock.build.record:
        raise HashMismatchError(
            "the wheel on the index is not the locked one",
            where=lock.build.filename,
            expected=lock.build.record,
            found=found,
        )
