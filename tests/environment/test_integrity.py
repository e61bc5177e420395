import pytest
from packaging.version import Version

from provisioner.digests import digest_of, digest_to_record
from provisioner.environment.integrity import (
    check_record,
    commits_agree,
    parse_build,
    parse_torch,
    read_torch,
    versions_agree,
)
from provisioner.environment.site import open_site_packages
from tests.support.wheels import version_file


def test_build_text_as_setuptools_scm_writes_it():
    text = version_file("0.26.1rc1.dev1024+g1fe3a1571", "1fe3a1571ac67581478a11743e55a306de1d136f").decode()
    build = parse_build(text)
    assert (build.version, build.commit) == ("0.26.1rc1.dev1024+g1fe3a1571", "1fe3a1571")


def test_build_text_of_vllm_0_27_1():
    build = parse_build(
        "__version__: str\n__version__ = version = '0.27.1'\n\n__commit_id__ = commit_id = 'g6e448d0ea'\n"
    )
    assert (build.version, build.commit) == ("0.27.1", "6e448d0ea")


def test_text_that_says_nothing():
    assert parse_build("x = 1\n").version is None
    assert parse_torch("x = 1\n") is None


def test_torch_text():
    text = "from typing import Optional\n__version__ = '2.13.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\n"
    found = parse_torch(text)
    assert found is not None
    assert (found.version, found.cuda) == ("2.13.0+cu130", "13.0")
    cpu = parse_torch("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    assert cpu is not None
    assert cpu.cuda is None


@pytest.mark.parametrize(
    ("found", "expected", "agree"),
    [
        ("6e448d0ea", "6e448d0ea", True),
        ("6e448d0ea", "6e448d0ea" + "0" * 31, True),
        ("6e448d0eb", "6e448d0ea" + "0" * 31, False),
        (None, "6e448d0ea", False),
    ],
)
def test_commits(found, expected, agree):
    assert commits_agree(found, expected) is agree


@pytest.mark.parametrize(
    ("found", "agree"), [("0.27.1", True), ("0.27.1+cu130", True), ("0.27.2", False), (None, False), ("x", False)]
)
def test_versions(found, agree):
    assert versions_agree(found, Version("0.27.1")) is agree


@pytest.fixture
def site(tmp_path):
    info = tmp_path / "vllm-1.0.dist-info"
    info.mkdir()
    (tmp_path / "vllm").mkdir()
    rows = []
    for path in ("vllm/a.py", "vllm/b.py", "vllm/c.so"):
        data = path.encode()
        (tmp_path / path).write_bytes(data)
        rows.append(f"{path},{digest_to_record(digest_of(data))},{len(data)}")
    rows += ["../../bin/vllm,sha256=AAAA,1".replace("AAAA", digest_to_record(digest_of(b""))[7:]), "vllm/d.py,,"]
    (info / "RECORD").write_text("\n".join(rows) + "\n")
    return open_site_packages(tmp_path)


def test_an_intact_tree_has_no_findings(site):
    assert check_record(site, python_only=False) == ()


def test_changed_and_missing_files_are_found(site):
    (site.site_packages / "vllm/a.py").write_bytes(b"other")
    (site.site_packages / "vllm/b.py").unlink()
    (site.site_packages / "vllm/c.so").write_bytes(b"other")
    found = {finding.path: finding.found for finding in check_record(site, python_only=False)}
    assert found == {"vllm/a.py": digest_of(b"other"), "vllm/b.py": None, "vllm/c.so": digest_of(b"other")}
    assert [finding.path for finding in check_record(site, python_only=True)] == ["vllm/a.py", "vllm/b.py"]
    assert [finding.path for finding in check_record(site, python_only=True, skip={"vllm/a.py"})] == ["vllm/b.py"]


def test_torch_is_read_without_being_imported(tmp_path):
    assert read_torch(tmp_path) is None
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0'\nraise RuntimeError\n")
    found = read_torch(tmp_path)
    assert found is not None
    assert found.version == "2.13.0"
