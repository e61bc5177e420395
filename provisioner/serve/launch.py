"""What will run: command, environment, folder, and everything that speaks against it. Pure.

The command is either the environment's own ``vllm serve`` or a fork checkout's launcher script, which takes its
settings as environment variables and starts the ``vllm`` of the checkout's ``venv`` and no other.
"""

import ipaddress
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import assert_never

from packaging.version import Version

from provisioner.documents.recipe import Serve
from provisioner.documents.recipe import Variable as RecipeVariable
from provisioner.serve import flags, rules
from provisioner.serve.findings import Finding, Severity, Subject
from provisioner.serve.flags import Origin, Setting

KEY_VARIABLE = "VLLM_API_KEY"
REDACTED = "<redacted>"
# Stands in a plan whose weights are not named; such a plan is never started.
NO_MODEL = "<model>"
ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
# The first two put other modules in front of the environment's; the third is torch's newer name for the allocator's
# settings and would win over the recipe's.
DROPPED_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTORCH_ALLOC_CONF")
# Folders or files of these names in the working directory hide the installed packages from the server's children.
SHADOWING_NAMES = frozenset({"vllm", "torch", "triton", "transformers", "vllm.py", "torch.py", "triton.py"})
# Also its abbreviations, and the variable when a command sets it with env(1).
_KEY_ARGUMENT = re.compile(r"--api[-_]k(e|ey)?(=|$)|VLLM_API_KEY=")


class ModelKind(StrEnum):
    """A folder on this machine, a name on a model hub, or a path that leads nowhere."""

    FOLDER = "folder"
    HUB = "hub"
    MISSING = "missing"


@dataclass(frozen=True, kw_only=True)
class Model:
    """The weights; ``text`` is an absolute path, or the hub's name."""

    text: str
    kind: ModelKind


@dataclass(frozen=True, kw_only=True)
class VenvLauncher:
    """``vllm serve`` of an environment. ``site_packages`` is None where it could not be found."""

    venv: Path
    site_packages: Path | None

    @property
    def executable(self) -> Path:
        return self.venv / "bin" / "vllm"


@dataclass(frozen=True, kw_only=True)
class ForkLauncher:
    """The launcher script of a checkout, relative to it."""

    folder: Path
    script: str
    site_packages: Path | None

    @property
    def venv(self) -> Path:
        return self.folder / "venv"


Launcher = VenvLauncher | ForkLauncher


@dataclass(frozen=True, kw_only=True)
class Key:
    """Where the API key comes from; the key itself is no part of a plan. ``file`` is None for the environment."""

    file: Path | None


@dataclass(frozen=True, kw_only=True)
class ChosenCard:
    """The card that will serve, as far as launching cares. ``memory_vendor`` None: not a card of the recipes."""

    name: str
    uuid: str
    pci: str
    memory_vendor: str | None


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the user asked for on top of the recipe."""

    model: Model | None = None
    host: str | None = None
    port: int | None = None
    extra: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What is there: environment variables, working directory with its entries, key, card, build and patches.

    ``recipe_vendor`` is the memory vendor of the recipe's card, used where no card is there to ask.
    """

    environ: Mapping[str, str]
    cwd: Path
    cwd_names: frozenset[str] = frozenset()
    key: Key | None = None
    card: ChosenCard | None = None
    recipe_vendor: str | None = None
    version: Version | None = None
    patches: frozenset[str] | None = None


@dataclass(frozen=True, kw_only=True)
class PlannedVariable:
    """One environment variable of the server, with its reason."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The whole plan. ``settings`` are the server's arguments with reasons, ``argv`` the command made of them.

    ``path_entry`` goes in front of PATH; ``unset`` are the inherited variables that are dropped.
    """

    argv: tuple[str, ...]
    settings: tuple[Setting, ...]
    variables: tuple[PlannedVariable, ...]
    unset: tuple[str, ...]
    path_entry: Path
    cwd: Path
    host: str
    port: int
    key: Key | None
    findings: tuple[Finding, ...]


def plan_launch(serve: Serve, launcher: Launcher, wish: Wish, surroundings: Surroundings) -> Launch:
    """Put recipe, wish and surroundings together. Nothing is raised: what is wrong is in ``findings``."""
    match launcher:
        case VenvLauncher():
            launch = _plan_server(serve, launcher, wish, surroundings)
        case ForkLauncher():
            launch = _plan_fork(serve, launcher, wish, surroundings)
        case _:
            assert_never(launcher)
    findings = (*launch.findings, *_judge_common(serve, launch, wish, surroundings))
    return replace(launch, findings=findings)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def compose_environment(launch: Launch, environ: Mapping[str, str], key: str | None) -> dict[str, str]:
    """The environment to execute with: inherited, less what is dropped, plus what is planned, plus the key."""
    result = {name: value for name, value in environ.items() if name not in launch.unset}
    result.update({variable.name: variable.value for variable in launch.variables})
    result["PATH"] = f"{launch.path_entry}:{environ.get('PATH', '/usr/bin:/bin')}"
    if key is not None:
        result[KEY_VARIABLE] = key
    return result


def redact(words: Iterable[str]) -> tuple[str, ...]:
    """The words of a command, any command, without the value of an API key."""
    clean: list[str] = []
    hiding = False
    for word in words:
        if _KEY_ARGUMENT.match(word):
            name, equals, _ = word.partition("=")
            clean.append(f"{name}={REDACTED}" if equals else name)
            hiding = not equals
        elif hiding and not word.startswith("--"):
            clean.append(REDACTED)
        else:
            hiding = False
            clean.append(word)
    return tuple(clean)


def shell_script(launch: Launch) -> str:
    """The launch as lines for a POSIX shell. The key is named, never shown, and asked for where one is needed."""
    lines = [f"cd {shlex.quote(str(launch.cwd))}"]
    if launch.unset:
        lines.append(f"unset {' '.join(launch.unset)}")
    lines += [f"export {variable.name}={shlex.quote(variable.value)}" for variable in launch.variables]
    lines.append(f'export PATH={shlex.quote(str(launch.path_entry))}:"$PATH"')
    if launch.key is not None and launch.key.file is not None:
        lines.append(f'export {KEY_VARIABLE}="$(cat {shlex.quote(str(launch.key.file))})"')
    elif launch.key is not None or not is_loopback(launch.host):
        lines.append(f': "${{{KEY_VARIABLE}:?export the API key first}}"')
    lines.append(f"exec {shlex.join(printable_argv(launch))}")
    return "\n".join(lines) + "\n"


def printable_argv(launch: Launch) -> tuple[str, ...]:
    """The command with any key in it redacted."""
    return (launch.argv[0], *redact(launch.argv[1:]))


def _plan_server(serve: Serve, launcher: VenvLauncher, wish: Wish, surroundings: Surroundings) -> Launch:
    extra, findings = _read_extra(wish.extra)
    base = tuple(
        Setting(name=flag.name, values=() if flag.value is None else (flag.value,), why=flag.why)
        for flag in serve.flags
    )
    options = (
        Setting(name="--host", values=(wish.host or serve.host,), origin=_origin(wish.host), why=_HOST_WHY),
        Setting(
            name="--port", values=(str(wish.port or serve.port),), origin=_origin(wish.port), why="The recipe's port."
        ),
    )
    settings = flags.override(flags.override(base, options), extra)
    named = flags.find(settings, "--model")
    settings = tuple(setting for setting in settings if setting.name != "--model")
    model, model_findings = _choose_model(serve, wish, named)
    cwd, cwd_findings = _choose_folder(launcher, surroundings)
    port, port_findings = _read_port(settings, serve.port)
    host = flags.find(settings, "--host")
    return Launch(
        argv=(str(launcher.executable), "serve", model or NO_MODEL, *flags.to_words(settings)),
        settings=settings,
        variables=_plan_variables(serve.variables, wish, surroundings),
        unset=_inherited(DROPPED_VARIABLES, surroundings.environ),
        path_entry=launcher.venv / "bin",
        cwd=cwd,
        host=host.value or "" if host else "",
        port=port,
        key=surroundings.key,
        findings=(*findings, *model_findings, *cwd_findings, *port_findings),
    )


def _plan_fork(serve: Serve, launcher: ForkLauncher, wish: Wish, surroundings: Surroundings) -> Launch:
    extra, findings = _read_extra(wish.extra)
    given = {variable.name: variable.value for variable in serve.variables} | dict(wish.variables)
    base = flags.parse_arguments(given.get("EXTRA_ARGS", "").split(), origin=Origin.RECIPE).settings
    settings = flags.override(base, extra)
    taken = {name: flags.find(settings, name) for name in ("--model", "--port", "--host")}
    settings = tuple(setting for setting in settings if setting.name not in taken)
    port_setting = taken["--port"] or Setting(name="--port", values=(str(wish.port or serve.port),))
    port, port_findings = _read_port((port_setting,), serve.port)
    named = taken["--model"].value if taken["--model"] else None
    model = wish.model.text if wish.model else named
    words = flags.to_words(settings)
    variables = _plan_variables(serve.variables, wish, surroundings)
    variables = _with_variable(variables, "EXTRA_ARGS", " ".join(words), "Arguments that the launcher appends.")
    variables = _with_variable(variables, "PORT", str(port), "The recipe's port, in the launcher's form.")
    if model:
        variables = _with_variable(variables, "MODEL", model, "The weights, in the launcher's form.")
    return Launch(
        argv=("/bin/bash", str(launcher.folder / launcher.script)),
        settings=settings,
        variables=variables,
        unset=_inherited(DROPPED_VARIABLES, surroundings.environ),
        path_entry=launcher.venv / "bin",
        cwd=launcher.folder,
        host=serve.host,
        port=port,
        key=surroundings.key,
        findings=(
            *findings,
            *port_findings,
            *_refuse_missing_model(wish),
            *_refuse_fork_host(wish.host is not None or taken["--host"] is not None),
            *_refuse_split_words(words),
        ),
    )


def _judge_common(serve: Serve, launch: Launch, wish: Wish, surroundings: Surroundings) -> tuple[Finding, ...]:
    environment = {variable.name: variable.value for variable in launch.variables}
    situation = rules.Situation(
        settings=_with_launcher_settings(launch.settings, environment),
        environment=environment,
        memory_vendor=surroundings.card.memory_vendor if surroundings.card else surroundings.recipe_vendor,
        version=surroundings.version,
        patches=surroundings.patches,
    )
    return (
        *_require_key(launch),
        *_name_unvalidated(serve),
        *_refuse_key_variable(serve, wish),
        *_name_replaced(launch, wish, surroundings),
        *rules.judge(situation),
    )


# How the card was chosen in the first place; replacing them is the point.
_CARD_VARIABLES = frozenset({"CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"})
_HOST_WHY = "Where the server listens; without a key only this machine may reach it."


def _origin(wished: object) -> Origin:
    return Origin.RECIPE if wished is None else Origin.OPTION


def _read_extra(words: tuple[str, ...]) -> tuple[tuple[Setting, ...], tuple[Finding, ...]]:
    extra = flags.parse_arguments(words, origin=Origin.EXTRA)
    if not extra.stray:
        return extra.settings, ()
    finding = _refuse(
        "stray-argument",
        "words after -- that belong to no argument",
        evidence=(shlex.join(extra.stray),),
        act="--model DIR names the weights",
    )
    return extra.settings, (finding,)


def _choose_model(serve: Serve, wish: Wish, named: Setting | None) -> tuple[str | None, tuple[Finding, ...]]:
    if wish.model is not None:
        return wish.model.text, _refuse_missing_model(wish)
    text = named.value if named is not None else serve.model
    if text:
        return text, ()
    return None, (_refuse("no-model", "the recipe names no weights, and none are given", act="--model DIR"),)


def _refuse_missing_model(wish: Wish) -> tuple[Finding, ...]:
    if wish.model is None or wish.model.kind is not ModelKind.MISSING:
        return ()
    return (_refuse("no-model", "the folder of the weights is not there", evidence=(wish.model.text,)),)


def _choose_folder(launcher: VenvLauncher, surroundings: Surroundings) -> tuple[Path, tuple[Finding, ...]]:
    cwd, packages = surroundings.cwd, launcher.site_packages
    hiding = sorted(SHADOWING_NAMES & surroundings.cwd_names)
    inside = packages is not None and cwd.is_relative_to(packages)
    if not inside and not hiding:
        return cwd, ()
    evidence = f"{cwd} is inside the installed packages" if inside else f"{cwd} has {', '.join(hiding)}"
    finding = Finding(
        id="working-directory",
        severity=Severity.NOTE,
        subject=Subject.COMMAND,
        what="the server starts in another folder: from this one its children would import the wrong modules "
        "(architecture failed to be inspected)",
        evidence=(evidence, f"starts in {launcher.venv}; relative paths in arguments count from there"),
    )
    return launcher.venv, (finding,)


def _read_port(settings: tuple[Setting, ...], default: int) -> tuple[int, tuple[Finding, ...]]:
    setting = flags.find(settings, "--port")
    text = setting.value or "" if setting else str(default)
    if text.isdigit() and 0 < int(text) < 65536:
        return int(text), ()
    return default, (_refuse("port", "not a port", evidence=(text,), act=f"--port {default}"),)


def _plan_variables(
    recipe: tuple[RecipeVariable, ...], wish: Wish, surroundings: Surroundings
) -> tuple[PlannedVariable, ...]:
    variables = tuple(
        PlannedVariable(name=variable.name, value=variable.value, why=variable.why)
        for variable in recipe
        if variable.name != KEY_VARIABLE
    )
    if surroundings.card is not None:
        card = surroundings.card
        order_why = "The driver's default order can hand over another card of a mixed rig."
        variables = _with_variable(variables, "CUDA_DEVICE_ORDER", "PCI_BUS_ID", order_why)
        variables = _with_variable(
            variables, "CUDA_VISIBLE_DEVICES", card.uuid, f"{card.name} at {card.pci}, by UUID, and no other card."
        )
    for name, value in wish.variables.items():
        if name == KEY_VARIABLE:
            continue
        variables = _with_variable(variables, name, value, "Given with --env.")
    return variables


def _with_variable(
    variables: tuple[PlannedVariable, ...], name: str, value: str, why: str
) -> tuple[PlannedVariable, ...]:
    old = next((variable for variable in variables if variable.name == name), None)
    if old is None:
        return (*variables, PlannedVariable(name=name, value=value, why=why))
    return tuple(replace(variable, value=value) if variable is old else variable for variable in variables)


def _inherited(names: tuple[str, ...], environ: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in environ)


def _with_launcher_settings(settings: tuple[Setting, ...], environment: Mapping[str, str]) -> tuple[Setting, ...]:
    """The fork's launcher takes one judged setting as a variable."""
    if "GPU_UTIL" not in environment or flags.find(settings, "--gpu-memory-utilization"):
        return settings
    return (*settings, Setting(name="--gpu-memory-utilization", values=(environment["GPU_UTIL"],)))


def _refuse_fork_host(asked: bool) -> tuple[Finding, ...]:  # noqa: FBT001 - a fact, not a mode
    if not asked:
        return ()
    return (
        _refuse(
            "fork-host",
            "the fork's launcher always listens on 0.0.0.0, so a host cannot be chosen; the key guards it",
            act="leave --host out, and close the port in the firewall if others must not reach it",
        ),
    )


def _refuse_split_words(words: tuple[str, ...]) -> tuple[Finding, ...]:
    split = [word for word in words if not word or any(mark in word for mark in " \t\n*?")]
    if not split:
        return ()
    return (
        _refuse(
            "fork-words",
            "the fork's launcher splits its extra arguments at blanks and expands * and ?, so these would not arrive",
            evidence=tuple(split),
        ),
    )


def _require_key(launch: Launch) -> tuple[Finding, ...]:
    if launch.key is not None or is_loopback(launch.host):
        return ()
    where = launch.host or "every address"
    return (
        _refuse(
            "no-key",
            f"the server would listen on {where} without an API key",
            act=f"--generate-key, or export {KEY_VARIABLE}, or --key-file FILE, or --host 127.0.0.1",
        ),
    )


def _name_unvalidated(serve: Serve) -> tuple[Finding, ...]:
    if serve.validated:
        return ()
    return (
        Finding(
            id="not-validated",
            severity=Severity.WARNING,
            subject=Subject.COMMAND,
            what="these arguments were fitted to the card's memory and not validated in the field",
        ),
    )


def _name_replaced(launch: Launch, wish: Wish, surroundings: Surroundings) -> tuple[Finding, ...]:
    replaced = [
        (variable, surroundings.environ[variable.name])
        for variable in launch.variables
        if surroundings.environ.get(variable.name, variable.value) != variable.value
        and variable.name not in wish.variables
        and variable.name not in _CARD_VARIABLES
    ]
    found = [
        Finding(
            id="variable-replaced",
            severity=Severity.NOTE,
            subject=Subject.COMMAND,
            what=f"{variable.name} of your environment is not used",
            evidence=(f"yours: {yours!r}, the server's: {variable.value!r}",),
            next=(f"--env {variable.name}={shlex.quote(yours)}",),
        )
        for variable, yours in replaced
    ]
    if launch.unset:
        found.append(
            Finding(
                id="variable-dropped",
                severity=Severity.NOTE,
                subject=Subject.COMMAND,
                what="variables that would change what the server imports or allocates are dropped",
                evidence=tuple(f"{name}={surroundings.environ[name]}" for name in launch.unset),
            )
        )
    return tuple(found)


def _refuse_key_variable(serve: Serve, wish: Wish) -> tuple[Finding, ...]:
    if KEY_VARIABLE not in wish.variables and all(variable.name != KEY_VARIABLE for variable in serve.variables):
        return ()
    what = f"{KEY_VARIABLE} is taken from the environment or a file, never from arguments or a recipe"
    return (_refuse("key-in-arguments", what, act="--key-file FILE"),)


def _refuse(id_: str, what: str, *, evidence: tuple[str, ...] = (), act: str | None = None) -> Finding:
    return Finding(
        id=id_,
        severity=Severity.ERROR,
        subject=Subject.COMMAND,
        what=what,
        evidence=evidence,
        next=(act,) if act else (),
    )
