"""Builds found on the indexes, from a server in each of its moods."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from provisioner.digests import digest_of
from provisioner.errors import (
    CannotObtainError,
    HashMismatchError,
    NetworkError,
    NoCompatibleWheelError,
    NoSuchBuildError,
    ProvisionError,
    UsageError,
)
from provisioner.index.settings import IndexSettings
from provisioner.index.source import (
    CommitFileSpec,
    CommitSpec,
    LocalSpec,
    NightlySpec,
    ReleaseSpec,
    Spec,
    candidates,
    fetch_wheel,
    find_builds,
    mirror_url,
    open_wheel,
    parse_spec,
    public_url,
)
from provisioner.index.transport import Transport
from provisioner.wheels.names import Target, choose, choose_each
from tests.support.index_server import IndexServer, Mood
from tests.support.wheels import wheel_bytes, write_wheel

COMMIT = "1fe3a1571ac67581478a11743e55a306de1d136f"
OTHER = "2ae239fc0250cd29d37f35c6a31e9eae749ef1c8"
X86, ARM = "cp38-abi3-manylinux_2_28_x86_64", "cp38-abi3-manylinux_2_28_aarch64"
HOST = Target(python=(3, 12))


def build(commit: str, number: int, *files: tuple[str | None, str]) -> dict[str, bytes]:
    """Wheels of a commit, one for each variant and platform tag."""
    wheels = {}
    for variant, tag in files:
        version = f"0.26.1rc1.dev{number}+g{commit[:9]}" + (f".{variant}" if variant else "")
        wheels[f"vllm-{version}-{tag}.whl"] = wheel_bytes({"vllm/a.py": b"a = 1\n"}, version=version, tag=tag)
    return wheels


@pytest.fixture(autouse=True)
def published(index: IndexServer) -> None:
    index.add_build(OTHER, build(OTHER, 1000, (None, X86)))
    index.add_build(COMMIT, build(COMMIT, 1024, (None, X86), (None, ARM), ("cpu", X86), ("cu129", ARM)), nightly=True)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("nightly", NightlySpec()),
        ("pypi", ReleaseSpec()),
        (f"commit:{COMMIT.upper()}", CommitSpec(commit=COMMIT)),
        ("commit:1fe3a1571", CommitSpec(commit="1fe3a1571")),
        ("commits:a/b.txt", CommitFileSpec(path=Path("a/b.txt"))),
        ("x/vllm-1-py3-none-any.whl", LocalSpec(path=Path("x/vllm-1-py3-none-any.whl"))),
    ],
)
def test_specs(text: str, spec: Spec) -> None:
    assert parse_spec(text) == spec


def test_a_release_spec_is_a_version_or_a_range() -> None:
    for text, wanted in (("pypi:0.27.1", "==0.27.1"), ("pypi:>=0.26,<0.28", "<0.28,>=0.26")):
        spec = parse_spec(text)
        assert isinstance(spec, ReleaseSpec)
        assert str(spec.specifier) == wanted


@pytest.mark.parametrize(
    "text", ["", "nightlies", "pypi:", "pypi:x", "commit:", "commit:xyz", "commit:12345", "commits:", "nosuchfolder"]
)
def test_what_is_no_spec(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_spec(text)
    assert caught.value.exit_code == 2
    assert caught.value.where == (text or "an empty text")


def test_nightly_tells_its_commit_by_its_links(settings: IndexSettings, index: IndexServer) -> None:
    found = candidates(NightlySpec(), settings)
    chosen = choose(found, HOST).chosen
    assert chosen.commit == COMMIT
    assert chosen.url == f"{index.url}/{COMMIT}/vllm-0.26.1rc1.dev1024%2Bg1fe3a1571-{X86}.whl"
    with open_wheel(chosen, settings) as wheel:  # type: ignore[attr-defined]
        assert wheel.read("vllm/a.py") == b"a = 1\n"
    assert len(index.requests) == 2 + 1


@pytest.mark.parametrize("commit", [COMMIT, COMMIT[:9]])
def test_a_commit_has_its_own_folder(settings: IndexSettings, index: IndexServer, commit: str) -> None:
    chosen = choose(candidates(CommitSpec(commit=commit), settings), HOST).chosen
    assert (chosen.commit, str(chosen.version)) == (COMMIT, "0.26.1rc1.dev1024+g1fe3a1571")
    assert sum("github" in request.path for request in index.requests) == (len(commit) < 40)


def test_a_recipe_completes_its_own_commit_without_asking(settings: IndexSettings, index: IndexServer) -> None:
    assert candidates(CommitSpec(commit=COMMIT[:9]), settings, known_commits=(OTHER, COMMIT))[0].commit == COMMIT
    assert not any("github" in request.path for request in index.requests)


def test_a_variant_has_its_own_folder(settings: IndexSettings) -> None:
    chosen = choose(candidates(CommitSpec(commit=COMMIT), settings, variant="cpu"), HOST, variant="cpu").chosen
    assert str(chosen.version) == "0.26.1rc1.dev1024+g1fe3a1571.cpu"


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("cu129", "no wheel fits: only manylinux_2_28_aarch64"),
        ("cu131", "no wheel fits: variant cu131 wanted, has: default, cpu, cu129"),
    ],
)
def test_what_a_build_has_instead_is_told(settings: IndexSettings, variant: str, message: str) -> None:
    with pytest.raises(NoCompatibleWheelError) as caught:
        choose(candidates(CommitSpec(commit=COMMIT), settings, variant=variant), HOST, variant=variant)
    assert caught.value.what == message
    assert caught.value.exit_code == 4


def test_a_build_without_a_default_variant(settings: IndexSettings, index: IndexServer) -> None:
    index.files.clear()
    index.add_build(COMMIT, build(COMMIT, 1024, ("cpu", X86)))
    with pytest.raises(NoCompatibleWheelError, match="variant default wanted, has: cpu"):
        choose(candidates(CommitSpec(commit=COMMIT), settings), HOST)


@pytest.mark.parametrize("status", [404, 403])
def test_a_build_that_is_not_there_is_explained(settings: IndexSettings, index: IndexServer, status: int) -> None:
    index.missing_status = status
    index.commits |= {"a" * 40: True, "b" * 40: False}
    said = {}
    for commit in ("a" * 40, "b" * 40, "0" * 40):
        with pytest.raises(NoSuchBuildError) as caught:
            candidates(CommitSpec(commit=commit), settings)
        assert caught.value.exit_code == 4
        assert caught.value.hints[0] == "provision lock RECIPE --latest"
        assert caught.value.where == f"{index.url}/{commit}/"
        said[commit[0]] = caught.value.what.partition(": ")[2]
    assert said == {
        "a": "it is on main, but not built (yet)",
        "b": "it is not on main, and only commits on main are built",
        "0": "it is not on main: vllm-project/vllm knows no such commit",
    }


@pytest.mark.parametrize("github", [None, "http://127.0.0.1:1/github"])
def test_without_github_both_reasons_stand(settings: IndexSettings, github: str | None) -> None:
    with pytest.raises(NoSuchBuildError) as caught:
        candidates(CommitSpec(commit="0" * 40), replace(settings, github_api=github))
    assert caught.value.what == f"the index has no build of commit {'0' * 40}: not built (yet) or not on main"


def test_an_index_that_is_none_is_suspected(settings: IndexSettings, index: IndexServer) -> None:
    with pytest.raises(NoSuchBuildError) as caught:
        candidates(CommitSpec(commit=COMMIT), replace(settings, vllm_index=f"{index.url}/simple"))
    assert caught.value.hints[0] == "check --index-url: nothing there looks like a vLLM wheel index"
    with pytest.raises(NoSuchBuildError, match="the index has no nightly build"):
        candidates(NightlySpec(), replace(settings, vllm_index=f"{index.url}/simple"))


def test_no_network_is_not_a_missing_build(settings: IndexSettings) -> None:
    unreachable = replace(settings, vllm_index="http://127.0.0.1:1", retries=0)
    with pytest.raises(NetworkError) as caught:
        candidates(CommitSpec(commit=COMMIT), unreachable)
    assert (caught.value.what, caught.value.exit_code) == ("the connection was refused", 4)
    assert caught.value.hints == ("check the network and the proxy settings, then run the command again",)


def test_a_half_written_metadata_json_is_made_up_for_by_the_page(settings: IndexSettings, index: IndexServer) -> None:
    index.set_mood(f"{COMMIT}/vllm/metadata.json", Mood(cut_file_at=200))
    chosen = choose(candidates(CommitSpec(commit=COMMIT), settings), HOST).chosen
    assert (chosen.commit, chosen.variant) == (COMMIT, None)


def test_a_folder_with_a_page_alone_will_do(settings: IndexSettings, index: IndexServer) -> None:
    del index.files[f"{COMMIT}/vllm/metadata.json"]
    assert choose(candidates(CommitSpec(commit=COMMIT), settings), HOST).chosen.commit == COMMIT


def test_a_half_written_index_is_said_to_be_one(settings: IndexSettings, index: IndexServer) -> None:
    index.set_mood(f"{COMMIT}/vllm/metadata.json", Mood(cut_file_at=200))
    index.set_mood(f"{COMMIT}/vllm/", Mood(cut_file_at=150))
    with pytest.raises(NetworkError, match="not complete JSON; it may be being written") as caught:
        candidates(CommitSpec(commit=COMMIT), settings)
    assert caught.value.hints == ("run the command again in a minute",)
    index.set_mood(f"{COMMIT}/vllm/metadata.json", Mood(status=404))
    with pytest.raises(NetworkError, match="the index page is not complete"):
        candidates(CommitSpec(commit=COMMIT), settings)


def test_another_commits_wheel_is_never_taken(settings: IndexSettings, index: IndexServer) -> None:
    row = json.loads(index.files[f"{OTHER}/vllm/metadata.json"])
    index.files[f"{COMMIT}/vllm/metadata.json"] = json.dumps(row).encode()
    with pytest.raises(NoSuchBuildError, match="holds a wheel of another commit") as caught:
        candidates(CommitSpec(commit=COMMIT), settings)
    assert "dev1000+g2ae239fc0" in (caught.value.found or "")


def test_a_literal_plus_is_a_404(index: IndexServer, transport: Transport) -> None:
    path = f"{COMMIT}/vllm-0.26.1rc1.dev1024+g1fe3a1571-{X86}.whl"
    assert transport.fetch(f"{index.url}/{path}", accept=frozenset({404})).status == 404
    assert transport.fetch(f"{index.url}/{path.replace('+', '%2B')}", accept=frozenset({200})).status == 200


def test_a_path_without_its_slash_is_redirected(index: IndexServer, transport: Transport) -> None:
    reply = transport.fetch(f"{index.url}/{COMMIT}/vllm", accept=frozenset({200}))
    assert reply.url == f"{index.url}/{COMMIT}/vllm/"
    assert transport.traffic.requests == 2


def test_a_list_of_commits_tells_what_is_missing(settings: IndexSettings, tmp_path: Path) -> None:
    listed = tmp_path / "commits.txt"
    listed.write_text(f"# oldest first\n{OTHER}  1000\n\n{'0' * 40}\n{COMMIT[:9]} # the pin\n")
    found = find_builds(parse_spec(f"commits:{listed}"), settings)
    assert [one.commit for one in choose_each(found.candidates, Target())] == [OTHER, COMMIT]
    assert [one.commit for one in found.missing] == ["0" * 40]
    assert "it is not on main" in str(found.missing[0].error)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("", UsageError, "the list names no commit"),
        ("zzz\n", UsageError, "a commit is 6 to 40 hexadecimal digits"),
        (None, CannotObtainError, "the list of commits cannot be read"),
    ],
)
def test_lists_that_are_none(
    settings: IndexSettings, tmp_path: Path, text: str | None, kind: type[ProvisionError], message: str
) -> None:
    path = tmp_path / "list"
    if text is not None:
        path.write_text(text)
    with pytest.raises(kind, match=message):
        find_builds(CommitFileSpec(path=path), settings)


def test_a_clone_answers_before_github(settings: IndexSettings, index: IndexServer, tmp_path: Path) -> None:
    def git(*words: str) -> str:
        done = subprocess.run(
            ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words),
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    git("init", "-q", "-b", "main")
    git("commit", "-q", "--allow-empty", "-m", "one")
    on_main = git("rev-parse", "HEAD")
    cloned = replace(settings, clone=tmp_path)
    index.add_build(on_main, build(on_main, 7, (None, X86)))
    index.forget_requests()
    assert candidates(CommitSpec(commit=on_main[:8]), cloned)[0].commit == on_main
    git("commit", "-q", "--allow-empty", "-m", "two")
    with pytest.raises(NoSuchBuildError, match="on main, but not built"):
        candidates(CommitSpec(commit=git("rev-parse", "HEAD")), cloned)
    assert not any("github" in request.path for request in index.requests)


@pytest.mark.parametrize(
    ("mood", "kind", "message"),
    [
        (Mood(status=403), NetworkError, "GitHub's limit for requests is reached"),
        (Mood(status=422), NoSuchBuildError, "vllm-project/vllm has no commit 1fe3a1571"),
        (Mood(status=500), NetworkError, "cannot be completed: the server answered 500"),
    ],
)
def test_an_abbreviated_commit_that_nobody_completes(
    settings: IndexSettings, index: IndexServer, mood: Mood, kind: type[ProvisionError], message: str
) -> None:
    index.set_mood("github/repos/vllm-project/vllm/commits/1fe3a1571", mood)
    with pytest.raises(kind, match=message) as caught:
        candidates(CommitSpec(commit="1fe3a1571"), settings)
    assert caught.value.hints[0] == "give all 40 digits of the commit"


def test_a_known_commit_with_a_fitting_wheel_is_not_asked_about_again(
    settings: IndexSettings, index: IndexServer, tmp_path: Path
) -> None:
    kept = replace(settings, cache=tmp_path)
    first = candidates(CommitSpec(commit=COMMIT), kept, target=HOST)
    index.forget_requests()
    assert candidates(CommitSpec(commit=COMMIT), kept, target=HOST) == first
    assert not index.requests
    candidates(CommitSpec(commit=COMMIT), kept, target=Target(python=(3, 12), arch="riscv64"))
    assert len(index.requests) == 1, "what does not fit may have been added since"


@pytest.fixture
def releases(index: IndexServer) -> None:
    wheels = {}
    for version, tag in (("0.26.0", X86), ("0.27.0", X86), ("0.27.1", X86), ("0.27.1", ARM), ("0.28.0rc1", X86)):
        wheels[f"vllm-{version}-{tag}.whl"] = wheel_bytes({"vllm/a.py": b""}, version=version, tag=tag)
    index.add_package("vllm", wheels)


@pytest.mark.usefixtures("releases")
@pytest.mark.parametrize(
    ("text", "versions"),
    [
        ("pypi", ["0.26.0", "0.27.0", "0.27.1"]),
        ("pypi:0.27.1", ["0.27.1"]),
        ("pypi:>=0.27", ["0.27.0", "0.27.1"]),
        ("pypi:0.28.0rc1", ["0.28.0rc1"]),
        ("pypi:>=0.27.1rc0", ["0.27.1", "0.28.0rc1"]),
    ],
)
def test_releases_by_version_and_range(settings: IndexSettings, text: str, versions: list[str]) -> None:
    found = candidates(parse_spec(text), settings)
    assert [str(one.version) for one in choose_each(found, HOST)] == versions
    assert all(one.sha256 and one.size for one in found)


@pytest.mark.usefixtures("releases")
def test_an_index_that_only_speaks_html(settings: IndexSettings, index: IndexServer) -> None:
    del index.files["simple/vllm/index.json"]
    found = candidates(parse_spec("pypi:0.27.1"), settings)
    assert choose(found, HOST).chosen.sha256 is not None


@pytest.mark.usefixtures("releases")
def test_a_version_that_does_not_exist(settings: IndexSettings) -> None:
    with pytest.raises(NoSuchBuildError) as caught:
        candidates(parse_spec("pypi:0.99"), settings)
    assert caught.value.what == "the package index has no wheel of vllm==0.99"
    assert caught.value.found == "newest are 0.26.0, 0.27.0, 0.27.1, 0.28.0rc1"
    assert caught.value.exit_code == 4


def test_an_index_without_the_project(settings: IndexSettings) -> None:
    with pytest.raises(NoSuchBuildError, match="the package index has no project vllm"):
        candidates(parse_spec("pypi"), settings)


@pytest.mark.usefixtures("releases")
def test_an_index_that_wants_a_password(settings: IndexSettings, index: IndexServer) -> None:
    index.set_mood("simple/vllm/", Mood(status=401))
    secret = replace(settings, pypi=index.simple_url.replace("//", "//me:hunter2@"))
    with pytest.raises(CannotObtainError) as caught:
        candidates(parse_spec("pypi"), secret)
    assert caught.value.what == "the server refused access (401)"
    assert caught.value.where == f"{index.simple_url.replace('//', '//***@')}/vllm/"


@pytest.mark.usefixtures("releases")
def test_credentials_of_the_index_reach_its_files_but_no_candidate(settings: IndexSettings, index: IndexServer) -> None:
    secret = replace(settings, pypi=index.simple_url.replace("//", "//me:hunter2@"))
    with Transport(secret) as transport:
        chosen = choose(candidates(parse_spec("pypi:0.27.1"), secret, transport=transport), HOST).chosen
        assert "hunter2" not in repr(chosen)
        open_wheel(chosen, secret, transport=transport).names()
    assert all(request.headers["authorization"] == "Basic bWU6aHVudGVyMg==" for request in index.requests)


@pytest.mark.usefixtures("releases")
def test_the_page_of_releases_is_kept_for_a_while(settings: IndexSettings, index: IndexServer, tmp_path: Path) -> None:
    kept = replace(settings, cache=tmp_path, index_age=60.0)
    assert candidates(parse_spec("pypi"), kept) == candidates(parse_spec("pypi"), kept)
    assert len(index.requests) == 1


@pytest.mark.usefixtures("releases")
def test_a_yanked_release_only_counts_by_its_name(settings: IndexSettings, index: IndexServer) -> None:
    page = json.loads(index.files["simple/vllm/index.json"])
    for file in page["files"]:
        file["yanked"] = "0.27.1" in file["filename"]
    index.files["simple/vllm/index.json"] = json.dumps(page).encode()
    assert [str(one.version) for one in candidates(parse_spec("pypi:>=0.27"), settings)] == ["0.27.0"]
    assert all(one.yanked for one in candidates(parse_spec("pypi:0.27.1"), settings))


def test_a_folder_and_a_file(settings: IndexSettings, tmp_path: Path) -> None:
    for version in ("0.27.1", "0.27.0", "0.26.1rc1.dev1024+g1fe3a1571.cu130"):
        write_wheel(tmp_path, wheel_bytes({"vllm/a.py": b""}, version=version), version)
    write_wheel(tmp_path, wheel_bytes({}, version="1.0", project="other"), "1.0", project="other")
    found = candidates(parse_spec(str(tmp_path)), settings)
    assert [(str(one.version.public), one.variant, one.commit) for one in found] == [
        ("0.26.1rc1.dev1024", "cu130", "1fe3a1571"),
        ("0.27.0", None, None),
        ("0.27.1", None, None),
    ]
    (one,) = candidates(parse_spec(str(found[-1].path)), settings)
    assert one == found[-1]
    with pytest.raises(CannotObtainError, match="there is no such file or folder"):
        candidates(LocalSpec(path=tmp_path / "no.whl"), settings)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoSuchBuildError, match="the folder holds no wheel of vllm"):
        candidates(LocalSpec(path=tmp_path / "empty"), settings)


def test_a_wheel_as_a_file_is_downloaded_once(settings: IndexSettings, index: IndexServer, tmp_path: Path) -> None:
    kept = replace(settings, cache=tmp_path)
    with Transport(kept) as transport:
        chosen = choose(candidates(CommitSpec(commit=COMMIT), kept, transport=transport), HOST).chosen
        first = fetch_wheel(chosen, kept, transport=transport)
        assert first.path.name == chosen.filename
        assert first.sha256 == digest_of(first.path.read_bytes())
        before = transport.traffic
        assert fetch_wheel(chosen, kept, transport=transport).path == first.path
        assert (transport.traffic - before).received == 0, "the server only says that nothing changed"
        known = replace(chosen, sha256=first.sha256)
        assert fetch_wheel(known, kept, transport=transport).path == first.path
        assert (transport.traffic - before).requests == 1
        local = replace(chosen, url=None, path=first.path)
        assert fetch_wheel(local, kept, transport=transport).sha256 == first.sha256


def test_a_wheel_that_changed_on_the_server_is_downloaded_again(
    settings: IndexSettings, index: IndexServer, tmp_path: Path
) -> None:
    kept = replace(settings, cache=tmp_path)
    with Transport(kept) as transport:
        chosen = choose(candidates(CommitSpec(commit=COMMIT), kept, transport=transport), HOST).chosen
        first = fetch_wheel(chosen, kept, transport=transport)
        index.files[f"{COMMIT}/{chosen.filename}"] += b"more"
        assert fetch_wheel(chosen, kept, transport=transport).sha256 != first.sha256
        with pytest.raises(HashMismatchError, match="not the one that was promised"):
            fetch_wheel(replace(chosen, sha256="0" * 64), kept, transport=transport)


def test_a_lock_spells_the_public_index_whoever_made_it(settings: IndexSettings, index: IndexServer) -> None:
    url = f"{index.url}/{COMMIT}/vllm-1%2Bg1.whl"
    assert public_url(url, settings) == f"https://wheels.vllm.ai/{COMMIT}/vllm-1%2Bg1.whl"
    assert mirror_url(public_url(url, settings), settings) == url
    assert mirror_url(public_url(url, settings), IndexSettings()) == public_url(url, settings)
    assert mirror_url("https://elsewhere/x.whl", settings) == "https://elsewhere/x.whl"
    with pytest.raises(CannotObtainError, match="a file that is not its own"):
        public_url("https://elsewhere/x.whl", settings)
