"""Real environments made by real uv, with small wheels made on the spot."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from provisioner.environment import uv as uv_room
from provisioner.environment.site import ask_interpreter, find_site, open_site_packages, venv_python
from provisioner.errors import EnvironmentConflictError
from tests.support.wheels import wheel_bytes, write_wheel

FILES = {"vllm/__init__.py": b"raise RuntimeError('imported')\n", "vllm/a.py": b"A = 1\n"}


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    folder = tmp_path / "venv"
    uv = uv_room.find_uv(os.environ)
    uv_room.create_venv(uv, folder, Path(sys.executable))
    return folder


def install(venv: Path, *arguments: str) -> None:
    uv = uv_room.find_uv(os.environ)
    command = [str(uv.binary), "pip", "install", "--no-index", "--no-deps", "--python", str(venv_python(venv))]
    subprocess.run([*command, *arguments], env=uv.environment, check=True, capture_output=True, timeout=120)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return write_wheel(tmp_path / "wheels", wheel_bytes(FILES, version="0.27.1"), "0.27.1")


def test_found_without_importing_it(venv: Path, wheel: Path) -> None:
    install(venv, str(wheel))
    site = find_site(venv)
    assert str(site.version) == "0.27.1"
    assert (site.site_packages / "vllm" / "a.py").read_bytes() == b"A = 1\n"
    assert "vllm/a.py" in site.record
    assert site.state_dir == venv / ".provision"
    assert site.python == ".".join(map(str, sys.version_info[:3]))


def test_found_through_a_symlinked_folder(venv: Path, wheel: Path, tmp_path: Path) -> None:
    install(venv, str(wheel))
    link = tmp_path / "link"
    link.symlink_to(venv)
    assert find_site(link).site_packages.samefile(find_site(venv).site_packages)


def test_packages_that_a_link_leads_out_to_are_refused(venv: Path, wheel: Path, tmp_path: Path) -> None:
    install(venv, str(wheel))
    shutil.move(venv / "lib", tmp_path / "elsewhere")
    (venv / "lib").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EnvironmentConflictError, match="packages elsewhere") as caught:
        find_site(venv)
    assert caught.value.hints


def test_a_pth_file_that_prints_does_not_matter(venv: Path, wheel: Path) -> None:
    install(venv, str(wheel))
    site = find_site(venv)
    (site.site_packages / "loud.pth").write_text("import sys; print('provision-site: noise')\n")
    assert find_site(venv).version == site.version


def test_python_settings_of_the_user_do_not_leak_in(
    venv: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(venv, str(wheel))
    decoy = tmp_path / "decoy" / "vllm"
    decoy.mkdir(parents=True)
    (decoy / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(decoy.parent))
    monkeypatch.chdir(decoy.parent)
    assert find_site(venv).site_packages.is_relative_to(venv)


def test_a_decoy_that_an_import_would_take_is_refused(venv: Path, wheel: Path, tmp_path: Path) -> None:
    install(venv, str(wheel))
    decoy = tmp_path / "decoy" / "vllm"
    decoy.mkdir(parents=True)
    (decoy / "__init__.py").write_text("")
    (find_site(venv).site_packages / "a_first.pth").write_text(
        f"import sys; sys.path.insert(0, {str(decoy.parent)!r})\n"
    )
    with pytest.raises(EnvironmentConflictError, match="from another place"):
        find_site(venv)


def test_a_missing_distribution_is_named(venv: Path) -> None:
    with pytest.raises(EnvironmentConflictError, match="vllm is not installed here"):
        find_site(venv)


def test_two_installs_of_it_are_refused(venv: Path, wheel: Path) -> None:
    install(venv, str(wheel))
    info = find_site(venv).dist_info
    twin = info.with_name("vllm-0.26.0.dist-info")
    twin.mkdir()
    (twin / "RECORD").write_text("")
    with pytest.raises(EnvironmentConflictError, match="more than once"):
        find_site(venv)


def test_an_editable_install_is_refused(venv: Path, wheel: Path) -> None:
    install(venv, str(wheel))
    info = find_site(venv).dist_info
    (info / "direct_url.json").write_text('{"url": "file:///src/vllm", "dir_info": {"editable": true}}')
    with pytest.raises(EnvironmentConflictError, match="editable"):
        find_site(venv)


def test_a_python_installation_is_not_an_environment(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentConflictError, match="not a virtual environment"):
        find_site(tmp_path)


def test_a_python_that_does_not_answer_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho oops >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(EnvironmentConflictError) as caught:
        ask_interpreter(broken, module="vllm")
    assert caught.value.found == "oops"


def test_a_target_folder_has_no_interpreter(tmp_path: Path, wheel: Path) -> None:
    folder = tmp_path / "target"
    uv = uv_room.find_uv(os.environ)
    command = [str(uv.binary), "pip", "install", "--no-index", "--no-deps", "--target", str(folder), str(wheel)]
    subprocess.run([*command, "--python", sys.executable], env=uv.environment, check=True, capture_output=True)
    site = open_site_packages(folder)
    assert (site.interpreter, site.prefix, str(site.version)) == (None, None, "0.27.1")


def test_a_missing_record_is_refused(venv: Path, wheel: Path) -> None:
    install(venv, str(wheel))
    (find_site(venv).dist_info / "RECORD").unlink()
    with pytest.raises(EnvironmentConflictError, match="RECORD"):
        find_site(venv)


@pytest.mark.parametrize("kind", ["environment", "installation"])
def test_the_folders_are_those_that_sysconfig_names(venv: Path, kind: str) -> None:
    python = venv_python(venv) if kind == "environment" else Path(sys.base_prefix) / "bin" / "python3"
    ask = "import sysconfig; print(sysconfig.get_path('purelib')); print(sysconfig.get_path('platlib'))"
    done = subprocess.run([python, "-I", "-c", ask], capture_output=True, text=True, check=True, timeout=60)
    expected = tuple(dict.fromkeys(map(Path, done.stdout.split("\n")[:2])))
    assert ask_interpreter(python, module="json").site_packages == expected
