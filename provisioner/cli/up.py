"""``provision up RECIPE``, for which a built-in recipe's name alone is short."""

import os
import shlex
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from packaging.version import Version

from provisioner.cli.shared import render
from provisioner.cli.shared.catalogue import open_recipe
from provisioner.cli.shared.context import Context, find_places, read_context
from provisioner.cli.shared.options import AsJson, Bare, Card, IndexUrl, RecipeName, WithoutPatch
from provisioner.cli.shared.progress import open_reporter
from provisioner.cli.shared.verdicts import describe_verdict, verdict_rows
from provisioner.documents.lock import Lock, LockScope
from provisioner.documents.policy import LeftOut, Omission
from provisioner.documents.receipt import Receipt
from provisioner.documents.recipe import Recipe
from provisioner.environment.integrity import peek_sources
from provisioner.environment.site import find_site, venv_python
from provisioner.environment.state import state_of
from provisioner.errors import EnvironmentConflictError, UsageError
from provisioner.locks.first_use import FirstUse
from provisioner.pipeline.execute import Outcome, Request, is_edited, plan_environment, provision
from provisioner.pipeline.inspect import (
    Installed,
    inspect_environment,
    is_other_build,
    is_replaceable,
    refuse_downgrade,
)
from provisioner.pipeline.plan import EnvironmentPlan, describe_action, taken_out
from provisioner.pipeline.preflight import check_platform, look_at_card
from provisioner.pipeline.rebuild import plan_rebuild, rebuild_environment, settle_rebuild
from provisioner.pipeline.status import read_status
from provisioner.pipeline.user_patches import saved_text, with_beside
from provisioner.progress import Reporter
from provisioner.records import dataclass
from provisioner.series.fork import ForkWish, obtain_checkout, open_fork_series, peek_checkout, unknown_replaced
from provisioner.series.model import Series, name_not_needed, require_left_out
from provisioner.series.recipe import open_series

if TYPE_CHECKING:
    from provisioner.gpu.report import VerifyReport
    from provisioner.index.lazy import Wheel


Venv = Annotated[Path | None, typer.Option("--venv", help="The environment's folder (default: one a recipe).")]
Python = Annotated[str | None, typer.Option(help="The Python to use: a version or a path.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and its final digests; write nothing.")]
Check = Annotated[bool, typer.Option("--check", help="Exit 1 if anything would be done; write nothing.")]
Reapply = Annotated[bool, typer.Option("--reapply-patches", help="Restore the files as shipped, then apply.")]
Keep = Annotated[bool, typer.Option("--keep-patches", help="Keep patches of yours that stand beside the recipe's.")]
NotAsRecipe = Annotated[
    bool,
    typer.Option("--not-as-recipe", help="Let --without-patch take what the recipe requires; serve then refuses."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse a patch that the build has already.")]
RequireLock = Annotated[bool, typer.Option("--require-lock", help="Refuse to make a lock on the first use.")]
Rebuild = Annotated[
    bool, typer.Option("--rebuild", help="Replace an environment that holds another build or edited files.")
]
Adopt = Annotated[bool, typer.Option("--adopt", help="Take over an environment that uv or pip made.")]
Sync = Annotated[
    bool, typer.Option("--sync", help="Bring the packages of an environment that was taken over to the lock's.")
]
Downgrade = Annotated[bool, typer.Option("--downgrade", help="Let --rebuild replace it by an older build.")]
FromBundle = Annotated[Path | None, typer.Option(help="A file of provision bundle; no index is asked.")]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Leave out the check on the card; the receipt says so.")]

FORK_PANEL = "Fork, for recipes that have one (samsung)"
ForkDir = Annotated[
    Path | None, typer.Option(help="The fork's checkout; cloned if it is not there.", rich_help_panel=FORK_PANEL)
]
ForkUrl = Annotated[
    str | None, typer.Option(help="Where to clone the fork from: a mirror.", rich_help_panel=FORK_PANEL)
]
ForkCommit = Annotated[str | None, typer.Option(help="The fork's commit.", rich_help_panel=FORK_PANEL)]
ForkAny = Annotated[
    bool,
    typer.Option("--fork-any", help="Take the checkout as it is: any commit, local edits.", rich_help_panel=FORK_PANEL),
]
WithoutFork = Annotated[
    bool, typer.Option("--without-fork", help="The release and our own patches alone.", rich_help_panel=FORK_PANEL)
]
WithoutOverlay = Annotated[
    bool, typer.Option("--without-overlay", help="Leave out the fork's new files.", rich_help_panel=FORK_PANEL)
]


@dataclass(frozen=True, kw_only=True)
class ForkOptions:
    """What the command line says of a recipe's fork, each under its option's name."""

    fork_dir: Path | None = None
    fork_url: str | None = None
    fork_commit: str | None = None
    fork_any: bool = False
    without_fork: bool = False
    without_overlay: bool = False

    def __bool__(self) -> bool:
        return self != ForkOptions()


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """What the command line says of the rest, each under its option's name; ``recipe`` as it was typed."""

    recipe: str
    venv: Path | None
    python: str | None
    dry_run: bool
    check: bool
    reapply_patches: bool
    keep_patches: bool
    without_patch: list[str] | None
    not_as_recipe: bool
    strict: bool
    bare: bool
    require_lock: bool
    rebuild: bool
    downgrade: bool
    adopt: bool
    sync: bool
    index_url: str | None
    as_json: bool
    gpu: str | None
    no_verify: bool
    from_bundle: Path | None


def up(
    recipe: RecipeName,
    venv: Venv = None,
    python: Python = None,
    dry_run: DryRun = False,
    check: Check = False,
    reapply_patches: Reapply = False,
    keep_patches: Keep = False,
    without_patch: WithoutPatch = None,
    not_as_recipe: NotAsRecipe = False,
    strict: Strict = False,
    bare: Bare = False,
    require_lock: RequireLock = False,
    rebuild: Rebuild = False,
    downgrade: Downgrade = False,
    adopt: Adopt = False,
    sync: Sync = False,
    index_url: IndexUrl = None,
    as_json: AsJson = False,
    gpu: Card = None,
    no_verify: NoVerify = False,
    from_bundle: FromBundle = None,
    fork_dir: ForkDir = None,
    fork_url: ForkUrl = None,
    fork_commit: ForkCommit = None,
    fork_any: ForkAny = False,
    without_fork: WithoutFork = False,
    without_overlay: WithoutOverlay = False,
) -> int:
    """Build, patch and prove the environment of a recipe; a second run finds nothing to do.

    A built-in recipe's name alone is short for up NAME.

    Example: [bold]provision hynix-stable --venv ~/vllm[/bold]
    """
    given = dict(locals())
    options = UpOptions(**{field.name: given[field.name] for field in fields(UpOptions)})
    fork = ForkOptions(**{field.name: given[field.name] for field in fields(ForkOptions)})
    return _run(options, fork)


def _run(options: UpOptions, fork: ForkOptions) -> int:
    _refuse_contradictions(options)
    context = read_context(options.index_url)
    if options.from_bundle is not None:
        return _run_unplugged(options.from_bundle, context, options, fork)
    wanted = open_recipe(options.recipe)
    left_out = _left_out(wanted, options)
    check_platform()
    wish, venv = _choose_place(wanted, context, options, fork)
    if options.adopt:
        _insist_on_environment(venv)
    writes = not (options.dry_run or options.check)
    lock = context.lock(wanted, _scope(options), _first_use(options, writes=writes))
    series = _open_series(wanted, wish, lock.build.version, left_out, writes=writes)
    request = _ask(wanted, lock, series, venv, context.locked_wheel(lock), options)
    adopts = request.adopts or wish is not None
    request = replace(request, adopts=adopts, fork_any=fork.fork_any, fetch_wheel=context.wheel_file(lock))
    return _answer(request, context, options)


def _insist_on_environment(venv: Path) -> None:
    if not venv_python(venv).exists():
        raise EnvironmentConflictError(
            "there is no environment to take over",
            where=str(venv),
            hints=(f"to make one: provision up RECIPE --venv {shlex.quote(str(venv))}",),
        )


def _refuse_contradictions(options: UpOptions) -> None:
    if options.downgrade and not options.rebuild:
        raise UsageError(
            "--downgrade allows --rebuild an older build and means nothing alone", hints=("add --rebuild",)
        )
    if options.reapply_patches and options.keep_patches:
        raise UsageError("--reapply-patches takes every other patch out and --keep-patches keeps them; name one")
    if options.adopt and (options.rebuild or options.python is not None):
        raise UsageError("--adopt keeps the environment that is there, so it goes with neither --rebuild nor --python")
    if options.sync and options.bare:
        raise UsageError("--sync installs the dependencies that --bare leaves out; name one")


def _run_unplugged(bundle_file: Path, context: Context, options: UpOptions, fork: ForkOptions) -> int:
    """From a bundle's recipe, lock, patches and wheels; no index is asked."""
    from provisioner.bundles.use import insist_on_host, insist_on_recipe, open_bundle, unpacking

    bundle = open_bundle(bundle_file.expanduser().absolute())
    name = Path(options.recipe).stem if options.recipe.endswith(".toml") else options.recipe
    insist_on_recipe(bundle, name, bare=options.bare)
    check_platform()
    insist_on_host(bundle, options.python, bare=options.bare)
    wanted = bundle.recipe()
    wish, venv = _choose_place(wanted, context, options, fork)
    if wish is not None:
        raise UsageError("a fork does not travel in a bundle", where=wanted.where, hints=("--without-fork",))
    with unpacking(bundle, context.home.cache / "bundles") as unpacked:
        lock = bundle.lock()
        series = open_series(wanted, lock.build.version, unpacked.patches()).without(_left_out(wanted, options))
        request = _ask(wanted, lock, series, venv, unpacked.open_wheel, options)
        request = replace(
            request,
            python=options.python or (None if options.bare else bundle.manifest.python),
            fetch_wheel=unpacked.wheel_file if lock.build.url is not None else None,
            fetch_links=unpacked.links,
        )
        return _answer(request, context, options)


def _ask(
    recipe: Recipe,
    lock: Lock,
    series: Series,
    venv: Path,
    open_wheel: "Callable[[], Wheel]",
    options: UpOptions,
) -> Request:
    """What the command line asks for, with packages from the user's index."""
    require_left_out(series, options.without_patch or ())
    return Request(
        recipe=recipe,
        lock=lock,
        series=with_beside(series, venv, recipe.distribution) if options.keep_patches else series,
        strict=options.strict,
        venv=venv,
        python=options.python,
        bare=options.bare,
        reapply=options.reapply_patches,
        open_wheel=open_wheel,
        environ=os.environ,
        adopts=options.adopt,
        sync=options.sync,
    )


def _left_out(recipe: Recipe, options: UpOptions) -> tuple[LeftOut, ...]:
    """The patches that the user leaves out.

    Raises UsageError for one that the recipe requires, unless the result need not be as it says.
    """
    ids = tuple(dict.fromkeys(options.without_patch or ()))
    required = [name for name in ids if name in recipe.required]
    if required and not options.not_as_recipe:
        raise UsageError(
            f"the recipe requires {', '.join(required)}",
            where="--without-patch",
            hints=("add --not-as-recipe; the environment is then not as the recipe says, and serve refuses it",),
        )
    return tuple(LeftOut(id=name, omission=Omission.ASKED) for name in ids)


def _answer(request: Request, context: Context, options: UpOptions) -> int:
    if options.dry_run or options.check:
        make_plan = _choose_plan(request, options)
        return _show_plan(request, context, check=options.check, as_json=options.as_json, make_plan=make_plan)
    return _carry_out(request, context, _choose_way(request, options), options)


def _scope(options: UpOptions) -> LockScope:
    return LockScope.WHEEL_ALONE if options.bare else LockScope.COMPLETE


def _first_use(options: UpOptions, *, writes: bool) -> FirstUse:
    if options.require_lock:
        return FirstUse.REFUSE
    return FirstUse.KEEP if writes else FirstUse.FORGET


def _choose_way(request: Request, options: UpOptions) -> Callable[..., Outcome]:
    """How the request is carried out: in place, or by a rebuild where what is in the way may go."""
    settle_rebuild(request.venv)
    return rebuild_environment if _is_replaced(request, options) else provision


def _choose_plan(request: Request, options: UpOptions) -> Callable[..., EnvironmentPlan]:
    if _is_replaced(request, options):
        return plan_rebuild
    return plan_environment


def _is_replaced(request: Request, options: UpOptions) -> bool:
    """Whether another build, or a file that somebody edited, is in the way and may go.

    Raises where a build may not, being newer.
    """
    if not options.rebuild:
        return False
    found = inspect_environment(request.venv, request.recipe.distribution, adopts=request.adopts)
    if not isinstance(found, Installed):
        return False
    if not is_other_build(found.site, request.lock):
        return is_replaceable(found.site) and is_edited(request, found.site)
    if not options.downgrade:
        refuse_downgrade(found.site, request.lock)
    return True


def _choose_place(
    recipe: Recipe, context: Context, options: UpOptions, fork: ForkOptions
) -> tuple[ForkWish | None, Path]:
    """The fork's wish, None where none is used, and the environment that goes with it."""
    if fork and recipe.fork is None:
        raise UsageError("the recipe has no fork, so its options do not go with it", where=recipe.where)
    if fork.without_fork and fork != ForkOptions(without_fork=True):
        raise UsageError("--without-fork does not go with other options of the fork")
    folder, venv = find_places(recipe, context, options.venv, fork.fork_dir, without_fork=fork.without_fork)
    if folder is None:
        return None, venv
    overlay = not fork.without_overlay
    wish = ForkWish(folder=folder, url=fork.fork_url, commit=fork.fork_commit, any_state=fork.fork_any, overlay=overlay)
    return wish, venv


def _open_series(
    recipe: Recipe,
    wish: ForkWish | None,
    version: Version,
    left_out: tuple[LeftOut, ...],
    *,
    writes: bool,
) -> Series:
    if wish is None or recipe.fork is None:
        return open_series(recipe, version).without(left_out)
    with open_reporter() as reporter:
        take = obtain_checkout if writes else peek_checkout
        checkout = take(recipe.fork, wish, reporter)
        _warn_of_drafter(recipe, wish.folder, reporter)
        for name in unknown_replaced(recipe.fork, checkout):
            reporter.warn(f"the recipe replaces {name}, which this checkout does not have")
    return open_fork_series(recipe, checkout, version, overlay=wish.overlay, left_out=left_out)


def _warn_of_drafter(recipe: Recipe, folder: Path, reporter: Reporter) -> None:
    from provisioner.serve.findings import Severity
    from provisioner.serve.fork_checks import judge_drafter

    for finding in judge_drafter(recipe, folder, os.environ, severity=Severity.WARNING):
        reporter.warn(f"{finding.what} ({', '.join(finding.evidence)}); to fetch them: {finding.next[0]}")


def _show_plan(
    request: Any, context: Any, *, check: bool, as_json: bool, make_plan: Callable[..., EnvironmentPlan] | None = None
) -> int:
    plan = (make_plan or plan_environment)(request, context.uv())
    lines, going = [describe_action(action) for action in plan.actions], taken_out(plan.actions)
    if as_json:
        payload = {"recipe": request.recipe.name, "venv": str(request.venv), "actions": lines, "final": plan.final}
        payload |= {"taken_out": going, "left_out": [asdict(item) for item in request.series.left_out]}
        render.print_json("plan", {**payload, "patches": describe_verdict(plan.verdict)})
    else:
        render.print_text("\n".join(lines) if lines else "nothing to do: everything is as the recipe says")
        render.print_table(("PATCH", "VERDICT", "FILE", "FINAL DIGEST"), verdict_rows(plan.verdict))
        for line in (*map(str, request.series.left_out), *name_not_needed(plan.verdict)):
            render.print_text(line)
        if going:
            render.print_note(f"hint: to keep {', '.join(going)}: run with --keep-patches")
    return 1 if check and plan else 0


def _carry_out(request: Any, context: Any, carry_out: Callable[..., Outcome], options: UpOptions) -> int:
    with open_reporter() as reporter:
        preflight = look_at_card(request.recipe.card)
        for warning in preflight.warnings:
            reporter.warn(warning)
        outcome = carry_out(request, context.uv(), reporter)
        checked = _check_on_card(request, options, reporter) if preflight.card is not None else None
    lines = [describe_action(action) for action in outcome.actions]
    going = {patch_id: str(saved_text(state_of(request.venv), patch_id)) for patch_id in taken_out(outcome.actions)}
    if options.as_json:
        payload = {"recipe": request.recipe.name, "venv": str(request.venv), "actions": lines, "taken_out": going}
        details = {"patches": describe_verdict(outcome.verdict), "receipt": asdict(outcome.receipt)}
        card = {"card": preflight.card, "verification": _summarize(checked)}
        render.print_json("up", {**payload, **details, **card, "status": _read_status(request)})
        return _exit_code(checked)
    patches = ", ".join(patch.id for patch in outcome.receipt.patches) or "none"
    render.print_text(
        f"{request.recipe.name}: {_describe_end(request.recipe, outcome.receipt, lines)}\n"
        f"  environment  {request.venv}\n"
        f"  build        {outcome.receipt.build.distribution} {outcome.receipt.build.version}"
        f" (commit {outcome.receipt.build.commit}), torch {outcome.receipt.torch or 'none'}\n"
        f"  patches      {patches}"
    )
    for line in (*map(str, outcome.receipt.left_out), *name_not_needed(outcome.verdict)):
        render.print_text(f"  left out     {line}")
    if going:
        again = shlex.join(["provision", "patch", "apply", *going.values(), "--venv", str(request.venv)])
        render.print_text(f"  taken out    {', '.join(going)}; to have it back: {again}")
    if checked is not None:
        render.print_text(f"  on the card  {checked.verdict}: {checked.why}")
    render.print_text(f"next: {shlex.join(['provision', 'status', options.recipe, '--venv', str(request.venv)])}")
    return _exit_code(checked)


def _describe_end(recipe: Recipe, receipt: Receipt, lines: list[str]) -> str:
    if recipe.required & {item.id for item in receipt.left_out}:
        return "not as the recipe says"
    return "proven" if lines else "already proven"


def _read_status(request: Any) -> dict[str, Any]:
    """What ``provision status`` would say now, for whoever would ask it next."""
    from provisioner.cli.status import describe

    return describe(read_status(request.recipe, request.venv, peek_sources))


def _check_on_card(request: Any, options: UpOptions, reporter: Reporter) -> "VerifyReport | None":
    """The quick check where a card is there and no former pass still holds; None where nothing was checked."""
    if request.bare:
        return None
    from provisioner.pipeline.verification import record_skip, verify_if_needed

    site = find_site(request.venv, request.recipe.distribution)
    if options.no_verify:
        record_skip(site)
        return None
    return verify_if_needed(site, request.recipe, gpu=options.gpu, environ=os.environ, reporter=reporter)


def _summarize(checked: "VerifyReport | None") -> dict[str, Any] | None:
    from provisioner.gpu.report import summarize

    return summarize(checked) if checked is not None else None


def _exit_code(checked: "VerifyReport | None") -> int:
    """A check that could not be made does not spoil the environment; one that failed does."""
    if checked is None:
        return 0
    from provisioner.gpu.report import Verdict

    return 0 if checked.verdict is Verdict.NOT_RUN else checked.verdict.exit_code
