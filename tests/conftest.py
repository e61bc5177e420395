"""No test reaches the real home: every one gets a home, caches and settings of its own."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.shop import Shop

pytest_plugins = ["tests.support.skips", "tests.support.guards"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A job in the background of a shell ignores Ctrl-C, and so would every program that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SETTINGS = ("PROVISION_HOME", "PROVISION_VLLM_INDEX", "PROVISION_VLLM_CLONE", "XDG_DATA_HOME", "XDG_CACHE_HOME")


@pytest.fixture(autouse=True)
def own_home(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh home; uv's and pip's caches stay where the machine has them, so that real installs are quick."""
    home = tmp_path_factory.mktemp("home")
    cache = Path.home() / ".cache"
    pyenv = Path.home() / ".pyenv"
    monkeypatch.setenv("UV_CACHE_DIR", str(cache / "uv"))
    monkeypatch.setenv("PIP_CACHE_DIR", str(cache / "pip"))
    if pyenv.is_dir():
        monkeypatch.setenv("PYENV_ROOT", str(pyenv))
    for name in _SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("provisioner.index.connections._contexts", {})  # what certificates are trusted, by their file
    return home


@pytest.fixture
def shop(tmp_path: Path) -> "Iterator[Shop]":
    """A small vLLM on a real index of its own, with everything that a recipe needs."""
    from tests.support.index_server import IndexServer
    from tests.support.shop import Shop

    with IndexServer() as server:
        made = Shop(server=server, folder=tmp_path)
        made.stock()
        yield made
