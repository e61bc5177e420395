"""Is the card well? New Xids from before to after a run, and a probe that tells a wedged card from a busy one."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, assert_never

from provisioner.gpu.devices import NoDriverError, load_nvml, visibility_of
from provisioner.gpu.model import Card, Observation, ProbeStep
from provisioner.gpu.model import Probe as Probe
from provisioner.gpu.model import ProbeVerdict as ProbeVerdict
from provisioner.gpu.runner import ChildEnd, Exited, Hung, Killed, Limits, Message, NotStarted, run_child
from provisioner.gpu.xid import XidEvent, events_on, parse_kernel_log

KMSG = Path("/dev/kmsg")
WARM_REBOOT = "a warm reboot of the host is the only way back"
PROBE_SIZES = (170_000_000, 1_000_000_000, 4_000_000_000)
PROBE_SECONDS = 60.0
# The driver logs from an interrupt: a line can come a moment after the call that failed.
_SETTLE_SECONDS = 0.3
_JOURNAL_SECONDS = 10.0
_NVML_WAIT_MS = 100

_PROBE_PROGRAM = Path(__file__).with_name("probe.py")


class SourceError(Exception):
    """This source of Xids cannot be read here; the text says why."""


class XidSource(Protocol):
    """Something that can say which Xids came since it was marked."""

    name: str

    def mark(self) -> None:
        """Remember now. Raises SourceError where the source cannot be read."""

    def read_new(self) -> tuple[XidEvent, ...]:
        """Events since the mark. Raises SourceError where the source stopped answering."""

    def close(self) -> None:
        """Let go of what ``mark`` opened."""


class KmsgSource:
    """``/dev/kmsg``: one record a read, from the mark on."""

    name = "kernel log (/dev/kmsg)"

    def __init__(self, path: Path = KMSG) -> None:
        self._path = path
        self._descriptor: int | None = None

    def mark(self) -> None:
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as error:
            self.close()
            raise SourceError(f"{self._path}: {error.strerror}") from error

    def read_new(self) -> tuple[XidEvent, ...]:
        if self._descriptor is None:
            raise SourceError(f"{self._path} was not opened")
        records: list[str] = []
        while True:
            try:
                record = os.read(self._descriptor, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # older records were overwritten; reading goes on with the oldest kept
                continue
            except OSError as error:
                raise SourceError(f"{self._path}: {error.strerror}") from error
            if not record:
                break
            records.append(record.decode("utf-8", "replace"))
        return parse_kernel_log("".join(records).splitlines())

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class JournalSource:
    """systemd's journal of the kernel, read by ``journalctl`` from a cursor on."""

    name = "kernel log (journal)"

    def __init__(self, program: str = "journalctl") -> None:
        self._program = program
        self._cursor: str | None = None

    def mark(self) -> None:
        entries = self._ask("-n", "1")
        if not entries:
            raise SourceError(f"{self._program} shows no kernel messages to this user")
        self._cursor = str(entries[-1]["__CURSOR"])

    def read_new(self) -> tuple[XidEvent, ...]:
        if self._cursor is None:
            raise SourceError("the journal was not marked")
        entries = self._ask("--after-cursor", self._cursor)
        return parse_kernel_log(str(entry.get("MESSAGE", "")) for entry in entries)

    def close(self) -> None:
        self._cursor = None

    def _ask(self, *arguments: str) -> list[dict[str, Any]]:
        if shutil.which(self._program) is None:
            raise SourceError(f"{self._program} is not installed")
        try:
            answer = subprocess.run(
                [self._program, "--dmesg", "--quiet", "--no-pager", "--output=json", *arguments],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_JOURNAL_SECONDS,
                check=True,
            )
            return [json.loads(line) for line in answer.stdout.splitlines()]
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise SourceError(f"{self._program}: {error}") from error


class NvmlEventSource:
    """The driver's own event queue; needs no rights, but knows only what came while it was open."""

    name = "NVML events"

    def __init__(self, card: Card, nvml: Any = None) -> None:
        self._card = card
        self._nvml = nvml
        self._events: Any = None

    def mark(self) -> None:
        try:
            nvml = self._nvml if self._nvml is not None else load_nvml()
        except NoDriverError as error:
            raise SourceError(error.what) from error
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            self._events = nvml.nvmlEventSetCreate()
            handle = nvml.nvmlDeviceGetHandleByUUID(self._card.uuid)
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        except nvml.NVMLError as error:
            self.close()
            raise SourceError(f"NVML: {error}") from error

    def read_new(self) -> tuple[XidEvent, ...]:
        if self._events is None:
            raise SourceError("NVML events were not registered")
        found: list[XidEvent] = []
        nvml = self._nvml
        while True:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, _NVML_WAIT_MS)
            except nvml.NVMLError_Timeout:
                return tuple(found)
            except nvml.NVMLError as error:
                raise SourceError(f"NVML: {error}") from error
            code = int(event.eventData)
            found.append(XidEvent(pci=self._card.pci, code=code, text=f"NVML event: Xid {code}"))

    def close(self) -> None:
        if self._events is None:
            return
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()
        self._events = None


def sources_for(card: Card, nvml: Any = None) -> tuple[XidSource, ...]:
    """Every source of Xids on a Linux host, the fullest first."""
    return (KmsgSource(), JournalSource(), NvmlEventSource(card, nvml))


class XidWatch:
    """Marks every source on entry; ``observe`` says what came since.

    The journal is asked only where ``/dev/kmsg`` is closed to this user: both are the same log.
    """

    def __init__(self, card: Card, sources: Sequence[XidSource]) -> None:
        self._card = card
        self._sources = tuple(sources)
        self._marked: list[XidSource] = []
        self._unreadable: list[str] = []

    def __enter__(self) -> "XidWatch":
        for source in self._sources:
            if isinstance(source, JournalSource) and any(isinstance(other, KmsgSource) for other in self._marked):
                continue
            try:
                source.mark()
            except SourceError as error:
                self._unreadable.append(str(error))
            else:
                self._marked.append(source)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for source in self._marked:
            source.close()

    def observe(self, *, settle_seconds: float = _SETTLE_SECONDS) -> Observation:
        """New events since the last call or the entry, each once, however many sources tell of it."""
        time.sleep(settle_seconds)
        read: list[str] = []
        unreadable = list(self._unreadable)
        events: list[XidEvent] = []
        for source in self._marked:
            try:
                new = source.read_new()
            except SourceError as error:
                unreadable.append(str(error))
                continue
            read.append(source.name)
            known = {(event.pci, event.code) for event in events}
            events += [event for event in new if (event.pci, event.code) not in known]
        own = events_on(events, self._card.pci)
        return Observation(
            sources=tuple(read),
            unreadable=tuple(unreadable),
            events=own,
            elsewhere=tuple(event for event in events if event not in own),
        )


# More than any driver takes for a context: with so much free, a refusal is a fault and not a full card.
_CONTEXT_BYTES = 1 << 30
_OUT_OF_MEMORY = 2
# Codes of the CUDA driver API (cuda.h) that are neither a wedge nor a working card.
_LOST_CODES = frozenset({100, 101})  # no device, invalid device
_TOOLCHAIN_CODES = frozenset({34, 803, 804})  # stub library, driver and library differ, compatibility not supported


def probe_card(
    card: Card,
    *,
    library: str = "libcuda.so.1",
    sizes: Sequence[int] = PROBE_SIZES,
    seconds: float = PROBE_SECONDS,
    base_environment: Mapping[str, str] | None = None,
) -> Probe:
    """Allocate, write and free 0.17, 1 and 4 GB on ``card`` in a child with a deadline; no torch, no venv needed.

    A card that hangs or cannot make a context while the driver still lists it is wedged.
    """
    messages: list[Message] = []
    started = time.monotonic()
    environment = {**(os.environ if base_environment is None else base_environment), **visibility_of(card)}
    end = run_child(
        [sys.executable, "-I", str(_PROBE_PROGRAM)],
        request={"pci": card.pci, "library": library, "sizes": list(sizes)},
        environment=environment,
        limits=Limits(start=seconds, silence=seconds, work=seconds, total=seconds),
        on_message=messages.append,
    )
    verdict, why = _judge_probe(card, messages, end)
    steps = tuple(
        ProbeStep(bytes=int(message["bytes"]), seconds=message.get("seconds"))
        for message in messages
        if message.get("step") in ("allocate", "skip")
    )
    return Probe(verdict=verdict, steps=steps, why=why, seconds=round(time.monotonic() - started, 3))


def _judge_probe(card: Card, messages: Sequence[Message], end: ChildEnd) -> tuple[ProbeVerdict, str]:
    last = messages[-1] if messages else {}
    match end:
        case Hung(why=why, left_behind=pid):
            remains = "" if pid is None else f"; process {pid} cannot be killed"
            return ProbeVerdict.WEDGED, f"the probe hung: {why}{remains}; {WARM_REBOOT}"
        case Killed(signal_name=name):
            return ProbeVerdict.LOST, f"the probe was ended by {name}"
        case NotStarted(why=why):
            return ProbeVerdict.TOOLCHAIN, f"the probe did not start: {why}"
        case Exited(code=code, stderr=stderr):
            if last.get("event") == "done":
                return ProbeVerdict.ANSWERS, "the card gives out, fills and frees memory"
            if last.get("event") == "failure":
                return _judge_failure(card, last)
            return ProbeVerdict.TOOLCHAIN, f"the probe ended with status {code}: {stderr.strip()[-300:]}"
        case _:
            assert_never(end)


def _judge_failure(card: Card, failure: Message) -> tuple[ProbeVerdict, str]:
    call, code, name = failure["call"], int(failure["code"]), failure["name"]
    text = f"{call} gave {name}" + (f" ({code})" if code >= 0 else "")
    if code < 0 or code in _TOOLCHAIN_CODES:
        return ProbeVerdict.TOOLCHAIN, text
    if code == _OUT_OF_MEMORY and card.memory_free < _CONTEXT_BYTES:
        return ProbeVerdict.ANSWERS, f"{text}: other processes hold the card's memory, nothing could be tried"
    if code in _LOST_CODES:
        return ProbeVerdict.LOST, f"{text}: CUDA does not see the card that the driver lists"
    return ProbeVerdict.WEDGED, f"{text}; {WARM_REBOOT}"


ProbeFunction = Callable[[Card], Probe]
