"""The patch group on small installed trees: what people meet who patch installed packages, with the right outcome."""

import errno
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from provisioner.cli.main import main
from provisioner.digests import digest_of
from provisioner.patching.compare import change_between
from provisioner.patching.diff import print_patch
from provisioner.patching.model import Patch
from provisioner.resources import patches_folder, recipes_folder, stored_patch_names
from tests.support.index_server import IndexServer
from tests.support.wheels import wheel_bytes, wheel_filename

BODY = b"".join(b"    step_%d()\n" % number for number in range(12))
FILES = {
    "demo/__init__.py": b"",
    "demo/one.py": b"import os\n\n\ndef first():\n" + BODY + b"\n\ndef second():\n" + BODY + b"\n\nlast = 1\n",
    "demo/two.py": b"value = 1\nother = 2\nthird = 3\n",
    "demo/windows.py": b"a = 1\r\nb = 2\r\nc = 3\r\n",
    "demo/sub/three.py": b"deep = True\n",
    "demo/lib.so": b"\x7fELF\0\1\2",
}
NOT_COMPILED = "whether the changed files compile was not checked: nobody knows which Python imports this folder"


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)

    def verdicts(self) -> dict[str, str]:
        return {patch["id"]: patch["verdict"] for patch in self.json["patches"]}

    def files(self, patch: str) -> dict[str, str]:
        found = next(entry for entry in self.json["patches"] if entry["id"] == patch)
        return {file["path"]: file["verdict"] for file in found["files"]}


@dataclass(frozen=True)
class Desk:
    """A site-packages folder with ``demo`` 1.0, its wheel, a folder for patches, and the command line."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def site(self) -> Path:
        return self.folder / "site"

    @property
    def wheel(self) -> Path:
        return self.folder / wheel_filename("1.0", project="demo")

    def run(self, command: str, *words: object, where: bool = True) -> Result:
        place = ["--site-packages", str(self.site), "--package", "demo"] if where else []
        code = main(["patch", command, *map(str, words), *place])
        out, err = self.capsys.readouterr()
        return Result(code, out, err)

    def check(self, *words: object) -> Result:
        return self.run("check", *words, "--json")

    def patch(self, name: str, **files: object) -> Path:
        """A patch that replaces texts in files as shipped: ``two=[(b"old", b"new")]``."""
        changes = []
        for stem, edits in files.items():
            path = f"demo/{stem.replace('__', '/')}.py"
            old = FILES.get(path)
            new = old or b""
            for before, after in edits:  # type: ignore[attr-defined]
                assert before in new
                new = new.replace(before, after, 1)
            change = change_between(path, old, new)
            assert change is not None
            changes.append(change)
        return self.write(name, print_patch(Patch(id=name, source=name, digest="", changes=tuple(changes))))

    def write(self, name: str, text: bytes) -> Path:
        path = self.folder / "patches" / f"{name}.patch"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text)
        return path

    def state(self) -> dict[str, tuple[bytes, int]]:
        return {
            place.relative_to(self.site).as_posix(): (place.read_bytes(), place.stat().st_mode)
            for place in sorted(self.site.rglob("*"))
            if place.is_file() and ".provision" not in place.parts
        }

    def stamps(self) -> dict[str, int]:
        return {str(place): place.stat().st_mtime_ns for place in sorted(self.site.rglob("*"))}

    def read(self, path: str) -> bytes:
        return (self.site / path).read_bytes()


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")  # nobody answers there
    monkeypatch.setenv("PROVISION_RETRIES", "0")
    made = Desk(tmp_path, capsys)
    data = wheel_bytes(FILES, version="1.0", project="demo")
    made.wheel.write_bytes(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        archive.extractall(made.site)
    return made


# Checking


def test_check_gives_the_whole_story_as_json(desk: Desk) -> None:
    patch = desk.patch("fix", two=[(b"other = 2", b"other = 22")])
    result = desk.check(patch)
    after = FILES["demo/two.py"].replace(b"other = 2", b"other = 22")
    assert result.code == 0
    assert result.json == {
        "schema": "provision/patch-check/1",
        "distribution": "demo",
        "version": "1.0",
        "patches": [
            {
                "id": "fix",
                "source": str(patch),
                "verdict": "applies",
                "why": "",
                "same_as": None,
                "displaced_by": [],
                "files": [
                    {
                        "path": "demo/two.py",
                        "verdict": "applies",
                        "before": digest_of(FILES["demo/two.py"]),
                        "after": digest_of(after),
                        "why": "",
                        "moved_to": None,
                        "hunks": [
                            {
                                "index": 1,
                                "verdict": "applies",
                                "line": 1,
                                "found": 1,
                                "offset": 0,
                                "scope": None,
                                "found_scope": None,
                                "why": "scope unknown",
                                "displaced_by": None,
                            }
                        ],
                    }
                ],
            }
        ],
        "final": {"demo/two.py": digest_of(after)},
        "foreign": [],
        "notes": [NOT_COMPILED],
        "interrupted": False,
    }
    assert desk.state()["demo/two.py"][0] == FILES["demo/two.py"]
    assert not (desk.site / ".provision").exists()


def test_check_against_a_wheel_that_is_not_installed(desk: Desk) -> None:
    patch = desk.patch("fix", two=[(b"other = 2", b"other = 22")])
    result = desk.run("check", patch, "--against", desk.wheel, "--package", "demo", "--json", where=False)
    assert (result.code, result.verdicts()) == (0, {"fix": "applies"})
    other = desk.run("check", patch, "--against", desk.wheel, where=False)
    assert (other.code, "the wheel is of another distribution" in other.err) == (2, True)
    assert "hint: --package demo" in other.err


def test_a_place_must_be_named_once(desk: Desk) -> None:
    patch = desk.patch("fix", two=[(b"1", b"2")])
    assert desk.run("check", patch, where=False).code == 2
    assert desk.run("check", patch, "--venv", "x").code == 2
    assert desk.run("check", patch, "--against", "x.whl").code == 2
    assert desk.run("check", patch, "--site-packages", desk.folder / "none", where=False).code == 5


def test_what_is_nothing_is_a_usage_error_that_names_the_nearest(desk: Desk) -> None:
    result = desk.run("check", "pr50021-gdn-spec-bound")
    assert result.code == 2
    assert "hint: did you mean 'pr50021-gdn-spec-bounds'?" in result.err


# Applying


def test_apply_then_again_then_revert(desk: Desk) -> None:
    patch = desk.patch("fix", two=[(b"other = 2", b"other = 22")], sub__four=[(b"", b"new = 1\n")])
    before = desk.state()
    applied = desk.run("apply", patch)
    assert applied.code == 0, applied.err
    assert desk.read("demo/two.py") == b"value = 1\nother = 22\nthird = 3\n"
    assert desk.read("demo/sub/four.py") == b"new = 1\n"
    stamps = desk.stamps()
    again = desk.run("apply", patch)
    assert (again.code, again.out) == (0, "nothing to do: every patch is applied\n")
    assert desk.stamps() == stamps
    assert desk.check(patch).verdicts() == {"fix": "applied"}
    reverted = desk.run("revert")
    assert reverted.code == 0, reverted.err
    assert desk.state() == before
    assert desk.run("revert").out == "taken back: nothing, no patch is applied\n"


def test_a_series_is_judged_whole_and_nothing_is_written_where_one_fails(desk: Desk) -> None:
    stale = desk.write(
        "a-stale", b"--- a/demo/two.py\n+++ b/demo/two.py\n@@ -1,2 +1,2 @@\n value = 1\n-gone = 2\n+g = 2\n"
    )
    good = desk.patch("b-good", one=[(b"last = 1", b"last = 2")])
    before = desk.state()
    result = desk.check(stale, good)
    assert (result.code, result.verdicts()) == (5, {"a-stale": "conflict", "b-good": "applies"})
    applied = desk.run("apply", stale, good)
    assert applied.code == 5
    assert "nothing was written" in applied.err
    assert desk.state() == before
    assert desk.run("apply", good).code == 0


def test_a_series_that_makes_no_python_is_refused_with_its_line(desk: Desk) -> None:
    """Where the folder's name says that our own Python imports it; of another it is said that nobody looked."""
    good = desk.patch("good", one=[(b"last = 1", b"last = 2")])
    bad = desk.patch("bad", two=[(b"other = 2", b"other = = 2")])
    unknown = desk.run("check", bad)
    assert (unknown.code, NOT_COMPILED in unknown.err) == (0, True)
    folder = desk.folder / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    shutil.copytree(desk.site, folder)
    demo = folder / "demo"
    before = {path: path.stat().st_mtime_ns for path in (demo, *demo.rglob("*"))}
    for command in ("check", "apply"):
        words = ["patch", command, str(good), str(bad), "--site-packages", str(folder), "--package", "demo"]
        assert main(words) == 5
        assert "demo/two.py:2: invalid syntax (changed by bad)" in desk.capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in (demo, *demo.rglob("*"))} == before


def test_a_hunk_that_fails_in_a_later_file_or_patch_leaves_no_trace(desk: Desk) -> None:
    first = desk.patch("a", two=[(b"value = 1", b"value = 10")])
    bad = desk.write(
        "b",
        desk.patch("x", one=[(b"last = 1", b"last = 2")]).read_bytes()
        + b"--- a/demo/sub/three.py\n+++ b/demo/sub/three.py\n@@ -1 +1 @@\n-shallow = True\n+x = 1\n",
    )
    before = desk.state()
    assert desk.run("apply", first, bad).code == 5
    assert desk.state() == before
    assert [place for place in desk.site.rglob("*") if place.suffix in {".rej", ".orig"}] == []


@pytest.mark.parametrize("ci", ["true", None])
def test_exit_codes_do_not_depend_on_ci(desk: Desk, monkeypatch: pytest.MonkeyPatch, ci: str | None) -> None:
    if ci:
        monkeypatch.setenv("CI", ci)
    else:
        monkeypatch.delenv("CI", raising=False)
    patch = desk.write("a", b"--- a/demo/two.py\n+++ b/demo/two.py\n@@ -1 +1 @@\n-nothing\n+x\n")
    assert desk.run("apply", patch).code == 5
    assert desk.run("check", patch).code == 5
    assert desk.run("check", desk.write("b", b"prose\n")).code == 3


def test_inside_another_checkout_and_with_a_strange_git_configuration(
    desk: Desk, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_home / ".gitconfig").write_text("[apply]\n\twhitespace = fix\n[core]\n\tautocrlf = true\n")
    subprocess.run(["git", "init", "-q", str(desk.folder)], check=True, timeout=60)
    patch = desk.write("a", b"--- a/demo/two.py\n+++ b/demo/two.py\n@@ -1 +1 @@\n-value = 1\n+value = 2   \n")
    monkeypatch.chdir(desk.site)
    assert desk.run("apply", patch).code == 0
    assert desk.read("demo/two.py").startswith(b"value = 2   \n")


def test_paths_that_a_wheel_does_not_ship_do_not_count(desk: Desk) -> None:
    text = desk.patch("x", two=[(b"value = 1", b"value = 10")]).read_bytes()
    text += b"--- a/tests/test_two.py\n+++ b/tests/test_two.py\n@@ -1 +1 @@\n-old\n+new\n"
    text += b"--- a/csrc/kernel.cu\n+++ b/csrc/kernel.cu\n@@ -1 +1 @@\n-old\n+new\n"
    patch = desk.write("pull", text)
    result = desk.check(patch)
    assert (result.code, result.verdicts()) == (0, {"pull": "applies"})
    assert result.files("pull") == {
        "demo/two.py": "applies",
        "tests/test_two.py": "not-shipped",
        "csrc/kernel.cu": "not-shipped",
    }
    assert desk.run("apply", patch).code == 0
    assert not (desk.site / "tests").exists()
    assert desk.check(patch).verdicts() == {"pull": "applied"}


def test_neighbouring_patches_are_both_applied_and_go_one_by_one(desk: Desk) -> None:
    first = desk.patch("a", two=[(b"value = 1", b"value = 10")])
    second = desk.write(
        "b",
        b"--- a/demo/two.py\n+++ b/demo/two.py\n@@ -1,3 +1,3 @@\n value = 10\n-other = 2\n+other = 20\n third = 3\n",
    )
    assert desk.run("apply", first, second).code == 0
    assert desk.check(first, second).verdicts() == {"a": "applied", "b": "applied"}
    assert desk.check(first).verdicts() == {"a": "applied", "b": "applied"}
    needed = desk.run("revert", "a")
    assert needed.code == 5
    assert "b would no longer apply" in needed.err
    assert "provision patch revert a b" in needed.err
    assert desk.run("revert", "b").code == 0
    assert desk.read("demo/two.py") == b"value = 10\nother = 2\nthird = 3\n"
    assert desk.check(first).verdicts() == {"a": "applied"}
    assert desk.run("revert", "zzz").code == 2


def test_without_a_network_less_is_known_and_that_is_said(desk: Desk) -> None:
    patch = desk.patch("a", two=[(b"value = 1", b"value = 10")])
    (desk.site / "demo/two.py").write_bytes(b"mine = 1\n")
    result = desk.check(patch)
    assert result.code == 5
    assert result.verdicts() != {"a": "applies"}
    (note,) = result.json["notes"]
    assert note.startswith("the files as shipped could not be read, so less is known: ")


def test_releases_of_any_project_are_read_from_the_users_index(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = desk.patch("a", two=[(b"value = 1", b"value = 10")])
    (desk.site / "demo/two.py").write_bytes(FILES["demo/two.py"] + b"mine = 1\n")
    with IndexServer() as server:
        server.add_package("demo", {desk.wheel.name: desk.wheel.read_bytes()})
        monkeypatch.setenv("UV_DEFAULT_INDEX", server.simple_url)
        looked = desk.run("check", patch, "--against", "pypi:1.0", "--package", "demo", "--json", where=False)
        assert (looked.code, looked.verdicts()) == (0, {"a": "applies"})
        foreign = desk.check(patch)
        assert (foreign.code, foreign.json["foreign"][0]["nearest"]) == (5, "the file as shipped")
        assert desk.run("apply", patch, "--reset").code == 0
        missing = desk.run("check", patch, "--against", "pypi:2.0", "--package", "demo", where=False)
        assert missing.code == 4
        assert desk.run("check", patch, "--against", "nightly", "--package", "demo", where=False).code == 2
    assert desk.read("demo/two.py") == FILES["demo/two.py"].replace(b"value = 1", b"value = 10")


def test_a_patch_applied_by_hand_in_part_is_partial_and_names_its_hunks(desk: Desk) -> None:
    patch = desk.patch("a", one=[(b"import os", b"import sys"), (b"last = 1", b"last = 2")])
    (desk.site / "demo/one.py").write_bytes(FILES["demo/one.py"].replace(b"last = 1", b"last = 2"))
    result = desk.check(patch)
    assert (result.code, result.verdicts()) == (5, {"a": "partial"})
    (file,) = result.json["patches"][0]["files"]
    assert [hunk["verdict"] for hunk in file["hunks"]] == ["applies", "applied"]


def test_applied_by_hand_is_applied_and_can_be_taken_back(desk: Desk) -> None:
    patch = desk.patch("a", two=[(b"value = 1", b"value = 10")])
    (desk.site / "demo/two.py").write_bytes(FILES["demo/two.py"].replace(b"value = 1", b"value = 10"))
    assert desk.check(patch).verdicts() == {"a": "applied"}
    assert desk.run("revert", "--what", patch).code == 0
    assert desk.read("demo/two.py") == FILES["demo/two.py"]


def test_a_place_that_is_not_the_only_one_is_no_place(desk: Desk) -> None:
    twice = desk.write(
        "a", b"--- a/demo/one.py\n+++ b/demo/one.py\n@@ -99,2 +99,2 @@\n     step_4()\n-    step_5()\n+    step_55()\n"
    )
    result = desk.check(twice)
    assert (result.code, result.verdicts()) == (5, {"a": "ambiguous"})


def test_a_removal_that_does_not_match_inserts_nothing(desk: Desk) -> None:
    patch = desk.write(
        "a", b"--- a/demo/two.py\n+++ b/demo/two.py\n@@ -1,3 +1,3 @@\n value = 1\n-other = 3\n+other = 20\n third = 3\n"
    )
    assert desk.check(patch).verdicts() == {"a": "conflict"}


def test_a_hunk_whose_function_is_gone_does_not_go_to_its_twin(desk: Desk) -> None:
    """The text of a hunk for first() stands in second() alone, once first() has changed."""
    patch = desk.patch("a", one=[(b"    step_4()\n    step_5()\n", b"    step_4()\n    step_55()\n")])
    changed = FILES["demo/one.py"].replace(b"    step_5()\n", b"    step_five()\n", 1)
    other = {**FILES, "demo/one.py": changed}
    newer = desk.folder / wheel_filename("1.1", project="demo")
    newer.write_bytes(wheel_bytes(other, version="1.1", project="demo"))
    blind = desk.run("check", patch, "--against", newer, "--package", "demo", "--json", where=False)
    told = desk.run(
        "check", patch, "--against", newer, "--package", "demo", "--cut-against", desk.wheel, "--json", where=False
    )
    assert (told.code, told.verdicts()) == (5, {"a": "wrong-scope"})
    (file,) = told.json["patches"][0]["files"]
    assert (file["hunks"][0]["scope"], file["hunks"][0]["found_scope"]) == ("first", "second")
    # Without the release that it was cut against the heading after @@ is all there is.
    assert blind.verdicts()["a"] != "applies"


def test_the_scopes_of_an_applied_patch_are_remembered(desk: Desk) -> None:
    """Both functions have the text of the hunk, so that it cannot be placed without knowing where it was cut."""
    patch = desk.write(
        "a", b"--- a/demo/one.py\n+++ b/demo/one.py\n@@ -9,2 +9,2 @@\n     step_4()\n-    step_5()\n+    step_55()\n"
    )
    assert desk.check(patch).verdicts() == {"a": "ambiguous"}
    assert desk.run("apply", patch, "--cut-against", desk.wheel).code == 0
    assert desk.read("demo/one.py").index(b"step_55()") < desk.read("demo/one.py").index(b"def second")
    assert desk.check(patch).verdicts() == {"a": "applied"}
    assert "nothing to do" in desk.run("apply", patch).out
    assert desk.run("revert", "a").code == 0
    assert desk.read("demo/one.py") == FILES["demo/one.py"]


def test_a_creation_without_dev_null_does_not_double_the_file(desk: Desk) -> None:
    patch = desk.write("a", b"--- a/demo/new.py\n+++ b/demo/new.py\n@@ -0,0 +1,2 @@\n+a = 1\n+b = 2\n")
    before = desk.state()
    assert desk.run("apply", patch).code == 0
    assert desk.run("apply", patch).code == 0
    assert desk.read("demo/new.py") == b"a = 1\nb = 2\n"
    assert desk.run("revert").code == 0
    assert desk.state() == before


def test_permissions_are_kept_and_no_copies_are_left(desk: Desk) -> None:
    (desk.site / "demo/one.py").chmod(0o640)
    patch = desk.write("a", b"--- a/demo/one.py\n+++ b/demo/one.py\n@@ -40,2 +40,2 @@\n \n-last = 1\n+last = 2\n")
    names = set(desk.state())
    result = desk.run("apply", patch)
    assert result.code == 0, result.out
    assert "offset" in result.out
    assert set(desk.state()) == names
    assert desk.state()["demo/one.py"][1] & 0o777 == 0o640


def test_any_one_hunk_missing_from_a_finished_tree_is_noticed(desk: Desk) -> None:
    edits = [(b"import os", b"import sys"), (b"def second", b"def zweite"), (b"last = 1", b"last = 2")]
    patch = desk.patch("a", one=edits)
    assert desk.run("apply", patch).code == 0
    finished = desk.read("demo/one.py")
    for before, after in edits:
        (desk.site / "demo/one.py").write_bytes(finished.replace(after, before, 1))
        result = desk.check(patch)
        assert (result.code, result.verdicts()["a"]) == (5, "partial")
    for flipped in (0, len(finished) // 2, len(finished) - 2):
        (desk.site / "demo/one.py").write_bytes(finished[:flipped] + b"#" + finished[flipped + 1 :])
        result = desk.check(patch)
        assert result.code == 5
        assert result.verdicts()["a"] in {"foreign", "partial"}


def test_windows_line_ends_stay(desk: Desk) -> None:
    patch = desk.write(
        "a", b"--- a/demo/windows.py\n+++ b/demo/windows.py\n@@ -1,3 +1,3 @@\n a = 1\n-b = 2\n+b = 22\n c = 3\n"
    )
    assert desk.run("apply", patch).code == 0
    assert desk.read("demo/windows.py") == b"a = 1\r\nb = 22\r\nc = 3\r\n"
    assert desk.check(patch).verdicts() == {"a": "applied"}


# Foreign edits


def test_a_foreign_edit_is_shown_against_the_nearest_state_and_reset_on_request(desk: Desk) -> None:
    patch = desk.patch("a", one=[(b"last = 1", b"last = 2")])
    assert desk.run("apply", patch).code == 0
    good = desk.state()
    (desk.site / "demo/one.py").write_bytes(desk.read("demo/one.py") + b"mine = 1\n")
    result = desk.check(patch)
    assert (result.code, result.verdicts()) == (5, {"a": "foreign"})
    (edit,) = result.json["foreign"]
    assert edit["nearest"] == "the file with a"
    assert "+mine = 1\n" in edit["diff"]
    assert "-last" not in edit["diff"]
    text = desk.run("apply", patch)
    assert text.code == 5
    assert "+mine = 1" in text.err
    assert "--reset" in text.err
    assert desk.read("demo/one.py").endswith(b"mine = 1\n")
    assert desk.run("apply", patch, "--reset").code == 0
    assert desk.state() == good


def test_reset_without_pristine_bytes_reads_them_from_the_wheel(desk: Desk) -> None:
    patch = desk.patch("a", one=[(b"last = 1", b"last = 2")])
    (desk.site / "demo/one.py").write_bytes(b"mine = 1\n")
    refused = desk.run("apply", patch, "--reset")
    assert refused.code == 4
    assert desk.read("demo/one.py") == b"mine = 1\n"
    assert desk.run("apply", patch, "--reset", "--wheel", desk.wheel).code == 0
    assert desk.read("demo/one.py") == FILES["demo/one.py"].replace(b"last = 1", b"last = 2")


def test_an_older_text_of_a_patch_is_stale_and_replaced_on_request(desk: Desk) -> None:
    old = desk.patch("fix", two=[(b"value = 1", b"value = 10")])
    assert desk.run("apply", old).code == 0
    new = desk.patch("fix", two=[(b"value = 1", b"value = 11")])
    result = desk.check(new)
    assert (result.code, result.verdicts()) == (5, {"fix": "stale-version"})
    assert desk.run("apply", new, "--reset").code == 0
    assert desk.read("demo/two.py").startswith(b"value = 11\n")
    assert desk.check(new).verdicts() == {"fix": "applied"}


# Stacks


def test_a_folder_with_a_series_file_an_overlay_and_package_relative_paths(desk: Desk) -> None:
    stack = desk.folder / "stack"
    (stack / "new").mkdir(parents=True)
    (stack / "b.patch").write_bytes(
        b"--- a/two.py\n+++ b/two.py\n@@ -1,3 +1,3 @@\n value = 10\n-other = 2\n+other = 20\n third = 3\n"
    )
    (stack / "a.patch").write_bytes(b"--- two.py\n+++ two.py\n@@ -1,2 +1,2 @@\n-value = 1\n+value = 10\n other = 2\n")
    (stack / "series").write_text("a.patch -p0\nb.patch -p1\n")
    (stack / "new/extra.py").write_bytes(b"extra = 1\n")
    before = desk.state()
    words = (stack, "--root", "demo", "--overlay", stack / "new")
    result = desk.run("apply", *words)
    assert result.code == 0, result.out + result.err
    assert desk.read("demo/two.py") == b"value = 10\nother = 20\nthird = 3\n"
    assert desk.read("demo/extra.py") == b"extra = 1\n"
    assert desk.check(*words).verdicts() == {"a": "applied", "b": "applied", "new": "applied"}
    assert "nothing to do" in desk.run("apply", *words).out
    assert desk.run("revert", "new").code == 0
    assert not (desk.site / "demo/extra.py").exists()
    shutil.rmtree(stack)
    assert desk.run("revert").code == 0, "the patches are kept with the environment"
    assert desk.state() == before


def test_an_overlay_may_bring_a_package_of_its_own(desk: Desk) -> None:
    overlay = desk.folder / "overlay"
    (overlay / "addon/deep").mkdir(parents=True)
    (overlay / "addon/__init__.py").write_bytes(b"")
    (overlay / "addon/deep/mod.py").write_bytes(b"x = 1\n")
    patch = desk.patch("a", two=[(b"value = 1", b"value = 10")])
    before = desk.state()
    assert desk.run("apply", patch, "--overlay", overlay).code == 0
    assert desk.read("addon/deep/mod.py") == b"x = 1\n"
    assert desk.run("revert").code == 0
    assert desk.state() == before
    assert not (desk.site / "addon").exists()


def test_the_same_change_twice_is_known(desk: Desk) -> None:
    ours = desk.patch("ours", two=[(b"value = 1", b"value = 10")])
    theirs = desk.write("theirs", b"--- a/demo/two.py\n+++ b/demo/two.py\n@@ -1 +1 @@\n-value = 1\n+value = 10\n")
    result = desk.check(ours, theirs)
    assert result.code == 0
    assert result.verdicts() == {"ours": "applies", "theirs": "already-in-series"}
    assert result.json["patches"][1]["same_as"] == "ours"
    assert desk.run("apply", ours, theirs).code == 0
    assert desk.run("apply", ours, theirs).out.startswith("nothing to do")


def test_patches_are_applied_after_those_that_stand_there(desk: Desk) -> None:
    first = desk.patch("a", two=[(b"value = 1", b"value = 10")])
    second = desk.write("b", b"--- a/demo/two.py\n+++ b/demo/two.py\n@@ -1 +1 @@\n-value = 10\n+value = 100\n")
    assert desk.run("apply", first).code == 0
    assert desk.run("apply", second).code == 0
    assert desk.read("demo/two.py").startswith(b"value = 100\n")
    assert desk.check(second).verdicts() == {"a": "applied", "b": "applied"}
    # Installed anew: what the receipt says is no longer so, and is not brought back unasked.
    (desk.site / "demo/two.py").write_bytes(FILES["demo/two.py"])
    other = desk.patch("c", one=[(b"last = 1", b"last = 2")])
    assert desk.run("apply", other).code == 0
    assert desk.read("demo/two.py") == FILES["demo/two.py"]


# Looking


def test_diff_is_a_patch_that_applies_and_is_then_applied(desk: Desk) -> None:
    assert desk.run("diff").out == ""
    (desk.site / "demo/two.py").write_bytes(b"value = 1\nother = 2\nthird = 4")
    (desk.site / "demo/windows.py").write_bytes(b"a = 1\r\nb = 3\r\nc = 3\r\n")
    (desk.site / "demo/sub/three.py").unlink()
    (desk.site / "demo/sub/four.py").write_bytes(b"new = 1\n")
    (desk.site / "demo/sub/__pycache__").mkdir()
    (desk.site / "demo/sub/__pycache__/four.cpython-312.pyc").write_bytes(b"")
    (desk.site / "demo/lib.so").write_bytes(b"\x7fELF\0\1\3")
    edited = desk.state()
    result = desk.run("diff", "--wheel", desk.wheel)
    assert result.code == 0, result.err
    assert "demo/lib.so differs and is not shown: binary" in result.err
    patch = desk.write("mine", result.out.encode())
    assert desk.check(patch).verdicts() == {"mine": "applied"}
    with zipfile.ZipFile(desk.wheel) as archive:
        shutil.rmtree(desk.site)
        archive.extractall(desk.site)
    assert desk.run("apply", patch).code == 0
    for path in ("demo/two.py", "demo/windows.py", "demo/sub/four.py"):
        assert desk.read(path) == edited[path][0]
    assert not (desk.site / "demo/sub/three.py").exists()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"", 1),
        (b"just prose\n", 1),
        (b"--- a/demo/two.py\n+++ b/demo/two.py\n@@ -1,2 +1,1 @@\n-value = 1\n+x\n", 5),
        (b"--- a/demo/two.py\n+++ b/demo/two.py\n@@ -1 +1 @@\n-value = 1\n+x\n+stray\n", 6),
        (b"--- a/../etc/passwd\n+++ b/../etc/passwd\n@@ -1 +1 @@\n-value = 1\n+x\n", 1),
        (b"--- a/demo/two.py.orig\n+++ b/demo/two.py.orig\n@@ -1 +1 @@\n-value = 1\n+x\n", 1),
        (b"--- a/demo-1.0.dist-info/RECORD\n+++ b/demo-1.0.dist-info/RECORD\n@@ -1 +1 @@\n-value = 1\n+x\n", 1),
        (b"diff --git a/demo/lib.so b/demo/lib.so\nBinary files a/demo/lib.so and b/demo/lib.so differ\n", 2),
    ],
    ids=["empty", "prose", "counts", "stray line", "climbs", "left-over", "dist-info", "binary"],
)
def test_lint_refuses_with_file_and_line(desk: Desk, text: bytes, line: int) -> None:
    bad, good = desk.write("bad", text), desk.patch("good", two=[(b"value = 1", b"value = 10")])
    result = desk.run("lint", good, bad, "--json", where=False)
    assert result.code == 3
    fine, refused = result.json["patches"]
    assert fine["error"] is None
    assert fine["files"] == [{"path": "demo/two.py", "hunks": 1, "added": 1, "removed": 1, "scopes": []}]
    where = refused["error"]["where"]
    assert where.startswith(f"{bad}:")
    assert abs(int(where.rpartition(":")[2]) - line) <= 1
    for command in ("check", "apply"):
        assert desk.run(command, good, bad).code == 3
    assert desk.read("demo/two.py") == FILES["demo/two.py"]


def test_show_in_an_environment_prints_what_was_applied_there(desk: Desk) -> None:
    patch = desk.patch("a", two=[(b"value = 1", b"value = 10")])
    assert desk.run("show", "a").code == 2
    assert desk.run("apply", patch).code == 0
    text = patch.read_bytes()
    patch.unlink()
    shown = desk.run("show", "a")
    assert shown.code == 0
    assert shown.out.endswith(text.decode())


def test_lint_on_a_tree_tells_scopes_and_what_is_not_shipped(desk: Desk) -> None:
    text = desk.patch("x", one=[(b"    step_4()\n", b"    step_44()\n")]).read_bytes()
    patch = desk.write("pull", text + b"--- a/tests/t.py\n+++ b/tests/t.py\n@@ -1 +1 @@\n-old\n+new\n")
    found = desk.run("lint", patch, "--json").json["patches"][0]
    assert found["not_shipped"] == ["tests/t.py"]
    assert found["files"][0]["scopes"] == ["first"]
    table = desk.run("lint", patch).out
    assert "not shipped" in table


def test_show_prints_a_patch_with_what_is_known_of_it(desk: Desk) -> None:
    shown = desk.run("show", "pr50021-gdn-spec-bounds", "--version", "0.27.1", where=False)
    assert shown.code == 0
    assert shown.out.startswith("Patch: pr50021-gdn-spec-bounds (pr50021-gdn-spec-bounds/0.27.patch)\nTitle: ")
    copy = desk.write("copy", shown.out.encode())
    as_json = desk.run("show", "pr50021-gdn-spec-bounds", "--version", "0.27.1", "--json", where=False).json
    linted = desk.run("lint", copy, "--json", where=False).json["patches"][0]
    assert [file["path"] for file in linted["files"]] == [file["path"] for file in as_json["files"]]
    assert desk.run("show", "pr50021-gdn-spec-bounds", "--version", "0.1", where=False).code == 4
    assert desk.run("show", "pr50021-gdn-spec-bounds", "--version", "x", where=False).code == 2
    assert desk.run("show", "nothing", where=False).code == 2
    newest = desk.run("show", "pr50021-gdn-spec-bounds", "--json", where=False).json
    stored = desk.run("lint", "pr50021-gdn-spec-bounds", "--json", where=False).json["patches"][0]
    assert stored["files"] == newest["files"]
    assert desk.run("show", copy, where=False).out.count("diff --git") == len(linted["files"])


def test_a_name_with_control_characters_breaks_no_table(desk: Desk) -> None:
    patch = desk.patch("odd\nname\x1b[2J", two=[(b"value = 1", b"value = 10")])
    linted = desk.run("lint", patch, where=False).out.splitlines()
    assert len(linted) == 2
    assert "odd\\nname\\x1b[2J" in linted[1]
    checked = desk.run("check", patch).out
    assert len(checked.splitlines()) == 2
    assert "\x1b" not in checked


# Environments


def test_an_interrupted_change_is_told_and_put_right_by_the_next_apply(desk: Desk) -> None:
    from tests.support.trees import CountingFileSystem

    patch = desk.patch("a", two=[(b"value = 1", b"value = 10")], one=[(b"last = 1", b"last = 2")])
    child = os.fork()
    if child == 0:
        import signal

        import provisioner.transaction.transaction as transaction

        execute = transaction.execute

        def die(_count: int, name: str) -> None:
            if name == "replace" and (desk.site / "demo/one.py").read_bytes() != FILES["demo/one.py"]:
                os.kill(os.getpid(), signal.SIGKILL)

        transaction.execute = lambda *args, **kwargs: execute(*args, **kwargs, filesystem=CountingFileSystem(die))
        main(["patch", "apply", str(patch), "--site-packages", str(desk.site), "--package", "demo"])
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert desk.read("demo/one.py") != FILES["demo/one.py"]
    checked = desk.check(patch)
    assert any("interrupted" in note for note in checked.json["notes"])
    assert (checked.code, checked.json["interrupted"]) == (1, True)
    place = f"--site-packages {desk.site} --package demo"
    assert f"hint: provision patch apply {patch} {place}\n" in desk.run("check", patch).err
    applied = desk.run("apply", patch)
    assert applied.code == 0
    assert "an interrupted change of" in applied.err
    after = desk.check(patch)
    assert (after.code, after.verdicts(), after.json["notes"]) == (0, {"a": "applied"}, [])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_a_finished_tree_that_cannot_be_written_is_as_good_as_any(desk: Desk) -> None:
    patch = desk.patch("a", two=[(b"value = 1", b"value = 10")])
    other = desk.patch("b", one=[(b"last = 1", b"last = 2")])
    assert desk.run("apply", patch).code == 0
    for folder in (desk.folder, *desk.folder.parents):
        if folder.is_relative_to(desk.folder.parents[2]):
            folder.chmod(folder.stat().st_mode | 0o055)
    stamps = desk.stamps()
    codes = []
    for words in ((patch,), (patch, other)):
        child = os.fork()
        if child == 0:
            os.setgid(65534)
            os.setuid(65534)
            os._exit(main(["patch", "apply", *map(str, words), "--site-packages", str(desk.site), "--package", "demo"]))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert codes == [0, 6]
    assert desk.stamps() == stamps


def test_a_full_disk_beside_the_transaction_is_told_for_what_it_is(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    import provisioner.environment.state as state
    import provisioner.transaction.objects as objects

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    patch = desk.patch("a", two=[(b"value = 1", b"value = 10")])
    before = desk.state()
    with monkeypatch.context() as context:
        context.setattr(objects, "write_whole", fail)
        result = desk.run("apply", patch)
        assert (result.code, "no file was changed" in result.err) == (6, True)
        assert desk.state() == before
    with monkeypatch.context() as context:
        context.setattr(state, "write_whole", fail)
        result = desk.run("apply", patch)
        assert (result.code, "the receipt cannot be written" in result.err) == (7, True)
    assert desk.run("apply", patch).code == 0
    assert desk.run("revert").code == 0
    assert desk.state() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_a_tree_that_cannot_be_read_is_an_error_not_a_bug(desk: Desk) -> None:
    patch = desk.patch("a", two=[(b"value = 1", b"value = 10")])
    assert desk.run("check", patch).code == 0
    (desk.site / "demo").chmod(0o700)
    for folder in (desk.folder, *desk.folder.parents):
        if folder.is_relative_to(desk.folder.parents[2]):
            folder.chmod(folder.stat().st_mode | 0o055)
    child = os.fork()
    if child == 0:
        os.setgid(65534)
        os.setuid(65534)
        os._exit(main(["patch", "check", str(patch), "--site-packages", str(desk.site), "--package", "demo"]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5


def test_hard_links_into_a_cache_keep_their_bytes(desk: Desk) -> None:
    cache = desk.folder / "cache.py"
    os.link(desk.site / "demo/two.py", cache)
    patch = desk.patch("a", two=[(b"value = 1", b"value = 10")])
    assert desk.run("apply", patch).code == 0
    assert cache.read_bytes() == FILES["demo/two.py"]
    assert desk.run("revert").code == 0
    assert cache.stat().st_ino != (desk.site / "demo/two.py").stat().st_ino


def test_a_symlinked_file_is_refused(desk: Desk) -> None:
    real = desk.folder / "real.py"
    shutil.move(desk.site / "demo/two.py", real)
    (desk.site / "demo/two.py").symlink_to(real)
    patch = desk.patch("a", two=[(b"value = 1", b"value = 10")])
    for command in ("check", "apply"):
        result = desk.run(command, patch)
        assert result.code == 5
        assert "symbolic link" in result.out
    assert real.read_bytes() == FILES["demo/two.py"]


def test_what_is_no_file_is_a_conflict_and_never_opened(desk: Desk) -> None:
    inside = desk.write("a", b"--- /dev/null\n+++ b/demo/two.py/x.py\n@@ -0,0 +1 @@\n+x\n")
    folder = desk.write("b", b"--- /dev/null\n+++ b/demo/sub\n@@ -0,0 +1 @@\n+x\n")
    pipe = desk.write("c", b"--- a/demo/pipe.py\n+++ b/demo/pipe.py\n@@ -0,0 +1 @@\n+x\n")
    os.mkfifo(desk.site / "demo/pipe.py")
    for patch in (inside, folder, pipe):
        for command in ("check", "apply"):
            result = desk.run(command, patch)
            assert (result.code, "conflict" in result.out) == (5, True), result.err


def test_a_change_of_permissions_alone(desk: Desk) -> None:
    patch = desk.write("a", b"diff --git a/demo/two.py b/demo/two.py\nold mode 100644\nnew mode 100755\n")
    before = desk.state()
    result = desk.run("apply", patch)
    assert (result.code, "permissions" in result.out) == (0, True)
    assert desk.state()["demo/two.py"][1] & 0o777 == 0o755
    assert "nothing to do" in desk.run("apply", patch).out
    assert desk.run("revert").code == 0
    assert desk.state() == before


def test_a_torn_receipt_is_an_error_that_says_what_to_do(desk: Desk) -> None:
    patch = desk.patch("a", two=[(b"value = 1", b"value = 10")])
    assert desk.run("apply", patch).code == 0
    receipt = desk.site / ".provision/receipt.json"
    receipt.write_text(receipt.read_text()[:100])
    result = desk.run("check", patch)
    assert (result.code, f"hint: files are judged by their bytes, not by the receipt: rm {receipt}" in result.err) == (
        3,
        True,
    )
    receipt.unlink()
    assert desk.check(patch).verdicts() == {"a": "applied"}


def test_only_files_of_the_series_and_record_are_read(desk: Desk) -> None:
    patch = desk.patch("a", two=[(b"value = 1", b"value = 10")])
    program = (
        "import sys\n"
        "site = sys.argv[1]\n"
        "def note(event, args):\n"
        "    if event == 'open' and str(args[0]).startswith(site): print(args[0], file=sys.stderr)\n"
        "sys.addaudithook(note)\n"
        "from provisioner.cli.main import main\n"
        "sys.exit(main(sys.argv[2:]))\n"
    )
    words = ["patch", "check", str(patch), "--site-packages", str(desk.site), "--package", "demo"]
    done = subprocess.run(
        [sys.executable, "-c", program, str(desk.site), *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    opened = {Path(line).relative_to(desk.site).as_posix() for line in done.stderr.splitlines() if line.startswith("/")}
    read = {path for path in opened if not path.startswith(".provision")}
    assert read - {"demo-1.0.dist-info/direct_url.json"} == {"demo-1.0.dist-info/RECORD", "demo/two.py"}


# Over nothing


def test_reverting_what_is_known_and_not_applied_says_so(desk: Desk) -> None:
    nothing = desk.run("revert", "sm80-cpu-repack")
    assert (nothing.code, nothing.out) == (0, "not applied: sm80-cpu-repack\n")
    assert desk.run("apply", desk.patch("fix", two=[(b"other = 2", b"other = 22")])).code == 0
    beside = desk.run("revert", "sm80-cpu-repack", "--json").json
    assert (beside["reverted"], beside["not_applied"], beside["remaining"]) == ([], ["sm80-cpu-repack"], ["fix"])
    both = desk.run("revert", "fix", "sm80-cpu-repack")
    assert (both.code, both.out.splitlines()[:2]) == (0, ["taken back: fix", "not applied: sm80-cpu-repack"])


def test_reverting_an_unknown_id_names_near_ones(desk: Desk) -> None:
    nothing = desk.run("revert", "sm80-cpu-repak")
    assert nothing.code == 2
    assert "hint: did you mean 'sm80-cpu-repack'?" in nothing.err
    assert desk.run("apply", desk.patch("my-fix", two=[(b"other = 2", b"other = 22")])).code == 0
    near = desk.run("revert", "my-fixx")
    assert near.code == 2
    assert "applied here: my-fix" in near.err
    assert "hint: did you mean 'my-fix'?" in near.err


def test_a_folder_without_patches_is_never_all_fine(desk: Desk) -> None:
    empty = desk.folder / "empty"
    empty.mkdir()
    for command in ("lint", "check", "apply"):
        assert desk.run(command, empty).code == 2, command
    assert main(["patch", "lint", str(empty)]) == 2
    assert main(["drift", "--patches", str(empty), "--against", str(desk.wheel)]) == 2
    assert "the folder holds no patches" in desk.capsys.readouterr().err


def test_a_folder_in_the_form_of_the_store_is_linted_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", "lint", str(patches_folder()), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["patches"]
    assert {patch["id"] for patch in found} == set(stored_patch_names())


def test_a_recipe_without_patches_is_never_all_fine(desk: Desk) -> None:
    recipe = (recipes_folder() / "hynix-stable.toml").read_text(encoding="utf-8")
    mine = desk.folder / "mine.toml"
    mine.write_text(re.sub(r"policy = \"\w+\"", 'policy = "not-needed"', recipe), encoding="utf-8")
    refused = desk.run("check", mine)
    assert refused.code == 2
    assert "hint: provision patch check pr50021-gdn-spec-bounds" in refused.err


def test_every_hint_of_check_works_as_printed(desk: Desk) -> None:
    patch = desk.patch("fix", two=[(b"other = 2", b"other = 22")])
    before = desk.read("demo/two.py")
    (desk.site / "demo/two.py").write_bytes(b"mine = 1\n")
    wheel = ("--wheel", desk.wheel)
    foreign = desk.run("check", patch, *wheel)
    (reset,) = [line for line in foreign.err.splitlines() if "--reset" in line]
    assert main([*shlex.split(reset.partition("provision ")[2]), *map(str, wheel)]) == 0
    assert desk.read("demo/two.py") == before.replace(b"other = 2", b"other = 22")
    conflict = desk.run("check", desk.write("no", b"--- a/demo/two.py\n+++ b/demo/two.py\n@@ -1 +1 @@\n-nothing\n+x\n"))
    (lint,) = [line for line in conflict.err.splitlines() if "patch lint" in line]
    assert lint.endswith(f"--site-packages {desk.site} --package demo")
    assert main(shlex.split(lint.partition("provision ")[2])) == 0


def test_two_patches_on_the_same_lines_name_the_earlier_one_and_the_way_out(desk: Desk) -> None:
    first = desk.patch("first", two=[(b"other = 2", b"other = 20")])
    second = desk.patch("second", two=[(b"other = 2", b"other = 22"), (b"third = 3", b"third = 33")])
    refused = desk.run("apply", first, second)
    assert refused.code == 5
    assert "first comes before it and changes these lines" in refused.out
    assert "hint: run again with --without-patch first, which leaves it out" in refused.err
    assert desk.check(first, second).json["patches"][1]["displaced_by"] == ["first"]
    assert desk.run("apply", first, second, "--without-patch", "first").code == 0
    assert desk.read("demo/two.py") == b"value = 1\nother = 22\nthird = 33\n"


def test_an_earlier_patch_that_stands_there_already_is_taken_back(desk: Desk) -> None:
    assert desk.run("apply", desk.patch("first", two=[(b"other = 2", b"other = 20")])).code == 0
    second = desk.patch("second", two=[(b"other = 2", b"other = 22")])
    refused = desk.run("apply", second)
    assert refused.code == 5
    (hint,) = [line for line in refused.err.splitlines() if "revert" in line]
    assert main(shlex.split(hint.partition("provision ")[2])) == 0
    assert desk.run("apply", second).code == 0


def test_a_patch_to_leave_out_that_the_series_lacks_is_a_usage_error(desk: Desk) -> None:
    patch = desk.patch("first", two=[(b"other = 2", b"other = 20")])
    refused = desk.run("check", patch, "--without-patch", "frist")
    assert refused.code == 2
    assert "did you mean 'first'?" in refused.err


def test_what_the_build_has_already_is_left_out_of_a_series(desk: Desk) -> None:
    merged = desk.write("merged", b"--- a/demo/two.py\n+++ b/demo/two.py\n@@ -1 +1 @@\n-value = 0\n+value = 1\n")
    fix = desk.patch("fix", two=[(b"other = 2", b"other = 22")])
    checked = desk.check(merged, fix)
    assert (checked.code, checked.verdicts()) == (0, {"merged": "probably-merged", "fix": "applies"})
    note = "merged: not needed here, the build has it already"
    assert note in checked.json["notes"]
    before = desk.state()
    for command in ("check", "apply"):
        strict = desk.run(command, merged, fix, "--strict")
        assert strict.code == 5
        assert note not in strict.err
    assert desk.state() == before
    done = desk.run("apply", merged, fix)
    assert done.code == 0
    assert f"note: {note}" in done.err
    assert desk.read("demo/two.py") == b"value = 1\nother = 22\nthird = 3\n"
    receipt = json.loads((desk.site / ".provision" / "receipt.json").read_text(encoding="utf-8"))
    assert {patch["id"]: patch["verdict"] for patch in receipt["patches"]} == {"fix": "applied", "merged": "not-needed"}
    assert receipt["patches"][1]["files"] == []
    stamps = desk.stamps()
    assert desk.run("apply", merged, fix).out.startswith("nothing to do")
    assert desk.stamps() == stamps
    assert desk.run("apply", fix).out.startswith("nothing to do")
    assert desk.stamps() == stamps
    assert "not applied: merged" in desk.run("revert", "merged").out
    assert desk.run("revert").code == 0
    assert desk.read("demo/two.py") == FILES["demo/two.py"]


def test_a_patch_that_is_merged_in_part_stands_in_the_way(desk: Desk) -> None:
    head, merged = b"--- a/demo/two.py\n+++ b/demo/two.py\n", b"@@ -1 +1 @@\n-value = 0\n+value = 1\n"
    text = head + merged + b"@@ -3 +3 @@\n-third = 3\n+third = 4\n"
    assert desk.run("check", desk.write("part", text)).code == 5


def test_the_hint_of_a_revert_that_others_need_works_as_printed(desk: Desk) -> None:
    first = desk.patch("a", two=[(b"value = 1", b"value = 10")])
    text = b"--- a/demo/two.py\n+++ b/demo/two.py\n@@ -1,3 +1,3 @@\n value = 10\n-other = 2\n+other = 20\n third = 3\n"
    assert desk.run("apply", first, desk.write("b", text)).code == 0
    hint = desk.run("revert", "a").err.rpartition("hint: ")[2]
    assert main(shlex.split(hint)[1:]) == 0
    assert "taken back: a, b" in desk.capsys.readouterr().out


def test_a_journal_that_is_a_link_is_refused_and_nothing_outside_is_touched(desk: Desk, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("intent", "proven", "precious.txt"):
        (outside / name).write_bytes(b"precious\n")
    assert desk.run("apply", desk.patch("p", two=[(b"value = 1", b"value = 2")])).code == 0
    (desk.site / ".provision/journal").symlink_to(outside)
    before = desk.state()
    done = desk.run("revert")
    assert done.code == 5
    assert "hint:" in done.err
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == dict.fromkeys(
        ("intent", "proven", "precious.txt"), b"precious\n"
    )
    assert desk.state() == before


def test_a_journal_of_another_shape_is_told_once_and_later_commands_work(desk: Desk) -> None:
    assert desk.run("apply", desk.patch("p", two=[(b"value = 1", b"value = 2")])).code == 0
    journal = desk.site / ".provision/journal"
    journal.mkdir()
    (journal / "intent").write_bytes(digest_of(b"[]").encode() + b"\n[]")
    refused = desk.run("revert")
    assert refused.code == 7
    assert "journal.rejected-" in refused.err
    assert desk.run("revert").code == 0
