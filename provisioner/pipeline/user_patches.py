"""Patches that stand in an environment beside the recipe's: which they are, and what is kept of them when they go."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from provisioner.documents.receipt import Receipt
from provisioner.environment.site import Site, find_site, venv_python
from provisioner.environment.state import read_receipt, state_of
from provisioner.patching.model import Verdict
from provisioner.series.model import Series
from provisioner.transaction.folders import make_state_folder, state_file, write_whole

TAKEN_OUT = "taken-out"


def patches_beside(receipt: Receipt | None, series: Series) -> tuple[str, ...]:
    """The ids of patches that the receipt lists as applied and the series does not have."""
    entries = receipt.patches if receipt is not None else ()
    return tuple(entry.id for entry in entries if entry.verdict == Verdict.APPLIED and entry.id not in series.ids)


def user_series(site: Site, series: Series) -> Series:
    """The patches that are applied in ``site`` and that the series does not have, in order, with their texts."""
    ids = patches_beside(read_receipt(site.state_dir), series)
    if not ids:
        return Series()
    # Here, since only a run that meets such patches needs it.
    from provisioner.pipeline.evaluate import recorded_series

    return Series(patches=tuple(item for item in recorded_series(site).patches if item.id in ids))


def with_beside(series: Series, venv: Path, distribution: str) -> Series:
    """The series and, after it, the patches that stand in ``venv`` beside it; each must hold."""
    if not patches_beside(read_receipt(state_of(venv)), series) or not venv_python(venv).exists():
        return series
    beside = user_series(find_site(venv, distribution), series)
    return replace(series, patches=(*series.patches, *beside.patches))


def save_texts(site: Site, ids: Sequence[str], state_dir: Path) -> tuple[Path, ...]:
    """Write the patches of ``site`` with these ids under ``state_dir``, so that they can be applied again."""
    from provisioner.pipeline.evaluate import recorded_series

    saved = []
    for item in recorded_series(site).patches:
        if item.id in ids:
            make_state_folder(state_dir)
            path = saved_text(state_dir, item.id)
            write_whole(path, item.kept)
            saved.append(path)
    return tuple(saved)


def saved_text(state_dir: Path, patch_id: str) -> Path:
    """Where the text of a patch that was taken out lies."""
    return state_file(state_dir, TAKEN_OUT) / f"{patch_id.replace('/', '-')}.patch"
