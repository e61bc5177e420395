"""Which indexes are asked, and how patiently; read once, at the edge, from the environment and the user's files."""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from provisioner.errors import CannotObtainError, UsageError
from provisioner.loading import load_toml
from provisioner.records import dataclass

VLLM_INDEX = "https://wheels.vllm.ai"
GITHUB_API = "https://api.github.com"
VLLM_REPOSITORY = "vllm-project/vllm"


@dataclass(frozen=True, kw_only=True)
class IndexSettings:
    """Where wheels come from. Times are in seconds.

    ``pypi`` None means the default of the client library. ``github_api`` None means that it is never asked.
    ``timeout`` bounds connecting and each silence, ``deadline`` one whole small answer (never a download, which may be
    slow as long as it moves). ``index_age`` is how long the package index's page is used without asking again.
    """

    vllm_index: str = VLLM_INDEX
    pypi: str | None = None
    github_api: str | None = GITHUB_API
    github_repository: str = VLLM_REPOSITORY
    github_token: str | None = field(default=None, repr=False)
    clone: Path | None = None
    timeout: float = 15.0
    deadline: float = 60.0
    retries: int = 3
    backoff: float = 0.4
    longest_wait: float = 60.0
    cache: Path | None = None
    cache_bytes: int = 2 << 30
    index_age: float = 600.0

    @property
    def pypi_url(self) -> str:
        return (self.pypi or default_pypi_url()).rstrip("/") + "/"


def read_settings(
    environ: Mapping[str, str], home: Path, *, index_url: str | None = None, cache: Path | None = None
) -> IndexSettings:
    """Settings from ``environ`` and the configuration files of uv and pip under ``home``.

    ``index_url`` is the vLLM index where the user gave one.

    Raises UsageError for a URL or number that cannot be meant.
    """
    clone = environ.get("PROVISION_VLLM_CLONE")
    defaults = IndexSettings()
    return IndexSettings(
        vllm_index=_checked_url(index_url or environ.get("PROVISION_VLLM_INDEX") or VLLM_INDEX, "the vLLM index"),
        pypi=find_user_index(environ, home),
        github_api=_github_api(environ),
        github_repository=environ.get("PROVISION_VLLM_REPOSITORY") or VLLM_REPOSITORY,
        github_token=environ.get("GITHUB_TOKEN") or environ.get("GH_TOKEN"),
        clone=Path(clone).expanduser() if clone else None,
        timeout=_seconds(environ, "PROVISION_TIMEOUT", defaults.timeout),
        retries=int(_seconds(environ, "PROVISION_RETRIES", float(defaults.retries))),
        backoff=_seconds(environ, "PROVISION_BACKOFF", defaults.backoff),
        cache=cache,
        index_age=_seconds(environ, "PROVISION_INDEX_AGE", defaults.index_age),
        cache_bytes=int(_seconds(environ, "PROVISION_CACHE_BYTES", float(defaults.cache_bytes))),
    )


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where what is read of wheels is kept: under ``PROVISION_HOME``, else in the user's cache folder."""
    if home := environ.get("PROVISION_HOME"):
        return Path(home).expanduser() / "cache"
    import platformdirs

    return platformdirs.user_cache_path("provision", appauthor=False)


def find_user_index(environ: Mapping[str, str], home: Path) -> str | None:
    """The package index that the user set for uv or pip: uv's first, the environment before files; None without one."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        if value := environ.get(name):
            return _checked_url(_without_name(value), name)
    for path in _uv_files(environ, home):
        if value := _uv_index(path):
            return _checked_url(value, str(path))
    found: str | None = None
    for path in _pip_files(environ, home):
        found = _pip_index(path) or found
    return _checked_url(found, "pip's configuration") if found else None


def default_pypi_url() -> str:
    """The endpoint that pypi-simple knows.

    Taken from its source as text: importing it brings pydantic and an HTML parser, half a second that most runs need
    for nothing.
    """
    import ast
    import importlib.util

    spec = importlib.util.find_spec("pypi_simple")
    if spec is None or spec.origin is None:
        raise CannotObtainError(
            "no package index is set and pypi-simple is not installed", hints=("export PIP_INDEX_URL=URL",)
        )
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        match node:
            case (
                ast.AnnAssign(target=ast.Name(id="PYPI_SIMPLE_ENDPOINT"), value=ast.Constant(value=str(url)))
                | ast.Assign(targets=[ast.Name(id="PYPI_SIMPLE_ENDPOINT")], value=ast.Constant(value=str(url)))
            ):
                return url
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    return PYPI_SIMPLE_ENDPOINT


def _checked_url(value: str, where: str) -> str:
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise UsageError("an index must be an http or https URL", where=where, hints=("give it as https://HOST/PATH",))
    return value.rstrip("/")


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError("must be a number, zero or more", where=name, found=repr(text))
    return value


def _github_api(environ: Mapping[str, str]) -> str | None:
    value = environ.get("PROVISION_GITHUB_API")
    if value is None:
        return GITHUB_API
    return _checked_url(value, "PROVISION_GITHUB_API") if value else None


def _without_name(value: str) -> str:
    """uv allows ``NAME=URL``."""
    name, equals, url = value.partition("=")
    return url if equals and "/" not in name else value


def _uv_files(environ: Mapping[str, str], home: Path) -> Iterator[Path]:
    if environ.get("UV_NO_CONFIG"):
        return
    if named := environ.get("UV_CONFIG_FILE"):
        yield Path(named)
        return
    yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "uv" / "uv.toml"
    for folder in (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":"):
        yield Path(folder) / "uv" / "uv.toml"
    yield Path("/etc/uv/uv.toml")


def _uv_index(path: Path) -> str | None:
    if not path.is_file():
        return None
    import tomllib

    try:
        table: dict[str, Any] = load_toml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return None  # uv itself complains about its own file, with a better message
    indexes = table.get("index")
    for index in indexes if isinstance(indexes, list) else []:
        if isinstance(index, dict) and index.get("default") is True and isinstance(index.get("url"), str):
            return str(index["url"])
    value = table.get("index-url")
    return value if isinstance(value, str) else None


def _pip_files(environ: Mapping[str, str], home: Path) -> Iterator[Path]:
    """Weakest first, as pip reads them."""
    named = environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return
    for folder in (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":"):
        yield Path(folder) / "pip" / "pip.conf"
    yield Path("/etc/pip.conf")
    yield home / ".pip" / "pip.conf"
    yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    yield Path(sys.prefix) / "pip.conf"
    if named:
        yield Path(named)


def _pip_index(path: Path) -> str | None:
    if not path.is_file():
        return None
    import configparser

    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, configparser.Error):
        return None
    for section in ("install", "global"):
        if value := parser.get(section, "index-url", fallback=None):
            return value.strip()
    return None
