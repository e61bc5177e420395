"""Whole checks with real child processes and a real native library, on the CPU in the place of a card."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from provisioner.errors import UsageError
from provisioner.gpu.devices import read_inventory
from provisioner.gpu.health import KmsgSource
from provisioner.gpu.model import Card, Probe, ProbeVerdict
from provisioner.gpu.report import Form, Health, Verdict, VerifyReport
from provisioner.gpu.runner import Exited, Limits
from provisioner.gpu.selection import Case, Selection, select_cases
from provisioner.gpu.verify import (
    BehaviourCheck,
    Bench,
    FixedOccupancy,
    ShareOfFree,
    Target,
    Wish,
    default_occupancy,
    find_libraries,
    gather_facts,
    judge_behaviour,
    judge_end,
    parse_occupancy,
    read_stages,
    report_not_run,
    verify_card,
)
from provisioner.progress import Silence
from tests.gpu.conftest import GPU, MARLIN
from tests.gpu.op_library import NAME
from tests.support.fake_nvml import GIB, FakeCard, FakeNvml

MIB = 1 << 20
CARD = read_inventory(FakeNvml()).cards[0]
QUICK_LIMITS = Limits(start=100, silence=60, work=60, total=120)
XID = "3,1,1,-;NVRM: Xid (PCI:0000:82:00): 31, pid=7, name=python3, Ch 00000010\n"


def few_cases(selection: Selection) -> tuple[Case, ...]:
    """Two layouts and a misfit, whatever is asked: the op in C++ is slow, and starting torch is most of the time."""
    smoke = select_cases(Selection.SMOKE)
    return (smoke[0], smoke[3], smoke[-1])


@pytest.fixture(scope="module")
def site_packages(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch", reason="torch is not installed: the child cannot run")
    folder = tmp_path_factory.mktemp("site-packages")
    (folder / "vllm").mkdir()
    shutil.copy(library, folder / "vllm" / NAME)
    return folder


@pytest.fixture
def real_target(site_packages: Path) -> Target:
    """An environment whose op library is a real one."""
    return Target(python=Path(sys.executable), site_packages=site_packages, version="0.27.1", patches={"one": "a" * 64})


@pytest.fixture
def target(tmp_path: Path) -> Target:
    """An environment for children that only say what they are told; nothing has to be compiled for it."""
    site = tmp_path / "site-packages"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / NAME).write_bytes(b"not loaded")
    return Target(python=Path(sys.executable), site_packages=site, version="0.27.1")


def bench(**moods: str) -> Bench:
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", **moods}
    return Bench(
        device="cpu",
        probe=None,
        sources=lambda card: (),
        limits=QUICK_LIMITS,
        environment=environment,
        cases=few_cases,
        headroom=0,
        settle_seconds=0,
    )


PASSING = (
    '{"event": "stage", "stage": "low"}',
    '{"event": "result", "case": "x", "outcome": "agrees", "why": ""}',
    '{"event": "stage-end", "stage": "low", "seconds": 1}',
    *(
        '{"event": "code", "role": "ROLE", "file": "/x", "digest": "ROLE", "device": "cpu", "origin": ""}'.replace(
            "ROLE", role
        )
        for role in ("compiled", "fallback", "reference")
    ),
    '{"event": "done"}',
)
WISH = Wish(occupancy=FixedOccupancy(bytes=64 * MIB))


def check(target: Target, bench: Bench, wish: Wish = WISH, reporter: Any = None) -> VerifyReport:
    return verify_card(target, CARD, wish, tool="test", bench=bench, reporter=reporter)


def answering(card: Card) -> Probe:
    return Probe(verdict=ProbeVerdict.ANSWERS, steps=(), why="the card answers", seconds=0.1)


def test_a_pass_says_what_it_rests_on(real_target: Target, tmp_path: Path) -> None:
    kmsg = tmp_path / "kmsg"
    kmsg.touch()
    report = check(real_target, replace(bench(), probe=answering, sources=lambda card: (KmsgSource(kmsg),)))
    assert (report.verdict, report.health) == (Verdict.BIT_EXACT, Health.WELL), report.why
    assert [stage.name for stage in report.stages] == ["low", "loaded", "after"]
    assert all(stage.verdict is Verdict.BIT_EXACT and stage.agreed == 4 for stage in report.stages)
    assert all(stage.refused == 2 for stage in report.stages)
    loaded = report.stages[1].ballast
    assert loaded is not None
    assert (loaded.asked, loaded.filled, loaded.wrong) == (64 * MIB, 64 * MIB, 0)
    assert report.occupancy == 64 * MIB
    by_role = {code.role: code for code in report.codes}
    assert by_role["compiled"].file == f"vllm/{NAME}"
    assert by_role["fallback"].file == "repack.py"
    assert "of this tool" in by_role["fallback"].origin
    assert len({code.digest for code in report.codes}) == 3
    assert "Tensor perm" in report.schemas["gptq_marlin_repack"]
    assert report.bound["patch one"] == "a" * 64
    assert report.bound["library"] == by_role["compiled"].digest
    assert report.bound["card"] == CARD.uuid
    assert report.torch["version"].startswith("2.")


@pytest.mark.parametrize(
    ("schema", "verdict", "words"),
    [
        ("a8", Verdict.BIT_EXACT, "agree in"),
        ("perm,a8,strange", Verdict.UNSUPPORTED, "a schema that this check does not know"),
        ("none", Verdict.UNSUPPORTED, "does not register gptq_marlin_repack"),
    ],
)
def test_schemas(real_target: Target, schema: str, verdict: Verdict, words: str) -> None:
    report = check(real_target, bench(OP_SCHEMA=schema))
    assert report.verdict is verdict
    assert words in report.why
    assert report.verdict.exit_code == {Verdict.BIT_EXACT: 0, Verdict.UNSUPPORTED: 4}[verdict]


def test_a_crash_names_signal_and_case(real_target: Target) -> None:
    report = check(real_target, bench(OP_MOOD="crash"))
    assert (report.verdict, report.verdict.exit_code) == (Verdict.LOST, 8)
    assert "the process was ended by SIGSEGV in gptq-w4-a16-160x256" in report.why
    assert report.health is Health.UNOBSERVED


@pytest.mark.parametrize(
    ("kind", "verdict", "exit_code"),
    [
        ("card", Verdict.CARD_FAULT, 8),
        ("toolchain", Verdict.TOOLCHAIN, 4),
        ("unsupported", Verdict.UNSUPPORTED, 4),
        ("lost", Verdict.LOST, 8),
        ("memory", Verdict.NOT_RUN, 8),
        ("internal", Verdict.NOT_RUN, 8),
    ],
)
def test_what_a_child_gives_up_for(target: Target, tmp_path: Path, kind: str, verdict: Verdict, exit_code: int) -> None:
    failure = '{"event": "failure", "kind": "KIND", "why": "as it says"}'.replace("KIND", kind)
    program = script(tmp_path, PASSING[0], failure, ending="raise SystemExit(1)")
    report = check(target, replace(bench(), program=program))
    assert (report.verdict, report.verdict.exit_code) == (verdict, exit_code)
    assert report.why == "low: as it says"


def test_a_mismatch_keeps_going_and_counts(real_target: Target) -> None:
    # Each process makes 4 calls that answer in `low`; the fault begins in `loaded`.
    report = check(real_target, bench(OP_MOOD="wrong-word", OP_WHEN="6"))
    assert (report.verdict, report.verdict.exit_code) == (Verdict.MISMATCH, 1)
    assert [stage.verdict for stage in report.stages] == [Verdict.BIT_EXACT, Verdict.MISMATCH, Verdict.MISMATCH]
    difference = report.stages[1].failures[0].differences[0]
    assert (difference.words, difference.left, difference.right) == (1, "compiled", "fallback")


def test_a_native_hang_is_a_wedge_where_nobody_can_ask_the_card(real_target: Target) -> None:
    started = time.monotonic()
    report = check(real_target, replace(bench(OP_MOOD="hang"), limits=Limits(start=60, silence=3, work=3, total=90)))
    assert report.verdict is Verdict.WEDGED
    assert "hung in gptq-w4-a16-160x256" in report.why
    assert "a warm reboot" in report.why
    assert time.monotonic() - started < 90


def test_a_child_whose_parent_is_gone_leaves_the_card(real_target: Target) -> None:
    request = {
        "device": "cpu",
        "libraries": [str(real_target.site_packages / "vllm" / NAME)],
        "fallback": str(MARLIN / "repack.py"),
        "reference": str(MARLIN / "layout.py"),
        "stages": [{"name": "low", "cases": [asdict(few_cases(Selection.SMOKE)[0])], "sparse": True}],
    }
    child = subprocess.Popen(
        [sys.executable, "-I", str(GPU / "child.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OP_MOOD": "hang"},
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps(request) + "\n")
    child.stdin.close()
    for line in child.stdout:
        if '"progress"' in line:
            break
    child.stdout.close()
    assert child.wait(timeout=20) == 1


@pytest.mark.parametrize(
    ("after", "verdict", "words"),
    [
        (ProbeVerdict.ANSWERS, Verdict.LOST, "the card still answers other processes"),
        (ProbeVerdict.WEDGED, Verdict.WEDGED, "context creation failed"),
    ],
)
def test_the_probe_decides_what_a_hang_was(
    target: Target, tmp_path: Path, after: ProbeVerdict, verdict: Verdict, words: str
) -> None:
    program = tmp_path / "child.py"
    program.write_text(
        'import time\nprint(\'{"event": "stage", "stage": "low"}\', flush=True)\ntime.sleep(60)\n',
    )
    probes = iter([ProbeVerdict.ANSWERS, after])

    def probe(card: Card) -> Probe:
        return Probe(verdict=next(probes), steps=(), why="context creation failed", seconds=0.1)

    limits = Limits(start=20, silence=0.5, work=0.5, total=5)
    report = check(target, replace(bench(), program=program, probe=probe, limits=limits))
    assert report.verdict is verdict
    assert words in report.why
    assert len(report.probes) == 2


class KillAt(Silence):
    """Kills this process's children ``delay`` seconds after a stage begins."""

    def __init__(self, stage: str, delay: float) -> None:
        self._stage = stage
        self._delay = delay

    def stage(self, text: str) -> None:
        if text.startswith(self._stage):
            threading.Timer(self._delay, kill_children).start()


def kill_children() -> None:
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = status.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == os.getpid() and b"child.py" in (status.parent / "cmdline").read_bytes():
            os.kill(int(status.parent.name), signal.SIGKILL)


def test_kill_9_amid_real_work(real_target: Target) -> None:
    report = check(real_target, bench(), reporter=KillAt("compare: loaded", 0))
    assert report.verdict is Verdict.LOST
    assert "SIGKILL" in report.why
    assert [stage.verdict for stage in report.stages] == [Verdict.BIT_EXACT, Verdict.LOST]


@pytest.mark.parametrize(("stage", "done"), [("start", 0), ("compare: low", 1), ("compare: loaded", 2)])
def test_kill_9_at_each_stage(target: Target, tmp_path: Path, stage: str, done: int) -> None:
    pause = "import time\ntime.sleep(1)\n"
    said = (*PASSING[:3], '{"event": "stage", "stage": "loaded"}')
    lines = [f"{pause}print({line!r}, flush=True)\n" for line in said]
    program = tmp_path / "child.py"
    program.write_text("".join(lines) + "time.sleep(60)\n")
    report = check(target, replace(bench(), program=program), reporter=KillAt(stage, 0.5))
    assert report.verdict is Verdict.LOST
    assert "SIGKILL" in report.why
    assert len(report.stages) == done
    assert [found.verdict for found in report.stages[:-1]] == [Verdict.BIT_EXACT] * max(0, done - 1)


@pytest.mark.parametrize("outcome", ["agrees", "fails"])
def test_a_new_xid_outweighs_a_pass_and_a_mismatch(target: Target, tmp_path: Path, outcome: str) -> None:
    kmsg = tmp_path / "kmsg"
    kmsg.write_text(XID)  # an old one, which does not count

    class LogAt(Silence):
        def stage(self, text: str) -> None:
            if text == "compare: low":
                with kmsg.open("a") as stream:
                    stream.write(XID)

    program = script(tmp_path, *(line.replace("agrees", outcome) for line in PASSING))
    watched = replace(bench(), sources=lambda card: (KmsgSource(kmsg),), probe=answering, program=program)
    report = check(target, watched, reporter=LogAt())
    assert (report.verdict, report.health) == (Verdict.CARD_FAULT, Health.FAULT)
    assert [event.code for event in report.xids] == [31]
    assert "Xid 31" in report.why
    assert len(report.probes) == 2


def test_ballast_that_the_card_cannot_hold_is_not_a_pass(target: Target, tmp_path: Path) -> None:
    ballast = '{"event": "ballast", "asked": 100, "filled": 80, "used": 90, "free": 10}'
    program = script(tmp_path, PASSING[0], ballast, *PASSING[1:])
    report = check(target, replace(bench(), program=program))
    assert report.verdict is Verdict.NOT_RUN
    assert "--occupancy" in report.why


ECHO = """
import json, os, sys
request = json.loads(sys.stdin.readline())
say = lambda **values: print(json.dumps(values), flush=True)
for role in ("compiled", "fallback", "reference"):
    say(event="code", role=role, file="/x", digest=role, device="cpu", origin="")
for stage in request["stages"]:
    say(event="stage", stage=stage["name"])
    for case in stage.get("cases", ()):
        say(event="result", case=f"{case['name']} {os.getpid()}", outcome="fails", why="told")
    if "ballast" in stage:
        say(event="ballast", asked=100, filled=90, used=98, free=2)
        say(event="ballast-check", wrong=0, first=None)
    say(event="stage-end", stage=stage["name"], seconds=1)
say(event="done")
"""


def test_the_full_form_has_a_process_a_stage(target: Target, tmp_path: Path) -> None:
    program = tmp_path / "child.py"
    program.write_text(ECHO)
    full = replace(bench(), program=program, cases=select_cases)
    report = check(target, full, replace(WISH, form=Form.FULL, model=tmp_path))
    by_name = {stage.name: stage for stage in report.stages}
    assert list(by_name) == ["low", "loaded", "after", "large", "memory", "model"]
    processes = {failure.case.split()[-1] for stage in report.stages for failure in stage.failures}
    assert len(processes) == 4
    assert len(by_name["loaded"].failures) > len(by_name["low"].failures) > len(by_name["after"].failures)
    assert len(by_name["large"].failures) == 1
    assert by_name["memory"].verdict is Verdict.BIT_EXACT
    assert report.untested is not None
    assert "which driver, torch and others hold" in report.untested


def test_the_quick_form_has_one_process(target: Target, tmp_path: Path) -> None:
    program = tmp_path / "child.py"
    program.write_text(ECHO)
    report = check(target, replace(bench(), program=program))
    assert [stage.name for stage in report.stages] == ["low", "loaded", "after"]
    assert len({failure.case.split()[-1] for stage in report.stages for failure in stage.failures}) == 1


def script(folder: Path, *lines: str, ending: str = "") -> Path:
    """A child that only says ``lines``."""
    program = folder / "child.py"
    program.write_text("".join(f"print({line!r})\n" for line in lines) + ending)
    return program


def test_wrong_ballast_is_the_cards_fault_even_beside_a_mismatch(target: Target, tmp_path: Path) -> None:
    program = script(
        tmp_path,
        '{"event": "stage", "stage": "loaded"}',
        '{"event": "ballast", "asked": 10, "filled": 10, "used": 12, "free": 3}',
        '{"event": "result", "case": "x", "outcome": "fails", "why": "answers differ", "differences": []}',
        '{"event": "ballast-check", "wrong": 2, "first": "piece 7, word 1: wrote 00000001, read 00000000"}',
        '{"event": "stage-end", "stage": "loaded", "seconds": 1.5}',
        '{"event": "done"}',
    )
    report = check(target, replace(bench(), program=program))
    assert report.verdict is Verdict.CARD_FAULT
    assert "2 words of the ballast read back changed (piece 7, word 1" in report.why
    assert report.stages[0].failures[0].case == "x"


def test_one_program_under_two_names_is_no_proof(target: Target, tmp_path: Path) -> None:
    code = '{"event": "code", "role": "%s", "file": "/x/%s", "digest": "%s", "device": "cpu", "origin": ""}'
    said = [code % ("compiled", "a", "1"), code % ("fallback", "b", "1"), code % ("reference", "c", "2")]
    stage = [
        '{"event": "stage", "stage": "low"}',
        '{"event": "result", "case": "x", "outcome": "agrees", "why": ""}',
        '{"event": "stage-end", "stage": "low", "seconds": 1}',
        '{"event": "done"}',
    ]
    report = check(target, replace(bench(), program=script(tmp_path, *said, *stage)))
    assert report.verdict is Verdict.NOT_RUN
    assert "three different programs" in report.why


def test_another_card_than_the_chosen_one_is_no_pass(target: Target, tmp_path: Path) -> None:
    facts = '{"event": "torch", "facts": {"version": "2.13.0", "uuid": "UUID"}}'
    own = script(tmp_path, facts.replace("UUID", CARD.uuid.removeprefix("GPU-")), *PASSING)
    assert check(target, replace(bench(), program=own)).verdict is Verdict.BIT_EXACT
    other = script(tmp_path, facts.replace("UUID", "0" * 8), *PASSING)
    report = check(target, replace(bench(), program=other))
    assert report.verdict is Verdict.TOOLCHAIN
    assert "CUDA handed over card GPU-00000000" in report.why


def test_a_child_that_says_nothing(target: Target, tmp_path: Path) -> None:
    silent = script(tmp_path, ending="import sys; sys.stderr.write('boom\\n'); sys.exit(7)")
    report = check(target, replace(bench(), program=silent))
    assert report.verdict is Verdict.LOST
    assert "status 7" in report.why
    assert "boom" in report.why


def test_a_card_that_does_not_answer_is_left_alone(target: Target, tmp_path: Path) -> None:
    for found, verdict in (
        (ProbeVerdict.WEDGED, Verdict.WEDGED),
        (ProbeVerdict.LOST, Verdict.LOST),
        (ProbeVerdict.TOOLCHAIN, Verdict.TOOLCHAIN),
    ):

        def probe(card: Card, found: ProbeVerdict = found) -> Probe:
            return Probe(verdict=found, steps=(), why="as told", seconds=0.1)

        report = check(target, replace(bench(), probe=probe, program=tmp_path / "never-run"))
        assert (report.verdict, report.why, report.stages) == (verdict, "as told", ())


def test_an_environment_without_a_library(tmp_path: Path) -> None:
    empty = Target(python=Path(sys.executable), site_packages=tmp_path, version="1")
    assert check(empty, bench()).verdict is Verdict.UNSUPPORTED


def test_an_environment_whose_python_is_gone(target: Target) -> None:
    report = check(replace(target, python=Path("/nonexistent/python")), bench())
    assert report.verdict is Verdict.TOOLCHAIN


def test_no_card_is_not_a_pass() -> None:
    report = report_not_run("there is no card", tool="test")
    assert (report.verdict, report.verdict.exit_code, report.health) == (Verdict.NOT_RUN, 8, Health.UNOBSERVED)


# --- behaviour checks ---


def behaviour(tmp_path: Path, body: str) -> BehaviourCheck:
    program = tmp_path / "check.py"
    program.write_text(body)
    return BehaviourCheck(patch="pr1", program=program, pristine=tmp_path)


@pytest.mark.parametrize(
    ("body", "verdict", "words"),
    [
        ('print(\'{"kernel": "k", "case": "c", "ok": true, "detail": ""}\')', Verdict.BIT_EXACT, ""),
        (
            'print(\'{"kernel": "k", "case": "c", "ok": false, "detail": "state moved"}\'); raise SystemExit(1)',
            Verdict.MISMATCH,
            "k, c: state moved",
        ),
        ("import os; os.abort()", Verdict.LOST, "SIGABRT"),
        ("raise SystemExit('no triton')", Verdict.NOT_RUN, "no triton"),
        ("pass", Verdict.NOT_RUN, "did not run"),
    ],
)
def test_patched_kernels(target: Target, tmp_path: Path, body: str, verdict: Verdict, words: str) -> None:
    program = script(tmp_path, *PASSING)
    checked = replace(target, behaviours=(behaviour(tmp_path, body),))
    report = check(checked, replace(bench(), program=program))
    assert report.verdict is verdict
    assert report.behaviours[0].verdict is verdict
    assert words in report.why


def test_kernels_are_not_waited_for_where_the_repack_already_failed(target: Target, tmp_path: Path) -> None:
    failure = '{"event": "failure", "kind": "unsupported", "why": "as it says"}'
    program = script(tmp_path, PASSING[0], failure, ending="raise SystemExit(1)")
    checked = replace(target, behaviours=(behaviour(tmp_path, "import time; time.sleep(60)"),))
    started = time.monotonic()
    report = check(checked, replace(bench(), program=program))
    assert (report.verdict, report.behaviours) == (Verdict.UNSUPPORTED, ())
    assert time.monotonic() - started < 20


def test_a_behaviour_check_is_told_what_to_compare(target: Target, tmp_path: Path) -> None:
    body = (
        "import json, sys; print(json.dumps({'kernel': ' '.join(sys.argv[1:]), 'case': '', 'ok': True, 'detail': ''}))"
    )
    checked = replace(target, behaviours=(behaviour(tmp_path, body),))
    report = check(checked, replace(bench(), program=script(tmp_path, *PASSING)), replace(WISH, form=Form.FULL))
    (told,) = report.behaviours[0].checks
    assert told == f"--device cpu --pristine {tmp_path} --patched {target.site_packages}: "


def test_an_end_without_words_is_judged() -> None:
    assert judge_end((), Exited(code=0, stderr="")) == (
        Verdict.LOST,
        "the process ended with status 0 before torch was there: nothing on stderr",
    )
    assert judge_end(({"event": "done"},), Exited(code=0, stderr="")) is None
    assert judge_behaviour((), Exited(code=0, stderr=""))[0] is Verdict.NOT_RUN
    assert read_stages(()) == ()


# --- facts ---


def test_facts_follow_the_files(target: Target, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "vllm").mkdir(parents=True)
    library = site / "vllm" / "_C.abi3.so"
    library.write_bytes(b"one")
    (site / "torch").mkdir()
    (site / "torch" / "version.py").write_text("__version__ = '2.13.0+cu130'\n")
    moved = replace(target, site_packages=site, allocator="expandable_segments:False")
    facts = gather_facts(moved, CARD)
    assert facts["torch"] == "2.13.0+cu130"
    assert facts["allocator"] == "expandable_segments:False"
    assert (facts["driver"], facts["VBIOS"]) == ("610.43.03", "92.00.60.00.01")
    assert gather_facts(moved, CARD, known=facts) == facts
    library.write_bytes(b"two")
    assert gather_facts(moved, CARD, known=facts)["library"] != facts["library"]
    assert "card" not in gather_facts(moved, None)


def test_an_untouched_library_is_not_read_again(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = gather_facts(target, CARD)
    stamped = {**facts, "library": "remembered"}
    assert gather_facts(target, CARD, known=stamped)["library"] == "remembered"


def test_libraries_in_the_order_they_are_tried(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    for name in ("_Cx.so", "_C.abi3.so", NAME, "cumem_allocator.abi3.so"):
        (tmp_path / "vllm" / name).touch()
    assert [path.name for path in find_libraries(tmp_path)] == [NAME, "_C.abi3.so", "_Cx.so"]


@pytest.mark.parametrize(
    ("text", "occupancy"),
    [
        ("27GiB", FixedOccupancy(bytes=27 * GIB)),
        ("38 GB", FixedOccupancy(bytes=38 * 10**9)),
        ("512MiB", FixedOccupancy(bytes=512 * MIB)),
        ("95%", ShareOfFree(share=0.95)),
    ],
)
def test_occupancies(text: str, occupancy: FixedOccupancy | ShareOfFree) -> None:
    assert parse_occupancy(text) == occupancy


@pytest.mark.parametrize("text", ["", "27", "-1GiB", "0%", "101%", "lots"])
def test_no_occupancy(text: str) -> None:
    with pytest.raises(UsageError):
        parse_occupancy(text)


def test_the_default_occupancy_is_productions_where_it_fits() -> None:
    assert default_occupancy(CARD) == FixedOccupancy(bytes=27 * GIB)
    small = read_inventory(FakeNvml(cards=[FakeCard(total=24 * GIB, free=23 * GIB)])).cards[0]
    assert default_occupancy(small) == ShareOfFree(share=0.75)
