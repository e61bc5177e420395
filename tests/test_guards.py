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
    pytester.makeconftest('pytest_plugins = ["tests.support.skips"]')
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
