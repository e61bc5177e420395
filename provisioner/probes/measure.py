"""Runs the probes against a server. The order of requests is part of what is measured; read it here.

A document is never used for two measurements, so its first sighting is cold. Counters are read around a measurement,
not during it. Every probe hands on its points also where it ends early, from the repeats that were whole by then.
"""

import asyncio
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, assert_never

from provisioner.counts import count_text
from provisioner.errors import NetworkError, ProvisionError, UsageError
from provisioner.openai.conversation import JsonObject
from provisioner.openai.prometheus import ServerCounters
from provisioner.probes import model
from provisioner.probes.bench import (
    CALIBRATION_CHARACTERS,
    NEW_TEXT_PART,
    WARM_UP_TOKENS,
    Bench,
    Exchanged,
    Watcher,
    count_between,
    meet_server,
)
from provisioner.probes.client import Endpoint, Exchange, ServerClient, connect
from provisioner.probes.model import Measure, Method, Point, Probe, RunSettings, Setting
from provisioner.probes.workload import Message

SIGHTINGS: Final = 3
RESENDS: Final = (0, 1, 2)
REPLY_TOKENS: Final = 128
# A boost takes from a moment to minutes; the questions about it must not be traffic of their own.
_FIRST_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The server to measure, the address of a booster in front of it (``booster-ab`` alone), and which model to ask."""

    server: Endpoint
    booster: Endpoint | None = None
    model: str | None = None


def count_requests(settings: RunSettings) -> int:
    """Requests that a run sends, calibration included, if no context is passed over."""
    return len(CALIBRATION_CHARACTERS) + sum(_count_for(probe, settings) for probe in settings.probes)


def _count_for(probe: Probe, settings: RunSettings) -> int:
    contexts = len(settings.contexts)
    match probe:
        case Probe.DECODE:
            asks = 2 if settings.method is Method.DIFFERENCE else 1
            return contexts * (_warm_ups(settings.method) + settings.repeats * asks)
        case Probe.CACHE_CLIFF:
            return contexts * settings.repeats * SIGHTINGS
        case Probe.GROWN_PREFIX:
            return contexts * settings.repeats * sum(2 + resends for resends in RESENDS)
        case Probe.CONCURRENCY:
            return sum(settings.streams) * settings.repeats
        case Probe.BOOSTER_AB:
            return contexts * settings.repeats * 4
        case _:
            assert_never(probe)


def _warm_ups(method: Method) -> int:
    """A difference of whole answers needs a prompt that is in the cache, which may take every sighting of the cliff."""
    return SIGHTINGS if method is Method.DIFFERENCE else 1


async def run_probes(targets: Targets, settings: RunSettings, watcher: Watcher, *, extra: JsonObject) -> None:
    """Measure everything that ``settings`` ask for, handing on each point as soon as it is known.

    Raises NetworkError, NoUsageError or UsageError; what was handed on before stays true.
    """
    watcher.expect(count_requests(settings))
    async with connect(targets.server) as client:
        facts = await meet_server(client, targets.model)
        watcher.take_server(facts)
        bench = Bench(client, facts, settings, watcher, extra)
        watcher.begin("counting tokens a character")
        await bench.calibrate()
        for probe in settings.probes:
            await _run_probe(bench, probe, targets)


async def _run_probe(bench: Bench, probe: Probe, targets: Targets) -> None:
    match probe:
        case Probe.DECODE:
            for context in bench.fitting_contexts(bench.settings.completion_tokens):
                bench.watcher.begin(f"decode at {model.print_context(context)}")
                await _measure_decode(bench, context)
        case Probe.CACHE_CLIFF:
            for context in bench.fitting_contexts(1):
                bench.watcher.begin(f"cache cliff at {model.print_context(context)}")
                await _measure_cliff(bench, context)
        case Probe.GROWN_PREFIX:
            for context in bench.fitting_contexts(_second_turn_tokens(bench.settings)):
                bench.watcher.begin(f"grown prefix at {model.print_context(context)}")
                await _measure_grown_prefix(bench, context)
        case Probe.CONCURRENCY:
            for streams in bench.settings.streams:
                bench.watcher.begin(count_text(streams, "stream"))
                await _measure_streams(bench, streams)
        case Probe.BOOSTER_AB:
            await _compare_routes(bench, targets.booster)
        case _:
            assert_never(probe)


def _second_turn_tokens(settings: RunSettings) -> int:
    """Tokens by which a second turn exceeds its context, at most."""
    return REPLY_TOKENS + max(settings.contexts, default=0) // NEW_TEXT_PART


async def _measure_decode(bench: Bench, context: int) -> None:
    settings = bench.settings
    prompt = (await bench.write_first_turn(context),)
    cold = await bench.ask(prompt, WARM_UP_TOKENS)
    for _ in range(_warm_ups(settings.method) - 1):
        await bench.ask(prompt, WARM_UP_TOKENS)
    before = await bench.read_counters()
    exchanges: list[Exchange] = []
    rates: list[float | None] = []
    counted: ServerCounters | None = None
    try:
        for _ in range(settings.repeats):
            short = await bench.ask(prompt, 1) if settings.method is Method.DIFFERENCE else None
            exchange = await bench.ask(prompt, settings.completion_tokens)
            rates.append(exchange.decode_rate if short is None else _rate_between(short, exchange))
            exchanges.append(exchange)
        counted = count_between(before, await bench.read_counters())
    finally:
        bench.take_point(Probe.DECODE, Setting(context=context), _decode_measures(cold, exchanges, rates, counted))
    bench.note_short_answers(exchanges)


def _decode_measures(
    cold: Exchange, exchanges: Sequence[Exchange], rates: Sequence[float | None], counted: ServerCounters | None
) -> tuple[Measure, ...]:
    return model.measures_of(
        (
            (model.DECODE_RATE, rates),
            (model.FIRST_TOKEN_COLD, (cold.first_token_seconds,)),
            (model.FIRST_TOKEN_WARM, (one.first_token_seconds for one in exchanges)),
            (model.PROMPT_TOKENS, (one.usage.prompt_tokens for one in (cold, *exchanges))),
            (model.COMPLETION_TOKENS, (one.usage.completion_tokens for one in exchanges)),
            (model.TOKENS_PER_EVENT, (one.tokens_per_event for one in exchanges)),
        )
    ) + _draft_measures(counted)


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


def _prefill_measures(exchanged: Iterable[Exchanged], time: model.Quantity) -> tuple[Measure, ...]:
    """Measures of requests for one token: their time is the prefill's."""
    pairs = list(exchanged)
    return model.measures_of(
        (
            (time, (one.first_token_seconds for one, _ in pairs)),
            (model.PREFIX_HITS, (None if counted is None else counted.hit_share for _, counted in pairs)),
            (model.PROMPT_TOKENS, (one.usage.prompt_tokens for one, _ in pairs)),
        )
    )


async def _measure_cliff(bench: Bench, context: int) -> None:
    rows: list[list[Exchanged]] = []
    points: list[Point] = []
    try:
        for _ in range(bench.settings.repeats):
            prompt = (await bench.write_first_turn(context),)
            rows.append([await bench.ask_counted(prompt, 1) for _ in range(SIGHTINGS)])
    finally:
        for index in range(SIGHTINGS):
            measures = _prefill_measures((row[index] for row in rows), model.ELAPSED)
            points += bench.take_point(Probe.CACHE_CLIFF, Setting(context=context, sighting=index + 1), measures)
    bench.watcher.take_note(describe_cliff(context, points))


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
    """The finding in a line."""
    hit = find_first_hit(points)
    found = f"first hit at sighting {hit}" if hit is not None else f"no hit in {count_text(len(points), 'sighting')}"
    return f"{model.print_context(context)} context: {found}"


async def _measure_grown_prefix(bench: Bench, context: int) -> None:
    rows: dict[int, list[Exchanged]] = {resends: [] for resends in RESENDS}
    try:
        for _ in range(bench.settings.repeats):
            for resends, exchanged in rows.items():
                first = await bench.write_first_turn(context)
                reply = await bench.ask((first,), REPLY_TOKENS)
                for _ in range(resends):
                    await bench.ask((first,), 1)
                exchanged.append(await bench.ask_counted(bench.grow(first, reply, context), 1))
    finally:
        for resends, exchanged in rows.items():
            setting = Setting(context=context, resends=resends)
            bench.take_point(Probe.GROWN_PREFIX, setting, _prefill_measures(exchanged, model.SECOND_TURN))


async def _measure_streams(bench: Bench, streams: int) -> None:
    context = bench.settings.stream_context
    batches: list[list[Exchange]] = []
    counted: ServerCounters | None = None
    before = await bench.read_counters()
    try:
        for _ in range(bench.settings.repeats):
            batches.append(await _ask_together(bench, [await bench.write_first_turn(context) for _ in range(streams)]))
        counted = count_between(before, await bench.read_counters())
    finally:
        setting = Setting(context=context, streams=streams)
        bench.take_point(Probe.CONCURRENCY, setting, _stream_measures(batches) + _draft_measures(counted))
    bench.note_short_answers([one for batch in batches for one in batch])


async def _ask_together(bench: Bench, prompts: Sequence[Message]) -> list[Exchange]:
    tasks: list[asyncio.Task[Exchange]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                tasks.append(group.create_task(bench.ask((prompt,), bench.settings.completion_tokens)))
    except* ProvisionError as failures:
        # One failure ends them all; the group around it says nothing that the first does not.
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _stream_measures(batches: Sequence[Sequence[Exchange]]) -> tuple[Measure, ...]:
    return model.measures_of(
        (
            (model.AGGREGATE_RATE, (_aggregate_rate(batch) for batch in batches)),
            (model.STREAM_RATE, (_median(one.decode_rate for one in batch) for batch in batches)),
            (model.FIRST_TOKEN, (_median(one.first_token_seconds for one in batch) for batch in batches)),
            (model.COMPLETION_TOKENS, (one.usage.completion_tokens for batch in batches for one in batch)),
        )
    )


def _aggregate_rate(batch: Sequence[Exchange]) -> float | None:
    """All tokens over the time from the first request sent to the last answer's end."""
    seconds = max(one.ended for one in batch) - min(one.sent for one in batch)
    return sum(one.usage.completion_tokens for one in batch) / seconds if seconds > 0 else None


def _median(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


async def _compare_routes(bench: Bench, booster: Endpoint | None) -> None:
    if booster is None:
        raise UsageError(
            "booster-ab needs the address of a booster",
            hints=("provision probe booster-ab --direct http://127.0.0.1:8012 --via http://127.0.0.1:8013",),
        )
    async with connect(booster) as via:
        await _read_boosts(via)
        for context in bench.fitting_contexts(_second_turn_tokens(bench.settings)):
            bench.watcher.begin(f"booster at {model.print_context(context)}")
            await _measure_routes(bench, via, context)


async def _measure_routes(bench: Bench, via: ServerClient, context: int) -> None:
    rows: dict[Literal["direct", "via"], list[Exchanged]] = {"direct": [], "via": []}
    try:
        for repeat in range(bench.settings.repeats):
            # Who goes first alternates, so that a drift of the server's speed falls on both.
            for route in (("direct", "via"), ("via", "direct"))[repeat % 2]:
                rows[route].append(await _take_turns(bench, via, context, route))
    finally:
        for route, exchanged in rows.items():
            setting = Setting(context=context, route=route)
            bench.take_point(Probe.BOOSTER_AB, setting, _prefill_measures(exchanged, model.SECOND_TURN))


async def _take_turns(bench: Bench, via: ServerClient, context: int, route: Literal["direct", "via"]) -> Exchanged:
    """A conversation of two turns by one route; the second is what is measured."""
    client = via if route == "via" else bench.client
    first = await bench.write_first_turn(context)
    before = await _read_boosts(via)
    reply = await bench.ask((first,), REPLY_TOKENS, client)
    if route == "via" and not await _was_boosted(via, before):
        bench.watcher.take_note("a turn was not boosted; /booster/stats of the booster says why")
    second = await bench.ask_counted(bench.grow(first, reply, context), 1, client)
    await _await_idle(via)
    return second


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
                "superseded": int(superseded),
                "failed": int(failed),
                "skipped": dict(skipped),
                "in_flight": bool(in_flight),
                "waiting": bool(waiting),
            }
        }:
            settled = completed + cancelled + superseded + failed + sum(skipped.values())
            return _Boosts(settled=settled, completed=completed, busy=in_flight or waiting)
        case _:
            raise UsageError(
                "no booster answers there",
                where=via.endpoint.base,
                hints=("start one with `provision booster --upstream URL --port 8013`",),
            )


async def _was_boosted(via: ServerClient, before: _Boosts) -> bool:
    """Wait until the turn that just ended has been boosted, or passed over."""
    now = await _await_boosts(via, lambda boosts: not boosts.busy and boosts.settled > before.settled)
    return now.completed > before.completed


async def _await_idle(via: ServerClient) -> None:
    """Let a boost that follows the second turn end: it would slow down what is measured next."""
    await _await_boosts(via, lambda boosts: not boosts.busy)


async def _await_boosts(via: ServerClient, reached: Callable[[_Boosts], bool]) -> _Boosts:
    pause = _FIRST_PAUSE_SECONDS
    try:
        async with asyncio.timeout(via.endpoint.answer_seconds):
            while not reached(now := await _read_boosts(via)):
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            return now
    except TimeoutError as error:
        raise NetworkError(
            f"the booster did not finish in {via.endpoint.answer_seconds:g} s", where=via.endpoint.base
        ) from error
