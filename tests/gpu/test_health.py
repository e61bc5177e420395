"""Sources of Xids that can and cannot be read, and the wedge probe on a native stand-in for the CUDA driver."""

import os
import time
from pathlib import Path

import pytest

from provisioner.gpu.devices import read_inventory
from provisioner.gpu.health import (
    JournalSource,
    KmsgSource,
    NvmlEventSource,
    XidWatch,
    probe_card,
)
from provisioner.gpu.model import Card, ProbeStep, ProbeVerdict
from tests.gpu.conftest import Build
from tests.support.fake_nvml import GIB, FakeCard, FakeNvml

XID = "3,1201,987654321,-;NVRM: Xid (PCI:0000:{slot}): {code}, pid=7, name=python3, Ch 00000010\n SUBSYSTEM=pci\n"


@pytest.fixture
def card() -> Card:
    return read_inventory(FakeNvml()).cards[0]


@pytest.fixture
def kmsg(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    path.write_text(XID.format(slot="82:00", code=31))
    return path


def log(kmsg: Path, *, slot: str = "82:00", code: int = 31) -> None:
    with kmsg.open("a") as stream:
        stream.write(XID.format(slot=slot, code=code))


def test_only_new_lines_of_the_kernel_log_count(card: Card, kmsg: Path) -> None:
    with XidWatch(card, [KmsgSource(kmsg)]) as watch:
        assert watch.observe(settle_seconds=0).events == ()
        log(kmsg)
        log(kmsg, slot="01:00", code=13)
        observation = watch.observe(settle_seconds=0)
        assert [event.code for event in observation.events] == [31]
        assert [(event.pci, event.code) for event in observation.elsewhere] == [("0000:01:00.0", 13)]
        assert watch.observe(settle_seconds=0).events == ()


def test_a_closed_kernel_log_is_unobserved_not_clean(card: Card, tmp_path: Path) -> None:
    with XidWatch(card, [KmsgSource(tmp_path / "none"), JournalSource("no-such-journalctl")]) as watch:
        observation = watch.observe(settle_seconds=0)
    assert not observation.is_observed
    assert observation.sources == ()
    assert observation.unreadable == (
        f"{tmp_path}/none: No such file or directory",
        "no-such-journalctl is not installed",
    )


def write_journalctl(folder: Path, entries: str) -> str:
    program = folder / "journalctl"
    program.write_text(
        '#!/bin/sh\ncase "$*" in *after-cursor*) sed 1d FILE;; *) head -n 1 FILE;; esac\n'.replace("FILE", entries)
    )
    program.chmod(0o755)
    return str(program)


def test_the_journal_is_read_from_its_cursor(card: Card, tmp_path: Path) -> None:
    entries = tmp_path / "entries"
    entries.write_text('{"__CURSOR": "s=1", "MESSAGE": "NVRM: Xid (PCI:0000:82:00): 13, old"}\n')
    with XidWatch(card, [JournalSource(write_journalctl(tmp_path, str(entries)))]) as watch:
        assert watch.observe(settle_seconds=0).events == ()
        with entries.open("a") as stream:
            stream.write('{"__CURSOR": "s=2", "MESSAGE": "NVRM: Xid (PCI:0000:82:00): 79, new"}\n')
            stream.write('{"__CURSOR": "s=3", "MESSAGE": [1, 2]}\n')
        observation = watch.observe(settle_seconds=0)
    assert observation.sources == ("kernel log (journal)",)
    assert [event.code for event in observation.events] == [79]


def test_a_journal_that_shows_nothing_cannot_be_read(card: Card, tmp_path: Path) -> None:
    entries = tmp_path / "entries"
    entries.write_text("")
    with XidWatch(card, [JournalSource(write_journalctl(tmp_path, str(entries)))]) as watch:
        observation = watch.observe(settle_seconds=0)
    assert not observation.is_observed
    assert "shows no kernel messages" in observation.unreadable[0]


def test_the_journal_is_not_asked_beside_the_kernel_log(card: Card, kmsg: Path) -> None:
    with XidWatch(card, [KmsgSource(kmsg), JournalSource("no-such-journalctl")]) as watch:
        observation = watch.observe(settle_seconds=0)
    assert observation.sources == ("kernel log (/dev/kmsg)",)
    assert observation.unreadable == ()


def test_nvml_events_stand_in_for_a_closed_log(card: Card, tmp_path: Path) -> None:
    nvml = FakeNvml(xids=[(card.uuid, 31), (card.uuid, 45)])
    with XidWatch(card, [KmsgSource(tmp_path / "none"), NvmlEventSource(card, nvml)]) as watch:
        observation = watch.observe(settle_seconds=0)
    assert observation.sources == ("NVML events",)
    assert [event.code for event in observation.events] == [31, 45]
    assert nvml.open_sessions == 0


def test_an_error_told_by_two_sources_counts_once(card: Card, kmsg: Path) -> None:
    nvml = FakeNvml(xids=[(card.uuid, 31)])
    with XidWatch(card, [KmsgSource(kmsg), NvmlEventSource(card, nvml)]) as watch:
        log(kmsg)
        (event,) = watch.observe(settle_seconds=0).events
    assert event.text.startswith("NVRM: Xid")


def test_a_card_without_events(card: Card) -> None:
    nvml = FakeNvml(events_work=False)
    with XidWatch(card, [NvmlEventSource(card, nvml)]) as watch:
        observation = watch.observe(settle_seconds=0)
    assert observation.unreadable == ("NVML: Not Supported",)
    assert nvml.open_sessions == 0


CUDA_DRIVER = """
#include <cstdlib>
#include <cstring>
#include <unistd.h>
static bool is(const char *mood) { const char *now = getenv("MOOD"); return now && !strcmp(now, mood); }
extern "C" {
int cuInit(unsigned) { return is("no-device") ? 100 : is("old-driver") ? 803 : 0; }
int cuDeviceGetByPCIBusId(int *device, const char *pci) { *device = 3; return strcmp(pci, "0000:82:00.0") ? 101 : 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)1;
    return device != 3 ? 101 : is("no-context") ? 999 : is("full") ? 2 : 0;
}
int cuCtxSetCurrent(void *) { return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) {
    *total = 64ull << 30;
    *free = is("busy") ? 1ull << 30 : 63ull << 30;
    return 0;
}
int cuMemAlloc_v2(unsigned long long *address, size_t size) { *address = 4096; return is("fragmented") ? 2 : 0; }
int cuMemsetD8_v2(unsigned long long, unsigned char, size_t) { if (is("crash")) *(volatile int *)8 = 1; return 0; }
int cuCtxSynchronize() { if (is("hang")) for (;;) pause(); return is("fault") ? 700 : 0; }
int cuMemFree_v2(unsigned long long) { return 0; }
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuGetErrorName(int code, const char **name) {
    *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_X";
    return 0;
}
}
"""
SIZES = (170_000_000, 1_000_000_000, 4_000_000_000)


@pytest.fixture(scope="module")
def cuda_driver(build_library: Build) -> str:
    return str(build_library(CUDA_DRIVER, "libcuda.so"))


def probe(card: Card, library: str, mood: str, seconds: float = 20) -> tuple[ProbeVerdict, str, tuple[ProbeStep, ...]]:
    result = probe_card(card, library=library, seconds=seconds, base_environment={**os.environ, "MOOD": mood})
    return result.verdict, result.why, result.steps


def test_a_card_that_answers(card: Card, cuda_driver: str) -> None:
    verdict, _, steps = probe(card, cuda_driver, "well")
    assert verdict == ProbeVerdict.ANSWERS
    assert tuple(step.bytes for step in steps) == SIZES
    assert all(step.seconds is not None for step in steps)


def test_a_hang_is_a_wedge_and_does_not_hang_us(card: Card, cuda_driver: str) -> None:
    started = time.monotonic()
    verdict, why, steps = probe(card, cuda_driver, "hang", seconds=1.0)
    assert verdict == ProbeVerdict.WEDGED
    assert "a warm reboot of the host is the only way back" in why
    assert steps == ()
    assert time.monotonic() - started < 8


@pytest.mark.parametrize(
    ("mood", "verdict", "words"),
    [
        ("no-context", ProbeVerdict.WEDGED, "cuDevicePrimaryCtxRetain gave CUDA_ERROR_X (999)"),
        ("fault", ProbeVerdict.WEDGED, "cuCtxSynchronize gave CUDA_ERROR_X (700)"),
        ("full", ProbeVerdict.WEDGED, "warm reboot"),
        ("no-device", ProbeVerdict.LOST, "CUDA does not see the card"),
        ("old-driver", ProbeVerdict.TOOLCHAIN, "(803)"),
        ("crash", ProbeVerdict.LOST, "SIGSEGV"),
    ],
)
def test_moods_of_a_driver(card: Card, cuda_driver: str, mood: str, verdict: ProbeVerdict, words: str) -> None:
    found, why, _ = probe(card, cuda_driver, mood)
    assert found == verdict
    assert words in why


@pytest.mark.parametrize("mood", ["busy", "fragmented"])
def test_memory_that_others_hold_is_no_fault(card: Card, cuda_driver: str, mood: str) -> None:
    verdict, _, steps = probe(card, cuda_driver, mood)
    assert verdict == ProbeVerdict.ANSWERS
    assert steps[-1] == ProbeStep(bytes=4_000_000_000, seconds=None)


def test_a_full_card_is_no_wedge(cuda_driver: str) -> None:
    full = read_inventory(FakeNvml(cards=[FakeCard(free=GIB // 4)])).cards[0]
    verdict, why, _ = probe(full, cuda_driver, "full")
    assert verdict == ProbeVerdict.ANSWERS
    assert "other processes hold" in why


def test_no_cuda_library(card: Card) -> None:
    verdict, why, _ = probe(card, "libno-such-cuda.so", "well")
    assert verdict == ProbeVerdict.TOOLCHAIN
    assert "libno-such-cuda.so" in why
