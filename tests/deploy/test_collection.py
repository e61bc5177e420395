"""The collection by itself: clean under ansible-lint, of the project's version, in the source distribution."""

import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("ansiblelint", reason="ansible-lint is not installed (extra: fleet)")

import yaml

ROOT = Path(__file__).parents[2]
COLLECTION = ROOT / "deploy" / "ansible"


def run(*words: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "ANSIBLE_NOCOLOR": "1", **environment}
    return subprocess.run(words, env=environ, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


def test_its_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert yaml.safe_load((COLLECTION / "galaxy.yml").read_text())["version"] == project["version"]


@pytest.mark.slow
def test_the_linter_finds_nothing_in_its_strictest_profile(tmp_path: Path) -> None:
    place = tmp_path / "ansible_collections" / "provisioner"
    place.mkdir(parents=True)
    (place / "fleet").symlink_to(COLLECTION)
    scripts = Path(sys.executable).parent
    done = run(
        sys.executable, "-m", "ansiblelint", "--nocolor", ".", cwd=COLLECTION,
        ANSIBLE_COLLECTIONS_PATH=str(tmp_path), PATH=f"{scripts}:{os.environ['PATH']}",
        XDG_CACHE_HOME=str(tmp_path / "cache"), ANSIBLE_HOME=str(tmp_path / "ansible"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Profile 'production' was required, and it passed" in done.stderr


@pytest.mark.slow
def test_it_travels_in_the_source_distribution(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "uv", "build", "--sdist", "--out-dir", str(tmp_path), "--python", sys.executable)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert {"deploy/ansible/galaxy.yml", "deploy/ansible/plugins/modules/environment.py"} <= names
