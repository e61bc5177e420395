"""Filter ``provisioner.fleet.fleet_table``: what the hosts said, as a table."""

from __future__ import annotations

DOCUMENTATION = """
name: fleet_table
short_description: Print build, patches and verification of every host as a table
version_added: 0.1.0
author:
  - the provisioner authors
description:
  - Takes C(hostvars), in which each host has registered the answer of M(provisioner.fleet.environment_info) as
    C(provision_asked).
options:
  _input:
    description: C(hostvars).
    type: dict
    required: true
  hosts:
    description: The hosts to show, in this order.
    type: list
    elements: str
    required: true
"""

EXAMPLES = """
- name: Print the table
  ansible.builtin.debug:
    msg: "{{ hostvars | provisioner.fleet.fleet_table(ansible_play_hosts_all) }}"
"""

RETURN = """
_value:
  description: The lines of the table, the heads first.
  type: list
  elements: str
"""

HEADS = ("HOST", "PROVEN", "BUILD", "PATCHES", "VERIFIED", "CARD", "DRIVER")


class FilterModule:
    """The plugin."""

    def filters(self):
        return {"fleet_table": draw_table}


def draw_table(hostvars, hosts):
    """The lines, with columns as wide as their widest cell."""
    rows = [HEADS, *(_row(host, hostvars[host].get("provision_asked") or {}) for host in hosts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _row(host, asked):
    facts = asked.get("provision")
    if not facts:
        why = "unreachable" if asked.get("unreachable") else str(asked.get("msg") or "not asked").splitlines()[0]
        return (host, "?", why, "", "", "", "")
    if facts["state"] != "installed":
        return (host, "no", facts["problems"][0], "", "", "", "")
    build, report, card = facts["build"], facts["report"], facts["card"]
    patches = ", ".join("{}: {}".format(patch["id"], patch["verdict"]) for patch in facts["patches"])
    at = " ({}, {})".format(report["form"], report["created"][:10]) if report else ""
    return (
        host,
        "yes" if facts["proven"] else "no",
        "{} {}{}".format(build["distribution"], build["version"], " bare" if facts["bare"] else ""),
        patches or "none",
        (facts["verification"] or "not on a card") + at,
        card.get("name", ""),
        card.get("driver", ""),
    )
