"""One patch, to be looked at: what is known of it, what it holds, and its text."""

from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

from provisioner.environment.site import Site
from provisioner.errors import NoSuchBuildError, UsageError
from provisioner.nearest import near_names
from provisioner.patching.diff import manifest_of, print_patch
from provisioner.patching.model import Manifest
from provisioner.pipeline.evaluate import applied_series
from provisioner.resources import patches_folder
from provisioner.series.files import Reading, read_patch_file
from provisioner.series.store import PATCH_FILE, PatchVariant, StoredPatch, open_stored_patch, read_stored_patch


@dataclass(frozen=True, kw_only=True)
class ShownPatch:
    """A patch with the text that is shown; ``stored`` and ``variant`` are None for a loose file."""

    id: str
    source: str
    manifest: Manifest
    text: bytes = field(repr=False)
    stored: StoredPatch | None = None
    variant: PatchVariant | None = None


def show_patch(name: str, version: str | None, reading: Reading) -> ShownPatch:
    """The patch of the store with this id (for ``version``, else its last text), or the one in a file.

    Raises UsageError for a name that is neither and for a text that is no version; NoSuchBuildError where the patch has
    no text for the version; InvalidPatchError.
    """
    path = Path(name)
    if path.is_file():
        return _show_file(path, reading)
    is_stored_folder = (path / PATCH_FILE).is_file()
    stored = read_stored_patch(path) if is_stored_folder else open_stored_patch(patches_folder(), name)
    variant = stored.variants[-1] if version is None else _variant_for(stored, version)
    return ShownPatch(
        id=stored.id,
        source=f"{stored.id}/{variant.file}",
        manifest=variant.manifest,
        text=stored.file_of(variant).read_bytes(),
        stored=stored,
        variant=variant,
    )


def show_applied(site: Site, patch_id: str) -> ShownPatch:
    """The patch with this id as it stands in an environment.

    Raises UsageError where it does not.
    """
    applied = {item.id: item for item in applied_series(site).patches}
    named = applied.get(patch_id)
    if named is None:
        raise UsageError(
            f"{patch_id!r} is not applied here",
            found=f"applied here: {', '.join(applied) or 'no patch at all'}",
            hints=near_names(patch_id, applied),
        )
    patch = named.patch.patch
    scopes = {path: tuple(scope or "" for scope in cut.scopes) for path, cut in named.patch.cuts.items()}
    return ShownPatch(id=patch.id, source=patch.source, manifest=manifest_of(patch, scopes), text=named.kept)


def _show_file(path: Path, reading: Reading) -> ShownPatch:
    patch = read_patch_file(path, reading)
    return ShownPatch(id=patch.id, source=str(path), manifest=manifest_of(patch), text=print_patch(patch))


def _variant_for(stored: StoredPatch, text: str) -> PatchVariant:
    try:
        version = Version(text)
    except InvalidVersion:
        raise UsageError(f"{text!r} is not a version") from None
    variant = stored.variant_for(version)
    if variant is None:
        ranges = "; ".join(str(variant.versions) for variant in stored.variants)
        raise NoSuchBuildError(f"{stored.id} has no text for {version}", where=stored.id, expected=ranges)
    return variant
