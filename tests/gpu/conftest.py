"""Native libraries made on the spot, once a session, and the child's files loaded into this process."""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Build = Callable[..., Path]

GPU = Path(__file__).parents[2] / "provisioner" / "gpu"
MARLIN = GPU.parent / "marlin"


class Recorder:
    """A voice that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def say(self, event: str, **values: Any) -> None:
        self.said.append({"event": event, **values})

    def results(self) -> list[dict[str, Any]]:
        return [message for message in self.said if message["event"] == "result"]


def load_by_path(name: str) -> ModuleType:
    """A file of gpu/ as the child loads it: by path, outside its package."""
    spec = importlib.util.spec_from_file_location(f"verify_{name}", GPU / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"verify_{name}"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def child() -> ModuleType:
    return load_by_path("child")


@pytest.fixture(scope="session")
def library(build_library: "Build") -> Path:
    from tests.gpu.op_library import build_op_library

    return build_op_library(build_library)


@pytest.fixture(scope="session")
def build_library(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """``build_library(source, name, *flags)`` gives the path of a shared library; skips where no C++ compiler is."""
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler (g++): this test needs a real native library")
    folder = tmp_path_factory.mktemp("native")
    built: dict[tuple[str, ...], Path] = {}

    def build(source: str, name: str, *flags: str) -> Path:
        key = (source, name, *flags)
        if key not in built:
            target = folder / str(len(built)) / name
            target.parent.mkdir()
            text = target.with_suffix(".cpp")
            text.write_text(source)
            command = [compiler, "-shared", "-fPIC", "-O0", "-w", str(text), "-o", str(target), *flags]
            subprocess.run(command, check=True, timeout=240)
            built[key] = target
        return built[key]

    return build


def leave_numba_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the repack run on torch alone, without compiling, in this process and for one test.

    numba reads NUMBA_DISABLE_JIT once, when it is imported: set in the environment, it would stay for every later test.
    """
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
