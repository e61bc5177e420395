import json
from xml.etree import ElementTree

import pytest
from packaging.version import Version

from provisioner.documents.recipe import DriftResponse, PatchPolicy
from provisioner.drift.bisect import find_turns
from provisioner.drift.builds import find_builds
from provisioner.drift.model import DriftReport, drift_key, response_to
from provisioner.drift.policy import exit_code
from provisioner.drift.reports.data import print_report_json
from provisioner.drift.reports.github import print_github
from provisioner.drift.reports.junit import print_junit
from provisioner.drift.reports.markdown import print_markdown
from provisioner.drift.reports.text import print_bisection, print_text
from provisioner.drift.scan import Subject, scan
from provisioner.drift.subjects import stack_subject
from provisioner.errors import NoSuchBuildError, UsageError
from provisioner.patching.model import Verdict
from provisioner.progress import Silence
from provisioner.resources import patches_folder
from tests.support.drift_builds import PATCH, subject
from tests.support.index_server import IndexServer, Mood
from tests.support.wheels import wheel_filename

VERDICTS = {
    "1.0": Verdict.APPLIES,
    "1.1": Verdict.APPLIES,
    "1.2": Verdict.APPLIES_AT_OFFSET,
    "1.3": Verdict.APPLIES_AT_OFFSET,
    "1.4": Verdict.CONFLICT,
    "1.5": Verdict.CONFLICT,
    "1.7": Verdict.TARGET_MISSING,
}


def run(settings, *subjects: Subject, spec: str = "pypi") -> DriftReport:
    builds = find_builds([spec], settings).found
    return scan(subjects or (subject(),), builds, settings, against=[spec], reporter=Silence())


def test_each_build_gets_its_verdict(settings):
    report = run(settings)
    found = {column.build.label: column.cells[0].verdict.verdict for column in report.columns}
    assert {label: found[label] for label in VERDICTS} == VERDICTS
    # One signal alone, the text, is "probably": nobody said that the merge commit is an ancestor.
    assert found["1.6"] in {Verdict.PROBABLY_MERGED, Verdict.MERGED_UPSTREAM}


def test_equal_files_are_read_and_judged_once(settings, index: IndexServer):
    report = run(settings)
    assert report.cost.reused == 3
    index.forget_requests()
    again = run(settings)
    assert again.columns == report.columns
    assert not [request for request in index.requests if request.path.endswith(".whl")]


def test_the_newest_builds_and_ranges(settings):
    assert [str(item.version) for item in find_builds(["pypi"], settings, last=2).found] == ["1.6", "1.7"]
    assert [str(item.version) for item in find_builds(["pypi:>=1.2,<1.4"], settings).found] == ["1.2", "1.3"]
    with pytest.raises(NoSuchBuildError):
        find_builds(["pypi:>=9"], settings)


def test_a_wheel_that_cannot_be_read_is_a_column_that_says_why(settings, index: IndexServer):
    index.set_mood(f"packages/{wheel_filename('1.1')}", Mood(status=404))
    report = run(settings, spec="pypi:<1.3")
    (unread,) = report.unread
    assert unread.build.label == "1.1"
    assert unread.failure
    assert exit_code(report) == 4
    assert "1.1: could not be read" in print_text(report)


@pytest.mark.parametrize(
    ("policy", "responses", "code"),
    [
        (PatchPolicy.REQUIRED, {}, 1),
        (PatchPolicy.OPTIONAL, {}, 0),
        (PatchPolicy.NOT_NEEDED, {}, 0),
        (PatchPolicy.REQUIRED, {"conflict": DriftResponse.WARN, "target-missing": DriftResponse.IGNORE}, 0),
        (PatchPolicy.OPTIONAL, {"conflict": DriftResponse.FAIL}, 1),
    ],
)
def test_the_recipe_decides_what_a_verdict_means(settings, policy, responses, code):
    assert exit_code(run(settings, subject(policy, responses), spec="pypi:>=1.4,<1.7")) == code


def test_a_merged_patch_is_a_notice():
    assert response_to(Verdict.MERGED_UPSTREAM, PatchPolicy.REQUIRED, {}) is DriftResponse.NOTICE
    assert response_to(Verdict.APPLIES, PatchPolicy.REQUIRED, {}) is DriftResponse.IGNORE


def test_a_drift_keeps_its_key_until_it_changes(settings):
    report = run(settings)
    cells = {column.build.label: column.cells[0] for column in report.columns}
    assert cells["1.4"].key == cells["1.5"].key == run(settings).columns[4].cells[0].key
    assert len({cells[label].key for label in ("1.0", "1.2", "1.4", "1.6", "1.7")}) == 5
    assert drift_key("other", cells["1.4"].verdict) != cells["1.4"].key


def bisect(settings, good: str, bad: str):
    builds = find_builds(["pypi"], settings).found
    item = subject()
    judge = lambda build: scan([item], [build], settings, against=[], reporter=Silence()).columns[0]  # noqa: E731
    return find_turns(builds, good, bad, judge)


def test_bisection_names_the_first_build_with_the_new_answer(settings):
    found = bisect(settings, "1.0", "1.5")
    (turn,) = found.turns
    assert (turn.last.label, turn.first.label) == ("1.3", "1.4")
    assert turn.after.verdict.verdict is Verdict.CONFLICT
    assert found.judged <= 5
    assert "from 1.4" in print_bisection(found)


def test_bisection_of_nothing_and_of_nonsense(settings):
    assert bisect(settings, "1.0", "1.2").turns == ()
    with pytest.raises(UsageError):
        bisect(settings, "1.5", "1.0")
    with pytest.raises(NoSuchBuildError):
        bisect(settings, "0.1", "1.0")


def test_the_forms_of_a_report_agree(settings):
    report = run(settings)
    failing = [build.label for build, _ in report.failing]
    assert failing == ["1.4", "1.5", "1.7"]
    data = json.loads(print_report_json(report))
    assert data["schema"] == "provision/drift/1"
    assert [item["build"] for item in data["failing"]] == failing
    root = ElementTree.fromstring(print_junit(report))
    assert [suite.get("name") for suite in root if suite.get("failures") == "1"] == failing
    assert print_markdown(report).count("**`") == len(failing)
    # An annotation for each drift where it begins, not for each build that has it.
    assert print_github(report).count("::error ") == 2
    table = print_text(report)
    assert all(f"{label}: small: bounds" in table for label in ("1.4", "1.7"))


def test_annotations_cannot_be_broken_out_of(settings):
    for line in print_github(run(settings)).splitlines():
        assert line.startswith("::")


def test_a_listed_commit_without_a_build_is_told(index: IndexServer, settings, tmp_path):
    from dataclasses import replace

    from tests.support.drift_builds import OLD, build

    commit = "a" * 40
    index.add_build(commit, {wheel_filename(f"1.9.dev1+g{commit[:9]}"): build(f"1.9.dev1+g{commit[:9]}", OLD)})
    listed = tmp_path / "commits"
    listed.write_text(f"{commit}\n{'b' * 40}\n")
    own = replace(settings, vllm_index=index.url, github_api=None)
    builds = find_builds([f"commits:{listed}"], own)
    assert [item.commit for item in builds.found] == [commit]
    (line,) = builds.missing
    assert line.startswith("b" * 40)


def test_two_recipes_with_one_series_get_the_same_answers(settings):
    one = subject()
    both = run(settings, one, Subject(name="twin", series_for=one.series_for, responses={}))
    alone = run(settings, one)
    for column, single in zip(both.columns, alone.columns, strict=True):
        first, second = column.cells
        assert first == single.cells[0]
        assert (second.recipe, second.verdict, second.account) == ("twin", first.verdict, first.account)


def test_own_patches_are_read_once_unless_they_have_variants(tmp_path):
    versions = [Version("0.27.1"), Version("0.30.0")]
    (tmp_path / "bounds.patch").write_bytes(PATCH)
    loose = stack_subject([tmp_path], root="", strip=None, base=None)
    assert loose.series_for(versions[0]) is loose.series_for(versions[1])
    stored = stack_subject([patches_folder() / "pr50021-gdn-spec-bounds"], root="", strip=None, base=None)
    texts = [stored.series_for(version).texts[0].patch.digest for version in versions]
    assert texts[0] != texts[1]
