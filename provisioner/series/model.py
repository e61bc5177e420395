"""A series: the patches that are brought to a build in one go, whoever names them, judged by their policies."""

from collections.abc import Iterable, Mapping
from dataclasses import field, replace

from provisioner.counts import count_text
from provisioner.documents.policy import LeftOut, PatchPolicy
from provisioner.errors import ConflictError, InvalidPatchError, UsageError
from provisioner.nearest import near_names
from provisioner.patching.diff import print_patch
from provisioner.patching.model import FileFacts, PatchVerdict, SeriesPatch, SeriesVerdict, Verdict
from provisioner.patching.series import judge_series
from provisioner.records import dataclass
from provisioner.wheels.record import Record

FORK = "fork"
"""What the ids of a fork's patches begin with."""


@dataclass(frozen=True, kw_only=True)
class NamedPatch:
    """A patch and what is asked of it. ``text`` is its text where that needs no root or strip level to be read.

    ``upstream`` is the address of the same change at the distribution's own makers, where it is known.
    """

    patch: SeriesPatch
    policy: PatchPolicy = PatchPolicy.REQUIRED
    text: bytes | None = field(default=None, repr=False)
    upstream: str | None = None

    @property
    def id(self) -> str:
        """The patch's name in its series."""
        return self.patch.patch.id

    @property
    def kept(self) -> bytes:
        """What is kept with an environment in which the patch is applied."""
        return print_patch(self.patch.patch) if self.text is None else self.text


@dataclass(frozen=True, kw_only=True)
class Series:
    """Patches in the order in which they are applied; ``unwanted`` are judged, each alone, and never applied.

    ``left_out`` are patches that were named and are not among them, with the reason.
    """

    patches: tuple[NamedPatch, ...] = ()
    unwanted: tuple[NamedPatch, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    @property
    def ids(self) -> tuple[str, ...]:
        """The names of the patches, in order."""
        return tuple(item.id for item in self.patches)

    @property
    def texts(self) -> tuple[SeriesPatch, ...]:
        """The patches as the engine judges them."""
        return tuple(item.patch for item in self.patches)

    def without(self, left_out: Iterable[LeftOut]) -> "Series":
        """The series without these patches, as far as it has them; it remembers which it left out."""
        known = set(self.ids)
        going = {item.id: item for item in left_out if item.id in known}
        return replace(
            self,
            patches=tuple(item for item in self.patches if item.id not in going),
            left_out=(*self.left_out, *going.values()),
        )


def require_left_out(series: Series, ids: Iterable[str]) -> None:
    """Raise UsageError for an id that is none of the patches which the series left out."""
    left_out = [item.id for item in series.left_out]
    known = (*series.ids, *sorted(left_out))
    for wrong in sorted(set(ids) - set(left_out)):
        raise UsageError(
            f"the series has no patch {wrong!r}",
            expected=", ".join(known),
            where="--without-patch",
            hints=near_names(wrong, known),
        )


def judge_by_policy(series: Series, facts: Mapping[str, FileFacts], record: Record | None) -> SeriesVerdict:
    """Judge the series; an optional patch that does not hold is left out and the rest judged again."""
    kept = series.patches
    while True:
        verdict = judge_series([item.patch for item in kept], facts, record)
        blocking = {patch.id for patch in verdict.blocking}
        failing = next((item for item in kept if item.id in blocking and item.policy is PatchPolicy.OPTIONAL), None)
        if failing is None:
            return verdict
        kept = tuple(item for item in kept if item is not failing)


def refuse_blocked(verdict: SeriesVerdict, series: Series, *, where: str) -> None:
    """Raise for the first patch that stands in the way, naming all of them.

    Raises InvalidPatchError or ConflictError by design.md's table: invalid 3, every other verdict 5.
    """
    blocking = verdict.blocking
    if not blocking:
        return
    count = len(series.patches)
    lines = [line for patch in blocking for line in explain_patch(patch)]
    error = InvalidPatchError if any(patch.verdict is Verdict.INVALID for patch in blocking) else ConflictError
    displacing = dict.fromkeys(name for patch in blocking for name in patch.displaced_by)
    if any(patch.verdict.resettable for patch in blocking):
        hint = "run again with --reapply-patches to restore the files as shipped first"
    elif displacing:
        words = " ".join(f"--without-patch {name}" for name in displacing)
        hint = f"run again with {words}, which leaves {'it' if len(displacing) == 1 else 'them'} out"
    else:
        hint = "provision patches"
    raise error(
        f"{len(blocking)} of {count_text(count, 'patch', 'patches')} cannot be applied; nothing was written",
        where=where,
        found="\n".join(lines),
        hints=(hint,),
    )


def name_not_needed(verdict: SeriesVerdict) -> tuple[str, ...]:
    """A line for each patch that is left out because the build has it."""
    return tuple(f"{patch.id}: not needed here, the build has it already" for patch in verdict.not_needed)


def refuse_merged(verdict: SeriesVerdict, *, where: str) -> None:
    """Raise ConflictError for patches that the build has already."""
    if verdict.not_needed:
        raise ConflictError(
            "the build has some of the patches already; nothing was written",
            where=where,
            found="\n".join(f"{patch.id}: {patch.verdict}" for patch in verdict.not_needed),
            hints=("leave --strict out: they are then not applied, and the receipt says so",),
        )


def explain_patch(patch: PatchVerdict) -> list[str]:
    """A patch's verdict and, for each file that is not well, the file's."""
    lines = [f"{patch.id}: {patch.verdict}" + (f" ({patch.why})" if patch.why else "")]
    lines += [
        f"  {file.path}: {file.verdict}" + (f" ({file.why})" if file.why else "")
        for file in patch.files
        if not file.verdict.holds
    ]
    return lines


def pristine_only(facts: Mapping[str, FileFacts]) -> dict[str, FileFacts]:
    """The same files as if nothing had been changed."""
    return {path: replace(fact, content=fact.pristine) for path, fact in facts.items()}
