"""Reports of parts are one report: what a single run over everything says."""

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from packaging.version import Version

from provisioner.cli.main import main
from provisioner.digests import digest_of
from provisioner.documents.recipe import PatchPolicy
from provisioner.drift.bisect import find_turns
from provisioner.drift.builds import find_builds
from provisioner.drift.explain import explain_patch, tell_changes
from provisioner.drift.merge import Part, merge_reports
from provisioner.drift.model import Build, Cell, Column, Cost, DriftReport, Unread, drift_key, response_to
from provisioner.drift.policy import exit_code
from provisioner.drift.reports.data import print_bisection_json, print_report_json
from provisioner.drift.reports.github import print_github
from provisioner.drift.reports.html import print_html
from provisioner.drift.reports.junit import print_junit
from provisioner.drift.reports.markdown import print_markdown
from provisioner.drift.reports.parse import parse_report
from provisioner.drift.reports.text import print_text
from provisioner.drift.scan import Subject, scan
from provisioner.errors import InvalidReportError
from provisioner.patching.model import FileFacts
from provisioner.patching.series import judge_series
from provisioner.progress import Silence
from provisioner.series.model import Series
from tests.support.drift_builds import HISTORY, PATCH, subject
from tests.support.index_server import IndexServer, Mood
from tests.support.wheels import wheel_filename

NO_COST = Cost(requests=0, received=0, seconds=0.0, reused=0)
SOURCES = ("pypi:<1.2", "pypi:>=1.2,<1.4", "pypi:>=1.4")
PRINTERS: tuple[Callable[[DriftReport], str], ...] = (
    print_text,
    print_report_json,
    print_markdown,
    print_github,
    print_junit,
    print_html,
)


def two_subjects() -> tuple[Subject, Subject]:
    return subject(), subject(PatchPolicy.OPTIONAL, name="other")


def judge(index_settings, subjects: Iterable[Subject], *specs: str) -> DriftReport:
    builds = find_builds(specs, index_settings).found
    return scan(tuple(subjects), builds, index_settings, against=specs, reporter=Silence())


def merge(*reports: DriftReport) -> DriftReport:
    return merge_reports([Part(name=f"{number}.json", report=report) for number, report in enumerate(reports)])


def free(report: DriftReport) -> DriftReport:
    return replace(report, cost=NO_COST)


def test_the_parts_of_a_split_are_the_whole(settings):
    whole = judge(settings, two_subjects(), *SOURCES)
    by_recipe = [judge(settings, [item], *SOURCES) for item in two_subjects()]
    by_source = [judge(settings, two_subjects(), source) for source in SOURCES]
    by_both = [judge(settings, [item], source) for source in reversed(SOURCES) for item in two_subjects()]
    # What one part alone cannot know: the signature before the change stands in another part.
    assert any("became (x, by)" in line for column in whole.columns for cell in column.cells for line in cell.account)
    assert not any(cell.changes for report in by_source for column in report.columns for cell in column.cells)
    for parts in (by_recipe, by_source, by_both):
        read = [parse_report(print_report_json(report), where="x") for report in parts]
        assert read == parts
        merged = merge(*read)
        assert free(merged) == free(whole)
        assert exit_code(merged) == exit_code(whole) == 1
        assert merged.cost.received == sum(report.cost.received for report in parts)
        for printer in PRINTERS:
            assert printer(free(merged)) == printer(free(whole))


def test_a_build_that_nobody_judged_for_a_recipe_is_a_hole_that_shows(settings):
    small, other = two_subjects()
    report = merge(judge(settings, [small], "pypi:<1.1"), judge(settings, [other], "pypi:1.1"))
    assert [(build.label, row[0]) for build, row in report.not_judged] == [("1.0", "other"), ("1.1", "small")]
    assert ". not judged" in print_text(report)
    assert "| small | bounds | `=` | . |" in print_markdown(report)
    assert "small: bounds: not judged on 1.1" in print_text(report).splitlines()
    assert "* other: bounds: not judged on 1.0" in print_markdown(report).splitlines()
    assert "nothing fails, 2 cells were not judged." in print_html(report)
    assert print_html(report).count('aria-label="1.0: not judged">.</span>') == 1
    assert print_junit(report).count('<skipped message="not judged" />') == 2
    assert (
        "::warning title=not judged::other: bounds: not judged on 1.0%0Asmall: bounds: not judged on 1.1"
        in print_github(report)
    )
    assert [item["build"] for item in json.loads(print_report_json(report))["not_judged"]] == ["1.0", "1.1"]
    assert exit_code(report) == 0


def test_what_one_part_could_not_read_and_another_could_is_judged(settings, index: IndexServer):
    small, other = two_subjects()
    index.set_mood(f"packages/{wheel_filename('1.1')}", Mood(status=404))
    unread = judge(settings, [small, other], "pypi:<1.2")
    assert exit_code(unread) == 4
    index.set_mood(f"packages/{wheel_filename('1.1')}", Mood())
    judged = judge(settings, [small], "pypi:1.1")
    merged = merge(unread, judged)
    (column,) = merged.unread
    assert ([item.recipe for item in column.unread], column.recipes) == (["other"], ("small",))
    assert exit_code(merged) == 4
    assert exit_code(merge(merged, judge(settings, [other], "pypi:1.1"))) == 0


def first_cell(report: DriftReport, **changes: Any) -> DriftReport:
    column, *columns = report.columns
    cell, *cells = column.cells
    return replace(report, columns=(replace(column, cells=(replace(cell, **changes), *cells)), *columns))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text": "f" * 64}, "in 0.json, text ffffffffffff in 1.json"),
        ({"key": "0123456789ab"}, "in 0.json, drift 0123456789ab in 1.json"),
        ({"policy": PatchPolicy.OPTIONAL}, "policy required in 0.json, policy optional in 1.json"),
    ],
)
def test_reports_that_contradict_one_another_are_refused(settings, changes, said):
    report = judge(settings, [subject()], "pypi:<1.2")
    with pytest.raises(InvalidReportError) as caught:
        merge(report, first_cell(report, **changes))
    assert said in str(caught.value.found)
    assert "small: bounds on 1.0: " in str(caught.value.found)
    assert caught.value.where == "0.json, 1.json"


def test_another_verdict_for_the_same_text_and_build_is_named(settings):
    report = judge(settings, [subject()], "pypi:<1.2")
    other = judge(settings, [subject()], "pypi:1.4").columns[0].cells[0]
    with pytest.raises(InvalidReportError, match="contradict") as caught:
        merge(report, replace(report, columns=(replace(report.columns[0], cells=(other,)),)))
    assert caught.value.found == "small: bounds on 1.0: applies in 0.json, conflict in 1.json"


def write(folder: Path, *texts: str) -> list[str]:
    paths = [folder / f"{number}.json" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return [str(path) for path in paths]


def test_the_command_merges_files_and_folders(settings, tmp_path, capsys):
    parts = [judge(settings, [item], source) for source in SOURCES for item in two_subjects()]
    files = write(tmp_path, *map(print_report_json, parts))
    assert main(["drift", "--merge", *files, "--json"]) == 1
    merged = capsys.readouterr().out
    assert json.loads(merged)["builds"] == json.loads(print_report_json(merge(*parts)))["builds"]
    assert main(["drift", "--merge", str(tmp_path), "--format", "markdown"]) == 1
    assert capsys.readouterr().out.startswith("| recipe | patch | 1.0 |")
    # What was merged can be merged again, and one report alone printed in another form.
    (tmp_path / "all.json").write_text(merged)
    assert main(["drift", "--merge", str(tmp_path / "all.json"), files[0], "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["builds"] == json.loads(merged)["builds"]
    holding = write(tmp_path, print_report_json(judge(settings, [subject()], "pypi:<1.2")))
    assert main(["drift", "--merge", *holding]) == 0


def test_the_command_refuses_what_is_no_report_and_names_every_file(settings, tmp_path, capsys):
    text = print_report_json(judge(settings, [subject()], "pypi:<1.1"))
    files = write(tmp_path, text, text[: len(text) // 2], text.replace("drift/1", "status/1"), "\x00")
    assert main(["drift", "--merge", *files, str(tmp_path / "absent.json")]) == 3
    said = capsys.readouterr().err
    assert [name for name in ("0.json", "1.json", "2.json", "3.json", "absent.json") if name in said] == [
        "1.json",
        "2.json",
        "3.json",
        "absent.json",
    ]
    assert said.count("error[") == 1
    (tmp_path / "empty").mkdir()
    assert main(["drift", "--merge", str(tmp_path / "empty")]) == 2


@pytest.mark.parametrize(
    "words",
    [["--against", "pypi"], ["--last", "3"], ["--bisect", "1.0", "1.1"], ["--strip", "0"], ["--variant", "a@1"]],
    ids=lambda words: words[0],
)
def test_questions_cannot_be_asked_of_reports(words, tmp_path, capsys):
    assert main(["drift", "--merge", str(tmp_path / "x.json"), *words]) == 2
    assert f"{words[0]} cannot be given with --merge" in capsys.readouterr().err


def test_a_report_that_lacks_anything_is_refused(settings):
    values = json.loads(print_report_json(judge(settings, [subject()], "pypi:1.4")))
    parse_report(json.dumps(values), where="x")
    taken = [path for path in paths_in(values) if not is_nullable(path) and is_taken(without(values, path))]
    assert taken == []


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (("builds",), "a report of no build"),
        (("builds", 0, "patches"), "a recipe that was judged without a patch"),
        (("builds", 0, "patches", 0, "files"), "a patch of no file"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_lists_that_no_run_leaves_empty_are_refused(settings, tmp_path, capsys, path, said):
    values = with_value(json.loads(print_report_json(judge(settings, [subject()], "pypi:<1.2"))), path, [])
    assert main(["drift", "--merge", *write(tmp_path, json.dumps(values))]) == 3
    assert said in capsys.readouterr().err


def test_a_build_on_which_nothing_was_judged_is_refused(settings):
    values = json.loads(print_report_json(judge(settings, [subject()], "pypi:1.1")))
    values = with_value(with_value(values, ("builds", 0, "patches"), []), ("builds", 0, "recipes"), [])
    with pytest.raises(InvalidReportError, match="nothing was judged"):
        parse_report(json.dumps(values), where="x")


def test_a_recipe_without_patches_is_none_that_was_judged(settings):
    empty = Subject(name="empty", series_for=lambda _: Series(), responses={})
    report = judge(settings, [subject(), empty], "pypi:1.1")
    assert report.columns[0].recipes == ("small",)
    assert parse_report(print_report_json(report), where="x") == report


def test_one_build_under_two_file_names_is_refused(settings):
    report = judge(settings, [subject()], "pypi:1.1")

    def named(filename: str) -> DriftReport:
        (column,) = report.columns
        return replace(report, columns=(replace(column, build=replace(column.build, filename=filename)),))

    with pytest.raises(InvalidReportError, match="contradict") as caught:
        merge(named("vllm-1.1-cp38-abi3-manylinux1_x86_64.whl"), named("vllm-1.1-cp38-abi3-manylinux_2_31_x86_64.whl"))
    assert str(caught.value.found).startswith("1.1: vllm-1.1-cp38-abi3-manylinux1_x86_64.whl in 0.json, ")
    both = merge(named("vllm-1.1-cp38-abi3-manylinux1_x86_64.whl"), named("vllm-1.1-cp38-abi3-manylinux1_aarch64.whl"))
    assert len(both.columns) == 2


def with_value(values: Any, path: tuple[Any, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(values))
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copy


def is_taken(values: Any) -> bool:
    try:
        parse_report(json.dumps(values), where="x")
    except InvalidReportError:
        return False
    return True


def paths_in(value: Any) -> Iterable[tuple[Any, ...]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield (key,)
            yield from ((key, *rest) for rest in paths_in(item))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from ((number, *rest) for rest in paths_in(item))


def is_nullable(path: tuple[Any, ...]) -> bool:
    container = path[-3] if len(path) > 2 else None
    return path[-1] in {
        "builds": {"failure", "commit", "variant", "uploaded"},
        "patches": {"same_as", "merged_as", "in_history"},
        "files": {"before", "after", "moved_to"},
        "hunks": {"found", "offset", "scope", "found_scope", "displaced_by"},
        "views": {"line"},
    }.get(container, set())


def without(values: Any, path: tuple[Any, ...]) -> Any:
    copy = json.loads(json.dumps(values))
    place = copy
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return copy


def test_bisections_are_kept(settings):
    builds = find_builds(["pypi"], settings).found

    def column_of(candidate) -> Column:
        return scan([subject()], [candidate], settings, against=[], reporter=Silence()).columns[0]

    found = find_turns(builds, "1.0", "1.5", column_of)
    assert "the signature of scale changed: (x) became (x, by)" in found.turns[0].after.account[-1]
    part = parse_report(print_bisection_json(found), where="x")
    whole = judge(settings, [subject()], "pypi:<1.4")
    merged = merge(part, whole, part)
    assert merged.bisections == (found,)
    assert exit_code(whole) == 0
    assert exit_code(merged) == 1
    for printer in PRINTERS:
        assert ('"turns": [' if printer is print_report_json else "conflict from 1.4") in printer(merged)
    assert parse_report(print_report_json(merged), where="x") == merged
    (turn,) = found.turns
    other = replace(found, turns=(replace(turn, first=found.bad),))
    with pytest.raises(InvalidReportError) as caught:
        merge(merged, DriftReport(against=(), columns=(), cost=NO_COST, bisections=(other,)))
    assert "turned on 1.4 in 0.json, on 1.5 in 1.json" in str(caught.value.found)


def cell_on(recipe: str, version: str) -> Cell:
    series = subject(name=recipe).series_for(Version(version)).texts
    content = HISTORY[version]
    facts = {
        "vllm/ops.py": FileFacts(
            path="vllm/ops.py", content=content, pristine=content, recorded=digest_of(content) if content else None
        )
    }
    (verdict,) = judge_series(series, facts).patches
    account = explain_patch(verdict, series[0].patch, facts)
    return Cell(
        recipe=recipe,
        place=0,
        text=digest_of(PATCH),
        policy=PatchPolicy.REQUIRED,
        verdict=verdict,
        response=response_to(verdict.verdict, PatchPolicy.REQUIRED, {}),
        key=drift_key(recipe, verdict),
        reasons=account.lines,
        views=account.views,
        signatures=account.signatures,
    )


VERSIONS, RECIPES = ("1.0", "1.3", "1.4", "1.6"), ("a", "b")
ANSWERS = {pair: cell_on(*pair) for pair in itertools.product(RECIPES, VERSIONS)}


def report_of(answers: dict[tuple[str, str], str | None], against: set[str]) -> DriftReport:
    """``answers`` has, for some of all recipes and versions, why they could not be read, or None where they were."""
    columns = []
    for version in sorted({version for _, version in answers}):
        asked = sorted(recipe for recipe, of in answers if of == version)
        judged = tuple(recipe for recipe in asked if answers[recipe, version] is None)
        columns.append(
            Column(
                build=Build(
                    label=version,
                    version=Version(version),
                    filename=wheel_filename(version),
                    commit=None,
                    variant=None,
                    uploaded=None,
                ),
                recipes=judged,
                cells=tuple(ANSWERS[recipe, version] for recipe in judged),
                unread=tuple(
                    Unread(recipe=recipe, why=why) for recipe in asked if (why := answers[recipe, version]) is not None
                ),
            )
        )
    return DriftReport(against=tuple(sorted(against)), columns=tell_changes(columns), cost=NO_COST)


reports = st.builds(
    report_of,
    st.dictionaries(st.sampled_from(sorted(ANSWERS)), st.sampled_from([None, None, "no route", "404"])),
    st.sets(st.sampled_from(["pypi", "nightly"])),
)


@examples(max_examples=60, deadline=None)
@given(reports, reports, reports)
def test_merging_is_commutative_associative_and_idempotent(a, b, c):
    assert merge(a) == a
    assert merge(a, a) == a
    assert merge(a, b) == merge(b, a)
    assert merge(merge(a, b), c) == merge(a, merge(b, c)) == merge(c, b, a)
    assert merge(merge(a, b), a) == merge(a, b)


@examples(max_examples=60, deadline=None)
@given(reports.filter(lambda report: report.columns))
def test_parsing_undoes_printing(report):
    assert parse_report(print_report_json(report), where="x") == report


@examples(max_examples=60, deadline=None)
@given(reports, reports)
def test_no_part_fails_without_the_whole(a, b):
    whole = merge(a, b)
    keys = {(build, cell.key) for build, cell in whole.failing}
    assert keys == {(build, cell.key) for part in (a, b) for build, cell in part.failing}
    if 1 in (exit_code(a), exit_code(b)):
        assert exit_code(whole) == 1
