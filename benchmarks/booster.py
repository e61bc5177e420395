"""What the booster adds: delay of events and first bytes, throughput of one stream, and what disconnects leave behind.

Source, booster and client are processes of their own. Direct and boosted runs take turns.
"""

import asyncio
import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

STREAMS = 64
RATE = 25.0
SECONDS = 6.0
ROUNDS = 3
# Events at both ends of a stream belong to its start and end, not to its steady state.
EDGE = 25
UNPACED_EVENTS = 60_000
REQUESTS = 10_000
AT_ONCE = 50
# A boost would compete with what is measured next.
NO_BOOSTS = ("--threshold", str(10**9))
_SENT = re.compile(rb'"sent":(\d{19})')


def rows() -> list[dict[str, object]]:
    with _source() as port, _booster(port) as (pid, boosted):
        return asyncio.run(_measure(port, boosted, pid))


@contextlib.contextmanager
def _source() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.stream_source"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _booster(port: int) -> Iterator[tuple[int, int]]:
    """Process id and port of a booster in front of ``port``."""
    command = [sys.executable, "-m", "provisioner", "booster", "--upstream", f"http://127.0.0.1:{port}", "--port", "0"]
    process = subprocess.Popen([*command, *NO_BOOSTS], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        yield process.pid, int(process.stderr.readline().split(",")[0].rpartition(":")[2])
    finally:
        process.kill()
        process.wait()


async def _measure(direct: int, boosted: int, pid: int) -> list[dict[str, object]]:
    paced = {"direct": _Delays(), "boosted": _Delays()}
    speeds: dict[str, list[float]] = {"direct": [], "boosted": []}
    for _ in range(ROUNDS):
        for way, port in (("direct", direct), ("boosted", boosted)):
            await _paced_streams(port, paced[way])
    for _ in range(2 * ROUNDS + 1):
        for way, port in (("direct", direct), ("boosted", boosted)):
            speeds[way].append(await _unpaced_speed(port))
    return [*_delay_rows(paced), _speed_row(speeds), *await _disconnects(boosted, pid)]


@dataclass
class _Delays:
    """Seconds from an event's hand-over to the source's socket to its arrival here, and of first bytes."""

    events: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


def _request(events: int, rate: float) -> bytes:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "events": events, "rate": rate}
    data = json.dumps(body).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (
        len(data),
        data,
    )


async def _paced_streams(port: int, delays: _Delays) -> None:
    """Streams whose starts are spread over a second."""
    starts = [random.random() for _ in range(STREAMS)]
    await asyncio.gather(*(_paced_stream(port, start, delays) for start in starts))


async def _paced_stream(port: int, start: float, delays: _Delays) -> None:
    await asyncio.sleep(start)
    asked = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_request(int(RATE * SECONDS), RATE))
    arrivals: list[float] = []
    tail = b""
    while chunk := await reader.read(65536):
        now = time.monotonic_ns()
        if not arrivals and not tail:
            delays.first.append(now / 1e9 - asked)
        text = tail + chunk
        sent = list(_SENT.finditer(text))
        arrivals += [(now - int(match[1])) / 1e9 for match in sent]
        tail = text[sent[-1].end() :] if sent else text
    writer.close()
    assert len(arrivals) == int(RATE * SECONDS), len(arrivals)
    delays.events += arrivals[EDGE:-EDGE]


async def _unpaced_speed(port: int) -> float:
    """Bytes a second of one stream as fast as it goes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    start = time.monotonic()
    writer.write(_request(UNPACED_EVENTS, 0))
    count = 0
    while chunk := await reader.read(1 << 18):
        count += len(chunk)
    seconds = time.monotonic() - start
    writer.close()
    assert count > UNPACED_EVENTS * 200, count
    return count / seconds


def _quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def _delay_rows(paced: dict[str, _Delays]) -> list[dict[str, object]]:
    table: list[dict[str, object]] = []
    for what, part, target in (("p50", 0.5, "< 3 ms"), ("p99", 0.99, "< 15 ms")):
        ours, theirs = (1000 * _quantile(paced[way].events, part) for way in ("boosted", "direct"))
        name = f"delay of an event, {STREAMS} streams at {RATE:g}/s, {what}"
        table.append({"name": name, "ours": ours, "theirs": theirs, "unit": "ms"})
        table.append({"name": f"added delay, {what}", "ours": ours - theirs, "unit": "ms", "target": target})
    for what, part in (("p50", 0.5), ("p99", 0.99)):
        ours, theirs = (1000 * _quantile(paced[way].first, part) for way in ("boosted", "direct"))
        table.append({"name": f"first byte, {what}", "ours": ours, "theirs": theirs, "unit": "ms"})
    return table


def _speed_row(speeds: dict[str, list[float]]) -> dict[str, object]:
    ours, theirs = (statistics.median(speeds[way]) / 1e6 for way in ("boosted", "direct"))
    ratio = ours / theirs
    return {"name": "one stream, unpaced", "ours": ours, "theirs": theirs, "unit": "MB/s", "ratio": ratio,
            "target": ">= 0.8"}  # fmt: skip


async def _disconnects(port: int, pid: int) -> list[dict[str, object]]:
    """Requests of which two thirds are left at a random moment; a tenth of them goes before, to warm up."""
    await _visit_often(port, REQUESTS // 10)
    before, handles = await _settled(port, pid)
    start = time.monotonic()
    await _visit_often(port, REQUESTS)
    seconds = time.monotonic() - start
    after, handles_after = await _settled(port, pid)
    name = f"{REQUESTS} requests, two in three left"
    return [
        {"name": f"{name}: growth of memory", "ours": (after - before) / 1024, "unit": "MB", "target": "< 20"},
        {"name": f"{name}: handles left over", "ours": handles_after - handles, "unit": "", "target": "0"},
        {"name": f"{name}: rate", "ours": REQUESTS / seconds, "unit": "1/s"},
    ]


async def _visit_often(port: int, requests: int) -> None:
    left = iter(range(requests))

    async def work() -> None:
        for _ in left:
            await _visit(port)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


async def _visit(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        leaves = random.random() < 2 / 3
        writer.write(_request(random.randrange(1, 200), 0 if not leaves else random.choice((0, 100.0))))
        if not leaves:
            await reader.read()
            return
        wanted = random.choice((0, 1, 1000, 20_000))
        while wanted > 0 and (chunk := await reader.read(4096)):
            wanted -= len(chunk)
    finally:
        writer.transport.abort()


async def _settled(port: int, pid: int) -> tuple[int, int]:
    """Resident memory (KB) and open handles of the booster once nothing is under way."""
    while (await _stats(port))["requests"]["active"]:
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    resident = int(status.split("VmRSS:")[1].split()[0])
    return resident, len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def _stats(port: int) -> dict[str, dict[str, int]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /booster/stats HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    body = (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    stats: dict[str, dict[str, int]] = json.loads(body)
    return stats
