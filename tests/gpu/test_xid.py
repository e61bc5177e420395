"""Kernel lines as drivers of several generations write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.gpu.xid import XidEvent, events_on, explain_xid, normalize_pci, parse_kernel_log

FAULT = (
    "NVRM: Xid (PCI:0000:81:00): 31, pid=13332, name=python3, Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS "
    "GPCCLIENT_T1_1 faulted @ 0x7f29_5b8c9000. Fault is of type FAULT_REGION_VIOLATION ACCESS_TYPE_VIRT_WRITE"
)
OFF_BUS = "NVRM: Xid (PCI:0000:82:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
OFF_BUS_UNNUMBERED = (
    "NVRM: The NVIDIA GPU 0000:82:00.0 (PCI ID: 10de:20c2) installed in this system has fallen off the bus and is not "
    "responding to commands."
)


def test_fault_names_card_code_and_process() -> None:
    assert parse_kernel_log([FAULT]) == (
        XidEvent(pci="0000:81:00.0", code=31, text=FAULT, pid=13332, process="python3"),
    )


@pytest.mark.parametrize(
    "prefix",
    ["", "[  123.456789] ", "[Mon Nov 30 12:00:00 2026] ", "3,1201,987654321,-;", "Nov 30 12:00:00 host kernel: "],
)
def test_prefix_does_not_matter(prefix: str) -> None:
    (event,) = parse_kernel_log([prefix + FAULT])
    assert (event.pci, event.code, event.text) == ("0000:81:00.0", 31, FAULT)


def test_unknown_process_is_none() -> None:
    (event,) = parse_kernel_log([OFF_BUS])
    assert (event.code, event.pid, event.process) == (79, None, None)


def test_older_driver_without_pci_prefix() -> None:
    (event,) = parse_kernel_log(["NVRM: Xid (0000:03:00): 13, Graphics Exception"])
    assert (event.pci, event.code) == ("0000:03:00.0", 13)


def test_code_at_end_of_line() -> None:
    (event,) = parse_kernel_log(["NVRM: Xid (PCI:0000:81:00): 62"])
    assert event.code == 62


@pytest.mark.parametrize(
    "lines",
    [
        [OFF_BUS_UNNUMBERED],
        [
            "NVRM: The NVIDIA GPU 0000:82:00.0 (PCI ID: 10de:20c2)",
            "NVRM: installed in this system has",
            "NVRM: fallen off the bus and is not responding to commands.",
        ],
        [
            "3,9,1,-;NVRM: The NVIDIA GPU 0000:82:00.0 (PCI ID: 10de:20c2)\\x0aNVRM: installed in this system has"
            "\\x0aNVRM: fallen off the bus and is not responding to commands."
        ],
        ["NVRM: GPU 0000:82:00.0: GPU has fallen off the bus."],
    ],
    ids=["one-line", "three-lines", "one-record", "short"],
)
def test_fallen_off_the_bus_without_a_number(lines: list[str]) -> None:
    (event,) = parse_kernel_log(lines)
    assert (event.pci, event.code) == ("0000:82:00.0", 79)


def test_lines_far_apart_are_not_one_message() -> None:
    lines = [
        "NVRM: The NVIDIA GPU 0000:82:00.0 (PCI ID: 10de:20c2)",
        *["usb 1-1: reset"] * 3,
        "mice have fallen off the bus",
    ]
    assert parse_kernel_log(lines) == ()


def test_identity_line_is_no_event() -> None:
    assert parse_kernel_log(["NVRM: GPU at PCI:0000:81:00: GPU-00000000-0000-0000-0000-000000000000"]) == ()


def test_events_keep_order_and_filter_by_card() -> None:
    events = parse_kernel_log([FAULT, OFF_BUS, "NVRM: Xid (PCI:0000:81:00): 45, pid='<unknown>', Ch 00000008"])
    assert [event.code for event in events] == [31, 79, 45]
    assert [event.code for event in events_on(events, "81:00")] == [31, 45]
    assert [event.code for event in events_on(events, "0000:82:00.0")] == [79]


@pytest.mark.parametrize(
    ("address", "full"),
    [
        ("82:00", "0000:82:00.0"),
        ("82:00.0", "0000:82:00.0"),
        ("0000:82:00", "0000:82:00.0"),
        ("00000000:0A:00.0", "0000:0a:00.0"),
        ("PCI:0000:81:00", "0000:81:00.0"),
        ("10000:01:00.0", "10000:01:00.0"),
    ],
)
def test_addresses(address: str, full: str) -> None:
    assert normalize_pci(address) == full
    assert normalize_pci(full) == full


@pytest.mark.parametrize("address", ["", "0", "82", "GPU-82:00", "82:00.9", "x82:00", "82:00:00:00.0"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="is not a PCI address"):
        normalize_pci(address)


def test_every_meaning_says_what_to_do() -> None:
    assert "sm80-cpu-repack" in explain_xid(31).act
    assert "Xid errors" in explain_xid(999).act


@given(st.lists(st.text()))
def test_any_text_is_parsed_without_an_exception(lines: list[str]) -> None:
    assert all(event.code >= 0 for event in parse_kernel_log(lines))
