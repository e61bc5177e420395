"""The patch store: a folder for each patch, with ``patch.toml``, a text for each range of versions, and former texts.

``patch.toml`` says what a text must hold. A text is taken only where its digest, its files, hunks and counts are those
written down: a regenerated patch that lost a hunk applies cleanly, too.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from types import MappingProxyType

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from provisioner.counts import count_text
from provisioner.digests import Digest, digest_of
from provisioner.errors import InvalidPatchError, UsageError
from provisioner.loading import load_toml
from provisioner.nearest import near_names
from provisioner.patching.diff import manifest_of, parse_patch
from provisioner.patching.model import Cut, FileManifest, Manifest, Patch, SeriesPatch
from provisioner.records import dataclass
from provisioner.tables import Table

PATCH_FILE = "patch.toml"
FORMER_FOLDER = "former"
_ID = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class PatchVariant:
    """One text of a patch, for a range of versions. ``cut_against`` is the release that it was cut against.

    ``digest`` is the SHA-256 of the text, ``former`` those of older texts, newest first. ``bases`` has, where written
    down, the digest of the file that a path's hunks were cut against.
    """

    file: str
    versions: SpecifierSet
    cut_against: Version
    digest: Digest
    former: tuple[Digest, ...]
    manifest: Manifest
    bases: Mapping[str, Digest] = field(default_factory=lambda: MappingProxyType({}))

    def covers(self, version: Version) -> bool:
        """Whether the range holds ``version``. A development or candidate build counts as the release it leads to."""
        return any(self.versions.contains(form, prereleases=True) for form in (version, Version(version.base_version)))


@dataclass(frozen=True, kw_only=True)
class StoredPatch:
    """One patch of the store. ``check`` names its behaviour check; ``root`` is what its paths are relative to.

    ``merged_as`` is the commit, 40 digits, as which upstream merged the same change.
    """

    id: str
    title: str
    fixes: str
    distribution: str
    root: str
    folder: Path
    variants: tuple[PatchVariant, ...]
    upstream: str | None = None
    merged_as: str | None = None
    cause: str | None = None
    check: str | None = None

    def variant_for(self, version: Version) -> PatchVariant | None:
        """The first variant whose range holds ``version``; None where there is none."""
        return next((variant for variant in self.variants if variant.covers(version)), None)

    def file_of(self, variant: PatchVariant) -> Path:
        """Where the text of a variant lies."""
        return self.folder / variant.file


def read_store(folder: Path) -> tuple[StoredPatch, ...]:
    """Every patch of the store, by id.

    Raises InvalidPatchError, with an address, for the first that is not understood.
    """
    return tuple(read_stored_patch(place) for place in sorted(folder.iterdir()) if _is_patch_folder(place))


def open_stored_patch(store: Path, patch_id: str) -> StoredPatch:
    """The patch with this id.

    Raises UsageError, naming the nearest known id, where the store does not have it; InvalidPatchError.
    """
    known = stored_ids(store)
    if patch_id not in known:
        hints = (*near_names(patch_id, known), "provision patches")
        raise UsageError(f"no patch is called {patch_id!r}", where=str(store), hints=hints)
    return read_stored_patch(store / patch_id)


def stored_ids(store: Path) -> tuple[str, ...]:
    """The ids of all patches of the store, sorted."""
    return tuple(sorted(place.name for place in store.iterdir() if _is_patch_folder(place)))


def read_stored_patch(folder: Path) -> StoredPatch:
    """The patch of one folder of the store.

    Raises InvalidPatchError, with an address.
    """
    path = folder / PATCH_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidPatchError(
            f"a patch of the store needs a readable {PATCH_FILE}: {error}", where=str(path)
        ) from error
    return parse_patch_toml(text, folder=folder, where=f"{folder.name}/{PATCH_FILE}")


def parse_patch_toml(text: str, *, folder: Path, where: str) -> StoredPatch:
    """Parse the text of the ``patch.toml`` of ``folder``, whose name must be the patch's id. Reads nothing.

    Raises InvalidPatchError, addressed by ``where`` and key.
    """
    try:
        values = load_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidPatchError(f"not TOML: {error}", where=where) from error
    table = Table(values, where=where, error=InvalidPatchError)
    if table.take("schema", int) != 1:
        raise table.fail("unknown patch schema", "schema", expected="1", found=str(values["schema"]))
    patch = StoredPatch(
        id=_take_id(table, folder),
        title=table.take("title", str),
        upstream=table.take_optional("upstream", str),
        merged_as=_take_commit(table, "merged_as") if "merged_as" in table else None,
        fixes=" ".join(table.take("fixes", str).split()),
        cause=table.take_optional("cause", str),
        check=table.take_optional("check", str),
        distribution=table.take_or("distribution", str, "vllm"),
        root=table.take_or("root", str, ""),
        folder=folder,
        variants=tuple(_parse_variant(entry) for entry in table.take_tables("variant")),
    )
    table.close()
    if not patch.variants:
        raise table.fail("a patch needs a text", "variant", expected="at least one [[variant]]")
    return patch


def load_series_patch(patch: StoredPatch, variant: PatchVariant) -> SeriesPatch:
    """The text of a variant, proven to be the one written down, with its scopes and former texts.

    Raises InvalidPatchError where a text is missing, has another digest or holds something else than written down.
    """
    parsed = _load_text(patch, patch.file_of(variant), variant.digest)
    _check_manifest(variant.manifest, manifest_of(parsed), where=f"{patch.id}/{variant.file}")
    former = [_load_text(patch, patch.folder / FORMER_FOLDER / f"{digest}.patch", digest) for digest in variant.former]
    return SeriesPatch(patch=parsed, cuts=cuts_of(variant), former=tuple(former), merged_as=patch.merged_as)


def find_text(store: Path, patch_id: str, digest: Digest) -> tuple[SeriesPatch, bytes] | None:
    """The patch whose text has this digest, today's or a former one, and the text; None where the store lacks it."""
    if patch_id not in stored_ids(store):
        return None
    patch = read_stored_patch(store / patch_id)
    for variant in patch.variants:
        former = patch.folder / FORMER_FOLDER / f"{digest}.patch"
        if variant.digest == digest:
            return load_series_patch(patch, variant), patch.file_of(variant).read_bytes()
        if digest in variant.former:
            return SeriesPatch(patch=_load_text(patch, former, digest)), former.read_bytes()
    return None


def cuts_of(variant: PatchVariant) -> Mapping[str, Cut]:
    """What ``patch.toml`` knows of the files that a variant was cut against."""
    return MappingProxyType(
        {file.path: Cut(digest=variant.bases.get(file.path), scopes=file.scopes) for file in variant.manifest.files}
    )


def _is_patch_folder(place: Path) -> bool:
    return place.is_dir() and not place.name.startswith((".", "__"))


def _take_id(table: Table, folder: Path) -> str:
    patch_id = table.take("id", str)
    if not _ID.fullmatch(patch_id):
        raise table.fail("an id is lower-case letters and digits, single hyphens or dots between", "id", found=patch_id)
    if patch_id != folder.name:
        raise table.fail("the id is not the name of the folder", "id", expected=folder.name, found=patch_id)
    return patch_id


def _parse_variant(table: Table) -> PatchVariant:
    files = tuple(_parse_file(entry) for entry in table.take_tables("files"))
    paths = [manifest.path for manifest, _ in files]
    for repeated in sorted({path for path in paths if paths.count(path) > 1}):
        raise table.fail(f"{repeated} stands twice", "files")
    variant = PatchVariant(
        file=_take_file_name(table),
        versions=_take_versions(table),
        cut_against=_take_version(table),
        digest=_take_digest(table, "sha256"),
        former=tuple(_check_digest(table, digest, "former") for digest in table.take_list("former", str)),
        manifest=Manifest(files=tuple(manifest for manifest, _ in files)),
        bases=MappingProxyType({manifest.path: base for manifest, base in files if base is not None}),
    )
    table.close()
    if not files:
        raise table.fail("a variant says what its text holds", "files", expected="at least one [[variant.files]]")
    return variant


def _parse_file(table: Table) -> tuple[FileManifest, Digest | None]:
    manifest = FileManifest(
        path=table.take("path", str),
        hunks=table.take("hunks", int),
        added=table.take("added", int),
        removed=table.take("removed", int),
        scopes=table.take_list("scopes", str),
    )
    if manifest.scopes and len(manifest.scopes) != manifest.hunks:
        raise table.fail(
            "a scope is given for each hunk", "scopes", expected=str(manifest.hunks), found=str(len(manifest.scopes))
        )
    base = _take_digest(table, "before") if "before" in table else None
    table.close()
    return manifest, base


def _take_file_name(table: Table) -> str:
    name = table.take("file", str)
    if not name or name != Path(name).name:
        raise table.fail("a variant's text lies beside patch.toml", "file", found=name)
    return name


def _take_versions(table: Table) -> SpecifierSet:
    text = table.take("versions", str)
    try:
        return SpecifierSet(text)
    except InvalidSpecifier:
        raise table.fail(
            "not a version range", "versions", expected="a form such as >=0.27,<0.28", found=text
        ) from None


def _take_version(table: Table) -> Version:
    text = table.take("cut_against", str)
    try:
        return Version(text)
    except InvalidVersion:
        raise table.fail("not a version", "cut_against", found=text) from None


def _take_commit(table: Table, key: str) -> str:
    text = table.take(key, str)
    if not _COMMIT.fullmatch(text):
        raise table.fail("not a full commit", key, expected="40 lower-case hex digits", found=text)
    return text


def _take_digest(table: Table, key: str) -> Digest:
    return _check_digest(table, table.take(key, str), key)


def _check_digest(table: Table, text: str, key: str) -> Digest:
    if not _DIGEST.fullmatch(text):
        raise table.fail("not a SHA-256", key, expected="64 lower-case hex digits", found=text)
    return text


def _load_text(patch: StoredPatch, path: Path, digest: Digest) -> Patch:
    where = f"{patch.id}/{path.relative_to(patch.folder).as_posix()}"
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InvalidPatchError(f"the text of a patch cannot be read: {error.strerror}", where=where) from error
    if digest_of(text) != digest:
        raise InvalidPatchError(
            "the text is not the one that patch.toml describes",
            where=where,
            expected=f"sha256 {digest}",
            found=f"sha256 {digest_of(text)}",
            hints=(f"provision patch lint {path}", "give the new text its own digest and manifest in patch.toml"),
        )
    return parse_patch(text, id=patch.id, source=where, root=patch.root)


def _check_manifest(written: Manifest, found: Manifest, *, where: str) -> None:
    wanted, held = {file.path: file for file in written.files}, {file.path: file for file in found.files}
    for path in sorted(wanted.keys() | held.keys()):
        if _counts(wanted.get(path)) != _counts(held.get(path)):
            raise InvalidPatchError(
                f"the patch does not hold for {path} what patch.toml says",
                where=where,
                expected=_counts(wanted.get(path)),
                found=_counts(held.get(path)),
            )


def _counts(file: FileManifest | None) -> str:
    if file is None:
        return "nothing"
    return f"{count_text(file.hunks, 'hunk')}, {count_text(file.added, 'line')} added, {file.removed} removed"
