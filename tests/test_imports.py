"""Imports point one way: cli, then the rooms with I/O, then the pure modules, then errors."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "provisioner"
PURE = frozenset(
    f"provisioner.{name}"
    for name in (
        "counts",
        "digests",
        "errors",
        "policy",
        "progress",
        "receipt",
        "recipe",
        "records",
        "tables",
        "environment.lock",
        "gpu.model",
        "gpu.report",
        "gpu.xid",
        "patching.diff",
        "patching.headers",
        "patching.hunks",
        "patching.model",
        "patching.places",
        "patching.plan",
        "patching.scope",
        "patching.sections",
        "patching.series",
        "patching.shipping",
        "patching.steps",
        "patching.strands",
        "patching.surface",
        "provisioning.manifest",
        "provisioning.plan",
        "serving.booster.headers",
        "serving.containerfile",
        "serving.conversation",
        "serving.doctor.logs",
        "serving.doctor.metrics",
        "serving.doctor.report",
        "serving.findings",
        "serving.flags",
        "serving.launch",
        "serving.probes.compare",
        "serving.probes.model",
        "serving.probes.record",
        "serving.prometheus",
        "serving.rules",
        "serving.sse",
        "serving.units",
        "wheels.directory",
        "wheels.names",
        "wheels.record",
        "wheels.simple",
        "wheels.urls",
        "wheels.zipped",
    )
)
IMPURE_LIBRARIES = frozenset(
    {"os", "subprocess", "requests", "socket", "time", "random", "tempfile", "shutil", "fcntl", "sys"}
)


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def own(names: set[str]) -> set[str]:
    return {name for name in names if name in MODULES}


@pytest.mark.parametrize("name", sorted(name for name in PURE if name in MODULES))
def test_pure_modules_import_only_pure_modules(name: str) -> None:
    names = imported(MODULES[name])
    packages = {package for package in own(names) if MODULES[package].name == "__init__.py"}
    assert own(names) - packages <= PURE
    assert not {item.partition(".")[0] for item in names} & IMPURE_LIBRARIES


@pytest.mark.parametrize("name", sorted(name for name in MODULES if not name.startswith("provisioner.cli")))
def test_rooms_do_not_import_the_command_line(name: str) -> None:
    if name == "provisioner.__main__":
        pytest.skip("the entry point is the command line")
    assert not {item for item in own(imported(MODULES[name])) if item.startswith("provisioner.cli")}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_torch_stays_out_of_the_tools_own_process(name: str) -> None:
    allowed = name.startswith(("provisioner.marlin", "provisioner.gpu.child"))
    assert allowed or not any(item.partition(".")[0] == "torch" for item in imported(MODULES[name]))


def test_only_diff_imports_unidiff() -> None:
    users = {name for name, path in MODULES.items() if "unidiff" in imported(path)}
    assert users <= {"provisioner.patching.diff"}


def test_the_walk_sees_imports(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("def f():\n    import torch.nn\n    from provisioner import cli\n")
    assert {"torch.nn", "provisioner", "provisioner.cli"} == imported(file)
