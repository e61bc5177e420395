"""Patches that stand in an environment beside the recipe's: which they are, and what is kept of them when they go."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from provisioner.documents.policy import PatchPolicy
from provisioner.documents.receipt import Receipt
from provisioner.environment.site import Site, find_site, venv_python
from provisioner.environment.state import read_receipt, state_of
from provisioner.patching.model import Verdict
from provisioner.series.policies import RecipeSeries
from provisioner.transaction.folders import make_state_folder, state_file, write_whole

if TYPE_CHECKING:
    from provisioner.series.sources import PatchSource

TAKEN_OUT = "taken-out"


def patches_beside(receipt: Receipt | None, series: RecipeSeries) -> tuple[str, ...]:
    """The ids of patches that the receipt lists as applied and the series does not have."""
    own = {item.patch.id for item in series.patches}
    entries = receipt.patches if receipt is not None else ()
    return tuple(entry.id for entry in entries if entry.verdict == Verdict.APPLIED and entry.id not in own)


def user_sources(site: Site, series: RecipeSeries) -> "tuple[PatchSource, ...]":
    """The patches that are applied in ``site`` and that the series does not have, in order, with their texts."""
    ids = patches_beside(read_receipt(site.state_dir), series)
    if not ids:
        return ()
    # Here, since only a run that meets such patches needs it.
    from provisioner.pipeline.evaluate import recorded_sources

    return tuple(source for source in recorded_sources(site) if source.id in ids)


def with_beside(series: RecipeSeries, venv: Path, distribution: str) -> RecipeSeries:
    """The series and, after it, the patches that stand in ``venv`` beside it; each must hold."""
    if not patches_beside(read_receipt(state_of(venv)), series) or not venv_python(venv).exists():
        return series
    sources = user_sources(find_site(venv, distribution), series)
    required = {source.id: PatchPolicy.REQUIRED for source in sources}
    return replace(
        series,
        patches=(*series.patches, *(source.series for source in sources)),
        policies={**series.policies, **required},
    )


def save_texts(site: Site, ids: Sequence[str], state_dir: Path) -> tuple[Path, ...]:
    """Write the patches of ``site`` with these ids under ``state_dir``, so that they can be applied again."""
    from provisioner.pipeline.evaluate import recorded_sources

    saved = []
    for source in recorded_sources(site):
        if source.id in ids:
            make_state_folder(state_dir)
            path = saved_text(state_dir, source.id)
            write_whole(path, source.kept)
            saved.append(path)
    return tuple(saved)


def saved_text(state_dir: Path, patch_id: str) -> Path:
    """Where the text of a patch that was taken out lies."""
    return state_file(state_dir, TAKEN_OUT) / f"{patch_id.replace('/', '-')}.patch"
