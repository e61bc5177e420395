"""A bundle over a small wheel: made twice the same, installed without any index, refused where a byte is wrong."""

import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock
from msgspec import structs
from packaging.version import Version

from provisioner.bundles.check import check_bundle
from provisioner.bundles.create import BundleRequest, WrittenBundle, choose_minor, write_bundle
from provisioner.bundles.self_wheel import Need, OwnTool
from provisioner.bundles.use import insist_on_host, insist_on_recipe, open_bundle, unpacking
from provisioner.digests import digest_of
from provisioner.documents.bundle_manifest import SCHEMA, Manifest, parse_manifest
from provisioner.documents.codec import encode_json
from provisioner.documents.lock import Lock
from provisioner.errors import (
    BusyError,
    CannotObtainError,
    HashMismatchError,
    InvalidBundleError,
    NoCompatibleWheelError,
    ResolutionError,
    UsageError,
)
from provisioner.pipeline.execute import Request, plan_environment, provision
from provisioner.progress import Silence
from tests.support.index_server import Mood
from tests.support.shop import BOUNDS, FILES, PYTHON, RECIPE, Shop, series_of, vllm_wheel
from tests.support.wheels import wheel_filename

SERIES = series_of(BOUNDS)
PATCHED = b"def scale(x):\n    if x < 0:\n        return 0\n"
NEED = Need(name="torch", version=Version("2.13.0"))


def write(
    shop: Shop,
    name: str = "small.tar",
    *,
    bare: bool = False,
    tool: OwnTool | None = None,
    lock: Lock | None = None,
) -> WrittenBundle:
    request = BundleRequest(
        recipe=shop.recipe,
        recipe_text=RECIPE.encode(),
        lock=lock or shop.lock(SERIES),
        python=PYTHON,
        bare=bare,
        tool=tool,
    )
    return write_bundle(request, shop.folder / name, shop.settings, Silence())


@contextmanager
def unplugged(shop: Shop, bundle: Path, *, bare: bool = False) -> Iterator[Request]:
    """A request that takes everything from ``bundle``."""
    opened = open_bundle(bundle)
    with unpacking(opened, shop.folder / "unpacked") as unpacked:
        request = shop.request(SERIES, opened.lock(), bare=bare)
        yield replace(request, open_wheel=unpacked.open_wheel, fetch_links=unpacked.links)


def own_tool(data: bytes = b"not really a wheel") -> OwnTool:
    return OwnTool(filename="provisioner-0.1.0-py3-none-any.whl", wheel=data, needs=(NEED,))


def read_all(bundle: Path) -> None:
    opened = open_bundle(bundle)
    for file in opened.manifest.files:
        opened.read(file.path)


def rewrite(
    source: Path, target: Path, change: Mapping[str, bytes | None], *, extra: Mapping[str, bytes] | None = None
) -> Path:
    """A copy of a tar with other bytes for some members, or without them."""
    with tarfile.open(source) as old, tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as new:
        members = [(entry.name, old.extractfile(entry)) for entry in old.getmembers()]
        contents = {name: stream.read() for name, stream in members if stream is not None}
        for name, data in {**contents, **change, **(extra or {})}.items():
            if data is not None:
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                new.addfile(entry, io.BytesIO(data))
    return target


def relist(source: Path, target: Path, manifest: Manifest, change: Mapping[str, bytes] | None = None) -> Path:
    """A copy whose list was made to fit the other bytes of some members."""
    new = change or {}
    files = tuple(
        structs.replace(file, sha256=digest_of(new[file.path]), size=len(new[file.path])) if file.path in new else file
        for file in manifest.files
    )
    text = encode_json(structs.replace(manifest, files=files)).encode()
    return rewrite(source, target, {**new, "bundle.json": text})


def with_entry(source: Path, target: Path, name: str, kind: bytes, link: str = "") -> Path:
    """A copy in which one member is of another kind."""
    with tarfile.open(source) as old, tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as new:
        for entry in old.getmembers():
            stream = old.extractfile(entry)
            if entry.name == name:
                entry.type, entry.linkname = kind, link
            new.addfile(entry, stream if entry.isreg() else None)
    return target


def test_a_bundle_follows_a_link_and_replaces_nothing_but_a_file(shop: Shop) -> None:
    (shop.folder / "kept").mkdir()
    link, pipe = shop.folder / "link.tar", shop.folder / "pipe.tar"
    link.symlink_to("kept/small.tar")
    written = write(shop, "link.tar", bare=True)
    assert link.is_symlink()
    assert written.path == (shop.folder / "kept" / "small.tar").resolve()
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="a bundle is a file"):
        write(shop, "pipe.tar", bare=True)
    assert pipe.is_fifo()


def test_it_holds_all_that_the_lock_wants_and_nothing_else(shop: Shop) -> None:
    written = write(shop)
    paths = [file.path for file in written.manifest.files]
    assert paths == [
        "lockfiles/small.toml",
        "lockfiles/small.txt",
        "recipes/small.toml",
        f"wheels/{wheel_filename('2.13.0', project='torch')}",
        f"wheels/{wheel_filename('0.27.1')}",
    ]
    bundle = open_bundle(written.path)
    assert bundle.manifest == written.manifest
    assert bundle.lock().digest == written.manifest.lock_digest
    assert bundle.recipe().name == "small"
    assert bundle.read(f"wheels/{wheel_filename('0.27.1')}") == vllm_wheel()


def test_the_same_request_gives_the_same_bytes(shop: Shop) -> None:
    first, second = write(shop, "first.tar"), write(shop, "second.tar")
    assert first.path.read_bytes() == second.path.read_bytes()
    assert (first.sha256, first.size) == (second.sha256, first.path.stat().st_size)


def test_tar_reads_it(shop: Shop) -> None:
    written = write(shop, tool=own_tool())
    with tarfile.open(written.path) as archive:
        assert [entry.name for entry in archive] == ["bundle.json", *(file.path for file in written.manifest.files)]
        assert {(entry.uid, entry.uname, entry.mtime, entry.mode) for entry in archive} == {(0, "", 0, 0o644)}


def test_a_run_that_was_stopped_leaves_the_old_file_and_is_gone_on_with(shop: Shop) -> None:
    lock = shop.lock(SERIES)
    old = write(shop, lock=lock).path.read_bytes()
    torch = f"packages/{wheel_filename('2.13.0', project='torch')}"
    shop.server.set_mood(torch, Mood(status=500, times=2, pause=0.3))
    with pytest.raises(CannotObtainError, match="500"):
        write(shop, tool=own_tool(), lock=lock)
    assert (shop.folder / "small.tar").read_bytes() == old
    shop.server.forget_requests()
    write(shop, lock=lock)
    assert [request.path for request in shop.server.requests if "packages" in request.path] == [torch]
    assert (shop.folder / "small.tar").read_bytes() == old
    assert not (shop.folder / ".small.tar.parts").exists()


def test_two_runs_do_not_write_one_file(shop: Shop) -> None:
    parts = shop.folder / ".small.tar.parts"
    parts.mkdir()
    with FileLock(parts / ".lock"), pytest.raises(BusyError):
        write(shop)


def test_too_little_room_is_said_before_anything_is_fetched(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 100))
    with pytest.raises(CannotObtainError, match="too little disk space") as caught:
        write(shop)
    assert caught.value.hints == ("write it elsewhere: -o /another/disk/small.tar",)
    assert not [path for path in shop.folder.iterdir() if "small.tar" in path.name]


def test_the_tool_travels_with_what_it_needs(shop: Shop) -> None:
    tool = own_tool()
    bundle = open_bundle(write(shop, tool=tool).path)
    torch = wheel_filename("2.13.0", project="torch")
    (wheel,) = (file for file in bundle.manifest.files if file.path == f"wheels/{torch}")
    assert bundle.read("tool/requirements.txt").decode() == (
        f"provisioner==0.1.0 --hash=sha256:{digest_of(tool.wheel)}\ntorch==2.13.0 --hash=sha256:{wheel.sha256}\n"
    )
    assert bundle.read(f"tool/{tool.filename}") == tool.wheel
    assert bundle.read(f"tool/{torch}") == bundle.read(f"wheels/{torch}")
    assert b"FILE.tar FOLDER" in bundle.read("tool/install.py")


def test_a_whole_bundle_passes_the_check(shop: Shop) -> None:
    for tool in (None, own_tool()):
        written = write(shop, tool=tool)
        checked = check_bundle(written.path, Silence())
        assert checked.sha256 == written.sha256 == digest_of(written.path.read_bytes())
        assert (checked.size, checked.manifest) == (written.size, written.manifest)


def test_the_check_finds_what_does_not_belong_together(shop: Shop) -> None:
    written = write(shop, bare=True, tool=own_tool())
    whole = structs.replace(written.manifest, bare=False)
    with pytest.raises(InvalidBundleError, match="lacks wheels that the lock wants") as caught:
        check_bundle(relist(written.path, shop.folder / "bad.tar", whole), Silence())
    assert caught.value.found == "torch"
    other = vllm_wheel(files={**FILES, "vllm/other.py": b"OTHER = 2\n"})
    name = f"wheels/{wheel_filename('0.27.1')}"
    with pytest.raises(InvalidBundleError, match="does not allow"):
        check_bundle(relist(written.path, shop.folder / "bad.tar", written.manifest, {name: other}), Silence())
    tool = f"tool/{wheel_filename('2.13.0', project='torch')}"
    with pytest.raises(InvalidBundleError, match="does not need"):
        check_bundle(relist(written.path, shop.folder / "bad.tar", written.manifest, {tool: other}), Silence())
    text = {"recipes/small.toml": RECIPE.encode() + b"# another\n"}
    with pytest.raises(InvalidBundleError, match="the recipe is not the one"):
        check_bundle(relist(written.path, shop.folder / "bad.tar", written.manifest, text), Silence())


def test_the_check_reads_every_byte(shop: Shop) -> None:
    written = write(shop)
    data = bytearray(written.path.read_bytes())
    bundle = open_bundle(written.path)
    for file in written.manifest.files:
        changed = data.copy()
        changed[bundle.offsets[file.path] + file.size - 1] ^= 1
        (shop.folder / "bad.tar").write_bytes(changed)
        with pytest.raises(HashMismatchError) as caught:
            check_bundle(shop.folder / "bad.tar", Silence())
        assert caught.value.what == f"{file.path} is not what the bundle says"


def test_an_environment_comes_from_it_with_no_index_at_all(shop: Shop) -> None:
    written = write(shop)
    shutil.rmtree(shop.folder / "uv-cache")
    shop.server.requests.clear()
    with unplugged(shop, written.path) as request:
        outcome = provision(request, shop.uv, Silence())
        assert not plan_environment(request, shop.uv)
    assert (shop.site_packages / "vllm/ops.py").read_bytes().startswith(PATCHED)
    assert (shop.site_packages / "torch/version.py").exists()
    assert outcome.receipt.build.wheel == wheel_filename("0.27.1")
    assert shop.server.requests == []


def test_a_second_run_unpacks_no_wheel(shop: Shop) -> None:
    written = write(shop)
    with unplugged(shop, written.path) as first:
        provision(first, shop.uv, Silence())
    with unpacking(open_bundle(written.path), shop.folder / "again") as unpacked:
        request = shop.request(SERIES, unpacked.bundle.lock())
        provision(replace(request, open_wheel=unpacked.open_wheel, fetch_links=unpacked.links), shop.uv, Silence())
        assert not [path for path in (shop.folder / "again").rglob("*") if path.is_file()]
    assert not list((shop.folder / "again").iterdir())


def test_bare_takes_the_wheel_alone(shop: Shop) -> None:
    written = write(shop, bare=True)
    assert [file.path for file in written.manifest.under("wheels")] == [f"wheels/{wheel_filename('0.27.1')}"]
    bundle = open_bundle(written.path)
    insist_on_recipe(bundle, "small", bare=True)
    with pytest.raises(UsageError, match="the wheel alone"):
        insist_on_recipe(bundle, "small", bare=False)
    with unplugged(shop, written.path, bare=True) as request:
        provision(request, shop.uv, Silence())
    assert (shop.site_packages / "vllm/ops.py").read_bytes().startswith(PATCHED)


def test_another_recipes_bundle_is_refused(shop: Shop) -> None:
    with pytest.raises(UsageError, match="another recipe's"):
        insist_on_recipe(open_bundle(write(shop).path), "large", bare=False)


def test_a_wheel_that_is_missing_from_the_folder_is_not_looked_for_elsewhere(shop: Shop) -> None:
    written = write(shop, bare=True)
    shutil.rmtree(shop.folder / "uv-cache")
    shop.server.requests.clear()
    with unplugged(shop, written.path) as request, pytest.raises(ResolutionError):
        provision(request, shop.uv, Silence())
    assert shop.server.requests == []


def test_a_wheel_with_other_bytes_is_refused(shop: Shop) -> None:
    written = write(shop)
    other = vllm_wheel(files={**FILES, "vllm/other.py": b"OTHER = 2\n"})
    name = f"wheels/{wheel_filename('0.27.1')}"
    size = next(file.size for file in written.manifest.files if file.path == name)
    padded = other[:size] + b"\0" * (size - len(other))
    bad = rewrite(written.path, shop.folder / "bad.tar", {name: padded})
    with unplugged(shop, bad) as request, pytest.raises(HashMismatchError, match="not what the bundle says"):
        provision(request, shop.uv, Silence())
    assert not list(shop.folder.glob("venv/lib/python*/site-packages/vllm*"))


def test_a_lock_that_is_not_the_bundles_is_refused(shop: Shop) -> None:
    written = write(shop)
    other = structs.replace(written.manifest, lock_digest="0" * 64)
    bad = rewrite(written.path, shop.folder / "bad.tar", {"bundle.json": encode_json(other).encode()})
    with pytest.raises(InvalidBundleError, match="not the one that the bundle names"):
        open_bundle(bad).lock()


def test_a_member_too_many_or_too_few_is_refused(shop: Shop) -> None:
    written = write(shop)
    more = rewrite(written.path, shop.folder / "more.tar", {}, extra={"wheels/../../evil": b"x"})
    with pytest.raises(InvalidBundleError, match="not the ones that the bundle lists"):
        open_bundle(more)
    fewer = rewrite(written.path, shop.folder / "fewer.tar", {"recipes/small.toml": None})
    with pytest.raises(InvalidBundleError) as caught:
        open_bundle(fewer)
    assert caught.value.found == "recipes/small.toml"


KINDS = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.GNUTYPE_SPARSE)


def test_a_member_that_is_no_plain_file_is_refused(shop: Shop) -> None:
    written, name = write(shop), f"wheels/{wheel_filename('0.27.1')}"
    for kind in KINDS:
        bad = with_entry(written.path, shop.folder / "bad.tar", name, kind, link="/etc/passwd")
        with pytest.raises(InvalidBundleError) as caught:
            open_bundle(bad)
        assert (caught.value.what, caught.value.found) == ("a member is not a plain file", name)
        first = with_entry(written.path, shop.folder / "bad.tar", "bundle.json", kind, link="/etc/passwd")
        with pytest.raises(InvalidBundleError, match="this is no bundle"):
            open_bundle(first)


def test_a_bundle_that_was_cut_names_the_member(shop: Shop) -> None:
    written = write(shop)
    bundle = open_bundle(written.path)
    last = written.manifest.files[-1]
    data = written.path.read_bytes()
    for end in (bundle.offsets[last.path] - tarfile.BLOCKSIZE, bundle.offsets[last.path] + last.size - 1):
        (shop.folder / "short.tar").write_bytes(data[:end])
        with pytest.raises(InvalidBundleError) as caught:
            open_bundle(shop.folder / "short.tar")
        assert caught.value.found == f"nothing whole from {last.path} on"


def test_no_text_is_read_without_bound(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(write(shop).path)
    monkeypatch.setattr("provisioner.bundles.use._SMALL", 10)
    with pytest.raises(InvalidBundleError, match=r"lockfiles/small\.toml is too large"):
        bundle.lock()


def test_a_bundle_of_a_newer_form_is_refused_in_plain_words(shop: Shop) -> None:
    text = encode_json(write(shop).manifest).replace(SCHEMA, "provision/bundle/2").replace('"bare"', '"naked"')
    with pytest.raises(InvalidBundleError) as caught:
        parse_manifest(text, where="bundle.json")
    assert caught.value.what == "the bundle was written by a newer provision than this one"
    assert (caught.value.expected, caught.value.found) == (SCHEMA, "provision/bundle/2")
    with pytest.raises(InvalidBundleError, match="unknown schema"):
        parse_manifest(text.replace("provision/bundle/2", "provision/lock/1"), where="bundle.json")


def test_another_python_or_an_older_system_is_refused(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(write(shop).path)
    for same in (None, PYTHON, f"{PYTHON}.9", sys.executable, "3", "python3"):
        insist_on_host(bundle, same, bare=False)
    insist_on_host(bundle, "3.2", bare=True)
    with pytest.raises(UsageError, match="another Python") as caught:
        insist_on_host(bundle, f"{PYTHON}9", bare=False)
    assert (caught.value.expected, caught.value.found) == (PYTHON, f"{PYTHON}9")
    for system, found in ((("glibc", "2.17"), "glibc 2.17"), (("", ""), "another C library")):
        monkeypatch.setattr("platform.libc_ver", lambda system=system: system)
        with pytest.raises(NoCompatibleWheelError) as refused:
            insist_on_host(bundle, None, bare=False)
        assert (refused.value.expected, refused.value.found) == ("glibc 2.28 or newer", found)


@pytest.mark.parametrize("keep", [0, 100, 5000, -11000])
def test_half_a_bundle_is_refused(shop: Shop, keep: int) -> None:
    data = write(shop).path.read_bytes()
    short = shop.folder / "short.tar"
    short.write_bytes(data[:keep])
    with pytest.raises((InvalidBundleError, HashMismatchError)):
        read_all(short)


def test_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(CannotObtainError, match="cannot be read"):
        open_bundle(tmp_path / "nothing.tar")


def test_a_wheel_that_the_index_no_longer_has_is_said(shop: Shop) -> None:
    lock = shop.lock(SERIES)
    shop.stock(files={**FILES, "vllm/other.py": b"OTHER = 2\n"})
    request = BundleRequest(recipe=shop.recipe, recipe_text=b"", lock=lock, python=PYTHON, bare=True, tool=None)
    with pytest.raises(HashMismatchError, match=r"no wheel of vllm 0\.27\.1"):
        write_bundle(request, shop.folder / "small.tar", shop.settings, Silence())
    assert not [path for path in shop.folder.iterdir() if "small.tar" in path.name]


def test_a_python_that_the_build_does_not_support_is_refused(shop: Shop) -> None:
    assert choose_minor(shop.recipe.python, None) == PYTHON
    for wrong in ("3.2", "3", "python"):
        with pytest.raises(UsageError):
            choose_minor(shop.recipe.python, wrong)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../up", "a/../../b", "a//b", "./a", "", "bundle.json", "a\\b", "a\0b", "a\nb"]
)
def test_a_manifest_with_an_unsafe_path_is_refused(shop: Shop, path: str) -> None:
    manifest: Manifest = write(shop).manifest
    text = encode_json(manifest).replace(json.dumps(manifest.files[0].path), json.dumps(path))
    with pytest.raises(InvalidBundleError):
        parse_manifest(text, where="bundle.json")
    assert parse_manifest(encode_json(manifest), where="bundle.json") == manifest
