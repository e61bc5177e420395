"""Patched wheels made of small ones in the real format, and held to what installers and schemas say of them."""

import csv
import errno
import importlib.metadata
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from packaging.version import Version

from provisioner.cli.main import main
from provisioner.digests import digest_of, digest_to_record
from provisioner.documents.patched_wheel import parse_patched_wheel, print_patched_wheel
from provisioner.errors import ConflictError, InvalidReceiptError, InvalidWheelError
from provisioner.index.lazy import LocalWheel
from provisioner.patched_wheel.build import BuiltWheel, WheelRequest, build_wheel
from provisioner.patched_wheel.naming import patched_filename, patched_version
from provisioner.patched_wheel.verify import verify_wheel
from provisioner.progress import Silence
from provisioner.series.files import Reading
from provisioner.series.sources import Wanted, read_series

VERSION = "0.27.1"
TAG = "cp38-abi3-manylinux_2_28_x86_64"
INFO = f"vllm-{VERSION}.dist-info"
FILES = {
    "vllm/__init__.py": b"",
    "vllm/engine.py": b"def run():\n    return 1\n",
    "vllm/old.py": b"gone = True\n",
    "vllm/a, b.json": b"{}\n",
    "vllm/_C.abi3.so": bytes(range(256)) * 64,
    f"vllm-{VERSION}.data/scripts/vllm-tool": b"#!python\nprint('tool')\n",
    f"{INFO}/entry_points.txt": b"[console_scripts]\nvllm = vllm.engine:run\n",
    f"{INFO}/WHEEL": f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: false\nTag: {TAG}\n".encode(),
    f"{INFO}/METADATA": (
        f"Metadata-Version: 2.4\nName: vllm\nVersion: {VERSION}\nSummary: small\nLicense-Expression: MIT\n"
        "Description-Content-Type: text/plain\n\nVersion: this line is text\n"
    ).encode(),
}
MODES = {f"vllm-{VERSION}.data/scripts/vllm-tool": 0o100755, "vllm/_C.abi3.so": 0o100775}
EDIT = """\
--- a/vllm/engine.py
+++ b/vllm/engine.py
@@ -1,2 +1,2 @@
 def run():
-    return 1
+    return 2
"""
REST = """\
--- a/vllm/old.py
+++ /dev/null
@@ -1 +0,0 @@
-gone = True
diff --git a/vllm/new.sh b/vllm/new.sh
new file mode 100755
--- /dev/null
+++ b/vllm/new.sh
@@ -0,0 +1 @@
+#!/bin/sh
"""


def write_origin(folder: Path, files: Mapping[str, bytes] = FILES, *, version: str = VERSION) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"vllm-{version}-{TAG}.whl"
    record = f"{INFO}/RECORD"
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerows((name, digest_to_record(digest_of(data)), len(data)) for name, data in files.items())
    rows.writerow((record, "", ""))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**files, record: text.getvalue().encode()}.items():
            info = zipfile.ZipInfo(name, (2026, 8, 20, 12, 0, 0))
            info.external_attr = MODES.get(name, 0o100644) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return path


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    return write_origin(tmp_path / "origin")


@pytest.fixture
def patches(tmp_path: Path) -> tuple[str, ...]:
    named = {"edit.patch": EDIT, "rest.patch": REST}
    for name, text in named.items():
        (tmp_path / name).write_text(text)
    return tuple(str(tmp_path / name) for name in named)


def build(origin: Path, patches: tuple[str, ...], folder: Path, label: str = "hynix-stable") -> BuiltWheel:
    series = read_series(Wanted(names=patches, reading=Reading()), Version(VERSION))
    return build_wheel(WheelRequest(origin=origin, series=series, label=label), folder, Silence())


def rewrite(path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    """The same archive by other hands, with other members."""
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        members = {info.filename: archive.read(info) for info in infos}
    modes = {info.filename: info.external_attr for info in infos}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = modes.get(name, 0o100644 << 16)
            archive.writestr(info, data)


def test_holds_what_the_series_makes_and_the_rest_as_it_was_packed(
    origin: Path, patches: tuple[str, ...], tmp_path: Path
) -> None:
    built = build(origin, patches, tmp_path / "out")
    info = f"vllm-{built.version}.dist-info"
    with zipfile.ZipFile(built.path) as made, zipfile.ZipFile(origin) as shipped:
        assert made.testzip() is None
        names = set(made.namelist())
        assert "vllm/old.py" not in names
        assert made.read("vllm/engine.py") == b"def run():\n    return 2\n"
        assert made.getinfo("vllm/new.sh").external_attr >> 16 == 0o100755
        assert made.getinfo("vllm/_C.abi3.so").external_attr >> 16 == 0o100775
        assert made.getinfo(f"vllm-{built.version}.data/scripts/vllm-tool").external_attr >> 16 == 0o100755
        assert made.read(f"{info}/entry_points.txt") == FILES[f"{INFO}/entry_points.txt"]
        metadata = FILES[f"{INFO}/METADATA"].decode()
        assert made.read(f"{info}/METADATA").decode() == metadata.replace(
            "\nVersion: 0.27.1\n", f"\nVersion: {built.version}\n"
        )
        for name in ("vllm/_C.abi3.so", "vllm/a, b.json"):
            one, other = made.getinfo(name), shipped.getinfo(name)
            assert (one.compress_type, one.compress_size) == (zipfile.ZIP_DEFLATED, other.compress_size)
            assert made.read(name) == shipped.read(name)
        rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(made.read(f"{info}/RECORD").decode()))}
        assert rows.pop(f"{info}/RECORD") == ["", ""]
        assert rows == {
            name: [digest_to_record(digest_of(made.read(name))), str(made.getinfo(name).file_size)]
            for name in names - {f"{info}/RECORD"}
        }
    assert built.sha256 == digest_of(built.path.read_bytes())
    assert built.path.name == f"vllm-{built.version}-{TAG}.whl"


@pytest.mark.parametrize(
    ("version", "label", "series", "expected"),
    [
        ("0.27.1", "hynix-stable", "ab12cd34ef", "0.27.1+hynix.stable.ab12cd34"),
        ("0.28.0rc1.dev5+g1fe3a1571.cu130", "Mine_2", "ab12cd34ef", "0.28.0rc1.dev5+g1fe3a1571.cu130.mine.2.ab12cd34"),
        ("1!2.0", "x", "00123456ab", "1!2.0+x.123456"),  # as packaging writes a part of digits alone
    ],
)
def test_version_by_pep_440(version: str, label: str, series: str, expected: str) -> None:
    found = patched_version(Version(version), label, series)
    assert str(found) == expected
    assert found > Version(version)


def test_file_name_keeps_build_number_and_tags() -> None:
    assert patched_filename(f"vllm-0.27.1-3-{TAG}.whl", Version("0.27.1+x.ab")) == f"vllm-0.27.1+x.ab-3-{TAG}.whl"


@pytest.mark.parametrize("installer", ["pip", "uv", "installer"])
def test_installers_take_it(origin: Path, patches: tuple[str, ...], tmp_path: Path, installer: str) -> None:
    built = build(origin, patches, tmp_path / "out")
    venv = tmp_path / "venv"
    run([sys.executable, "-m", "uv", "venv", "--quiet", "--seed", "--python", sys.executable, str(venv)])
    commands = {
        "pip": [str(venv / "bin/python"), "-m", "pip", "install", "--no-deps", "--no-index", str(built.path)],
        "uv": [sys.executable, "-m", "uv", "pip", "install", "--offline", "--python", str(venv), str(built.path)],
        "installer": [sys.executable, "-m", "installer", "--prefix", str(venv), str(built.path)],
    }
    run(commands[installer])
    (site,) = (venv / "lib").glob("python*/site-packages")
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(site)])
    assert found.version == str(built.version)
    assert found.files is not None
    assert all(Path(str(file.locate())).exists() for file in found.files)
    assert (site / "vllm/engine.py").read_text() == "def run():\n    return 2\n"
    assert os.access(venv / "bin/vllm-tool", os.X_OK)
    run([sys.executable, "-m", "uv", "pip", "check", "--python", str(venv)])
    if installer != "installer":
        run([str(venv / "bin/python"), "-m", "pip", "check"])


def test_patch_check_knows_what_an_installed_wheel_holds(
    origin: Path, patches: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built = build(origin, patches[:1], tmp_path / "out")
    venv = tmp_path / "venv"
    run([sys.executable, "-m", "uv", "venv", "--quiet", "--python", sys.executable, str(venv)])
    run([sys.executable, "-m", "uv", "pip", "install", "--offline", "--python", str(venv), str(built.path)])
    command = ["patch", "check", *patches, "--venv", str(venv), "--wheel", str(origin)]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [patch["verdict"] for patch in found["patches"]] == ["merged-upstream", "applies"]
    assert any("is a patched wheel; it holds edit" in note for note in found["notes"])
    (facts,) = venv.rglob("provision.json")
    facts.write_text("{}")
    assert main(command) == 3


def test_linters_of_wheels_are_content(origin: Path, patches: tuple[str, ...], tmp_path: Path) -> None:
    built = build(origin, patches, tmp_path / "out")
    run([str(Path(sys.executable).parent / "check-wheel-contents"), str(built.path)])
    run([sys.executable, "-m", "twine", "check", "--strict", str(built.path)])


def test_sbom_is_cyclonedx_with_each_patch_in_its_pedigree(
    origin: Path, patches: tuple[str, ...], tmp_path: Path
) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    built = build(origin, patches, tmp_path / "out")
    with LocalWheel(built.path) as wheel:
        text = wheel.read(f"vllm-{built.version}.dist-info/sboms/provision.cdx.json").decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    component = json.loads(text)["metadata"]["component"]
    assert component["purl"] == f"pkg:pypi/vllm@{str(built.version).replace('+', '%2B')}"
    edit, rest = component["pedigree"]["patches"]
    assert edit["diff"]["text"]["content"].endswith(EDIT)
    assert "+#!/bin/sh\n" in rest["diff"]["text"]["content"]
    assert [item["resolves"][0]["id"] for item in (edit, rest)] == ["edit", "rest"]
    assert {item["name"] for item in component["components"]} == {"vllm/engine.py", "vllm/new.sh"}
    (ancestor,) = component["pedigree"]["ancestors"]
    assert ancestor["hashes"] == [{"alg": "SHA-256", "content": digest_of(origin.read_bytes())}]


def test_same_bytes_whatever_the_surroundings(origin: Path, patches: tuple[str, ...], tmp_path: Path) -> None:
    first = build(origin, patches, tmp_path / "out").sha256
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = []
    for patch in patches:
        moved.append(str(elsewhere / Path(patch).name))
        Path(moved[-1]).write_bytes(Path(patch).read_bytes())
    command = [
        sys.executable, "-m", "provisioner", "wheel", "--against", str(origin), "-o", str(elsewhere), "--json",
        *(word for patch in moved for word in ("--patches", patch)),
    ]  # fmt: skip
    environ = {**os.environ, "TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONHASHSEED": "7"}
    done = subprocess.run(command, env=environ, umask=0o077, capture_output=True, text=True, timeout=60, check=True)
    assert build(origin, patches, tmp_path / "third", label="patched").sha256 == json.loads(done.stdout)["sha256"]
    assert build(origin, patches, tmp_path / "again").sha256 == first


def test_second_run_finds_it_and_another_file_is_a_conflict(
    origin: Path, patches: tuple[str, ...], tmp_path: Path
) -> None:
    built = build(origin, patches, tmp_path / "out")
    assert not built.unchanged
    assert build(origin, patches, tmp_path / "out").unchanged
    built.path.write_bytes(b"mine")
    with pytest.raises(ConflictError, match="another file"):
        build(origin, patches, tmp_path / "out")
    assert built.path.read_bytes() == b"mine"
    assert list(built.path.parent.iterdir()) == [built.path]


def test_a_full_disk_leaves_nothing(
    origin: Path, patches: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        build(origin, patches, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_series_that_does_not_hold_writes_nothing(
    origin: Path, patches: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(patches[0]).write_text(EDIT.replace("return 1", "return 7"))
    code = main(["wheel", "--patches", patches[0], "--against", str(origin), "-o", str(tmp_path / "out")])
    assert code == 5
    assert "vllm/engine.py" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_patched_wheel_is_no_origin(origin: Path, patches: tuple[str, ...], tmp_path: Path) -> None:
    built = build(origin, patches[:1], tmp_path / "out")
    with pytest.raises(ConflictError, match="patched already"):
        build(built.path, patches[1:], tmp_path / "out")


def test_signatures_of_the_origin_are_left_out_and_told(patches: tuple[str, ...], tmp_path: Path) -> None:
    origin = write_origin(tmp_path / "signed")
    with zipfile.ZipFile(origin, "a") as archive:
        archive.writestr(f"{INFO}/RECORD.jws", b"{}")
    built = build(origin, patches, tmp_path / "out")
    assert built.signatures == (f"{INFO}/RECORD.jws",)
    with LocalWheel(built.path) as wheel:
        assert not [name for name in wheel.names() if name.endswith(".jws")]


def test_an_origin_with_a_member_that_record_does_not_list(patches: tuple[str, ...], tmp_path: Path) -> None:
    origin = write_origin(tmp_path / "odd")
    with zipfile.ZipFile(origin, "a") as archive:
        archive.writestr("vllm/stowaway.py", b"")
    with pytest.raises(InvalidWheelError, match="RECORD does not list"):
        build(origin, patches, tmp_path / "out")


def test_verify_agrees(origin: Path, patches: tuple[str, ...], tmp_path: Path) -> None:
    built = build(origin, patches, tmp_path / "out")
    found = verify_wheel(built.path, origin, Silence())
    assert (found.problems, found.sha256, found.facts) == ((), built.sha256, built.facts)


def _more(members: dict[str, bytes], name: str, data: bytes) -> None:
    """Put a file in as somebody would who keeps RECORD right."""
    members[name] = data
    record = next(path for path in members if path.endswith("/RECORD"))
    rows = [row for row in members[record].decode().splitlines() if not row.startswith(f"{name},")]
    members[record] = "\n".join([f"{name},{digest_to_record(digest_of(data))},{len(data)}", *rows, ""]).encode()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("vllm/engine.py", "is not as patched"),
        ("vllm/__init__.py", "differs from what the series makes"),
        ("vllm/stowaway.py", "is not in the origin"),
    ],
)
def test_verify_finds_what_differs_though_record_agrees(
    origin: Path, patches: tuple[str, ...], tmp_path: Path, name: str, problem: str
) -> None:
    built = build(origin, patches, tmp_path / "out")
    rewrite(built.path, lambda members: _more(members, name, b"evil = True\n"))
    found = verify_wheel(built.path, origin, Silence()).problems
    assert any(name in line and problem in line for line in found), found


def test_verify_refuses_members_that_record_does_not_vouch_for(
    origin: Path, patches: tuple[str, ...], tmp_path: Path
) -> None:
    built = build(origin, patches, tmp_path / "out")
    rewrite(built.path, lambda members: members.update({"vllm/engine.py": b"evil = True\n"}))
    with pytest.raises(InvalidWheelError, match="RECORD"):
        verify_wheel(built.path, None, Silence())


def test_verify_finds_another_name_and_another_origin(
    origin: Path, patches: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built = build(origin, patches, tmp_path / "out")
    other = write_origin(tmp_path / "other", {**FILES, "vllm/__init__.py": b"other = 1\n"})
    assert main(["wheel", "--verify", str(built.path), "--origin", str(other)]) == 1
    assert "made from another file" in capsys.readouterr().out
    renamed = built.path.with_name(f"vllm-9.9-{TAG}.whl")
    built.path.rename(renamed)
    assert main(["wheel", "--verify", str(renamed), "--origin", str(origin)]) == 1
    assert f"must be called {built.path.name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("provision.json", '"label": "hynix-stable"', '"label": "samsung"', "must be called"),
        ("provision.json", '"series": "', '"series": "0', "not a SHA-256"),
        ("sboms/provision.cdx.json", "return 2", "return 3", "patches in the SBOM"),
        ("sboms/provision.cdx.json", '"id": "edit"', '"id": "other"', "patches in the SBOM"),
    ],
)
def test_verify_finds_an_account_that_was_changed(
    origin: Path, patches: tuple[str, ...], tmp_path: Path, name: str, old: str, new: str, problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    built = build(origin, patches, tmp_path / "out")
    path = f"vllm-{built.version}.dist-info/{name}"

    def change(members: dict[str, bytes]) -> None:
        assert old.encode() in members[path]
        _more(members, path, members[path].replace(old.encode(), new.encode()))

    rewrite(built.path, change)
    assert main(["wheel", "--verify", str(built.path), "--origin", str(origin)]) in (1, 3)
    shown = capsys.readouterr()
    assert problem in shown.out + shown.err


def test_patches_know_their_place_by_the_release_they_were_cut_against(
    origin: Path, patches: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--patches", patches[0], "--against", str(origin), "--cut-against", str(origin), "-o", str(tmp_path)]
    assert main(["wheel", *words, "--json"]) == 0
    (patch,) = json.loads(capsys.readouterr().out)["holds"]["patches"]
    assert patch["files"][0]["scopes"] == ["run"]


@pytest.mark.parametrize(
    "words",
    [[], ["--origin", "x.whl"], ["hynix-stable", "--verify", "x.whl"], ["--patches", "sm80-cpu-repack"]],
)
def test_command_lines_that_cannot_be_meant(words: list[str]) -> None:
    assert main(["wheel", *words]) == 2


def test_a_series_that_the_build_holds_already_makes_no_wheel(
    patches: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = write_origin(tmp_path / "merged", {**FILES, "vllm/engine.py": b"def run():\n    return 2\n"})
    with pytest.raises(ConflictError):
        build(origin, patches[:1], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_verify_refuses_a_wheel_as_shipped(origin: Path) -> None:
    with pytest.raises(InvalidWheelError, match="no wheel of provision wheel"):
        verify_wheel(origin, None, Silence())


def test_facts_are_read_back(origin: Path, patches: tuple[str, ...], tmp_path: Path) -> None:
    facts = build(origin, patches, tmp_path / "out").facts
    assert parse_patched_wheel(print_patched_wheel(facts), where="here") == facts
    with pytest.raises(InvalidReceiptError, match="unknown schema"):
        parse_patched_wheel('{"schema": "other"}', where="here")


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
