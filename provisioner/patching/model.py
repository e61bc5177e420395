"""The nouns of the patch engine: what a patch says, what a file is, what was found. Pure.

Every path is posix and relative to site-packages; every text is bytes; a line never holds its line end.
"""

from collections.abc import Iterable, Mapping
from dataclasses import field
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from provisioner.digests import Digest
from provisioner.records import dataclass

LineKind = Literal[" ", "-", "+"]


class Verdict(StrEnum):
    """The answer for a hunk, a file or a patch. The order of the members is the order from worst to best."""

    INVALID = "invalid"
    FOREIGN = "foreign"
    TARGET_MISSING = "target-missing"
    CONFLICT = "conflict"
    WRONG_SCOPE = "wrong-scope"
    AMBIGUOUS = "ambiguous"
    PARTIAL = "partial"
    STALE_VERSION = "stale-version"
    PROBABLY_MERGED = "probably-merged"
    APPLIES_AT_OFFSET = "applies-at-offset"
    APPLIES = "applies"
    APPLIED = "applied"
    MERGED_UPSTREAM = "merged-upstream"
    ALREADY_IN_SERIES = "already-in-series"
    NOT_SHIPPED = "not-shipped"

    @property
    def applies(self) -> bool:
        """The files are to be changed."""
        return self in (Verdict.APPLIES, Verdict.APPLIES_AT_OFFSET)

    @property
    def remains(self) -> bool:
        """The change is in the files once the series is carried out, and it is the patch that put it there."""
        return self is Verdict.APPLIED or self.applies

    @property
    def merged(self) -> bool:
        """The build has the change already."""
        return self in (Verdict.PROBABLY_MERGED, Verdict.MERGED_UPSTREAM)

    @property
    def settled(self) -> bool:
        """Nothing is to be done: the change is there, whoever put it there."""
        return self in (Verdict.APPLIED, Verdict.ALREADY_IN_SERIES) or self.merged

    @property
    def outcome(self) -> str:
        """What a receipt says of the patch once its series is carried out."""
        if self.remains:
            return str(Verdict.APPLIED)
        return "not-needed" if self.merged else str(self)

    @property
    def fits(self) -> bool:
        """The patch has its place in the build, which lacks the change without it."""
        return self.remains or self is Verdict.ALREADY_IN_SERIES

    @property
    def holds(self) -> bool:
        """The series can be carried out as it is (exit 0)."""
        return self.applies or self.settled

    @property
    def resettable(self) -> bool:
        """The answer would be another if the files were as shipped."""
        return self in (Verdict.FOREIGN, Verdict.PARTIAL, Verdict.STALE_VERSION)


@dataclass(frozen=True, kw_only=True, slots=True)
class HunkLine:
    """One line of a hunk. ``ends`` is False where the patch says that no newline follows at the end of the file."""

    kind: LineKind
    text: bytes
    ends: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Hunk:
    """One hunk. ``index`` counts from 1 over all hunks that the patch has for the path; starts are 1-based line numbers
    as written (with a count of 0, the line after which the hunk stands)."""

    index: int
    old_start: int
    old_count: int
    new_start: int
    new_count: int
    heading: bytes = b""
    lines: tuple[HunkLine, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Modify:
    """A file that stays where it is. Modes are permission bits, both or none; without hunks only they change."""

    path: str
    hunks: tuple[Hunk, ...]
    old_mode: int | None = None
    new_mode: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Create:
    """A new file: one hunk of added lines, or none for an empty file.

    ``fills_empty`` is True where the patch names the old file instead of saying that there is none: then an existing
    empty file is as good a start as no file.
    """

    path: str
    hunks: tuple[Hunk, ...]
    mode: int | None = None
    fills_empty: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Delete:
    """A file that goes: one hunk with all of its lines, or none for an empty file."""

    path: str
    hunks: tuple[Hunk, ...]
    mode: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rename:
    """A file that moves from ``source`` to ``path``, changed by the hunks where there are any."""

    source: str
    path: str
    hunks: tuple[Hunk, ...]
    old_mode: int | None = None
    new_mode: int | None = None
    similarity: int | None = None


FileChange = Modify | Create | Delete | Rename


def paths_of(change: FileChange) -> tuple[str, ...]:
    """The paths that a change reads or writes, its target first."""
    return (change.path, change.source) if isinstance(change, Rename) else (change.path,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One patch. ``source`` says where the text came from, ``digest`` is the SHA-256 of the text as read.

    A path may stand in several changes only where the text holds several commits; the later one follows the earlier.
    """

    id: str
    source: str
    digest: Digest
    changes: tuple[FileChange, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileManifest:
    """What a patch holds for one path; ``scopes`` has one qualified name a hunk where they are known, else is empty."""

    path: str
    hunks: int
    added: int
    removed: int
    scopes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a patch holds, to notice when a later text of it holds less."""

    files: tuple[FileManifest, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """What is known of the file that a path's hunks were cut against.

    ``digest`` is that file's; where the file at hand has it, every hunk stands at its own line. ``scopes`` has one
    qualified name a hunk ("" is module level, None is not known), in the order of the hunks' indices.
    """

    digest: Digest | None = None
    scopes: tuple[str | None, ...] = ()


def _no_cuts() -> Mapping[str, Cut]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesPatch:
    """A patch at its place in a series, with what is known about it.

    ``former`` are older texts of the same patch. ``merged_as`` is upstream's merge commit of the same change, 40 digits
    (None: not merged, or not known), and ``in_history`` says whether it is an ancestor of the build that is judged
    (None: not known). ``new_roots`` are top-level names beside the
    distribution's own which the patch may create (an overlay's).
    """

    patch: Patch
    cuts: Mapping[str, Cut] = field(default_factory=_no_cuts)
    former: tuple[Patch, ...] = ()
    merged_as: str | None = None
    in_history: bool | None = None
    new_roots: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFacts:
    """What is known about one path.

    ``content`` is what stands there now (None: nothing), ``pristine`` the bytes as shipped where they are at hand,
    ``recorded`` RECORD's digest (None: not shipped), ``mode`` the permission bits now (None: not known).
    """

    path: str
    content: bytes | None
    pristine: bytes | None = None
    recorded: Digest | None = None
    mode: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HunkVerdict:
    """One hunk: the old line it names, the line where it was found, their difference, the scope that it must stand in
    (None: not known) and the one found there (None: nothing found, or not a Python file).

    ``displaced_by`` is the id of the earlier patch of the series that took the hunk's place.
    """

    index: int
    verdict: Verdict
    line: int
    found: int | None = None
    offset: int | None = None
    scope: str | None = None
    found_scope: str | None = None
    why: str = ""
    displaced_by: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FileVerdict:
    """One path of one patch. ``before`` and ``after`` are digests around this patch in the series' own states (None:
    no file there, or not known). ``moved_to`` is where a missing target went."""

    path: str
    verdict: Verdict
    before: Digest | None
    after: Digest | None
    hunks: tuple[HunkVerdict, ...] = ()
    why: str = ""
    moved_to: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchVerdict:
    """One patch in its series. ``same_as`` is the id of the earlier patch that makes the same change."""

    id: str
    source: str
    verdict: Verdict
    files: tuple[FileVerdict, ...]
    why: str = ""
    same_as: str | None = None

    @property
    def displaced_by(self) -> tuple[str, ...]:
        """The ids of the earlier patches of the series that change lines which this one looks for."""
        return displacing(hunk for file in self.files for hunk in file.hunks)


def displacing(hunks: Iterable[HunkVerdict]) -> tuple[str, ...]:
    """The ids of the earlier patches that took the places of these hunks, each once."""
    return tuple(dict.fromkeys(hunk.displaced_by for hunk in hunks if hunk.displaced_by is not None))


def _no_modes() -> Mapping[str, int]:
    return MappingProxyType({})


def _no_states() -> Mapping[str, tuple[bytes | None, ...]]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesVerdict:
    """A whole series. For every touched path where it is known, ``final`` has the wanted content (None: no file),
    ``pristine`` the content as shipped (given, or won back by reversal and proven by digest), and ``states`` every
    content from pristine to final. Modes are permission bits, for the paths whose bits the series changes."""

    patches: tuple[PatchVerdict, ...]
    final: Mapping[str, bytes | None]
    final_digests: Mapping[str, Digest | None]
    final_modes: Mapping[str, int]
    pristine: Mapping[str, bytes | None]
    pristine_modes: Mapping[str, int] = field(default_factory=_no_modes)
    states: Mapping[str, tuple[bytes | None, ...]] = field(default_factory=_no_states)

    @property
    def blocking(self) -> tuple[PatchVerdict, ...]:
        """The patches whose verdict stands in the way of carrying out the series, in order."""
        return tuple(patch for patch in self.patches if not patch.verdict.holds)

    @property
    def not_needed(self) -> tuple[PatchVerdict, ...]:
        """The patches that the build has already, in order."""
        return tuple(patch for patch in self.patches if patch.verdict.merged)
