"""``provision drift``."""

import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Annotated, Any

import typer
from packaging.version import Version

from provisioner.cli.shared import render
from provisioner.cli.shared.catalogue import all_recipes, open_recipe
from provisioner.cli.shared.context import read_context
from provisioner.cli.shared.options import CutAgainst, IndexUrl, Root, Strip
from provisioner.cli.shared.progress import open_reporter
from provisioner.counts import count_text
from provisioner.documents.recipe import Recipe
from provisioner.drift.builds import Builds, find_builds, find_one_build
from provisioner.drift.history import CloneHistory, Witness
from provisioner.drift.model import Bisection, DriftReport
from provisioner.drift.policy import exit_code
from provisioner.drift.reports.data import print_bisection_json
from provisioner.drift.reports.text import print_bisection
from provisioner.drift.scan import Subject, build_of, scan
from provisioner.drift.subjects import ForkBase, parse_frozen, recipe_subjects, stack_subject
from provisioner.errors import UsageError
from provisioner.files import resolve_output, write_output
from provisioner.index.settings import IndexSettings
from provisioner.index.source import CommitFileSpec, open_wheel, parse_spec, read_commit_list
from provisioner.series.checkout import read_checkout
from provisioner.wheels.names import Candidate

_QUESTIONS = (
    "--against",
    "--patches",
    "--root",
    "--strip",
    "--cut-against",
    "--last",
    "--bisect",
    "--variant",
    "--build-variant",
    "--index-url",
    "--history",
    "--fork-dir",
)
_PRINTERS = {
    "text": ("text", "print_text"),
    "json": ("data", "print_report_json"),
    "markdown": ("markdown", "print_markdown"),
    "github": ("github", "print_github"),
    "junit": ("junit", "print_junit"),
    "html": ("html", "print_html"),
}
FORMS = tuple(_PRINTERS)


def drift(
    recipes: Annotated[
        list[str] | None, typer.Argument(help="Recipes by name or path (default: all); with --merge, more reports.")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(help="nightly, commit:SHA, commits:FILE, pypi, pypi:VERSION, pypi:RANGE, a wheel or a folder."),
    ] = None,
    patches: Annotated[
        list[Path] | None,
        typer.Option(help="Patches of your own: a file, or a folder in its order.", metavar="DIR|FILE"),
    ] = None,
    root: Root = "",
    strip: Strip = None,
    cut_against: CutAgainst = None,
    last: Annotated[int | None, typer.Option(min=1, help="Only the newest N builds.")] = None,
    bisect: Annotated[
        tuple[str, str] | None,
        typer.Option(help="The first build with another answer between two.", metavar="GOOD BAD"),
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="Freeze one text of a patch on every build.", metavar="ID@VERSION")
    ] = None,
    build_variant: Annotated[str | None, typer.Option(help="The build's variant, such as cu129.")] = None,
    history: Annotated[
        Path | None,
        typer.Option(help="A clone of vLLM that knows which commits a build has in its history.", metavar="DIR"),
    ] = None,
    fork_dir: Annotated[
        Path | None,
        typer.Option(help="The checkout of the recipes' fork, whose patches are judged, too (default: the tool's)."),
    ] = None,
    merge: Annotated[
        list[Path] | None,
        typer.Option(help="Judge nothing: make one report of several in JSON.", metavar="FILE|DIR"),
    ] = None,
    form: Annotated[str, typer.Option("--format", help=f"{', '.join(FORMS)}.")] = "text",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the report to this file.")] = None,
    index_url: IndexUrl = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> int:
    """Judge patches on builds that nobody has installed yet; exit 1 where a required patch does not hold.

    Example: [bold]provision drift hynix-stable --against 'pypi:>=0.26' --last 5[/bold]
    """
    wanted = "json" if as_json else form
    if wanted not in FORMS:
        raise typer.BadParameter(f"one of {', '.join(FORMS)}", param_hint="--format")
    if output is not None:
        resolve_output(output)  # refused now, not after an hour of judging
    if merge:
        asked = (against, patches, root, strip, cut_against, last, bisect, variant, build_variant)
        _refuse_questions(dict(zip(_QUESTIONS, (*asked, index_url, history, fork_dir), strict=True)))
        return _finish(_merge([*merge, *map(Path, recipes or [])]), wanted, output)
    own = _own_patches(patches or [], root, strip, cut_against, index_url)
    task = _prepare(
        recipes or [], own, against or ["pypi"], last, variant or [], build_variant, index_url, history, fork_dir
    )
    with open_reporter() as reporter:
        reporter.stage(f"judge {count_text(len(task.builds.found), 'build')}")
        for line in (*task.builds.missing, *task.remarks):
            reporter.warn(line)
        if bisect is not None:
            return _finish_bisection(_bisect(task, *bisect, reporter), wanted, output)
        report = _scan(task, task.builds.found, reporter)
    return _finish(report, wanted, output)


@dataclass(frozen=True, kw_only=True)
class _Task:
    subjects: tuple[Subject, ...]
    builds: Builds
    settings: IndexSettings
    against: tuple[str, ...]
    witness: Witness | None
    remarks: tuple[str, ...]


def _refuse_questions(asked: dict[str, object]) -> None:
    """Of reports that are merged, all questions were asked before."""
    given = [option for option, value in asked.items() if value not in (None, "", [])]
    if given:
        raise UsageError(
            f"{', '.join(given)} cannot be given with --merge, which judges nothing",
            hints=("provision drift --merge FILE…",),
        )


def _merge(places: list[Path]) -> DriftReport:
    from provisioner.drift.merge import merge_reports
    from provisioner.drift.parts import read_parts

    return merge_reports(read_parts(places))


def _refuse_reading(root: str, strip: int | None, cut_against: str | None) -> None:
    if root or strip is not None or cut_against is not None:
        raise UsageError(
            "--root, --strip and --cut-against are about patches of your own",
            hints=("name them: --patches DIR|FILE",),
        )


def _own_patches(
    patches: list[Path], root: str, strip: int | None, cut_against: str | None, index_url: str | None
) -> list[Subject]:
    if not patches:
        _refuse_reading(root, strip, cut_against)
        return []
    base = None
    if cut_against is not None:
        settings = read_context(index_url).settings()
        base = open_wheel(find_one_build(f"pypi:{cut_against}", settings), settings)
    return [stack_subject(patches, root=root, strip=strip, base=base)]


def _prepare(
    names: list[str],
    own: list[Subject],
    against: list[str],
    last: int | None,
    frozen: list[str],
    build_variant: str | None,
    index_url: str | None,
    history: Path | None,
    fork_dir: Path | None,
) -> _Task:
    settings = read_context(index_url).settings()
    chosen = [open_recipe(name) for name in names] if names or own else all_recipes()
    texts = _parse_frozen(frozen)
    # The engine is loaded while the index answers.
    Thread(target=import_module, args=("provisioner.drift.subjects",), daemon=True).start()
    builds = find_builds(against, settings, last=last, variant=build_variant)
    from provisioner.drift.history import open_clone

    clone = open_clone(history) if history is not None else None
    forks = _open_forks(chosen, fork_dir, index_url)
    return _Task(
        subjects=(*recipe_subjects(chosen, texts, forks), *own),
        builds=builds,
        settings=settings,
        against=tuple(against),
        witness=_witness(against, clone, settings),
        remarks=(
            *(
                remark
                for recipe in chosen
                if recipe.name in forks
                for remark in _say_unpinned(recipe, forks[recipe.name])
            ),
            *(_doubt(clone, builds) if clone is not None else ()),
        ),
    )


def _say_unpinned(recipe: Recipe, fork: ForkBase) -> Iterator[str]:
    """What to say of a fork that is not as the recipe pins it, since its patches are judged as they lie there."""
    found = fork.checkout
    if recipe.fork is not None and (found.commit != recipe.fork.commit or found.edits):
        edited = " with local edits" if found.edits else ""
        yield f"{recipe.name}: the fork in {found.folder} is at {found.commit[:12]}{edited}, not the pinned commit"


def _open_forks(recipes: Iterable[Recipe], fork_dir: Path | None, index_url: str | None) -> dict[str, ForkBase]:
    """The checkouts that are there, each with the release that its patches were cut against.

    Raises UsageError for a folder that no recipe asks for; what reading a checkout raises.
    """
    forked = [recipe for recipe in recipes if recipe.fork is not None]
    if fork_dir is not None and not forked:
        raise UsageError("no recipe that is judged has a fork", where="--fork-dir", hints=("provision recipes",))
    context = read_context(index_url)
    places = {recipe.name: fork_dir or context.home.fork(recipe.name) for recipe in forked}
    return {
        recipe.name: _open_fork(recipe, places[recipe.name], context.settings())
        for recipe in forked
        if fork_dir is not None or (places[recipe.name] / ".git").exists()
    }


def _open_fork(recipe: Recipe, folder: Path, settings: IndexSettings) -> ForkBase:
    assert recipe.fork is not None
    checkout = read_checkout(folder.expanduser().absolute(), recipe.fork)
    base = f"pypi:{recipe.build.version.public}"
    return ForkBase(checkout=checkout, wheel=open_wheel(find_one_build(base, settings), settings))


def _doubt(clone: CloneHistory, builds: Builds) -> Iterator[str]:
    """What to say of a clone that can tell nothing of any build."""
    if not any(clone.knows(build_of(candidate)) for candidate in builds.found):
        fetch = shlex.join(["git", "-C", str(clone.folder), "fetch", "--tags"])
        yield (
            f"--history {clone.folder} has neither commit nor tag of any of these builds, so it tells nothing: is it a "
            f"clone of vLLM? If so: {fetch}"
        )


def _parse_frozen(texts: list[str]) -> dict[str, Version]:
    if not texts:
        return {}
    return parse_frozen(texts)


def _witness(against: list[str], clone: CloneHistory | None, settings: IndexSettings) -> Witness | None:
    """A clone, where there is one, then the lists of commits that were given."""
    from provisioner.drift.history import CloneHistory, ask_first_to_know, listed_history

    witnesses: list[Witness] = []
    if clone is not None:
        witnesses.append(clone)
    elif settings.clone is not None:
        witnesses.append(CloneHistory(settings.clone))
    specs = (parse_spec(text) for text in against)
    witnesses += [listed_history(read_commit_list(spec.path)) for spec in specs if isinstance(spec, CommitFileSpec)]
    return ask_first_to_know(witnesses) if witnesses else None


def _scan(task: _Task, builds: tuple[Candidate, ...], reporter: Any) -> DriftReport:
    return scan(task.subjects, builds, task.settings, against=task.against, reporter=reporter, witness=task.witness)


def _bisect(task: _Task, good: str, bad: str, reporter: Any) -> Bisection:
    from provisioner.drift.bisect import find_turns

    return find_turns(task.builds.found, good, bad, lambda build: _scan(task, (build,), reporter).columns[0])


def _finish(report: DriftReport, form: str, output: Path | None) -> int:
    _write(_printer(form)(report), output)
    return exit_code(report)


def _finish_bisection(found: Bisection, form: str, output: Path | None) -> int:
    _write(print_bisection_json(found) if form == "json" else print_bisection(found), output)
    return 1 if found.turns else 0


def _printer(form: str) -> Callable[[DriftReport], str]:
    module, function = _PRINTERS[form]
    found: Callable[[DriftReport], str] = getattr(import_module(f"provisioner.drift.reports.{module}"), function)
    return found


def _write(text: str, output: Path | None) -> None:
    if output is None:
        render.print_text(text)
    else:
        write_output(output, text.encode())
        render.print_note(f"wrote {output}")
