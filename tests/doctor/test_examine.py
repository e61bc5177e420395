"""The whole examination: what is looked at, what is found, and the exit code."""

from http.server import BaseHTTPRequestHandler

import pytest

from provisioner.doctor.examine import Examination, Instruments, Target, diagnose
from provisioner.doctor.processes import Server
from provisioner.doctor.readers import LogFile, fetch_metrics
from provisioner.doctor.report import Diagnosis, Outcome
from provisioner.environment.state import write_receipt
from provisioner.gpu.devices import NoDriverError, read_inventory
from provisioner.gpu.health import Probe, ProbeVerdict
from provisioner.serve.cards import KernelLog
from tests.serve.test_readiness import recipe
from tests.support.environments import make_environment, make_receipt
from tests.support.fake_nvml import GIB, FakeCard, FakeNvml
from tests.support.http_server import ClosingServer

XID79 = "NVRM: Xid (PCI:0000:82:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
VERIFIED = {"verdict": "bit-exact", "health": "well", "bound": {}}
COLD = 'vllm:prefix_cache_queries_total{engine="0"} 90000.0\nvllm:prefix_cache_hits_total{engine="0"} 0.0\n'


def no_driver():
    raise NoDriverError("the NVIDIA driver is not there or does not start", hints=("nvidia-smi",))


def instruments(cards=None, *, kernel=(), verdict=ProbeVerdict.ANSWERS, servers=(), metrics=None) -> Instruments:
    return Instruments(
        inventory=no_driver if cards is None else lambda: read_inventory(FakeNvml(cards=list(cards))),
        kernel_log=lambda: KernelLog(lines=tuple(kernel), source="/dev/kmsg", why_not=""),
        probe=lambda _: Probe(verdict=verdict, steps=(), why="so", seconds=0.1),
        servers=lambda: tuple(servers),
        metrics=metrics or (lambda address, key: ""),
    )


@pytest.fixture
def healthy(tmp_path):
    venv = tmp_path / "venv"
    make_environment(venv)
    write_receipt(venv / ".provision", make_receipt(verification=VERIFIED))
    (tmp_path / "work").mkdir()
    return Examination(
        targets=(Target(venv=venv, recipe=recipe()),), environ={"PATH": f"{venv}/bin"}, cwd=tmp_path / "work"
    )


def look(examination, tools, **changes) -> Diagnosis:
    from dataclasses import replace

    return diagnose(replace(examination, **changes), tools)


def outcomes(diagnosis: Diagnosis) -> dict[str, Outcome]:
    return {check.id: check.outcome for check in diagnosis.checks}


def test_a_healthy_machine(healthy):
    diagnosis = look(healthy, instruments([FakeCard()]), probe=True)
    assert diagnosis.findings == ()
    assert diagnosis.exit_code == 0
    assert outcomes(diagnosis) == {
        "environment": Outcome.PASSED,
        "python": Outcome.PASSED,
        "imports": Outcome.PASSED,
        "cards": Outcome.PASSED,
        "kernel-log": Outcome.PASSED,
        "probe": Outcome.PASSED,
        "servers": Outcome.SKIPPED,
        "metrics": Outcome.SKIPPED,
    }


def test_without_a_card_nothing_is_called_passed(healthy):
    diagnosis = look(healthy, instruments(None))
    assert diagnosis.exit_code == 0
    assert outcomes(diagnosis)["cards"] is Outcome.SKIPPED
    probed = look(healthy, instruments(None), probe=True)
    assert probed.exit_code == 8
    assert outcomes(probed)["probe"] is Outcome.SKIPPED


@pytest.mark.parametrize(
    ("tools", "probe", "id_", "code"),
    [
        (instruments([FakeCard()], verdict=ProbeVerdict.WEDGED), True, "card-wedged", 8),
        (instruments([FakeCard()], kernel=[XID79]), False, "xid-79", 8),
        (instruments([FakeCard(), FakeCard(lost=True, uuid="GPU-2", bus="00000000:83:00.0")]), False, "card-lost", 8),
        (instruments([FakeCard(total=40 * GIB)]), False, "card-differs", 1),
        (instruments([FakeCard()], kernel=[XID79.replace("79", "31")]), False, "xid-31", 1),
    ],
)
def test_the_card(healthy, tools, probe, id_, code):
    diagnosis = look(healthy, tools, probe=probe)
    assert [finding.id for finding in diagnosis.findings] == [id_]
    assert diagnosis.exit_code == code


def test_a_mixed_rig_in_a_shell_without_an_order(healthy):
    rig = [FakeCard(), FakeCard(uuid="GPU-2", bus="00000000:01:00.0", name="RTX", device=0x220410DE, total=24 * GIB)]
    diagnosis = look(healthy, instruments(rig))
    assert [finding.id for finding in diagnosis.findings] == ["device-order"]


def test_an_environment_that_is_not_there(healthy, tmp_path):
    target = Target(venv=tmp_path / "none", recipe=recipe())
    diagnosis = look(healthy, instruments([FakeCard()]), targets=(target,))
    assert [finding.id for finding in diagnosis.findings] == ["environment-conflict"]
    assert outcomes(diagnosis)["imports"] is Outcome.SKIPPED
    assert diagnosis.exit_code == 1


def test_a_running_server_is_judged_and_asked(healthy, tmp_path):
    server = Server(
        pid=7,
        pids=(7,),
        program="/other/bin/vllm",
        arguments=("m", "--enable-prefix-caching", "--port", "8012"),
        environ={"VLLM_API_KEY": "k", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        cwd=tmp_path,
    )
    asked = []

    def metrics(address, key):
        asked.append((address, key))
        return COLD

    diagnosis = look(healthy, instruments([FakeCard()], servers=[server], metrics=metrics))
    assert asked == [("http://127.0.0.1:8012", "k")]
    assert [finding.id for finding in diagnosis.findings] == ["prefix-trio", "other-environment", "prefix-trio"]
    assert diagnosis.exit_code == 1


def test_a_log_is_read(healthy, tmp_path):
    log = tmp_path / "server.log"
    log.write_text("Model architectures ['Q'] failed to be inspected.\n")
    diagnosis = look(healthy, instruments([FakeCard()]), log=LogFile(path=log))
    assert [finding.id for finding in diagnosis.findings] == ["working-directory"]
    assert outcomes(look(healthy, instruments([FakeCard()]), log=LogFile(path=tmp_path)))["log"] is Outcome.SKIPPED


@pytest.mark.parametrize(
    ("text", "running", "outcome"),
    [
        (
            "(APIServer pid=7) INFO vLLM server version 0.32.0\nINFO:     Application startup complete.\n"
            "INFO:     Shutting down\n",
            (),
            Outcome.PASSED,
        ),
        ("(APIServer pid=7) INFO vLLM server version 0.32.0\n", (), Outcome.FOUND),
        ("(APIServer pid=7) INFO vLLM server version 0.32.0\n", (7,), Outcome.SKIPPED),
        ("nothing that a server writes\n", (), Outcome.SKIPPED),
    ],
)
def test_a_log_passes_only_where_a_server_was_ready(healthy, tmp_path, text, running, outcome):
    log = tmp_path / "server.log"
    log.write_text(text)
    servers = [
        Server(
            pid=pid,
            pids=(1234, pid),
            program=f"{healthy.targets[0].venv}/bin/vllm",
            arguments=("m",),
            environ=None,
            cwd=None,
        )
        for pid in running
    ]
    diagnosis = look(healthy, instruments([FakeCard()], servers=servers), log=LogFile(path=log))
    assert outcomes(diagnosis)["log"] is outcome


def test_metrics_over_http(healthy):
    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.headers["Authorization"] == "Bearer k" else 401)
            self.end_headers()
            self.wfile.write(COLD.replace("} 0.0", "} 30000.0").encode())

        def log_message(self, format, *args):  # noqa: A002
            pass

    server = ClosingServer(Page)
    server.start()
    try:
        environ = {**healthy.environ, "VLLM_API_KEY": "k"}
        diagnosis = look(
            healthy,
            instruments([FakeCard()], metrics=fetch_metrics),
            urls=(server.url, "http://127.0.0.1:1"),
            environ=environ,
        )
    finally:
        server.close()
    (check,) = [check for check in diagnosis.checks if check.id == "metrics"]
    assert check.outcome is Outcome.PASSED
    assert "33.3% of tokens found" in check.looked_at
    assert "http://127.0.0.1:1: /metrics gave no answer: <urlopen error" in check.looked_at
