"""The API key: private, made once, never shown."""

import os
import stat

import pytest

from provisioner.errors import EnvironmentConflictError
from provisioner.serve.key import find_key, obtain_key, read_key_file


def test_a_made_key_is_private_and_made_once(tmp_path):
    old = os.umask(0)
    try:
        first = obtain_key(tmp_path / "state" / "api_key")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "state" / "api_key").stat().st_mode) == 0o600
    assert len(first.secret) >= 32
    assert obtain_key(tmp_path / "state" / "api_key") == first


def test_the_secret_is_in_no_printed_form(tmp_path):
    found = obtain_key(tmp_path / "k")
    assert found.secret not in repr(found) + str(found)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_key_that_others_can_read_is_refused(tmp_path, mode):
    (tmp_path / "k").write_text("secret")
    (tmp_path / "k").chmod(mode)
    with pytest.raises(EnvironmentConflictError, match="open to other users") as caught:
        read_key_file(tmp_path / "k")
    assert caught.value.hints == (f"chmod 600 {tmp_path / 'k'}",)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"\xff\xfe"])
def test_a_file_without_one_word_is_refused(tmp_path, content):
    (tmp_path / "k").write_bytes(content)
    (tmp_path / "k").chmod(0o600)
    with pytest.raises(EnvironmentConflictError):
        read_key_file(tmp_path / "k")


def test_a_link_is_not_followed_when_a_key_is_made(tmp_path):
    (tmp_path / "k").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EnvironmentConflictError):
        obtain_key(tmp_path / "k")
    assert not (tmp_path / "elsewhere").exists()


def test_a_named_file_wins_over_the_environment_and_that_over_a_fallback(tmp_path):
    for name in ("named", "fallback"):
        (tmp_path / name).write_text(name)
        (tmp_path / name).chmod(0o600)
    environ = {"VLLM_API_KEY": "from-environment"}
    fallbacks = (tmp_path / "missing", tmp_path / "fallback")
    named = find_key(environ, file=tmp_path / "named", fallbacks=fallbacks)
    inherited = find_key(environ, file=None, fallbacks=fallbacks)
    fallen = find_key({"VLLM_API_KEY": " "}, file=None, fallbacks=fallbacks)
    assert [found.secret for found in (named, inherited, fallen) if found] == ["named", "from-environment", "fallback"]
    assert find_key({}, file=None) is None
