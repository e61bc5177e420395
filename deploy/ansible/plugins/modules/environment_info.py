"""Module ``provisioner.fleet.environment_info``: what is known of an environment."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.provisioner.fleet.plugins.module_utils.answers import (
    RefusedError,
    Tool,
    describe_environment,
    read_status,
)

DOCUMENTATION = """
module: environment_info
short_description: Read card, driver, build, patch verdicts and the last verification of an environment
version_added: 0.1.0
author:
  - the provisioner authors
description:
  - Reads C(provision status) and the report of the last check on a card. Nothing is written and no card is asked.
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
attributes:
  check_mode:
    support: full
    description: It only reads.
"""

EXAMPLES = """
- name: Read what is known of an environment
  provisioner.fleet.environment_info:
    root: /opt/provision
    command: /opt/provision/tool/current/bin/provision
    recipe: hynix-stable
"""

RETURN = """
provision:
  description: The facts of the environment, also under C(ansible_facts).
  type: dict
  returned: always
"""

ARGUMENTS = {
    "root": {"type": "path", "required": True},
    "command": {"type": "path", "required": True},
    "recipe": {"type": "path", "required": True},
    "venv": {"type": "path"},
}


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    params = module.params
    if not Path(params["command"]).exists():
        facts = {"recipe": params["recipe"], "state": "absent", "problems": ["provision is not installed"]}
    else:
        try:
            status = read_status(Tool(params["command"], params["root"]), params["recipe"], params["venv"])
        except RefusedError as refusal:
            module.fail_json(msg=str(refusal))
        facts = describe_environment(status)
    module.exit_json(changed=False, provision=facts, ansible_facts={"provision": facts})


if __name__ == "__main__":
    main()
