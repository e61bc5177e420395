"""Imports point one way: a room imports only rooms that come after it in ``ROOMS``, and modules form no circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "provisioner"
BASE = "base"
"""The modules that lie beside the rooms."""
ROOMS = (
    "cli",
    "drift",
    "booster",
    "probes",
    "doctor",
    "serve",
    "bundles",
    "patched_wheel",
    "pipeline",
    "locks",
    "series",
    "gpu",
    "marlin",
    "environment",
    "transaction",
    "porting",
    "patching",
    "openai",
    "index",
    "wheels",
    "documents",
    BASE,
)
LARGEST_ROOM = 16
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
    """Those of ``names`` that are modules of ours, packages left out: importing from one imports its modules."""
    return {name for name in names if name in MODULES and MODULES[name].name != "__init__.py"}


def room_of(name: str) -> str:
    parts = MODULES[name].relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else BASE


def is_pure(name: str) -> bool:
    return "Pure." in (ast.get_docstring(ast.parse(MODULES[name].read_text(encoding="utf-8"))) or "")


PURE = frozenset(name for name in MODULES if is_pure(name) and MODULES[name].name != "__init__.py")


def test_every_room_has_its_place() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders | {BASE} == set(ROOMS)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_room_imports_only_rooms_after_it(name: str) -> None:
    if name == "provisioner.__main__":  # the entry point is the command line
        assert own(imported(MODULES[name])) == {"provisioner.cli.main"}
        return
    rooms = {room_of(item) for item in own(imported(MODULES[name]))}
    allowed = set(ROOMS[ROOMS.index(room_of(name)) :])
    assert rooms <= allowed


def test_no_circle_of_modules() -> None:
    graph = {name: own(imported(path)) - {name} for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_modules_import_only_pure_modules(name: str) -> None:
    names = imported(MODULES[name])
    assert own(names) <= PURE
    assert not {item.partition(".")[0] for item in names} & IMPURE_LIBRARIES


@pytest.mark.parametrize("room", ["documents", "wheels", "patching"])
def test_the_core_is_pure(room: str) -> None:
    assert {name for name in MODULES if room_of(name) == room and MODULES[name].name != "__init__.py"} <= PURE


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES.values()}), ids=lambda path: path.name)
def test_a_room_can_be_looked_through(folder: Path) -> None:
    assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= LARGEST_ROOM


@pytest.mark.parametrize("name", sorted(MODULES))
def test_torch_stays_out_of_the_tools_own_process(name: str) -> None:
    allowed = name.startswith(("provisioner.marlin", "provisioner.gpu.child"))
    assert allowed or not any(item.partition(".")[0] == "torch" for item in imported(MODULES[name]))


def test_the_walk_sees_imports(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("def f():\n    import torch.nn\n    from provisioner import cli\n")
    assert {"torch.nn", "provisioner", "provisioner.cli"} == imported(file)
