"""Index pages to candidates: PEP 691 JSON, PEP 503 HTML, and the vLLM index's metadata.json. Pure."""

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from provisioner.errors import InvalidInputError, NetworkError
from provisioner.loading import load_json
from provisioner.wheels.names import Candidate, WheelName, commit_of, parse_wheel_name, variant_of
from provisioner.wheels.urls import strip_credentials

JSON_TYPE = "application/vnd.pypi.simple.v1+json"
ACCEPT = f"{JSON_TYPE}, application/vnd.pypi.simple.v1+html;q=0.3, text/html;q=0.2"
_FULL_COMMIT = re.compile(r"/([0-9a-f]{40})/")


def parse_project_page(
    body: bytes, *, content_type: str, url: str, project: str, only: SpecifierSet | None = None
) -> tuple[Candidate, ...]:
    """The wheels of ``project`` on a simple-repository page found at ``url``, JSON or HTML by its content type.

    Files that are no wheels of the project are left out, and so may be those whose version is not in ``only``: a page
    of thousands of files is read ten times as fast. Raises NetworkError where the page is not what it says it is.
    """
    media = content_type.partition(";")[0].strip().lower()
    if media in (JSON_TYPE, "application/json"):
        return _parse_json_page(body, url=url, project=project, only=only)
    if media in ("application/vnd.pypi.simple.v1+html", "text/html", ""):
        return parse_html_page(body, url=url, project=project)
    raise NetworkError(f"an index page of the kind {media} is not understood", where=url)


def parse_html_page(body: bytes, *, url: str, project: str) -> tuple[Candidate, ...]:
    """The wheels of ``project`` that a PEP 503 page links to; relative links are joined to ``url``."""
    from pypi_simple import (
        ProjectPage,
        UnsupportedRepoVersionError,
    )  # brings pydantic and bs4: only where there is no JSON

    try:
        page = ProjectPage.from_html(project, body, base_url=url)
    except UnsupportedRepoVersionError as error:
        raise NetworkError(
            "the index speaks a version of the repository API that is not understood", where=url
        ) from error
    found: list[Candidate] = []
    for package in page.packages:
        name = _wheel_of(unquote(urlsplit(package.url).path.rpartition("/")[2]), project)
        if name is not None:
            found.append(
                _candidate(
                    name,
                    url=package.url,
                    sha256=package.digests.get("sha256"),
                    requires_python=_specifier(package.requires_python),
                    yanked=package.is_yanked,
                )
            )
    return tuple(found)


def parse_vllm_metadata(body: bytes, *, url: str, project: str) -> tuple[Candidate, ...]:
    """The wheels of ``project`` in a ``metadata.json`` of the vLLM index; paths are joined to ``url``, the file's own.

    Raises NetworkError, with the row, where the text is not complete or not of this shape.
    """
    rows = _load(body, url)
    if not isinstance(rows, list):
        raise NetworkError("metadata.json is not a list", where=url)
    found: list[Candidate] = []
    for number, row in enumerate(rows, start=1):
        if (
            not isinstance(row, dict)
            or not isinstance(row.get("filename"), str)
            or not isinstance(row.get("path"), str)
        ):
            raise NetworkError("a row of metadata.json has no filename and path", where=f"{url}, row {number}")
        if canonicalize_name(str(row.get("package_name", project))) != canonicalize_name(project):
            continue
        name = _wheel_of(row["filename"], project)
        if name is None:
            continue
        variant = row["variant"] if "variant" in row else variant_of(name.version)
        if variant is not None and not isinstance(variant, str):
            raise NetworkError("a variant in metadata.json is no text", where=f"{url}, row {number}")
        found.append(_candidate(name, url=urljoin(url, row["path"]), variant=variant))
    return tuple(found)


def parse_folder_links(body: bytes, *, url: str) -> tuple[str, ...]:
    """The names of the sub-folders that an HTML page links to."""
    names: list[str] = []
    for target in re.findall(rb"""<a\s[^>]*?href\s*=\s*["']([^"']+)["']""", body, flags=re.IGNORECASE):
        joined = urljoin(url, target.decode("utf-8", "replace"))
        if (
            joined.startswith(url)
            and joined.endswith("/")
            and "/" not in joined[len(url) : -1]
            and len(joined) > len(url)
        ):
            names.append(unquote(joined[len(url) : -1]))
    return tuple(dict.fromkeys(names))


def full_commit_in(url: str) -> str | None:
    """The 40-digit commit that is a folder in ``url``."""
    found = _FULL_COMMIT.findall(urlsplit(url).path)
    return found[-1] if found else None


def _parse_json_page(body: bytes, *, url: str, project: str, only: SpecifierSet | None) -> tuple[Candidate, ...]:
    page = _load(body, url)
    if not isinstance(page, dict) or not isinstance(page.get("files"), list):
        raise NetworkError("the index page has no list of files", where=url)
    version = str(_table(page.get("meta")).get("api-version", "1.0"))
    if version.partition(".")[0] != "1":
        raise NetworkError(
            f"the index speaks version {version} of the repository API, which is not understood", where=url
        )
    return tuple(_json_candidates(page["files"], url=url, project=project, only=only))


def _json_candidates(files: Iterable[Any], *, url: str, project: str, only: SpecifierSet | None) -> Iterable[Candidate]:
    outside: dict[str, bool] = {}
    for file in files:
        row = _table(file)
        if not isinstance(row.get("filename"), str) or not isinstance(row.get("url"), str):
            raise NetworkError("a file of the index page has no name and URL", where=url)
        if only is not None and _is_outside(row["filename"], only, outside):
            continue
        name = _wheel_of(row["filename"], project)
        if name is None:
            continue
        size, uploaded, sha256 = row.get("size"), row.get("upload-time"), _table(row.get("hashes")).get("sha256")
        yield _candidate(
            name,
            url=urljoin(url, row["url"].partition("#")[0]),
            sha256=sha256 if isinstance(sha256, str) else None,
            size=size if isinstance(size, int) else None,
            requires_python=_specifier(row.get("requires-python")),
            yanked=bool(row.get("yanked", False)),
            upload_time=_moment(uploaded),
        )


def _is_outside(filename: str, only: SpecifierSet, known: dict[str, bool]) -> bool:
    """Whether the name alone tells that the version is not wanted; ``known`` holds the answers for versions so far."""
    text = filename.partition("-")[2].partition("-")[0]
    if text not in known:
        try:
            known[text] = not only.contains(Version(unquote(text)), prereleases=True)
        except InvalidVersion:
            known[text] = False
    return known[text]


def _candidate(name: WheelName, *, url: str, variant: str | None = None, **facts: Any) -> Candidate:
    return Candidate(
        filename=name.filename,
        version=name.version,
        url=strip_credentials(url),
        commit=full_commit_in(url) or commit_of(name.version),
        variant=variant if variant is not None else variant_of(name.version),
        **facts,
    )


def _wheel_of(filename: str, project: str) -> WheelName | None:
    if not filename.endswith(".whl"):
        return None
    try:
        name = parse_wheel_name(filename)
    except InvalidInputError:
        return None
    return name if name.project == canonicalize_name(project) else None


def _load(body: bytes, url: str) -> Any:
    try:
        return load_json(body)
    except (ValueError, UnicodeDecodeError) as error:
        raise NetworkError(
            "the index file is not complete JSON; it may be being written",
            where=url,
            hints=("run the command again in a minute",),
        ) from error


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _specifier(text: object) -> SpecifierSet | None:
    if not isinstance(text, str) or not text:
        return None
    try:
        return SpecifierSet(text)
    except InvalidSpecifier:
        return None


def _moment(text: object) -> datetime | None:
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None
