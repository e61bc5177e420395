"""Module ``provisioner.fleet.environment``: one proven environment on this host."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.provisioner.fleet.plugins.module_utils.answers import (
    Answer,
    RefusedError,
    Tool,
    describe_environment,
    point,
    read_json,
    read_status,
    read_text,
    write_json,
    write_text,
)

DOCUMENTATION = """
module: environment
short_description: Provision a recipe, prove it, check it on the card
version_added: 0.1.0
author:
  - the provisioner authors
description:
  - Runs C(provision up RECIPE) and reports what it changed. What failed, and why, is decided by its exit code and its
    JSON answer; a file with foreign bytes is named, and nothing is written then.
  - With O(state=former) the host goes back to the tool, recipe, bundle and options of before the last change.
options:
  root:
    description: The folder of everything that provision keeps on the host (its PROVISION_HOME).
    type: path
    required: true
  state:
    description:
      - V(present) provisions what the other options say.
      - V(former) provisions what stood here before the last change of those options.
      - V(shipped) takes the recipe's patches back, so that every file is as the wheel ships it.
    type: str
    choices: [present, former, shipped]
    default: present
  command:
    description: The program C(provision).
    type: path
    required: true
  recipe:
    description: The name of a built-in recipe, or the path of a recipe file on the host. Not used by O(state=former).
    type: path
  recipe_text:
    description: What the recipe file holds; it is written where it differs.
    type: str
  bundle:
    description: A bundle on the host; no index is asked then.
    type: path
  venv:
    description: The environment's folder. The default is the recipe's own, under O(root).
    type: path
  options:
    description: Further options of C(provision up), such as C(--bare) or C(--index-url).
    type: list
    elements: str
    default: []
  verify:
    description:
      - V(auto) checks on the card where there is one and no former pass still holds.
      - V(required) also fails where no pass is known, as on a host without a card.
      - V(full) is V(required) with the long form, which takes minutes.
      - V(never) leaves the check out.
    type: str
    choices: [auto, required, full, never]
    default: auto
  gpu:
    description: The card to check on, where there are several.
    type: str
attributes:
  check_mode:
    support: full
    description: Through C(provision up --check).
  diff_mode:
    support: full
    description: Through C(provision patch diff), and the digests of a plan.
"""

EXAMPLES = """
- name: Provision a recipe
  provisioner.fleet.environment:
    root: /opt/provision
    command: /opt/provision/tool/current/bin/provision
    recipe: hynix-stable
    verify: required
"""

RETURN = """
actions:
  description: What was done, or would be.
  type: list
  elements: str
  returned: success
systemd:
  description: Whether systemd runs on the host.
  type: bool
  returned: outside of check mode
provision:
  description: The facts of the environment, also under C(ansible_facts).
  type: dict
  returned: when there is an environment
exit:
  description: The exit code of the run of provision that failed.
  type: int
  returned: failure
error:
  description: The JSON answer of the run of provision that failed.
  type: dict
  returned: failure
"""

ARGUMENTS = {
    "root": {"type": "path", "required": True},
    "state": {"type": "str", "choices": ["present", "former", "shipped"], "default": "present"},
    "command": {"type": "path", "required": True},
    "recipe": {"type": "path"},
    "recipe_text": {"type": "str"},
    "bundle": {"type": "path"},
    "venv": {"type": "path"},
    "options": {"type": "list", "elements": "str", "default": []},
    "verify": {"type": "str", "choices": ["auto", "required", "full", "never"], "default": "auto"},
    "gpu": {"type": "str"},
}
BOOK = "fleet.json"
PASSES = ("bit-exact", "bit-exact, health unobserved")


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec=ARGUMENTS,
        supports_check_mode=True,
        required_if=[("state", "present", ["recipe"]), ("state", "shipped", ["recipe"])],
    )
    work = {"present": provide, "former": go_back, "shipped": strip}[module.params["state"]]
    try:
        result = work(module)
    except RefusedError as refusal:
        details = {"exit": refusal.answer.code, "error": refusal.answer.values} if refusal.answer else {}
        module.fail_json(msg=str(refusal), **details)
    except OSError as error:
        module.fail_json(msg=f"nothing can be written: {error}")
    for warning in result.pop("warnings", []):
        module.warn(warning)
    facts = result.get("provision")
    module.exit_json(**result, **({"ansible_facts": {"provision": facts}} if facts else {}))


def provide(module: AnsibleModule) -> dict:
    """Provision what the parameters say."""
    wish = wish_of(module.params)
    if module.check_mode:
        return preview(module, wish)
    path = Path(module.params["root"], BOOK)
    book = open_page(read_json(path), wish)
    save_book(path, book)
    save_recipe(wish)
    result = carry_out(module, wish)
    if not book.get("proven"):
        save_book(path, dict(book, proven=True))
        tidy(path.parent, [book["current"], book["former"]])
    return result


def go_back(module: AnsibleModule) -> dict:
    """Provision what stood here before, with the tool that did it then; the present becomes the former."""
    root = Path(module.params["root"])
    book = read_json(root / BOOK)
    wish = book.get("former")
    if not wish:
        raise RefusedError("there is no former state on this host: no other run ended well before the last one")
    lost = [path for path in (wish["command"], wish["bundle"]) if path and not Path(path).exists()]
    if lost:
        raise RefusedError("what the former state needs is not on this host any more: {}".format(", ".join(lost)))
    if module.check_mode:
        return preview(module, wish, "--rebuild", "--downgrade")
    save_recipe(wish)
    result = carry_out(module, wish, "--rebuild", "--downgrade")
    point_at(root, Path(wish["command"]))
    left = book["current"] if book["proven"] else None
    save_book(root / BOOK, {"current": wish, "proven": True, "former": left})
    return dict(result, changed=True, went_back_to=describe_wish(wish), recipe=wish["recipe"])


def strip(module: AnsibleModule) -> dict:
    """Take the recipe's patches back."""
    params = module.params
    tool = Tool(params["command"], params["root"])
    status = read_status(tool, params["recipe"], params["venv"])
    changed = [
        file["path"] for patch in status["patches"] for file in patch["files"] if file["now"] != file["pristine"]
    ]
    if changed and not module.check_mode:
        tool.insist("revert", params["recipe"], "--venv", status["venv"])
        status = read_status(tool, params["recipe"], params["venv"])
    actions = [f"restore {path}" for path in changed]
    facts = {"systemd": has_systemd(), "provision": describe_environment(status)}
    return {"changed": bool(changed), "actions": actions, **facts}


def has_systemd() -> bool:
    """Whether systemd runs on this host."""
    return Path("/run/systemd/system").is_dir()


def wish_of(params: dict) -> dict:
    """All that decides about an environment, in the form that the host's book keeps."""
    recipe = params["recipe"]
    link = Path(params["root"], "tool", "current")
    command = Path(params["command"])
    if link in command.parents:
        command = link.resolve() / command.relative_to(link)
    return {
        "command": str(command),
        "recipe": recipe,
        "recipe_text": params["recipe_text"],
        "bundle": params["bundle"],
        "venv": params["venv"],
        "options": params["options"],
    }


def describe_wish(wish: dict) -> str:
    """The same for people."""
    source = f" from {wish['bundle']}" if wish["bundle"] else ""
    return "{}{} by {}".format(wish["recipe"], source, wish["command"])


def open_page(book: dict, wish: dict) -> dict:
    """The host's book for a run with ``wish``. What ended well before stays known until the next one ends well.

    Written before anything else is, so that a host on which a run failed half-way can go back, too.
    """
    if book.get("current") == wish:
        return book
    former = book["current"] if book.get("proven") else book.get("former")
    return {"current": wish, "proven": False, "former": former}


def save_book(path: Path, book: dict) -> None:
    """Write the host's book where it says something new."""
    if read_json(path) != book:
        write_json(path, book)


def save_recipe(wish: dict) -> None:
    """Write the recipe's file where it says something new."""
    path, text = Path(wish["recipe"]), wish["recipe_text"]
    if text is not None and read_text(path) != text:
        write_text(path, text)


def tidy(root: Path, wishes: list[dict | None]) -> None:
    """Remove the bundles and tools that neither the present nor the former state needs."""
    needed = [Path(wish[key]) for wish in wishes if wish for key in ("bundle", "command") if wish[key]]
    for path in [*root.glob("bundles/*"), *root.glob("tool/*")]:
        if not path.is_symlink() and not any(path in item.parents for item in needed):
            shutil.rmtree(path, ignore_errors=True)


def point_at(root: Path, command: Path) -> None:
    """Let the current tool be the one of ``command``, if it is one of those that were installed here."""
    folder = command.parent.parent
    if folder.parent == (root / "tool").resolve():
        point(root / "tool" / "current", folder.name)


def words_of(wish: dict) -> list[str]:
    """The command line of ``provision up``."""
    words = ["up", wish["recipe"], *wish["options"]]
    words += ["--from-bundle", wish["bundle"]] if wish["bundle"] else []
    words += ["--venv", wish["venv"]] if wish["venv"] else []
    return words


def preview(module: AnsibleModule, wish: dict, *more: str) -> dict:
    """What would be done, with nothing written."""
    missing = [path for path in (wish["command"], wish["bundle"]) if path and not Path(path).exists()]
    if missing:
        return {
            "changed": True,
            "actions": [f"bring {path}" for path in missing] + [f"provision {wish['recipe']}"],
        }
    tool = Tool(wish["command"], module.params["root"])
    with tempfile.TemporaryDirectory(prefix="provision-") as folder:
        if wish["recipe_text"] is not None:
            # The recipe that is asked for may not be the one that lies there.
            wish = dict(wish, recipe=str(Path(folder, Path(wish["recipe"]).name)))
            save_recipe(wish)
        plan = tool.insist(*words_of(wish), *more, "--check", allowed=(0, 1))
        status = read_status(tool, wish["recipe"], plan.values["venv"])
    result = {"changed": plan.code == 1, "actions": plan.values["actions"], "provision": describe_environment(status)}
    if module._diff:
        result["diff"] = [show_plan(status, plan.values), show_state(tool, status)]
    return dict(result, warnings=plan.warnings)


def carry_out(module: AnsibleModule, wish: dict, *more: str) -> dict:
    """Provision, and let the verdict on the card be the gate."""
    params = module.params
    tool = Tool(wish["command"], params["root"])
    words = [*words_of(wish), *more]
    words += ["--gpu", params["gpu"]] if params["gpu"] else []
    words += ["--no-verify"] if params["verify"] == "never" else []
    before = show_differences(tool, wish) if module._diff else ""
    started = time.time()
    done = tool.insist(*words)
    status = done.values["status"]
    if not status["proven"]:
        raise RefusedError("the environment is not proven: {}".format("; ".join(status["problems"])))
    if insist_on_card(tool, wish, params, done):
        status = read_status(tool, wish["recipe"], status["venv"])
    actions = done.values["actions"]
    result = {
        "changed": bool(actions),
        "actions": actions,
        "seconds": round(time.time() - started, 1),
        "provision": describe_environment(status),
        "systemd": has_systemd(),
        "warnings": done.warnings,
    }
    if module._diff:
        venv = status["venv"]
        headers = {"before_header": f"{venv} (before)", "after_header": f"{venv} (after)"}
        result["diff"] = dict(headers, before=before, after=show_differences(tool, wish))
    return result


def insist_on_card(tool: Tool, wish: dict, params: dict, done: Answer) -> bool:
    """Where a pass on the card is asked for and none is known, check; raise where that gives none. Whether it checked.

    A check within ``up`` that failed has ended the run before. What was kept counts only while a card answers.
    """
    status, wanted = done.values["status"], params["verify"]
    report = describe_environment(status)["report"]
    passed = done.values["card"] is not None and status["verification"] in PASSES
    if wanted not in ("required", "full") or (passed and (wanted == "required" or report.get("form") == "full")):
        return False
    words = ["verify", wish["recipe"], "--venv", status["venv"]]
    words += ["--gpu", params["gpu"]] if params["gpu"] else []
    words += ["--full"] if wanted == "full" else []
    tool.insist(*words)
    return True


def show_differences(tool: Tool, wish: dict) -> str:
    """How the files differ from those that the wheel ships, as a patch; nothing where there is no environment."""
    status = read_status(tool, wish["recipe"], wish["venv"])
    return show_state(tool, status)["prepared"]


def show_state(tool: Tool, status: dict) -> dict:
    """The same as a part of Ansible's diff."""
    if status["state"] != "installed":
        return {"prepared": ""}
    words = ["--venv", status["venv"], "--package", status["distribution"]]
    return {"prepared": tool.insist("patch", "diff", *words).values["diff"]}


def show_plan(status: dict, plan: dict) -> dict:
    """Digests of the patched files, now and after the plan."""
    now = {file["path"]: file["now"] for patch in status["patches"] for file in patch["files"]}
    final = dict(now, **plan["final"])
    return {
        "before_header": status["venv"],
        "after_header": f"{status['venv']} (planned)",
        "before": "".join("{} {}\n".format(now.get(path) or "absent", path) for path in sorted(final)),
        "after": "".join("{} {}\n".format(final[path] or "absent", path) for path in sorted(final)),
    }


if __name__ == "__main__":
    main()
