"""The collection, driven by real Ansible over real SSH: three hosts, provisioned, provisioned again, and in trouble."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

pytest.importorskip("ansible", reason="ansible-core is not installed (extra: fleet)")
pytest.importorskip("asyncssh", reason="asyncssh is not installed (extra: fleet)")

from provisioner.wheels.settings import read_settings
from tests.deploy.fleet import PATCH, Fleet, FrontIndex, can_unshare, stock

pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh (Debian package openssh-client)"),
]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Three hosts: one takes the tool's wheel from the controller, one an index, one a bundle and has no network."""
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
                made.give_uv()
                made.install_collection()
                bundle = made.make_bundle("small.tar")
                alone = ("unshare", "--map-root-user", "--net") if can_unshare("--net") else ()
                made.make_host("alpha", provision_tool_wheel=str(made.wheel))
                made.make_host("beta", provision_tool_requirement="provisioner==0.1.0")
                made.make_host("gamma", wrapper=alone, provision_bundle=str(bundle))
                yield made
            finally:
                made.stop()


def test_a_first_run_provisions_and_a_second_changes_nothing(fleet: Fleet) -> None:
    first = fleet.play("provisioner.fleet.provision", provision_serial="100%")
    assert first.code == 0, first.output
    for host in fleet.hosts.values():
        assert [patch["id"] for patch in host.receipt["patches"]] == [PATCH]
        assert first.recap[host.name][0] >= 2
    second = fleet.play("provisioner.fleet.provision", provision_serial="100%")
    assert second.code == 0, second.output
    assert second.recap == dict.fromkeys(fleet.hosts, (0, 0, 0))
