import os
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from provisioner.documents.recipe import PythonChoice
from provisioner.environment import uv as uv_room
from provisioner.environment.site import venv_python
from provisioner.errors import HashMismatchError, NoInterpreterError, ResolutionError
from provisioner.progress import Silence
from tests.support.wheels import wheel_bytes, write_wheel

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def test_only_network_settings_reach_uv():
    given = {
        "UV_DEFAULT_INDEX": "https://mirror.invalid/simple",
        "UV_INDEX_MINE_PASSWORD": "secret",
        "UV_NO_VERIFY_HASHES": "1",
        "UV_EXTRA_INDEX_URL": "https://other.invalid",
        "UV_TORCH_BACKEND": "auto",
        "VIRTUAL_ENV": "/somewhere",
        "PYTHONPATH": "/elsewhere",
        "HTTPS_PROXY": "http://proxy.invalid",
        "SSL_CERT_FILE": "/certs.pem",
    }
    kept = uv_room.isolate(given, index=None)
    assert (
        kept.items()
        >= {
            "UV_DEFAULT_INDEX": "https://mirror.invalid/simple",
            "UV_INDEX_MINE_PASSWORD": "secret",
            "HTTPS_PROXY": "http://proxy.invalid",
            "SSL_CERT_FILE": "/certs.pem",
            "UV_NO_CONFIG": "1",
            "UV_PYTHON_DOWNLOADS": "never",
        }.items()
    )
    assert not kept.keys() & {"UV_NO_VERIFY_HASHES", "UV_TORCH_BACKEND", "VIRTUAL_ENV", "PYTHONPATH"}


def test_an_index_from_other_settings_is_used_where_uv_has_none():
    assert uv_room.isolate({}, index="https://mirror.invalid/s")["UV_DEFAULT_INDEX"] == "https://mirror.invalid/s"
    kept = uv_room.isolate({"UV_INDEX_URL": "https://own.invalid"}, index="https://mirror.invalid/s")
    assert "UV_DEFAULT_INDEX" not in kept


def test_a_parent_folders_configuration_does_not_leak_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pyproject.toml").write_text("[tool.uv]\nthis = 'is not a uv setting'\n[tool.uv.pip]\nno-index = 3\n")
    monkeypatch.chdir(tmp_path)
    uv_room.create_venv(uv_room.find_uv(os.environ), tmp_path / "venv", Path(sys.executable))
    assert venv_python(tmp_path / "venv").exists()


def test_a_venv_is_made_around_the_tools_own_state(tmp_path: Path):
    state = tmp_path / "venv" / ".provision" / "environment.json"
    state.parent.mkdir(parents=True)
    state.write_text("{}")
    uv_room.create_venv(uv_room.find_uv(os.environ), tmp_path / "venv", Path(sys.executable))
    assert state.read_text() == "{}"
    assert venv_python(tmp_path / "venv").exists()


def make_requirements(tmp_path: Path, digest: str) -> Path:
    wheel = write_wheel(tmp_path / "wheels", wheel_bytes({"vllm/a.py": b"A = 1\n"}, version="1.0"), "1.0")
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"vllm @ {wheel.as_uri()} --hash=sha256:{digest}\n")
    return requirements


def test_a_wrong_hash_installs_nothing(tmp_path: Path):
    uv = uv_room.find_uv(os.environ)
    uv_room.create_venv(uv, tmp_path / "venv", Path(sys.executable))
    requirements = make_requirements(tmp_path, "0" * 64)
    with pytest.raises(HashMismatchError) as caught:
        uv_room.sync_requirements(uv, venv_python(tmp_path / "venv"), requirements, reporter=Silence())
    assert caught.value.exit_code == 4
    assert not list((tmp_path / "venv").glob("lib/python*/site-packages/vllm*"))


def test_the_resolvers_own_words_are_kept(tmp_path: Path):
    uv = uv_room.find_uv({**os.environ, "UV_OFFLINE": "1"})
    with pytest.raises(ResolutionError) as caught:
        uv_room.compile_requirements(
            uv, "no-such-package-of-ours==1.0\n", tmp_path / "out.txt", python="3.11", exclude_newer=None
        )
    assert "no-such-package-of-ours" in (caught.value.found or "")


def choice(preferred: str, supported: str) -> PythonChoice:
    return PythonChoice(preferred=preferred, supported=SpecifierSet(supported))


def test_the_preferred_python_else_the_newest_supported(tmp_path: Path):
    uv = uv_room.find_uv(os.environ)
    chosen = uv_room.choose_python(uv, choice(HERE, f"=={HERE}.*"), os.environ)
    assert chosen.preferred
    assert chosen.version[:2] == sys.version_info[:2]
    other = uv_room.choose_python(uv, choice("3.99", f"=={HERE}.*"), os.environ)
    assert not other.preferred
    assert other.version[:2] == sys.version_info[:2]


def test_no_supported_python_names_the_ways():
    with pytest.raises(NoInterpreterError) as caught:
        uv_room.choose_python(uv_room.find_uv(os.environ), choice("3.99", "==3.99.*"), os.environ)
    assert caught.value.hints[0] == f"{uv_room.find_binary()} python install 3.99"
    with pytest.raises(NoInterpreterError) as missed:
        uv_room.take_python(uv_room.find_uv(os.environ), "3.99", choice("3.99", "==3.99.*"), os.environ)
    assert missed.value.hints[0] == f"{uv_room.find_binary()} python list"


def test_a_python_that_the_build_does_not_support_is_refused():
    with pytest.raises(NoInterpreterError, match="does not support this Python"):
        uv_room.take_python(uv_room.find_uv(os.environ), sys.executable, choice("3.99", ">=3.99"), os.environ)


def test_pyenvs_folder_is_searched_when_uv_finds_nothing(tmp_path: Path):
    root = tmp_path / "pyenv"
    real = root / "versions" / "3.98.1" / "bin" / "python3"
    real.parent.mkdir(parents=True)
    real.symlink_to(sys.executable)
    (root / "versions" / "3.98.0" / "bin").mkdir(parents=True)
    found = uv_room._find_python(uv_room.find_uv(os.environ), "3.98", {"PYENV_ROOT": str(root)})
    assert found == real


def _install_pyenv(root: Path, *versions: str, shim: str = "3.98") -> dict[str, str]:
    """Pythons where pyenv keeps them, behind a shim that says when it is run; the environment that leads there."""
    for version in versions:
        real = root / "versions" / version / "bin" / "python3"
        real.parent.mkdir(parents=True)
        real.symlink_to(sys.executable)
    (root / "shims").mkdir()
    (root / "shims" / f"python{shim}").write_text(f"#!/bin/sh\ntouch {root}/ran\nexit 127\n")
    (root / "shims" / f"python{shim}").chmod(0o755)
    return {"PYENV_ROOT": str(root), "PATH": f"{root / 'shims'}:/usr/bin:/bin", "HOME": str(root / "home")}


def test_the_one_python_behind_a_shim_is_found_without_running_it(tmp_path: Path):
    environ = _install_pyenv(tmp_path, "3.98.1", "3.9.8")
    found = uv_room._find_python(uv_room.find_uv(environ), "3.98", environ)
    assert found == tmp_path / "versions" / "3.98.1" / "bin" / "python3"
    assert not (tmp_path / "ran").exists()


def test_uv_is_asked_where_several_are_behind_a_shim_or_it_has_its_own(tmp_path: Path):
    environ = _install_pyenv(tmp_path, "3.98.1", "3.98.2")
    found = uv_room._find_python(uv_room.find_uv(environ), "3.98", environ)
    assert (tmp_path / "ran").exists()
    assert found == tmp_path / "versions" / "3.98.2" / "bin" / "python3"
    assert not uv_room._has_managed("3.98", environ)
    (tmp_path / "home/.local/share/uv/python/cpython-3.98.0-linux-x86_64-gnu").mkdir(parents=True)
    assert uv_room._has_managed("3.98", environ)
    assert not uv_room._has_managed("3.97", environ)
