"""Recipe TOML to Recipe, strictly: an unknown key, a wrong type or a contradiction is an addressed error.

Pure.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from provisioner.digests import Digest, digest_of
from provisioner.documents.policy import PatchPolicy as PatchPolicy
from provisioner.errors import InvalidRecipeError
from provisioner.loading import load_toml
from provisioner.records import dataclass
from provisioner.tables import Table

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")


class DriftResponse(StrEnum):
    """What a drift verdict means for a recipe."""

    FAIL = "fail"
    WARN = "warn"
    NOTICE = "notice"
    IGNORE = "ignore"


@dataclass(frozen=True, kw_only=True)
class CardExpectation:
    """The card that a recipe was validated on. ``memory_gib`` is what the driver reports, rounded."""

    name: str
    compute_capability: tuple[int, int]
    memory_gib: int
    memory_vendor: str
    driver: str | None


@dataclass(frozen=True, kw_only=True)
class PythonChoice:
    """The Python of the environment: ``preferred`` if it is found, else the newest one in ``supported``."""

    preferred: str
    supported: SpecifierSet


@dataclass(frozen=True, kw_only=True)
class ReleaseBuild:
    """A release from the user's package index. ``exclude_newer`` dates the resolution of its dependencies."""

    version: Version
    exclude_newer: datetime | None


@dataclass(frozen=True, kw_only=True)
class CommitBuild:
    """A commit of the vLLM wheel index; ``variant`` is None for the default one."""

    version: Version
    commit: str
    variant: str | None
    exclude_newer: datetime | None


Build = ReleaseBuild | CommitBuild


@dataclass(frozen=True, kw_only=True)
class PatchUse:
    """One patch of the store in a recipe."""

    id: str
    policy: PatchPolicy
    why: str


@dataclass(frozen=True, kw_only=True)
class ForkStack:
    """A git checkout whose patches (relative to ``root``), overlay and launcher the recipe uses.

    ``patches`` is a glob inside the checkout, taken in alphabetical order; ``overlay`` a folder of new files with
    ``overlay_patches`` that come after all others. ``drafters`` are model folders of which one must exist.
    ``replaced`` has, for the name of a patch file, the id of the recipe's patch that takes its place.
    """

    url: str
    commit: str
    root: str
    patches: str
    overlay: str | None
    overlay_patches: str | None
    launcher: str
    drafters: tuple[str, ...]
    replaced: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What must be read, as text, in the finished environment."""

    torch: str | None
    torch_cuda: str | None


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One argument of the server with its reason; ``value`` is None for a switch."""

    name: str
    value: str | None
    why: str


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One environment variable of the server with its reason."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Serve:
    """How the recipe's server is started. ``launcher`` is ``vllm`` or ``fork``."""

    launcher: str
    model: str | None
    host: str
    port: int
    validated: bool
    flags: tuple[Flag, ...]
    variables: tuple[Variable, ...]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole recipe. ``digest`` is that of its text; ``where`` the address that its errors carry."""

    name: str
    title: str
    summary: str
    where: str
    digest: Digest
    distribution: str
    card: CardExpectation | None
    python: PythonChoice
    build: Build
    patches: tuple[PatchUse, ...]
    fork: ForkStack | None
    expect: Expectation
    serve: Serve | None
    serve_without_fork: Serve | None
    drift: dict[str, DriftResponse]

    @property
    def required(self) -> frozenset[str]:
        """The ids of the patches without which an environment is not as the recipe says."""
        return frozenset(use.id for use in self.patches if use.policy is PatchPolicy.REQUIRED)


def parse_recipe(text: str, *, name: str, where: str) -> Recipe:
    """Parse the TOML text of the recipe called ``name``.

    Raises InvalidRecipeError, addressed by ``where`` and key, for anything that is not understood.
    """
    table = Table(_load_toml(text, where=where), where=where, error=InvalidRecipeError)
    if not _NAME.fullmatch(name):
        raise table.fail("a recipe's name is lower-case letters, digits and single hyphens", found=name)
    if table.take("schema", int) != 1:
        raise table.fail("unknown recipe schema", "schema", expected="1")
    recipe = Recipe(
        name=name,
        title=table.take("title", str),
        summary=table.take_or("summary", str, "").strip(),
        where=where,
        digest=digest_of(text.encode()),
        distribution=canonicalize_name(table.take_or("distribution", str, "vllm")),
        card=_parse_card(table.take_table("card")) if "card" in table else None,
        python=_parse_python(table.take_table("python")),
        build=_parse_build(table.take_table("build")),
        patches=_parse_patches(table),
        fork=_parse_fork(table.take_table("fork")) if "fork" in table else None,
        expect=_parse_expectation(table.take_table("expect")),
        serve=_parse_serve(table.take_table("serve")) if "serve" in table else None,
        serve_without_fork=_parse_serve(table.take_table("serve-without-fork"))
        if "serve-without-fork" in table
        else None,
        drift=_parse_drift(table),
    )
    table.close()
    _refuse_contradictions(recipe)
    return recipe


def _load_toml(text: str, *, where: str) -> dict[str, Any]:
    try:
        return load_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRecipeError(f"not TOML: {error}", where=where) from error


def _parse_card(table: Table) -> CardExpectation:
    capability = table.take("compute-capability", str)
    major, _, minor = capability.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise table.fail(
            "not a compute capability", "compute-capability", expected="a form such as 8.0", found=capability
        )
    card = CardExpectation(
        name=table.take("name", str),
        compute_capability=(int(major), int(minor)),
        memory_gib=table.take("memory-gib", int),
        memory_vendor=table.take("memory-vendor", str),
        driver=table.take_optional("driver", str),
    )
    table.close()
    return card


def _parse_python(table: Table) -> PythonChoice:
    choice = PythonChoice(
        preferred=table.take_or("preferred", str, "3.12"),
        supported=_parse_specifiers(table, "supported", ">=3.11,<3.14"),
    )
    if not choice.supported.contains(f"{choice.preferred}.0"):
        raise table.fail("the preferred Python is not a supported one", "preferred", found=choice.preferred)
    table.close()
    return choice


def _parse_build(table: Table) -> Build:
    build: Build
    if "release" in table:
        build = ReleaseBuild(
            version=_parse_version(table, "release"), exclude_newer=_parse_time(table, "exclude-newer")
        )
    else:
        commit = table.take("commit", str)
        if not _COMMIT.fullmatch(commit):
            raise table.fail("a commit is given in full", "commit", expected="40 lower-case hex digits", found=commit)
        build = CommitBuild(
            version=_parse_version(table, "version"),
            commit=commit,
            variant=table.take_optional("variant", str),
            exclude_newer=_parse_time(table, "exclude-newer"),
        )
    table.close()
    return build


def _parse_patches(table: Table) -> tuple[PatchUse, ...]:
    uses = []
    for entry in table.take_tables("patch"):
        uses.append(
            PatchUse(
                id=entry.take("id", str), policy=_parse_policy(entry), why=" ".join(entry.take("why", str).split())
            )
        )
        entry.close()
    ids = [use.id for use in uses]
    for repeated in sorted({id_ for id_ in ids if ids.count(id_) > 1}):
        raise table.fail(f"patch {repeated!r} stands twice", "patch")
    return tuple(uses)


def _parse_policy(table: Table) -> PatchPolicy:
    text = table.take("policy", str)
    try:
        return PatchPolicy(text)
    except ValueError:
        raise table.fail("unknown policy", "policy", expected=" | ".join(PatchPolicy), found=text) from None


def _parse_fork(table: Table) -> ForkStack:
    fork = ForkStack(
        url=table.take("url", str),
        commit=table.take("commit", str),
        root=table.take_or("root", str, "vllm"),
        patches=table.take_or("patches", str, "patches/*.patch"),
        overlay=table.take_optional("overlay", str),
        overlay_patches=table.take_optional("overlay-patches", str),
        launcher=table.take("launcher", str),
        drafters=table.take_list("drafters", str),
        replaced=table.take_strings("replaced"),
    )
    if not _COMMIT.fullmatch(fork.commit):
        raise table.fail("a commit is given in full", "commit", expected="40 lower-case hex digits", found=fork.commit)
    table.close()
    return fork


def _parse_expectation(table: Table) -> Expectation:
    expectation = Expectation(
        torch=table.take_optional("torch", str), torch_cuda=table.take_optional("torch-cuda", str)
    )
    table.close()
    return expectation


def _parse_serve(table: Table) -> Serve:
    serve = Serve(
        launcher=table.take_or("launcher", str, "vllm"),
        model=table.take_optional("model", str),
        host=table.take_or("host", str, "127.0.0.1"),
        port=table.take("port", int),
        validated=table.take_or("validated", bool, True),
        flags=tuple(_parse_flag(entry) for entry in table.take_tables("flag")),
        variables=tuple(_parse_variable(entry) for entry in table.take_tables("variable")),
    )
    if serve.launcher not in {"vllm", "fork"}:
        raise table.fail("unknown launcher", "launcher", expected="vllm | fork", found=serve.launcher)
    if not 0 < serve.port < 65536:
        raise table.fail("not a port", "port", expected="1 to 65535", found=str(serve.port))
    table.close()
    return serve


def _parse_flag(table: Table) -> Flag:
    flag = Flag(name=table.take("name", str), value=table.take_optional("value", str), why=table.take("why", str))
    if not flag.name.startswith("--"):
        raise table.fail("a flag begins with two hyphens", "name", found=flag.name)
    table.close()
    return flag


def _parse_variable(table: Table) -> Variable:
    variable = Variable(name=table.take("name", str), value=table.take("value", str), why=table.take("why", str))
    if not _VARIABLE.fullmatch(variable.name):
        raise table.fail("not the name of an environment variable", "name", found=variable.name)
    table.close()
    return variable


def _parse_drift(table: Table) -> dict[str, DriftResponse]:
    responses = {}
    for verdict, text in table.take_strings("drift").items():
        try:
            responses[verdict] = DriftResponse(text)
        except ValueError:
            expected = " | ".join(DriftResponse)
            raise table.fail("unknown response", f"drift.{verdict}", expected=expected, found=text) from None
    return responses


def _parse_version(table: Table, key: str) -> Version:
    text = table.take(key, str)
    try:
        return Version(text)
    except InvalidVersion:
        raise table.fail("not a version", key, found=text) from None


def _parse_specifiers(table: Table, key: str, default: str) -> SpecifierSet:
    text = table.take_or(key, str, default)
    try:
        return SpecifierSet(text)
    except InvalidSpecifier:
        raise table.fail("not a version range", key, found=text) from None


def _parse_time(table: Table, key: str) -> datetime | None:
    moment = table.take_optional(key, datetime)
    if moment is not None and moment.tzinfo is None:
        raise table.fail("a time needs its offset", key, expected="a form such as 2026-08-21T00:00:00Z")
    return moment.astimezone(UTC) if moment else None


def _refuse_contradictions(recipe: Recipe) -> None:
    serve = recipe.serve
    if serve is not None and serve.launcher == "fork" and recipe.fork is None:
        raise InvalidRecipeError(
            "the launcher is the fork's, and no fork is named", where=f"{recipe.where}: serve.launcher"
        )
    applied = {use.id for use in recipe.patches if use.policy is not PatchPolicy.NOT_NEEDED}
    for name, own in recipe.fork.replaced.items() if recipe.fork is not None else ():
        if own not in applied:
            raise InvalidRecipeError(
                "a fork's patch can only be replaced by one that the recipe applies",
                where=f"{recipe.where}: fork.replaced.{name}",
                expected=" | ".join(sorted(applied)),
                found=own,
            )
