"""A recipe's patches as a series, judged by its policies."""

from collections.abc import Mapping
from dataclasses import replace

from provisioner.counts import count_text
from provisioner.documents.recipe import PatchPolicy
from provisioner.errors import ConflictError, InvalidPatchError
from provisioner.patching.model import FileFacts, PatchVerdict, SeriesPatch, SeriesVerdict, Verdict
from provisioner.patching.series import judge_series
from provisioner.records import dataclass
from provisioner.wheels.record import Record


@dataclass(frozen=True, kw_only=True)
class RecipeSeries:
    """The patches that a recipe applies, in order, with their policies; ``unwanted`` are judged and never applied."""

    patches: tuple[SeriesPatch, ...]
    policies: Mapping[str, PatchPolicy]
    unwanted: tuple[SeriesPatch, ...] = ()


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
    foreign = any(patch.verdict is Verdict.FOREIGN for patch in blocking)
    hint = "run again with --reapply-patches to restore the files as shipped first" if foreign else "provision patches"
    raise error(
        f"{len(blocking)} of {count_text(count, 'patch', 'patches')} cannot be applied; nothing was written",
        where=where,
        found="\n".join(lines),
        hints=(hint,),
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
