"""The text of a Containerfile: what an image must not lack."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from provisioner.serve.containerfile import ImagePlan, build_command, default_base, render_containerfile

PLAN = ImagePlan(
    recipe="small",
    recipe_digest="a" * 64,
    lock_digest="b" * 64,
    patches={"p2": "d" * 64, "p1": "c" * 64},
    version="0.27.1",
    tool="0.1.0",
    bundle="small.tar",
    base="python:3.12-bookworm@sha256:" + "e" * 64,
    bare=False,
    without_fork=False,
    port=8012,
)


def instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.replace("\\\n", "").splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2]) for line in lines]


def test_two_stages_from_the_same_pinned_base() -> None:
    stages = [value for name, value in instructions(render_containerfile(PLAN)) if name == "FROM"]
    assert stages == [f"{PLAN.base} AS build", PLAN.base]
    assert default_base("3.12") == "python:3.12-bookworm"


def test_the_image_runs_without_root_and_owns_nothing_of_what_was_proven() -> None:
    found = instructions(render_containerfile(PLAN))
    image = found[[name for name, _ in found].index("FROM", 1) :]
    names = [name for name, _ in image]
    assert dict(image)["USER"] == "10001"
    assert names.index("COPY") < names.index("USER") < names.index("ENTRYPOINT")
    assert "--chown" not in dict(image)["COPY"]


def test_the_environment_is_proven_after_it_is_made_and_in_the_same_step() -> None:
    steps = [value for name, value in instructions(render_containerfile(PLAN)) if name == "RUN"]
    made = next(step for step in steps if "provision up" in step)
    assert re.search(r"provision up small --from-bundle \S+ --no-verify +&& \S+provision status small +&&", made)
    assert "; " not in made
    assert "||" not in made


def test_no_index_is_asked_and_the_bundle_is_no_layer() -> None:
    found = instructions(render_containerfile(PLAN))
    for name, value in found:
        if name == "RUN" and ("install.py" in value or "provision up" in value):
            assert value.startswith("--mount=type=bind,source=small.tar,")
            assert "install.py /mnt/bundle.tar" in value or "--from-bundle /mnt/bundle.tar" in value
            assert "pip" not in value
        if name == "COPY":
            assert value.startswith("--from=build ")


def test_labels_name_lock_and_patches() -> None:
    labels = dict(value.split("=") for name, value in instructions(render_containerfile(PLAN)) if name == "LABEL")
    assert labels['"provision.lock"'] == f'"{"b" * 64}"'
    assert labels['"provision.patch.p1"'] == f'"{"c" * 64}"'
    assert labels['"provision.patch.p2"'] == f'"{"d" * 64}"'


def test_a_bare_bundle_is_taken_as_it_is() -> None:
    assert "--bare" not in render_containerfile(PLAN)
    assert " --no-verify --bare " in render_containerfile(replace(PLAN, bare=True))


def test_health_is_asked_at_the_port_that_is_served() -> None:
    found = dict(instructions(render_containerfile(replace(PLAN, port=9000))))
    assert "127.0.0.1:9000/health" in found["HEALTHCHECK"]
    assert '"--port", "9000"' in found["ENTRYPOINT"]


def lint(text: str) -> list[str]:
    """The rules that a linter finds broken."""
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("hadolint is not installed: make dev")
    words = [program, "--format", "json", "-"]
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60, check=False)
    return [finding["code"] for finding in json.loads(done.stdout)]


def test_a_linter_finds_nothing_to_say() -> None:
    for plan in (PLAN, replace(PLAN, bare=True, without_fork=True)):
        assert lint(render_containerfile(plan)) == []
    assert "DL3007" in lint(render_containerfile(replace(PLAN, base="python:latest")))


def test_a_recipe_with_a_fork_is_built_and_served_without_it() -> None:
    found = instructions(render_containerfile(replace(PLAN, without_fork=True)))
    assert any("--from-bundle /mnt/bundle.tar --without-fork --no-verify" in value for _, value in found)
    assert '"serve", "small", "--without-fork",' in dict(found)["ENTRYPOINT"]
    assert "--without-fork" not in render_containerfile(PLAN)


def test_the_command_that_builds_keeps_the_health_check() -> None:
    assert build_command("a b/Containerfile", "small", ".") == (
        "podman build --format docker -f 'a b/Containerfile' -t small ."
    )
