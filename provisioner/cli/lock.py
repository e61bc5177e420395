"""``provision lock``."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from provisioner.cli.shared import render
from provisioner.cli.shared.catalogue import open_recipe
from provisioner.cli.shared.context import Context, read_context
from provisioner.cli.shared.options import AsJson, IndexUrl, RecipeName
from provisioner.cli.shared.progress import open_reporter
from provisioner.documents.lock import Lock
from provisioner.documents.recipe import Build, CommitBuild, Recipe
from provisioner.environment.facts import shipped_facts
from provisioner.errors import InvalidLockError, UsageError
from provisioner.index.source import NightlySpec, ReleaseSpec, parse_spec
from provisioner.locks.find import find_lock, lock_files, read_lock, write_lock
from provisioner.locks.make import LockRequest, build_of, changed_pins, export_lock, find_build, make_lock
from provisioner.patching.model import PatchVerdict
from provisioner.patching.series import judge_series, touched_paths
from provisioner.series.recipe import open_series, touched_by


def lock(
    recipe: RecipeName,
    version: Annotated[str | None, typer.Option(help="Lock this release instead of the recipe's build.")] = None,
    commit: Annotated[str | None, typer.Option(help="Lock the build of this commit of vLLM's main.")] = None,
    latest: Annotated[bool, typer.Option("--latest", help="Lock the newest build of the recipe's kind.")] = False,
    exclude_newer: Annotated[str | None, typer.Option(help="Take nothing uploaded after this UTC date.")] = None,
    output: Annotated[Path | None, typer.Option(help="The folder of the lock (default: the user's own).")] = None,
    write_here: Annotated[bool, typer.Option("--write-here", help="Write into ./lockfiles.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change; write nothing.")] = False,
    export_pylock: Annotated[Path | None, typer.Option(help="Write a PEP 751 file instead (it names hosts).")] = None,
    index_url: IndexUrl = None,
    as_json: AsJson = False,
) -> int:
    """Resolve a recipe's build and write its lock: hashed requirements and what the build is.

    Example: [bold]provision lock hynix-stable --dry-run[/bold]
    """
    if sum((output is not None, write_here, export_pylock is not None)) > 1:
        raise UsageError("--output, --write-here and --export-pylock each say where to; name one")
    if export_pylock is not None and dry_run:
        raise UsageError("--export-pylock writes a file and --dry-run writes nothing; name one")
    context, wanted = read_context(index_url), open_recipe(recipe)
    request = LockRequest(
        recipe=wanted,
        build=_build(wanted, context, version=version, commit=commit, latest=latest),
        exclude_newer=_parse_date(exclude_newer),
        touched=lambda found: touched_by(wanted, found),
    )
    with open_reporter() as reporter:
        made = make_lock(request, context.settings(), context.uv(), reporter)
    if export_pylock is not None:
        return _export(made, export_pylock, context)
    _show(_read_former(context, wanted), made, _judge(wanted, made, context), as_json=as_json)
    if dry_run:
        return 0
    folder = output or (Path("lockfiles") if write_here else context.home.locks)
    return _write(folder, made)


def _build(wanted: Recipe, context: Context, *, version: str | None, commit: str | None, latest: bool) -> Build:
    if sum((version is not None, commit is not None, latest)) > 1:
        raise UsageError("--version, --commit and --latest each name a build: give one of them")
    if commit is not None:
        return find_build(wanted, parse_spec(f"commit:{commit}"), context.settings())
    if latest:
        newest = NightlySpec() if isinstance(wanted.build, CommitBuild) else ReleaseSpec()
        return find_build(wanted, newest, context.settings())
    return build_of(wanted, version=version)


def _read_former(context: Context, wanted: Recipe) -> Lock | None:
    """The lock until now. One that cannot be read is only told of: this command is the way to mend it."""
    files = find_lock(context.home, wanted.name)
    try:
        return read_lock(files) if files else None
    except InvalidLockError as error:
        render.print_warning(f"{error}; it counts as no lock")
        return None


def _judge(wanted: Recipe, made: Lock, context: Context) -> tuple[PatchVerdict, ...]:
    """What each patch of the recipe says to the locked wheel, each of the unwanted ones by itself."""
    series = open_series(wanted, made.build.version)
    unwanted = [item.patch for item in series.unwanted]
    wheel = context.locked_wheel(made)()
    try:
        facts = shipped_facts(wheel.record(), touched_paths((*series.texts, *unwanted)), wheel)
    finally:
        wheel.close()
    alone = [verdict for patch in unwanted for verdict in judge_series((patch,), facts).patches]
    return (*judge_series(series.texts, facts).patches, *alone)


def _show(former: Lock | None, made: Lock, verdicts: tuple[PatchVerdict, ...], *, as_json: bool) -> None:
    changes = changed_pins(former, made)
    if as_json:
        rows = [{"name": name, "old": old, "new": new} for name, old, new in changes]
        build = {"filename": made.build.filename, "sha256": made.build.sha256, "commit": made.build.commit}
        patches = [{"id": item.id, "verdict": str(item.verdict), "why": item.why} for item in verdicts]
        payload = {"recipe": made.recipe, "build": build, "digest": made.digest}
        render.print_json("lock", {**payload, "changes": rows, "patches": patches})
        return
    if changes:
        render.print_table(("PACKAGE", "OLD", "NEW"), ((name, old or "-", new or "-") for name, old, new in changes))
    else:
        render.print_text("no package changes")
    if verdicts:
        render.print_text("")
        render.print_table(("PATCH", "VERDICT", "WHY"), ((item.id, str(item.verdict), item.why) for item in verdicts))


def _write(folder: Path, made: Lock) -> int:
    files = lock_files(folder, made.recipe)
    written = write_lock(files, made)
    render.print_note(f"{'wrote' if written else 'unchanged:'} {files.facts} and {files.requirements.name}")
    return 0


def _export(made: Lock, output: Path, context: Context) -> int:
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
