"""Children that end well, badly and not at all."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from provisioner.gpu.runner import Exited, Hung, Killed, Limits, NotStarted, run_child

GENEROUS = Limits(start=20, silence=20, work=20, total=20)


def run(code: str, limits: Limits = GENEROUS, request: dict[str, Any] | None = None) -> tuple[Any, list[Any]]:
    messages: list[Any] = []
    end = run_child(
        [sys.executable, "-I", "-u", "-c", code],
        request=request or {},
        environment=dict(os.environ),
        limits=limits,
        on_message=messages.append,
    )
    return end, messages


def test_request_goes_in_and_lines_come_out() -> None:
    end, messages = run("import sys; print(sys.stdin.readline(), end='')", request={"pci": "82:00"})
    assert end == Exited(code=0, stderr="")
    assert messages == [{"pci": "82:00"}]


def test_noise_and_heartbeats_are_not_handed_on() -> None:
    code = 'print("warning: hello"); print(\'{"event": "beat"}\'); print("[1]"); print(\'{"event": "x"}\', end="")'
    end, messages = run(code + "; print()")
    assert end == Exited(code=0, stderr="")
    assert messages == [{"event": "x"}]


def test_exit_status_and_the_end_of_stderr_are_kept() -> None:
    end, _ = run("import sys; sys.stderr.write('x' * 9000 + 'the end'); sys.exit(3)")
    assert isinstance(end, Exited)
    assert end.code == 3
    assert end.stderr.endswith("the end")
    assert len(end.stderr) == 4096


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_signal_is_named(name: str) -> None:
    end, _ = run(f"import os, signal; os.kill(os.getpid(), signal.{name})")
    assert isinstance(end, Killed)
    assert end.signal_name == name


def test_silence_is_a_hang() -> None:
    started = time.monotonic()
    end, messages = run(
        'import time; print(\'{"event": "x"}\'); time.sleep(60)', Limits(start=20, silence=0.3, work=5, total=20)
    )
    assert isinstance(end, Hung)
    assert "no sign of life" in end.why
    assert end.left_behind is None
    assert messages == [{"event": "x"}]
    assert time.monotonic() - started < 5


def test_a_child_that_never_starts_is_a_hang() -> None:
    code = 'import time\nwhile True:\n    print(\'{"event": "beat"}\')\n    time.sleep(0.05)'
    end, _ = run(code, Limits(start=0.5, silence=5, work=5, total=20))
    assert isinstance(end, Hung)
    assert "had not started" in end.why


def test_heartbeats_without_work_are_a_hang() -> None:
    code = 'import time\nprint("{}")\nwhile True:\n    print(\'{"event": "beat"}\')\n    time.sleep(0.05)'
    end, _ = run(code, Limits(start=20, silence=5, work=0.5, total=20))
    assert isinstance(end, Hung)
    assert "no progress" in end.why


def test_endless_work_is_a_hang() -> None:
    code = 'import time\nwhile True:\n    print(\'{"event": "x"}\')\n    time.sleep(0.05)'
    end, _ = run(code, Limits(start=20, silence=5, work=5, total=0.5))
    assert isinstance(end, Hung)
    assert "not done" in end.why


def test_a_child_that_ignores_sigterm_and_its_own_children_are_gone() -> None:
    code = (
        "import json, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(json.dumps({'inner': inner.pid}))\n"
        "time.sleep(60)\n"
    )
    end, (message,) = run(code, Limits(start=20, silence=1, work=1, total=20))
    assert isinstance(end, Hung)
    for _ in range(50):
        if not is_running(message["inner"]):
            break
        time.sleep(0.05)
    assert not is_running(message["inner"])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_program_that_is_not_there() -> None:
    end = run_child(["/nonexistent/python"], request={}, environment={}, limits=GENEROUS, on_message=print)
    assert isinstance(end, NotStarted)
    assert "nonexistent" in end.why


def test_an_exception_kills_the_child() -> None:
    seen: list[int] = []

    def stop(message: Any) -> None:
        seen.append(message["pid"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_child(
            [sys.executable, "-I", "-u", "-c", "import os, time; print('{\"pid\": %d}' % os.getpid()); time.sleep(60)"],
            request={},
            environment=dict(os.environ),
            limits=GENEROUS,
            on_message=stop,
        )
    assert not is_running(seen[0])


def test_kill_from_outside() -> None:
    messages: list[Any] = []

    def kill(message: Any) -> None:
        messages.append(message)
        threading.Timer(0.05, os.kill, (message["pid"], signal.SIGKILL)).start()

    end = run_child(
        [sys.executable, "-I", "-u", "-c", "import os, time; print('{\"pid\": %d}' % os.getpid()); time.sleep(60)"],
        request={},
        environment=dict(os.environ),
        limits=GENEROUS,
        on_message=kill,
    )
    assert isinstance(end, Killed)
    assert end.signal_name == "SIGKILL"


def test_called_off_from_another_thread() -> None:
    stop = threading.Event()
    started = time.monotonic()
    end = run_child(
        [sys.executable, "-I", "-u", "-c", "import time; print('{}'); time.sleep(60)"],
        request={},
        environment=dict(os.environ),
        limits=GENEROUS,
        on_message=lambda message: stop.set(),
        stop=stop,
    )
    assert isinstance(end, Hung)
    assert end.why == "it was called off"
    assert time.monotonic() - started < 10
