import pytest

from provisioner.errors import UsageError
from provisioner.probes.client import Endpoint


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8012", "http://127.0.0.1:8012/", "http://127.0.0.1:8012/v1", "http://127.0.0.1:8012/v1/"]
)
def test_an_address_is_taken_with_and_without_v1(url: str) -> None:
    assert Endpoint.parse(url).base == "http://127.0.0.1:8012"


@pytest.mark.parametrize("url", ["127.0.0.1:8012", "ftp://host", "http://", "http://user:secret@host", ""])
def test_what_is_no_address_is_refused_without_telling_a_password(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        Endpoint.parse(url)
    assert "secret" not in str(caught.value)


def test_a_key_is_not_shown() -> None:
    assert "sk-1" not in repr(Endpoint.parse("http://host", api_key="sk-1"))
