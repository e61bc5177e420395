"""``provision patch``: judge patches on a tree of files, apply them, take them back, look at them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from provisioner.cli.patch.views import (
    describe_finding,
    describe_judgement,
    describe_shown,
    edit_text,
    finding_rows,
    judgement_hints,
    judgement_rows,
    outcome_rows,
    recovery_text,
    shown_text,
)
from provisioner.cli.shared import render
from provisioner.cli.shared.catalogue import open_recipe
from provisioner.cli.shared.context import read_context
from provisioner.cli.shared.hints import Given, complete_hint
from provisioner.cli.shared.options import AsJson, CutAgainst, Overlay, Package, Root, Strip, WithoutPatch
from provisioner.documents.policy import LeftOut, Omission
from provisioner.documents.recipe import Recipe
from provisioner.environment.site import Site, find_site, open_site_packages
from provisioner.errors import UsageError
from provisioner.index.lazy import Wheel
from provisioner.patching.diff import print_patch
from provisioner.pipeline.evaluate import InstalledTree, Judgement, Tree, judge
from provisioner.pipeline.shipped import cut_against_release, open_shipped
from provisioner.records import dataclass
from provisioner.resources import recipe_names
from provisioner.series.files import Reading
from provisioner.series.model import Series, require_left_out
from provisioner.series.sources import Wanted, read_series
from provisioner.wheels.names import spec_of

if TYPE_CHECKING:
    from provisioner.transaction.lockfile import Holder
    from provisioner.transaction.transaction import FileOutcome, Recovery


HELP = """Judge, apply and take back patches in any environment.

WHAT is any mixture of recipe names, patch ids, patch files and folders of patches; WHERE is a virtual environment, a
site-packages folder or, to look only, a wheel.

Example: [bold]provision patch check my.patch --root vllm --venv ~/venv[/bold]
"""

What = Annotated[list[str], typer.Argument(metavar="WHAT", help="Recipes, patch ids, patch files, folders of patches.")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of applied patches (default: all).")]
Venv = Annotated[Path | None, typer.Option("--venv", metavar="DIR", help="A virtual environment.")]
SitePackages = Annotated[
    Path | None, typer.Option("--site-packages", metavar="DIR", help="A folder of installed packages.")
]
Against = Annotated[
    str | None,
    typer.Option("--against", metavar="SPEC", help="A wheel that is not installed: a file, or pypi:VERSION."),
]
WheelSpec = Annotated[
    str | None,
    typer.Option("--wheel", metavar="SPEC", help="Where files as shipped are read (default: the installed version)."),
]
Reset = Annotated[
    bool, typer.Option("--reset", help="First restore the files as shipped that hold foreign or stale bytes.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse a patch that the build has already (exit 5).")]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of a command of the group as they were typed; those that it does not have keep their defaults."""

    venv: Path | None = None
    site_packages: Path | None = None
    against: str | None = None
    package: str = "vllm"
    wheel: str | None = None
    what: Sequence[str] | None = None
    root: str = ""
    strip: int | None = None
    cut_against: str | None = None
    overlay: Sequence[Path] | None = None
    without: Sequence[str] | None = None

    @property
    def place(self) -> tuple[tuple[str, str], ...]:
        """The options that say where, with their values."""
        package = self.package if self.package != "vllm" else None
        return _typed({"--venv": self.venv, "--site-packages": self.site_packages, "--package": package})

    def named(self) -> tuple[str, ...]:
        """The words that name the same patches for another command of the group."""
        options = {"--root": self.root or None, "--strip": self.strip, "--cut-against": self.cut_against}
        repeated = [("--overlay", str(folder)) for folder in self.overlay or ()]
        repeated += [("--without-patch", patch_id) for patch_id in self.without or ()]
        return (*(self.what or ()), *(word for pair in (*_typed(options), *repeated) for word in pair))


def _typed(options: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(value)) for name, value in options.items() if value is not None)


def build_group() -> typer.Typer:
    """The group with its commands."""
    from provisioner.cli.patch.refresh import refresh

    group = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode="rich", add_completion=False)
    for function in (check, apply, revert, show, lint, diff, refresh):
        group.command(function.__name__)(function)
    return group


def check(
    what: What,
    venv: Venv = None,
    site_packages: SitePackages = None,
    against: Against = None,
    package: Package = "vllm",
    root: Root = "",
    strip: Strip = None,
    cut_against: CutAgainst = None,
    overlay: Overlay = None,
    without_patch: WithoutPatch = None,
    strict: Strict = False,
    wheel: WheelSpec = None,
    as_json: AsJson = False,
) -> int:
    """Say for each patch whether it applies, is applied, or what stands in the way; write nothing.

    Exit 0 where the series holds (a patch that the build has already is not needed), 3 for an invalid patch, 5 for
    anything else that stands in the way, 1 where only an interrupted change of the files waits for recovery.

    Example: [bold]provision patch check hynix-stable --against pypi:0.27.1[/bold]
    """
    asked = Asked(
        what=what, venv=venv, site_packages=site_packages, against=against, package=package, wheel=wheel, root=root,
        strip=strip, cut_against=cut_against, overlay=overlay, without=without_patch,
    )  # fmt: skip
    with _opened_tree(asked) as tree:
        judgement = replace(judge(tree, _read_series(asked, tree)), strict=strict)
    _show_judgement(judgement, asked, as_json=as_json)
    return judgement.exit_code


def apply(
    what: What,
    venv: Venv = None,
    site_packages: SitePackages = None,
    package: Package = "vllm",
    root: Root = "",
    strip: Strip = None,
    cut_against: CutAgainst = None,
    overlay: Overlay = None,
    without_patch: WithoutPatch = None,
    strict: Strict = False,
    wheel: WheelSpec = None,
    reset: Reset = False,
    as_json: AsJson = False,
) -> int:
    """Apply a series in one transaction, after the patches that the environment's receipt lists; all of it or nothing.

    A second run finds nothing to do. Exit codes as for check; 6 failed and restored, 7 not fully restored.

    Example: [bold]provision patch apply fork/patches --root vllm --venv ~/venv[/bold]
    """
    from provisioner.pipeline.apply_patches import apply as apply_series

    asked = Asked(
        what=what, venv=venv, site_packages=site_packages, package=package, wheel=wheel, root=root, strip=strip,
        cut_against=cut_against, overlay=overlay, without=without_patch,
    )  # fmt: skip
    tree = _open_installed(asked)
    application = apply_series(tree, _read_series(asked, tree), reset=reset, strict=strict, on_wait=_say_waiting)
    _say_recovery(application.recovery)
    if application.judgement.exit_code:
        _show_judgement(application.judgement, asked, as_json=as_json)
        render.print_note("nothing was written")
    else:
        _show_changes(application.judgement, application.files, as_json=as_json)
    return application.judgement.exit_code


def revert(
    ids: Ids = None,
    venv: Venv = None,
    site_packages: SitePackages = None,
    package: Package = "vllm",
    what: Annotated[
        list[str] | None,
        typer.Option("--what", metavar="WHAT", help="The series, where the environment has no receipt of it."),
    ] = None,
    root: Root = "",
    strip: Strip = None,
    wheel: WheelSpec = None,
    as_json: AsJson = False,
) -> int:
    """Take patches back, in one transaction: those named, or all, which leaves the files as shipped.

    A patch that a later one needs stays; the error says which one.

    Example: [bold]provision patch revert my-fix --venv ~/venv[/bold]
    """
    from provisioner.pipeline.revert_patches import withdraw

    asked = Asked(
        what=what, venv=venv, site_packages=site_packages, package=package, wheel=wheel, root=root, strip=strip
    )
    tree = _open_installed(asked)
    done = withdraw(tree, ids or (), _read_series(asked, tree), on_wait=_say_waiting)
    _say_recovery(done.recovery)
    if as_json:
        payload = {"reverted": done.ids, "not_applied": done.absent, "remaining": done.remaining}
        render.print_json("patch-revert", {**payload, "files": [asdict(file) for file in done.files]})
        return 0
    if done.ids or not done.absent:
        render.print_text(f"taken back: {', '.join(done.ids) or 'nothing, no patch is applied'}")
    if done.absent:
        render.print_text(f"not applied: {', '.join(done.absent)}")
    if done.remaining:
        render.print_text(f"still applied: {', '.join(done.remaining)}")
    if done.files:
        render.print_table(("FILE", "BEFORE", "AFTER"), outcome_rows(done.files))
    return 0


def show(
    patch: Annotated[str, typer.Argument(metavar="ID", help="The id of a patch, or a patch file.")],
    venv: Venv = None,
    site_packages: SitePackages = None,
    package: Package = "vllm",
    version: Annotated[
        str | None, typer.Option("--version", metavar="VERSION", help="Show the text for this version (default: last).")
    ] = None,
    root: Root = "",
    strip: Strip = None,
    as_json: AsJson = False,
) -> int:
    """Show what a patch is for, what it holds, and its text; the output is itself a patch that applies.

    With an environment: the patch as it was applied there, wherever it came from.

    Example: [bold]provision patch show pr50021-gdn-spec-bounds[/bold]
    """
    from provisioner.pipeline.show import show_applied, show_patch

    asked = Asked(venv=venv, site_packages=site_packages, package=package, root=root, strip=strip)
    if venv or site_packages:
        shown = show_applied(_open_installed(asked).site, patch)
    else:
        shown = show_patch(patch, version, _reading(asked))
    if as_json:
        render.print_json("patch-show", describe_shown(shown))
    else:
        render.print_bytes(shown_text(shown))
    return 0


def lint(
    files: Annotated[list[str], typer.Argument(metavar="FILES", help="Patch files, or folders of patches.")],
    venv: Venv = None,
    site_packages: SitePackages = None,
    against: Against = None,
    package: Package = "vllm",
    root: Root = "",
    strip: Strip = None,
    as_json: AsJson = False,
) -> int:
    """Check patch files for themselves: refusals with file and line, and what each patch holds.

    With a WHERE also the paths that it does not ship, and the class or function that each hunk stands in. Exit 3 where
    a file is refused.

    Example: [bold]provision patch lint patches/*.patch --against pypi:0.27.1[/bold]
    """
    from provisioner.pipeline.lint import lint as lint_patches

    asked = Asked(venv=venv, site_packages=site_packages, against=against, package=package, root=root, strip=strip)
    if venv or site_packages or against:
        with _opened_tree(asked) as tree:
            findings = lint_patches(files, _reading(asked), tree)
    else:
        findings = lint_patches(files, _reading(asked))
    if as_json:
        render.print_json("patch-lint", {"patches": [describe_finding(finding) for finding in findings]})
    else:
        rows = [row for finding in findings for row in finding_rows(finding)]
        render.print_table(("PATCH", "FILE", "HUNKS", "ADDED", "REMOVED", "REMARK"), rows)
    refused = [finding.error for finding in findings if finding.error is not None]
    for error in refused:
        render.print_error(error)
    return refused[0].exit_code if refused else 0


def diff(
    venv: Venv = None,
    site_packages: SitePackages = None,
    package: Package = "vllm",
    wheel: WheelSpec = None,
    as_json: AsJson = False,
) -> int:
    """Print what differs from the files as shipped, as a patch that applies to them.

    Example: [bold]provision patch diff --venv ~/venv > mine.patch[/bold]
    """
    from provisioner.pipeline.diff import compare

    asked = Asked(venv=venv, site_packages=site_packages, package=package, wheel=wheel)
    difference = compare(_open_installed(asked))
    text = print_patch(difference.patch)
    if as_json:
        files = sorted({change.path for change in difference.patch.changes})
        shown = text.decode("utf-8", errors="backslashreplace")
        render.print_json("patch-diff", {"files": files, "unspoken": dict(difference.unspoken), "diff": shown})
    else:
        render.print_bytes(text)
    for path, why in difference.unspoken.items():
        render.print_warning(f"{path} differs and is not shown: {why}")
    return 0


def _reading(asked: Asked) -> Reading:
    return Reading(strip=asked.strip, root=asked.root)


def _read_series(asked: Asked, tree: Tree) -> Series:
    wanted = Wanted(names=tuple(asked.what or ()), reading=_reading(asked), overlays=tuple(asked.overlay or ()))
    known = recipe_names()
    recipes = {name: open_recipe(name) for name in wanted.names if name in known or name.endswith(".toml")}
    _say_forks(recipes.values())
    left_out = [LeftOut(id=patch_id, omission=Omission.ASKED) for patch_id in asked.without or ()]
    series = read_series(wanted, tree.version, recipes).without(left_out)
    require_left_out(series, asked.without or ())
    if asked.cut_against is None:
        return series
    return cut_against_release(series, asked.cut_against, tree.distribution, read_context().settings())


@contextmanager
def _opened_tree(asked: Asked) -> Iterator[Tree]:
    if asked.against is None:
        yield _open_installed(asked)
        return
    if asked.venv or asked.site_packages:
        raise _say_where("--venv, --site-packages and --against exclude each other")
    tree = open_shipped(asked.against, asked.package, read_context().settings())
    with closing(tree.wheel):
        yield tree


def _open_installed(asked: Asked) -> InstalledTree:
    if (asked.venv is None) == (asked.site_packages is None):
        raise _say_where("name one place" if asked.venv is None else "--venv and --site-packages exclude each other")
    if asked.venv is not None:
        site = find_site(asked.venv.expanduser().absolute(), asked.package)
    else:
        assert asked.site_packages is not None
        site = open_site_packages(asked.site_packages.expanduser().absolute(), asked.package)
    return InstalledTree(site=site, open_wheel=lambda: _open_own_wheel(site, asked.wheel))


def _say_where(what: str) -> Exception:
    return UsageError(what, hints=("--venv DIR", "--site-packages DIR", "--against pypi:VERSION (to look only)"))


def _open_own_wheel(site: Site, spec: str | None) -> Wheel:
    """The wheel that was installed: good to have, and not worth a long wait where there is no network."""
    settings = read_context().settings()
    settings = replace(settings, timeout=min(settings.timeout, 10.0), retries=min(settings.retries, 1))
    return open_shipped(spec or spec_of(site.version), site.distribution, settings).wheel


def _say_waiting(holder: "Holder | None") -> None:
    render.print_note(f"waiting for {holder or 'another process'}")


def _say_recovery(recovery: "Recovery | None") -> None:
    if recovery is not None:
        render.print_note(recovery_text(recovery))


def _say_forks(recipes: Iterable[Recipe]) -> None:
    for recipe in recipes:
        if recipe.fork is not None:
            root = f" --root {recipe.fork.root}" if recipe.fork.root else ""
            render.print_note(
                f"{recipe.name}: these are our own patches; the fork's come with its folder: "
                f"provision patch check FORK/{recipe.fork.patches.rpartition('/')[0]} {recipe.name}{root}"
            )


def _show_judgement(judgement: Judgement, asked: Asked, *, as_json: bool) -> None:
    if as_json:
        render.print_json("patch-check", describe_judgement(judgement))
        return
    render.print_table(("PATCH", "VERDICT", "FILE", "DETAIL"), judgement_rows(judgement.verdict))
    for edit in judgement.edits:
        render.print_note(edit_text(edit))
    for note in judgement.remarks:
        render.print_note(f"note: {note}")
    given = Given(options=asked.place)
    for hint in judgement_hints(judgement, asked.named()):
        render.print_note(f"hint: {complete_hint(hint, given)}")


def _show_changes(judgement: Judgement, files: "tuple[FileOutcome, ...]", *, as_json: bool) -> None:
    if as_json:
        render.print_json("patch-apply", {**describe_judgement(judgement), "files": [asdict(file) for file in files]})
        return
    for note in judgement.remarks:
        render.print_note(f"note: {note}")
    if not files:
        render.print_text("nothing to do: every patch is applied")
        return
    render.print_table(("PATCH", "FOUND", "FILE", "DETAIL"), judgement_rows(judgement.verdict))
    render.print_text("")
    render.print_table(("CHANGED FILE", "BEFORE", "AFTER"), outcome_rows(files))
    for note in judgement.notes:
        render.print_note(f"note: {note}")
