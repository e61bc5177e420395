"""Native libraries made on the spot, once a session."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Build = Callable[..., Path]


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
