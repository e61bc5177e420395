"""What NVML says, and which card is meant."""

import threading

import pytest

from provisioner.errors import UsageError
from provisioner.gpu.devices import (
    NoCardError,
    NoDriverError,
    bin_of,
    read_inventory,
    select_card,
    visibility_of,
)
from provisioner.gpu.model import CardBin, CardProcess, Link, LostCard
from tests.support.fake_nvml import GIB, FakeCard, FakeNvml, mixed_rig


def test_a_card_in_full() -> None:
    nvml = FakeNvml(cards=[FakeCard(processes=((42, GIB), (43, None)))])
    inventory = read_inventory(nvml)
    (card,) = inventory.cards
    assert (card.name, card.pci, card.pci_device, card.capability) == (
        "NVIDIA CMP 170HX",
        "0000:82:00.0",
        0x20C2,
        (8, 0),
    )
    assert (card.memory_total, card.memory_free, card.driver) == (64 * GIB, 63 * GIB, "610.43.03")
    assert card.vbios == "92.00.60.00.01"
    assert card.ecc is True
    assert card.link == Link(generation=1, width=4, max_generation=4, max_width=16)
    assert (card.power_cap, card.clock_sm, card.clock_memory) == (250.0, 1410, 1458)
    assert card.processes == (CardProcess(pid=42, memory=GIB), CardProcess(pid=43, memory=None))
    assert nvml.open_sessions == 0


def test_what_a_card_does_not_say_is_none() -> None:
    nvml = FakeNvml(cards=[FakeCard(unsupported=frozenset({"vbios", "ecc", "link", "power"}))])
    (card,) = read_inventory(nvml).cards
    assert (card.vbios, card.ecc, card.link, card.power_cap) == (None, None, None, None)


def test_a_lost_card_does_not_hide_the_others() -> None:
    nvml = mixed_rig()
    nvml.cards[1].lost = True
    inventory = read_inventory(nvml)
    assert [card.index for card in inventory.cards] == [0, 2]
    assert inventory.lost == (LostCard(index=1, why="GPU is lost"),)
    with pytest.raises(NoCardError, match="card 1 is lost") as caught:
        select_card(inventory, "1", environ={})
    assert caught.value.exit_code == 8


def test_no_driver() -> None:
    with pytest.raises(NoDriverError, match=r"does not start \(found Driver Not Loaded\)"):
        read_inventory(FakeNvml(broken=True))


def test_a_driver_that_hangs_is_given_up() -> None:
    hang = threading.Event()
    try:
        with pytest.raises(NoDriverError, match="gave no answer"):
            read_inventory(FakeNvml(hang=hang), timeout_seconds=0.1)
    finally:
        hang.set()


def test_no_card_at_all() -> None:
    with pytest.raises(NoCardError) as caught:
        select_card(read_inventory(FakeNvml(cards=[])), None, environ={})
    assert caught.value.exit_code == 8


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        ("0", 0),
        ("2", 2),
        ("82:00", 1),
        ("0000:82:00.0", 1),
        ("c1:00.0", 2),
        ("GPU-2222", 0),
        ("gpu-12345678-AAAA-bbbb-cccc-000000000003", 2),
    ],
)
def test_names_of_a_card(wanted: str, index: int) -> None:
    assert select_card(read_inventory(mixed_rig()), wanted, environ={}).index == index


def test_an_open_choice_lists_the_cards() -> None:
    inventory = read_inventory(mixed_rig())
    with pytest.raises(UsageError, match="GPU-1 names several cards") as caught:
        select_card(inventory, "GPU-1", environ={})
    assert len(caught.value.hints) == 2
    with pytest.raises(UsageError, match="none is named"):
        select_card(inventory, None, environ={})


def test_nonsense_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="'the big one' is no card"):
        select_card(read_inventory(mixed_rig()), "the big one", environ={})


def test_absent_cards() -> None:
    with pytest.raises(NoCardError, match=r"no card is 83:00"):
        select_card(read_inventory(mixed_rig()), "83:00", environ={})


def test_the_only_170hx_is_taken_beside_a_geforce() -> None:
    nvml = mixed_rig()
    del nvml.cards[2]
    assert select_card(read_inventory(nvml), None, environ={}).pci == "0000:82:00.0"


def test_environment_names_a_card() -> None:
    inventory = read_inventory(mixed_rig())
    by_uuid = {"CUDA_VISIBLE_DEVICES": "GPU-12345678,GPU-2222"}
    assert select_card(inventory, None, environ=by_uuid).index == 2
    by_bus = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert select_card(inventory, None, environ=by_bus).index == 1
    assert select_card(inventory, "0", environ=by_bus).index == 0


def test_an_index_in_the_drivers_default_order_is_refused() -> None:
    with pytest.raises(UsageError, match="CUDA_DEVICE_ORDER is not PCI_BUS_ID"):
        select_card(read_inventory(mixed_rig()), None, environ={"CUDA_VISIBLE_DEVICES": "1"})
    assert select_card(read_inventory(FakeNvml()), None, environ={"CUDA_VISIBLE_DEVICES": "0"}).index == 0


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        (FakeCard(total=64 * GIB), CardBin.HYNIX),
        (FakeCard(total=40 * GIB), CardBin.SAMSUNG),
        (FakeCard(total=8 * GIB), None),
        (FakeCard(name="NVIDIA Graphics Device", total=40 * GIB), CardBin.SAMSUNG),
        (FakeCard(name="NVIDIA A100-SXM4-40GB", device=0x20B010DE, total=40 * GIB), None),
    ],
)
def test_bins_by_memory(card: FakeCard, expected: CardBin | None) -> None:
    (found,) = read_inventory(FakeNvml(cards=[card])).cards
    assert bin_of(found) == expected


def test_only_the_chosen_card_is_visible() -> None:
    card = select_card(read_inventory(mixed_rig()), "82:00", environ={})
    assert visibility_of(card) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": card.uuid}
