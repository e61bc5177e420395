"""Probes and booster against a real vLLM server on the CPU (see tests/support/cpu_server.py)."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from provisioner.booster.proxy import BoosterSettings
from provisioner.booster.service import serve
from provisioner.cli.main import main
from provisioner.openai.conversation import Reply, ReplyReader
from provisioner.openai.prometheus import parse_samples
from provisioner.probes import model
from provisioner.probes.client import Endpoint, connect
from provisioner.probes.measure import Targets, run_probes
from provisioner.probes.model import Probe
from provisioner.probes.record import read_run
from tests.booster.test_proxy import read_stats, settle
from tests.support import cpu_server
from tests.support.probe_runs import Kept, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    environment = cpu_server.cpu_environment()
    with cpu_server.running_server(environment, tmp_path_factory.mktemp("server") / "log") as url:
        yield url


def chat(content: str, *, stream: bool, tokens: int = 16) -> dict[str, Any]:
    return {
        "model": cpu_server.MODEL_NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


def test_the_probes_measure_it(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", cpu_server.API_KEY)
    arguments = ["probe", "all", "--url", server, "--context", "600", "--repeats", "2", "--tokens", "32"]
    arguments += ["--streams", "1,2", "--stream-context", "200", "--extra", '{"ignore_eos": true}', "--json"]
    assert main(arguments) == 0
    run = read_run(capsys.readouterr().out, where="stdout")
    assert run.server.software == f"vLLM {cpu_server.VLLM}"
    assert run.server.max_model_len == cpu_server.MAX_MODEL_LEN
    assert run.server.has_counters
    decode = run.points[0]
    assert decode.find(model.DECODE_RATE) is not None
    completion, prompt = decode.find(model.COMPLETION_TOKENS), decode.find(model.PROMPT_TOKENS)
    assert completion is not None
    assert completion.values == (32, 32)
    assert prompt is not None
    assert prompt.median == pytest.approx(600, rel=0.01)
    # This cache registers a prefix at its first sighting.
    assert "600 context: first hit at sighting 2" in run.notes
    assert {point.probe for point in run.points} == set(Probe) - {Probe.BOOSTER_AB}


def test_counters_and_models_are_read(server: str) -> None:
    async def read() -> None:
        async with connect(Endpoint.parse(server, api_key=cpu_server.API_KEY)) as client:
            assert [one.name for one in await client.list_models()] == [cpu_server.MODEL_NAME]
            counters = await client.read_counters()
            assert counters is not None
            assert counters.prefix_queries is not None
            assert counters.prefix_hits is not None

    asyncio.run(read())


@pytest.mark.parametrize("stream", [True, False])
def test_the_booster_passes_the_same_answer_on_and_primes_the_next_turn(server: str, stream: bool) -> None:
    async def run() -> None:
        async with serve(BoosterSettings(upstream=server, threshold=500), port=0) as boosted:
            request = chat(f"{stream} Tell me about the harbour. " * 40, stream=stream)
            direct, via = await ask(server, request), await ask(boosted.url, request)
            assert message_of(via, stream=stream) == message_of(direct, stream=stream)
            await settle(boosted)
            boosts = (await read_stats(boosted))["boosts"]
            assert (boosts["completed"], boosts["failed"]) == (1, 0)

    asyncio.run(run())


async def ask(url: str, request: dict[str, Any]) -> bytes:
    headers = {"Authorization": f"Bearer {cpu_server.API_KEY}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{url}/v1/chat/completions", json=request) as answer,
    ):
        assert answer.status == 200
        return await answer.read()


def message_of(body: bytes, *, stream: bool) -> dict[str, Any]:
    reader = ReplyReader(streamed=stream)
    reader.feed(body)
    reply = reader.close()
    assert isinstance(reply, Reply)
    return reply.message


def test_second_turns_are_compared_by_both_routes(server: str) -> None:
    """This cache hits at the second sighting, and keeps replies: both routes must hit, and every turn is boosted."""
    kept = Kept()

    async def run() -> None:
        async with serve(BoosterSettings(upstream=server, threshold=500), port=0) as boosted:
            targets = Targets(server=key(server), booster=key(boosted.url))
            wanted = settings(Probe.BOOSTER_AB, contexts=(800,), repeats=2)
            await run_probes(targets, wanted, kept, extra={"ignore_eos": True})

    asyncio.run(run())
    direct, via = (point.find(model.PREFIX_HITS) for point in kept.points)
    assert direct is not None
    assert via is not None
    assert min(via.median, direct.median) > 0.5
    assert kept.notes == []


def key(url: str) -> Endpoint:
    return Endpoint.parse(url, api_key=cpu_server.API_KEY)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_through_the_booster_ends_the_work_in_the_server(server: str, stream: bool) -> None:
    async def run() -> None:
        async with serve(BoosterSettings(upstream=server), port=0) as boosted:
            task = asyncio.create_task(ask(boosted.url, chat("Go on and on.", stream=stream, tokens=4000)))
            await until(server, running=1)
            task.cancel()
            await until(server, running=0)
            assert (await read_stats(boosted))["requests"]["disconnected"] == 1

    asyncio.run(run())


def test_real_traffic_ends_a_boost_in_the_server(server: str) -> None:
    async def run() -> None:
        async with serve(BoosterSettings(upstream=server, threshold=500), port=0) as boosted:
            await ask(boosted.url, chat("A new and long document. " * 140, stream=False, tokens=1))
            await ask(boosted.url, chat("Short.", stream=False, tokens=1))
            await settle(boosted)
            await until(server, running=0)
            boosts = (await read_stats(boosted))["boosts"]
            assert boosts["cancelled"] + boosts["completed"] == 1

    asyncio.run(run())


async def until(server: str, *, running: int) -> None:
    """Until the server says that it works on so many requests."""
    async with asyncio.timeout(60):
        while await asyncio.to_thread(count_running, server) != running:
            await asyncio.sleep(0.05)


def count_running(server: str) -> float:
    samples = parse_samples(cpu_server.ask(server, "/metrics").decode())
    return sum(sample.value for sample in samples if sample.name == "vllm:num_requests_running")


def test_the_servers_refusals_come_through_the_booster(server: str) -> None:
    async def refusal(url: str) -> tuple[int, bytes]:
        request = {**chat("Short.", stream=True), "model": "none"}
        headers = {"Authorization": f"Bearer {cpu_server.API_KEY}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{url}/v1/chat/completions", json=request) as answer,
        ):
            return answer.status, await answer.read()

    async def run() -> None:
        async with serve(BoosterSettings(upstream=server), port=0) as boosted:
            status, body = await refusal(boosted.url)
            assert (status, body) == await refusal(server)
            assert status == 404
            assert b"does not exist" in body

    asyncio.run(run())


def test_a_wrong_key_is_told_by_the_probe(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-wrong")
    assert main(["probe", "decode", "--url", server, "--json"]) == 4
    assert "--key-file" in json.loads(capsys.readouterr().out)["hints"][0]
    assert os.environ["VLLM_API_KEY"] not in capsys.readouterr().err
