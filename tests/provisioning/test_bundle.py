"""A bundle over a small wheel: made twice the same, installed without any index, refused where a byte is wrong."""

import io
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from provisioner.errors import CannotObtainError, HashMismatchError, InvalidBundleError, ResolutionError, UsageError
from provisioner.progress import Silence
from provisioner.provisioning.bundle import insist_on_recipe, open_bundle, unpacking
from provisioner.provisioning.bundling import BundleRequest, WrittenBundle, choose_minor, write_bundle
from provisioner.provisioning.execute import Request, plan_environment, provision
from provisioner.provisioning.manifest import Manifest, parse_manifest, print_manifest
from tests.provisioning.shop import BOUNDS, FILES, PYTHON, RECIPE, Shop, series_of, vllm_wheel
from tests.support.wheels import wheel_filename

SERIES = series_of(BOUNDS)
PATCHED = b"def scale(x):\n    if x < 0:\n        return 0\n"


def write(shop: Shop, name: str = "small.tar", *, bare: bool = False) -> WrittenBundle:
    request = BundleRequest(
        recipe=shop.recipe,
        recipe_text=RECIPE.encode(),
        lock=shop.lock(SERIES),
        python=PYTHON,
        bare=bare,
        tool=None,
    )
    return write_bundle(request, shop.folder / name, shop.settings, Silence())


@contextmanager
def unplugged(shop: Shop, bundle: Path, *, bare: bool = False) -> Iterator[Request]:
    """A request that takes everything from ``bundle``."""
    opened = open_bundle(bundle)
    with unpacking(opened, shop.folder / "unpacked") as unpacked:
        request = shop.request(SERIES, opened.lock(), bare=bare)
        yield replace(request, open_wheel=unpacked.open_wheel, fetch_links=unpacked.links)


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
    other = replace(written.manifest, lock_digest="0" * 64)
    bad = rewrite(written.path, shop.folder / "bad.tar", {"bundle.json": print_manifest(other).encode()})
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


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../b", "a//b", "./a", "", "bundle.json", "a\\b"])
def test_a_manifest_with_an_unsafe_path_is_refused(shop: Shop, path: str) -> None:
    manifest: Manifest = write(shop).manifest
    text = print_manifest(replace(manifest, files=(replace(manifest.files[0], path=path),)))
    with pytest.raises(InvalidBundleError):
        parse_manifest(text, where="bundle.json")
    assert parse_manifest(print_manifest(manifest), where="bundle.json") == manifest
