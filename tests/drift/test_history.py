"""Two signals for "merged upstream": the text in the wheel, and upstream's commit in the build's history."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.version import Version

from provisioner.cli.main import main
from provisioner.digests import digest_of
from provisioner.documents.recipe import DriftResponse, PatchPolicy
from provisioner.drift.builds import find_builds
from provisioner.drift.history import Ancestry, CloneHistory, ask_first_to_know, listed_history, open_clone
from provisioner.drift.model import Build, Cell
from provisioner.drift.policy import exit_code
from provisioner.drift.reports.text import print_text
from provisioner.drift.scan import scan
from provisioner.errors import UsageError
from provisioner.progress import Silence
from tests.support.drift_builds import CHANGED, MERGED, PATCH, build, subject
from tests.support.index_server import IndexServer
from tests.support.wheels import wheel_filename


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """A repository: ``before``, then ``merge`` and ``after``; ``beside`` grows from ``before`` without the merge."""

    folder: Path
    before: str
    merge: str
    after: str
    beside: str

    def tag(self, version: str, commit: str) -> None:
        git(self.folder, "tag", f"v{version}", commit)


def git(folder: Path, *words: str) -> str:
    own = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    command = ("git", "-C", str(folder), *own, *words)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    folder = tmp_path / "upstream"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")

    def commit(name: str) -> str:
        git(folder, "commit", "--quiet", "--allow-empty", "--message", name)
        return git(folder, "rev-parse", "HEAD")

    before = commit("before")
    merge, after = commit("merge"), commit("after")
    git(folder, "checkout", "--quiet", "-b", "release", before)
    beside = commit("the same, picked")
    git(folder, "checkout", "--quiet", "main")
    return Upstream(folder=folder, before=before, merge=merge, after=after, beside=beside)


def judge(settings, upstream: Upstream, version: str, policy: PatchPolicy = PatchPolicy.REQUIRED, **responses):
    item = subject(
        policy, {word.replace("_", "-"): answer for word, answer in responses.items()}, merged_as=upstream.merge
    )
    builds = find_builds([f"pypi:{version}"], settings).found
    witness = CloneHistory(upstream.folder)
    return scan([item], builds, settings, against=["pypi"], reporter=Silence(), witness=witness)


def only_cell(report) -> Cell:
    ((cell,),) = (column.cells for column in report.columns)
    return cell


@pytest.mark.parametrize(
    ("version", "at", "verdict", "response", "said"),
    [
        (
            "1.6",
            "after",
            "merged-upstream",
            "notice",
            "in the build's history, and its text is there: it can be dropped",
        ),
        ("1.6", "merge", "merged-upstream", "notice", "it can be dropped"),
        ("1.6", "beside", "probably-merged", "notice", "its text is there, but upstream's"),
        ("1.6", None, "probably-merged", "notice", "is not known: "),
        ("1.4", "after", "probably-merged", "fail", "in the build's history; its text has changed since"),
        ("1.4", "before", "conflict", "fail", "not one of its lines"),
        ("1.4", None, "conflict", "fail", "is not known: "),
        ("1.2", "after", "applies-at-offset", "notice", "yet its text is not there: taken back or rewritten"),
        ("1.2", "before", "applies-at-offset", "ignore", ""),
        ("1.2", None, "applies-at-offset", "ignore", ""),
        ("1.7", "after", "target-missing", "fail", "its text has changed since"),
    ],
)
def test_only_both_signals_together_say_merged(settings, upstream, version, at, verdict, response, said):
    if at is not None:
        upstream.tag(version, getattr(upstream, at))
    report = judge(settings, upstream, version)
    cell = only_cell(report)
    assert (str(cell.verdict.verdict), str(cell.response)) == (verdict, response)
    assert said in "\n".join(cell.account)
    assert exit_code(report) == (1 if response == "fail" else 0)
    assert (said in print_text(report)) is (response != "ignore" or not said)


def test_history_alone_takes_the_response_of_what_stands_there(settings, upstream):
    upstream.tag("1.4", upstream.after)
    assert only_cell(judge(settings, upstream, "1.4", PatchPolicy.OPTIONAL)).response is DriftResponse.WARN
    ignored = judge(settings, upstream, "1.4", conflict=DriftResponse.IGNORE)
    assert only_cell(ignored).response is DriftResponse.IGNORE
    lenient = judge(settings, upstream, "1.4", probably_merged=DriftResponse.IGNORE)
    assert only_cell(lenient).response is DriftResponse.FAIL


def test_a_patch_that_applies_although_it_was_merged_is_a_drift_of_its_own(settings, upstream):
    upstream.tag("1.2", upstream.before)
    upstream.tag("1.3", upstream.after)
    first, second = (only_cell(judge(settings, upstream, version)) for version in ("1.2", "1.3"))
    assert first.key != second.key
    report = judge(settings, upstream, ">=1.2,<1.4")
    assert report.cost.reused == 0
    assert "1.3: small: bounds: applies-at-offset (notice" in print_text(report)


def build_at(commit: str | None, version: str = "9.9") -> Build:
    return Build(label=version, version=Version(version), filename="", commit=commit, variant=None, uploaded=None)


def test_a_clone_is_asked_about_commits_and_tags_and_nothing_else(upstream, tmp_path):
    ask = open_clone(upstream.folder)
    assert ask(upstream.merge, build_at(upstream.after)) == Ancestry(is_ancestor=True)
    assert ask(upstream.merge, build_at(upstream.after[:9])) == Ancestry(is_ancestor=True)
    assert ask(upstream.merge, build_at(upstream.beside)) == Ancestry(is_ancestor=False)
    assert "neither commit nor tag" in ask(upstream.merge, build_at("f" * 40)).why
    assert "does not have eeeeeeeeee" in ask("e" * 40, build_at(upstream.after)).why
    # A branch that is called like a commit is not that commit.
    git(upstream.folder, "branch", "abcdef012", upstream.after)
    assert ask(upstream.merge, build_at("abcdef012")).is_ancestor is None
    upstream.tag("0.27.1", upstream.after)
    assert ask(upstream.merge, build_at(None, "0.27.1+cu129")) == Ancestry(is_ancestor=True)


def test_a_clone_without_contents_will_do_and_is_never_completed(upstream, tmp_path):
    git(upstream.folder, "config", "uploadpack.allowFilter", "true")
    lean = tmp_path / "lean"
    words = ("clone", "--quiet", "--filter=blob:none", "--no-checkout", upstream.folder.as_uri(), str(lean))
    git(tmp_path, *words)
    git(upstream.folder, "commit", "--quiet", "--allow-empty", "--message", "newer than the clone")
    newest = git(upstream.folder, "rev-parse", "HEAD")
    ask = open_clone(lean)
    assert ask(upstream.merge, build_at(upstream.after)) == Ancestry(is_ancestor=True)
    assert ask(upstream.merge, build_at(newest)).is_ancestor is None


def test_a_shallow_clone_cannot_say_no(upstream, tmp_path):
    upstream.tag("1.0", upstream.after)
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--quiet", "--depth=1", upstream.folder.as_uri(), str(shallow))
    git(shallow, "fetch", "--quiet", "--depth=1", "origin", upstream.merge)
    ask = open_clone(shallow)
    ancestry = ask(upstream.merge, build_at(None, "1.0"))
    assert ancestry.is_ancestor is None
    assert "shallow" in ancestry.why


def test_no_clone_and_no_git(tmp_path, monkeypatch, upstream):
    with pytest.raises(UsageError, match="no git repository"):
        open_clone(tmp_path / "absent")
    assert CloneHistory(tmp_path / "absent")(upstream.merge, build_at(upstream.after)).is_ancestor is None
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError) as caught:
        open_clone(upstream.folder)
    assert caught.value.found == "git does not answer"


def test_a_list_of_commits_knows_its_order():
    ask = listed_history(["a" * 40, "b" * 12, "c" * 40])
    assert ask("b" * 40, build_at("c" * 9)) == Ancestry(is_ancestor=True)
    assert ask("b" * 40, build_at("b" * 40)) == Ancestry(is_ancestor=True)
    assert ask("b" * 40, build_at("a" * 40)) == Ancestry(is_ancestor=False)
    assert "does not have dddddddddd" in ask("d" * 40, build_at("a" * 40)).why
    assert "the commit of this build" in ask("a" * 40, build_at(None)).why
    assert ask("a" * 40, build_at("c" * 6)).is_ancestor is None
    both = ask_first_to_know([ask, listed_history(["d" * 40, "e" * 40])])
    assert both("d" * 40, build_at("e" * 40)).is_ancestor is True
    assert both("d" * 40, build_at("a" * 40)).why.count("the list of commits") == 2


STORED = f"""\
schema = 1
id = "bounds"
title = "Bounds"
fixes = "Negative values."
merged_as = "MERGE"

[[variant]]
file = "bounds.patch"
versions = ">=1"
cut_against = "1.0"
sha256 = "{digest_of(PATCH)}"

[[variant.files]]
path = "vllm/ops.py"
hunks = 1
added = 2
removed = 0
scopes = ["scale"]
"""


def test_the_command_asks_a_clone_and_the_order_of_commits(tmp_path, upstream, monkeypatch, capsys):
    folder = tmp_path / "bounds"
    folder.mkdir()
    (folder / "bounds.patch").write_bytes(PATCH)
    (folder / "patch.toml").write_text(STORED.replace("MERGE", upstream.merge))
    commits = tmp_path / "commits"
    commits.write_text(f"{upstream.merge}\n{upstream.after}\n")
    with IndexServer() as server:
        for commit, version, text in ((upstream.merge, "1.1.dev1", MERGED), (upstream.after, "1.1.dev2", CHANGED)):
            name = f"{version}+g{commit[:9]}"
            server.add_build(commit, {wheel_filename(name): build(name, text)})
        words = ["drift", "--patches", str(folder), "--index-url", server.url, "--format", "text"]
        assert main([*words, "--against", f"commits:{commits}"]) == 1
        listed = capsys.readouterr().out
        assert main([*words, "--against", f"commit:{upstream.merge}", "--history", str(upstream.folder)]) == 0
        known = capsys.readouterr().out
        assert main([*words, "--against", f"commit:{upstream.merge}"]) == 0
        unknown = capsys.readouterr().out
        # A repository that is none of upstream's.
        git(tmp_path, "init", "--quiet", "other")
        other = ["--history", str(tmp_path / "other")]
        commits_of_both = ["--against", f"commit:{upstream.merge}", "--against", f"commit:{upstream.after}"]
        assert main([*words, *commits_of_both, *other]) == 1
        assert capsys.readouterr().err.count("has neither commit nor tag of any of these builds") == 1
        assert main([*words, *commits_of_both, "--history", str(upstream.folder)]) == 1
        assert "neither commit nor tag" not in capsys.readouterr().err
        assert main([*words, "--against", f"commit:{upstream.merge}", "--history", str(tmp_path)]) == 2
    assert "bounds: merged-upstream (notice" in listed
    assert "bounds: probably-merged (fail" in listed
    assert "its text has changed since" in listed
    assert "bounds: merged-upstream (notice" in known
    assert "bounds: probably-merged (notice" in unknown
