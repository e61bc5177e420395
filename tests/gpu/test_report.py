"""Reports as data, JSON and Markdown, and what has changed since one was made."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.errors import InvalidReceiptError
from provisioner.gpu.devices import read_inventory
from provisioner.gpu.report import (
    Ballast,
    CaseFailure,
    Change,
    Code,
    Difference,
    Form,
    Health,
    Layers,
    PatchBehaviour,
    StageReport,
    Verdict,
    VerifyReport,
    changes_since,
    describe,
    gravest,
    parse_summary,
    print_markdown,
    print_report,
    summarize,
)
from provisioner.gpu.xid import XidEvent
from tests.support.fake_nvml import GIB, FakeNvml

DIFFERENCE = Difference(
    left="compiled",
    right="fallback",
    words=3,
    total=2048,
    row=3,
    column=511,
    left_value="0000000f",
    right_value="4000000f",
)
LOADED = StageReport(
    name="loaded",
    verdict=Verdict.MISMATCH,
    why="1 case does not hold",
    seconds=3.25,
    agreed=40,
    refused=11,
    failures=(CaseFailure(case="gptq-w8-a16-64x128", why="answers differ", differences=(DIFFERENCE,)),),
    ballast=Ballast(asked=27 * GIB, filled=27 * GIB, used=28 * GIB, free=36 * GIB, wrong=0, first_wrong=None),
)
REPORT = VerifyReport(
    created="2026-11-30T12:00:00+00:00",
    tool="provision 0.1.0",
    form=Form.FULL,
    verdict=Verdict.CARD_FAULT,
    why="Xid 31 on this card",
    health=Health.FAULT,
    bound={"card": "GPU-1", "driver": "610.43.03", "library": "ab", "patch one": "cd"},
    seconds=100.5,
    card=read_inventory(FakeNvml()).cards[0],
    codes=(Code(role="compiled", file="vllm/_C.abi3.so", digest="ab", device="cuda", origin="as shipped"),),
    stages=(LOADED,),
    behaviours=(PatchBehaviour(patch="pr50021", verdict=Verdict.BIT_EXACT, why="80 cases", checks={"a: b": "ok"}),),
    layers=Layers(folder="/m", method="gptq, 8 bits", layers=64, skipped=1, bytes=GIB, seconds=2.0),
    xids=(XidEvent(pci="0000:82:00.0", code=31, text="NVRM: Xid (PCI:0000:82:00): 31, pid=1"),),
    xid_sources=("kernel log (/dev/kmsg)",),
    untested="1 GiB",
)


KEYS = """
    schema created tool form verdict why health bound seconds card torch schemas codes stages behaviours layers xids
    xids_elsewhere xid_sources xid_unreadable probes untested occupancy exit
"""
NO_REPORTS = ("", "[]", "{}", '{"schema": "provision/verify/2"}', '{"schema": "provision/verify/1"}')


def test_exit_codes_are_the_documented_table() -> None:
    assert {str(verdict): verdict.exit_code for verdict in Verdict} == {
        "bit-exact": 0,
        "mismatch": 1,
        "card-fault": 8,
        "wedged": 8,
        "lost": 8,
        "not-run": 8,
        "toolchain": 4,
        "unsupported": 4,
    }


def test_nothing_is_not_a_pass() -> None:
    assert gravest(()) is Verdict.NOT_RUN


@given(st.lists(st.sampled_from(Verdict), min_size=1))
def test_a_pass_needs_only_passes(verdicts: list[Verdict]) -> None:
    assert (gravest(verdicts) is Verdict.BIT_EXACT) == (set(verdicts) == {Verdict.BIT_EXACT})
    assert gravest(verdicts) in verdicts


def test_a_summary_is_read_back() -> None:
    summary = parse_summary(print_report(REPORT), where="verify.json")
    assert (summary.verdict, summary.health, summary.form) == (Verdict.CARD_FAULT, Health.FAULT, Form.FULL)
    assert summary.bound == REPORT.bound


def test_json_keys_are_a_contract() -> None:
    values = json.loads(print_report(REPORT))
    assert values["schema"] == "provision/verify/1"
    assert (values["exit"], values["occupancy"]) == (8, 28 * GIB)
    assert sorted(values) == sorted(KEYS.split())
    difference = values["stages"][0]["failures"][0]["differences"][0]
    assert difference == {
        "left": "compiled",
        "right": "fallback",
        "words": 3,
        "total": 2048,
        "row": 3,
        "column": 511,
        "left_value": "0000000f",
        "right_value": "4000000f",
    }


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": "provision/verify/2"}', '{"schema": "provision/verify/1"}']
)
def test_what_is_no_report(text: str) -> None:
    with pytest.raises(InvalidReceiptError) as caught:
        parse_summary(text, where="verify.json")
    assert caught.value.where == "verify.json"


def test_the_receipts_part_is_short_and_plain() -> None:
    summary = summarize(REPORT)
    assert json.loads(json.dumps(summary)) == summary
    assert (summary["verdict"], summary["occupancy"]) == ("card-fault", 28 * GIB)
    assert "/m" not in json.dumps(summary)


def test_what_has_changed_since() -> None:
    now = {"card": "GPU-1", "driver": "611.00", "patch two": "ef"}
    assert changes_since(REPORT.bound, now) == (
        Change(what="driver", then="610.43.03", now="611.00"),
        Change(what="patch one", then="cd", now=None),
        Change(what="patch two", then=None, now="ef"),
    )
    assert changes_since(REPORT.bound, REPORT.bound) == ()


def test_lines_for_a_terminal() -> None:
    assert describe(REPORT) == (
        "card-fault: Xid 31 on this card",
        "card: NVIDIA CMP 170HX, 64.0 GiB, 0000:82:00.0, GPU-11111111-aaaa-bbbb-cccc-000000000001, driver 610.43.03",
        "loaded: mismatch: 1 case does not hold (40 cases agree, 11 refused alike with 28.0 GiB in use, 3.2 s)",
        "patch pr50021: bit-exact: 80 cases",
        "weights: 64 layers (gptq, 8 bits, 1.00 GiB, 0.54 GB/s), 1 of a shape that no Marlin kernel takes",
        "Xid 31: memory page fault on the card; trust this, not the Python trace; on sm80 apply sm80-cpu-repack and "
        "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False",
        "health: fault: Xid 31 (kernel log (/dev/kmsg))",
        "not tested: 1 GiB",
    )


def test_health_without_a_source_is_said() -> None:
    blind = replace(REPORT, health=Health.UNOBSERVED, xids=(), xid_sources=(), xid_unreadable=("/dev/kmsg: no",))
    assert "health: unobserved: no source of Xids could be read (/dev/kmsg: no)" in describe(blind)


def test_markdown_has_what_makes_reports_comparable() -> None:
    text = print_markdown(REPORT)
    for words in (
        "# card-fault: Xid 31 on this card",
        "| driver | 610.43.03 |",
        "| VBIOS | 92.00.60.00.01 |",
        "| PCIe link | gen 1 x4 (at most gen 4 x16) |",
        "| power cap | 250 W |",
        "| ECC | on |",
        "compiled and fallback differ in 3 of 2048 words, first at row 3, column 511: 0000000f and 4000000f",
        "`NVRM: Xid (PCI:0000:82:00): 31, pid=1`",
    ):
        assert words in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(row.endswith("|") for row in rows)


def test_markdown_cells_stay_cells() -> None:
    text = print_markdown(replace(REPORT, bound={"a|b": "one\ntwo"}))
    assert "| a\\|b | one two |" in text
