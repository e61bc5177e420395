import random
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import pytest

from provisioner.digests import digest_of
from provisioner.errors import HashMismatchError, NetworkError
from provisioner.index.settings import IndexSettings
from provisioner.index.transport import Transport
from provisioner.wheels.urls import redact, strip_credentials
from tests.support.index_server import IndexServer, Mood

DATA = random.Random(1).randbytes(500_000)


@pytest.fixture(autouse=True)
def published(index: IndexServer) -> None:
    index.files["file.bin"] = DATA


@pytest.fixture
def url(index: IndexServer) -> str:
    return f"{index.url}/file.bin"


def test_a_download_is_hashed_on_the_way(url: str, transport: Transport, tmp_path: Path) -> None:
    done = transport.download(url, tmp_path / "deep" / "file", expected=digest_of(DATA), size=len(DATA))
    assert (done.sha256, done.size, done.path.read_bytes()) == (digest_of(DATA), len(DATA), DATA)
    assert [path.name for path in done.path.parent.iterdir()] == ["file"], "nothing is left beside it"


@pytest.mark.parametrize("mood", [Mood(close_after=200_000, times=1), Mood(reset_after=200_000, times=1)])
def test_a_broken_download_goes_on_where_it_broke(
    index: IndexServer, url: str, transport: Transport, tmp_path: Path, mood: Mood
) -> None:
    index.set_mood("file.bin", mood)
    done = transport.download(url, tmp_path / "file")
    assert done.path.read_bytes() == DATA
    first, second = index.requests
    assert first.range is None
    begin = int((second.range or "").removeprefix("bytes=").removesuffix("-"))
    assert 0 < begin <= 200_000
    assert second.headers["if-range"].startswith('"')
    assert transport.traffic.received <= len(DATA)


def test_the_next_run_goes_on_too(index: IndexServer, url: str, settings: IndexSettings, tmp_path: Path) -> None:
    index.set_mood("file.bin", Mood(close_after=200_000, times=1), Mood(close_after=0, times=3))
    with Transport(settings) as first, pytest.raises(NetworkError, match="ended"):
        first.download(url, tmp_path / "file")
    with Transport(settings) as second:
        assert second.download(url, tmp_path / "file").sha256 == digest_of(DATA)
        assert second.traffic.received < len(DATA)
    assert not (tmp_path / "file.part").exists()


def test_as_long_as_a_download_gets_further_it_goes_on(
    index: IndexServer, url: str, settings: IndexSettings, tmp_path: Path
) -> None:
    index.set_mood("file.bin", Mood(close_after=70_000))
    with Transport(replace(settings, retries=1)) as transport:
        assert transport.download(url, tmp_path / "file").sha256 == digest_of(DATA)
    assert len(index.requests) > 6


def test_a_file_that_changed_since_starts_anew(
    index: IndexServer, url: str, settings: IndexSettings, tmp_path: Path
) -> None:
    index.set_mood("file.bin", Mood(close_after=200_000, times=1), Mood(close_after=0, times=3))
    with Transport(settings) as first, pytest.raises(NetworkError):
        first.download(url, tmp_path / "file")
    index.files["file.bin"] = DATA[::-1]
    with Transport(settings) as second:
        assert second.download(url, tmp_path / "file").path.read_bytes() == DATA[::-1]


def test_without_a_validator_nothing_is_gone_on_with(
    index: IndexServer, url: str, transport: Transport, tmp_path: Path
) -> None:
    index.set_mood("file.bin", Mood(close_after=200_000, no_validators=True, times=1), Mood(no_validators=True))
    assert transport.download(url, tmp_path / "file").sha256 == digest_of(DATA)
    assert [request.range for request in index.requests] == [None, None]


def test_a_server_that_goes_on_elsewhere_is_not_believed(
    index: IndexServer, url: str, transport: Transport, tmp_path: Path
) -> None:
    index.set_mood("file.bin", Mood(close_after=200_000, times=1), Mood(shift_range=-5, times=1))
    assert transport.download(url, tmp_path / "file").path.read_bytes() == DATA


def test_other_bytes_than_promised_are_dropped(url: str, transport: Transport, tmp_path: Path) -> None:
    with pytest.raises(HashMismatchError) as caught:
        transport.download(url, tmp_path / "file", expected="0" * 64)
    assert caught.value.found == f"sha256 {digest_of(DATA)}"
    assert caught.value.exit_code == 4
    assert not list(tmp_path.iterdir())


def test_a_download_shorter_than_the_index_says_is_no_success(
    index: IndexServer, url: str, transport: Transport, tmp_path: Path
) -> None:
    index.set_mood("file.bin", Mood(claim_length=600_000))
    with pytest.raises(NetworkError, match="ended"):
        transport.download(url, tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_retry_after_is_kept_in_seconds_and_as_a_date(index: IndexServer, url: str, settings: IndexSettings) -> None:
    slept: list[float] = []
    index.set_mood(
        "file.bin",
        Mood(status=429, headers={"Retry-After": "7"}, times=1),
        Mood(status=503, headers={"Retry-After": formatdate(0, usegmt=True)}, times=1),
    )
    with Transport(settings, sleep=slept.append) as transport:
        transport.fetch(url, accept=frozenset({200}))
    assert slept == [7.0, 0.0]


def test_a_wait_that_is_too_long_is_told_instead(index: IndexServer, url: str, settings: IndexSettings) -> None:
    index.set_mood("file.bin", Mood(status=503, headers={"Retry-After": "7200"}))
    with (
        Transport(settings, sleep=lambda _: pytest.fail("must not wait")) as transport,
        pytest.raises(NetworkError, match="the server asks to wait 7200 s") as caught,
    ):
        transport.fetch(url, accept=frozenset({200}))
    assert caught.value.hints == ("run the command again in 7200 s",)


def test_waits_grow(index: IndexServer, url: str, settings: IndexSettings) -> None:
    slept: list[float] = []
    index.set_mood("file.bin", Mood(status=500))
    with (
        Transport(replace(settings, retries=3, backoff=1.0), sleep=slept.append) as transport,
        pytest.raises(NetworkError, match="the server answered 500"),
    ):
        transport.fetch(url, accept=frozenset({200}))
    assert [round(pause / 2**number) for number, pause in enumerate(slept)] == [1, 1, 1]
    assert len(index.requests) == 4


def test_a_circle_of_redirects_ends(index: IndexServer, url: str, transport: Transport) -> None:
    index.set_mood("file.bin", Mood(status=302, headers={"Location": "/file.bin"}))
    with pytest.raises(NetworkError, match="redirects in a circle"):
        transport.fetch(url, accept=frozenset({200}))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("http://no-such-host.invalid/x", "the host name could not be resolved"),
        ("http://127.0.0.1:1/x", "the connection was refused"),
        ("ftp://127.0.0.1/x", "this is not a URL that can be asked"),
    ],
)
def test_hosts_that_do_not_answer(transport: Transport, bad: str, message: str) -> None:
    with pytest.raises(NetworkError) as caught:
        transport.fetch(bad, accept=frozenset({200}))
    assert (caught.value.what, caught.value.where) == (message, bad)


def test_a_proxy_is_used(index: IndexServer, settings: IndexSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", index.url)
    monkeypatch.setenv("no_proxy", "")
    with Transport(replace(settings, retries=0)) as transport, pytest.raises(NetworkError, match="the server answered"):
        transport.fetch("http://wheels.example/x", accept=frozenset({200}))
    assert index.requests[0].path.endswith("x")


def test_urls_are_shown_without_secrets() -> None:
    assert redact("https://u:p@host:8/a%2Bb?token=1#f") == "https://***@host:8/a%2Bb?***"
    assert redact("https://host/a") == "https://host/a"
    assert strip_credentials("https://u:p@host/a?b=1") == "https://host/a?b=1"


def test_a_download_that_only_drips_is_given_up(
    index: IndexServer, url: str, settings: IndexSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provisioner.index.transport._SLOW_FOR", 0.1)
    monkeypatch.setattr("provisioner.index.transport._SLOWEST", 10_000_000)
    index.set_mood("file.bin", Mood(drip=0.004))
    with (
        Transport(replace(settings, retries=0)) as transport,
        pytest.raises(NetworkError, match="the download slowed down to less than 10000000 bytes a second"),
    ):
        transport.download(url, tmp_path / "file")


def test_a_small_answer_that_only_drips_is_given_up(index: IndexServer, url: str, settings: IndexSettings) -> None:
    index.files["small.bin"] = DATA[:20_000]
    index.set_mood("small.bin", Mood(drip=0.1))
    with (
        Transport(replace(settings, retries=0, deadline=0.3)) as transport,
        pytest.raises(NetworkError, match=r"the answer was not complete after 0\.3 s"),
    ):
        transport.fetch(f"{index.url}/small.bin", accept=frozenset({200}))


def test_a_server_that_stops_in_the_middle(index: IndexServer, url: str, hasty: Transport) -> None:
    index.set_mood("file.bin", Mood(drip=1.0))
    with pytest.raises(NetworkError, match="the server stopped answering"):
        hasty.fetch(url, accept=frozenset({200}))


def test_connections_are_kept(index: IndexServer, url: str, transport: Transport) -> None:
    for start in range(5):
        assert transport.fetch_range(url, start, start + 10).body == DATA[start : start + 10]
    assert len({request.port for request in index.requests}) == 1
