"""A taken port is named with its owner."""

import os
import socket
import subprocess
import sys

import pytest

from provisioner.serve.ports import find_port_owner, judge_port, parse_socket_table, read_command

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F4C 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1 0000000000000000 100
   1: 0100007F:1F4D 0100007F:A000 01 00000000:00000000 00:00000000 00000000  1000        0 4712 1 0000000000000000 100
   2: garbage
"""


@pytest.fixture
def listener():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_only_listening_sockets_are_read():
    (found,) = parse_socket_table(TABLE)
    assert (found.port, found.uid, found.inode) == (8012, 1000, 4711)


def test_a_free_port_is_no_finding():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    assert judge_port("127.0.0.1", port) == ()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost", ""])
def test_the_owner_of_a_taken_port_is_named(listener, host):
    (finding,) = judge_port(host, listener)
    assert finding.what == f"port {listener} is taken"
    assert f"by process {os.getpid()} of user" in finding.evidence[0]
    assert finding.next[0] == f"kill {os.getpid()}"


def test_the_owners_key_is_not_shown():
    program = "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); "
    program += "print(s.getsockname()[1], flush=True); time.sleep(30)"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "serve", "--api-key", "s3cret"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        owner = find_port_owner(port)
        assert owner is not None
        assert owner.pid == process.pid
        assert owner.command.endswith("serve --api-key <redacted>")
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_an_owner_that_cannot_be_seen_is_named_by_user(tmp_path, listener):
    (tmp_path / "net").mkdir()
    row = f"   0: 0100007F:{listener:04X} 00000000:0000 0A 0:0 0:0 0  0  0 99 1"
    (tmp_path / "net" / "tcp").write_text(f"header\n{row}\n")
    owner = find_port_owner(listener, proc=tmp_path)
    assert owner is not None
    assert (owner.pid, owner.user) == (None, "root")
    (finding,) = judge_port("127.0.0.1", listener, proc=tmp_path)
    assert finding.evidence == ("by a process of user root",)
    assert judge_port("127.0.0.1", listener, proc=tmp_path / "nothing")[0].next[0].startswith("ss -ltnp")


def test_an_address_that_is_not_this_machines():
    (finding,) = judge_port("192.0.2.1", 8012)
    assert "cannot listen on 192.0.2.1" in finding.what


def test_a_process_that_is_gone_has_no_command():
    assert read_command(2**22 + 1) == ""
