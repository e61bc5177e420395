"""A recipe's patches as a series, judged by its policies."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from provisioner.counts import count_text
from provisioner.documents.policy import LeftOut, Omission
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


def leave_out(series: RecipeSeries, ids: Collection[str]) -> RecipeSeries:
    """The series without the patches called ``ids``, which it remembers.

    Raises UsageError for an id that it does not have.
    """
    known = [item.patch.id for item in series.patches]
    for wrong in sorted(set(ids) - set(known)):
        raise UsageError(f"the series has no patch {wrong!r}", expected=", ".join(known), where="--without-patch")
    return replace(
        series,
        patches=tuple(item for item in series.patches if item.patch.id not in ids),
        left_out=(*series.left_out, *(LeftOut(id=name, omission=Omission.ASKED) for name in known if name in ids)),
    )


def leave_out_again(series: RecipeSeries, left_out: Collection[LeftOut]) -> RecipeSeries:
    """The series without the patches that a receipt says somebody asked to leave out, as far as it has them."""
    asked = {item.id for item in left_out if item.omission is Omission.ASKED}
    return leave_out(series, asked & {item.patch.id for item in series.patches})


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
    displacing = dict.fromkeys(patch.displaced_by for patch in blocking if patch.displaced_by is not None)
    if any(patch.verdict is Verdict.FOREIGN for patch in blocking):
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
