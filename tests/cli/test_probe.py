"""``provision probe`` as a user runs it: options, output, exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.cli.main import main
from provisioner.cli.probe.options import parse_counts, read_key
from provisioner.cli.probe.tables import print_spread
from provisioner.errors import UsageError
from provisioner.probes.model import Spread
from provisioner.probes.record import read_run, to_json
from tests.support.openai_server import Behaviour, FakeServer, serve_in_thread
from tests.support.probe_runs import run_of

SMALL = ("--context", "200,400", "--repeats", "2")


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serve_in_thread(Behaviour(tokens_per_second=2000.0)) as server:
        yield server


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def test_all_probes_as_json(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "all", "--url", fake.url, *SMALL, "--streams", "1,2", "--tokens", "20", "--json"]) == 0
    out = capsys.readouterr().out
    run = read_run(out, where="stdout")
    assert [(str(point.probe), str(point.setting)) for point in run.points] == [
        ("decode", "200 context"),
        ("decode", "400 context"),
        *[
            ("cache-cliff", f"{context} context, sighting {sighting}")
            for context in (200, 400)
            for sighting in (1, 2, 3)
        ],
        *[
            ("grown-prefix", f"{context} context, {resends} re-sends")
            for context in (200, 400)
            for resends in (0, 1, 2)
        ],
        ("concurrency", "1K context, 1 stream"),
        ("concurrency", "1K context, 2 streams"),
    ]
    assert run.ended is None
    assert run.server.software == "vLLM 0.27.1"


def test_the_same_seed_sends_the_same_documents_and_no_seed_new_ones(fake: FakeServer) -> None:
    def contents(*more: str) -> list[str]:
        start = len(fake.chats)
        assert main(["probe", "cache-cliff", "--url", fake.url, *SMALL, *more]) == 0
        return [chat.json["messages"][0]["content"] for chat in fake.chats[start:]]

    first, again, other = contents("--seed", "5"), contents("--seed", "5"), contents()
    assert first == again
    assert not set(first) & set(other)


def test_the_table_shows_a_row_a_point_and_says_what_was_found(
    fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "cache-cliff", "--url", fake.url, *SMALL]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].split("  ")[0] == "CACHE-CLIFF"
    assert "prefix hits, share" in lines[0]
    assert lines[3].startswith("200 context, sighting 3")
    assert "400 context: first hit at sighting 3" in err
    assert "seed " in err


def test_a_plot_is_drawn(fake: FakeServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots are an optional extra: pip install 'provisioner[plot]'")
    path = tmp_path / "run.svg"
    assert main(["probe", "decode", "--url", fake.url, *SMALL, "--tokens", "20", "--plot", str(path)]) == 0
    assert "Decode against context" in path.read_text(encoding="utf-8")


def test_no_usage_says_so_and_stops(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_in_thread(Behaviour(sends_usage=False)) as fake:
        assert main(["probe", "decode", "--url", fake.url, *SMALL, "--json"]) == 4
    out, err = capsys.readouterr()
    assert json.loads(out)["code"] == "no-usage"
    assert "the server sends no usage" in err


def test_a_run_that_breaks_off_gives_what_was_measured_and_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    # The limit is hidden from the probe, as other servers hide theirs: the longer context is refused in mid-run.
    with serve_in_thread(Behaviour(refuses_above=300)) as fake:
        assert main(["probe", "cache-cliff", "--url", fake.url, *SMALL, "--json"]) == 4
    out, err = capsys.readouterr()
    run = read_run(out, where="stdout")
    assert [str(point.setting) for point in run.points] == [f"200 context, sighting {number}" for number in (1, 2, 3)]
    assert run.ended is not None
    assert "the server answered 400: too long" in run.ended
    assert "the server answered 400: too long" in err


def test_ctrl_c_gives_what_was_measured() -> None:
    with serve_in_thread(Behaviour(prefill_seconds_per_token=0.0005)) as fake:
        process = subprocess.Popen(
            (
                sys.executable,
                "-m",
                "provisioner",
                "probe",
                "cache-cliff",
                "--url",
                fake.url,
                "--context",
                "100,20K",
                "--repeats",
                "1",
                "--json",
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        # Two calibrations and the three sightings of the short document are done once the long one is there.
        deadline = time.monotonic() + 60
        while len(fake.chats) < 6 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    run = read_run(out, where="stdout")
    assert run.ended == "interrupted"
    assert [str(point.setting) for point in run.points] == [f"100 context, sighting {number}" for number in (1, 2, 3)]


def test_the_key_comes_from_the_file_or_the_environment_and_shows_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("sk-secret\n", encoding="utf-8")
    with serve_in_thread(Behaviour(api_key="sk-secret")) as fake:
        arguments = ["probe", "cache-cliff", "--url", fake.url, *SMALL, "--json"]
        assert main(arguments) == 4
        assert main([*arguments, "--key-file", str(tmp_path / "key")]) == 0
        monkeypatch.setenv("VLLM_API_KEY", "sk-secret")
        assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "sk-secret" not in out + err


def test_the_record_names_recipe_and_receipt(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from provisioner.documents.receipt import InstalledBuild, Receipt, print_receipt

    build = InstalledBuild(
        distribution="vllm", version="0.27.1", commit=None, variant=None, wheel=None, wheel_sha256=None
    )
    receipt = Receipt(created="2026-11-30T20:00:00Z", tool="0.1.0", build=build, patches=(), recipe="hynix-stable")
    (tmp_path / ".provision").mkdir()
    (tmp_path / ".provision" / "receipt.json").write_text(print_receipt(receipt), encoding="utf-8")
    assert main(["probe", "cache-cliff", "--url", fake.url, *SMALL, "--venv", str(tmp_path), "--json"]) == 0
    provenance = read_run(capsys.readouterr().out, where="stdout").provenance
    assert provenance.recipe == "hynix-stable"
    assert provenance.receipt_digest is not None
    assert len(provenance.receipt_digest) == 64


@pytest.mark.parametrize(
    "arguments",
    [
        ("decode", "--url", "nonsense"),
        ("decode", "--context", "6X"),
        ("decode", "--workload", "poems"),
        ("decode", "--method", "guess"),
        ("decode", "--extra", "[1]"),
        ("decode", "--extra", "{"),
        ("decode", "--plot", "run.pdf"),
        ("decode", "--key-file", "/nonexistent/key"),
        ("decode", "--repeats", "0"),
        ("compare", "/nonexistent/a", "/nonexistent/b"),
        ("booster-ab", "--via", "http://127.0.0.1:1", "--direct", "x"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    assert main(["probe", *arguments]) == 2


def test_booster_ab_wants_a_booster(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "booster-ab", "--direct", fake.url, "--via", fake.url, *SMALL]) == 2
    assert "no booster answers there" in capsys.readouterr().err


def test_compare_prints_ratios_and_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, run in (("a", run_of((60.0, 61.0))), ("b", run_of((66.0, 67.0), (5.0,)))):
        (tmp_path / name).write_text(json.dumps(to_json(run)), encoding="utf-8")
    assert main(["probe", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out, err = capsys.readouterr()
    assert [re.split("  +", line) for line in out.splitlines()] == [
        ["PROBE", "AT", "QUANTITY", "FIRST", "SECOND", "RATIO", "FINDING"],
        ["decode", "1K context", "decode, tok/s", "60.5 (60 to 61)", "66.5 (66 to 67)", "1.099", "better"],
        [
            "decode",
            "1K context",
            "first token, warm, s",
            "0.166 (0.164 to 0.167)",
            "0.15 (0.149 to 0.152)",
            "0.909",
            "better",
        ],
    ]
    assert "1 point is in the second run alone" in err
    assert main(["probe", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "provision/probe-compare/1"


def test_numbers_are_read_with_and_without_thousands() -> None:
    assert parse_counts("6K, 20480,1k", option="--context") == (6000, 20480, 1000)
    for text in ("6X", "-1", "0", "K", "1.5K", "٣"):
        with pytest.raises(UsageError):
            parse_counts(text, option="--context")


def test_an_empty_key_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(" \n", encoding="utf-8")
    with pytest.raises(UsageError, match="empty"):
        read_key(tmp_path / "key")


def test_a_spread_is_a_median_with_its_ends() -> None:
    assert print_spread(None) == "-"
    assert print_spread(Spread(values=(69.3,))) == "69.3"
    assert print_spread(Spread(values=(60.123, 61.0, 2750.4))) == "61 (60.1 to 2750)"


@pytest.mark.parametrize(
    "command", ["decode", "cache-cliff", "grown-prefix", "concurrency", "booster-ab", "all", "compare"]
)
def test_every_probe_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", command, "--help"]) == 0
    assert "Example:" in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from provisioner.cli.main import main; main(['probe', 'decode', '--help']); "
        "heavy = {'aiohttp', 'matplotlib', 'numpy', 'torch'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60, env=dict(os.environ))


@pytest.mark.parametrize("url", ["http://127.0.0.1:0", "http://127.0.0.1:99999", "http://127.0.0.1:x"])
def test_an_address_with_no_port_that_can_be_is_refused(url, capsys):
    assert main(["probe", "decode", "--url", url]) == 2
    assert main(["booster", "--upstream", url, "--port", "0"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--context", "--streams", "--stream-context"])
def test_a_list_without_a_number_is_refused(option, capsys):
    assert main(["probe", "all", option, ","]) == 2
    assert "no number at all" in capsys.readouterr().err
