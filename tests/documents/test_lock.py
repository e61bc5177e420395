import tomllib
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.version import Version

from provisioner.documents.lock import (
    Lock,
    LockedBuild,
    keep_platform,
    marker_environment,
    parse_lock,
    parse_requirements,
    print_facts,
    select_pin,
)
from provisioner.errors import InvalidLockError
from provisioner.resources import lockfiles_folder

A, B = "a" * 64, "b" * 64
REQUIREMENTS = f"""\
numpy==2.0 ; python_full_version < '3.12' \\
    --hash=sha256:{B}
numpy==2.1 ; python_full_version >= '3.12' \\
    --hash=sha256:{B}
vllm==0.27.1 \\
    --hash=sha256:{A} \\
    --hash=sha256:{B}
"""


def make_lock(requirements: str = REQUIREMENTS) -> Lock:
    return Lock(
        recipe="hynix-stable",
        python=">=3.11,<3.14",
        uv="0.13.9",
        exclude_newer=datetime(2026, 9, 10, tzinfo=UTC),
        build=LockedBuild(
            distribution="vllm",
            version=Version("0.27.1"),
            filename="vllm-0.27.1-cp38-abi3-manylinux_2_28_x86_64.whl",
            size=312887766,
            sha256=A,
            record=B,
            commit="6e448d0ea",
            variant=None,
            url=None,
            torch=Version("2.13.0"),
            torch_cuda="13.0",
        ),
        files={"vllm/z.py": A, "vllm/a.py": B},
        pins=parse_requirements(requirements, where="t"),
        requirements=requirements,
    )


def test_print_then_parse_is_identity():
    lock = make_lock()
    assert parse_lock(print_facts(lock), lock.requirements, where="x.toml") == lock


def test_printing_is_deterministic_and_sorted():
    lock = make_lock()
    again = replace(lock, files=dict(reversed(lock.files.items())))
    assert print_facts(lock) == print_facts(again)
    assert print_facts(lock).index("vllm/a.py") < print_facts(lock).index("vllm/z.py")


def test_requirements_that_were_changed_are_refused():
    lock = make_lock()
    with pytest.raises(InvalidLockError) as caught:
        parse_lock(print_facts(lock), lock.requirements.replace("2.1", "2.2"), where="x.toml")
    assert caught.value.where == "x.toml: requirements-sha256"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("numpy==2.0", "a requirement without a hash"),
        (f"numpy>=2.0 --hash=sha256:{A}", "a requirement must name exactly one version"),
        (f"numpy==2.* --hash=sha256:{A}", "a requirement must name exactly one version"),
        ("--index-url https://example.invalid/simple", "options have no place in a lock"),
        (f"numpy @ file:///tmp/x.whl --hash=sha256:{A}", "a lock takes packages from an index or an https URL only"),
        (f"torch==2.13.0+cpu --hash=sha256:{A}", "a CPU build of torch"),
        (f"not a requirement --hash=sha256:{A}", None),
    ],
)
def test_lines_that_no_lock_may_hold(line, what):
    with pytest.raises(InvalidLockError) as caught:
        parse_requirements(f"# comment\n\n{line}\n", where="r.txt")
    assert caught.value.where == "r.txt, line 3"
    assert what is None or caught.value.what == what


def test_a_build_that_is_not_the_pinned_one_is_refused():
    lock = make_lock()
    other = replace(lock, build=replace(lock.build, version=Version("0.28.0")))
    with pytest.raises(InvalidLockError, match="requirements and build disagree"):
        parse_lock(print_facts(other), lock.requirements, where="x.toml")
    other = replace(lock, build=replace(lock.build, sha256="c" * 64))
    with pytest.raises(InvalidLockError, match="not among the requirement's hashes"):
        parse_lock(print_facts(other), lock.requirements, where="x.toml")


def test_markers_are_judged_for_the_targets_python():
    lock = make_lock()
    wanted = [str(pin.version) for pin in lock.pins if pin.wanted(marker_environment("3.12.1")) and pin.name == "numpy"]
    assert wanted == ["2.1"]


def test_only_pins_of_the_platform_are_kept():
    foreign = f"pywin32==312 ; sys_platform == 'win32' \\\n    --hash=sha256:{A}\n"
    kept = keep_platform(foreign + REQUIREMENTS, environments=[marker_environment("3.12")])
    assert "pywin32" not in kept
    assert "numpy==2.0" not in kept
    assert kept.endswith(select_pin(make_lock(), "vllm"))


def test_selecting_one_pin_keeps_its_hashes():
    assert select_pin(make_lock(), "VLLM") == f"vllm==0.27.1 \\\n    --hash=sha256:{A} \\\n    --hash=sha256:{B}\n"
    with pytest.raises(InvalidLockError):
        select_pin(make_lock(), "torch")


TEXT = st.text(st.characters(codec="utf-8"), max_size=30)


@settings(max_examples=60)
@given(st.dictionaries(TEXT, TEXT, max_size=4), TEXT)
def test_what_is_printed_is_toml(files: dict[str, str], name: str) -> None:
    lock = replace(make_lock(), files=files, recipe=name, complete=False)
    found = tomllib.loads(print_facts(lock))
    assert (found["files"], found["recipe"], found["complete"]) == (files, name, False)


@pytest.mark.parametrize("path", sorted(lockfiles_folder().glob("*.toml")), ids=lambda path: path.stem)
def test_locks_that_travel_are_printed_as_they_are(path) -> None:
    requirements = path.with_suffix(".txt").read_text()
    lock = parse_lock(path.read_text(), requirements, where=path.name)
    assert print_facts(lock) == path.read_text()
    for pin in lock.pins:
        requirement = Requirement(pin.text)
        assert requirement == pin.requirement
        assert requirement.marker == pin.marker
        assert str(requirement.specifier) == f"=={pin.version}"


@pytest.mark.parametrize(
    "text",
    ["a[b]==1", "a ==1", "a==1;python_version<'3'", "a @ https://example.invalid/a-1-py3-none-any.whl", "a==1.0+x"],
)
def test_pins_of_unusual_form_are_read(text) -> None:
    (pin,) = parse_requirements(f"{text} --hash=sha256:{A}", where="r.txt")
    assert pin.requirement == Requirement(text)
    assert (pin.version is None) == ("https" in text)


@pytest.mark.parametrize("text", ["a==1 ; nonsense", "a==one", "-a==1", "a==1 ;"])
def test_pins_of_no_form_are_refused(text) -> None:
    with pytest.raises(InvalidLockError):
        parse_requirements(f"{text} --hash=sha256:{A}", where="r.txt")
