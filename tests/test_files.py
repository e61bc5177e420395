"""Outputs that a user names: what stands there is written to, never replaced by a file."""

import os
import stat
import threading
from pathlib import Path

import pytest

from provisioner.errors import EnvironmentConflictError, UsageError
from provisioner.files import resolve_output, write_output

DATA = b"text\n" * 40_000
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="device nodes are made by root")


def make_device(path: Path, kind: int, major: int, minor: int) -> Path:
    try:
        os.mknod(path, kind | 0o666, os.makedev(major, minor))
    except PermissionError:
        pytest.skip("device nodes cannot be made here")
    return path


def test_a_file_is_written_whole_with_its_folders(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report"
    write_output(path, b"old")
    write_output(path, DATA)
    assert path.read_bytes() == DATA
    assert [entry.name for entry in path.parent.iterdir()] == ["report"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_followed_and_stays(tmp_path: Path, exists: bool) -> None:
    target, link = tmp_path / "kept" / "target", tmp_path / "link"
    target.parent.mkdir()
    if exists:
        target.write_bytes(b"old")
    link.symlink_to("kept/target")
    write_output(link, DATA)
    assert link.is_symlink()
    assert target.read_bytes() == DATA
    assert resolve_output(link) == target.resolve()


@pytest.mark.parametrize("linked", [True, False])
def test_a_pipe_gets_the_bytes_and_stays(tmp_path: Path, linked: bool) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    path = tmp_path / "link" if linked else pipe
    if linked:
        path.symlink_to(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_output(path, DATA)
    reader.join(10)
    assert read == [DATA]
    assert pipe.is_fifo()
    assert path.is_symlink() == linked


def test_a_stream_of_this_process_is_written_by_its_name() -> None:
    reading, writing = os.pipe()
    try:
        write_output(Path(f"/proc/self/fd/{writing}"), b"text")
        assert os.read(reading, 10) == b"text"
    finally:
        os.close(reading)
        os.close(writing)


@as_root
def test_a_device_is_written_and_stays(tmp_path: Path) -> None:
    null, full = make_device(tmp_path / "null", stat.S_IFCHR, 1, 3), make_device(tmp_path / "full", stat.S_IFCHR, 1, 7)
    try:
        write_output(null, DATA)
    except EnvironmentConflictError as error:
        pytest.skip(f"devices do not work in this folder: {error.found}")
    with pytest.raises(EnvironmentConflictError, match="No space left"):
        write_output(full, DATA)
    assert null.is_char_device()
    assert full.is_char_device()


@as_root
def test_a_disk_is_refused(tmp_path: Path) -> None:
    disk = make_device(tmp_path / "disk", stat.S_IFBLK, 259, 1048575)
    with pytest.raises(UsageError, match="a disk"):
        write_output(disk, DATA)
    assert disk.is_block_device()


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a folder"):
        write_output(tmp_path, DATA)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(EnvironmentConflictError, match="cannot be written"):
        write_output(tmp_path / "file" / "report", DATA)
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(EnvironmentConflictError, match="cannot be written"):
        write_output(tmp_path / "circle", DATA)
    assert (tmp_path / "circle").is_symlink()
