"""The workflow, the action and the one issue: linted where the linters are, and run as shell with a local issue API."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import requests

from provisioner.drift.issue import MARK, Deed, Tracker, print_body, state_key, update_issue
from provisioner.drift.reports.data import describe_report, print_report_json
from provisioner.errors import NetworkError
from tests.drift.test_scan import run
from tests.support.drift_builds import HISTORY, PATCH, build
from tests.support.index_server import IndexServer, Mood
from tests.support.issue_api import IssueApi
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


def test_what_could_not_be_read_closes_no_issue(settings, index: IndexServer, api: IssueApi):
    assert keep(api, report_of(settings, "pypi:<1.5")) is Deed.OPENED
    index.set_mood(f"packages/{wheel_filename('1.1')}", Mood(status=404))
    unread = replace(settings, cache=settings.cache / "other")
    assert keep(api, report_of(unread, "pypi:<1.3")) is Deed.UNCHANGED
    assert api.issues[0]["state"] == "open"


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


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs steps of the kit as a job would: in a folder, with variables, through bash as GitHub starts it."""

    environ: dict[str, str]

    def run(self, command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        folder.mkdir(exist_ok=True)
        if not (folder / ".github").is_symlink():
            (folder / ".github").symlink_to(ROOT / ".github")
        outputs = {"GITHUB_OUTPUT": str(folder / "output"), "GITHUB_STEP_SUMMARY": str(folder / "summary")}
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", command],
            cwd=folder,
            env={**self.environ, **outputs, **variables},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def runner(tmp_path: Path, shell_index: IndexServer, api: IssueApi) -> Runner:
    program = tmp_path / "bin" / "provision"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m provisioner "$@"\n')
    program.chmod(0o755)
    return Runner(
        environ={
            **os.environ,
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PROVISION_HOME": str(tmp_path / "home"),
            "UV_DEFAULT_INDEX": shell_index.simple_url,
            "GITHUB_API_URL": api.url,
            "GITHUB_TOKEN": "secret",
            "GITHUB_REPOSITORY": "me/patches",
            "GITHUB_ACTION_PATH": str(ROOT),
        }
    )


def command_of(file: Path, step: str) -> str:
    """What a named step runs; all of the kit's steps are one line of shell."""
    (found,) = {line.strip("'") for line in re.findall(rf"- name: {step}\n(?:.*\n)*?\s+run: (.+)\n", file.read_text())}
    return found


def outputs_of(folder: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (folder / "output").read_text().splitlines())


def test_the_workflows_steps_run_as_shell(tmp_path: Path, runner: Runner, api: IssueApi) -> None:
    asked = {"RECIPES": "samsung hynix", "AGAINST": "pypi:<1.4 pypi:>=1.4,<1.6"}
    assert runner.run(command_of(WORKFLOW, "cells"), tmp_path / "list", **asked).returncode == 0
    cells = outputs_of(tmp_path / "list")
    recipes, sources = json.loads(cells["recipes"]), json.loads(cells["sources"])
    assert (recipes, sources, cells["cells"]) == (["samsung", "hynix"], ["pypi:<1.4", "pypi:>=1.4,<1.6"], "4")
    for number, (recipe, source) in enumerate(itertools.product(recipes, sources)):
        cell = tmp_path / f"cell{number}"
        done = runner.run(command_of(WORKFLOW, "drift"), cell, RECIPES=recipe, AGAINST=source, LAST="12")
        # hynix asks nothing of a build that has nothing to patch: its one patch is optional.
        assert (done.returncode, outputs_of(cell)["status"]) == (0, "1" if recipe == "samsung" else "0"), done.stderr
        place = tmp_path / "report" / "drift-parts" / f"drift-part-{number}"
        place.mkdir(parents=True)
        shutil.copy(cell / "drift-report" / "drift.json", place)
    report = tmp_path / "report"
    done = runner.run(command_of(WORKFLOW, "merge"), report, PARTS="drift-parts", CELLS=cells["cells"])
    assert done.returncode == 0, done.stderr
    assert "::error title=sm80-cpu-repack (samsung) on 1.0::target-missing" in done.stdout
    assert outputs_of(report) == {"judged": "yes", "status": "1"}
    assert sorted(path.name for path in (report / "drift-report").iterdir()) == [
        "drift.html",
        "drift.json",
        "drift.junit",
        "drift.markdown",
    ]
    assert (report / "summary").read_text().startswith("| recipe | patch | 1.0 | 1.1 | 1.2 | 1.3 | 1.4 | 1.5 |")
    found = json.loads((report / "drift-report" / "drift.json").read_text())
    assert found["not_judged"] == []
    assert runner.run(command_of(WORKFLOW, "issue"), report).returncode == 0
    assert [item["title"] for item in api.issues] == ["Patches drift on newer builds"]
    assert state_key(found) in api.issues[0]["body"]
    assert runner.run(command_of(WORKFLOW, "verdict"), report, STATUS=outputs_of(report)["status"]).returncode == 1


def test_parts_that_left_no_report_are_no_good_news(tmp_path: Path, settings, runner: Runner) -> None:
    place = tmp_path / "report" / "drift-parts" / "drift-part-0"
    place.mkdir(parents=True)
    (place / "drift.json").write_text(print_report_json(run(settings, spec="pypi:<1.2")))
    done = runner.run(command_of(WORKFLOW, "merge"), tmp_path / "report", PARTS="drift-parts", CELLS="2")
    assert "::error title=not judged::1 of 2 parts left no report" in done.stdout
    assert outputs_of(tmp_path / "report") == {"status": "4"}
    assert (tmp_path / "report" / "drift-report" / "drift.html").exists()
    # No part at all: there is no folder, either.
    runner.run(command_of(WORKFLOW, "merge"), tmp_path / "none", PARTS="drift-parts", CELLS="2")
    assert outputs_of(tmp_path / "none") == {"status": "4"}


def test_the_actions_steps_run_as_shell(tmp_path: Path, runner: Runner) -> None:
    patch = tmp_path / "bounds.patch"
    patch.write_bytes(PATCH.replace(b"vllm/ops", b"ops"))
    action, own = ROOT / "action.yml", {"PATCHES": str(patch), "ROOT": "vllm", "AGAINST": "pypi:<1.5", "LAST": "3"}
    assert runner.run(command_of(action, "drift"), tmp_path / "job", CUT_AGAINST="1.0", **own).returncode == 0
    done = runner.run(command_of(action, "print"), tmp_path / "job", PARTS="drift-report/drift.json", CELLS="1")
    assert "::error title=bounds (bounds) on 1.4" in done.stdout
    assert outputs_of(tmp_path / "job") == {"status": "1", "judged": "yes"}
    assert (tmp_path / "job" / "summary").read_text().startswith("| recipe | patch | 1.2 | 1.3 | 1.4 |")
    # What cannot be judged keeps its own exit code.
    assert runner.run(command_of(action, "drift"), tmp_path / "bad", **{**own, "AGAINST": "nonsense"}).returncode == 0
    status = outputs_of(tmp_path / "bad")["status"]
    runner.run(command_of(action, "print"), tmp_path / "bad", CELLS="1", STATUS=status)
    assert outputs_of(tmp_path / "bad") == {"status": "2"}


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


@pytest.mark.parametrize(
    ("schema", "begin", "head"),
    [
        ("vendor.gitlab-ci", "drift:\n", ""),
        ("vendor.github-workflows", "jobs:\n", "on: workflow_dispatch\n"),
    ],
)
def test_the_examples_are_what_their_schemas_say(schema: str, begin: str, head: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "drift.md").read_text()
    (example,) = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if block.startswith(begin)]
    file = tmp_path / "example.yml"
    file.write_text(head + example)
    command = [linter("check-jsonschema"), "--builtin-schema", schema, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_workflow_is_safe() -> None:
    command = [linter("zizmor"), "--offline", str(WORKFLOW), str(ROOT / "action.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
