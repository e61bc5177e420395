"""Module ``provisioner.fleet.units``: the systemd units of a recipe."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.provisioner.fleet.plugins.module_utils.answers import RefusedError, Tool, read_text, write_text

DOCUMENTATION = """
module: units
short_description: Write the systemd units of a recipe
version_added: 0.1.0
author:
  - the provisioner authors
description:
  - Writes what C(provision units RECIPE) prints, where it differs. Nothing is started.
options:
  root:
    description: The folder of everything that provision keeps on the host (its PROVISION_HOME).
    type: path
    required: true
  command:
    description: The program C(provision).
    type: path
    required: true
  recipe:
    description: The name of a built-in recipe, or the path of a recipe file on the host.
    type: path
    required: true
  venv:
    description: The environment's folder. The default is the recipe's own, under O(root).
    type: path
  scope:
    description:
      - The manager that the units are for.
    type: str
    choices: [user, system]
    default: user
  options:
    description: Further options of C(provision units), such as C(--model) and a folder, or C(--user) and a name.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
    description: Says what would be written.
  diff_mode:
    support: full
    description: Shows the texts.
"""

EXAMPLES = """
- name: Write the units of a recipe for the system's manager
  provisioner.fleet.units:
    root: /opt/provision
    command: /opt/provision/tool/current/bin/provision
    recipe: hynix-stable
    scope: system
    options: [--user, vllm, --model, /srv/models/Qwen3.8-27B-Int8]
"""

RETURN = """
folder:
  description: Where the units lie.
  type: str
  returned: success
units:
  description: Their names, that of the server first.
  type: list
  elements: str
  returned: success
"""

ARGUMENTS = {
    "root": {"type": "path", "required": True},
    "command": {"type": "path", "required": True},
    "recipe": {"type": "path", "required": True},
    "venv": {"type": "path"},
    "scope": {"type": "str", "choices": ["user", "system"], "default": "user"},
    "options": {"type": "list", "elements": "str", "default": []},
}


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    params = module.params
    if module.check_mode and not (Path(params["command"]).exists() and Path(params["recipe"]).exists()):
        module.exit_json(changed=True, units=[])
    try:
        result = settle(module, params["scope"])
    except RefusedError as refusal:
        module.fail_json(msg=str(refusal))
    except OSError as error:
        module.fail_json(msg=f"the units cannot be written: {error}")
    module.exit_json(**result)


def settle(module: AnsibleModule, scope: str) -> dict:
    """Write the units that differ."""
    params = module.params
    words = ["units", params["recipe"], *(["--system"] if scope == "system" else []), *params["options"]]
    words += ["--venv", params["venv"]] if params["venv"] else []
    said = Tool(params["command"], params["root"]).insist(*words).values
    wanted = {Path(said["folder"], unit["name"]): unit["text"] for unit in said["units"]}
    found = {path: read_text(path) for path in wanted}
    differing = [path for path in wanted if found[path] != wanted[path]]
    if not module.check_mode:
        for path in differing:
            write_text(path, wanted[path])
    result = {"changed": bool(differing), "folder": said["folder"], "units": [unit["name"] for unit in said["units"]]}
    if module._diff:
        result["diff"] = [
            {"before_header": str(path), "after_header": str(path), "before": found[path] or "", "after": wanted[path]}
            for path in differing
        ]
    return result


if __name__ == "__main__":
    main()
