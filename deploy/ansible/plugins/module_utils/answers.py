"""Running the command line of provision and understanding its answers: exit codes and JSON objects with a schema.

Runs on a managed host, so it keeps to the standard library of old Pythons.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

CARD = 8
BY_THE_CODE = {
    1: "an honest no",
    2: "it was called wrongly",
    3: "an invalid recipe, lock, patch or bundle",
    4: "something cannot be obtained",
    5: "a conflict or foreign bytes; nothing was written",
    6: "it failed, and everything was restored",
    7: "it failed, and not everything could be restored; the next run tries again",
    8: "the card is missing, lost or wedged",
    70: "a defect of provision",
    130: "it was interrupted; the next run goes on",
}
WARM_REBOOT = "a warm reboot is the only way back"
# Wheels of some gigabytes come over slow lines, and the full check of a card takes many minutes.
SECONDS = 4 * 3600


class RefusedError(Exception):
    """The host stays as it is; the text says why, in words for whoever reads the play's output."""

    def __init__(self, message: str, answer: Answer | None = None) -> None:
        super().__init__(message)
        self.answer = answer


class Answer:
    """How one run of provision ended: its exit code, the JSON object that it printed, and what it said on stderr."""

    def __init__(self, words: list[str], code: int, values: dict, stderr: str) -> None:
        self.words = words
        self.code = code
        self.values = values
        self.stderr = stderr

    @property
    def warnings(self) -> list[str]:
        """The warnings among the lines on stderr."""
        return [line[len("warning: ") :] for line in self.stderr.splitlines() if line.startswith("warning: ")]


class Tool:
    """The program ``command``, run with ``home`` as its PROVISION_HOME."""

    def __init__(self, command: str, home: str) -> None:
        self.command = command
        self.home = home

    def ask(self, *words: str) -> Answer:
        """Run it with ``--json``; RefusedError where it does not run or does not answer in JSON."""
        line = [self.command, *words, "--json"]
        environ = dict(os.environ, PROVISION_HOME=self.home, NO_COLOR="1")
        try:
            done = subprocess.run(
                line,
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RefusedError(f"provision does not run: {error}") from error
        try:
            values = json.loads(done.stdout)
            known = str(values["schema"]).startswith("provision/")
        except (ValueError, KeyError, TypeError):
            known = False
        answer = Answer(line, done.returncode, values if known else {}, done.stderr)
        if not known:
            raise RefusedError(explain(answer), answer)
        return answer

    def insist(self, *words: str, allowed: tuple[int, ...] = (0,)) -> Answer:
        """Like :meth:`ask`; RefusedError where it ends with a code that is not ``allowed``."""
        answer = self.ask(*words)
        if answer.code not in allowed:
            raise RefusedError(explain(answer), answer)
        return answer


def explain(answer: Answer) -> str:
    """Why a run did not end well, with every file that it names."""
    said = answer.values
    meaning = BY_THE_CODE.get(answer.code, "unknown")
    lines = [f"provision {answer.words[1]} ended with {answer.code}, {meaning}"]
    if said.get("schema") == "provision/error/1":
        lines[0] += f": {said['what']}"
        lines += [f"where: {said['where']}"] if said.get("where") else []
        lines += [f"expected: {said['expected']}"] if said.get("expected") else []
        lines += [f"found: {said['found']}"] if said.get("found") else []
        lines += [f"hint: {hint}" for hint in said.get("hints") or ()]
    elif said.get("verdict") or said.get("verification"):
        lines[0] = describe_check(said if said.get("verdict") else said["verification"])
    else:
        lines += answer.stderr.strip().splitlines()[-5:]
    if answer.code == CARD and "warm reboot" not in lines[0]:
        lines.append(WARM_REBOOT)
    return "\n".join(lines)


def describe_check(report: dict) -> str:
    """One line about a check on a card that was no pass."""
    line = "the check on the card gave {}: {}".format(report.get("verdict"), report.get("why"))
    if "warm reboot" in line:
        return line
    if report.get("verdict") in ("wedged", "lost", "card-fault"):
        return f"{line}; {WARM_REBOOT}"
    if report.get("verdict") == "not-run":
        return f"{line}; where a card was before, {WARM_REBOOT}"
    return line


def read_status(tool: Tool, recipe: str, venv: str | None) -> dict:
    """What ``provision status`` says, proven or not."""
    words = ["--venv", venv] if venv else []
    return tool.insist("status", recipe, *words, allowed=(0, 1)).values


def describe_environment(status: dict) -> dict:
    """The facts of a host: its status, and the report of the last check on a card, which lies beside the receipt."""
    report = read_json(Path(status["venv"], ".provision", "verify.json"))
    card = report.get("card") or {}
    kept = ("name", "uuid", "pci", "driver", "vbios", "memory_total")
    known = ("verdict", "why", "form", "health", "created")
    build = ("distribution", "version", "commit", "python", "torch", "torch_cuda")
    return {
        "recipe": status["recipe"],
        "venv": status["venv"],
        "state": status["state"],
        "proven": status["proven"],
        "bare": status["bare"],
        "build": {key: status[key] for key in build},
        "patches": [{key: patch[key] for key in ("id", "policy", "verdict", "why")} for patch in status["patches"]],
        "problems": status["problems"],
        "verification": status["verification"],
        "report": {key: report[key] for key in known if key in report},
        "card": {key: card[key] for key in kept if key in card},
    }


def read_json(path: Path) -> dict:
    """The object in a file; empty where there is none that can be read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def write_json(path: Path, values: dict) -> None:
    """Write a file whole or not at all."""
    write_text(path, json.dumps(values, indent=2, sort_keys=True) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def read_text(path: Path) -> str | None:
    """The text of a file; None where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def point(link: Path, folder: str) -> None:
    """Let a link beside ``folder`` lead to it, in one step."""
    temporary = link.with_name(f"{link.name}.{os.getpid()}.new")
    temporary.symlink_to(folder)
    temporary.replace(link)
