"""``provision patch refresh``."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from provisioner.cli.shared import render
from provisioner.cli.shared.context import read_context
from provisioner.cli.shared.options import AsJson, IndexUrl
from provisioner.counts import count_text
from provisioner.drift.builds import find_one_build
from provisioner.errors import ConflictError
from provisioner.index.source import open_wheel
from provisioner.patching.diff import print_patch
from provisioner.resources import patches_folder
from provisioner.series import refresh as refreshing
from provisioner.series.recipe import nearest_variant
from provisioner.series.store import load_series_patch, open_stored_patch

if TYPE_CHECKING:
    from provisioner.porting.refresh import Refresh
    from provisioner.series.refresh import CheckResult


WORK_FOLDER = "refresh-{id}-{version}"


def refresh(
    patch_id: Annotated[str, typer.Argument(metavar="ID", help="A patch of the store.")],
    onto: Annotated[str, typer.Option(help="The build to carry it to: pypi:VERSION, commit:SHA or a wheel file.")],
    write: Annotated[bool, typer.Option("--write", help="Put the new text into the store as a variant.")] = False,
    acknowledge: Annotated[bool, typer.Option("--acknowledge", help="Accept that hunks are lost or altered.")] = False,
    go_on: Annotated[bool, typer.Option("--continue", help="Finish from the work folder of a conflict.")] = False,
    no_check: Annotated[bool, typer.Option("--no-check", help="Leave the patch's behaviour check out.")] = False,
    index_url: IndexUrl = None,
    as_json: AsJson = False,
) -> int:
    """Carry a patch to another build by a three-way merge, exact afterwards, with its behaviour checked again.

    Example: [bold]provision patch refresh pr50021-gdn-spec-bounds --onto nightly[/bold]
    """
    settings = read_context(index_url).settings()
    stored = open_stored_patch(patches_folder(), patch_id)
    target = find_one_build(onto, settings)
    new = open_wheel(target, settings)
    if write:
        refreshing.refuse_needless(stored, target.version, new)
    variant = nearest_variant(stored, target.version)
    base = find_one_build(f"pypi:{variant.cut_against}", settings)
    item = load_series_patch(stored, variant)
    found = refreshing.refresh_onto(item, open_wheel(base, settings), new)
    folder = Path(WORK_FOLDER.format(id=patch_id, version=target.version))
    if found.conflicts and go_on:
        found = refreshing.continue_refresh(item, found, folder)
    if found.conflicts:
        refreshing.write_conflicts(found, folder)
        raise ConflictError(
            count_text(len(found.conflicts), "file needs a person", "files need a person"),
            where=str(folder),
            found="\n".join(f"{file.target}: {file.why}" for file in found.conflicts),
            hints=(
                f"edit the files under {folder}/merged, then run this:",
                f"provision patch refresh {patch_id} --onto {onto} --continue",
            ),
        )
    proven = refreshing.prove_refresh(found, found.patch) if found.patch is not None else None
    result = None if no_check or proven is None else refreshing.run_check(stored, found.files)
    _show(patch_id, str(target.version), found, result, as_json=as_json)
    if found.lost and not acknowledge:
        raise ConflictError(
            "the new text has lost something that the old one changes",
            found="\n".join(found.lost[:10]),
            hints=("look at it, then say --acknowledge",),
        )
    if result is not None and stored.check is not None and (result.failed or not result.cases):
        return 1
    if write and proven is not None:
        place = refreshing.write_variant(stored, proven, refreshing.bases_of(found), target.version, variant)
        render.print_note(f"wrote {place}")
        if variant.covers(target.version):
            render.print_note(
                f"it stands before {variant.file}, whose range {variant.versions} holds {target.version}, too, and "
                "whose text does not apply there: the first match wins"
            )
    return 0


def _show(patch_id: str, version: str, found: "Refresh", result: "CheckResult | None", *, as_json: bool) -> None:
    if as_json:
        render.print_json("patch-refresh", _describe(patch_id, version, found, result))
        return
    for file in found.files:
        moved = f" -> {file.target}" if file.target != file.path else ""
        render.print_note(f"{file.path}{moved}: {file.fate}")
    if result is not None:
        without = f"not run ({result.why}); it needs torch and triton, --no-check leaves it out"
        passed = f"{result.cases - len(result.failed)} of {count_text(result.cases, 'case')} pass"
        state = passed if result.cases else without
        render.print_note(f"behaviour check: {state}")
        for line in result.failed:
            render.print_note(f"  {line}")
    if found.patch is not None:
        render.print_text(print_patch(found.patch).decode("utf-8", "replace"))
    else:
        render.print_note(f"nothing is left to patch in {version}")


def _describe(patch_id: str, version: str, found: "Refresh", result: "CheckResult | None") -> dict[str, Any]:
    return {
        "id": patch_id,
        "onto": version,
        "files": [
            {"path": file.path, "target": file.target, "fate": str(file.fate), "why": file.why} for file in found.files
        ],
        "lost": list(found.lost),
        "check": asdict(result) if result is not None else None,
        "patch": print_patch(found.patch).decode("utf-8", "replace") if found.patch is not None else None,
    }
