"""Talks to a server of the OpenAI kind and notes when what arrived, on the event loop's monotonic clock."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Self
from urllib.parse import SplitResult, urlsplit

import aiohttp

from provisioner.errors import CannotObtainError, NetworkError, UsageError
from provisioner.loading import load_json
from provisioner.openai.conversation import JsonObject, MessageBuilder
from provisioner.openai.prometheus import ServerCounters, parse_samples, read_counters
from provisioner.openai.sse import DONE, EventReader

CONNECT_SECONDS: Final = 10
QUESTION_SECONDS: Final = 30
_MESSAGE_LIMIT: Final = 300


class NoUsageError(CannotObtainError):
    """The server does not say how many tokens it made, so no rate can be told."""

    code = "no-usage"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """``base`` is the server's address without ``/v1``. ``answer_seconds`` bounds one whole answer."""

    base: str
    api_key: str | None = field(default=None, repr=False)
    answer_seconds: float = 1800.0

    @classmethod
    def parse(cls, url: str, *, api_key: str | None = None, answer_seconds: float = 1800.0) -> Self:
        """Raises UsageError for what is no http address, and for one with a password in it."""
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or not _has_good_port(parts):
            raise UsageError("not an http address", where=url, hints=("give one such as http://127.0.0.1:8012",))
        if "@" in parts.netloc:
            raise UsageError("an address may hold no password", hints=("put the key in a file: --key-file FILE",))
        base = url.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(base=base, api_key=api_key, answer_seconds=answer_seconds)


def _has_good_port(parts: SplitResult) -> bool:
    try:
        return parts.port != 0
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts as the server states them."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One streamed answer. Times are seconds of one monotonic clock.

    ``first_token`` is when the first event came that carries more than a role, ``last_token`` when the last one with a
    token or the finish reason did; ``events`` counts those between and including them.
    """

    sent: float
    first_token: float
    last_token: float
    ended: float
    events: int
    usage: Usage
    message: JsonObject
    finish_reason: str | None

    @property
    def first_token_seconds(self) -> float:
        return self.first_token - self.sent

    @property
    def elapsed_seconds(self) -> float:
        return self.ended - self.sent

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the first; None if there was but one token or no time between."""
        seconds = self.last_token - self.first_token
        tokens = self.usage.completion_tokens - 1
        return tokens / seconds if tokens > 0 and seconds > 0 else None

    @property
    def tokens_per_event(self) -> float:
        return self.usage.completion_tokens / self.events


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    name: str
    max_model_len: int | None


class ServerClient:
    """A client of one server. Use ``connect``; every call raises NetworkError where the server does not answer well."""

    def __init__(self, endpoint: Endpoint, session: aiohttp.ClientSession) -> None:
        self.endpoint = endpoint
        self._session = session

    async def list_models(self) -> tuple[ServedModel, ...]:
        match _parse(await self._get("/v1/models")):
            case {"data": [*cards]}:
                return tuple(
                    ServedModel(name=card["id"], max_model_len=_as_int(card.get("max_model_len")))
                    for card in cards
                    if isinstance(card, dict) and isinstance(card.get("id"), str)
                )
            case _:
                raise NetworkError("the server's list of models is not one", where=f"{self.endpoint.base}/v1/models")

    async def read_version(self) -> str | None:
        """Version of a vLLM server; None for others."""
        match _parse(await self._get_if_there("/version") or ""):
            case {"version": str(version)}:
                return version
            case _:
                return None

    async def read_counters(self) -> ServerCounters | None:
        """Counters at ``/metrics``; None if the server has no such page."""
        text = await self._get_if_there("/metrics")
        return None if text is None else read_counters(parse_samples(text))

    async def read_booster(self) -> Mapping[str, Any] | None:
        """Statistics of the booster at this address; None if there is none."""
        stats = _parse(await self._get_if_there("/booster/stats") or "")
        return stats if isinstance(stats, dict) else None

    async def count_prompt(self, request: JsonObject) -> int | None:
        """Prompt tokens of a chat request as the server's own tokenizer counts them; None if it does not say."""
        try:
            counted = _parse(await self._request("POST", "/tokenize", request))
        except RefusedError:
            return None
        match counted:
            case {"count": int(count)}:
                return count
            case _:
                return None

    async def stream_chat(self, request: JsonObject) -> Exchange:
        """One chat request of ``write_request``'s form. Raises NoUsageError if the answer states no token counts."""
        try:
            async with asyncio.timeout(self.endpoint.answer_seconds):
                return await self._stream_chat(request)
        except TimeoutError as error:
            raise NetworkError(
                f"the server gave no whole answer in {self.endpoint.answer_seconds:g} s",
                where=self.endpoint.base,
                hints=("look at the server's log, or allow more with --timeout",),
            ) from error
        except aiohttp.ClientError as error:
            raise self._explain(error) from error

    async def _stream_chat(self, request: JsonObject) -> Exchange:
        clock = asyncio.get_running_loop().time
        notes = _StreamNotes()
        sent = clock()
        async with self._session.post(f"{self.endpoint.base}/v1/chat/completions", json=request) as response:
            if response.status != 200:
                raise self._refused(response.status, await response.text(errors="replace"))
            reader = EventReader()
            async for chunk in response.content.iter_any():
                now = clock()
                for payload in reader.feed(chunk):
                    notes.take(payload, now)
            for payload in reader.close():
                notes.take(payload, clock())
            return notes.finish(sent=sent, ended=clock(), where=self.endpoint.base)

    async def _get(self, path: str) -> str:
        return await self._request("GET", path)

    async def _request(self, method: str, path: str, body: JsonObject | None = None) -> str:
        try:
            timeout = aiohttp.ClientTimeout(total=QUESTION_SECONDS, sock_connect=CONNECT_SECONDS)
            async with self._session.request(method, self.endpoint.base + path, json=body, timeout=timeout) as response:
                text = await response.text(errors="replace")
                if response.status != 200:
                    raise self._refused(response.status, text)
                return text
        except TimeoutError as error:
            raise NetworkError(f"no answer in {QUESTION_SECONDS} s", where=self.endpoint.base + path) from error
        except aiohttp.ClientError as error:
            raise self._explain(error) from error

    async def _get_if_there(self, path: str) -> str | None:
        try:
            return await self._get(path)
        except RefusedError as refusal:
            if refusal.status in {401, 403, 404, 405, 501}:
                return None
            raise

    def _refused(self, status: int, text: str) -> "RefusedError":
        hints: tuple[str, ...] = ()
        if status in {401, 403}:
            hints = ("give the server's key with --key-file FILE, or in the variable VLLM_API_KEY",)
        return RefusedError(
            f"the server answered {status}: {_read_message(text)}", status=status, where=self.endpoint.base, hints=hints
        )

    def _explain(self, error: aiohttp.ClientError) -> NetworkError:
        if isinstance(error, aiohttp.ClientConnectorError):
            return NetworkError(
                "no server listens there",
                where=self.endpoint.base,
                hints=("start it with `provision serve`, or give its address with --url",),
            )
        return NetworkError(f"the connection broke: {error}", where=self.endpoint.base)


class RefusedError(NetworkError):
    """The server answered with an error status."""

    code = "refused"

    def __init__(self, what: str, *, status: int, where: str, hints: tuple[str, ...]) -> None:
        super().__init__(what, where=where, hints=hints)
        self.status = status


class _StreamNotes:
    """What the events of one answer add up to."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last = 0.0
        self.events = 0
        self.usage: Usage | None = None
        self.message = MessageBuilder()
        self.finish_reason: str | None = None
        self.failure: str | None = None

    def take(self, payload: bytes, now: float) -> None:
        if payload.strip() == DONE:
            return
        match _parse(payload):
            case {"error": error}:
                self.failure = _read_message(json.dumps({"error": error}))
            case dict(chunk):
                self._take_usage(chunk.get("usage"))
                for choice in chunk.get("choices") or ():
                    self._take_choice(choice, now)
            case _:
                self.failure = "an event that is no JSON object"

    def _take_usage(self, usage: object) -> None:
        match usage:
            case {"prompt_tokens": int(prompt), "completion_tokens": int(completion)}:
                self.usage = Usage(prompt_tokens=prompt, completion_tokens=completion)
            case _:
                pass

    def _take_choice(self, choice: JsonObject, now: float) -> None:
        delta = choice.get("delta") or {}
        self.message.add(delta)
        if choice.get("finish_reason") is not None:
            self.finish_reason = choice["finish_reason"]
        elif "role" in delta and not any(value for name, value in delta.items() if name != "role"):
            return
        self.first = now if self.first is None else self.first
        self.last = now
        self.events += 1

    def finish(self, *, sent: float, ended: float, where: str) -> Exchange:
        if self.failure is not None:
            raise NetworkError(f"the answer broke off with an error: {self.failure}", where=where)
        if self.first is None:
            raise NetworkError("the answer holds no token", where=where)
        if self.usage is None:
            raise NoUsageError(
                "the server sends no usage, and tokens cannot be counted from events",
                where=where,
                hints=("use a server that honours stream_options.include_usage, such as vLLM",),
            )
        return Exchange(
            sent=sent,
            first_token=self.first,
            last_token=self.last,
            ended=ended,
            events=self.events,
            usage=self.usage,
            message=self.message.build(),
            finish_reason=self.finish_reason,
        )


def _read_message(text: str) -> str:
    """The error text of an answer, cut to a line."""
    match _parse(text):
        case {"error": {"message": str(message)}} | {"message": str(message)} | {"error": str(message)}:
            text = message
        case _:
            pass
    line = " ".join(text.split())
    return line if len(line) <= _MESSAGE_LIMIT else line[:_MESSAGE_LIMIT] + " …"


def _parse(text: str | bytes) -> object:
    try:
        return load_json(text)
    except ValueError:
        return None


def _as_int(value: object) -> int | None:
    return value if isinstance(value, int) else None


@asynccontextmanager
async def connect(endpoint: Endpoint) -> AsyncIterator[ServerClient]:
    """A client whose connections are closed on exit, which makes the server drop what is still running."""
    headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    # One connection a request: a kept one may have been closed by a server that restarted in the meantime.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        yield ServerClient(endpoint, session)
