"""Which vllm an import takes: real virtual environments with real decoys."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from provisioner.doctor.imports import judge_imports, judge_venv, view_imports, view_venv
from provisioner.errors import EnvironmentConflictError

VERSION = ".".join(map(str, sys.version_info[:3]))


@pytest.fixture
def environment(tmp_path):
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "vllm").mkdir()
    (packages / "vllm" / "__init__.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    command = folder / "bin" / "vllm"
    command.write_text(f"#!{folder}/bin/python\n", encoding="utf-8")
    command.chmod(0o755)
    return folder, packages


def look(environment, cwd: Path, **environ: str):
    folder, packages = environment
    values = {"PATH": f"{folder}/bin"} | environ
    seen = view_imports(folder / "bin" / "python", "vllm", cwd=cwd, environ=values)
    return {finding.id for finding in judge_imports(seen, packages, "vllm")}


def test_a_clean_environment_shows_nothing(environment, tmp_path):
    (tmp_path / "work").mkdir()
    assert look(environment, tmp_path / "work") == set()


def test_a_source_checkout_in_the_working_folder_shadows(environment, tmp_path):
    (tmp_path / "work" / "vllm").mkdir(parents=True)
    (tmp_path / "work" / "vllm" / "__init__.py").write_text("")
    assert look(environment, tmp_path / "work") == {"shadowed", "decoy"}


def test_a_leftover_folder_without_code_is_a_decoy(environment, tmp_path):
    (tmp_path / "work" / "vllm").mkdir(parents=True)
    assert look(environment, tmp_path / "work") == {"decoy"}


def test_pythonpath_shadows(environment, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "vllm.py").write_text("")
    (tmp_path / "work").mkdir()
    assert look(environment, tmp_path / "work", PYTHONPATH=str(tmp_path / "other")) == {"shadowed", "decoy"}


def test_another_vllm_command_first_on_the_path(environment, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "vllm").chmod(0o755)
    assert look(environment, tmp_path / "bin", PATH=str(tmp_path / "bin")) == {"command-elsewhere"}


def test_a_python_that_does_not_start(tmp_path):
    (tmp_path / "python").write_text("#!/bin/false\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(EnvironmentConflictError, match="does not answer"):
        view_imports(tmp_path / "python", "vllm", cwd=tmp_path, environ={})
    with pytest.raises(EnvironmentConflictError, match="does not start"):
        view_imports(tmp_path / "none", "vllm", cwd=tmp_path, environ={})


def judge(environment, running: str = VERSION, **environ: str):
    folder, _ = environment
    return {finding.id for finding in judge_venv(view_venv(folder, "vllm"), running=running, environ=environ)}


def test_a_fresh_environment_is_not_stale(environment):
    assert judge(environment) == set()
    assert judge(environment, VIRTUAL_ENV=str(environment[0])) == set()


def test_a_base_python_that_is_gone(environment):
    config = environment[0] / "pyvenv.cfg"
    config.write_text(config.read_text().replace(os.path.dirname(sys._base_executable), "/gone/bin"))  # noqa: PTH120
    assert judge(environment) == {"stale-environment"}


def test_a_base_python_that_was_replaced(environment):
    assert judge(environment, running="3.99.0") == {"stale-environment"}


def test_a_copied_environment_starts_the_old_python(environment):
    folder, _ = environment
    (folder / "bin" / "vllm").write_text("#!/old/venv/bin/python\n")
    assert judge(environment) == {"stale-environment"}
    (folder / "bin" / "vllm").write_text("#!/bin/sh\n'''exec' \"/old/venv/bin/python\" \"$0\" \"$@\"\n' '''\n")
    assert judge(environment) == {"stale-environment"}
    (folder / "bin" / "vllm").write_text(f"#!/bin/sh\n'''exec' \"{folder}/bin/python\" \"$0\" \"$@\"\n' '''\n")
    assert judge(environment) == set()


def test_two_pythons_in_one_environment(environment):
    (environment[0] / "lib" / "python3.1" / "site-packages" / "vllm").mkdir(parents=True)
    assert judge(environment) == {"python-twice"}


def test_another_active_environment(environment):
    assert judge(environment, VIRTUAL_ENV="/other") == {"other-active"}


def test_a_link_to_the_environment_is_the_environment(environment, tmp_path):
    (tmp_path / "link").symlink_to(environment[0])
    seen = view_venv(tmp_path / "link", "vllm")
    assert list(judge_venv(seen, running=VERSION, environ={})) == []


def test_nothing_is_imported(environment, tmp_path):
    folder, _ = environment
    done = subprocess.run([folder / "bin" / "python", "-c", "import vllm"], capture_output=True, text=True, timeout=30)
    assert "imported" in done.stderr
    (tmp_path / "work").mkdir()
    assert look(environment, tmp_path / "work") == set()
