"""The cards of this machine as NVML sees them, and the choice of one."""

import importlib
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from provisioner.errors import CardError, UsageError
from provisioner.gpu.model import Card as Card
from provisioner.gpu.model import CardBin as CardBin
from provisioner.gpu.model import CardProcess, Link, LostCard
from provisioner.gpu.model import Inventory as Inventory
from provisioner.gpu.xid import normalize_pci

NVML_SECONDS = 20.0
_GIB = 1 << 30
_UUID = re.compile(r"GPU-[0-9a-f-]*", re.IGNORECASE)

_T = TypeVar("_T")


class NoDriverError(CardError):
    """NVML is not there, does not start or does not answer."""

    code = "no-driver"


class NoCardError(CardError):
    """No card, or not the one asked for."""

    code = "no-card"


def read_inventory(nvml: Any = None, *, timeout_seconds: float = NVML_SECONDS) -> Inventory:
    """Ask NVML (module ``pynvml``, or ``nvml`` in its place) for every card.

    Raises NoDriverError where there is no driver, it does not start, or gives no answer in ``timeout_seconds``.
    """
    module = nvml if nvml is not None else load_nvml()
    return _answer_within(timeout_seconds, lambda: _read_inventory(module))


def load_nvml() -> Any:
    """The ``pynvml`` module. Raises NoDriverError where it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise NoDriverError(
            "the Python package nvidia-ml-py is not installed", hints=("pip install nvidia-ml-py",)
        ) from error


def select_card(inventory: Inventory, wanted: str | None, *, environ: Mapping[str, str]) -> Card:
    """The card meant by ``wanted``: an index, a PCI address (``82:00``, ``0000:82:00.0``) or a UUID or its beginning.

    Without ``wanted``: what CUDA_VISIBLE_DEVICES names first, else the only card, else the only CMP 170HX.
    Raises NoCardError where there is none such, UsageError where the choice is open.
    """
    if not inventory.cards:
        raise NoCardError(
            "there is no usable NVIDIA card",
            hints=("nvidia-smi -L", "journalctl -k -g NVRM"),
            found=_describe_lost(inventory),
        )
    wish = wanted if wanted is not None else _wish_of_environment(environ, inventory)
    if wish is not None:
        return _find_card(inventory, wish.strip())
    if len(inventory.cards) == 1:
        return inventory.cards[0]
    mining = [card for card in inventory.cards if card.is_cmp_170hx]
    if len(mining) == 1:
        return mining[0]
    raise UsageError(
        "there are several cards and none is named",
        found=_list_cards(inventory.cards),
        hints=_gpu_hints(inventory.cards),
    )


def bin_of(card: Card) -> CardBin | None:
    """The bin of a CMP 170HX: 64 GB is Hynix, 40 GB Samsung; None for another size or card. A user may know better."""
    if not card.is_cmp_170hx:
        return None
    if card.memory_total > 56 * _GIB:
        return CardBin.HYNIX
    if 36 * _GIB < card.memory_total < 44 * _GIB:
        return CardBin.SAMSUNG
    return None


def visibility_of(card: Card) -> dict[str, str]:
    """Environment that makes CUDA see ``card`` alone; the driver's default order could hand over another one."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": card.uuid}


def _answer_within(seconds: float, ask: Callable[[], _T]) -> _T:
    """Run ``ask`` in a thread: NVML calls have no time limit and can hang in the driver when a card is wedged."""
    answers: queue.SimpleQueue[_T | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(ask())
        except Exception as error:  # noqa: BLE001 - handed to the caller's thread and raised there
            answers.put(error)

    threading.Thread(target=work, name="nvml", daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise NoDriverError(
            f"the NVIDIA driver gave no answer in {seconds:.0f} s",
            hints=("journalctl -k -g NVRM", "reboot the host (warm) if a card is wedged"),
        ) from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _read_inventory(nvml: Any) -> Inventory:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoDriverError(
            "the NVIDIA driver is not there or does not start", found=str(error), hints=("nvidia-smi",)
        ) from error
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        cards: list[Card] = []
        lost: list[LostCard] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                cards.append(_read_card(nvml, index, driver))
            except nvml.NVMLError as error:
                lost.append(LostCard(index=index, why=str(error)))
        return Inventory(driver=driver, cards=tuple(cards), lost=tuple(lost))
    except nvml.NVMLError as error:
        raise NoDriverError("the NVIDIA driver does not answer", found=str(error), hints=("nvidia-smi",)) from error
    finally:
        nvml.nvmlShutdown()


def _read_card(nvml: Any, index: int, driver: str) -> Card:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    pci = nvml.nvmlDeviceGetPciInfo(handle)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    device_id = getattr(pci, "pciDeviceId", None)
    power = _optional(nvml, lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle))
    return Card(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        pci=normalize_pci(_text(pci.busId)),
        pci_device=None if device_id is None else int(device_id) >> 16,
        capability=(int(major), int(minor)),
        memory_total=int(memory.total),
        memory_free=int(memory.free),
        driver=driver,
        vbios=_optional(nvml, lambda: _text(nvml.nvmlDeviceGetVbiosVersion(handle))),
        ecc=_optional(nvml, lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0])),
        link=_optional(nvml, lambda: _read_link(nvml, handle)),
        power_cap=None if power is None else power / 1000,
        clock_sm=_optional(nvml, lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
        clock_memory=_optional(nvml, lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))),
        processes=_optional(nvml, lambda: _read_processes(nvml, handle)) or (),
    )


def _read_link(nvml: Any, handle: Any) -> Link:
    return Link(
        generation=int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
        width=int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        max_generation=int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
        max_width=int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
    )


def _read_processes(nvml: Any, handle: Any) -> tuple[CardProcess, ...]:
    return tuple(
        CardProcess(pid=int(process.pid), memory=None if process.usedGpuMemory is None else int(process.usedGpuMemory))
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    )


def _optional(nvml: Any, ask: Callable[[], _T]) -> _T | None:
    """The answer, or None where this card or driver does not know the question."""
    try:
        return ask()
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission):
        return None


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _wish_of_environment(environ: Mapping[str, str], inventory: Inventory) -> str | None:
    first = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if not first:
        return None
    by_bus = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if first.isdigit() and not by_bus and len(inventory.cards) > 1:
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={first} does not name a card while CUDA_DEVICE_ORDER is not PCI_BUS_ID",
            found=_list_cards(inventory.cards),
            hints=_gpu_hints(inventory.cards),
        )
    return first


def _find_card(inventory: Inventory, wish: str) -> Card:
    found = [card for card in inventory.cards if _is_meant(card, wish)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{wish} names several cards", found=_list_cards(found), hints=_gpu_hints(found))
    lost = next((card for card in inventory.lost if wish == str(card.index)), None)
    if lost is not None:
        raise NoCardError(f"card {wish} is lost", found=lost.why, hints=("journalctl -k -g NVRM",))
    raise NoCardError(f"no card is {wish}", found=_list_cards(inventory.cards), hints=_gpu_hints(inventory.cards))


def _is_meant(card: Card, wish: str) -> bool:
    if wish.isdigit():
        return card.index == int(wish)
    if _UUID.fullmatch(wish):
        return card.uuid.lower().startswith(wish.lower())
    try:
        return card.pci == normalize_pci(wish)
    except ValueError:
        raise UsageError(
            f"{wish!r} is no card",
            expected="an index, a PCI address such as 82:00, or a UUID such as GPU-1a2b",
            found=wish,
        ) from None


def _list_cards(cards: Sequence[Card]) -> str:
    return "; ".join(f"{card.index}: {card.name} {card.pci} {card.uuid}" for card in cards)


def _gpu_hints(cards: Sequence[Card]) -> tuple[str, ...]:
    return tuple(f"--gpu {card.uuid}  ({card.name}, {card.pci})" for card in cards)


def _describe_lost(inventory: Inventory) -> str | None:
    return "; ".join(f"card {card.index}: {card.why}" for card in inventory.lost) or None
