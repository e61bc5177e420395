"""A long log, read in pieces: the same findings wherever it is cut, and a bounded amount in memory."""

import tracemalloc
from collections.abc import Iterator
from itertools import chain

import pytest

from provisioner.doctor.condense import LAST_LINES, condense
from provisioner.doctor.logs import judge_log
from tests.doctor.test_logs import CONFIG, CORPUS, LOGS, READY, START, TRACE, reports

ANSWER = b'INFO:     127.0.0.1:40112 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
REPORT = reports(["512.0"], ["43.2"])[0].encode() + b"\n"
QUOTE = b"(APIServer pid=7) INFO 12-07 11:45:44 [logger.py:51] Received request: 'CUDA out of memory, why?'\n"
OPENING = "".join(f"{line}\n" for line in (START, CONFIG, READY)).encode()


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


@pytest.mark.parametrize("name", CORPUS)
@pytest.mark.parametrize("size", [1, 7, 4096])
def test_where_a_log_is_cut_changes_nothing(name, size):
    data = (LOGS / f"{name}.log").read_bytes()
    assert condense(pieces(data, size)) == condense([data])


def test_a_long_log_is_read_with_flat_memory_and_the_failure_in_it_is_found():
    work = (ANSWER * 50 + REPORT + QUOTE) * 2500
    death = f"{TRACE}\n(EngineCore pid=9) ERROR 11-30 10:01:00 [core.py:1349] OddError: no such thing\n".encode()
    tracemalloc.start()
    log = condense(chain([OPENING], pieces(work, 1 << 16), [death]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20
    assert len(log.kept) < 20
    assert log.total == 3 + 52 * 2500 + 2
    (finding,) = judge_log(log)
    assert finding.what.endswith("OddError: no such thing")
    assert finding.evidence[0].startswith(f"line {log.total}: ")


def test_of_a_log_of_nothing_but_errors_the_first_and_the_last_are_kept():
    flood = b"".join(b"(EngineCore pid=9) ERROR 11-30 10:01:00 [x.py:1] number %d\n" % n for n in range(200_000))
    log = condense([OPENING, *pieces(flood, 1 << 20)])
    assert sum(len(item.line.whole) for item in log.kept) < 9 << 20
    assert [item.number for item in log.kept][:5] == [1, 2, 3, 4, 5]
    assert [item.number for item in log.last] == list(range(log.total + 1 - LAST_LINES, log.total + 1))
    assert log.kept[-1] == log.last[-1]


def test_a_line_without_an_end_is_bounded():
    log = condense([OPENING, *[b"x" * (1 << 20)] * 20])
    assert log.total == 4
    assert len(log.kept[-1].line.whole) < 1 << 14


def test_the_next_start_begins_anew_also_after_a_long_run():
    run = OPENING + (ANSWER + REPORT) * 5000 + b"INFO:     Shutting down\n"
    log = condense(pieces(run + OPENING + ANSWER, 1 << 16))
    assert (log.kept[0].number, log.is_ready, log.is_warm) == (run.count(b"\n") + 1, True, False)
    assert not condense(pieces(run + OPENING.replace(READY.encode(), b""), 1 << 16)).is_ready


def test_a_start_that_serve_marked_is_a_start_whatever_it_wrote():
    mark = b"provision: starting /v/bin/vllm serve m\n"
    log = condense([mark + OPENING + mark + b"vllm: error: unrecognized arguments: --x\n"])
    assert [finding.id for finding in judge_log(log)] == ["bad-argument"]
    log = condense([mark + b"a warning of an import\n" * 30 + OPENING])
    assert log.kept[0].number == 1
