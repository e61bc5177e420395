"""One run's means: a server that was met, documents nobody has seen, requests, and counters around them."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from provisioner.errors import UsageError
from provisioner.openai.conversation import JsonObject
from provisioner.openai.prometheus import ServerCounters
from provisioner.probes.client import Exchange, ServerClient
from provisioner.probes.model import Measure, Point, Probe, RunSettings, ServerFacts, Setting, print_context
from provisioner.probes.workload import (
    SHORTEST_DOCUMENT,
    Calibration,
    Corpus,
    Message,
    ask_about,
    ask_more,
    write_request,
)

WARM_UP_TOKENS: Final = 8
CALIBRATION_CHARACTERS: Final = (400, 1200)
# The new text of a second turn, as a part of the first turn's context: 2K on 40K.
NEW_TEXT_PART: Final = 20
# A document may come out longer than wanted by this part where the server does not count it: a tokenizer is no ruler.
_DOCUMENT_EXCESS: Final = 0.04
_TOLERANCE: Final = 0.01
# The first makes good what two samples could not tell, the others what it leaves.
_CORRECTIONS: Final = 4

Exchanged = tuple[Exchange, ServerCounters | None]


class Watcher(Protocol):
    """Is told how a run goes on; nothing of the run depends on it."""

    def expect(self, requests: int) -> None: ...
    def begin(self, what: str) -> None: ...
    def advance(self) -> None: ...
    def take_server(self, facts: ServerFacts) -> None: ...
    def take_points(self, points: Sequence[Point]) -> None: ...
    def take_note(self, note: str) -> None: ...


async def meet_server(client: ServerClient, wanted: str | None) -> ServerFacts:
    """Ask the server what it is. Raises UsageError if it does not serve the wanted model."""
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


class Bench:
    """Calibrate it before the first document is written."""

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
        self._calibration = Calibration(fixed=0.0, per_character=0.25)
        self._is_counted = True
        self._wanted: dict[Message, int] = {}

    async def calibrate(self) -> None:
        samples = []
        for characters in CALIBRATION_CHARACTERS:
            document = self._corpus.write_document(next(self._numbers), characters)
            exchange = await self.ask((ask_about(document, self.settings.workload),), WARM_UP_TOKENS)
            samples.append((characters, exchange.usage.prompt_tokens))
        self._calibration = Calibration.from_samples(*samples)

    def write_document(self, tokens: int) -> str:
        return self._corpus.write_document(next(self._numbers), self._calibration.characters_for(tokens))

    async def write_first_turn(self, tokens: int) -> Message:
        """A message whose request has ``tokens`` prompt tokens: to a few if the server counts, else about."""
        number, length = next(self._numbers), self._calibration.characters_for(tokens)
        for _ in range(_CORRECTIONS):
            turn = ask_about(self._corpus.write_document(number, length), self.settings.workload)
            missing = tokens - (await self._count(turn) or tokens)
            better = max(SHORTEST_DOCUMENT, length + round(missing / self._calibration.per_character))
            if better == length:
                break
            length = better
        self._wanted[turn] = tokens
        return turn

    async def _count(self, turn: Message) -> int | None:
        """Prompt tokens of a request with this one message; None from a server that does not count."""
        if self._is_counted:
            counted = await self.client.count_prompt(self._write_request((turn,), WARM_UP_TOKENS))
            self._is_counted = counted is not None
            return counted
        return None

    async def ask(self, messages: tuple[Message, ...], tokens: int, client: ServerClient | None = None) -> Exchange:
        exchange = await (client or self.client).stream_chat(self._write_request(messages, tokens))
        self.watcher.advance()
        self._compare_length(messages, exchange)
        return exchange

    def _write_request(self, messages: tuple[Message, ...], tokens: int) -> JsonObject:
        return write_request(
            self.facts.model, messages, tokens=tokens, temperature=self.settings.temperature, extra=self.extra
        )

    def _compare_length(self, messages: tuple[Message, ...], exchange: Exchange) -> None:
        """Note how far a first turn is from its wanted length, at its first sending."""
        wanted = self._wanted.pop(messages[0], None)
        made = exchange.usage.prompt_tokens
        if wanted and abs(made - wanted) > wanted * _TOLERANCE:
            self.watcher.take_note(
                f"a prompt for {print_context(wanted)} context had {made} tokens ({made / wanted - 1:+.1%})"
            )

    async def ask_counted(
        self, messages: tuple[Message, ...], tokens: int, client: ServerClient | None = None
    ) -> Exchanged:
        """An exchange and what the server counted during it."""
        before = await self.read_counters()
        exchange = await self.ask(messages, tokens, client)
        return exchange, count_between(before, await self.read_counters())

    async def read_counters(self) -> ServerCounters | None:
        return await self.client.read_counters() if self.facts.has_counters else None

    def grow(self, first: Message, reply: Exchange, context: int) -> tuple[Message, ...]:
        """The second turn of a conversation: the first, its reply, and new text."""
        answer = Message(role="assistant", content=reply.message.get("content") or "")
        return first, answer, ask_more(self.write_document(context // NEW_TEXT_PART))

    def fitting_contexts(self, tokens_after: int) -> Iterator[int]:
        """Contexts that the model has room for; the others are noted."""
        limit = self.facts.max_model_len
        for context in self.settings.contexts:
            if limit is not None and context * (1 + _DOCUMENT_EXCESS) + tokens_after > limit:
                self.watcher.take_note(
                    f"{print_context(context)} context passed over: the server's limit is {limit} tokens"
                )
            else:
                yield context

    def take_point(self, probe: Probe, setting: Setting, measures: tuple[Measure, ...]) -> list[Point]:
        """Hand on a point, unless nothing of it was measured."""
        points = [Point(probe=probe, setting=setting, measures=measures)] if measures else []
        self.watcher.take_points(points)
        return points

    def note_short_answers(self, exchanges: Sequence[Exchange]) -> None:
        made = min(exchange.usage.completion_tokens for exchange in exchanges)
        wanted = self.settings.completion_tokens
        if made < wanted // 2:
            self.watcher.take_note(
                f"an answer ended after {made} of {wanted} tokens; a vLLM server goes on with "
                """--extra '{"ignore_eos": true}'"""
            )


def count_between(before: ServerCounters | None, after: ServerCounters | None) -> ServerCounters | None:
    """What the server counted between two readings; None if it has no counters."""
    return None if before is None or after is None else after.since(before)
