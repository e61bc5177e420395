"""What a check on a card found, as data, JSON and Markdown; and what has changed since. Pure."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, field
from enum import StrEnum
from typing import Any

from provisioner.counts import count_text
from provisioner.errors import InvalidReceiptError
from provisioner.gpu.model import Card, Probe
from provisioner.gpu.xid import XidEvent, explain_xid
from provisioner.loading import load_json
from provisioner.records import dataclass

SCHEMA = "provision/verify/1"
FILE_NAME = "verify.json"
_GIB = 1 << 30


class Verdict(StrEnum):
    """How a stage, or the whole check, ended. Only ``bit-exact`` is a pass."""

    BIT_EXACT = "bit-exact"
    MISMATCH = "mismatch"
    CARD_FAULT = "card-fault"
    WEDGED = "wedged"
    LOST = "lost"
    TOOLCHAIN = "toolchain"
    UNSUPPORTED = "unsupported"
    NOT_RUN = "not-run"

    @property
    def exit_code(self) -> int:
        """The exit code of a command that ends with this verdict."""
        return _EXIT_CODES[self]


_EXIT_CODES = {
    Verdict.BIT_EXACT: 0,
    Verdict.MISMATCH: 1,
    Verdict.CARD_FAULT: 8,
    Verdict.WEDGED: 8,
    Verdict.LOST: 8,
    Verdict.NOT_RUN: 8,
    Verdict.TOOLCHAIN: 4,
    Verdict.UNSUPPORTED: 4,
}
# What says more about the card comes first: a wrong word on a faulty card is the card's, not the kernel's.
_BY_GRAVITY = (
    Verdict.WEDGED,
    Verdict.CARD_FAULT,
    Verdict.LOST,
    Verdict.MISMATCH,
    Verdict.TOOLCHAIN,
    Verdict.UNSUPPORTED,
    Verdict.NOT_RUN,
    Verdict.BIT_EXACT,
)


class Health(StrEnum):
    """What the Xid sources say about the card during the check."""

    WELL = "well"
    FAULT = "fault"
    UNOBSERVED = "unobserved"


class Form(StrEnum):
    """How much is checked."""

    QUICK = "quick"
    FULL = "full"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two answers that are not the same: how many 32-bit words differ of how many, and the first of them.

    ``row`` and ``column`` count words of the Marlin layout; the values are the words as unsigned hex.
    """

    left: str
    right: str
    words: int
    total: int
    row: int
    column: int
    left_value: str
    right_value: str


@dataclass(frozen=True, kw_only=True)
class CaseFailure:
    """A case that did not hold: answers that differ, or a refusal that not all share."""

    case: str
    why: str
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ballast:
    """Memory held while a stage ran. Bytes: asked, filled with the pattern, in use on the card by all, left free.

    ``wrong`` counts 32-bit words that read back changed.
    """

    asked: int
    filled: int
    used: int
    free: int
    wrong: int
    first_wrong: str | None


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """One stage: how many cases agreed, which were refused by all alike, and what did not hold."""

    name: str
    verdict: Verdict
    why: str
    seconds: float
    agreed: int = 0
    refused: int = 0
    failures: tuple[CaseFailure, ...] = ()
    ballast: Ballast | None = None


@dataclass(frozen=True, kw_only=True)
class Code:
    """One of the programs whose answers were compared: where its code lies, its digest, and where it ran."""

    role: str
    file: str
    digest: str
    device: str
    origin: str


@dataclass(frozen=True, kw_only=True)
class PatchBehaviour:
    """Whether a patched kernel behaves as its patch promises; ``checks`` are the named parts with their outcome."""

    patch: str
    verdict: Verdict
    why: str
    checks: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Real weights that were compared: layers, bytes, and bytes a second from disk to verdict."""

    folder: str
    method: str
    layers: int
    skipped: int
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The whole record. ``bound`` names what the verdict depends on; see :func:`changes_since`.

    ``created`` is an ISO 8601 time in UTC, ``seconds`` the whole check with process start.
    """

    created: str
    tool: str
    form: Form
    verdict: Verdict
    why: str
    health: Health
    bound: Mapping[str, str]
    seconds: float
    card: Card | None = None
    torch: Mapping[str, str] = field(default_factory=dict)
    schemas: Mapping[str, str] = field(default_factory=dict)
    codes: tuple[Code, ...] = ()
    stages: tuple[StageReport, ...] = ()
    behaviours: tuple[PatchBehaviour, ...] = ()
    layers: Layers | None = None
    xids: tuple[XidEvent, ...] = ()
    xids_elsewhere: tuple[XidEvent, ...] = ()
    xid_sources: tuple[str, ...] = ()
    xid_unreadable: tuple[str, ...] = ()
    probes: tuple[Probe, ...] = ()
    untested: str | None = None

    @property
    def occupancy(self) -> int:
        """The most bytes that were in use on the card while answers were compared."""
        return max((stage.ballast.used for stage in self.stages if stage.ballast), default=0)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What other commands need of a stored report."""

    created: str
    form: Form
    verdict: Verdict
    why: str
    health: Health
    bound: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that a report depends on and that is not what it was; None where it is absent."""

    what: str
    then: str | None
    now: str | None


def gravest(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of the whole from those of the parts; ``not-run`` for no parts: nothing proven is not a pass."""
    return min(verdicts, key=_BY_GRAVITY.index, default=Verdict.NOT_RUN)


def changes_since(bound: Mapping[str, str], now: Mapping[str, str]) -> tuple[Change, ...]:
    """What of ``bound`` is another today. A key that ``now`` lacks could not be read and is not judged.

    Patches are judged both ways: one added since is a change, too.
    """
    keys = [key for key in bound if key in now or key.startswith("patch ")]
    keys += [key for key in now if key.startswith("patch ") and key not in bound]
    return tuple(
        Change(what=key, then=bound.get(key), now=now.get(key)) for key in keys if bound.get(key) != now.get(key)
    )


def print_report(report: VerifyReport) -> str:
    """The JSON text of a report."""
    values = {"schema": SCHEMA, **asdict(report), "occupancy": report.occupancy, "exit": report.verdict.exit_code}
    return json.dumps(values, indent=2) + "\n"


def parse_summary(text: str, *, where: str) -> Summary:
    """What :func:`print_report` wrote, as far as other commands need it.

    Raises InvalidReceiptError for anything else.
    """
    try:
        values = load_json(text)
        if values["schema"] != SCHEMA:
            raise InvalidReceiptError("unknown schema", where=where, expected=SCHEMA, found=str(values["schema"]))
        return Summary(
            created=str(values["created"]),
            form=Form(values["form"]),
            verdict=Verdict(values["verdict"]),
            why=str(values["why"]),
            health=Health(values["health"]),
            bound={str(key): str(value) for key, value in values["bound"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidReceiptError(
            f"not a report of a check: {error!r}", where=where, hints=("provision verify",)
        ) from error


def summarize(report: VerifyReport) -> dict[str, Any]:
    """A short, path-free form for the receipt."""
    return {
        "created": report.created,
        "form": str(report.form),
        "verdict": str(report.verdict),
        "why": report.why,
        "health": str(report.health),
        "occupancy": report.occupancy,
        "bound": dict(report.bound),
    }


def describe(report: VerifyReport) -> tuple[str, ...]:
    """The report in a few lines for a terminal: the verdict first, then what it rests on."""
    lines = [f"{report.verdict}: {report.why}"]
    if report.card is not None:
        lines.append(f"card: {_card_line(report.card)}")
    lines += [_stage_line(stage) for stage in report.stages]
    lines += [f"patch {behaviour.patch}: {behaviour.verdict}: {behaviour.why}" for behaviour in report.behaviours]
    if report.layers is not None:
        lines.append(f"weights: {_layers_line(report.layers)}")
    lines += [
        f"Xid {event.code}: {explain_xid(event.code).title}; {explain_xid(event.code).act}" for event in report.xids
    ]
    lines.append(f"health: {_health_line(report)}")
    if report.untested:
        lines.append(f"not tested: {report.untested}")
    return tuple(lines)


def print_markdown(report: VerifyReport) -> str:
    """The report for people to pass on."""
    sections = [
        f"# {report.verdict}: {report.why}",
        f"{report.form} form, {report.created}, {report.seconds:.1f} s, {report.tool}.",
        "## Depends on",
        _table(("what", "value"), report.bound.items()),
    ]
    if report.card is not None:
        sections += ["## Card", _table(("what", "value"), _card_rows(report.card))]
    if report.stages:
        sections += ["## Stages", _table(_STAGE_HEADERS, map(_stage_row, report.stages))]
    failures = [(stage.name, failure) for stage in report.stages for failure in stage.failures]
    if failures:
        sections += ["## What did not hold", "\n".join(_failure_lines(failures))]
    if report.codes:
        sections += [
            "## Compared code",
            _table(
                ("role", "file", "sha256", "ran on", "from"),
                ((code.role, code.file, code.digest, code.device, code.origin) for code in report.codes),
            ),
        ]
    if report.schemas:
        sections += ["## Operators", "\n".join(f"* `{schema}`" for schema in report.schemas.values())]
    if report.behaviours:
        sections += ["## Patched kernels", _table(("patch", "verdict", "why"), map(_behaviour_row, report.behaviours))]
    if report.layers is not None:
        sections += ["## Real weights", _layers_line(report.layers)]
    sections += ["## Health", _health_line(report)]
    sections += [f"* `{event.text}`" for event in (*report.xids, *report.xids_elsewhere)]
    if report.untested:
        sections += ["## Not tested", report.untested]
    return "\n\n".join(sections) + "\n"


_STAGE_HEADERS = ("stage", "verdict", "cases agreed", "refused by all", "GiB filled", "GiB in use", "s", "why")


def _stage_row(stage: StageReport) -> tuple[str, ...]:
    ballast = stage.ballast
    return (
        stage.name,
        str(stage.verdict),
        str(stage.agreed),
        str(stage.refused),
        f"{ballast.filled / _GIB:.2f}" if ballast else "0",
        f"{ballast.used / _GIB:.2f}" if ballast else "",
        f"{stage.seconds:.1f}",
        stage.why,
    )


def _stage_line(stage: StageReport) -> str:
    counts = count_text(stage.agreed, "case agrees", "cases agree")
    counts += f", {stage.refused} refused alike" if stage.refused else ""
    at = f" with {stage.ballast.used / _GIB:.1f} GiB in use" if stage.ballast else ""
    reason = f": {stage.why}" if stage.verdict is not Verdict.BIT_EXACT else ""
    return f"{stage.name}: {stage.verdict}{reason} ({counts}{at}, {stage.seconds:.1f} s)"


def _failure_lines(failures: Iterable[tuple[str, CaseFailure]]) -> Iterable[str]:
    for stage, failure in failures:
        yield f"* {stage}, {failure.case}: {failure.why}"
        for difference in failure.differences:
            yield (
                f"  * {difference.left} and {difference.right} differ in {difference.words} of {difference.total} "
                f"words, first at row {difference.row}, column {difference.column}: "
                f"{difference.left_value} and {difference.right_value}"
            )


def _behaviour_row(behaviour: PatchBehaviour) -> tuple[str, ...]:
    return behaviour.patch, str(behaviour.verdict), behaviour.why


def _layers_line(layers: Layers) -> str:
    rate = layers.bytes / layers.seconds / 1e9 if layers.seconds else 0.0
    skipped = f", {layers.skipped} of a shape that no Marlin kernel takes" if layers.skipped else ""
    count = count_text(layers.layers, "layer")
    return f"{count} ({layers.method}, {layers.bytes / _GIB:.2f} GiB, {rate:.2f} GB/s){skipped}"


def _health_line(report: VerifyReport) -> str:
    sources = ", ".join(report.xid_sources)
    match report.health:
        case Health.WELL:
            return f"well: no new Xid ({sources})"
        case Health.FAULT:
            return f"fault: {', '.join(f'Xid {event.code}' for event in report.xids)} ({sources})"
        case Health.UNOBSERVED if not report.xid_unreadable:
            return "unobserved: nothing was run"
        case Health.UNOBSERVED:
            return f"unobserved: no source of Xids could be read ({'; '.join(report.xid_unreadable)})"


def _card_line(card: Card) -> str:
    return f"{card.name}, {card.memory_total / _GIB:.1f} GiB, {card.pci}, {card.uuid}, driver {card.driver}"


def _card_rows(card: Card) -> Iterable[tuple[str, str]]:
    link, unknown = card.link, "unknown"
    yield "name", card.name
    yield "UUID", card.uuid
    yield "PCI address", card.pci
    yield "compute capability", ".".join(map(str, card.capability))
    yield "memory", f"{card.memory_total / _GIB:.2f} GiB, {card.memory_free / _GIB:.2f} free"
    yield "driver", card.driver
    yield "VBIOS", card.vbios or unknown
    yield "ECC", unknown if card.ecc is None else "on" if card.ecc else "off"
    yield (
        "PCIe link",
        f"gen {link.generation} x{link.width} (at most gen {link.max_generation} x{link.max_width})"
        if link
        else unknown,
    )
    yield "power cap", f"{card.power_cap:.0f} W" if card.power_cap is not None else unknown
    yield "clocks", f"SM {card.clock_sm or unknown} MHz, memory {card.clock_memory or unknown} MHz"
    yield "other processes", str(len(card.processes))


def _table(headers: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = tuple(headers)
    lines = [_table_row(titles), _table_row("---" for _ in titles)]
    return "\n".join(lines + [_table_row(row) for row in rows])


def _table_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
