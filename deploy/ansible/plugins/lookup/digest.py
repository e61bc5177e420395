"""Lookup ``provisioner.fleet.digest``: what tells one shipped file from another."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase

DOCUMENTATION = """
name: digest
short_description: The digest of a file on the controller, or of a bundle's list of members
version_added: 0.1.0
author:
  - the provisioner authors
description:
  - The SHA-256 of a file on the controller. A file that C(provision bundle) wrote begins with a list of its members and
    their digests; the digest of that list stands for the whole file, whose gigabytes are not read.
options:
  _terms:
    description: Paths on the controller.
    required: true
"""

EXAMPLES = """
- name: Say what is shipped
  ansible.builtin.debug:
    msg: "{{ lookup('provisioner.fleet.digest', 'hynix-stable.tar') }}"
"""

RETURN = """
_raw:
  description: One digest for each path, in hex.
  type: list
  elements: str
"""


class LookupModule(LookupBase):
    """The plugin."""

    def run(self, terms, variables=None, **_):
        """One digest for each path, which is looked for as ``copy`` looks for its source."""
        return [_digest(Path(self.find_file_in_search_path(variables, "files", term) or term)) for term in terms]


def _digest(path):
    try:
        data = _read_manifest(path) if tarfile.is_tarfile(path) else path.read_bytes()
    except (OSError, tarfile.TarError) as error:
        raise AnsibleError(f"{path} cannot be shipped: {error}") from error
    return hashlib.sha256(data).hexdigest()


def _read_manifest(path):
    with tarfile.open(path, "r:") as archive:
        first = archive.next()
        if first is None or first.name != "bundle.json":
            raise AnsibleError(f"{path} is no bundle; provision bundle RECIPE -o FILE.tar makes one")
        return archive.extractfile(first).read()
