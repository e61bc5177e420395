import json

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from provisioner.errors import NetworkError
from provisioner.wheels.simple import (
    JSON_TYPE,
    full_commit_in,
    parse_folder_links,
    parse_project_page,
    parse_vllm_metadata,
)

COMMIT = "1fe3a1571ac67581478a11743e55a306de1d136f"
WHEEL = "vllm-0.26.1rc1.dev1024+g1fe3a1571.cu130-cp38-abi3-manylinux_2_28_x86_64.whl"
PAGE = "http://index/simple/vllm/"


def json_page(*files: object, version: str = "1.1") -> bytes:
    return json.dumps({"meta": {"api-version": version}, "name": "vllm", "files": list(files)}).encode()


def test_a_json_page_gives_wheels_with_their_facts() -> None:
    body = json_page(
        {
            "filename": "vllm-0.27.1-cp38-abi3-manylinux_2_28_x86_64.whl",
            "url": "../../files/vllm-0.27.1-cp38-abi3-manylinux_2_28_x86_64.whl#sha256=feed",
            "hashes": {"sha256": "ab" * 32},
            "requires-python": "<3.15,>=3.10",
            "size": 312887766,
            "upload-time": "2026-08-11T11:00:11.706962Z",
            "yanked": "broken",
        },
        {"filename": "vllm-0.27.1.tar.gz", "url": "vllm-0.27.1.tar.gz", "hashes": {}},
        {"filename": "other-1.0-py3-none-any.whl", "url": "o", "hashes": {}},
    )
    (found,) = parse_project_page(body, content_type=f"{JSON_TYPE}; charset=utf-8", url=PAGE, project="vllm")
    assert found.url == "http://index/files/vllm-0.27.1-cp38-abi3-manylinux_2_28_x86_64.whl"
    assert (found.version, found.size, found.sha256, found.yanked) == (Version("0.27.1"), 312887766, "ab" * 32, True)
    assert found.requires_python is not None
    assert "3.12" in found.requires_python
    assert found.upload_time is not None
    assert found.upload_time.isoformat() == "2026-08-11T11:00:11.706962+00:00"


@pytest.mark.parametrize("specifier", ["==0.27.1", "==0.27.1+cu129", ">=0.27,<0.28", "==1.0rc1", "==9"])
def test_a_page_read_for_some_versions_lacks_none_of_them(specifier: str) -> None:
    versions = ("0.26.1", "0.27.1", "0.27.1%2Bcu129", "0.27.1.post1", "1.0rc1", "1!0.27.1", "2.0.0")
    names = [f"vllm-{version}-cp38-abi3-manylinux_2_28_x86_64.whl" for version in versions]
    body = json_page(*({"filename": name, "url": name, "hashes": {}} for name in [*names, "vllm-what-is.whl"]))
    wanted = SpecifierSet(specifier)
    every = parse_project_page(body, content_type=JSON_TYPE, url=PAGE, project="vllm")
    some = parse_project_page(body, content_type=JSON_TYPE, url=PAGE, project="vllm", only=wanted)
    assert len(every) == len(versions)
    assert list(some) == [found for found in every if wanted.contains(found.version, prereleases=True)]


def test_an_html_page_says_the_same() -> None:
    body = (
        f'<html><body><a href="../{WHEEL.replace("+", "%2B")}#sha256={"cd" * 32}" data-requires-python="&gt;=3.10" '
        f'data-yanked="">{WHEEL}</a><a href="vllm-1.tar.gz">vllm-1.tar.gz</a></body></html>'
    ).encode()
    (found,) = parse_project_page(body, content_type="text/html", url=f"http://index/{COMMIT}/vllm/", project="vllm")
    assert found.url == f"http://index/{COMMIT}/{WHEEL.replace('+', '%2B')}"
    assert (found.filename, found.variant, found.commit) == (WHEEL, "cu130", COMMIT)
    assert (found.sha256, found.yanked, str(found.requires_python)) == ("cd" * 32, True, ">=3.10")


def test_metadata_json_paths_are_joined_to_its_own_folder() -> None:
    row = {
        "package_name": "vllm",
        "version": "0.26.1rc1.dev1024+g1fe3a1571",
        "build_tag": None,
        "python_tag": "cp38",
        "abi_tag": "abi3",
        "platform_tag": "manylinux_2_28_x86_64",
        "variant": "cu130",
        "filename": WHEEL,
        "path": f"../../../{COMMIT}/{WHEEL.replace('+', '%2B')}",
    }
    (found,) = parse_vllm_metadata(
        json.dumps([row]).encode(), url="http://index/nightly/cu130/vllm/metadata.json", project="vllm"
    )
    assert found.url == f"http://index/{COMMIT}/{WHEEL.replace('+', '%2B')}"
    assert (found.commit, found.variant, str(found.version)) == (COMMIT, "cu130", "0.26.1rc1.dev1024+g1fe3a1571.cu130")


@pytest.mark.parametrize("cut", [1, 40, 90])
def test_a_half_written_metadata_json_is_said_to_be_one(cut: int) -> None:
    whole = json.dumps([{"package_name": "vllm", "filename": WHEEL, "path": WHEEL, "variant": None}])
    with pytest.raises(NetworkError, match="it may be being written"):
        parse_vllm_metadata(whole[:cut].encode(), url="http://index/x/vllm/metadata.json", project="vllm")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{}", "metadata.json is not a list"),
        (b"[1]", "a row of metadata.json has no filename and path"),
        (b'[{"filename": "vllm-1-py3-none-any.whl"}]', "a row of metadata.json has no filename and path"),
        (
            b'[{"filename": "vllm-1-py3-none-any.whl", "path": "x", "variant": 3}]',
            "a variant in metadata.json is no text",
        ),
    ],
)
def test_other_shapes_of_metadata_json_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(NetworkError) as caught:
        parse_vllm_metadata(body, url="http://index/x/vllm/metadata.json", project="vllm")
    assert caught.value.what == message
    assert "metadata.json" in (caught.value.where or "")


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b"{", JSON_TYPE, "the index file is not complete JSON; it may be being written"),
        (b"[]", JSON_TYPE, "the index page has no list of files"),
        (
            json_page(version="2.0"),
            JSON_TYPE,
            "the index speaks version 2.0 of the repository API, which is not understood",
        ),
        (json_page({"filename": "x"}), JSON_TYPE, "a file of the index page has no name and URL"),
        (b"x", "image/png", "an index page of the kind image/png is not understood"),
    ],
)
def test_pages_that_are_not_understood(body: bytes, kind: str, message: str) -> None:
    with pytest.raises(NetworkError) as caught:
        parse_project_page(body, content_type=kind, url=PAGE, project="vllm")
    assert caught.value.what == message


def test_sub_folders_of_a_page() -> None:
    body = (
        b'<a href="vllm/">v</a> <a class=x href=\'cu129/\'>c</a><a href="../up/">x</a><a href="a/b/">y</a><a href="f">'
    )
    assert parse_folder_links(body, url="http://index/abc/") == ("vllm", "cu129")


def test_only_a_whole_commit_folder_counts() -> None:
    assert full_commit_in(f"http://i/{COMMIT}/x.whl") == COMMIT
    assert full_commit_in(f"http://i/{COMMIT[:39]}/x.whl") is None
    assert full_commit_in("http://i/nightly/vllm/") is None
