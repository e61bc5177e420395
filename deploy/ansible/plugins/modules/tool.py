"""Module ``provisioner.fleet.tool``: the program ``provision`` in a virtual environment of its own."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.provisioner.fleet.plugins.module_utils.answers import (
    RefusedError,
    point,
    read_json,
    write_json,
)

DOCUMENTATION = """
module: tool
short_description: Install provision in a virtual environment of its own
version_added: 0.1.0
author:
  - the provisioner authors
description:
  - Each source has a folder of its own under C(ROOT/tool), made beside the others and named by what it was made from;
    the link C(ROOT/tool/current) is put over only when the new one runs. The former one stays for a rollback.
  - Uses the bundle's own installer, or uv where the host has it, else the C(venv) module and pip.
options:
  root:
    description: The folder of everything that provision keeps on the host.
    type: path
    required: true
  wheel:
    description: A wheel of provision on the host. What it needs comes from the host's package index.
    type: path
  requirement:
    description: What to install from the host's package index, such as C(provisioner==0.1.0).
    type: str
  bundle:
    description: A bundle on the host that has the tool in it; no index is asked.
    type: path
  python:
    description: The Python that runs the tool. The default is the newest supported one on the host's PATH.
    type: str
attributes:
  check_mode:
    support: full
    description: Says whether it would install, and fails where the host has no Python for it.
"""

EXAMPLES = """
- name: Install provision from a wheel that lies on the host
  provisioner.fleet.tool:
    root: /opt/provision
    wheel: /opt/provision/shipped/provisioner-0.1.0-py3-none-any.whl
"""

RETURN = """
command:
  description: The program.
  type: str
  returned: success
version:
  description: What it says of its version.
  type: str
  returned: when it is installed
"""

ARGUMENTS = {
    "root": {"type": "path", "required": True},
    "wheel": {"type": "path"},
    "requirement": {"type": "str"},
    "bundle": {"type": "path"},
    "python": {"type": "str"},
}
SUPPORTED = ("3.13", "3.12", "3.11")
SECONDS = 1800
MADE = "made.json"


def main() -> None:
    """Entry point of the module."""
    ways = [("wheel", "requirement", "bundle")]
    module = AnsibleModule(
        argument_spec=ARGUMENTS, supports_check_mode=True, required_one_of=ways, mutually_exclusive=ways
    )
    tools = Path(module.params["root"], "tool")
    try:
        changed, version = settle(module, tools)
    except RefusedError as refusal:
        module.fail_json(msg=str(refusal))
    except OSError as error:
        module.fail_json(msg=f"the tool cannot be installed: {error}")
    module.exit_json(changed=changed, command=str(tools / "current" / "bin" / "provision"), version=version)


def settle(module: AnsibleModule, tools: Path) -> tuple[bool, str | None]:
    """Install what is wanted unless it stands there; whether that was, or would be, a change, and the version."""
    params = module.params
    shipped = params["wheel"] or params["bundle"]
    if module.check_mode and shipped and not Path(shipped).exists():
        # Which Python a bundle is for stands in the bundle, which is not here yet.
        choose_python(params["python"], None)
        return True, None
    source, minor = identify(params)
    folder, link = tools / name_of(source), tools / "current"
    made = read_json(folder / MADE)
    if made and link.resolve() == folder.resolve():
        return False, made["version"]
    python = None if made else choose_python(params["python"], minor)
    if module.check_mode:
        return True, None
    if not made:
        shutil.rmtree(folder, ignore_errors=True)
        install(params, folder, python)
        made = {"source": source, "version": run([folder / "bin" / "provision", "--version"]).split()[-1]}
        write_json(folder / MADE, made)
    point(link, folder.name)
    return True, made["version"]


def identify(params: dict) -> tuple[str, str | None]:
    """What tells one source from another, and the minor version of Python that it is bound to."""
    if params["requirement"]:
        return params["requirement"], None
    if params["wheel"]:
        return f"wheel {hashlib.sha256(Path(params['wheel']).read_bytes()).hexdigest()}", None
    with tarfile.open(params["bundle"], "r:") as archive:
        # Every wheel of the tool stands there with its digest.
        for member in archive:
            if member.name == "tool/requirements.txt":
                pins = archive.extractfile(member).read()
                return f"bundle {hashlib.sha256(pins).hexdigest()}", read_minor(params["bundle"])
    raise RefusedError(f"{params['bundle']} has no tool in it; make it without --without-tool")


def read_minor(bundle: str) -> str:
    """The minor version of Python that a bundle's wheels are for."""
    with tarfile.open(bundle, "r:") as archive:
        return json.loads(archive.extractfile(archive.next()).read())["python"]


def name_of(source: str) -> str:
    """A folder's name for a source."""
    kind = re.sub(r"[^A-Za-z0-9.]+", "-", source)[:24].strip("-.")
    return f"{kind}-{hashlib.sha256(source.encode()).hexdigest()[:12]}"


def choose_python(given: str | None, minor: str | None) -> str:
    """A Python of the host that runs the tool."""
    names = [given] if given else [f"python{version}" for version in ([minor] if minor else SUPPORTED)] + ["python3"]
    for name in names:
        path = shutil.which(name)
        found = ask_version(path) if path else None
        if found in ([minor] if minor else SUPPORTED):
            return path
    wanted = minor or " or ".join(SUPPORTED)
    raise RefusedError(
        "this host has no Python {} under these names: {}; install one, or name where it is: provision_tool_python "
        "(the option python of this module)".format(wanted, ", ".join(names))
    )


def ask_version(python: str) -> str | None:
    """The minor version; None for a name behind which no Python starts, as a version manager's unselected ones."""
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        return run([python, "-c", program], seconds=30).strip()
    except RefusedError:
        return None


def install(params: dict, folder: Path, python: str) -> None:
    """Make the virtual environment and install into it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if params["bundle"]:
        install_bundled(Path(params["bundle"]), folder, python)
        return
    uv = shutil.which("uv")
    if uv:
        run([uv, "venv", "--quiet", "--python", python, folder])
        pip = [uv, "pip", "install", "--quiet", "--python", folder]
    else:
        run([python, "-m", "venv", folder])
        pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, params["wheel"] or params["requirement"]])


def install_bundled(bundle: Path, folder: Path, python: str) -> None:
    """Install by the program that lies in the bundle; it needs neither pip nor a network."""
    with tempfile.TemporaryDirectory(prefix="provision-tool-") as name:
        program = Path(name, "install.py")
        with tarfile.open(bundle, "r:") as archive:
            program.write_bytes(archive.extractfile("tool/install.py").read())
        run([python, program, bundle, folder])


def run(words: list[str | Path], seconds: int = SECONDS) -> str:
    """What a program says; RefusedError where it does not end well."""
    line = [str(word) for word in words]
    try:
        done = subprocess.run(
            line,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RefusedError(f"{line[0]} does not run: {error}") from error
    if done.returncode:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise RefusedError(f"{' '.join(line[:3])} ended with {done.returncode}: {last}")
    return done.stdout


if __name__ == "__main__":
    main()
