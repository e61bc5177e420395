"""Cards, and what was seen of their health. Pure."""

import re
from enum import StrEnum

from provisioner.gpu.xid import XidEvent
from provisioner.records import dataclass

# PCI device ids of the CMP 170HX (a modified driver can name the card differently).
_CMP_170HX_IDS = frozenset({0x20C2, 0x2082})
_CMP_170HX_NAME = re.compile(r"CMP\s*170HX", re.IGNORECASE)


class CardBin(StrEnum):
    """Memory vendor of a CMP 170HX, told by size: the driver does not say it."""

    HYNIX = "hynix"
    SAMSUNG = "samsung"


@dataclass(frozen=True, kw_only=True)
class Link:
    """PCIe generation and lane count, now and at most (a sleeping card shows a lower generation)."""

    generation: int
    width: int
    max_generation: int
    max_width: int


@dataclass(frozen=True, kw_only=True)
class CardProcess:
    """A process with memory on the card; ``memory`` in bytes where the driver says it."""

    pid: int
    memory: int | None


@dataclass(frozen=True, kw_only=True)
class Card:
    """One card. Memory in bytes, clocks in MHz, power in watts; None where the driver does not say."""

    index: int
    name: str
    uuid: str
    pci: str
    pci_device: int | None
    capability: tuple[int, int]
    memory_total: int
    memory_free: int
    driver: str
    vbios: str | None
    ecc: bool | None
    link: Link | None
    power_cap: float | None
    clock_sm: int | None
    clock_memory: int | None
    processes: tuple[CardProcess, ...]

    @property
    def is_cmp_170hx(self) -> bool:
        """Whether it is one, by PCI id or name."""
        return self.pci_device in _CMP_170HX_IDS or _CMP_170HX_NAME.search(self.name) is not None


@dataclass(frozen=True, kw_only=True)
class LostCard:
    """A card that the driver counts and cannot talk to."""

    index: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """All cards in PCI bus order, which is NVML's order."""

    driver: str
    cards: tuple[Card, ...]
    lost: tuple[LostCard, ...]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the sources said between two moments.

    ``sources`` could be read at both; ``unreadable`` says why the others could not. ``events`` are on the watched card,
    ``elsewhere`` on others.
    """

    sources: tuple[str, ...]
    unreadable: tuple[str, ...]
    events: tuple[XidEvent, ...]
    elsewhere: tuple[XidEvent, ...]

    @property
    def is_observed(self) -> bool:
        return bool(self.sources)


class ProbeVerdict(StrEnum):
    """What the wedge probe found."""

    ANSWERS = "answers"
    WEDGED = "wedged"
    LOST = "lost"
    TOOLCHAIN = "toolchain"


@dataclass(frozen=True, kw_only=True)
class ProbeStep:
    """``bytes`` allocated, written and freed in ``seconds``; None where so much was not free."""

    bytes: int
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Verdict of one probe, the steps that it got through, and why it ended as it did."""

    verdict: ProbeVerdict
    steps: tuple[ProbeStep, ...]
    why: str
    seconds: float
