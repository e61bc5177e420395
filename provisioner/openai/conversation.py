"""Chat turns as data: a reply put together from a response, and the primer that the next turn would find cached. Pure.

Requests and responses are those of ``/v1/chat/completions`` (fields as vLLM 0.26 to 0.33 reads and writes them).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

from provisioner.openai.sse import DONE, EventReader

JsonObject: TypeAlias = dict[str, Any]

REASONING_FIELDS: Final = ("reasoning", "reasoning_content")

# Values that name something: a later piece replaces an earlier one where text would be appended to it.
_NAMES: Final = frozenset({"id", "type", "role", "index"})

# Request fields that shape sampling, the answer's form or the bookkeeping of one request, and not the prompt. Most
# would be harmless in a primer; prompt log probabilities switch the prefix cache off, and a request id serves once.
_NOT_FOR_PRIMERS: Final = frozenset(
    {
        "best_of",
        "ec_transfer_params",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "ignore_eos",
        "kv_transfer_params",
        "logprob_token_ids",
        "logprobs",
        "max_completion_tokens",
        "min_tokens",
        "n",
        "prompt_logprobs",
        "request_id",
        "response_format",
        "return_prompt_text",
        "return_token_ids",
        "stop",
        "stop_token_ids",
        "store",
        "stream_interval",
        "stream_options",
        "structured_outputs",
        "top_logprobs",
        "use_beam_search",
    }
)


class Skip(StrEnum):
    """Why a turn is not followed by a boost."""

    OFF = "off"
    NOT_COMPLETED = "not-completed"
    TOO_SHORT = "too-short"
    SEVERAL_CHOICES = "several-choices"
    CONTINUED_MESSAGE = "continued-message"
    TOO_LARGE = "too-large"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The assistant's message of one completed turn, in the fields in which the server sent it."""

    message: JsonObject
    finish_reason: str


class ReplyReader:
    """Reads the body of a chat response, streamed or whole, from the pieces in which it passes."""

    def __init__(self, *, streamed: bool) -> None:
        self._events = EventReader() if streamed else None
        self._whole = bytearray()
        self._message = MessageBuilder()
        self._finish_reason: str | None = None
        self._several = False
        self._broken = False
        self._done = False

    def feed(self, chunk: bytes) -> None:
        if self._events is None:
            self._whole += chunk
            return
        for payload in self._events.feed(chunk):
            self._take_payload(payload)

    def close(self) -> Reply | Skip:
        """The reply, or why there is none. Call it once, when the whole body has passed."""
        if self._events is None:
            self._take_whole(bytes(self._whole))
        else:
            for payload in self._events.close():
                self._take_payload(payload)
        if self._several:
            return Skip.SEVERAL_CHOICES
        if self._broken:
            return Skip.UNREADABLE
        if not self._done or self._finish_reason not in {"stop", "length", "tool_calls", "function_call"}:
            return Skip.NOT_COMPLETED
        return Reply(message=_finish_message(self._message.build()), finish_reason=self._finish_reason)

    def _take_payload(self, payload: bytes) -> None:
        if payload.strip() == DONE:
            self._done = True
            return
        match _parse(payload):
            case {"choices": [*choices]}:
                for choice in choices:
                    self._take_choice(choice, "delta")
            case {"error": _}:
                self._finish_reason = "error"
            case _:
                self._broken = True

    def _take_whole(self, body: bytes) -> None:
        self._done = True
        match _parse(body):
            case {"choices": [choice]}:
                self._take_choice(choice, "message")
            case {"choices": [_, _, *_]}:
                self._several = True
            case {"error": _} | {"choices": []}:
                self._finish_reason = "error"
            case _:
                self._broken = True

    def _take_choice(self, choice: object, field: str) -> None:
        if not isinstance(choice, dict):
            self._broken = True
            return
        if choice.get("index", 0) != 0:
            self._several = True
            return
        piece = choice.get(field)
        if isinstance(piece, dict):
            self._message.add(piece)
        if isinstance(choice.get("finish_reason"), str) and self._finish_reason != "error":
            self._finish_reason = choice["finish_reason"]


def _parse(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


class MessageBuilder:
    """Puts streamed pieces of a message together, as the clients of this interface do.

    Text is appended, names are set, objects merge, and list elements with an ``index`` merge into that index's element.
    """

    def __init__(self) -> None:
        self._parts: JsonObject = {}

    def add(self, delta: Mapping[str, Any]) -> None:
        _merge(self._parts, delta)

    def build(self) -> JsonObject:
        return {name: _join(value) for name, value in self._parts.items()}


class _Text(list[str]):
    """A text in its pieces: a long reply has tens of thousands, and joining at each would copy it as often."""


def _merge(parts: JsonObject, delta: Mapping[str, Any]) -> None:
    for name, value in delta.items():
        present = parts.get(name)
        if value is None:
            parts.setdefault(name, None)
        elif isinstance(value, str) and name not in _NAMES:
            if isinstance(present, _Text):
                present.append(value)
            else:
                parts[name] = _Text([value])
        elif isinstance(value, dict):
            target = present if isinstance(present, dict) else {}
            _merge(target, value)
            parts[name] = target
        elif isinstance(value, list):
            # A text's pieces are a list too, of our own.
            known = present if isinstance(present, list) and not isinstance(present, _Text) else []
            parts[name] = _merge_list(known, value)
        elif not (value == "" and present):
            parts[name] = value


def _merge_list(present: list[Any], pieces: list[Any]) -> list[Any]:
    for piece in pieces:
        if not (isinstance(piece, dict) and "index" in piece):
            present.append(piece)
            continue
        match = next((one for one in present if isinstance(one, dict) and one.get("index") == piece["index"]), None)
        if match is None:
            match = {}
            present.append(match)
        _merge(match, piece)
    return present


def _join(value: Any) -> Any:
    if isinstance(value, _Text):
        return "".join(value)
    if isinstance(value, dict):
        return {name: _join(part) for name, part in value.items()}
    return [_join(part) for part in value] if isinstance(value, list) else value


def _finish_message(message: JsonObject) -> JsonObject:
    """What a client keeps: no positions of pieces, no empty fields save the content itself."""
    kept = {name: value for name, value in message.items() if value is not None and value != []}
    kept["role"] = message.get("role") or "assistant"
    kept.setdefault("content", None)
    if isinstance(kept.get("tool_calls"), list):
        kept["tool_calls"] = [
            {name: value for name, value in call.items() if name != "index"} if isinstance(call, dict) else call
            for call in kept["tool_calls"]
        ]
    return kept


def count_characters(messages: Iterable[Any]) -> int:
    """Characters of text in a conversation: contents, reasoning, tool calls. Images and other media count nothing."""
    return sum(len(text) for message in messages if isinstance(message, dict) for text in _texts(message))


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    content = message.get("content")
    for part in content if isinstance(content, list) else [{"text": content}]:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield part["text"]
    for name in REASONING_FIELDS:
        if isinstance(message.get(name), str):
            yield message[name]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        match call:
            case {"function": {"arguments": str(arguments)}}:
                yield arguments
            case _:
                pass


def make_primer(request_body: bytes, reply: Reply, *, threshold: int) -> JsonObject | Skip:
    """The request that makes the server compute what the next turn of this conversation starts with.

    The conversation is the request's own messages, untouched, and the reply as this client would send it. Everything
    else that shapes the prompt (tools, template arguments, cache salt, fields unknown here) stays; ``threshold`` counts
    characters of the conversation with the reply.
    """
    request = _parse(request_body)
    match request:
        case {"messages": [*messages]} if messages:
            pass
        case _:
            return Skip.UNREADABLE
    assert isinstance(request, dict)
    if request.get("n") not in (None, 1):
        return Skip.SEVERAL_CHOICES
    if request.get("continue_final_message") or request.get("echo"):
        return Skip.CONTINUED_MESSAGE
    conversation = [*messages, _as_sent_next(reply.message, messages)]
    if count_characters(conversation) < threshold:
        return Skip.TOO_SHORT
    kept = {name: value for name, value in request.items() if name not in _NOT_FOR_PRIMERS}
    return {**kept, "messages": conversation, "max_tokens": 1, "stream": False}


def _as_sent_next(message: JsonObject, history: list[Any]) -> JsonObject:
    """The reply with its reasoning as this client sends it: earlier replies show whether, and under which name."""
    reasoning = next((message[name] for name in REASONING_FIELDS if isinstance(message.get(name), str)), None)
    earlier = [one for one in history if isinstance(one, dict) and one.get("role") == "assistant"]
    if reasoning is None or not earlier:
        return message
    names = {name for one in earlier for name in REASONING_FIELDS if name in one}
    plain = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    return {**plain, **{name: reasoning for name in REASONING_FIELDS if name in names}}
