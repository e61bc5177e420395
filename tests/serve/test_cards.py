"""The card that serves: chosen in a mixed rig, judged by its recipe, its kernel log and its probe."""

from pathlib import Path

import pytest

from provisioner.documents.recipe import CardExpectation
from provisioner.gpu.devices import read_inventory
from provisioner.gpu.health import Probe, ProbeStep, ProbeVerdict
from provisioner.serve.cards import (
    choose,
    events_of,
    judge_events,
    judge_fit,
    judge_order,
    judge_probe,
    read_kernel_log,
    view_cards,
)
from provisioner.serve.findings import Severity, Subject, exit_code_of
from tests.support.fake_nvml import GIB, FakeCard, FakeNvml

HYNIX = FakeCard(uuid="GPU-aaaa0001", bus="00000000:82:00.0")
SAMSUNG = FakeCard(uuid="GPU-bbbb0002", bus="00000000:81:00.0", total=40 * GIB, free=39 * GIB)
GEFORCE = FakeCard(
    name="NVIDIA GeForce RTX 3090", uuid="GPU-cccc0003", bus="00000000:01:00.0", device=0x220410DE, total=24 * GIB,
    free=20 * GIB, capability=(8, 6),
)  # fmt: skip
OLD = FakeCard(name="Tesla P40", uuid="GPU-dddd0004", device=0x1B3810DE, total=24 * GIB, capability=(6, 1))
RIG = [GEFORCE, SAMSUNG, HYNIX]
EXPECTED = CardExpectation(
    name="NVIDIA CMP 170HX", compute_capability=(8, 0), memory_gib=64, memory_vendor="hynix", driver=None
)
XID31 = (
    "NVRM: Xid (PCI:0000:81:00): 31, pid=13332, name=python3, Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS "
    "GPCCLIENT_T1_1 faulted @ 0x7f29_5b8c9000. Fault is of type FAULT_REGION_VIOLATION ACCESS_TYPE_VIRT_WRITE"
)
XID45 = "NVRM: Xid (PCI:0000:81:00): 45, pid='<unknown>', name=<unknown>, Ch 00000008"
XID79 = "NVRM: Xid (PCI:0000:82:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def view(wanted=None, cards=None, environ=None, needed=True):
    return view_cards(wanted, environ or {}, needed=needed, nvml=FakeNvml(cards=RIG if cards is None else cards))


@pytest.mark.parametrize(
    ("wanted", "uuid"), [("GPU-bbbb0002", "GPU-bbbb0002"), ("82:00", "GPU-aaaa0001"), ("0", "GPU-cccc0003")]
)
def test_a_card_of_a_mixed_rig_is_chosen_by_name_address_or_number(wanted, uuid):
    seen = view(wanted)
    assert seen.card is not None
    assert (seen.card.uuid, seen.findings) == (uuid, ())
    assert choose(seen.card).uuid == uuid


def test_an_open_choice_is_an_error_of_the_command_that_lists_the_cards():
    (finding,) = view().findings
    assert (finding.id, finding.subject) == ("card-choice", Subject.COMMAND)
    assert len(finding.next) == 3


def test_no_card_is_an_error_only_where_one_is_needed_or_wanted():
    assert exit_code_of(view(cards=[], needed=True).findings) == 8
    assert exit_code_of(view("0", cards=[], needed=False).findings) == 8
    assert view(cards=[], needed=False).findings == ()


def test_a_lost_neighbour_is_a_warning():
    (finding,) = view("GPU-aaaa0001", [HYNIX, FakeCard(lost=True, uuid="GPU-x", bus="00000000:83:00.0")]).findings
    assert (finding.id, finding.severity) == ("card-lost", Severity.WARNING)


@pytest.mark.parametrize(
    ("card", "vendor", "chosen"),
    [(HYNIX, None, "hynix"), (SAMSUNG, None, "samsung"), (GEFORCE, None, None), (HYNIX, "samsung", "samsung")],
)
def test_the_memory_vendor_is_told_by_size_unless_the_user_knows_better(card, vendor, chosen):
    seen = view(cards=[card]).card
    assert seen is not None
    assert choose(seen, vendor=vendor).memory_vendor == chosen


@pytest.mark.parametrize(
    ("card", "id_", "act"),
    [
        (HYNIX, None, None),
        (SAMSUNG, "card-differs", "provision samsung"),
        (GEFORCE, "card-differs", "--memory-vendor hynix|samsung"),
        (OLD, "card-capability", "nvidia-smi -L"),
    ],
)
def test_a_recipe_on_another_card(card, id_, act):
    seen = view(cards=[card]).card
    assert seen is not None
    found = list(judge_fit(seen, EXPECTED))
    assert [finding.id for finding in found] == ([id_] if id_ else [])
    assert [finding.next[0] for finding in found] == ([act] if act else [])
    assert list(judge_fit(seen, None)) == []


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, True),
        ({"CUDA_VISIBLE_DEVICES": "1"}, True),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDA_VISIBLE_DEVICES": "1"}, True),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"}, False),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aaaa0001"}, False),
    ],
)
def test_the_drivers_order_in_a_mixed_rig(environ, found):
    inventory = read_inventory(FakeNvml(cards=RIG))
    assert bool(list(judge_order(inventory, environ, who="this shell"))) is found
    assert list(judge_order(read_inventory(FakeNvml(cards=[HYNIX])), environ, who="this shell")) == []


def kernel_log(tmp_path: Path, *lines: str):
    path = tmp_path / "kmsg"
    path.write_text("".join(f"4,{n},1000,-;{line}\n SUBSYSTEM=pci\n" for n, line in enumerate(lines)), encoding="utf-8")
    return read_kernel_log(path)


def test_the_kernel_log_since_boot(tmp_path):
    log = kernel_log(tmp_path, "usb 1-1: new device", XID31, XID45, XID79)
    samsung, hynix = view("GPU-bbbb0002").card, view("GPU-aaaa0001").card
    (fault,) = judge_events(events_of(log), samsung)
    assert (fault.id, fault.severity, fault.evidence) == ("xid-31", Severity.WARNING, (XID31,))
    assert "sm80-cpu-repack" in fault.next[0]
    (lost,) = judge_events(events_of(log), hynix)
    assert (lost.id, lost.severity) == ("xid-79", Severity.ERROR)
    everything = {finding.id: finding.severity for finding in judge_events(events_of(log), None)}
    assert everything == {"xid-31": Severity.WARNING, "xid-79": Severity.WARNING}


def test_an_xid_45_alone_is_shown(tmp_path):
    (finding,) = judge_events(events_of(kernel_log(tmp_path, XID45)), None)
    assert finding.id == "xid-45"


def test_a_kernel_log_that_cannot_be_read_says_why(tmp_path):
    log = read_kernel_log(tmp_path / "none", journal="no-such-program")
    assert log.source is None
    assert "none" in log.why_not
    assert "no-such-program" in log.why_not


@pytest.mark.parametrize(
    ("verdict", "id_", "code"),
    [
        (ProbeVerdict.ANSWERS, None, 0),
        (ProbeVerdict.WEDGED, "card-wedged", 8),
        (ProbeVerdict.LOST, "card-lost", 8),
        (ProbeVerdict.TOOLCHAIN, "card-toolchain", 5),
    ],
)
def test_the_probe(verdict, id_, code):
    card = view("GPU-aaaa0001").card
    assert card is not None
    steps = (ProbeStep(bytes=170_000_000, seconds=0.1), ProbeStep(bytes=4_000_000_000, seconds=None))
    found = list(judge_probe(card, probe=lambda _: Probe(verdict=verdict, steps=steps, why="so", seconds=1.0)))
    assert [finding.id for finding in found] == ([id_] if id_ else [])
    assert exit_code_of(found) == code
    if found:
        assert found[0].evidence == ("0.17 GB: 0.10 s", "4.00 GB: not free")
