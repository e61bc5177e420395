"""The examination: every check in order, each with what it looked at; nothing here is raised or changed."""

import shlex
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from provisioner.counts import count_text
from provisioner.doctor.builds import read_build
from provisioner.doctor.condense import condense
from provisioner.doctor.imports import judge_imports, judge_venv, view_imports, view_venv
from provisioner.doctor.logs import judge_log
from provisioner.doctor.metrics import judge_prefix_cache
from provisioner.doctor.processes import Server, find_servers, judge_origin, judge_server
from provisioner.doctor.readers import LogSource, fetch_metrics, name_of, read_pieces
from provisioner.doctor.report import Check, Diagnosis, checked, skipped
from provisioner.documents.recipe import Recipe
from provisioner.environment.site import venv_python
from provisioner.errors import CardError, NetworkError, ProvisionError, UsageError
from provisioner.gpu.devices import Card, Inventory, bin_of, read_inventory, select_card
from provisioner.gpu.health import ProbeFunction, probe_card
from provisioner.openai.prometheus import parse_samples, read_counters
from provisioner.serve.cards import (
    KernelLog,
    events_of,
    judge_events,
    judge_fit,
    judge_order,
    judge_probe,
    read_kernel_log,
)
from provisioner.serve.findings import Finding, Severity, Subject
from provisioner.serve.fork_checks import judge_drafter
from provisioner.serve.launch import ALLOCATOR_VARIABLE, KEY_VARIABLE
from provisioner.serve.readiness import changes_since_verified, examine_environment, judge_verification


@dataclass(frozen=True, kw_only=True)
class Target:
    """An environment to look at, with its recipe where it is known and its fork's checkout where it has one."""

    venv: Path
    recipe: Recipe | None
    fork_folder: Path | None = None

    @property
    def name(self) -> str:
        return self.recipe.name if self.recipe else str(self.venv)

    @property
    def mend(self) -> str:
        """The command that makes it right."""
        if self.recipe is None:
            return shlex.join(["provision", "status", "RECIPE", "--venv", str(self.venv)])
        if self.fork_folder is not None:
            return shlex.join(["provision", "up", self.recipe.name, "--fork-dir", str(self.fork_folder)])
        return shlex.join(["provision", "up", self.recipe.name, "--venv", str(self.venv)])


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What to look at. ``probe`` asks for the wedge probe; ``urls`` are servers to ask beside those that run here."""

    targets: tuple[Target, ...]
    environ: Mapping[str, str]
    cwd: Path
    probe: bool = False
    card: str | None = None
    log: LogSource | None = None
    urls: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Instruments:
    """What the examination looks through; tests put other parts here."""

    inventory: Callable[[], Inventory] = read_inventory
    kernel_log: Callable[[], KernelLog] = read_kernel_log
    probe: ProbeFunction = probe_card
    servers: Callable[[], tuple[Server, ...]] = find_servers
    metrics: Callable[[str, str | None], str] = fetch_metrics


def diagnose(examination: Examination, instruments: Instruments | None = None) -> Diagnosis:
    """Make every check that can be made here."""
    tools = instruments or Instruments()
    inventory, why_not = _read_inventory(tools)
    servers = tools.servers()
    checks = [
        *(check for target in examination.targets for check in _check_target(target, examination, inventory)),
        _check_cards(examination, inventory, why_not),
        _check_kernel_log(tools, inventory),
        *([_check_probe(examination, tools, inventory)] if examination.probe else []),
        _check_servers(servers, examination.targets, inventory),
        _check_metrics(servers, examination, tools),
        *([_check_log(examination.log, servers)] if examination.log else []),
    ]
    return Diagnosis(checks=tuple(checks))


def _read_inventory(tools: Instruments) -> tuple[Inventory | None, CardError | None]:
    try:
        return tools.inventory(), None
    except CardError as error:
        return None, error


def _check_target(target: Target, examination: Examination, inventory: Inventory | None) -> Iterator[Check]:
    distribution = target.recipe.distribution if target.recipe else "vllm"
    package = distribution.replace("-", "_")
    ready = examine_environment(target.recipe, target.venv, distribution=distribution, mend=target.mend)
    title = f"environment of {target.name}"
    findings = [*ready.findings, *_judge_recipe_side(target, examination)]
    if ready.receipt is not None and target.recipe is not None and target.recipe.card is not None:
        card = _choose(inventory, examination) if inventory else None
        changes = changes_since_verified(ready, card, _allocator_of(target.recipe))
        verified = judge_verification(ready.receipt.verification, changes, recipe=target.recipe.name)
        # Nobody can verify where there is no card; that is no fault of the environment.
        findings += verified if card is not None else (_as_note(finding) for finding in verified)
    yield checked("environment", title, f"{target.venv}: receipt, files, required patches", findings)

    running = ready.site.python if ready.site else None
    view = view_venv(target.venv, package)
    stale = judge_venv(view, running=running, environ=examination.environ)
    yield checked(
        "python", f"Python of {target.name}", f"pyvenv.cfg, bin/vllm, {len(view.packages)} package folders", stale
    )

    if ready.site is None:
        yield skipped("imports", f"what an import takes in {target.name}", "there is no environment to ask")
        return
    try:
        seen = view_imports(venv_python(target.venv), package, cwd=examination.cwd, environ=examination.environ)
    except ProvisionError as error:
        yield skipped("imports", f"what an import takes in {target.name}", str(error))
        return
    looked = f"from {examination.cwd}: {seen.origin}"
    found = judge_imports(seen, ready.site.site_packages, package)
    yield checked("imports", f"what an import takes in {target.name}", looked, found)


def _as_note(finding: Finding) -> Finding:
    return replace(finding, severity=Severity.NOTE) if finding.severity is Severity.WARNING else finding


def _allocator_of(recipe: Recipe) -> str | None:
    variables = recipe.serve.variables if recipe.serve else ()
    return next((variable.value for variable in variables if variable.name == ALLOCATOR_VARIABLE), None)


def _judge_recipe_side(target: Target, examination: Examination) -> Iterator[Finding]:
    if target.recipe is not None and target.fork_folder is not None:
        yield from judge_drafter(target.recipe, target.fork_folder, examination.environ, severity=Severity.WARNING)


def _choose(inventory: Inventory, examination: Examination) -> Card | None:
    try:
        return select_card(inventory, examination.card, environ=examination.environ)
    except (CardError, UsageError):
        return None


def _check_cards(examination: Examination, inventory: Inventory | None, why_not: CardError | None) -> Check:
    title = "cards"
    if inventory is None or not (inventory.cards or inventory.lost):
        why = ": ".join(filter(None, (why_not.what, why_not.found))) if why_not else "the driver lists no card"
        if not examination.probe:
            return skipped("cards", title, why)
        hints = why_not.hints if why_not else ("nvidia-smi -L",)
        return checked("cards", title, "the driver", [_card_error("card-missing", why, hints)])
    findings: list[Finding] = []
    for lost in inventory.lost:
        what = f"the driver counts card {lost.index} and cannot talk to it: {lost.why}"
        findings.append(_card_error("card-lost", what, ("journalctl -k -g NVRM", "sudo reboot")))
    findings += judge_order(inventory, examination.environ, who="this shell")
    card = _choose(inventory, examination)
    for target in examination.targets:
        if card is not None and target.recipe is not None:
            findings += judge_fit(card, target.recipe.card)
    names = ", ".join(f"{item.name} {item.pci}" for item in inventory.cards)
    return checked("cards", title, f"driver {inventory.driver}: {names}", findings)


def _check_kernel_log(tools: Instruments, inventory: Inventory | None) -> Check:
    title = "kernel log since boot"
    log = tools.kernel_log()
    if log.source is None:
        return skipped("kernel-log", title, f"{log.why_not} (try sudo)")
    events = events_of(log)
    cards = inventory.cards if inventory else ()
    findings = [finding for card in cards for finding in judge_events(events, card)]
    if not cards:
        findings = list(judge_events(events, None))
    return checked(
        "kernel-log",
        title,
        f"{log.source}: {count_text(len(log.lines), 'line')}, {count_text(len(events), 'Xid')}",
        findings,
    )


def _check_probe(examination: Examination, tools: Instruments, inventory: Inventory | None) -> Check:
    title = "wedge probe"
    if inventory is None or not inventory.cards:
        return skipped("probe", title, "there is no card to probe")
    chosen = _choose(inventory, examination)
    cards = (chosen,) if chosen else inventory.cards
    findings = [finding for card in cards for finding in judge_probe(card, probe=tools.probe)]
    return checked("probe", title, ", ".join(f"{card.name} {card.pci}" for card in cards), findings)


def _check_servers(servers: Sequence[Server], targets: Sequence[Target], inventory: Inventory | None) -> Check:
    title = "running servers"
    if not servers:
        return skipped("servers", title, "no vLLM server runs here (or its command line is hidden)")
    findings: list[Finding] = []
    for server in servers:
        build = read_build(server.venv) if server.venv is not None else None
        vendor = _vendor_of(server, inventory)
        findings += judge_server(server, inventory=inventory, memory_vendor=vendor, build=build)
        if len(targets) == 1:
            findings += judge_origin(server, targets[0].venv)
    looked = ", ".join(f"{server.pid} at {server.address}" for server in servers)
    return checked("servers", title, looked, findings)


def _vendor_of(server: Server, inventory: Inventory | None) -> str | None:
    """Memory vendor of the card that a server uses, where its environment names the card or there is only one."""
    if inventory is None or server.environ is None:
        return None
    try:
        found = bin_of(select_card(inventory, None, environ=server.environ))
    except (CardError, UsageError):
        return None
    return str(found) if found else None


def _check_metrics(servers: Sequence[Server], examination: Examination, tools: Instruments) -> Check:
    title = "prefix cache of running servers"
    asked = [(server.address, (server.environ or {}).get(KEY_VARIABLE)) for server in servers]
    asked += [(url.rstrip("/"), examination.environ.get(KEY_VARIABLE)) for url in examination.urls]
    if not asked:
        return skipped("metrics", title, "no server to ask (name one with --url)")
    looked: list[str] = []
    findings: list[Finding] = []
    counted = 0
    for address, key in dict(asked).items():
        try:
            counters = read_counters(parse_samples(tools.metrics(address, key)))
        except NetworkError as error:
            looked.append(f"{address}: {error.what}: {error.found}")
            continue
        if counters.prefix_queries is None:
            looked.append(f"{address}: no prefix cache counters")
            continue
        counted += 1
        share = counters.hit_share
        looked.append(f"{address}: " + ("nothing looked up yet" if share is None else f"{share:.1%} of tokens found"))
        findings += judge_prefix_cache(counters.prefix_queries, counters.prefix_hits or 0.0, address=address)
    if not counted:
        return skipped("metrics", title, "; ".join(looked))
    return checked("metrics", title, "; ".join(looked), findings)


def _check_log(source: LogSource, servers: Sequence[Server]) -> Check:
    title = "server log"
    try:
        log = condense(read_pieces(source))
    except (OSError, subprocess.SubprocessError) as error:
        return skipped("log", title, str(error))
    if not log.total:
        return skipped("log", title, f"{name_of(source)} is empty")
    looked = f"{name_of(source)}: {count_text(log.total, 'line')}"
    findings = judge_log(log, running={pid for server in servers for pid in server.pids})
    if not findings and not log.is_ready:
        return skipped("log", title, f"{looked}, none of them shows a server that is ready")
    return checked("log", title, looked, findings)


def _card_error(id_: str, what: str, act: Iterable[str]) -> Finding:
    return Finding(id=id_, severity=Severity.ERROR, subject=Subject.CARD, what=what, next=tuple(act))
