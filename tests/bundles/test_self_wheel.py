"""The tool's own wheel and the list of what it needs, made from the installation that runs here."""

import importlib.metadata
import io
import zipfile

import pytest

from provisioner import __version__
from provisioner.bundles.self_wheel import Need, find_needs, read_own_tool
from provisioner.documents.lock import PYTHONS
from provisioner.errors import CannotObtainError
from provisioner.wheels.record import parse_record


class Fake:
    """An installed distribution."""

    def __init__(self, version: str, *requires: str) -> None:
        self.version = version
        self.requires = requires


def install(monkeypatch: pytest.MonkeyPatch, **installed: Fake) -> None:
    def find(name: str) -> Fake:
        try:
            return installed[name.replace("-", "_")]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(importlib.metadata, "distribution", find)


def test_needs_follow_extras_and_the_targets_python(monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        monkeypatch,
        provisioner=Fake(__version__, "one[fast]>=1", "old; python_version < '3.12'", "dev; extra == 'dev'"),
        one=Fake("1.5", "quick; extra == 'fast'", "never; extra == 'slow'", "win; sys_platform == 'win32'"),
        quick=Fake("2.0", "one"),
        old=Fake("0.1"),
    )
    assert [need.name for need in find_needs("3.12")] == ["one", "quick"]
    assert [str(need.version) for need in find_needs("3.11")] == ["0.1", "1.5", "2.0"]


def test_what_is_not_installed_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, provisioner=Fake(__version__, "backport; python_version < '3.12'"))
    with pytest.raises(CannotObtainError, match=r"needs backport on Python 3\.11") as missing:
        find_needs("3.11")
    assert missing.value.hints[-1] == "leave the tool out: --without-tool"
    install(monkeypatch, provisioner=Fake(__version__, "one>=2"), one=Fake("1.0"))
    with pytest.raises(CannotObtainError) as wrong:
        find_needs("3.12")
    assert (wrong.value.expected, wrong.value.found) == ("one>=2", "1.0")
    install(monkeypatch)
    with pytest.raises(CannotObtainError, match="runs from a folder"):
        find_needs("3.12")


@pytest.fixture
def installed() -> None:
    try:
        importlib.metadata.distribution("provisioner")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the tool is not installed here, so its own wheel cannot be made")


@pytest.mark.usefixtures("installed")
def test_the_same_wheel_each_time_and_whole() -> None:
    tool = read_own_tool("3.12")
    assert tool == read_own_tool("3.12")
    with zipfile.ZipFile(io.BytesIO(tool.wheel)) as archive:
        names = archive.namelist()
        record = parse_record(archive.read(f"provisioner-{__version__}.dist-info/RECORD").decode())
        assert {item.compress_type for item in archive.infolist()} == {zipfile.ZIP_STORED}
    assert set(names) == {entry.path for entry in record}
    wanted = ("cli/main.py", "recipes/hynix.toml", "_data/lockfiles/hynix-stable.txt", "bundles/install_tool.py")
    assert {f"provisioner/{path}" for path in wanted} <= set(names)
    assert any(name.startswith("provisioner/_data/patches/pr50021") for name in names)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("python", PYTHONS)
def test_all_that_the_tool_needs_is_found_for_every_python(python: str) -> None:
    needs = find_needs(python)
    assert all(isinstance(need, Need) for need in needs)
    assert {"uv", "typer", "rich", "packaging", "requests"} <= {need.name for need in needs}
    assert [need.name for need in needs] == sorted({need.name for need in needs})
