"""The card that will serve: chosen, judged by name, by its kernel log and, when asked, by the wedge probe."""

import errno
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from provisioner.counts import count_text
from provisioner.documents.recipe import CardExpectation
from provisioner.errors import CardError, ProvisionError, UsageError
from provisioner.gpu.devices import Card, CardBin, Inventory, bin_of, read_inventory, select_card
from provisioner.gpu.health import KMSG, Probe, ProbeFunction, ProbeVerdict, probe_card
from provisioner.gpu.xid import FALLEN_OFF_THE_BUS, XidEvent, events_on, explain_xid, parse_kernel_log
from provisioner.serve.findings import Finding, Severity, Subject
from provisioner.serve.launch import ChosenCard

_JOURNAL_SECONDS = 3.0
_RECORD_BYTES = 8192
_MOST_EVENTS = 3
# Their own meaning is "look at the error before this one".
_FOLLOWERS = frozenset({43, 45})


@dataclass(frozen=True, kw_only=True)
class CardView:
    """What is known of the cards: the inventory and the chosen one (None where there is none), with findings."""

    inventory: Inventory | None
    card: Card | None
    findings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True)
class KernelLog:
    """The kernel's messages since boot, or why they cannot be read."""

    lines: tuple[str, ...]
    source: str | None
    why_not: str


def view_cards(wanted: str | None, environ: Mapping[str, str], *, needed: bool, nvml: object = None) -> CardView:
    """Ask the driver and choose. Where no card is ``needed`` and none ``wanted``, there being none is no finding."""
    matters = needed or wanted is not None
    try:
        inventory = read_inventory(nvml)
    except CardError as error:
        return CardView(inventory=None, card=None, findings=(_from_error(error),) if matters else ())
    try:
        card = select_card(inventory, wanted, environ=environ)
    except (CardError, UsageError) as error:
        return CardView(inventory=inventory, card=None, findings=(_from_error(error),) if matters else ())
    return CardView(inventory=inventory, card=card, findings=tuple(_judge_lost(inventory)))


def choose(card: Card, *, vendor: str | None = None) -> ChosenCard:
    """The card as launching sees it; ``vendor`` is the user's word, which beats the guess by memory size."""
    guess = bin_of(card)
    return ChosenCard(name=card.name, uuid=card.uuid, pci=card.pci, memory_vendor=vendor or (guess and str(guess)))


def judge_fit(card: Card, expected: CardExpectation | None, *, vendor: str | None = None) -> Iterator[Finding]:
    """A warning where the recipe was validated on another card."""
    if expected is None:
        return
    found = vendor or bin_of(card)
    if card.is_cmp_170hx and found == expected.memory_vendor:
        return
    gib = card.memory_total / (1 << 30)
    if card.capability < (8, 0):
        yield Finding(
            id="card-capability",
            severity=Severity.ERROR,
            subject=Subject.CARD,
            what="the card is older than the kernels of this build (compute capability 8.0)",
            evidence=(f"{card.name} at {card.pci}: {card.capability[0]}.{card.capability[1]}",),
            next=("nvidia-smi -L", "--gpu UUID"),
        )
        return
    yield Finding(
        id="card-differs",
        severity=Severity.WARNING,
        subject=Subject.CARD,
        what="the recipe was validated on another card",
        evidence=(
            f"validated: {expected.name}, {expected.memory_gib} GB, {expected.memory_vendor}",
            f"this one: {card.name}, {gib:.0f} GB at {card.pci}" + (f", {found}" if found else ""),
        ),
        next=(f"provision {_RECIPE_OF_BIN[CardBin(found)]}",) if found else ("--memory-vendor hynix|samsung",),
    )


def judge_order(inventory: Inventory, environ: Mapping[str, str], *, who: str) -> Iterator[Finding]:
    """A warning where a rig has several cards and the driver's own order would choose among them."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    by_name = bool(visible) and all(part.strip().upper().startswith("GPU-") for part in visible.split(","))
    if len(inventory.cards) < 2 or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or by_name:
        return
    order = environ.get("CUDA_DEVICE_ORDER")
    yield Finding(
        id="device-order",
        severity=Severity.WARNING,
        subject=Subject.COMMAND,
        what=f"{who}: with several cards, CUDA's default order can hand over another one than meant",
        evidence=(
            f"CUDA_DEVICE_ORDER={order}" if order else "CUDA_DEVICE_ORDER is not set",
            f"CUDA_VISIBLE_DEVICES={visible}" if visible else "CUDA_VISIBLE_DEVICES is not set",
            *(f"card {card.index}: {card.name} {card.pci} {card.uuid}" for card in inventory.cards),
        ),
        next=("export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=GPU-<uuid>",),
    )


def judge_events(events: Sequence[XidEvent], card: Card | None) -> Iterator[Finding]:
    """What the kernel log since boot says: on ``card`` a fall off the bus is an error, the rest are warnings."""
    own = events_on(events, card.pci) if card else tuple(events)
    for code in dict.fromkeys(event.code for event in own):
        if code in _FOLLOWERS and len({event.code for event in own} - _FOLLOWERS):
            continue
        same = [event for event in own if event.code == code]
        meaning = explain_xid(code)
        lost = code == FALLEN_OFF_THE_BUS
        yield Finding(
            id=f"xid-{code}",
            severity=Severity.ERROR if lost and card else Severity.WARNING,
            subject=Subject.CARD,
            what=f"Xid {code} since boot, {count_text(len(same), 'time')}: {meaning.title}; {meaning.act}",
            evidence=tuple(event.text for event in same[-_MOST_EVENTS:]),
            next=_NEXT_OF_XID.get(code, ("provision doctor --gpu",)),
        )


def judge_probe(card: Card, *, probe: ProbeFunction = probe_card) -> Iterator[Finding]:
    """Run the wedge probe; a finding where the card does not answer."""
    result = probe(card)
    finding = _judge_probe(card, result)
    if finding is not None:
        yield finding


def read_kernel_log(kmsg: Path = KMSG, journal: str = "journalctl") -> KernelLog:
    """The kernel's messages since boot, from ``/dev/kmsg`` or else the journal; nothing is raised."""
    try:
        return KernelLog(lines=tuple(_read_kmsg(kmsg)), source=str(kmsg), why_not="")
    except OSError as error:
        closed = f"{kmsg}: {error.strerror}"
    try:
        done = subprocess.run(
            [journal, "--dmesg", "--boot", "--quiet", "--no-pager", "--output=cat"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_JOURNAL_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return KernelLog(lines=(), source=None, why_not=f"{closed}; {journal}: {error}")
    if not done.stdout:
        return KernelLog(lines=(), source=None, why_not=f"{closed}; {journal} shows no kernel messages to this user")
    return KernelLog(lines=tuple(done.stdout.splitlines()), source=journal, why_not="")


def events_of(log: KernelLog) -> tuple[XidEvent, ...]:
    """The card errors in a kernel log."""
    return parse_kernel_log(log.lines)


_RECIPE_OF_BIN = {CardBin.HYNIX: "hynix", CardBin.SAMSUNG: "samsung"}
_NEXT_OF_XID = {
    31: (
        "provision samsung (sm80-cpu-repack, and PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False)",
        "provision doctor --gpu",
    ),
    FALLEN_OFF_THE_BUS: ("sudo reboot", "check power, riser and cooling: no setting mends this"),
}


def _from_error(error: ProvisionError) -> Finding:
    is_card = isinstance(error, CardError)
    return Finding(
        id="card-missing" if is_card else "card-choice",
        severity=Severity.ERROR,
        subject=Subject.CARD if is_card else Subject.COMMAND,
        what=error.what,
        evidence=(error.found,) if error.found else (),
        next=error.hints,
    )


def _judge_lost(inventory: Inventory) -> Iterator[Finding]:
    for lost in inventory.lost:
        yield Finding(
            id="card-lost",
            severity=Severity.WARNING,
            subject=Subject.CARD,
            what=f"the driver counts card {lost.index} and cannot talk to it",
            evidence=(lost.why,),
            next=("journalctl -k -g NVRM", "sudo reboot"),
        )


def _judge_probe(card: Card, result: Probe) -> Finding | None:
    evidence = tuple(
        f"{step.bytes / 1e9:.2f} GB: " + (f"{step.seconds:.2f} s" if step.seconds is not None else "not free")
        for step in result.steps
    )
    match result.verdict:
        case ProbeVerdict.ANSWERS:
            return None
        case ProbeVerdict.WEDGED:
            return _probe_finding("card-wedged", card, result.why, evidence, ("sudo reboot",))
        case ProbeVerdict.LOST:
            return _probe_finding("card-lost", card, result.why, evidence, ("journalctl -k -g NVRM", "sudo reboot"))
        case ProbeVerdict.TOOLCHAIN:
            return Finding(
                id="card-toolchain",
                severity=Severity.ERROR,
                subject=Subject.ENVIRONMENT,
                what=result.why,
                evidence=evidence,
                next=("nvidia-smi",),
            )
        case _:
            assert_never(result.verdict)


def _probe_finding(id_: str, card: Card, why: str, evidence: tuple[str, ...], act: tuple[str, ...]) -> Finding:
    return Finding(
        id=id_,
        severity=Severity.ERROR,
        subject=Subject.CARD,
        what=f"{card.name} at {card.pci}: {why}",
        evidence=evidence,
        next=act,
    )


def _read_kmsg(path: Path) -> Iterator[str]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(descriptor, _RECORD_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:  # older records were overwritten; reading goes on with the oldest kept
                    continue
                raise
            if not record:
                return
            yield from record.decode("utf-8", "replace").splitlines()
    finally:
        os.close(descriptor)
