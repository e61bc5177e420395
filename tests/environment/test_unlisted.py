"""Files that RECORD does not list, held to what Python itself would import."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from provisioner.environment.site import Site, open_site_packages
from provisioner.environment.unlisted import Unlisted, find_unlisted

LISTED = ("v/__init__.py", "v/a.py", "v/sub/__init__.py", "v/sub/b.py", "v/_C.abi3.so")
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    for path in LISTED:
        put(tmp_path, path)
    (tmp_path / "v-1.dist-info").mkdir()
    (tmp_path / "v-1.dist-info/RECORD").write_text("".join(f"{path},,\n" for path in LISTED))
    return open_site_packages(tmp_path, "v")


def put(folder: Path, path: str) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(b"")


def origin_of(site: Site, module: str) -> Path:
    code = "import sys, importlib.util as u; sys.path.insert(0, sys.argv[1]); print(u.find_spec(sys.argv[2]).origin)"
    command = [sys.executable, "-I", "-c", code, str(site.site_packages), module]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip())


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("v/a/__init__.py", "v.a"),
        ("v/a/__init__.abi3.so", "v.a"),
        ("v/a.abi3.so", "v.a"),
        (f"v/sub/b{SUFFIX}", "v.sub.b"),
        ("v/sub/__init__.abi3.so", "v.sub"),
        (f"v/_C{SUFFIX}", "v._C"),
        ("v/_C/__init__.py", "v._C"),
    ],
)
def test_what_python_prefers_is_found(site: Site, path: str, module: str) -> None:
    assert find_unlisted(site) == Unlisted(shadowing=(), others=())
    put(site.site_packages, path)
    assert origin_of(site, module) == site.site_packages / path
    assert find_unlisted(site) == Unlisted(shadowing=(path,), others=())
    assert find_unlisted(site, {path}) == Unlisted(shadowing=(), others=())


@pytest.mark.parametrize("path", ["v/sub.py", "v/_C.py", "v/extra.py", "v/a/c.py", "v/new/__init__.py", "v/a.pyc"])
def test_the_rest_is_told_of_and_shadows_nothing(site: Site, path: str) -> None:
    put(site.site_packages, path)
    assert find_unlisted(site) == Unlisted(shadowing=(), others=(path,))


def test_a_file_of_a_patch_is_shadowed_as_well(site: Site) -> None:
    put(site.site_packages, "v/new.py")
    put(site.site_packages, "v/new/__init__.py")
    assert find_unlisted(site, {"v/new.py"}).shadowing == ("v/new/__init__.py",)


def test_links_are_followed_and_never_without_end(site: Site, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    put(elsewhere, "__init__.py")
    (elsewhere / "back").symlink_to(elsewhere)
    (site.site_packages / "v/a").symlink_to(elsewhere)
    assert find_unlisted(site) == Unlisted(shadowing=("v/a/__init__.py",), others=())


def test_other_files_do_not_count(site: Site) -> None:
    for path in ("v/__pycache__/a.cpython-312.pyc", "v/notes.txt", "w/__init__.py", "a.py"):
        put(site.site_packages, path)
    os.mkfifo(site.site_packages / "v/pipe")
    assert find_unlisted(site) == Unlisted(shadowing=(), others=())
