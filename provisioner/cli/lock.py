"""``provision lock``."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from provisioner.cli.context import Context
    from provisioner.environment.lock import Lock


def lock(
    recipe: Annotated[str, typer.Argument(help="A built-in recipe's name, or the path of a recipe file.")],
    version: Annotated[str | None, typer.Option(help="Lock this release instead of the recipe's build.")] = None,
    exclude_newer: Annotated[str | None, typer.Option(help="Take nothing uploaded after this UTC date.")] = None,
    output: Annotated[Path | None, typer.Option(help="The folder of the lock (default: the user's own).")] = None,
    write_here: Annotated[bool, typer.Option("--write-here", help="Write into ./lockfiles.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change; write nothing.")] = False,
    export_pylock: Annotated[Path | None, typer.Option(help="Write a PEP 751 file instead (it names hosts).")] = None,
    index_url: Annotated[str | None, typer.Option(help="A mirror of the vLLM wheel index.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> int:
    """Resolve a recipe's build and write its lock: hashed requirements and what the build is.

    Example: [bold]provision lock hynix-stable --dry-run[/bold]
    """
    from provisioner.cli.catalogue import open_recipe
    from provisioner.cli.context import read_context
    from provisioner.cli.progress import open_reporter
    from provisioner.provisioning.locking import LockRequest, build_of, make_lock
    from provisioner.provisioning.locks import find_lock, read_lock
    from provisioner.provisioning.store import touched_by

    context, wanted = read_context(index_url), open_recipe(recipe)
    request = LockRequest(
        recipe=wanted,
        build=build_of(wanted, version=version),
        exclude_newer=_parse_date(exclude_newer),
        touched=lambda found: touched_by(wanted, found),
    )
    with open_reporter() as reporter:
        made = make_lock(request, context.settings(), context.uv(), reporter)
    files = find_lock(context.home, wanted.name)
    former = read_lock(files) if files else None
    if export_pylock is not None:
        return _export(made, export_pylock, context)
    _show(former, made, as_json=as_json)
    if dry_run:
        return 0
    folder = output or (Path("lockfiles") if write_here else context.home.locks)
    return _write(folder, made)


def _show(former: "Lock | None", made: "Lock", *, as_json: bool) -> None:
    from provisioner.cli import render
    from provisioner.provisioning.locking import changed_pins

    changes = changed_pins(former, made)
    if as_json:
        rows = [{"name": name, "old": old, "new": new} for name, old, new in changes]
        build = {"filename": made.build.filename, "sha256": made.build.sha256, "commit": made.build.commit}
        render.print_json("lock", {"recipe": made.recipe, "build": build, "digest": made.digest, "changes": rows})
    elif changes:
        render.print_table(("PACKAGE", "OLD", "NEW"), ((name, old or "-", new or "-") for name, old, new in changes))
    else:
        render.print_text("no package changes")


def _write(folder: Path, made: "Lock") -> int:
    from provisioner.cli import render
    from provisioner.provisioning.locks import lock_files, write_lock

    files = lock_files(folder, made.recipe)
    written = write_lock(files, made)
    render.print_note(f"{'wrote' if written else 'unchanged:'} {files.facts} and {files.requirements.name}")
    return 0


def _export(made: "Lock", output: Path, context: "Context") -> int:
    from provisioner.cli import render
    from provisioner.provisioning.locking import export_lock

    export_lock(made, output, context.uv())
    render.print_note(f"wrote {output}")
    return 0


def _parse_date(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter("not a date such as 2026-09-10", param_hint="--exclude-newer") from None
    return moment.replace(tzinfo=moment.tzinfo or UTC)
