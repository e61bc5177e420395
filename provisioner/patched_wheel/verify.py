"""A patched wheel proven: every member by RECORD, its names, what it says of itself, and that its origin gives it."""

from collections.abc import Iterator
from pathlib import Path

from packaging.utils import canonicalize_name

from provisioner.digests import Digest, digest_of
from provisioner.documents.patched_wheel import FACTS_NAME, PatchedWheel, parse_patched_wheel
from provisioner.errors import CannotObtainError, InvalidWheelError
from provisioner.index.lazy import LocalWheel
from provisioner.patched_wheel.build import changes_of, judge_origin, read_origin
from provisioner.patched_wheel.contents import Written, lay_out, series_digest
from provisioner.patched_wheel.naming import folders_of, patched_filename, patched_version
from provisioner.patched_wheel.sbom import SBOM_NAME, Bill, parse_sbom
from provisioner.pipeline.evaluate import named_by
from provisioner.progress import Reporter
from provisioner.records import dataclass
from provisioner.series.model import Series
from provisioner.wheels.names import parse_wheel_name
from provisioner.wheels.zipped import find_dist_info


@dataclass(frozen=True, kw_only=True)
class VerifiedWheel:
    """What was found: ``problems`` says each thing that is not as it must be; ``with_origin`` if its origin
    was asked for; it is not where the wheel contradicts itself."""

    path: Path
    sha256: Digest
    facts: PatchedWheel
    problems: tuple[str, ...]
    with_origin: bool


@dataclass(frozen=True, kw_only=True)
class _Opened:
    wheel: LocalWheel
    dist_info: str
    facts: PatchedWheel
    bill: Bill

    def own(self) -> dict[str, bytes]:
        """What the wheel says of itself, by name in its dist-info folder."""
        return {name: self.wheel.read(f"{self.dist_info}/{name}") for name in (FACTS_NAME, SBOM_NAME)}


def verify_wheel(path: Path, origin: Path | None, reporter: Reporter) -> VerifiedWheel:
    """Read the whole of a patched wheel and hold it to what it says, and to the wheel that it was made from.

    Raises InvalidWheelError for a file that is no patched wheel, CannotObtainError where one cannot be read, and what
    judging raises where the series does not hold on the origin.
    """
    with LocalWheel(path) as wheel:
        reporter.stage(f"read every member of {wheel.filename}")
        broken = tuple(_read_members(wheel))
        if broken:
            raise InvalidWheelError("members are not what RECORD says", where=wheel.where, found="\n".join(broken))
        opened = _open_own(wheel)
        problems = [*_check_names(opened), *_check_bill(opened), *_check_files(opened)]
        with_origin = origin is not None and not problems
        if origin is not None and with_origin:
            reporter.stage(f"carry the series out on {origin.name}")
            problems += _check_origin(opened, origin)
        return VerifiedWheel(
            path=path,
            sha256=wheel.digest(),
            facts=opened.facts,
            problems=tuple(problems),
            with_origin=with_origin,
        )


def _read_members(wheel: LocalWheel) -> Iterator[str]:
    listed, held = frozenset(wheel.record().entries), wheel.members()
    yield from (f"{path}: RECORD lists it and the wheel lacks it" for path in sorted(listed - held.keys()))
    for path in held:
        try:
            wheel.read(path)
        except CannotObtainError as error:
            yield str(error)


def _open_own(wheel: LocalWheel) -> _Opened:
    dist_info = find_dist_info(wheel.filename, wheel.names(), where=wheel.where)
    texts = {}
    for name in (FACTS_NAME, SBOM_NAME):
        try:
            texts[name] = wheel.read(f"{dist_info}/{name}").decode("utf-8")
        except (KeyError, UnicodeDecodeError) as error:
            raise InvalidWheelError(
                "this is no wheel of provision wheel", where=wheel.where, expected=f"{dist_info}/{name}", found="none"
            ) from error
    return _Opened(
        wheel=wheel,
        dist_info=dist_info,
        facts=parse_patched_wheel(texts[FACTS_NAME], where=f"{wheel.filename}: {FACTS_NAME}"),
        bill=parse_sbom(texts[SBOM_NAME], where=f"{wheel.filename}: {SBOM_NAME}"),
    )


def _check_names(opened: _Opened) -> Iterator[str]:
    from email.parser import HeaderParser

    name, origin = parse_wheel_name(opened.wheel.filename), opened.facts.origin
    wanted = patched_version(parse_wheel_name(origin.filename).version, opened.facts.label, opened.facts.series)
    if name.filename != patched_filename(origin.filename, wanted):
        yield f"the file must be called {patched_filename(origin.filename, wanted)}"
    headers = HeaderParser().parsestr(opened.wheel.metadata_text(), headersonly=True)
    if headers["Version"] != str(wanted):
        yield f"METADATA says version {headers['Version']}, and it is {wanted}"
    if canonicalize_name(headers["Name"] or "") != name.project:
        yield f"METADATA says name {headers['Name']}, and it is {name.project}"
    if opened.dist_info.partition("-")[2] != f"{wanted}.dist-info":
        yield f"the folder {opened.dist_info} is not called by the version {wanted}"


def _check_bill(opened: _Opened) -> Iterator[str]:
    """The SBOM and the facts say the same, and the facts the series that the version names."""
    facts = opened.facts
    after = {file.path: file.after for file in facts.files}
    if facts.series != series_digest({patch.id: patch.text for patch in facts.patches}, after):
        yield "the digest of the series is not that of its patches and files"
    if {name: digest_of(text) for name, text in opened.bill.texts.items()} != {
        patch.id: patch.text for patch in opened.facts.patches
    }:
        yield "the patches in the SBOM are not those in the facts"
    if opened.bill.files != {file.path: file.after for file in opened.facts.files if file.after}:
        yield "the files in the SBOM are not those in the facts"


def _check_files(opened: _Opened) -> Iterator[str]:
    """Each changed file is as the facts say."""
    recorded = opened.wheel.digests(file.path for file in opened.facts.files)
    for file in opened.facts.files:
        if recorded[file.path] != file.after:
            yield f"{file.path} is not as patched: expected {file.after or 'no file'}, found {recorded[file.path]}"


def _check_origin(opened: _Opened, path: Path) -> Iterator[str]:
    """The origin, patched again, has the same RECORD and the same permissions: so nothing else differs."""
    with LocalWheel(path) as wheel:
        if wheel.digest() != opened.facts.origin.sha256:
            yield f"it was made from another file than {path}: sha256 {opened.facts.origin.sha256}"
            return
        origin = read_origin(wheel)
        series = Series(patches=tuple(named_by(item, opened.bill.texts[item.id]) for item in opened.facts.patches))
        changes = changes_of(judge_origin(wheel, series))
        version = opened.dist_info.partition("-")[2].removesuffix(".dist-info")
        parts = lay_out(origin, changes, folders_of(opened.dist_info), version, opened.own())
    *_, record = parts
    assert isinstance(record, Written)
    held = opened.wheel.members()
    for part in parts:
        path_there, member = part.header.path, held.get(part.header.path)
        if member is None:
            yield f"{path_there} is missing"
        elif part is not record and (member.crc, member.size) != (part.header.crc, part.header.size):
            yield f"{path_there} differs from what the series makes of the origin"
        elif member.mode != part.header.mode:
            yield f"{path_there} has the permissions {member.mode:o}, not {part.header.mode:o}"
    yield from (f"{name} is not in the origin" for name in held.keys() - {part.header.path for part in parts})
    if opened.wheel.read(record.header.path) != record.data:
        yield "RECORD is not that of the origin with the series"
