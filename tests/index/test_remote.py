"""Wheels read over HTTP, from a server in each of its moods."""

import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from provisioner.digests import digest_of
from provisioner.errors import HashMismatchError, InvalidWheelError, NetworkError, NoSuchBuildError, ProvisionError
from provisioner.index.cache import WheelCache
from provisioner.index.lazy import RemoteWheel
from provisioner.index.settings import IndexSettings
from provisioner.index.transport import Transport
from tests.support.index_server import IndexServer, Mood
from tests.support.wheels import wheel_bytes

COMMIT = "1fe3a1571ac67581478a11743e55a306de1d136f"
VERSION = "0.26.1rc1.dev1024+g1fe3a1571"
NAME = f"vllm-{VERSION}-cp38-abi3-manylinux_2_28_x86_64.whl"
NOISE = random.Random(5)
FILES = {
    "vllm/_A.so": NOISE.randbytes(400_000),
    "vllm/one.py": b"one = 1\n",
    "vllm/two.py": b"two = 2\n",
    "vllm/_B.so": NOISE.randbytes(900_000),
    "vllm/three.py": b"three = 3\n" * 50,
    "vllm/_C.so": NOISE.randbytes(900_000),
}
WHEEL = wheel_bytes(FILES, version=VERSION)
PATH = f"{COMMIT}/{NAME}"


@pytest.fixture(autouse=True)
def published(index: IndexServer) -> None:
    index.add_build(COMMIT, {NAME: WHEEL}, nightly=True)


@pytest.fixture
def url(index: IndexServer) -> str:
    return f"{index.url}/{PATH}".replace("+", "%2B")


def quoted(path: str) -> str:
    return path.replace("+", "%2B")


def test_one_request_for_the_head_and_one_for_each_place(index: IndexServer, url: str, transport: Transport) -> None:
    with RemoteWheel(url, transport) as wheel:
        assert wheel.filename == NAME
        assert f"Version: {VERSION}" in wheel.metadata_text()
        assert len(wheel.record()) == len(FILES) + 3
        assert len(index.requests) == 1
        paths = ("vllm/one.py", "vllm/two.py", "vllm/three.py")
        assert dict(wheel.read_many(paths)) == {path: FILES[path] for path in paths}
    assert [request.method for request in index.requests] == ["GET"] * 3, "one.py and two.py are neighbours"
    assert transport.traffic.requests == 3
    assert transport.traffic.received < 800_000


def test_a_directory_before_the_first_tail_costs_one_request_more(index: IndexServer, transport: Transport) -> None:
    many = {f"vllm/{number:05}/{'x' * 60}.py": str(number).encode() for number in range(9000)}
    index.files["many.whl"] = wheel_bytes(many, version="1.0")
    index.files[f"big/{NAME}"] = wheel_bytes(many, version=VERSION)
    with RemoteWheel(f"{index.url}/big/{quoted(NAME)}", transport) as wheel:
        assert len(wheel.names()) == 9003
        assert wheel.digests([next(iter(many))]) == {next(iter(many)): digest_of(b"0")}
    assert len(index.requests) == 2


def test_a_known_size_asks_for_both_ends(index: IndexServer, url: str, transport: Transport) -> None:
    index.set_mood(quoted(PATH), Mood(refuse_suffixes=True))
    with RemoteWheel(url, transport, size=len(WHEEL)) as wheel:
        assert wheel.read("vllm/three.py") == FILES["vllm/three.py"]
    assert all(not (request.range or "").startswith("bytes=-") for request in index.requests)


def test_a_server_without_suffixes_is_asked_for_the_size(index: IndexServer, url: str, transport: Transport) -> None:
    index.set_mood(quoted(PATH), Mood(refuse_suffixes=True))
    with RemoteWheel(url, transport) as wheel:
        assert wheel.read("vllm/three.py") == FILES["vllm/three.py"]
    assert [request.range for request in index.requests[:2]] == [f"bytes=-{768 << 10}", "bytes=0-0"]


@pytest.mark.parametrize("cached", [False, True])
def test_without_ranges_the_wheel_is_downloaded_once(
    index: IndexServer, url: str, transport: Transport, tmp_path: Path, cached: bool
) -> None:
    index.set_mood(quoted(PATH), Mood(ignore_ranges=True, refuse_head=True))
    seen: list[tuple[int, int | None]] = []
    cache = WheelCache(tmp_path) if cached else None
    with RemoteWheel(url, transport, cache=cache, progress=lambda have, total: seen.append((have, total))) as wheel:
        assert wheel.read("vllm/one.py") == FILES["vllm/one.py"]
        assert dict(wheel.read_many(FILES)) == FILES
    assert seen[-1] == (len(WHEEL), len(WHEEL))
    assert [have for have, _ in seen] == sorted({have for have, _ in seen})
    assert len(index.requests) == 2, "one that shows that there are no ranges, one download"
    index.forget_requests()
    if cached:
        before = transport.traffic.received
        with RemoteWheel(url, transport, cache=cache) as again:
            assert dict(again.read_many(FILES)) == FILES
        assert transport.traffic.received - before == 0


def test_a_wheel_that_is_listed_but_not_there(index: IndexServer, transport: Transport) -> None:
    for status in (403, 404, 410):
        index.set_mood("gone.whl", Mood(status=status))
        with RemoteWheel(f"{index.url}/gone.whl", transport) as wheel, pytest.raises(NoSuchBuildError) as caught:
            wheel.names()
        assert caught.value.what == f"the server does not have this wheel, although the index lists it ({status})"
        assert caught.value.exit_code == 4
        assert "run the command again" in caught.value.hints[0]


BAD_MOODS: list[tuple[Mood, type[ProvisionError], str]] = [
    (Mood(close_after=100), NetworkError, "the answer ended"),
    (Mood(reset_after=100), NetworkError, "the connection was reset"),
    (Mood(reset_after=0), NetworkError, "the connection was reset"),
    (Mood(pause=1.0), NetworkError, "no answer within 0.3 s"),
    (Mood(drip=0.01), NetworkError, "the answer was not complete after 0.6 s"),
    (Mood(claim_length=len(WHEEL) + 10), NetworkError, "the answer ended"),
    (Mood(claim_length=100), NetworkError, "the server answered with another part of the file than asked"),
    (Mood(shift_range=-7), NetworkError, "the server answered with another part of the file than asked"),
    (Mood(status=500), NetworkError, "the server answered 500"),
    (Mood(status=503), NetworkError, "the server answered 503"),
    (Mood(status=418), NetworkError, "the server answered 418"),
    (Mood(status=503, headers={"Retry-After": "7200"}), NetworkError, "the server answered 503"),
    (Mood(cut_file_at=500_000), InvalidWheelError, "this is not a whole wheel: it has no readable zip directory"),
]


@pytest.mark.parametrize(("mood", "kind", "message"), BAD_MOODS, ids=[repr(mood)[5:40] for mood, _, _ in BAD_MOODS])
def test_bad_moods(
    index: IndexServer, url: str, hasty: Transport, mood: Mood, kind: type[ProvisionError], message: str
) -> None:
    index.set_mood(quoted(PATH), mood)
    with RemoteWheel(url, hasty) as wheel, pytest.raises(kind) as caught:
        wheel.names()
    assert caught.value.what.startswith(message), caught.value.what
    assert NAME.replace("+", "%2B") in (caught.value.where or "")
    assert caught.value.hints or "418" in message or "another part" in message


@pytest.mark.parametrize(
    "mood",
    [
        Mood(status=503, headers={"Retry-After": "0"}, times=2),
        Mood(status=429, times=1),
        Mood(close_after=10, times=2),
        Mood(reset_after=10, times=1),
    ],
    ids=lambda mood: repr(mood)[5:40],
)
def test_what_passes_is_tried_again(index: IndexServer, url: str, transport: Transport, mood: Mood) -> None:
    index.set_mood(quoted(PATH), mood)
    with RemoteWheel(url, transport) as wheel:
        assert wheel.read("vllm/one.py") == b"one = 1\n"
    assert len(index.requests) == 2 + (mood.times or 0)


def test_a_member_broken_on_its_way_is_found(index: IndexServer, url: str, transport: Transport) -> None:
    broken = bytearray(WHEEL)
    broken[WHEEL.index(b"vllm/one.py") + len("vllm/one.py") + 3] ^= 0xFF
    index.files[PATH] = bytes(broken)
    with RemoteWheel(url, transport) as wheel, pytest.raises(HashMismatchError, match=r"vllm/one\.py arrived broken"):
        wheel.read("vllm/one.py")


def test_a_file_that_changes_while_it_is_read_is_not_mixed(index: IndexServer, url: str, transport: Transport) -> None:
    with RemoteWheel(url, transport) as wheel:
        wheel.names()
        index.files[PATH] = wheel_bytes(FILES | {"vllm/one.py": b"one = 2\n"}, version=VERSION)
        with pytest.raises(NetworkError, match="the file changed on the server"):
            wheel.read("vllm/one.py")


def test_a_wheel_of_another_size_than_the_index_tells(url: str, transport: Transport) -> None:
    with RemoteWheel(url, transport, size=len(WHEEL) - 1) as wheel, pytest.raises(ProvisionError) as caught:
        wheel.names()
    assert caught.value.exit_code == 4


def test_a_second_check_asks_nothing_where_the_digest_is_known(
    index: IndexServer, url: str, transport: Transport, tmp_path: Path
) -> None:
    cache = WheelCache(tmp_path)
    for _ in range(2):
        with RemoteWheel(url, transport, sha256=digest_of(WHEEL), cache=cache) as wheel:
            assert wheel.read("vllm/three.py") == FILES["vllm/three.py"]
            assert wheel.names()[0] == "vllm/_A.so"
    assert len(index.requests) == 2


def test_a_later_check_asks_once_where_only_the_url_is_known(
    index: IndexServer, url: str, transport: Transport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provisioner.index.lazy._FRESH", -1.0)
    cache = WheelCache(tmp_path)
    with RemoteWheel(url, transport, cache=cache) as wheel:
        wheel.read_many(("vllm/one.py", "vllm/three.py"))
    index.forget_requests()
    with RemoteWheel(url, transport, cache=cache) as wheel:
        assert wheel.read("vllm/three.py") == FILES["vllm/three.py"]
    assert [request.range for request in index.requests] == ["bytes=-1024"]

    changed = FILES | {"vllm/three.py": b"three = 4\n" * 50}
    index.files[PATH] = wheel_bytes(changed, version=VERSION)
    with RemoteWheel(url, transport, cache=cache) as wheel:
        assert wheel.read("vllm/three.py") == changed["vllm/three.py"], "the same size, another file"


def test_a_broken_cache_entry_is_read_anew(index: IndexServer, url: str, transport: Transport, tmp_path: Path) -> None:
    cache = WheelCache(tmp_path)
    with RemoteWheel(url, transport, cache=cache) as wheel:
        wheel.read("vllm/three.py")
    for path in (path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".trim"):
        path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    with RemoteWheel(url, transport, cache=cache) as wheel:
        assert wheel.read("vllm/three.py") == FILES["vllm/three.py"]
    assert len(index.requests) == 4


def test_many_threads_share_one_cache(index: IndexServer, url: str, settings: IndexSettings, tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def read() -> None:
        try:
            with Transport(settings) as own, RemoteWheel(url, own, cache=WheelCache(tmp_path, limit=10_000)) as wheel:
                assert dict(wheel.read_many(FILES)) == FILES
        except BaseException as error:  # noqa: BLE001 (whatever it is, the test must show it)
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_credentials_are_sent_and_not_shown(index: IndexServer, url: str, settings: IndexSettings) -> None:
    secret = url.replace("http://", "http://user:hun%40ter2@")
    index.set_mood(quoted(PATH), Mood(times=1), Mood(status=401))
    with Transport(replace(settings, retries=0)) as transport, RemoteWheel(secret, transport) as wheel:
        wheel.names()
        with pytest.raises(ProvisionError) as caught:
            wheel.read("vllm/one.py")
    assert index.requests[0].headers["authorization"] == "Basic dXNlcjpodW5AdGVyMg=="
    shown = repr((str(caught.value), caught.value.hints, caught.value.where))
    assert "hun" not in shown
    assert "***@127.0.0.1" in shown


READER = """
import sys
from pathlib import Path
from provisioner.index.cache import WheelCache
from provisioner.index.lazy import RemoteWheel
from provisioner.index.settings import IndexSettings
from provisioner.index.transport import Transport
url, folder, *paths = sys.argv[1:]
with Transport(IndexSettings(timeout=5.0)) as transport:
    with RemoteWheel(url, transport, cache=WheelCache(Path(folder), limit=20_000)) as wheel:
        sys.stdout.buffer.write(b"".join(wheel.read_many(paths).values()))
"""


@pytest.mark.parametrize("mood", [Mood(), Mood(ignore_ranges=True)], ids=["ranges", "none"])
def test_processes_share_one_cache(index: IndexServer, url: str, tmp_path: Path, mood: Mood) -> None:
    index.set_mood(quoted(PATH), mood)
    paths = ("vllm/one.py", "vllm/three.py")
    command = (sys.executable, "-c", READER, url, str(tmp_path), *paths)
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in running]
    assert outputs == [b"".join(FILES[path] for path in paths)] * 3


def test_a_cached_head_of_another_form_is_read_again(url: str, transport: Transport, tmp_path: Path) -> None:
    cache = WheelCache(tmp_path)
    key = digest_of(WHEEL)
    with RemoteWheel(url, transport, sha256=key, cache=cache) as wheel:
        names = wheel.names()
    (entry,) = (tmp_path / "heads").iterdir()
    cache.store("heads", entry.name, {"lengths": [1]}, b"x")
    with RemoteWheel(url, transport, sha256=key, cache=cache) as again:
        assert again.names() == names
