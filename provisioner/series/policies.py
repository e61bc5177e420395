"""A recipe's patches as a series, judged by its policies."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from provisioner.counts import count_text
from provisioner.documents.policy import LeftOut
from provisioner.documents.recipe import PatchPolicy
from provisioner.errors import ConflictError, InvalidPatchError, UsageError
from provisioner.patching.model import FileFacts, PatchVerdict, SeriesPatch, SeriesVerdict, Verdict
from provisioner.patching.series import judge_series
from provisioner.records import dataclass
from provisioner.wheels.record import Record

FORK = "fork"
"""What the ids of a fork's patches begin with."""


@dataclass(frozen=True, kw_only=True)
class RecipeSeries:
    """The patches that a recipe applies, in order, with their policies; ``unwanted`` are judged and never applied.

    ``left_out`` are patches that the recipe or its fork names and that are not among them, with the reason.
    """

    patches: tuple[SeriesPatch, ...]
    policies: Mapping[str, PatchPolicy]
    unwanted: tuple[SeriesPatch, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def leave_out(series: RecipeSeries, left_out: Iterable[LeftOut]) -> RecipeSeries:
    """The series without these patches, as far as it has them; it remembers which it left out."""
    known = {item.patch.id for item in series.patches}
    going = {item.id: item for item in left_out if item.id in known}
    return replace(
        series,
        patches=tuple(item for item in series.patches if item.patch.id not in going),
        left_out=(*series.left_out, *going.values()),
    )


def require_left_out(series: RecipeSeries, ids: Iterable[str]) -> None:
    """Raise UsageError for an id that is none of the patches which the series left out."""
    left_out = {item.id for item in series.left_out}
    for wrong in sorted(set(ids) - left_out):
        known = ", ".join((*(item.patch.id for item in series.patches), *sorted(left_out)))
        raise UsageError(f"the series has no patch {wrong!r}", expected=known, where="--without-patch")


def judge_recipe(series: RecipeSeries, facts: Mapping[str, FileFacts], record: Record) -> SeriesVerdict:
    """Judge the series; an optional patch that does not hold is left out and the rest judged again."""
    patches = series.patches
    verdict = judge_series(patches, facts, record)
    while optional := [item for item in verdict.blocking if series.policies.get(item.id) is PatchPolicy.OPTIONAL]:
        patches = tuple(item for item in patches if item.patch.id != optional[0].id)
        verdict = judge_series(patches, facts, record)
    return verdict


def refuse_blocked(verdict: SeriesVerdict, series: RecipeSeries, *, where: str) -> None:
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
