import asyncio

import pytest

from provisioner.booster.proxy import BoosterSettings
from provisioner.booster.service import CannotListenError, parse_upstream, serve
from provisioner.errors import UsageError


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("http://127.0.0.1:8012", "http://127.0.0.1:8012"),
        ("http://127.0.0.1:8012/v1/", "http://127.0.0.1:8012"),
        ("https://host/base/", "https://host/base"),
        ("http://[::1]:8012", "http://[::1]:8012"),
    ],
)
def test_an_upstream_is_an_address(given: str, taken: str) -> None:
    assert parse_upstream(given, host="127.0.0.1", port=8013) == taken


@pytest.mark.parametrize(
    "given",
    [
        "127.0.0.1:8012",
        "http://",
        "http://h:port",
        "ftp://h",
        "http://u:secret@h",
        "http://h/?a=b",
        "http://127.0.0.1:8013",
        "http://localhost:8013/v1",
    ],
)
def test_what_is_none_or_the_booster_itself_is_refused(given: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_upstream(given, host="127.0.0.1", port=8013)
    assert "secret" not in str(caught.value)


def test_a_taken_port_is_said_so() -> None:
    async def main() -> None:
        settings = BoosterSettings(upstream="http://127.0.0.1:1")
        async with serve(settings, port=0) as listening, serve(settings, port=listening.port):
            pass

    with pytest.raises(CannotListenError) as caught:
        asyncio.run(main())
    assert caught.value.exit_code == 5
    assert "--port" in caught.value.hints[0]
