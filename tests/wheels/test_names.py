import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.tags import sys_tags
from packaging.version import Version

from provisioner.errors import InvalidInputError, NoCompatibleWheelError
from provisioner.wheels.names import (
    Candidate,
    Target,
    choose,
    choose_each,
    commit_of,
    metadata_version,
    oldest_glibc,
    parse_wheel_name,
    sift,
    variant_of,
    without_variant,
)

NIGHTLY = "0.26.1rc1.dev1024+g1fe3a1571"


def candidate(version: str, tag: str = "cp38-abi3-manylinux_2_28_x86_64", **facts: object) -> Candidate:
    filename = f"vllm-{version}-{tag}.whl"
    name = parse_wheel_name(filename)
    known = {"url": f"http://index/{filename}", "variant": variant_of(name.version), "commit": commit_of(name.version)}
    return Candidate(filename=filename, version=name.version, **(known | facts))


@pytest.mark.parametrize(
    ("version", "commit", "variant", "plain"),
    [
        ("0.26.1rc1.dev1024+g1fe3a1571.cu130", "1fe3a1571", "cu130", "0.26.1rc1.dev1024+g1fe3a1571"),
        ("0.26.1rc1.dev1024+g1fe3a1571", "1fe3a1571", None, "0.26.1rc1.dev1024+g1fe3a1571"),
        ("0.11.1rc8.dev14+gaa384b3c0.cu130", "aa384b3c0", "cu130", "0.11.1rc8.dev14+gaa384b3c0"),
        ("0.27.1", None, None, "0.27.1"),
        ("0.11.0+cu129", None, "cu129", "0.11.0"),
        ("0.11.0+rocm.7", None, "rocm.7", "0.11.0"),
        ("0.1.dev3+g1234567.d20260101.cpu", "1234567", "cpu", "0.1.dev3+g1234567"),
        ("0.1.dev3+g1234567.d20260101", "1234567", None, "0.1.dev3+g1234567"),
    ],
)
def test_a_local_version_tells_commit_and_variant(
    version: str, commit: str | None, variant: str | None, plain: str
) -> None:
    parsed = Version(version)
    assert (commit_of(parsed), variant_of(parsed), without_variant(parsed)) == (commit, variant, Version(plain))


@given(
    st.tuples(st.integers(0, 3), st.integers(0, 99), st.integers(0, 9)),
    st.integers(0, 2000),
    st.text("0123456789abcdef", min_size=9, max_size=9),
    st.sampled_from([None, "cu129", "cu130", "cpu"]),
)
def test_a_wheel_name_survives_quoting_and_packaging(
    release: tuple[int, int, int], dev: int, commit: str, variant: str | None
) -> None:
    version = f"{release[0]}.{release[1]}.{release[2]}rc1.dev{dev}+g{commit}" + (f".{variant}" if variant else "")
    filename = f"vllm-{version}-cp38-abi3-manylinux_2_28_x86_64.whl"
    quoted, plain = parse_wheel_name(filename.replace("+", "%2B")), parse_wheel_name(filename)
    assert quoted == plain
    assert plain.filename == filename
    assert str(plain.version) == version
    assert (commit_of(plain.version), variant_of(plain.version)) == (commit, variant)
    assert Version(str(without_variant(plain.version))).public == plain.version.public


@pytest.mark.parametrize("name", ["vllm-0.27.1.tar.gz", "vllm.whl", "vllm-x-cp38-abi3-linux_x86_64.whl", ""])
def test_other_files_are_no_wheels(name: str) -> None:
    with pytest.raises(InvalidInputError, match="not the name of a wheel"):
        parse_wheel_name(name)


def test_the_newest_version_wins_then_the_better_platform_then_the_build_number() -> None:
    old, older_libc, newer_libc, rebuilt = (
        candidate("0.27.0"),
        candidate("0.27.1", "cp38-abi3-manylinux_2_17_x86_64"),
        candidate("0.27.1"),
        candidate("0.27.1-1"),
    )
    choice = choose((rebuilt, old, newer_libc, older_libc), Target(python=(3, 12)))
    assert choice.chosen is rebuilt
    assert {rejection.filename for rejection in choice.rejected} == {c.filename for c in (old, older_libc, newer_libc)}


@pytest.mark.parametrize(
    ("listed", "variant", "reason"),
    [
        ([candidate("0.27.1", "cp38-abi3-manylinux_2_28_aarch64")], None, "only manylinux_2_28_aarch64"),
        ([candidate(NIGHTLY), candidate(f"{NIGHTLY}.cpu")], "cu129", "variant cu129 wanted, has: default, cpu"),
        ([candidate(f"{NIGHTLY}.cu129", "cp38-abi3-manylinux_2_28_aarch64")], "cu129", "only manylinux_2_28_aarch64"),
        ([candidate("0.27.1", "cp310-cp310-manylinux_2_28_x86_64")], None, "only for cp310-cp310, not Python 3.12"),
        ([candidate("0.32.0", requires_python=SpecifierSet(">=3.13"))], None, "requires Python >=3.13, not 3.12"),
        ([candidate("0.27.1", "cp38-abi3-manylinux_2_35_x86_64")], None, "only manylinux_2_35_x86_64"),
        ([], None, "nothing is listed"),
    ],
)
def test_every_rejection_names_its_axis(listed: list[Candidate], variant: str | None, reason: str) -> None:
    with pytest.raises(NoCompatibleWheelError) as caught:
        choose(listed, Target(python=(3, 12), glibc=(2, 31)), variant=variant)
    assert caught.value.what == f"no wheel fits: {reason}"
    assert caught.value.exit_code == 4
    for one in listed:
        assert one.filename in (caught.value.found or "")


def test_the_rejected_are_told_beside_the_chosen() -> None:
    arm = candidate("0.27.1", "cp38-abi3-manylinux_2_28_aarch64")
    choice = choose((arm, candidate("0.27.1")), Target(python=(3, 12)))
    assert [str(one) for one in choice.rejected] == [f"{arm.filename}: only manylinux_2_28_aarch64"]


def test_one_file_for_each_build() -> None:
    listed = [candidate(v) for v in ("0.24.0", "0.25.0", "0.25.0-1")] + [
        candidate("0.25.0", "cp38-abi3-manylinux_2_28_aarch64")
    ]
    assert [one.filename.split("-cp")[0] for one in choose_each(listed, Target())] == ["vllm-0.24.0", "vllm-0.25.0-1"]


def test_platforms_agree_with_packaging_on_this_machine() -> None:
    tags = [tag for tag in sys_tags() if tag.interpreter.startswith("cp3") and "linux" in tag.platform]
    version = (int(tags[0].interpreter[2:3]), int(tags[0].interpreter[3:]))
    arch = tags[0].platform.rpartition("linux_")[2].split("_", 2)[-1] if "manylinux" in tags[0].platform else "x86_64"
    minors = [int(tag.platform.split("_")[2]) for tag in tags if tag.platform.startswith("manylinux_2_")]
    target = Target(python=version, arch=arch, glibc=(2, max(minors)))
    for tag in tags:
        fitting, rejected = sift([candidate("1.0", str(tag))], target)
        assert fitting, rejected
    assert not sift([candidate("1.0", f"cp38-abi3-manylinux_2_{max(minors) + 1}_{arch}")], target)[0]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Metadata-Version: 2.4\nName: vllm\nVersion: 0.26.1rc1.dev1024+g1fe3a1571\n\nVersion: 2\n", NIGHTLY),
        ("Name: vllm\n\nVersion: 2\n", None),
        ("Version: soon\n", None),
    ],
)
def test_the_version_that_metadata_tells(text: str, version: str | None) -> None:
    assert metadata_version(text) == (Version(version) if version else None)


@pytest.mark.parametrize(
    ("tag", "glibc"),
    [
        ("cp38-abi3-manylinux_2_28_x86_64", (2, 28)),
        ("cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64", (2, 17)),
        ("cp312-cp312-manylinux1_x86_64.manylinux_2_28_x86_64", (2, 5)),
        ("cp312-cp312-manylinux_2_28_x86_64.manylinux_2_35_x86_64", (2, 28)),
        ("py3-none-any", None),
        ("cp312-cp312-linux_x86_64", None),
    ],
)
def test_the_oldest_glibc_of_a_wheel(tag: str, glibc: tuple[int, int] | None) -> None:
    assert oldest_glibc(f"one-1.0-{tag}.whl") == glibc
