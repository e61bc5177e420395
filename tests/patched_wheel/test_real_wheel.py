"""The real vLLM 0.27.1 with the recipe's patch: 313 MB from the user's index, kept between runs."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from provisioner.digests import digest_of
from provisioner.index.lazy import LocalWheel
from provisioner.patched_wheel.verify import verify_wheel
from provisioner.progress import Silence

pytestmark = [pytest.mark.network, pytest.mark.slow]
MEMORY_MB = 150


@pytest.fixture(scope="module")
def kept() -> Path:
    """A folder that outlives the run: the tool's cache of downloads, beside uv's."""
    return Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache/uv").parent / "provision-tests"


def build(kept: Path, folder: Path) -> tuple[Path, int]:
    """The wheel, and the most memory that making it took, in MB."""
    # getrusage counts what the parent held when it started the program; VmHWM is the program's own, in KB.
    meter = "import re, sys; from provisioner.cli.main import main; code = main(sys.argv[1:]); "
    meter += "status = open('/proc/self/status').read(); "
    meter += "print(int(re.search(r'VmHWM:\\s+(\\d+)', status)[1]) // 1024, file=sys.stderr); sys.exit(code)"
    command = [sys.executable, "-c", meter, "wheel", "hynix-stable", "-o", str(folder)]
    environ = {**os.environ, "PROVISION_HOME": str(kept)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[0]), int(done.stderr.splitlines()[-1])


def test_built_proven_and_installed(kept: Path, tmp_path: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    build(kept, tmp_path / "first")  # with the download, where it is not there yet
    path, memory = build(kept, tmp_path / "out")
    assert memory < MEMORY_MB
    (first,) = (tmp_path / "first").iterdir()
    assert digest_of(first.read_bytes()) == digest_of(path.read_bytes())
    with LocalWheel(path) as wheel:
        info = f"vllm-{path.name.split('-')[1]}.dist-info"
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(
            wheel.read(f"{info}/sboms/provision.cdx.json").decode()
        ) is None  # fmt: skip
    (origin,) = kept.rglob("vllm-0.27.1-*.whl")
    assert verify_wheel(path, origin, Silence()).problems == ()
    venv = tmp_path / "venv"
    for command in (
        ["venv", "--quiet", "--python", sys.executable, str(venv)],
        ["pip", "install", "--quiet", "--no-deps", "--offline", "--python", str(venv), str(path)],
    ):
        subprocess.run([sys.executable, "-m", "uv", *command], timeout=200, check=True)
    (site,) = (venv / "lib").glob("python*/site-packages")
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(site)])
    assert found.version.startswith("0.27.1+hynix.stable.")
    assert {entry.name for entry in found.entry_points} >= {"vllm"}
