"""Which build a running server really is, and whether it is the patched one."""

from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from provisioner.environment.facts import gather_facts
from provisioner.environment.site import Site, find_site
from provisioner.environment.state import objects_of, read_receipt
from provisioner.errors import ProvisionError
from provisioner.patching.model import Verdict
from provisioner.patching.series import judge_series, touched_paths
from provisioner.resources import patches_folder
from provisioner.series.recipe import nearest_variant
from provisioner.series.store import load_series_patch, open_stored_patch
from provisioner.serve.rules import GDN_PATCH


@dataclass(frozen=True, kw_only=True)
class Build:
    """Version and applied patches of an environment; ``patches`` is None where nothing can be said of them."""

    version: Version
    patches: frozenset[str] | None


def read_build(venv: Path) -> Build | None:
    """The build in ``venv``; None where there is none that can be read.

    The receipt says which patches are applied. Where there is none, the one patch whose lack crashes servers is judged
    by the files themselves.
    """
    try:
        site = find_site(venv)
        receipt = read_receipt(site.state_dir)
        if receipt is not None:
            return Build(version=site.version, patches=frozenset(patch.id for patch in receipt.patches))
        return Build(version=site.version, patches=_judge_by_content(site))
    except ProvisionError:
        return None


def _judge_by_content(site: Site) -> frozenset[str] | None:
    stored = open_stored_patch(patches_folder(), GDN_PATCH)
    item = load_series_patch(stored, nearest_variant(stored, site.version))
    facts = gather_facts(site, touched_paths((item,)), objects=objects_of(site.state_dir))
    (verdict,) = judge_series((item,), facts).patches
    if verdict.verdict is Verdict.APPLIED or verdict.verdict.merged:
        return frozenset({GDN_PATCH})
    return frozenset() if verdict.verdict.applies else None
