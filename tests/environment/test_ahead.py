"""What is read while an installer is at work: believed only where it is still true at the end."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from provisioner.digests import digest_of, digest_to_record
from provisioner.environment import integrity as checks
from provisioner.environment.ahead import Ahead, reading_ahead
from provisioner.environment.integrity import check_install
from provisioner.environment.site import open_site_packages

PATHS = ("vllm/a.py", "vllm/b.so")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    (tmp_path / ".provision").mkdir()
    (tmp_path / "lib/python3.12/site-packages/vllm").mkdir(parents=True)
    return tmp_path


def install(venv: Path, *, record: str | None = None) -> None:
    """As uv does it: files in any order, INSTALLER last; then other packages for a while."""
    folder = venv / "lib/python3.12/site-packages"
    (folder / "vllm-1.0.dist-info").mkdir()
    rows = [f"{path},{digest_to_record(digest_of(path.encode()))},{len(path)}\n" for path in PATHS]
    rows.append(f"../../../bin/vllm,{digest_to_record(digest_of(b'x'))},1\n")
    (folder / "vllm-1.0.dist-info/RECORD").write_text(record if record is not None else "".join(rows))
    time.sleep(0.2)
    for path in PATHS:
        (folder / path).write_bytes(path.encode())
    (folder / "vllm-1.0.dist-info/INSTALLER").write_text("uv")
    time.sleep(1.2)


def read_during(venv: Path, *, after: Callable[[], object] = lambda: None, record: str | None = None) -> Ahead:
    with reading_ahead(venv, "vllm-1.0-py3-none-any.whl") as read:
        install(venv, record=record)
        after()
    return read()


def note_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    real = checks._digest_file
    monkeypatch.setattr(checks, "_digest_file", lambda path: names.append(Path(path).name) or real(path))
    return names


def test_what_was_read_is_not_read_again(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = read_during(venv)
    assert set(ahead) == set(PATHS)
    reads = note_reads(monkeypatch)
    assert check_install(open_site_packages(venv / "lib/python3.12/site-packages"), ahead=ahead) == ()
    assert reads == []


def test_what_changed_afterwards_is_found(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = venv / "lib/python3.12/site-packages/vllm/b.so"
    ahead = read_during(venv, after=lambda: binary.write_bytes(b"vllm/x.so"))
    reads = note_reads(monkeypatch)
    site = open_site_packages(venv / "lib/python3.12/site-packages")
    assert [finding.path for finding in check_install(site, ahead=ahead)] == ["vllm/b.so"]
    assert reads == ["b.so"]


def test_another_record_at_the_end_counts(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = read_during(venv)
    folder = venv / "lib/python3.12/site-packages"
    record = folder / "vllm-1.0.dist-info/RECORD"
    record.write_text(record.read_text().replace(digest_to_record(digest_of(b"vllm/a.py")), digest_to_record("0" * 64)))
    assert [finding.path for finding in check_install(open_site_packages(folder), ahead=ahead)] == ["vllm/a.py"]


@pytest.mark.parametrize("record", ["", "not a record\n"])
def test_a_record_that_cannot_be_used_is_left_to_the_check(venv: Path, record: str) -> None:
    assert read_during(venv, record=record) == {}


def test_an_installer_that_fails_or_is_quick_is_not_waited_for(venv: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError), reading_ahead(venv, "vllm-1.0-py3-none-any.whl") as read:
        raise RuntimeError
    assert read() == {}
    assert time.monotonic() - start < 5
