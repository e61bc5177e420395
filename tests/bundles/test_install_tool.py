"""The script in a bundle that installs the tool: what it refuses. The whole way is in test_real_bundle."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from provisioner.bundles import install_tool

FILES: Mapping[str, bytes] = {"tool/requirements.txt": b"provisioner==0.1.0\n", "tool/uv-1-py3-none-any.whl": b"no zip"}


def make_bundle(
    folder: Path, *, tool: str | None = "0.1.0", instead: Mapping[str, bytes] = {}, link: str | None = None
) -> Path:
    """A bundle of FILES; ``instead`` are other bytes than the list says, ``link`` a member that is a link."""
    files = [{"path": path, "sha256": hashlib.sha256(data).hexdigest()} for path, data in FILES.items()]
    text = json.dumps({"tool": tool, "python": "3.12", "files": files}).encode()
    path = folder / "b.tar"
    with tarfile.open(path, "w") as archive:
        for name, data in {"bundle.json": text, **FILES, **instead}.items():
            entry = tarfile.TarInfo(name)
            if name == link:
                entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
            else:
                entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def refuse(capsys: pytest.CaptureFixture[str], bundle: Path, folder: Path) -> str:
    assert install_tool.main([str(bundle), str(folder)]) == 4
    return capsys.readouterr().err


def test_it_stands_alone(tmp_path: Path) -> None:
    """Run from a pipe, by a Python that sees no other module of the project."""
    script = Path(install_tool.__file__).read_bytes()
    done = subprocess.run([sys.executable, "-I", "-S", "-"], input=script, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, b"usage: install.py BUNDLE FOLDER\n")


def test_other_bytes_are_refused_before_anything_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in FILES:
        bundle = make_bundle(tmp_path, instead={path: b"other"})
        assert f"{path} is not what the bundle says" in refuse(capsys, bundle, tmp_path / "tool")
        assert f"{path} is not what" in refuse(capsys, make_bundle(tmp_path, link=path), tmp_path / "tool")
    assert not (tmp_path / "tool").exists()


def test_what_is_no_bundle_with_a_tool_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "without the tool" in refuse(capsys, make_bundle(tmp_path, tool=None), tmp_path / "tool")
    assert "this is no bundle" in refuse(capsys, make_bundle(tmp_path, link="bundle.json"), tmp_path / "tool")
    assert "No such file" in refuse(capsys, tmp_path / "nothing.tar", tmp_path / "tool")
    (tmp_path / "text").write_text("text")
    assert "error: " in refuse(capsys, tmp_path / "text", tmp_path / "tool")
    assert "error: " in refuse(capsys, make_bundle(tmp_path), tmp_path / "tool")  # its uv is no zip file


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "own").write_text("mine")
    assert "holds something else" in refuse(capsys, make_bundle(tmp_path), place)
    assert [path.name for path in place.iterdir()] == ["own"]
