"""The collection, driven by real Ansible over real SSH: three hosts, provisioned, provisioned again, and in trouble."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

pytest.importorskip("ansible", reason="ansible-core is not installed (extra: fleet)")
pytest.importorskip("asyncssh", reason="asyncssh is not installed (extra: fleet)")

from provisioner.index.settings import read_settings
from tests.deploy.fleet import PATCH, Fleet, FrontIndex, Host, Run, can_unshare, make_wedged_card, stock
from tests.support.wheels import wheel_bytes, write_wheel

pytestmark = [
    pytest.mark.background,
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh (Debian package openssh-client)"),
]


@pytest.fixture(scope="module")
def first() -> Iterator[tuple[Fleet, Run]]:
    """Three hosts, provisioned once: one has the tool's wheel from the controller, one takes it from an index, and one
    has no network and takes all from a bundle.
    """
    try:
        distribution("provisioner")
    except PackageNotFoundError:
        pytest.skip("the tool is not installed here, so its own wheel cannot be made")
    # A short path: the name of a socket for a shared connection has little room.
    with tempfile.TemporaryDirectory(prefix="fleet-") as name:
        settings = read_settings(dict(os.environ), Path.home(), cache=Path(name, "cache"))
        with FrontIndex(settings) as index:
            made = Fleet(folder=Path(name), index=index, wheel=stock(index, settings, Path(name, "wheels")))
            try:
                made.install_collection()
                bundle = made.make_bundle("small.tar")
                alone = ("unshare", "--map-root-user", "--net") if can_unshare("--net") else ()
                made.make_host("alpha", provision_tool_wheel=str(made.wheel)).give_uv()
                made.make_host("beta", provision_tool_requirement="provisioner==0.1.0").give_uv()
                made.make_host("gamma", wrapper=alone, provision_bundle=str(bundle))
                yield made, made.play("provisioner.fleet.provision", provision_serial="100%")
            finally:
                made.stop()


@pytest.fixture
def fleet(first: tuple[Fleet, Run]) -> Fleet:
    """The three hosts, up and as the first run left them, whatever another test did to them."""
    made, _ = first
    for host in made.hosts.values():
        if host.server is None:
            host.start(made.authorized)
    if not all(is_provisioned(host) for host in made.hosts.values()):
        again = made.play("provisioner.fleet.provision", provision_serial="100%")
        assert again.code == 0, again.output
    return made


def test_a_first_run_provisions_and_a_second_changes_nothing(first: tuple[Fleet, Run], fleet: Fleet) -> None:
    _, made = first
    assert made.code == 0, made.output
    for host in fleet.hosts.values():
        assert [patch["id"] for patch in host.receipt["patches"]] == [PATCH]
        assert made.recap[host.name][0] >= 2
    second = fleet.play("provisioner.fleet.provision", provision_serial="100%")
    assert second.code == 0, second.output
    assert second.recap == dict.fromkeys(fleet.hosts, (0, 0, 0))


def test_pip_installs_the_tool_where_there_is_no_uv_and_units_are_written_once(
    fleet: Fleet, own_home: Path, tmp_path: Path
) -> None:
    program = "def run():\n    print('provision 0.1.0')\n"
    files = {"stub.py": program.encode(), "provisioner-0.1.0.dist-info/entry_points.txt": ENTRY.encode()}
    data = wheel_bytes(files, version="0.1.0", project="provisioner")
    wheel = write_wheel(tmp_path, data, "0.1.0", project="provisioner")
    command = Path(sys.executable).with_name("provision")
    (tmp_path / "local.yml").write_text(LOCAL.format(root=tmp_path / "root", wheel=wheel, command=command))
    run = fleet.run("playbook", str(tmp_path / "local.yml"), "--inventory", "localhost,", "--connection", "local")
    assert run.recap == {"localhost": (2, 0, 0)}, run.output
    assert (tmp_path / "root" / "tool" / "current" / "bin" / "provision").is_file()
    assert f"ExecStart={command}" in (own_home / ".config/systemd/user/provision-hynix-stable.service").read_text()


def test_check_says_what_would_change_and_writes_nothing(fleet: Fleet) -> None:
    alpha = fleet.hosts["alpha"]
    provision(alpha, "revert", str(alpha.root / "recipes" / "small.toml"))
    before = patched_file(alpha).read_bytes()
    run = fleet.play("provisioner.fleet.provision", "--check", "--diff", hosts="alpha,gamma")
    assert run.code == 0, run.output
    assert run.recap == {"alpha": (1, 0, 0), "gamma": (0, 0, 0)}
    digest = next(
        file["after"] for file in fleet.hosts["beta"].receipt["patches"][0]["files"] if file["path"] == PATCHED
    )
    assert f"+{digest} {PATCHED}" in run.output
    assert patched_file(alpha).read_bytes() == before
    done = fleet.play("provisioner.fleet.provision", "--diff", hosts="alpha")
    assert done.recap == {"alpha": (1, 0, 0)}, done.output
    assert f"+++ b/{PATCHED}" in done.output
    assert patched_file(alpha).read_bytes() != before


def test_each_host_in_trouble_fails_alone_and_says_why(fleet: Fleet, tmp_path: Path) -> None:
    beta = fleet.hosts["beta"]
    foreign = patched_file(beta)
    ours = foreign.read_bytes()
    replace_file(foreign, ours + b"# somebody's own line\n")
    tool = str(fleet.hosts["alpha"].tool)
    wanted = {"beta": PATCHED}
    if shutil.which("cc"):
        card = make_wedged_card(tmp_path / "card")
        fleet.make_host("wedged", provision_tool_command=tool, provision_environment=card, provision_verify="required")
        wanted["wedged"] = "CUDA_ERROR_UNKNOWN (999); a warm reboot of the host is the only way back"
    if can_unshare("--mount"):
        (fleet.folder / "full").mkdir()
        fleet.make_host(
            "small", before=f"mount -t tmpfs -o size=8m tmpfs {fleet.folder}/full", provision_tool_command=tool
        )
        fleet.hosts["small"].variables["provision_root"] = f"{fleet.folder}/full/provision"
        wanted["small"] = "too little disk space"
    try:
        run = fleet.play("provisioner.fleet.provision", provision_serial="100%")
    finally:
        replace_file(foreign, ours)
        for name in wanted.keys() - {"beta"}:
            fleet.hosts.pop(name).stop()
    assert run.code == 2, run.output
    assert {name for name, (_, _, failed) in run.recap.items() if failed} == set(wanted)
    for name, words in wanted.items():
        assert words in run.failure(name)
    assert "foreign" in run.failure("beta")
    assert run.recap["alpha"] == run.recap["gamma"] == (0, 0, 0)


def test_a_host_that_goes_away_in_the_middle_ends_the_roll_out_and_the_next_run_completes(fleet: Fleet) -> None:
    alpha = fleet.hosts["alpha"]
    shutil.rmtree(alpha.venv)
    playing = fleet.start("provisioner.fleet.provision", hosts="alpha,beta")
    wait_for(alpha.venv / ".provision" / "environment.json")
    alpha.stop()
    output, _ = playing.communicate(timeout=120)
    assert playing.returncode == 4, output
    assert Run(code=4, output=output).recap == {"alpha": (0, 1, 0)}, "one at a time: beta's turn did not come"
    assert not (alpha.venv / ".provision" / "receipt.json").exists()
    alpha.start(fleet.authorized)
    done = fleet.play("provisioner.fleet.provision", hosts="alpha,beta")
    assert done.recap == {"alpha": (1, 0, 0), "beta": (0, 0, 0)}, done.output
    assert [patch["id"] for patch in alpha.receipt["patches"]] == [PATCH]


def test_another_build_and_back_again_without_a_network(fleet: Fleet) -> None:
    gamma, alpha = fleet.hosts["gamma"], fleet.hosts["alpha"]
    fleet.write_recipe("0.27.2")
    former = dict(gamma.variables)
    gamma.variables |= {
        "provision_bundle": str(fleet.make_bundle("other.tar", "--without-tool")),
        "provision_tool_command": str(gamma.tool),
        "provision_options": ["--bare", "--rebuild"],
    }
    done = fleet.play("provisioner.fleet.provision", hosts="gamma")
    assert done.recap == {"gamma": (2, 0, 0)}, done.output
    assert gamma.receipt["build"]["version"] == "0.27.2"
    fleet.write_recipe("0.27.1")
    gamma.variables = former
    back = fleet.play("provisioner.fleet.rollback", hosts="gamma")
    assert back.recap == {"gamma": (1, 0, 0)}, back.output
    assert gamma.receipt["build"]["version"] == "0.27.1"
    assert [patch["id"] for patch in gamma.receipt["patches"]] == [PATCH]
    shipped = fleet.play("provisioner.fleet.rollback", hosts="alpha", provision_rollback_to="shipped")
    assert shipped.recap == {"alpha": (1, 0, 0)}, shipped.output
    assert not alpha.receipt["patches"]


def test_the_table_shows_every_host(fleet: Fleet) -> None:
    provision(fleet.hosts["alpha"], "revert", str(fleet.hosts["alpha"].root / "recipes" / "small.toml"))
    fleet.hosts["beta"].stop()
    run = fleet.play("provisioner.fleet.fleet")
    rows = {line.split()[0].strip('"'): line for line in run.output.splitlines() if "  " in line and '"' in line}
    assert "vllm 0.27.1 bare" in rows["gamma"]
    assert f"{PATCH}: applied" in rows["gamma"]
    assert "not on a card" in rows["gamma"]
    assert rows["alpha"].split()[1] == "no"
    assert f"{PATCH}: applies" in rows["alpha"]
    assert "unreachable" in rows["beta"]


LOCAL = """
- hosts: all
  gather_facts: false
  tasks:
    - &tool
      provisioner.fleet.tool: {{root: {root}, wheel: {wheel}}}
    - *tool
    - &units
      provisioner.fleet.units: {{root: {root}, command: {command}, recipe: hynix-stable}}
    - *units
"""
ENTRY = "[console_scripts]\nprovision = stub:run\n"
PATCHED = "vllm/model_executor/layers/mamba/ops/causal_conv1d.py"


def is_provisioned(host: Host) -> bool:
    if not (host.venv / ".provision" / "receipt.json").exists():
        return False
    applied = host.receipt["patches"]
    return host.receipt["build"]["version"] == "0.27.1" and [patch["id"] for patch in applied] == [PATCH]


def patched_file(host: Host) -> Path:
    return host.site_packages / PATCHED


def replace_file(path: Path, data: bytes) -> None:
    """As an editor that writes a new file does: hard links stay as they were."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    new.replace(path)


def provision(host: Host, *words: str) -> None:
    """Somebody at the host itself."""
    line = [str(host.tool), *words]
    environment = {**host.environment, "PROVISION_HOME": str(host.root)}
    subprocess.run(line, env=environment, capture_output=True, check=True, timeout=60)


def wait_for(path: Path, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.005)
