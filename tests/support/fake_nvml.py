"""A stand-in for the module ``pynvml``: the same names, answers from plain data."""

# ruff: noqa: N801, N802, N815, N818 - the names are those of pynvml

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_FunctionNotFound(NVMLError):
    pass


class NVMLError_NoPermission(NVMLError):
    pass


class NVMLError_GpuIsLost(NVMLError):
    pass


class NVMLError_Timeout(NVMLError):
    pass


@dataclass
class FakeCard:
    name: str = "NVIDIA CMP 170HX"
    uuid: str = "GPU-11111111-aaaa-bbbb-cccc-000000000001"
    bus: str = "00000000:82:00.0"
    device: int = 0x20C210DE
    total: int = 64 * GIB
    free: int = 63 * GIB
    capability: tuple[int, int] = (8, 0)
    lost: bool = False
    unsupported: frozenset[str] = frozenset()
    processes: tuple[tuple[int, int | None], ...] = ()


@dataclass
class FakeNvml:
    """Cards in bus order; no answer before ``hang`` is set; ``xids`` are handed out as events, oldest first."""

    cards: list[FakeCard] = field(default_factory=lambda: [FakeCard()])
    driver: str | bytes = "610.43.03"
    broken: bool = False
    hang: threading.Event | None = None
    xids: list[tuple[str, int]] = field(default_factory=list)
    events_work: bool = True
    open_sessions: int = 0

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported
    NVMLError_FunctionNotFound = NVMLError_FunctionNotFound
    NVMLError_NoPermission = NVMLError_NoPermission
    NVMLError_GpuIsLost = NVMLError_GpuIsLost
    NVMLError_Timeout = NVMLError_Timeout
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    nvmlEventTypeXidCriticalError = 8

    def nvmlInit(self) -> None:
        if self.hang is not None:
            self.hang.wait()
        if self.broken:
            raise NVMLError("Driver Not Loaded")
        self.open_sessions += 1

    def nvmlShutdown(self) -> None:
        self.open_sessions -= 1

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        return self.driver

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        if self.cards[index].lost:
            raise NVMLError_GpuIsLost("GPU is lost")
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str | bytes) -> FakeCard:
        name = uuid.decode() if isinstance(uuid, bytes) else uuid
        return next(card for card in self.cards if card.uuid == name)

    def nvmlDeviceGetPciInfo(self, card: FakeCard) -> Any:
        return SimpleNamespace(busId=card.bus.encode(), pciDeviceId=card.device)

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard) -> Any:
        return SimpleNamespace(total=card.total, free=card.free, used=card.total - card.free)

    def nvmlDeviceGetCudaComputeCapability(self, card: FakeCard) -> tuple[int, int]:
        return card.capability

    def nvmlDeviceGetName(self, card: FakeCard) -> str:
        return card.name

    def nvmlDeviceGetUUID(self, card: FakeCard) -> str:
        return card.uuid

    def nvmlDeviceGetVbiosVersion(self, card: FakeCard) -> str:
        return self._answer(card, "vbios", "92.00.60.00.01")

    def nvmlDeviceGetEccMode(self, card: FakeCard) -> tuple[int, int]:
        return self._answer(card, "ecc", (1, 1))

    def nvmlDeviceGetCurrPcieLinkGeneration(self, card: FakeCard) -> int:
        return self._answer(card, "link", 1)

    def nvmlDeviceGetCurrPcieLinkWidth(self, card: FakeCard) -> int:
        return 4

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card: FakeCard) -> int:
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, card: FakeCard) -> int:
        return 16

    def nvmlDeviceGetPowerManagementLimit(self, card: FakeCard) -> int:
        return self._answer(card, "power", 250_000)

    def nvmlDeviceGetClockInfo(self, card: FakeCard, which: int) -> int:
        return {1: 1410, 2: 1458}[which]

    def nvmlDeviceGetComputeRunningProcesses(self, card: FakeCard) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in card.processes]

    def nvmlEventSetCreate(self) -> list[Any]:
        return []

    def nvmlEventSetFree(self, events: Any) -> None:
        pass

    def nvmlDeviceRegisterEvents(self, card: FakeCard, kinds: int, events: Any) -> None:
        if not self.events_work:
            raise NVMLError_NotSupported("Not Supported")

    def nvmlEventSetWait_v2(self, events: Any, timeout_ms: int) -> Any:
        if not self.xids:
            raise NVMLError_Timeout("Timeout")
        uuid, code = self.xids.pop(0)
        return SimpleNamespace(device=self.nvmlDeviceGetHandleByUUID(uuid), eventType=8, eventData=code)

    def _answer(self, card: FakeCard, question: str, answer: Any) -> Any:
        if question in card.unsupported:
            raise NVMLError_NotSupported("Not Supported")
        return answer


def mixed_rig() -> FakeNvml:
    """A GeForce before a 170HX of each bin, in bus order."""
    return FakeNvml(
        cards=[
            FakeCard(
                name="NVIDIA GeForce RTX 3090",
                uuid="GPU-22222222-aaaa-bbbb-cccc-000000000002",
                bus="00000000:01:00.0",
                device=0x220410DE,
                total=24 * GIB,
                free=23 * GIB,
                capability=(8, 6),
            ),
            FakeCard(),
            FakeCard(
                uuid="GPU-12345678-aaaa-bbbb-cccc-000000000003", bus="00000000:C1:00.0", total=40 * GIB, free=39 * GIB
            ),
        ]
    )
