"""Whether a bundle is whole and what it says it is, read from end to end with nothing installed."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from provisioner.bundles.use import TOOL, WHEELS, Bundle, open_bundle, wanted_pins
from provisioner.bundles.wheelhouse import digest_of_file
from provisioner.digests import Digest
from provisioner.documents.bundle_manifest import BundledFile, Manifest
from provisioner.documents.lock import Lock
from provisioner.errors import InvalidBundleError
from provisioner.progress import Reporter

_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True, kw_only=True)
class CheckedBundle:
    """A bundle that is whole; ``sha256`` and ``size`` (bytes) are those of the file."""

    path: Path
    manifest: Manifest
    sha256: Digest
    size: int


def check_bundle(path: Path, reporter: Reporter) -> CheckedBundle:
    """Read every byte: members against the list, wheels against the lock, the tool's against its requirements.

    Raises what opening raises, HashMismatchError for a member with other bytes, and InvalidBundleError where the parts
    do not belong together.
    """
    bundle = open_bundle(path)
    reporter.stage(f"read {len(bundle.manifest.files)} members of {path.name}")
    bundle.recipe()
    _insist_on_wheels(bundle, bundle.lock())
    if bundle.manifest.tool is not None:
        _insist_on_tool(bundle)
    with ThreadPoolExecutor(1, thread_name_prefix="whole") as pool:
        whole = pool.submit(digest_of_file, path)
        _read_members(bundle, reporter)
    return CheckedBundle(path=path, manifest=bundle.manifest, sha256=whole.result(), size=path.stat().st_size)


def _read_members(bundle: Bundle, reporter: Reporter) -> None:
    total, done = sum(file.size for file in bundle.manifest.files), 0
    for file in bundle.manifest.files:
        for block in bundle.blocks(file):
            done += len(block)
            reporter.amount(done, total, "bytes")


def _insist_on_wheels(bundle: Bundle, lock: Lock) -> None:
    """Each wheel is one that the lock allows, and none is missing."""
    manifest = bundle.manifest
    there = {file.sha256 for file in manifest.under(WHEELS)}
    allowed = {digest for pin in lock.pins for digest in pin.hashes}
    _refuse(
        bundle, "a wheel that the lock does not allow", [x for x in manifest.under(WHEELS) if x.sha256 not in allowed]
    )
    wanted = wanted_pins(lock, manifest.distribution, manifest.python, bare=manifest.bare)
    missing = [pin.name for pin in wanted if there.isdisjoint(pin.hashes)]
    if missing:
        raise InvalidBundleError(
            "the bundle lacks wheels that the lock wants", where=str(bundle.path), found=", ".join(missing[:5])
        )


def _insist_on_tool(bundle: Bundle) -> None:
    """Its requirements and its wheels are the same files."""
    wanted = set(_HASH.findall(bundle.read(f"{TOOL}/requirements.txt").decode(errors="replace")))
    wheels = [file for file in bundle.manifest.under(TOOL) if file.path.endswith(".whl")]
    _refuse(bundle, "a wheel that the tool does not need", [file for file in wheels if file.sha256 not in wanted])
    if len(wanted) != len(wheels):
        raise InvalidBundleError("the bundle lacks wheels that the tool needs", where=str(bundle.path))


def _refuse(bundle: Bundle, what: str, files: list[BundledFile]) -> None:
    if files:
        raise InvalidBundleError(
            f"the bundle holds {what}", where=str(bundle.path), found=", ".join(file.path for file in files[:5])
        )
