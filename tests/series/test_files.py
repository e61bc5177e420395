from pathlib import Path

import pytest

from provisioner.digests import digest_of
from provisioner.errors import InvalidPatchError, UsageError
from provisioner.patching.diff import parse_patch, print_patch
from provisioner.patching.model import Create, SeriesPatch
from provisioner.series.files import Reading, name_apart, read_overlay, read_patch_files, read_stack


def _patch(path: str) -> bytes:
    return f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-1\n+2\n".encode()


def _write(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(_patch("pkg/a.py"))
    return folder


def _ids(patches: tuple[SeriesPatch, ...]) -> list[str]:
    return [item.patch.id for item in patches]


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    folder = _write(tmp_path / "p", "0010-b.patch", "0002-c.diff", "0001-a.patch", "README.md", "x.patch.orig")
    assert _ids(read_stack(folder, Reading())) == ["0001-a", "0002-c", "0010-b"]


def test_a_series_file_decides_order_and_strip_level(tmp_path: Path) -> None:
    folder = _write(tmp_path / "p", "a.patch", "b.patch", "unlisted.patch", "sub/c.patch")
    (folder / "b.patch").write_bytes(_patch("x/y/pkg/b.py").replace(b"--- a/", b"--- ").replace(b"+++ b/", b"+++ "))
    (folder / "series").write_text("# a comment\n\n  b.patch -p2 # another\nsub/c.patch\t#third\na.patch\n#a.patch\n")
    stack = read_stack(folder, Reading())
    assert _ids(stack) == ["b", "c", "a"]
    assert stack[0].patch.changes[0].path == "pkg/b.py"


def test_paths_relative_to_a_package(tmp_path: Path) -> None:
    file = tmp_path / "a.patch"
    file.write_bytes(_patch("model/a.py"))
    (item,) = read_patch_files([file], Reading(root="vllm"))
    assert item.patch.changes[0].path == "vllm/model/a.py"
    (item,) = read_patch_files([file], Reading(root="vllm", strip=2))
    assert item.patch.changes[0].path == "vllm/a.py"


@pytest.mark.parametrize(
    ("series", "where", "what"),
    [
        ("a.patch\nmissing.patch\n", "series:2", "the series names missing.patch, and there is no such file"),
        ("a.patch\n\na.patch\n", "series:1", "a.patch stands in the series twice"),
        ("a.patch -R\n", "series:1", "the option -R of a series is not understood"),
        ("a.patch -px\n", "series:1", "the option -px of a series is not understood"),
        ("../a.patch\n", "series:1", "../a.patch is not a path inside the folder"),
        ("# nothing\n", "series", "the series names no patch"),
    ],
)
def test_what_a_series_file_must_not_say(tmp_path: Path, series: str, where: str, what: str) -> None:
    folder = _write(tmp_path / "p", "a.patch")
    (folder / "series").write_text(series)
    with pytest.raises(InvalidPatchError) as caught:
        read_stack(folder, Reading())
    assert caught.value.what == what
    assert caught.value.where == str(folder / where)


def test_a_folder_without_patches_and_a_missing_file_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no patches"):
        read_stack(tmp_path, Reading())
    with pytest.raises(UsageError, match="cannot be read"):
        read_patch_files([tmp_path / "none.patch"], Reading())
    with pytest.raises(UsageError, match="no such overlay"):
        read_overlay(tmp_path / "none", Reading())


def test_a_refused_patch_of_a_stack_names_its_file_and_line(tmp_path: Path) -> None:
    folder = _write(tmp_path / "p", "a.patch")
    (folder / "b.patch").write_bytes(_patch("pkg/b.py") + b"+stray\n")
    with pytest.raises(InvalidPatchError) as caught:
        read_stack(folder, Reading())
    assert caught.value.where == f"{folder / 'b.patch'}:6"


def test_an_overlay_is_one_patch_that_makes_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "kvarn"
    (folder / "ops").mkdir(parents=True)
    (folder / "__pycache__").mkdir()
    (folder / "__init__.py").write_bytes(b"")
    (folder / "ops/a.py").write_bytes(b"x = 1\r\ny = 2")
    (folder / "run.py").write_bytes(b"#!\n")
    (folder / "run.py").chmod(0o755)
    for skipped in ("late.patch", "__pycache__/a.cpython-312.pyc", "b.pyc", ".hidden"):
        (folder / skipped).write_bytes(b"skipped")
    item = read_overlay(folder, Reading(root="vllm/kvarn"))
    changes = {change.path: change for change in item.patch.changes}
    assert sorted(changes) == ["vllm/kvarn/__init__.py", "vllm/kvarn/ops/a.py", "vllm/kvarn/run.py"]
    assert all(isinstance(change, Create) for change in changes.values())
    assert [line.text for line in changes["vllm/kvarn/ops/a.py"].hunks[0].lines] == [b"x = 1\r", b"y = 2"]
    assert item.new_roots == {"vllm"}
    text = print_patch(item.patch)
    assert item.patch.digest == digest_of(text)
    assert parse_patch(text, id="kvarn", source="").changes == item.patch.changes


def test_an_overlay_with_a_symbolic_link_or_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidPatchError, match="holds no files"):
        read_overlay(tmp_path / "empty", Reading())
    (tmp_path / "empty/link.py").symlink_to("/etc/hostname")
    with pytest.raises(InvalidPatchError, match="no symbolic links"):
        read_overlay(tmp_path / "empty", Reading())


def test_equal_names_are_told_apart(tmp_path: Path) -> None:
    files = [_write(tmp_path / name, "fix.patch") / "fix.patch" for name in ("one", "two", "three")]
    assert _ids(name_apart(read_patch_files(files, Reading()))) == ["fix", "fix-2", "fix-3"]
