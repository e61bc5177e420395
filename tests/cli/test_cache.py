import json
from pathlib import Path

import pytest

from provisioner.cli.main import main
from provisioner.digests import digest_of
from provisioner.index.cache import WheelCache
from provisioner.index.settings import cache_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    cache = WheelCache(tmp_path / "cache")
    cache.store_member(digest_of(b"data"), b"data")
    return tmp_path / "cache"


def test_it_shows_what_is_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 0
    shown = capsys.readouterr()
    assert "members  1      4 B" in shown.out
    assert shown.err == f"in {folder}\n"


def test_it_clears_and_says_what_was_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "--clear", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "provision/cache/1"
    assert (answer["path"], answer["bytes"], answer["files"], answer["cleared"]) == (str(folder), 4, 1, True)
    assert answer["kinds"]["members"] == {"bytes": 4, "files": 1}
    main(["cache", "--json"])
    assert json.loads(capsys.readouterr().out)["files"] == 0


def test_the_folder_is_the_users_or_the_homes() -> None:
    assert cache_folder({"PROVISION_HOME": "/srv/p"}) == Path("/srv/p/cache")
    assert cache_folder({}).name == "provision"
