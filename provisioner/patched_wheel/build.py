"""A patched wheel written to disk: the origin judged, laid out anew, and its members copied as they are packed."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePath
from typing import BinaryIO

from packaging.version import Version

from provisioner.counts import count_text
from provisioner.digests import Digest, digest_of
from provisioner.documents.patched_wheel import FACTS_NAME, OriginWheel, PatchedWheel, print_patched_wheel
from provisioner.documents.receipt import AppliedPatch, PatchedFile
from provisioner.errors import ConflictError
from provisioner.files import writing_whole
from provisioner.index.lazy import LocalWheel
from provisioner.patched_wheel.contents import Changes, Copied, Origin, Part, lay_out, series_digest
from provisioner.patched_wheel.naming import folders_of, patched_filename, patched_folders, patched_version
from provisioner.patched_wheel.sbom import SBOM_NAME, Named, print_sbom
from provisioner.patching.model import SeriesVerdict
from provisioner.pipeline.apply_patches import describe_applied
from provisioner.pipeline.evaluate import ShippedTree, judge
from provisioner.progress import Reporter
from provisioner.records import dataclass
from provisioner.series.model import Series, refuse_blocked
from provisioner.wheels.archive import print_directory, print_local_header
from provisioner.wheels.names import parse_wheel_name
from provisioner.wheels.zipped import find_dist_info


@dataclass(frozen=True, kw_only=True)
class WheelRequest:
    """``origin`` is patched by ``series``; ``label`` names it in the version."""

    origin: Path
    series: Series
    label: str


@dataclass(frozen=True, kw_only=True)
class BuiltWheel:
    """The file with its digest and size in bytes, and what it holds.

    ``unchanged`` tells that it lay there already; ``signatures`` are members of the origin that sign it alone and were
    left out.
    """

    path: Path
    sha256: Digest
    size: int
    version: Version
    facts: PatchedWheel
    unchanged: bool
    signatures: tuple[str, ...]


def build_wheel(request: WheelRequest, folder: Path, reporter: Reporter) -> BuiltWheel:
    """Write the patched wheel into ``folder``, whole or not at all.

    Raises ConflictError for a series that does not hold or changes nothing, for an origin that is patched already, and
    where another file of that name lies; InvalidPatchError, InvalidWheelError, HashMismatchError.
    """
    with LocalWheel(request.origin) as wheel, ThreadPoolExecutor(1, thread_name_prefix="digest") as second_core:
        sha256 = second_core.submit(wheel.digest)
        reporter.stage(f"judge {count_text(len(request.series.patches), 'patch', 'patches')} on {wheel.filename}")
        origin = read_origin(wheel)
        verdict = judge_origin(wheel, request.series)
        changes = changes_of(verdict)
        facts = _state_facts(request, wheel, verdict, sha256.result())
        name = parse_wheel_name(wheel.filename)
        version = patched_version(name.version, request.label, facts.series)
        own = {
            FACTS_NAME: print_patched_wheel(facts).encode(),
            SBOM_NAME: _print_own_sbom(Named(distribution=name.project, version=str(version)), facts, request.series),
        }
        parts = lay_out(origin, changes, patched_folders(origin.folders.dist_info, version), str(version), own)
        path = folder / patched_filename(wheel.filename, version)
        reporter.stage(f"write {path.name}")
        written, unchanged = _write_once(path, wheel, parts)
    return BuiltWheel(
        path=path,
        sha256=written,
        size=path.stat().st_size,
        version=version,
        facts=facts,
        unchanged=unchanged,
        signatures=origin.signatures,
    )


def read_origin(wheel: LocalWheel) -> Origin:
    """The wheel as shipped. Raises InvalidWheelError; ConflictError for one that this module made."""
    members = wheel.members()
    dist_info = find_dist_info(wheel.filename, members, where=wheel.where)
    if f"{dist_info}/{FACTS_NAME}" in members:
        raise ConflictError(
            "this wheel is patched already", where=wheel.where,
            hints=("name the wheel as shipped, with all patches that are wanted",),
        )  # fmt: skip
    return Origin(
        where=wheel.where,
        folders=folders_of(dist_info),
        members=members,
        record=wheel.record(),
        metadata=wheel.metadata_text(),
    )


def judge_origin(wheel: LocalWheel, series: Series) -> SeriesVerdict:
    """What the series makes of the wheel. Raises InvalidPatchError or ConflictError where it does not hold."""
    name = parse_wheel_name(wheel.filename)
    verdict = judge(ShippedTree(distribution=name.project, version=name.version, wheel=wheel), series).verdict
    refuse_blocked(verdict, series, where=wheel.filename)
    return verdict


def changes_of(verdict: SeriesVerdict) -> Changes:
    """What differs once the series is carried out."""
    contents = {path: after for path, after in verdict.final.items() if after != verdict.pristine[path]}
    return Changes(contents=contents, modes=verdict.final_modes)


def _state_facts(request: WheelRequest, wheel: LocalWheel, verdict: SeriesVerdict, sha256: Digest) -> PatchedWheel:
    named = {item.id: item for item in request.series.patches}
    # Where a text lay on this machine is no fact of the wheel.
    patches = tuple(
        _without_folder(describe_applied(named[patch.id], patch)) for patch in verdict.patches if patch.verdict.applies
    )
    if not patches:
        raise ConflictError(
            "no patch of the series changes this build, so the wheel as shipped is the one to use", where=wheel.filename
        )
    after = {path: verdict.final_digests[path] for path in changes_of(verdict).contents}
    files = tuple(
        PatchedFile(path=path, before=_digest(verdict.pristine[path]), after=digest)
        for path, digest in sorted(after.items())
    )
    return PatchedWheel(
        label=request.label,
        series=series_digest({patch.id: patch.text for patch in patches}, after),
        origin=OriginWheel(
            filename=wheel.filename,
            version=str(parse_wheel_name(wheel.filename).version),
            sha256=sha256,
            record=digest_of(wheel.record_text().encode()),
        ),
        patches=patches,
        files=files,
    )


def _without_folder(patch: AppliedPatch) -> AppliedPatch:
    return replace(patch, source=PurePath(patch.source).name)


def _digest(content: bytes | None) -> Digest | None:
    return None if content is None else digest_of(content)


def _print_own_sbom(named: Named, facts: PatchedWheel, series: Series) -> bytes:
    texts = {item.id: item.kept for item in series.patches}
    return print_sbom(named, facts, texts, {item.id: item.upstream for item in series.patches}).encode()


def _write_once(path: Path, wheel: LocalWheel, parts: tuple[Part, ...]) -> tuple[Digest, bool]:
    """Digest of what stands at ``path`` afterwards, and whether it stood there before."""
    with writing_whole(path) as stream:
        digest = _write_archive(stream, wheel, parts)
        if not path.exists():
            return digest, False
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != digest:
            raise ConflictError(
                "another file of this name lies there", where=str(path), expected=f"sha256 {digest}",
                found=f"sha256 {found}", hints=("move it away, or choose another folder: -o DIR",),
            )  # fmt: skip
    return digest, True


def _write_archive(stream: BinaryIO, wheel: LocalWheel, parts: tuple[Part, ...]) -> Digest:
    hasher, place, directory = hashlib.sha256(), 0, []
    for part in parts:
        directory.append((part.header, place))
        for block in _blocks_of(part, wheel):
            hasher.update(block)
            place += stream.write(block)
    end = print_directory(directory)
    hasher.update(end)
    stream.write(end)
    return hasher.hexdigest()


def _blocks_of(part: Part, wheel: LocalWheel) -> Iterator[bytes]:
    yield print_local_header(part.header)
    if isinstance(part, Copied):
        yield from wheel.packed_blocks(part.source)
    else:
        yield part.data
