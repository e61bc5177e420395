"""systemd units for a server, its booster and a daily drift check, as text. Pure.

The wedge probe runs inside the server's own start (``provision serve --probe-card``) and not as ``ExecStartPre=``:
systemd holds RestartPreventExitStatus= against the exit status of the main process alone, so a probe before it that
fails would be tried again and again on a card that only a reboot brings back.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

BOOSTER_PORT = 8013
# Exit codes that another start cannot mend: usage, invalid input, nothing to obtain, conflict, card.
HOPELESS = (2, 3, 4, 5, 8)
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@+=:,./-")


class Manager(StrEnum):
    """Whose systemd runs the units."""

    USER = "user"
    SYSTEM = "system"


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """What the units run.

    ``name`` names the files (``provision-NAME.service``); ``recipe`` is what the command line takes: a name or a path;
    ``command`` the words that run this tool, the first of them an absolute path.
    ``serve_options`` are further words of ``provision serve``; ``drift_source`` is what the daily check looks at.
    """

    name: str
    recipe: str
    command: tuple[str, ...]
    manager: Manager
    user: str | None
    folder: Path
    port: int
    serve_options: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    booster_port: int = BOOSTER_PORT
    drift_source: str = "pypi"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One unit file: its name and its text."""

    name: str
    text: str


def render_units(plan: UnitPlan) -> tuple[Unit, ...]:
    """Server, booster, drift service and drift timer, in this order."""
    return (_render_server(plan), _render_booster(plan), _render_drift(plan), _render_timer(plan))


def install_commands(units: Sequence[Unit], plan: UnitPlan, folder: Path, *, searched: Path) -> tuple[str, ...]:
    """The commands that put units written to ``folder`` to work; ``searched`` is where systemd looks by itself."""
    control = "systemctl --user" if plan.manager is Manager.USER else "sudo systemctl"
    paths = " ".join(shlex.quote(str(folder / unit.name)) for unit in units)
    started = [unit.name for unit in units if not unit.name.endswith("-drift.service")]
    commands = [] if folder == searched else [f"{control} link {paths}"]
    commands += [f"{control} daemon-reload", f"{control} enable --now {' '.join(started)}"]
    if plan.manager is Manager.USER:
        commands.append("loginctl enable-linger")
    return tuple(commands)


def unit_folder(manager: Manager, *, config_home: Path) -> Path:
    """Where systemd looks for units of ``manager``."""
    return config_home / "systemd" / "user" if manager is Manager.USER else Path("/etc/systemd/system")


def quote_word(word: str) -> str:
    """One word of an Exec line: specifiers and variables are not expanded, and blanks and quotes survive."""
    escaped = word.replace("%", "%%").replace("$", "$$")
    if word and all(character in _PLAIN for character in word):
        return escaped
    inner = escaped.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{inner}"'


def _render_server(plan: UnitPlan) -> Unit:
    words = [*plan.command, "serve", plan.recipe, "--probe-card", *plan.serve_options]
    if plan.extra:
        words += ["--", *plan.extra]
    return Unit(
        name=_server_name(plan),
        text=_sections(
            [
                ("Unit", [
                    ("Description", f"vLLM server of the recipe {_plain_text(plan.name)}"),
                    ("After", "network-online.target"),
                    ("Wants", "network-online.target"),
                    # Loading takes minutes: a shorter interval would never see five failed starts.
                    ("StartLimitIntervalSec", "2h"),
                    ("StartLimitBurst", "5"),
                ]),
                ("Service", [
                    ("Type", "exec"),
                    *_identity(plan),
                    ("WorkingDirectory", _path_text(plan.folder)),
                    *_environment(plan),
                    ("ExecStart", _exec_line(words)),
                    ("Restart", "on-failure"),
                    ("RestartSec", "20"),
                    ("RestartPreventExitStatus", " ".join(map(str, HOPELESS))),
                    ("TimeoutStartSec", "5min"),
                    ("TimeoutStopSec", "2min"),
                    ("KillMode", "mixed"),
                    ("LimitNOFILE", "65536"),
                    ("NoNewPrivileges", "yes"),
                ]),
                ("Install", [("WantedBy", _target(plan))]),
            ]
        ),
    )  # fmt: skip


def _render_booster(plan: UnitPlan) -> Unit:
    words = [*plan.command, "booster", "--upstream", f"http://127.0.0.1:{plan.port}"]
    words += ["--port", str(plan.booster_port)]
    server = _server_name(plan)
    return Unit(
        name=f"provision-{plan.name}-booster.service",
        text=_sections(
            [
                ("Unit", [
                    ("Description", f"Booster in front of {server}"),
                    ("After", server),
                    ("Wants", server),
                ]),
                ("Service", [
                    ("Type", "notify"),
                    ("NotifyAccess", "main"),
                    ("WatchdogSec", "30"),
                    *_identity(plan),
                    ("WorkingDirectory", _path_text(plan.folder)),
                    *_environment(plan),
                    ("ExecStart", _exec_line(words)),
                    ("Restart", "on-failure"),
                    ("RestartSec", "5"),
                    ("RestartPreventExitStatus", " ".join(map(str, HOPELESS))),
                    ("TimeoutStopSec", "30"),
                    ("NoNewPrivileges", "yes"),
                ]),
                ("Install", [("WantedBy", _target(plan))]),
            ]
        ),
    )  # fmt: skip


def _render_drift(plan: UnitPlan) -> Unit:
    words = [*plan.command, "drift", plan.recipe, "--against", plan.drift_source, "--last", "1"]
    return Unit(
        name=f"provision-{plan.name}-drift.service",
        text=_sections(
            [
                ("Unit", [
                    ("Description", f"Do the patches of {_plain_text(plan.name)} still hold on the newest build?"),
                    ("After", "network-online.target"),
                    ("Wants", "network-online.target"),
                ]),
                ("Service", [
                    ("Type", "oneshot"),
                    *_identity(plan),
                    ("WorkingDirectory", _path_text(plan.folder)),
                    *_environment(plan),
                    ("ExecStart", _exec_line(words)),
                    ("TimeoutStartSec", "10min"),
                    ("Nice", "10"),
                    ("NoNewPrivileges", "yes"),
                ]),
            ]
        ),
    )  # fmt: skip


def _render_timer(plan: UnitPlan) -> Unit:
    return Unit(
        name=f"provision-{plan.name}-drift.timer",
        text=_sections(
            [
                ("Unit", [("Description", f"Daily drift check of {_plain_text(plan.name)}")]),
                ("Timer", [
                    ("OnCalendar", "daily"),
                    ("RandomizedDelaySec", "1h"),
                    ("Persistent", "true"),
                ]),
                ("Install", [("WantedBy", "timers.target")]),
            ]
        ),
    )  # fmt: skip


def _sections(sections: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> str:
    parts = ["\n".join([f"[{name}]", *(f"{key}={value}" for key, value in rows)]) for name, rows in sections]
    return "\n\n".join(parts) + "\n"


def _identity(plan: UnitPlan) -> list[tuple[str, str]]:
    return [("User", plan.user)] if plan.manager is Manager.SYSTEM and plan.user else []


def _environment(plan: UnitPlan) -> list[tuple[str, str]]:
    return [("Environment", _environment_word(name, value)) for name, value in plan.environment]


def _environment_word(name: str, value: str) -> str:
    inner = f"{name}={value}".replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{inner}"'


def _exec_line(words: Sequence[str]) -> str:
    return " ".join(quote_word(word) for word in words)


def _path_text(path: Path) -> str:
    return str(path).replace("%", "%%")


def _plain_text(text: str) -> str:
    return text.replace("%", "%%").replace("\n", " ")


def _server_name(plan: UnitPlan) -> str:
    return f"provision-{plan.name}.service"


def _target(plan: UnitPlan) -> str:
    return "default.target" if plan.manager is Manager.USER else "multi-user.target"
