"""What the suite's own guards catch, shown on tests that do wrong."""

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
pytest_plugins = ["pytester"]


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder of tests with our guards, whose pytest is a process of its own."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    pytester.makeini("[pytest]\nmarkers = gpu: x\n network: x")
    pytester.makeconftest('pytest_plugins = ["tests.support.skips", "tests.support.guards"]')
    return pytester


SKIPPING = """
import pytest

def test_browser():
    pytest.skip("no browser")

@pytest.mark.gpu
def test_gpu():
    pytest.skip("no card")

def test_fork():
    pytest.skip("PROVISION_FORK_CHECKOUT names no checkout")
"""


@pytest.mark.parametrize(
    ("ci", "beside", "outcome"),
    [
        ("", True, {"skipped": 3}),
        ("true", False, {"skipped": 2, "failed": 1}),
        ("true", True, {"skipped": 1, "failed": 2}),
    ],
)
def test_a_skip_in_ci_is_a_failure(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str, beside: bool, outcome: dict[str, int]
) -> None:
    monkeypatch.setenv("CI", ci)
    suite.makepyfile(test_it=SKIPPING)
    suite.makeconftest(
        'pytest_plugins = ["tests.support.skips"]\n'
        "from tests.support import skips\n"
        f"skips._BESIDE = skips.Path({str(suite.path if beside else suite.path / 'none')!r})\n"
    )
    suite.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(**outcome)


def test_a_module_that_is_skipped_in_ci_is_a_failure(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    suite.makepyfile(test_it='import pytest\npytest.importorskip("no_such_module")')
    result = suite.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*no_such_module*"])


LEAVING = """
import os, signal, socket, subprocess, sys, threading, time
import pytest
from provisioner import digests
from provisioner.index import connections

def test_thread():
    threading.Thread(target=time.sleep, args=(5,), name="sleeper", daemon=True).start()

def test_timer():
    timer = threading.Timer(5, print)
    timer.daemon = True
    timer.start()

def test_child():
    subprocess.Popen(["sleep", "5"])

def test_variable():
    os.environ["LEFT_BEHIND"] = "1"

def test_variable_that_is_gone():
    del os.environ["HOME"]

def test_folder():
    os.chdir("/")

def test_path():
    sys.path.append("/nowhere")

def test_handler():
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)

def test_rebound():
    digests.digest_of = None

def test_container():
    connections._contexts["x"] = None

def test_network():
    with pytest.raises(OSError):
        socket.create_connection(("192.0.2.1", 9), timeout=0.01)

def test_network_unasked():
    with socket.socket() as made, pytest.raises(OSError):
        made.connect_ex(("192.0.2.1", 9))

@pytest.mark.network
def test_allowed():
    with pytest.raises(OSError):
        socket.create_connection(("192.0.2.1", 9), timeout=0.01)

def test_tidy(monkeypatch, tmp_path):
    monkeypatch.setenv("LEFT_BEHIND_TOO", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(connections._contexts, "y", None)
    subprocess.run(["true"], check=True)
    thread = threading.Thread(target=time.sleep, args=(0.05,))
    thread.start()
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
"""
LEFT = (
    "the thread sleeper",
    "the thread Thread-*",
    "the process *",
    "a changed variable LEFT_BEHIND",
    "a changed variable HOME",
    "a changed working directory",
    "a changed sys.path",
    "a changed handler of SIGUSR1",
    "a changed provisioner.digests.digest_of",
    "a changed provisioner.index.connections._contexts",
    "a wish to connect to 192.0.2.1 without the mark `network`",
    "a wish to connect to 192.0.2.1 without the mark `network`",
)


def test_a_test_that_leaves_something_behind_fails_and_the_others_do_not(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_it=LEAVING)
    result = suite.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:randomly")
    result.assert_outcomes(passed=14, errors=len(LEFT))
    result.stdout.fnmatch_lines([f"the test leaves behind: {left}" for left in LEFT])
