"""From an environment to a target, and from a report to what later commands read."""

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from provisioner.digests import digest_of, digest_to_record
from provisioner.documents.receipt import AppliedPatch, InstalledBuild, PatchedFile, Receipt
from provisioner.documents.recipe import parse_recipe
from provisioner.environment.site import Site, find_site
from provisioner.environment.state import objects_of, read_receipt, write_receipt
from provisioner.errors import UsageError
from provisioner.gpu.devices import read_inventory
from provisioner.gpu.model import Card
from provisioner.gpu.report import Change, Verdict, VerifyReport
from provisioner.gpu.runner import Limits
from provisioner.gpu.verify import Bench, Wish, report_not_run
from provisioner.pipeline import verification
from provisioner.pipeline.verification import (
    allocator_of,
    find_card,
    find_changes,
    read_summary,
    record_report,
    record_skip,
    verify_if_needed,
    verify_site,
)
from provisioner.progress import Silence
from provisioner.resources import recipes_folder
from tests.support.fake_nvml import FakeNvml, mixed_rig

KERNEL = "vllm/model_executor/layers/mamba/ops/causal_conv1d.py"
SHIPPED = b"SIDE = 'as shipped'\n"
PATCHED = b"SIDE = 'patched'\n"
FILES = {"vllm/__init__.py": b"", KERNEL: SHIPPED, "vllm/_C.abi3.so": b"\x7fELF not really"}
PATCH = AppliedPatch(
    id="pr50021-gdn-spec-bounds",
    source="0.27.patch",
    text="c" * 64,
    policy="required",
    verdict="applied",
    files=(PatchedFile(path=KERNEL, before=digest_of(SHIPPED), after=digest_of(PATCHED)),),
)
RECEIPT = Receipt(
    created="2026-11-30T12:00:00+00:00",
    tool="test",
    build=InstalledBuild(
        distribution="vllm", version="0.27.1", commit=None, variant=None, wheel=None, wheel_sha256=None
    ),
    patches=(PATCH,),
)
CHILD = """
import json, os, sys
request = json.loads(sys.stdin.readline())
say = lambda **values: print(json.dumps(values), flush=True)
for role in ("compiled", "fallback", "reference"):
    say(event="code", role=role, file=request.get(role, request["libraries"][0]), digest=role, device="cpu", origin="")
for stage in request["stages"]:
    say(event="stage", stage=stage["name"])
    say(event="result", case="allocator " + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "none"), outcome="agrees", why="")
    say(event="stage-end", stage=stage["name"], seconds=0.1)
say(event="done")
"""


def make_venv(folder: Path) -> Path:
    """A venv whose vllm is a few files with a true RECORD."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).parent}\nversion = {version}\n")
    site = folder / "lib" / f"python{version}" / "site-packages"
    for path, content in FILES.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
    info = site / "vllm-0.27.1.dist-info"
    info.mkdir()
    rows = [f"{path},{digest_to_record(digest_of(content))},{len(content)}" for path, content in FILES.items()]
    (info / "RECORD").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Site:
    found = find_site(make_venv(tmp_path / "venv"))
    write_receipt(found.state_dir, RECEIPT)
    (found.site_packages / KERNEL).write_bytes(PATCHED)
    objects_of(found.state_dir).put(SHIPPED)
    return found


@pytest.fixture
def card() -> Card:
    return read_inventory(FakeNvml()).cards[0]


def bench(tmp_path: Path) -> Bench:
    program = tmp_path / "child.py"
    program.write_text(CHILD)
    limits = Limits(start=60, silence=60, work=60, total=120)
    return Bench(
        device="cpu",
        program=program,
        probe=None,
        sources=lambda card: (),
        limits=limits,
        environment=dict(os.environ),
        settle_seconds=0,
    )


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the place of the patch's own check: says what lies in the two folders that it is given."""
    check = tmp_path / "check.py"
    check.write_text(
        "import json, sys\n"
        "from pathlib import Path\n"
        "folders = [Path(sys.argv[sys.argv.index(name) + 1]) for name in ('--pristine', '--patched')]\n"
        f"sides = [(folder / {KERNEL!r}).read_text() for folder in folders]\n"
        "print(json.dumps({'kernel': 'k', 'case': ' and '.join(sides), 'ok': True, 'detail': ''}))\n"
    )
    monkeypatch.setattr(verification, "_find_program", lambda patch_id: check)
    return check


def check(site: Site, card: Card, tmp_path: Path, allocator: str | None = None) -> VerifyReport:
    return verify_site(site, card, Wish(), allocator=allocator, reporter=Silence(), bench=bench(tmp_path))


def test_report_and_receipt_are_kept(site: Site, card: Card, tmp_path: Path, program: Path) -> None:
    report = check(site, card, tmp_path, allocator="expandable_segments:False")
    assert report.verdict is Verdict.BIT_EXACT, report.why
    summary = read_summary(site.state_dir)
    assert summary is not None
    assert (summary.verdict, summary.bound) == (Verdict.BIT_EXACT, report.bound)
    receipt = read_receipt(site.state_dir)
    assert receipt is not None
    assert receipt.verification is not None
    assert (receipt.verification["verdict"], receipt.verification["health"]) == ("bit-exact", "unobserved")
    assert replace(receipt, verification=None) == RECEIPT
    assert str(tmp_path) not in json.dumps(dict(receipt.verification))
    assert report.bound["patch pr50021-gdn-spec-bounds"] == "c" * 64
    assert report.bound["vllm"] == "0.27.1"
    assert report.bound["library"] == hashlib.sha256(FILES["vllm/_C.abi3.so"]).hexdigest()


def test_patched_kernels_are_compared_with_the_files_as_shipped(
    site: Site, card: Card, tmp_path: Path, program: Path
) -> None:
    (behaviour,) = check(site, card, tmp_path).behaviours
    (told,) = behaviour.checks
    assert told == f"k: {SHIPPED.decode()} and {PATCHED.decode()}"


def test_kernels_whose_pristine_files_are_gone_are_named_as_untested(
    site: Site, card: Card, tmp_path: Path, program: Path
) -> None:
    (objects_of(site.state_dir).folder / digest_of(SHIPPED)).unlink()
    report = check(site, card, tmp_path)
    assert report.behaviours == ()
    assert report.untested is not None
    assert "the kernels of pr50021-gdn-spec-bounds" in report.untested


def test_the_environments_own_fallback_is_the_one_compared(
    site: Site, card: Card, tmp_path: Path, program: Path
) -> None:
    own = check(site, card, tmp_path)
    assert {code.role: code.origin for code in own.codes}["fallback"].endswith("of this tool")
    (site.site_packages / verification.FALLBACK_MODULE).write_text("FALLBACK = True\n")
    theirs = check(site, card, tmp_path)
    assert {code.role: code.file for code in theirs.codes}["fallback"] == verification.FALLBACK_MODULE
    assert own.bound["fallback"] != theirs.bound["fallback"]


def test_what_has_changed_since(site: Site, card: Card, tmp_path: Path, program: Path) -> None:
    check(site, card, tmp_path)
    summary = read_summary(site.state_dir)
    assert summary is not None
    assert find_changes(site, summary, card=card, allocator=None) == ()
    assert find_changes(site, summary, card=None, allocator=None) == ()
    updated = replace(card, driver="611.00")
    assert find_changes(site, summary, card=updated, allocator="x:y") == (
        Change(what="allocator", then="default", now="x:y"),
        Change(what="driver", then="610.43.03", now="611.00"),
    )
    write_receipt(site.state_dir, replace(RECEIPT, patches=()))
    (change,) = find_changes(site, summary, card=card, allocator=None)
    assert (change.what, change.now) == ("patch pr50021-gdn-spec-bounds", None)


def test_provisioning_checks_once_and_again_when_something_changed(
    site: Site, tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml()
    monkeypatch.setattr(verification, "read_inventory", lambda: read_inventory(nvml))
    text = (recipes_folder() / "hynix-stable.toml").read_text()
    recipe = parse_recipe(text, name="hynix-stable", where="hynix-stable")

    def check_if_needed() -> VerifyReport | None:
        return verify_if_needed(site, recipe, gpu=None, environ={}, reporter=Silence(), bench=bench(tmp_path))

    first = check_if_needed()
    assert first is not None
    assert first.verdict is Verdict.BIT_EXACT
    assert first.bound["allocator"] == "expandable_segments:True"
    assert check_if_needed() is None
    nvml.driver = "611.00"
    assert check_if_needed() is not None
    nvml.cards.clear()
    assert check_if_needed() is None


def test_several_cards_are_a_warning_while_provisioning(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "read_inventory", lambda: read_inventory(mixed_rig()))
    text = (recipes_folder() / "samsung.toml").read_text()
    recipe = parse_recipe(text, name="samsung", where="samsung")
    warnings: list[str] = []

    class Warnings(Silence):
        def warn(self, text: str) -> None:
            warnings.append(text)

    assert verify_if_needed(site, recipe, gpu=None, environ={}, reporter=Warnings()) is None
    (warning,) = warnings
    assert warning.endswith("none is named; to check one of them: provision verify samsung --gpu UUID")
    with pytest.raises(UsageError):
        verify_if_needed(site, recipe, gpu="the big one", environ={}, reporter=Warnings())


def test_a_skipped_check_is_in_the_receipt_and_hides_no_former_one(
    site: Site, card: Card, tmp_path: Path, program: Path
) -> None:
    record_skip(site)
    receipt = read_receipt(site.state_dir)
    assert receipt is not None
    assert receipt.verification is not None
    assert (receipt.verification["verdict"], receipt.verification["why"]) == ("not-run", "skipped with --no-verify")
    check(site, card, tmp_path)
    record_skip(site)
    summary = read_summary(site.state_dir)
    assert summary is not None
    assert summary.verdict is Verdict.BIT_EXACT


def test_no_report_yet(site: Site) -> None:
    assert read_summary(site.state_dir) is None


def test_an_environment_without_a_receipt_keeps_the_report_alone(tmp_path: Path) -> None:
    site = find_site(make_venv(tmp_path / "venv"))
    record_report(site, report_not_run("why", tool="test"))
    summary = read_summary(site.state_dir)
    assert summary is not None
    assert summary.verdict is Verdict.NOT_RUN
    assert read_receipt(site.state_dir) is None


def test_a_card_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "read_inventory", lambda: read_inventory(FakeNvml(broken=True)))
    report = find_card(None, {})
    assert isinstance(report, VerifyReport)
    assert (report.verdict, report.verdict.exit_code) == (Verdict.NOT_RUN, 8)
    monkeypatch.setattr(verification, "read_inventory", lambda: read_inventory(mixed_rig()))
    with pytest.raises(UsageError):
        find_card(None, {})
    found = find_card("82:00", {})
    assert isinstance(found, Card)
    assert found.pci == "0000:82:00.0"


@pytest.mark.parametrize(
    ("name", "allocator"), [("samsung", "expandable_segments:False"), ("hynix-stable", "expandable_segments:True")]
)
def test_the_recipes_allocator_is_the_one_tested(name: str, allocator: str) -> None:
    text = (recipes_folder() / f"{name}.toml").read_text()
    assert allocator_of(parse_recipe(text, name=name, where=name)) == allocator
    assert allocator_of(None) is None
