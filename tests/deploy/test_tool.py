"""The module ``tool``, called as the program that it is on a host, without Ansible's connection around it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ansible", reason="ansible-core is not installed (extra: fleet)")

PLUGINS = Path(__file__).parents[2] / "deploy" / "ansible" / "plugins"
PACKAGE = "ansible_collections.provisioner.fleet.plugins"


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    answers = f"{PACKAGE}.module_utils.answers"
    monkeypatch.setitem(sys.modules, answers, load(answers, PLUGINS / "module_utils" / "answers.py"))
    return load(f"{PACKAGE}.modules.tool", PLUGINS / "modules" / "tool.py")


def ask(**params: str) -> Any:
    given = dict.fromkeys(("wheel", "requirement", "bundle", "python"))
    return SimpleNamespace(check_mode=True, params={**given, **params})


@pytest.mark.parametrize(
    "params",
    [{"requirement": "provisioner==0.1.0"}, {"wheel": "/nowhere/a.whl"}, {"bundle": "/nowhere/b.tar"}],
    ids=str,
)
def test_check_mode_asks_for_a_python_too(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, str]
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(tool.RefusedError, match=r"this host has no Python 3.*provision_tool_python"):
        tool.settle(ask(**params), tmp_path / "tool")
    found = ask(python=sys.executable, **params)
    assert tool.settle(found, tmp_path / "tool") == (True, None)
    assert not (tmp_path / "tool").exists()


def test_check_mode_finds_the_python_that_runs_the_tool(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tool.settle(ask(requirement="provisioner==0.1.0"), tmp_path / "tool") == (True, None)
