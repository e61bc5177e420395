"""Everything that stands before a start: environment, card, key, port and plan, with all findings together."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from provisioner.documents.recipe import Recipe, Serve
from provisioner.errors import ProvisionError
from provisioner.serve.cards import CardView, choose, events_of, judge_events, judge_fit, judge_probe, read_kernel_log
from provisioner.serve.cards import view_cards as look_at_cards
from provisioner.serve.findings import Finding, Severity, Subject, evidence_of
from provisioner.serve.fork_checks import judge_checkout, judge_drafter
from provisioner.serve.key import FoundKey, find_key, obtain_key
from provisioner.serve.launch import (
    ALLOCATOR_VARIABLE,
    ForkLauncher,
    Launch,
    Launcher,
    Model,
    ModelKind,
    Surroundings,
    VenvLauncher,
    Wish,
    plan_launch,
)
from provisioner.serve.ports import judge_port
from provisioner.serve.readiness import (
    Readiness,
    changes_since_verified,
    examine_environment,
    judge_verification,
)

FORK_KEY_FILE = "api_key.txt"
_PATH_MARKS = ("/", "./", "../", "~")


@dataclass(frozen=True, kw_only=True)
class ServeRequest:
    """What to serve and how. ``fork_folder`` is None where the environment's own vllm is the server.

    ``key_file`` names a file with the key, ``own_key_file`` is the recipe's own; ``make_key`` makes it where it is
    missing. The recipe's own lies outside the environment, so that a rebuilt one keeps its clients.
    ``memory_vendor`` is the user's word on the card, ``probe`` asks for the wedge probe.
    """

    recipe: Recipe
    serve: Serve
    venv: Path
    fork_folder: Path | None
    model: str | None
    host: str | None
    port: int | None
    extra: tuple[str, ...]
    variables: Mapping[str, str]
    gpu: str | None
    memory_vendor: str | None
    key_file: Path | None
    own_key_file: Path
    make_key: bool
    probe: bool
    environ: Mapping[str, str]
    cwd: Path


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The plan, the key, and all findings: environment, card, command, port."""

    launch: Launch
    key: FoundKey | None
    findings: tuple[Finding, ...]


def prepare(request: ServeRequest) -> Prepared:
    """Look at everything and plan. Nothing is raised: what is wrong is in ``findings``."""
    ready = examine_environment(
        request.recipe, request.venv, distribution=request.recipe.distribution, mend=mending_command(request)
    )
    cards = look_at_cards(request.gpu, request.environ, needed=request.recipe.card is not None)
    key, key_findings = _find_key(request)
    launch = plan_launch(
        request.serve,
        _choose_launcher(request, ready),
        Wish(
            model=find_model(request.model, request.cwd) if request.model else None,
            host=request.host,
            port=request.port,
            extra=request.extra,
            variables=request.variables,
        ),
        _describe_surroundings(request, ready, cards, key),
    )
    findings = (
        *ready.findings,
        *_judge_fork(request, ready),
        *_judge_card(request, cards),
        *_judge_verification(request, ready, cards, launch),
        *key_findings,
        *launch.findings,
        *judge_port(launch.host, launch.port),
    )
    return Prepared(launch=launch, key=key, findings=findings)


def find_model(text: str, cwd: Path) -> Model:
    """A folder if there is one, else a hub's name, unless the text can only be a path."""
    folder = Path(text).expanduser()
    absolute = folder if folder.is_absolute() else cwd / folder
    if absolute.is_dir():
        return Model(text=str(absolute), kind=ModelKind.FOLDER)
    is_path = text.startswith(_PATH_MARKS) or text.count("/") > 1
    return Model(text=text, kind=ModelKind.MISSING if is_path else ModelKind.HUB)


def mending_command(request: ServeRequest) -> str:
    """The command that makes the request's environment right."""
    if request.fork_folder is not None:
        return shlex.join(["provision", "up", request.recipe.name, "--fork-dir", str(request.fork_folder)])
    without = ["--without-fork"] if request.recipe.fork is not None else []
    return shlex.join(["provision", "up", request.recipe.name, *without, "--venv", str(request.venv)])


def _choose_launcher(request: ServeRequest, ready: Readiness) -> Launcher:
    packages = ready.site.site_packages if ready.site else None
    if request.fork_folder is None or request.recipe.fork is None:
        return VenvLauncher(venv=request.venv, site_packages=packages)
    return ForkLauncher(folder=request.fork_folder, script=request.recipe.fork.launcher, site_packages=packages)


def _describe_surroundings(
    request: ServeRequest, ready: Readiness, cards: CardView, key: FoundKey | None
) -> Surroundings:
    card = request.recipe.card
    return Surroundings(
        environ=request.environ,
        cwd=request.cwd,
        cwd_names=_list_names(request.cwd),
        key=key.key if key else None,
        card=choose(cards.card, vendor=request.memory_vendor) if cards.card else None,
        recipe_vendor=request.memory_vendor or (card.memory_vendor if card else None),
        version=ready.site.version if ready.site else None,
        patches=ready.patches,
    )


def _list_names(folder: Path) -> frozenset[str]:
    try:
        return frozenset(entry.name for entry in folder.iterdir())
    except OSError:
        return frozenset()


def _find_key(request: ServeRequest) -> tuple[FoundKey | None, tuple[Finding, ...]]:
    own = request.own_key_file
    fallbacks = (own,) if request.fork_folder is None else (own, request.fork_folder / FORK_KEY_FILE)
    try:
        if request.make_key:
            return obtain_key(request.key_file or own), ()
        return find_key(request.environ, file=request.key_file, fallbacks=fallbacks), ()
    except ProvisionError as error:
        finding = Finding(
            id="key-file",
            severity=Severity.ERROR,
            subject=Subject.COMMAND,
            what=error.what,
            evidence=evidence_of(error),
            next=error.hints,
        )
        return None, (finding,)


def _judge_card(request: ServeRequest, cards: CardView) -> Iterator[Finding]:
    yield from cards.findings
    if cards.card is None:
        return
    yield from judge_fit(cards.card, request.recipe.card, vendor=request.memory_vendor)
    yield from judge_events(events_of(read_kernel_log()), cards.card)
    if request.probe:
        yield from judge_probe(cards.card)


def _judge_verification(request: ServeRequest, ready: Readiness, cards: CardView, launch: Launch) -> Iterator[Finding]:
    if ready.receipt is None or request.recipe.card is None:
        return
    allocator = next((item.value for item in launch.variables if item.name == ALLOCATOR_VARIABLE), None)
    changes = changes_since_verified(ready, cards.card, allocator)
    yield from judge_verification(ready.receipt.verification, changes, recipe=request.recipe.name)


def _judge_fork(request: ServeRequest, ready: Readiness) -> Iterator[Finding]:
    fork, folder = request.recipe.fork, request.fork_folder
    if fork is None or folder is None:
        return
    if not (folder / fork.launcher).is_file():
        yield Finding(
            id="no-launcher",
            severity=Severity.ERROR,
            subject=Subject.ENVIRONMENT,
            what="the fork's launcher is not there",
            evidence=(str(folder / fork.launcher),),
            next=(mending_command(request),),
        )
        return
    if ready.receipt is None or not ready.receipt.fork_any:
        yield from judge_checkout(request.recipe, folder)
    speculation = request.variables.get("SPEC") or next(
        (variable.value for variable in request.serve.variables if variable.name == "SPEC"), None
    )
    if speculation == "dflash2":
        environ = {**request.environ, **request.variables}
        yield from judge_drafter(request.recipe, folder, environ, severity=Severity.ERROR)
