"""What differs in an environment from the files as shipped."""

import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from provisioner.environment.facts import gather_facts
from provisioner.environment.integrity import check_files
from provisioner.environment.site import Site
from provisioner.environment.state import objects_of
from provisioner.errors import CannotObtainError
from provisioner.patching.compare import change_between
from provisioner.patching.model import (
    FileChange,
    FileFacts,
    Patch,
)
from provisioner.pipeline.evaluate import InstalledTree, is_text, is_unknown, lacks_pristine

LARGE_BYTES = 4 << 20
"""Shipped files above this are libraries; sources of vLLM end at 0.4 MB."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What differs from the files as shipped. ``patch`` applies to those; ``unspoken`` are paths that no patch can say,
    with the reason."""

    patch: Patch
    unspoken: Mapping[str, str]


def compare(tree: InstalledTree) -> Difference:
    """What differs from the files as shipped, in all files of the distribution and beside them.

    Raises CannotObtainError where bytes as shipped are needed and cannot be had.
    """
    site = tree.site
    unspoken = {}
    wanted = sorted(_added_files(site))
    for finding in check_files(site):
        if (site.record.entries[finding.path].size or 0) > LARGE_BYTES:
            unspoken[finding.path] = "gone" if finding.found is None else "too large to be text"
        else:
            wanted.append(finding.path)
    facts = gather_facts(site, wanted, objects=objects_of(site.state_dir))
    if lacks_pristine(facts):
        facts = _with_wheel(tree, facts)
    changes = []
    for path in sorted(facts):
        change = _change_of(facts[path], unspoken)
        if change is not None:
            changes.append(change)
    patch = Patch(id=site.distribution, source=str(site.site_packages), digest="", changes=tuple(changes))
    return Difference(patch=patch, unspoken=unspoken)


def _with_wheel(tree: InstalledTree, facts: Mapping[str, FileFacts]) -> dict[str, FileFacts]:
    if tree.open_wheel is None:
        raise CannotObtainError(
            "the bytes as shipped are not at hand",
            where=next(path for path, fact in facts.items() if is_unknown(fact)),
            hints=(f"name the wheel: --wheel pypi:{tree.version.public}, or the path of a .whl file",),
        )
    with closing(tree.open_wheel()) as wheel:
        return gather_facts(tree.site, facts, objects=objects_of(tree.site.state_dir), wheel=wheel)


def _added_files(site: Site) -> Iterator[str]:
    """Files in the distribution's own folders that RECORD does not list, without bytecode and hidden files."""
    roots = {entry.path.partition("/")[0] for entry in site.record if "/" in entry.path and entry.digest is not None}
    for root in sorted(roots):
        if root.startswith(".") or root.endswith(".dist-info"):
            continue
        for folder, folders, names in os.walk(site.site_packages / root):
            folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
            for name in names:
                path = (Path(folder) / name).relative_to(site.site_packages).as_posix()
                if path not in site.record and not name.startswith(".") and not name.endswith(".pyc"):
                    yield path


def _change_of(fact: FileFacts, unspoken: dict[str, str]) -> FileChange | None:
    contents = [content for content in (fact.pristine, fact.content) if content is not None]
    if not all(map(is_text, contents)):
        unspoken[fact.path] = "binary"
        return None
    return change_between(fact.path, fact.pristine, fact.content)
