"""A fleet on this machine: hosts on loopback addresses, an index, a recipe, a bundle, and Ansible to drive them."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh
from uv import find_uv_bin

from provisioner.bundles.self_wheel import read_own_tool
from provisioner.index.settings import IndexSettings
from provisioner.index.source import candidates, open_wheel, parse_spec
from provisioner.resources import patches_folder
from provisioner.wheels.names import Target, choose
from tests.support.index_server import IndexServer, Mood
from tests.support.wheels import select_files, wheel_bytes, wheel_filename

ROOT = Path(__file__).parents[2]
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
BASE_PYTHON = Path(sys.base_prefix, "bin", f"python{PYTHON}")
PATCH = "pr50021-gdn-spec-bounds"
COMMIT = "6e448d0ea" + "0" * 31
RECIPE = """
schema = 1
title = "Small"
[python]
preferred = "{python}"
supported = "=={python}.*"
[build]
release = "{version}"
[[patch]]
id = "{patch}"
policy = "required"
why = "the fleet's hosts have it"
[expect]
"""
RECAP = re.compile(r"^(\S+) +: ok=(\d+) +changed=(\d+) +unreachable=(\d+) +failed=(\d+)", re.MULTILINE)


class FrontIndex(IndexServer):
    """Has the small wheels itself, and sends whoever asks for another package to the user's own index."""

    def __init__(self, settings: IndexSettings) -> None:
        super().__init__()
        self._real = settings.pypi_url

    def take_mood(self, path: str) -> Mood:
        what, _, project = path.strip("/").partition("/")
        if what == "simple" and project and f"simple/{project}/index.html" not in self.files:
            return Mood(status=302, headers={"Location": f"{self._real}{project}/"})
        return super().take_mood(path)


def recipe_text(version: str) -> str:
    return RECIPE.format(python=PYTHON, version=version, patch=PATCH)


def stock(index: FrontIndex, settings: IndexSettings, folder: Path) -> Path:
    """Publish two small builds of vllm, with the real files that the patch touches, and the tool; its wheel's path."""
    real = open_wheel(choose(candidates(parse_spec("pypi:0.27.1"), settings), Target()).chosen, settings)
    text = (patches_folder() / PATCH / "0.27.patch").read_text()
    touched = re.findall(r"^\+\+\+ b/(\S+)", text, re.MULTILINE)
    wheels = {}
    for version in ("0.27.1", "0.27.2"):
        files = select_files(real, touched, version=version, commit=COMMIT) | {"vllm/other.py": b"OTHER = 1\n"}
        wheels[wheel_filename(version)] = wheel_bytes(files, version=version)
    index.add_package("vllm", wheels)
    own = read_own_tool(PYTHON)
    index.add_package("provisioner", {own.filename: own.wheel})
    folder.mkdir()
    (folder / own.filename).write_bytes(own.wheel)
    return folder / own.filename


@dataclass(kw_only=True)
class Host:
    """One host. ``variables`` are its own in the inventory; ``wrapper`` comes before each of its commands."""

    name: str
    address: str
    home: Path
    port: int
    key: Path
    environment: dict[str, str]
    variables: dict[str, Any] = field(default_factory=dict)
    wrapper: list[str] = field(default_factory=list)
    server: subprocess.Popen[str] | None = None

    @property
    def root(self) -> Path:
        return self.home / "provision"

    @property
    def tool(self) -> Path:
        return self.root / "tool" / "current" / "bin" / "provision"

    @property
    def venv(self) -> Path:
        return self.root / "venvs" / "small"

    @property
    def site_packages(self) -> Path:
        return self.venv / "lib" / f"python{PYTHON}" / "site-packages"

    @property
    def receipt(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.venv / ".provision" / "receipt.json").read_text())
        return found

    def give_uv(self) -> None:
        """Put uv on the PATH."""
        (self.home / "bin").mkdir()
        (self.home / "bin" / "uv").symlink_to(find_uv_bin())

    def start(self, authorized: Path, *, before: str = "") -> None:
        """Start the server, after the shell command ``before`` in a mount namespace of its own, if one is given."""
        wish = {"address": self.address, "port": self.port, "home": str(self.home), "key": str(self.key)}
        wish |= {"authorized": str(authorized), "environment": self.environment, "wrapper": self.wrapper}
        words = [sys.executable, str(Path(__file__).with_name("ssh_host.py")), json.dumps(wish)]
        if before:
            words = ["unshare", "--map-root-user", "--mount", "sh", "-ec", f'{before}; exec "$@"', "sh", *words]
        self.server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.server.stdout is not None
        assert self.server.stdout.readline() == "ready\n"

    def stop(self) -> None:
        """Go away as with the power: the server and all that it runs, at once."""
        if self.server is not None:
            os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait()
            assert self.server.stdout is not None
            self.server.stdout.close()
            self.server = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a playbook printed, and how it ended; ``recap`` is (changed, unreachable, failed) of each host."""

    code: int
    output: str

    @property
    def recap(self) -> dict[str, tuple[int, int, int]]:
        rows = RECAP.findall(self.output)
        return {name: (int(changed), int(gone), int(failed)) for name, _, changed, gone, failed in rows}

    def failure(self, host: str) -> str:
        """The message with which a host failed."""
        found = re.search(rf"^fatal: \[{host}\]: \w+! => (.*?)\n(?=\n|\w)", self.output, re.MULTILINE | re.DOTALL)
        assert found, self.output
        return found[1]


@dataclass(kw_only=True)
class Fleet:
    """Hosts and a controller in one folder."""

    folder: Path
    index: FrontIndex
    wheel: Path
    hosts: dict[str, Host] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(str(self.folder / "key"))
        (self.folder / "key").chmod(0o600)
        key.write_public_key(str(self.authorized))
        self.write_recipe("0.27.1")

    @property
    def authorized(self) -> Path:
        return self.folder / "key.pub"

    @property
    def recipe(self) -> Path:
        return self.folder / "small.toml"

    def write_recipe(self, version: str) -> None:
        self.recipe.write_text(recipe_text(version))

    def make_host(self, name: str, *, before: str = "", wrapper: tuple[str, ...] = (), **variables: Any) -> Host:
        """Add a host and start it, after the shell command ``before`` in a mount namespace of its own."""
        address = f"127.0.0.{len(self.hosts) + 2}"
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        home = self.folder / name
        home.mkdir()
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(str(self.folder / f"{name}.key"))
        public = key.export_public_key().decode().strip()
        with (self.folder / "known_hosts").open("a") as stream:
            stream.write(f"[{address}]:{port} {public}\n")
        host = Host(
            name=name,
            address=address,
            home=home,
            port=port,
            key=self.folder / f"{name}.key",
            environment=self.host_environment(home),
            variables=variables,
            wrapper=list(wrapper),
        )
        self.hosts[name] = host
        host.start(self.authorized, before=before)
        return host

    def host_environment(self, home: Path) -> dict[str, str]:
        """What a host's commands find: nothing of this process but the way to the network, and the small index."""
        passed = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "http_proxy", "https_proxy", "no_proxy", "HTTPS_PROXY")
        environment = {name: os.environ[name] for name in passed if name in os.environ}
        return environment | {
            "HOME": str(home),
            "PATH": f"{home}/bin:{BASE_PYTHON.parent}:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "UV_CACHE_DIR": str(self.folder / "uv-cache"),
            "UV_DEFAULT_INDEX": self.index.simple_url,
            "PIP_INDEX_URL": self.index.simple_url,
            "PIP_CACHE_DIR": str(self.folder / "pip-cache"),
        }

    def provision(self, *words: str) -> None:
        """The tool on the controller."""
        # A home of its own: a lock of the recipe that an earlier bundle left there would be gone by.
        home = tempfile.mkdtemp(dir=self.folder)
        environment = {**os.environ, "PROVISION_HOME": home, "UV_NO_CONFIG": "1"}
        environment |= {"UV_DEFAULT_INDEX": self.index.simple_url, "UV_CACHE_DIR": str(self.folder / "uv-cache")}
        line = [sys.executable, "-m", "provisioner", *words]
        done = subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr

    def make_bundle(self, name: str, *options: str) -> Path:
        self.provision(
            "bundle", str(self.recipe), "--bare", "--python", PYTHON, "-o", str(self.folder / name), *options
        )
        return self.folder / name

    def play(self, playbook: str, *words: str, hosts: str = "all", **variables: Any) -> Run:
        """Run a playbook of the collection to its end."""
        process = self.start(playbook, *words, hosts=hosts, **variables)
        output, _ = process.communicate(timeout=240)
        return Run(code=process.returncode, output=output)

    def run(self, command: str, *words: str) -> Run:
        """Run another command of Ansible on a host whose PATH has no uv."""
        environment = self.controller_environment() | {"PATH": f"{BASE_PYTHON.parent}:/usr/bin:/bin"}
        line = [sys.executable, "-m", "ansible", command, *words, "-e", f"ansible_python_interpreter={BASE_PYTHON}"]
        done = subprocess.run(
            line, env=environment, cwd=self.folder, capture_output=True, text=True, timeout=120, check=False
        )
        return Run(code=done.returncode, output=done.stdout + done.stderr)

    def start(self, playbook: str, *words: str, hosts: str = "all", **variables: Any) -> subprocess.Popen[str]:
        """Start a playbook."""
        everyone: Mapping[str, Any] = {
            "ansible_user": "fleet",
            "ansible_python_interpreter": str(BASE_PYTHON),
            "ansible_ssh_private_key_file": str(self.folder / "key"),
            "ansible_ssh_common_args": f"-F /dev/null -o UserKnownHostsFile={self.folder}/known_hosts"
            " -o IdentitiesOnly=yes -o ConnectTimeout=5",
            "provision_recipe": str(self.recipe),
            "provision_options": ["--bare"],
        }
        place = {
            name: {
                "ansible_host": host.address,
                "ansible_port": host.port,
                # Ansible asks the system, not the server, where a user's home is.
                "ansible_remote_tmp": str(host.home / "tmp"),
                "provision_root": str(host.root),
                **host.variables,
            }
            for name, host in self.hosts.items()
        }
        (self.folder / "inventory.json").write_text(json.dumps({"all": {"hosts": place, "vars": everyone}}))
        line = [sys.executable, "-m", "ansible", "playbook", "-i", self.folder / "inventory.json", playbook, *words]
        line += ["--limit", hosts, "-e", json.dumps(variables)]
        return subprocess.Popen(
            [str(word) for word in line],
            env=self.controller_environment(),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def controller_environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
        return kept | {
            "ANSIBLE_HOME": str(self.folder / "ansible"),
            "ANSIBLE_LOCAL_TEMP": str(self.folder / "ansible" / "tmp"),
            "ANSIBLE_COLLECTIONS_PATH": str(self.folder / "collections"),
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self.folder / "cp"),
            "ANSIBLE_SSH_ARGS": "-o ControlMaster=auto -o ControlPersist=10s",
            "ANSIBLE_PIPELINING": "true",
            "ANSIBLE_SSH_TRANSFER_METHOD": "piped",
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_LOCALHOST_WARNING": "false",
            "LANG": "C.UTF-8",
            "LC_ALL": "C.UTF-8",
        }

    def install_collection(self) -> None:
        """As a user installs it from a checkout."""
        line = [sys.executable, "-m", "ansible", "galaxy", "collection", "install", str(ROOT / "deploy" / "ansible")]
        line += ["-p", str(self.folder / "collections")]
        environment = self.controller_environment()
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def stop(self) -> None:
        for host in self.hosts.values():
            host.stop()


WEDGED_DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetByPCIBusId(int *device, const char *pci) { *device = 0; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return 999; }
int cuGetErrorName(int code, const char **name) { *name = "CUDA_ERROR_UNKNOWN"; return 0; }
"""


def make_wedged_card(folder: Path) -> dict[str, str]:
    """A card that NVML lists and CUDA makes no context on; the variables with which a host has it."""
    folder.mkdir()
    nvml = (ROOT / "tests" / "support" / "fake_nvml.py").read_text()
    (folder / "pynvml.py").write_text(
        f"{nvml}\n\nRIG = FakeNvml()\n\n\ndef __getattr__(name):\n    return getattr(RIG, name)\n"
    )
    (folder / "cuda.c").write_text(WEDGED_DRIVER)
    line = ["cc", "-shared", "-fPIC", str(folder / "cuda.c"), "-o", str(folder / "libcuda.so.1")]
    subprocess.run(line, check=True, timeout=60)
    return {"PYTHONPATH": str(folder), "LD_LIBRARY_PATH": str(folder)}


def can_unshare(*options: str) -> bool:
    """Whether this machine lets us make namespaces."""
    line = ["unshare", "--map-root-user", *options, "true"]
    return (
        shutil.which("unshare") is not None and subprocess.run(line, capture_output=True, check=False).returncode == 0
    )
