from pathlib import Path

import pytest
from pypi_simple import PYPI_SIMPLE_ENDPOINT

from provisioner.errors import UsageError
from provisioner.index.settings import VLLM_INDEX, default_pypi_url, find_user_index, read_settings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.prefix", str(tmp_path / "prefix"))
    return tmp_path


@pytest.fixture
def alone(home: Path) -> dict[str, str]:
    """An environment in which only files under ``home`` count."""
    return {"XDG_CONFIG_DIRS": str(home / "xdg")}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_settings_the_client_library_knows(home: Path) -> None:
    settings = read_settings({"PIP_CONFIG_FILE": "/dev/null", "UV_NO_CONFIG": "1"}, home)
    assert settings.vllm_index == VLLM_INDEX
    assert settings.pypi is None
    assert settings.pypi_url == PYPI_SIMPLE_ENDPOINT == default_pypi_url()


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"UV_DEFAULT_INDEX": "https://a/simple/", "PIP_INDEX_URL": "https://c"}, "https://a/simple"),
        ({"UV_DEFAULT_INDEX": "mine=https://a/simple"}, "https://a/simple"),
        ({"UV_INDEX_URL": "https://b", "PIP_INDEX_URL": "https://c"}, "https://b"),
        ({"PIP_INDEX_URL": "https://c?x=1"}, "https://c?x=1"),
    ],
)
def test_the_environment_counts_first(home: Path, alone: dict[str, str], environ: dict[str, str], found: str) -> None:
    write(home / ".config/uv/uv.toml", 'index-url = "https://file"')
    assert find_user_index(alone | environ, home) == found


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (".config/uv/uv.toml", 'index-url = "https://file/simple"'),
        (".config/uv/uv.toml", '[[index]]\nurl = "https://x"\n[[index]]\nurl = "https://file/simple"\ndefault = true'),
        ("xdg/uv/uv.toml", 'index-url = "https://file/simple"'),
        (".config/pip/pip.conf", "[global]\nindex-url = https://file/simple\n"),
        (".pip/pip.conf", "[install]\nindex-url = https://file/simple/\n"),
        ("prefix/pip.conf", "[global]\nindex-url = https://file/simple"),
    ],
)
def test_files_of_uv_and_pip_count(home: Path, alone: dict[str, str], path: str, text: str) -> None:
    write(home / path, text)
    assert find_user_index(alone, home) == "https://file/simple"


def test_a_named_pip_file_is_the_strongest(home: Path, alone: dict[str, str]) -> None:
    write(home / ".config/pip/pip.conf", "[global]\nindex-url = https://weak\n")
    write(home / "named.conf", "[global]\nindex-url = https://strong\n")
    assert find_user_index(alone | {"PIP_CONFIG_FILE": str(home / "named.conf")}, home) == "https://strong"
    assert find_user_index(alone | {"PIP_CONFIG_FILE": "/dev/null"}, home) is None


def test_files_that_cannot_be_read_do_not_count(home: Path, alone: dict[str, str]) -> None:
    write(home / ".config/uv/uv.toml", "index-url = ")
    write(home / ".config/pip/pip.conf", "no section\n")
    assert find_user_index(alone, home) is None


@pytest.mark.parametrize(
    ("environ", "where"),
    [
        ({"PIP_INDEX_URL": "file:///srv/simple"}, "PIP_INDEX_URL"),
        ({"PROVISION_VLLM_INDEX": "wheels"}, "the vLLM index"),
        ({"PROVISION_TIMEOUT": "soon"}, "PROVISION_TIMEOUT"),
        ({"PROVISION_RETRIES": "-1"}, "PROVISION_RETRIES"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(home: Path, environ: dict[str, str], where: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_settings(environ, home)
    assert caught.value.where == where


def test_mirrors_and_limits(home: Path) -> None:
    settings = read_settings(
        {
            "PROVISION_VLLM_INDEX": "http://mirror/vllm/",
            "PROVISION_GITHUB_API": "",
            "PROVISION_TIMEOUT": "2.5",
            "PROVISION_RETRIES": "0",
            "GITHUB_TOKEN": "s3cret",
        },
        home,
    )
    assert (settings.vllm_index, settings.github_api) == ("http://mirror/vllm", None)
    assert (settings.timeout, settings.retries) == (2.5, 0)
    assert "s3cret" not in repr(settings)
    given = read_settings({"PROVISION_VLLM_INDEX": "http://mirror"}, home, index_url="http://given/")
    assert given.vllm_index == "http://given"
