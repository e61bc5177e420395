"""The workflow, the action and the one issue: linted where the linters are, and run as shell with a local issue API."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from provisioner.drift.issue import MARK, Deed, Tracker, print_body, state_key, update_issue
from provisioner.drift.reports.data import describe_report
from provisioner.errors import NetworkError
from tests.drift.builds import HISTORY, PATCH, build
from tests.drift.issue_api import IssueApi
from tests.drift.test_scan import run
from tests.support.index_server import IndexServer
from tests.support.wheels import wheel_filename

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "drift.yml"


@pytest.fixture
def api() -> Iterator[IssueApi]:
    with IssueApi() as server:
        yield server


def tracker(api: IssueApi) -> Tracker:
    return Tracker(api=api.url, repository="me/patches", token="secret")


def report_of(settings, spec: str) -> dict[str, Any]:
    return describe_report(run(settings, spec=spec))


def keep(api: IssueApi, report: dict[str, Any]) -> Deed:
    with requests.Session() as session:
        return update_issue(report, tracker(api), session)


def test_one_issue_lives_through_a_drifts_whole_life(settings, api: IssueApi):
    holds, drifts = report_of(settings, "pypi:<1.4"), report_of(settings, "pypi:<1.5")
    assert keep(api, holds) is Deed.NONE
    assert keep(api, drifts) is Deed.OPENED
    assert keep(api, drifts) is Deed.UNCHANGED
    # The same drift on one more build is no news.
    assert keep(api, report_of(settings, "pypi:<1.6")) is Deed.UNCHANGED
    assert keep(api, report_of(settings, "pypi")) is Deed.UPDATED
    assert keep(api, holds) is Deed.CLOSED
    assert keep(api, holds) is Deed.NONE
    assert keep(api, drifts) is Deed.REOPENED
    assert len(api.issues) == 1
    assert api.issues[0]["state"] == "open"
    assert api.tokens == {"Bearer secret"}


def test_somebody_elses_issues_are_left_alone(settings, api: IssueApi):
    api.issues = [
        {"number": 1, "state": "open", "body": None},
        {"number": 2, "state": "open", "body": "other"},
        {"number": 3, "state": "open", "body": f"{MARK}x -->", "pull_request": {}},
    ]
    keep(api, report_of(settings, "pypi:<1.5"))
    assert [issue["number"] for issue in api.issues] == [1, 2, 3, 4]


def test_a_tracker_that_fails_is_said(settings, api: IssueApi):
    api.broken = True
    with pytest.raises(NetworkError) as caught:
        keep(api, report_of(settings, "pypi:<1.5"))
    assert "secret" not in str(caught.value) + str(caught.value.found)


def test_the_text_names_builds_and_the_next_command(settings):
    report = report_of(settings, "pypi:<1.6")
    text = print_body(report)
    assert text.startswith(f"{MARK}{state_key(report)} -->")
    assert "On 1.4, 1.5. Key" in text
    assert "provision patch refresh bounds --onto pypi:1.5" in text


@pytest.fixture
def shell_index() -> Iterator[IndexServer]:
    with IndexServer() as server:
        server.add_package("vllm", {wheel_filename(version): build(version, ops) for version, ops in HISTORY.items()})
        yield server


def test_the_workflows_steps_run_as_shell(tmp_path: Path, shell_index: IndexServer, api: IssueApi) -> None:
    patch = tmp_path / "bounds.patch"
    patch.write_bytes(PATCH)
    program = tmp_path / "bin" / "provision"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m provisioner "$@"\n')
    program.chmod(0o755)
    environ = {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PROVISION_HOME": str(tmp_path / "home"),
        "UV_DEFAULT_INDEX": shell_index.simple_url,
        "AGAINST": "pypi:<1.5",
        "PATCHES": str(patch),
        "LAST": "3",
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "GITHUB_API_URL": api.url,
        "GITHUB_TOKEN": "secret",
    }
    script = ROOT / ".github" / "scripts" / "drift"
    done = subprocess.run([script], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=True)
    assert "::error title=bounds (bounds) on 1.4" in done.stdout
    assert sorted(path.name for path in (tmp_path / "drift-report").iterdir()) == [
        "drift.html",
        "drift.json",
        "drift.junit",
        "drift.markdown",
    ]
    assert (tmp_path / "output").read_text() == "judged=yes\nstatus=1\n"
    assert (tmp_path / "summary").read_text().startswith("| recipe | patch | 1.2 | 1.3 | 1.4 |")
    issue = [str(program), "drift-issue", "drift-report/drift.json", "--repository", "me/patches"]
    subprocess.run(issue, cwd=tmp_path, env=environ, capture_output=True, timeout=60, check=True)
    assert [item["title"] for item in api.issues] == ["Patches drift on newer builds"]
    report = json.loads((tmp_path / "drift-report" / "drift.json").read_text())
    assert state_key(report) in api.issues[0]["body"]


def linter(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed (it comes with the dev extra)")
    return found


@pytest.mark.parametrize(
    ("schema", "file"),
    [("vendor.github-workflows", ".github/workflows/drift.yml"), ("vendor.github-actions", "action.yml")],
)
def test_the_files_are_what_their_schemas_say(schema: str, file: str) -> None:
    command = [linter("check-jsonschema"), "--builtin-schema", schema, str(ROOT / file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_workflow_is_safe() -> None:
    command = [linter("zizmor"), "--offline", str(WORKFLOW), str(ROOT / "action.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
