"""Runs the probes against a server. The order of requests is part of what is measured; read it here.

A document is never used for two measurements, so its first sighting is cold. Counters are read around each measurement,
not during it.
"""

import asyncio
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, assert_never

from provisioner.errors import NetworkError, ProvisionError, UsageError
from provisioner.serving.conversation import JsonObject
from provisioner.serving.probes import model
from provisioner.serving.probes.client import Endpoint, Exchange, ServerClient, connect
from provisioner.serving.probes.model import Measure, Method, Point, Probe, RunSettings, ServerFacts, Setting
from provisioner.serving.probes.workload import (
    Calibration,
    Corpus,
    Message,
    ask_about,
    ask_more,
    write_request,
)
from provisioner.serving.prometheus import ServerCounters

SIGHTINGS: Final = 3
RESENDS: Final = (0, 1, 2)
REPLY_TOKENS: Final = 128
WARM_UP_TOKENS: Final = 8
# The new text of a second turn, as a part of the first turn's context: 2K on 40K.
NEW_TEXT_PART: Final = 20
_CALIBRATION_WORDS: Final = (100, 400)
_BOOST_POLL_SECONDS: Final = 0.05

Exchanged = tuple[Exchange, ServerCounters | None]


class Watcher(Protocol):
    """Is told how a run goes on; nothing of the run depends on it."""

    def expect(self, requests: int) -> None: ...
    def begin(self, what: str) -> None: ...
    def advance(self) -> None: ...
    def take_server(self, facts: ServerFacts) -> None: ...
    def take_points(self, points: Sequence[Point]) -> None: ...
    def take_note(self, note: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The server to measure, the address of a booster in front of it (``booster-ab`` alone), and which model to ask."""

    server: Endpoint
    booster: Endpoint | None = None
    model: str | None = None


def count_requests(settings: RunSettings, probes: Sequence[Probe]) -> int:
    """Requests that a run of ``probes`` sends, calibration included, if no context is passed over."""
    return len(_CALIBRATION_WORDS) + sum(_count_for(probe, settings) for probe in probes)


def _count_for(probe: Probe, settings: RunSettings) -> int:
    places = len(settings.contexts) * settings.repeats
    match probe:
        case Probe.DECODE:
            return places * (2 if settings.method is Method.DIFFERENCE else 1) + len(settings.contexts) * _warm_ups(
                settings.method
            )
        case Probe.CACHE_CLIFF:
            return places * SIGHTINGS
        case Probe.GROWN_PREFIX:
            return places * sum(2 + resends for resends in RESENDS)
        case Probe.CONCURRENCY:
            return sum(settings.streams) * settings.repeats
        case Probe.BOOSTER_AB:
            return places * 4
        case _:
            assert_never(probe)


def _warm_ups(method: Method) -> int:
    """A difference of whole answers needs a prompt that is in the cache, which may take every sighting of the cliff."""
    return SIGHTINGS if method is Method.DIFFERENCE else 1


async def run_probes(targets: Targets, settings: RunSettings, watcher: Watcher, *, extra: JsonObject) -> None:
    """Measure everything that ``settings`` ask for, handing on each point as soon as it is known.

    Raises NetworkError, NoUsageError or UsageError; what was handed on before stays true.
    """
    watcher.expect(count_requests(settings, settings.probes))
    async with connect(targets.server) as client:
        facts = await _meet_server(client, targets.model)
        watcher.take_server(facts)
        bench = _Bench(client, facts, settings, watcher, extra)
        watcher.begin("counting tokens a word")
        await bench.calibrate()
        for probe in settings.probes:
            if probe is Probe.BOOSTER_AB:
                await _compare_routes(bench, targets.booster)
            else:
                await _run_probe(bench, probe)


async def _meet_server(client: ServerClient, wanted: str | None) -> ServerFacts:
    models = await client.list_models()
    chosen = next((one for one in models if one.name == wanted), None) if wanted else next(iter(models), None)
    if chosen is None:
        raise UsageError(
            "the server does not serve this model" if wanted else "the server serves no model",
            where=client.endpoint.base,
            expected=wanted,
            found=", ".join(one.name for one in models) or "none",
            hints=("name one of those with --model",) if models else (),
        )
    counters = await client.read_counters()
    version = await client.read_version()
    return ServerFacts(
        url=client.endpoint.base,
        model=chosen.name,
        software=None if version is None else f"vLLM {version}",
        max_model_len=chosen.max_model_len,
        has_counters=counters is not None and counters.prefix_queries is not None,
    )


class _Bench:
    """One run's means: documents nobody has seen, requests, and counters around them."""

    def __init__(
        self, client: ServerClient, facts: ServerFacts, settings: RunSettings, watcher: Watcher, extra: JsonObject
    ) -> None:
        self.client = client
        self.facts = facts
        self.settings = settings
        self.watcher = watcher
        self.extra = extra
        self._corpus = Corpus(seed=settings.seed)
        self._numbers = itertools.count(1)
        self._calibration = Calibration(fixed=0.0, per_word=1.5)

    async def calibrate(self) -> None:
        samples = []
        for words in _CALIBRATION_WORDS:
            document = self._corpus.write_document(next(self._numbers), words)
            exchange = await self.ask((ask_about(document, self.settings.workload),), WARM_UP_TOKENS)
            samples.append((len(document.split()), exchange.usage.prompt_tokens))
        self._calibration = Calibration.from_samples(*samples)

    def write_document(self, tokens: int) -> str:
        return self._corpus.write_document(next(self._numbers), self._calibration.words_for(tokens))

    def write_first_turn(self, tokens: int) -> Message:
        return ask_about(self.write_document(tokens), self.settings.workload)

    async def ask(self, messages: tuple[Message, ...], tokens: int, client: ServerClient | None = None) -> Exchange:
        request = write_request(
            self.facts.model, messages, tokens=tokens, temperature=self.settings.temperature, extra=self.extra
        )
        exchange = await (client or self.client).stream_chat(request)
        self.watcher.advance()
        return exchange

    async def ask_counted(
        self, messages: tuple[Message, ...], tokens: int, client: ServerClient | None = None
    ) -> Exchanged:
        """An exchange and what the server counted during it."""
        before = await self.read_counters()
        exchange = await self.ask(messages, tokens, client)
        return exchange, _difference(before, await self.read_counters())

    async def read_counters(self) -> ServerCounters | None:
        return await self.client.read_counters() if self.facts.has_counters else None

    def fitting_contexts(self, tokens_after: int) -> Iterator[int]:
        """Contexts that the model has room for; the others are noted."""
        limit = self.facts.max_model_len
        for context in self.settings.contexts:
            if limit is not None and context + tokens_after > limit:
                self.watcher.take_note(
                    f"{model.print_context(context)} context passed over: the server's limit is {limit} tokens"
                )
            else:
                yield context

    def note_short_answers(self, exchanges: Sequence[Exchange]) -> None:
        made = min(exchange.usage.completion_tokens for exchange in exchanges)
        wanted = self.settings.completion_tokens
        if made < wanted // 2:
            self.watcher.take_note(
                f"an answer ended after {made} of {wanted} tokens; a vLLM server goes on with "
                """--extra '{"ignore_eos": true}'"""
            )


def _difference(before: ServerCounters | None, after: ServerCounters | None) -> ServerCounters | None:
    return None if before is None or after is None else after.since(before)


async def _run_probe(
    bench: _Bench,
    probe: Literal[Probe.DECODE, Probe.CACHE_CLIFF, Probe.GROWN_PREFIX, Probe.CONCURRENCY],
) -> None:
    settings = bench.settings
    match probe:
        case Probe.DECODE:
            for context in bench.fitting_contexts(settings.completion_tokens):
                bench.watcher.begin(f"decode at {model.print_context(context)}")
                bench.watcher.take_points([await _measure_decode(bench, context)])
        case Probe.CACHE_CLIFF:
            for context in bench.fitting_contexts(1):
                bench.watcher.begin(f"cache cliff at {model.print_context(context)}")
                points = await _measure_cliff(bench, context)
                bench.watcher.take_points(points)
                bench.watcher.take_note(describe_cliff(context, points))
        case Probe.GROWN_PREFIX:
            for context in bench.fitting_contexts(REPLY_TOKENS + 1):
                bench.watcher.begin(f"grown prefix at {model.print_context(context)}")
                bench.watcher.take_points(await _measure_grown_prefix(bench, context))
        case Probe.CONCURRENCY:
            for streams in settings.streams:
                bench.watcher.begin(f"{streams} streams")
                bench.watcher.take_points([await _measure_streams(bench, streams)])
        case _:
            assert_never(probe)


async def _measure_decode(bench: _Bench, context: int) -> Point:
    settings = bench.settings
    prompt = (bench.write_first_turn(context),)
    cold = await bench.ask(prompt, WARM_UP_TOKENS)
    for _ in range(_warm_ups(settings.method) - 1):
        await bench.ask(prompt, WARM_UP_TOKENS)
    before = await bench.read_counters()
    exchanges, rates = [], []
    for _ in range(settings.repeats):
        short = await bench.ask(prompt, 1) if settings.method is Method.DIFFERENCE else None
        exchange = await bench.ask(prompt, settings.completion_tokens)
        exchanges.append(exchange)
        rates.append(exchange.decode_rate if short is None else _rate_between(short, exchange))
    counted = _difference(before, await bench.read_counters())
    bench.note_short_answers(exchanges)
    return Point(
        probe=Probe.DECODE,
        setting=Setting(context=context),
        measures=model.measures_of(
            (
                (model.DECODE_RATE, rates),
                (model.FIRST_TOKEN_COLD, (cold.first_token_seconds,)),
                (model.FIRST_TOKEN_WARM, (one.first_token_seconds for one in exchanges)),
                (model.PROMPT_TOKENS, (one.usage.prompt_tokens for one in exchanges)),
                (model.COMPLETION_TOKENS, (one.usage.completion_tokens for one in exchanges)),
                (model.TOKENS_PER_EVENT, (one.tokens_per_event for one in exchanges)),
            )
        )
        + _draft_measures(counted),
    )


def _rate_between(short: Exchange, long: Exchange) -> float | None:
    """Tokens a second of the tokens by which ``long`` exceeds ``short``, on the same warm prompt."""
    seconds = long.elapsed_seconds - short.elapsed_seconds
    tokens = long.usage.completion_tokens - short.usage.completion_tokens
    return tokens / seconds if seconds > 0 and tokens > 0 else None


def _draft_measures(counted: ServerCounters | None) -> tuple[Measure, ...]:
    if counted is None:
        return ()
    return model.measures_of(
        (
            (model.ACCEPTANCE, (counted.acceptance_share,)),
            (model.ACCEPTANCE_LENGTH, (counted.acceptance_length,)),
        )
    )


async def _measure_cliff(bench: _Bench, context: int) -> list[Point]:
    rows: list[list[Exchanged]] = []
    for _ in range(bench.settings.repeats):
        prompt = (bench.write_first_turn(context),)
        rows.append([await bench.ask_counted(prompt, 1) for _ in range(SIGHTINGS)])
    return [
        Point(
            probe=Probe.CACHE_CLIFF,
            setting=Setting(context=context, sighting=sighting),
            measures=_prefill_measures([row[sighting - 1] for row in rows], model.ELAPSED),
        )
        for sighting in range(1, SIGHTINGS + 1)
    ]


def _prefill_measures(exchanged: Sequence[Exchanged], time: model.Quantity) -> tuple[Measure, ...]:
    return model.measures_of(
        (
            (time, (one.first_token_seconds for one, _ in exchanged)),
            (model.PREFIX_HITS, (None if counted is None else counted.hit_share for _, counted in exchanged)),
            (model.PROMPT_TOKENS, (one.usage.prompt_tokens for one, _ in exchanged)),
        )
    )


def find_first_hit(points: Sequence[Point]) -> int | None:
    """The first sighting of a cliff's points that found most of its prompt cached; None if none did.

    The server's counters decide where there are any; else a sighting counts that took less than half of the first.
    """
    first = points[0].find(model.ELAPSED)
    for point in points:
        hits = point.find(model.PREFIX_HITS)
        elapsed = point.find(model.ELAPSED)
        if hits is not None:
            if hits.median > 0.5:
                return point.setting.sighting
        elif first is not None and elapsed is not None and elapsed.median < first.median / 2:
            return point.setting.sighting
    return None


def describe_cliff(context: int, points: Sequence[Point]) -> str:
    hit = find_first_hit(points)
    found = f"first hit at sighting {hit}" if hit is not None else f"no hit in {len(points)} sightings"
    return f"{model.print_context(context)} context: {found}"


async def _measure_grown_prefix(bench: _Bench, context: int) -> list[Point]:
    rows: dict[int, list[Exchanged]] = {resends: [] for resends in RESENDS}
    for _ in range(bench.settings.repeats):
        for resends, exchanged in rows.items():
            first = bench.write_first_turn(context)
            reply = await bench.ask((first,), REPLY_TOKENS)
            for _ in range(resends):
                await bench.ask((first,), 1)
            exchanged.append(await bench.ask_counted(_grow(bench, first, reply, context), 1))
    return [
        Point(
            probe=Probe.GROWN_PREFIX,
            setting=Setting(context=context, resends=resends),
            measures=_prefill_measures(exchanged, model.SECOND_TURN),
        )
        for resends, exchanged in rows.items()
    ]


def _grow(bench: _Bench, first: Message, reply: Exchange, context: int) -> tuple[Message, ...]:
    answer = Message(role="assistant", content=reply.message.get("content") or "")
    return first, answer, ask_more(bench.write_document(context // NEW_TEXT_PART))


async def _measure_streams(bench: _Bench, streams: int) -> Point:
    batches: list[list[Exchange]] = []
    before = await bench.read_counters()
    for _ in range(bench.settings.repeats):
        prompts = [bench.write_first_turn(bench.settings.stream_context) for _ in range(streams)]
        batches.append(await _ask_together(bench, prompts))
    counted = _difference(before, await bench.read_counters())
    bench.note_short_answers([one for batch in batches for one in batch])
    return Point(
        probe=Probe.CONCURRENCY,
        setting=Setting(context=bench.settings.stream_context, streams=streams),
        measures=model.measures_of(
            (
                (model.AGGREGATE_RATE, (_aggregate_rate(batch) for batch in batches)),
                (model.STREAM_RATE, (_median(one.decode_rate for one in batch) for batch in batches)),
                (model.FIRST_TOKEN, (_median(one.first_token_seconds for one in batch) for batch in batches)),
                (model.COMPLETION_TOKENS, (one.usage.completion_tokens for batch in batches for one in batch)),
            )
        )
        + _draft_measures(counted),
    )


async def _ask_together(bench: _Bench, prompts: Sequence[Message]) -> list[Exchange]:
    tasks: list[asyncio.Task[Exchange]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                tasks.append(group.create_task(bench.ask((prompt,), bench.settings.completion_tokens)))
    except* ProvisionError as failures:
        # One failure ends them all; the group around it says nothing that the first does not.
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _aggregate_rate(batch: Sequence[Exchange]) -> float | None:
    """All tokens over the time from the first request sent to the last answer's end."""
    seconds = max(one.ended for one in batch) - min(one.sent for one in batch)
    return sum(one.usage.completion_tokens for one in batch) / seconds if seconds > 0 else None


def _median(values: Iterator[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


async def _compare_routes(bench: _Bench, booster: Endpoint | None) -> None:
    if booster is None:
        raise UsageError(
            "booster-ab needs the address of a booster",
            hints=("provision probe booster-ab --direct http://127.0.0.1:8012 --via http://127.0.0.1:8013",),
        )
    async with connect(booster) as via:
        await _read_boosts(via)
        for context in bench.fitting_contexts(REPLY_TOKENS + context_growth(bench.settings.contexts)):
            bench.watcher.begin(f"booster at {model.print_context(context)}")
            bench.watcher.take_points(await _measure_routes(bench, via, context))


def context_growth(contexts: Sequence[int]) -> int:
    """Tokens that a second turn adds at most."""
    return max(contexts, default=0) // NEW_TEXT_PART


async def _measure_routes(bench: _Bench, via: ServerClient, context: int) -> list[Point]:
    rows: dict[Literal["direct", "via"], list[Exchanged]] = {"direct": [], "via": []}
    for repeat in range(bench.settings.repeats):
        # Who goes first alternates, so that a drift of the server's speed falls on both.
        for route in (("direct", "via"), ("via", "direct"))[repeat % 2]:
            client = via if route == "via" else bench.client
            first = bench.write_first_turn(context)
            before = await _read_boosts(via)
            reply = await bench.ask((first,), REPLY_TOKENS, client)
            if route == "via":
                await _await_boost(bench, via, before)
            rows[route].append(await bench.ask_counted(_grow(bench, first, reply, context), 1, client))
            await _await_idle(via)
    return [
        Point(
            probe=Probe.BOOSTER_AB,
            setting=Setting(context=context, route=route),
            measures=_prefill_measures(exchanged, model.SECOND_TURN),
        )
        for route, exchanged in rows.items()
    ]


@dataclass(frozen=True, kw_only=True)
class _Boosts:
    settled: int
    completed: int
    busy: bool


async def _read_boosts(via: ServerClient) -> _Boosts:
    match await via.read_booster():
        case {
            "boosts": {
                "completed": int(completed),
                "cancelled": int(cancelled),
                "failed": int(failed),
                "skipped": dict(skipped),
                "in_flight": bool(in_flight),
                "waiting": bool(waiting),
            }
        }:
            settled = completed + cancelled + failed + sum(skipped.values())
            return _Boosts(settled=settled, completed=completed, busy=in_flight or waiting)
        case _:
            raise UsageError(
                "no booster answers there",
                where=via.endpoint.base,
                hints=("start one with `provision booster --upstream URL --port 8013`",),
            )


async def _await_boost(bench: _Bench, via: ServerClient, before: _Boosts) -> None:
    """Wait until the turn that just ended has been boosted, or passed over, which is noted."""
    try:
        async with asyncio.timeout(via.endpoint.answer_seconds):
            while (now := await _read_boosts(via)).busy or now.settled == before.settled:
                await asyncio.sleep(_BOOST_POLL_SECONDS)
    except TimeoutError as error:
        raise NetworkError(
            f"the booster did not finish in {via.endpoint.answer_seconds:g} s", where=via.endpoint.base
        ) from error
    if now.completed == before.completed:
        bench.watcher.take_note("a turn was not boosted; /booster/stats of the booster says why")


async def _await_idle(via: ServerClient) -> None:
    """Let the boost of a second turn end (the next request would cancel it anyway, and its cost would not be seen)."""
    try:
        async with asyncio.timeout(via.endpoint.answer_seconds):
            while (await _read_boosts(via)).busy:
                await asyncio.sleep(_BOOST_POLL_SECONDS)
    except TimeoutError as error:
        raise NetworkError(
            f"the booster did not finish in {via.endpoint.answer_seconds:g} s", where=via.endpoint.base
        ) from error
