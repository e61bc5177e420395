"""Sources that are not read again: whatever changes them is found, and what is kept can cost time, never the truth."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from provisioner.digests import digest_of, digest_to_record
from provisioner.environment import integrity as checks
from provisioner.environment.integrity import check_install, check_sources, peek_sources
from provisioner.environment.site import Site, open_site_packages
from provisioner.environment.verified import COARSE_NS, FILE_NAME, FINE_NS, identify, keep_verified, read_verified

PATHS = ("vllm/a.py", "vllm/b.py", "vllm/c.so")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Two sources and a binary that were left alone for long enough."""
    info = tmp_path / "vllm-1.0.dist-info"
    info.mkdir()
    (tmp_path / "vllm").mkdir()
    (tmp_path / ".provision").mkdir()
    for path in PATHS:
        (tmp_path / path).write_bytes(path.encode())
    rows = [f"{path},{digest_to_record(digest_of(path.encode()))},{len(path)}\n" for path in PATHS]
    (info / "RECORD").write_text("".join(rows))
    time.sleep(2.5 * FINE_NS / 1e9)
    return open_site_packages(tmp_path)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read."""
    names: list[str] = []
    real = checks._digest_file

    def note(path: str) -> str | None:
        names.append(Path(path).name)
        return real(path)

    monkeypatch.setattr(checks, "_digest_file", note)
    return names


def test_what_was_right_is_not_read_again(site: Site, reads: list[str]) -> None:
    assert check_sources(site) == ()
    assert reads == ["a.py", "b.py"]
    assert check_sources(site) == peek_sources(site) == ()
    assert reads == ["a.py", "b.py"]


def test_an_install_is_read_whole_and_remembered(site: Site, reads: list[str]) -> None:
    assert check_install(site) == ()
    assert peek_sources(site) == ()
    assert reads == ["c.so", "a.py", "b.py"]


def test_sources_that_were_linked_just_now_are_remembered_where_the_binaries_take_a_while(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An install from a warm cache: everything is linked within the tick in which the check begins."""
    for path in PATHS:
        (site.site_packages / path).write_bytes(path.encode())
    real = checks._digest_file
    reads: list[str] = []

    def read_slowly(path: str) -> str | None:
        reads.append(Path(path).name)
        time.sleep(2.5 * FINE_NS / 1e9 if path.endswith(".so") else 0)
        return real(path)

    monkeypatch.setattr(checks, "_digest_file", read_slowly)
    assert check_install(site) == ()
    assert peek_sources(site) == ()
    assert reads == ["c.so", "a.py", "b.py"]


def rewrite(path: Path) -> None:
    path.write_bytes(b"vllm/x.py")


def replace_by_rename(path: Path) -> None:
    path.with_suffix(".new").write_bytes(b"vllm/x.py")
    path.with_suffix(".new").replace(path)


def link_elsewhere(path: Path) -> None:
    path.unlink()
    path.with_suffix(".other").write_bytes(b"vllm/x.py")
    path.symlink_to(path.with_suffix(".other"))


@pytest.mark.parametrize("edit", [rewrite, replace_by_rename, link_elsewhere])
def test_an_edit_that_keeps_size_and_times_is_found(site: Site, edit: Callable[[Path], None]) -> None:
    assert check_sources(site) == ()
    edited = site.site_packages / "vllm/a.py"
    before = edited.stat()
    edit(edited)
    os.utime(edited, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = edited.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    for check in (peek_sources, check_sources, check_sources):
        assert [finding.path for finding in check(site)] == ["vllm/a.py"]
    edited.unlink()
    assert [(finding.path, finding.found) for finding in check_sources(site)] == [("vllm/a.py", None)]
    edited.write_bytes(b"vllm/a.py")
    assert check_sources(site) == ()


def cut_short(path: Path) -> None:
    os.truncate(path, 3)


@pytest.mark.parametrize(("edit", "is_there"), [(Path.unlink, False), (cut_short, True)])
def test_a_binary_that_is_gone_or_cut_short_is_found(
    site: Site, reads: list[str], edit: Callable[[Path], None], is_there: bool
) -> None:
    assert check_sources(site) == ()
    edit(site.site_packages / "vllm/c.so")
    for check in (peek_sources, check_sources):
        assert [(finding.path, finding.found is not None) for finding in check(site)] == [("vllm/c.so", is_there)]
    assert set(read_verified(site)) == {"vllm/a.py", "vllm/b.py"}
    assert "a.py" not in reads[2:]


@pytest.mark.parametrize(
    "text",
    [
        None,
        b"",
        b"[" * 200_000,
        b"\x00" * 300,
        b"[]",
        b"{",
        b'{"schema": "provision/verified/1"}',
        b'{"schema": 2, "files": 3}',
    ],
)
def test_what_cannot_be_read_costs_time_alone(site: Site, reads: list[str], text: bytes | None) -> None:
    path = site.state_dir / FILE_NAME
    path.unlink(missing_ok=True) if text is None else path.write_bytes(text)
    assert check_sources(site) == ()
    assert reads == ["a.py", "b.py"]
    assert set(read_verified(site)) == {"vllm/a.py", "vllm/b.py"}


def test_another_environments_file_is_not_believed(site: Site, reads: list[str]) -> None:
    assert check_sources(site) == ()
    path = site.state_dir / FILE_NAME
    kept = json.loads(path.read_text())
    kept["files"]["vllm/a.py"][3] += 1
    path.write_text(json.dumps(kept))
    reads.clear()
    assert peek_sources(site) == ()
    assert reads == ["a.py"]
    path.write_text(json.dumps(kept | {"record": "0" * 64}))
    reads.clear()
    assert peek_sources(site) == ()
    assert reads == ["a.py", "b.py"]


def test_a_file_that_had_just_changed_is_read_again(site: Site, reads: list[str]) -> None:
    os.utime(site.site_packages / "vllm/a.py")
    assert check_sources(site) == ()
    assert set(read_verified(site)) == {"vllm/b.py"}
    time.sleep(2.5 * FINE_NS / 1e9)
    reads.clear()
    assert check_sources(site) == ()
    assert reads == ["a.py"]
    assert set(read_verified(site)) == {"vllm/a.py", "vllm/b.py"}


def test_whole_seconds_are_given_more_time(site: Site) -> None:
    second = 10**9
    files = {"vllm/a.py": [1, 0, 7 * second, 1], "vllm/b.py": [1, 0, 8 * second, 2]}
    keep_verified(site, files, began=8 * second + COARSE_NS)
    assert set(read_verified(site)) == {"vllm/a.py"}


def test_a_place_that_cannot_be_written_costs_time_alone(site: Site, reads: list[str]) -> None:
    site.state_dir.rmdir()
    site.state_dir.write_text("in the way")
    assert check_sources(site) == check_sources(site) == ()
    assert reads == ["a.py", "b.py"] * 2


def test_pipes_and_folders_have_no_identity_and_never_make_it_wait(site: Site) -> None:
    for path, make in (("vllm/a.py", os.mkfifo), ("vllm/b.py", os.mkdir)):
        (site.site_packages / path).unlink()
        make(site.site_packages / path)
    assert identify(site.site_packages, PATHS).keys() == {"vllm/c.so"}
    assert [finding.found for finding in check_sources(site)] == [None, None]
