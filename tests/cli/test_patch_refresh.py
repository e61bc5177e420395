"""``patch refresh --write`` on a small store: which builds need a text of their own, and where it is put."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from provisioner.cli.main import main
from provisioner.digests import digest_of
from provisioner.series.store import open_stored_patch
from tests.support.drift_builds import build
from tests.support.index_server import IndexServer
from tests.support.wheels import wheel_filename

OPS = b"".join(b"line_%d = 0\n" % number for number in range(1, 9))
PATCH = b"""\
--- a/vllm/ops.py
+++ b/vllm/ops.py
@@ -2,6 +2,7 @@
 line_2 = 0
 line_3 = 0
 line_4 = 0
+added = 1
 line_5 = 0
 line_6 = 0
 line_7 = 0
"""
STORED = f"""\
schema = 1
id = "bounds"
title = "Bounds"
fixes = "Negative values."

[[variant]]
file = "1.0.patch"
versions = ">=1,<2"
cut_against = "1.0"
sha256 = "{digest_of(PATCH)}"

[[variant.files]]
path = "vllm/ops.py"
hunks = 1
added = 1
removed = 0
scopes = [""]
"""
HISTORY = {
    "1.0": OPS,
    "1.0.1": OPS.replace(b"_2 = 0", b"_2 = 2"),
    "1.1": b"# above\n" + OPS,
    "1.2": OPS[:-9] + b"x = 1\n",
}
HISTORY["1.3"] = OPS.replace(b"_7 = 0", b"_7 = 7")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "store" / "bounds"
    folder.mkdir(parents=True)
    (folder / "1.0.patch").write_bytes(PATCH)
    (folder / "patch.toml").write_text(STORED)
    monkeypatch.setattr("provisioner.cli.patch.refresh.patches_folder", lambda: folder.parent)
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "home"))
    with IndexServer() as server:
        server.add_package("vllm", {wheel_filename(version): build(version, ops) for version, ops in HISTORY.items()})
        monkeypatch.setenv("UV_DEFAULT_INDEX", server.simple_url)
        yield folder.parent


def refresh(version: str, *words: str) -> int:
    return main(["patch", "refresh", "bounds", "--onto", f"pypi:{version}", *words])


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2"])
def test_a_build_to_which_the_covering_text_applies_gets_no_other(
    store: Path, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    before = {path: path.read_bytes() for path in store.rglob("*.*")}
    assert refresh(version, "--write") == 5
    out, err = capsys.readouterr()
    assert out == ""
    assert str(store / "bounds" / "1.0.patch") in err
    assert before == {path: path.read_bytes() for path in store.rglob("*.*")}
    assert refresh(version) == 0


@pytest.mark.parametrize(
    ("version", "file", "others"), [("1.3", "1.3.patch", ["1.2", "1.4"]), ("1.0.1", "1.0.1.patch", ["1.0", "1.0.2"])]
)
def test_where_the_covering_text_does_not_apply_the_new_one_goes_before_it(
    store: Path, capsys: pytest.CaptureFixture[str], version: str, file: str, others: list[str]
) -> None:
    assert refresh(version, "--write") == 0
    err = capsys.readouterr().err
    assert f"wrote {store / 'bounds' / file}" in err
    assert "stands before 1.0.patch" in err
    stored = open_stored_patch(store, "bounds")
    chosen = [stored.variant_for(Version(each)) for each in (version, *others)]
    assert [each.file for each in chosen if each is not None] == [file, "1.0.patch", "1.0.patch"]
    assert refresh(version, "--write") == 5
