"""Kernel log lines to card events. Pure.

The NVIDIA driver writes each error number ("Xid") as ``NVRM: Xid (PCI:0000:81:00): 31, pid=…``; older drivers leave out
``PCI:``. A card that fell off the bus can be reported without a number, on one line or spread over three.
"""

import re
from collections.abc import Iterable, Iterator

from provisioner.records import dataclass

_ADDRESS = r"(?:PCI:)?(?P<address>(?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{1,2}:[0-9A-Fa-f]{1,2}(?:\.[0-7])?)"
_XID = re.compile(rf"NVRM:\s+Xid\s+\({_ADDRESS}\):\s+(?P<code>\d+)(?:,\s*(?P<detail>.*))?")
_PROCESS = re.compile(r"pid='?(?P<pid>\d+)'?(?:,\s*name='?(?P<name>[^,']+)'?)?")
_FALLEN_FROM = re.compile(rf"NVRM:\s+(?:The NVIDIA GPU|GPU)\s+(?:at\s+)?{_ADDRESS}", re.IGNORECASE)
_FALLEN = re.compile(r"fallen off the bus", re.IGNORECASE)
_PCI = re.compile(
    r"(?:PCI:)?(?:(?P<domain>[0-9a-f]{1,8}):)?(?P<bus>[0-9a-f]{1,2}):(?P<device>[0-9a-f]{1,2})(?:\.(?P<function>[0-7]))?",
    re.IGNORECASE,
)
# The driver prints the parts of one message as one record or as neighbours; anything further away is another message.
_NEIGHBOUR_LINES = 3

FALLEN_OFF_THE_BUS = 79


@dataclass(frozen=True, kw_only=True)
class XidEvent:
    """One error of one card: bus address as ``0000:82:00.0``, the driver's number, and the line it came from.

    ``code`` is 79 where the driver said "fallen off the bus" without a number.
    """

    pci: str
    code: int
    text: str
    pid: int | None = None
    process: str | None = None


@dataclass(frozen=True, kw_only=True)
class XidMeaning:
    """What an Xid says, and what to do about it, in one short sentence each."""

    title: str
    act: str


_REBOOT = "reboot the host (warm): the card does not come back by itself"
_MEANINGS = {
    8: XidMeaning(title="the card stopped processing", act="look for overheating and power; run the wedge probe"),
    13: XidMeaning(
        title="graphics engine exception", act="run verify again; a repeat points at the card or the driver"
    ),
    31: XidMeaning(
        title="memory page fault on the card",
        act="trust this, not the Python trace; on sm80 apply sm80-cpu-repack and export "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False",
    ),
    32: XidMeaning(title="corrupted push buffer", act="check the PCIe link and riser"),
    38: XidMeaning(title="driver firmware error", act="reboot the host; update the driver if it repeats"),
    43: XidMeaning(title="the card stopped a faulty context", act="look at the Xid before this one"),
    45: XidMeaning(title="context cleaned up after an earlier error", act="look at the Xid before this one"),
    48: XidMeaning(title="double-bit memory error", act="the memory is failing: reset or replace the card"),
    61: XidMeaning(title="internal microcontroller halted", act=_REBOOT),
    62: XidMeaning(title="internal microcontroller halted", act=_REBOOT),
    63: XidMeaning(title="memory page retired or row remapped", act="reset the card; watch for more"),
    64: XidMeaning(title="page retirement or row remapping failed", act="the memory is failing: replace the card"),
    74: XidMeaning(title="NVLink error", act="check the link"),
    79: XidMeaning(
        title="the card has fallen off the bus",
        act="check power, riser and cooling, then reboot; Samsung cards do this under sustained load",
    ),
    92: XidMeaning(
        title="high rate of single-bit memory errors", act="the memory is failing: plan to replace the card"
    ),
    94: XidMeaning(title="contained memory error", act="restart the process; watch for more"),
    95: XidMeaning(title="uncontained memory error", act="reset the card"),
    109: XidMeaning(title="context switch timed out", act="run the wedge probe"),
    119: XidMeaning(title="the card's system processor does not answer", act=_REBOOT),
    120: XidMeaning(title="the card's system processor failed", act=_REBOOT),
    154: XidMeaning(title="the driver asks for a recovery", act="do what the line names (reset or reboot)"),
}
_UNKNOWN = XidMeaning(
    title="an error of the card or the driver", act="look the number up in NVIDIA's list of Xid errors"
)


def explain_xid(code: int) -> XidMeaning:
    """What ``code`` means; a general answer for a number not in the table."""
    return _MEANINGS.get(code, _UNKNOWN)


def normalize_pci(address: str) -> str:
    """A PCI address in full, ``dddd:bb:dd.f`` in lower case, from ``82:00``, ``82:00.0``, ``0000:82:00`` or ``PCI:…``.

    Raises ValueError for anything else.
    """
    match = _PCI.fullmatch(address.strip())
    if match is None:
        raise ValueError(f"{address!r} is not a PCI address such as 82:00 or 0000:82:00.0")
    domain = int(match["domain"] or "0", 16)
    return f"{domain:04x}:{int(match['bus'], 16):02x}:{int(match['device'], 16):02x}.{match['function'] or '0'}"


def parse_kernel_log(lines: Iterable[str]) -> tuple[XidEvent, ...]:
    """Events in log order. ``lines`` are kernel messages with or without a prefix (time stamp, ``/dev/kmsg`` header).

    A line break inside a record may be literal or written ``\\x0a``, as ``/dev/kmsg`` does.
    """
    events: list[XidEvent] = []
    accused: str | None = None
    distance = 0
    for line in _split_records(lines):
        event = _parse_xid(line)
        if event is not None:
            events.append(event)
            accused = None
            continue
        named = _FALLEN_FROM.search(line)
        if named is not None:
            accused, distance = normalize_pci(named["address"]), 0
        elif accused is not None:
            distance += 1
        if accused is not None and distance < _NEIGHBOUR_LINES and _FALLEN.search(line):
            events.append(XidEvent(pci=accused, code=FALLEN_OFF_THE_BUS, text=line.strip()))
            accused = None
    return tuple(events)


def events_on(events: Iterable[XidEvent], pci: str) -> tuple[XidEvent, ...]:
    """Those of the card at ``pci`` (the driver leaves the function out, so it is not compared)."""
    slot = normalize_pci(pci).rpartition(".")[0]
    return tuple(event for event in events if event.pci.rpartition(".")[0] == slot)


def _split_records(lines: Iterable[str]) -> Iterator[str]:
    for record in lines:
        yield from record.replace("\\x0a", "\n").splitlines()


def _parse_xid(line: str) -> XidEvent | None:
    match = _XID.search(line)
    if match is None:
        return None
    process = _PROCESS.search(match["detail"] or "")
    return XidEvent(
        pci=normalize_pci(match["address"]),
        code=int(match["code"]),
        text=line[match.start() :].strip(),
        pid=int(process["pid"]) if process else None,
        process=process["name"] if process else None,
    )
