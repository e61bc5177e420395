"""Commit builds and nightlies on the vLLM index: which wheels a folder of it lists, and why it lists none."""

from __future__ import annotations

from dataclasses import dataclass

from provisioner.errors import NetworkError, NoSuchBuildError
from provisioner.index.cache import WheelCache, key_of_url
from provisioner.index.commits import Standing, Witnesses
from provisioner.index.settings import IndexSettings
from provisioner.index.transport import Reply, Transport
from provisioner.wheels.names import Candidate, Target, commit_of, sift
from provisioner.wheels.simple import full_commit_in, parse_folder_links, parse_html_page, parse_vllm_metadata
from provisioner.wheels.urls import redact

PROJECT = "vllm"
_SOME_VARIANTS = ("cpu", "cu126", "cu128", "cu129", "cu130")
"""Asked for by name where a build's page does not list its variants; only to say what there is."""
_FOUND_OR_NOT = frozenset({200, 403, 404})
"""An object store answers 403 for a key that does not exist to those who may not list it."""


@dataclass(frozen=True, kw_only=True)
class Asking:
    """Who is asked, through what, for which variant; with a ``target`` the cache may answer where it knows enough."""

    settings: IndexSettings
    transport: Transport
    witnesses: Witnesses
    cache: WheelCache | None = None
    variant: str | None = None
    target: Target | None = None
    project: str = PROJECT


def find_nightly(asking: Asking) -> tuple[Candidate, ...]:
    """The wheels of the newest build; each candidate's ``commit`` is the one that its link points into.

    Raises NoSuchBuildError where the index has no nightly folder, NetworkError where its files are not whole.
    """
    base = f"{asking.settings.vllm_index}/nightly"
    found = _find_in_folder(base, asking)
    if found is None:
        raise NoSuchBuildError(
            "the index has no nightly build",
            where=redact(base),
            hints=("check --index-url: it must be the root of a vLLM wheel index",),
        )
    return found


def find_commit(commit: str, asking: Asking) -> tuple[Candidate, ...]:
    """The wheels of one full commit, never of another; those of other variants where the wanted one is not there.

    Raises NoSuchBuildError where the index has no such build, saying as far as can be known whether the commit is on
    main; NetworkError where the index does not answer or is half written.
    """
    base = f"{asking.settings.vllm_index}/{commit}"
    known = _recall(base, asking)
    if known:
        return known
    found = _find_in_folder(base, asking)
    if found is None:
        raise _explain_missing(commit, asking)
    for candidate in found:
        short = commit_of(candidate.version)
        if short is not None and not commit.startswith(short):
            raise NoSuchBuildError(
                "the folder of this commit holds a wheel of another commit",
                where=redact(base),
                expected=commit,
                found=candidate.filename,
            )
    return found


def _find_in_folder(base: str, asking: Asking) -> tuple[Candidate, ...] | None:
    """The wheels of the wanted variant's folder; else of the others; None where there is nothing."""
    if asking.variant is None:
        return _read_folder(f"{base}/vllm", asking) or _find_other_variants(base, asking) or None
    wanted = _read_folder(f"{base}/{asking.variant}/vllm", asking)
    return wanted or (_read_folder(f"{base}/vllm", asking) + _find_other_variants(base, asking)) or None


def _find_other_variants(base: str, asking: Asking) -> tuple[Candidate, ...]:
    page = asking.transport.fetch(f"{base}/", accept=_FOUND_OR_NOT)
    if page.status != 200:
        return ()
    named = [name for name in parse_folder_links(page.body, url=page.url) if name != PROJECT]
    others = [name for name in named or _SOME_VARIANTS if name != asking.variant]
    return tuple(candidate for name in others for candidate in _read_folder(f"{base}/{name}/vllm", asking))


def _read_folder(folder: str, asking: Asking) -> tuple[Candidate, ...]:
    """What metadata.json lists; what the HTML page lists where that is missing, broken or without wheels."""
    failure: NetworkError | None = None
    reply = asking.transport.fetch(f"{folder}/metadata.json", accept=_FOUND_OR_NOT)
    if reply.status == 200:
        try:
            found = parse_vllm_metadata(reply.body, url=reply.url, project=PROJECT)
        except NetworkError as error:
            failure = error
        else:
            if found:
                _remember(folder, found, asking, reply)
                return found
    page = asking.transport.fetch(f"{folder}/", accept=_FOUND_OR_NOT)
    if page.status == 200 and _is_whole(page.body):
        found = parse_html_page(page.body, url=page.url, project=PROJECT)
        if found or failure is None:
            return found
    if page.status == 200 and failure is None:
        failure = NetworkError("the index page is not complete; it may be being written", where=redact(page.url))
    if failure is not None:
        failure.hints = ("run the command again in a minute",)
        raise failure
    return ()


def _is_whole(page: bytes) -> bool:
    return b"</html>" in page[-64:].lower() or b"</body>" in page[-64:].lower()


def _explain_missing(commit: str, asking: Asking) -> NoSuchBuildError:
    settings = asking.settings
    where = redact(f"{settings.vllm_index}/{commit}/")
    hints: tuple[str, ...] = (
        "provision lock RECIPE --latest",
        "name another commit of main: those of the last minutes are not built yet, and old ones may be gone",
    )
    nightly = asking.transport.fetch(f"{settings.vllm_index}/nightly/vllm/metadata.json", accept=_FOUND_OR_NOT)
    if nightly.status != 200:
        hints = ("check --index-url: nothing there looks like a vLLM wheel index", *hints)
    match asking.witnesses.ask_standing(commit):
        case Standing.ON_MAIN:
            why = "it is on main, but not built (yet)"
        case Standing.NOT_ON_MAIN:
            why = "it is not on main, and only commits on main are built"
        case Standing.UNKNOWN_COMMIT:
            why = f"it is not on main: {settings.github_repository} knows no such commit"
        case Standing.NOBODY_ANSWERS:
            why = "not built (yet) or not on main"
    return NoSuchBuildError(f"the index has no build of commit {commit}: {why}", where=where, hints=hints)


def _recall(base: str, asking: Asking) -> tuple[Candidate, ...]:
    """What the folder of a commit listed before, where a wheel that fits is among it: such wheels are not replaced."""
    if asking.cache is None or asking.target is None:
        return ()
    folder = f"{base}/{asking.variant}/vllm" if asking.variant else f"{base}/vllm"
    entry = asking.cache.load("pages", key_of_url(folder))
    if entry is None or not isinstance(entry.facts.get("url"), str):
        return ()
    found = parse_vllm_metadata(entry.data, url=entry.facts["url"], project=PROJECT)
    return found if sift(found, asking.target, variant=asking.variant)[0] else ()


def _remember(folder: str, found: tuple[Candidate, ...], asking: Asking, reply: Reply) -> None:
    if found and asking.cache is not None and full_commit_in(f"{folder}/") is not None:
        asking.cache.store("pages", key_of_url(folder), {"url": reply.url}, reply.body)
