import json
from typing import Any

import pytest

from provisioner.openai.conversation import Reply, ReplyReader, Skip, count_characters, make_primer

CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Ålesund"}'}},
    {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}},
]


def chunk(delta: dict[str, Any], finish: str | None = None, index: int = 0) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    return b"data: " + json.dumps({"object": "chat.completion.chunk", "choices": [choice]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}}\n\n'
STREAMED_CALLS = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning": "Let me "}),
    chunk({"reasoning": "think."}),
    chunk({"content": "One moment"}),
    chunk({"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "look_up"}}]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": '"Ålesund"}'}}]}),
    chunk({"tool_calls": [{"index": 1, "id": "call_2", "type": "function", "function": {"name": "add"}}]}),
    chunk({"tool_calls": [{"index": 1, "function": {"arguments": '{"a": 1, "b": 2}'}}]}, finish="tool_calls"),
    USAGE,
    DONE,
]
FULL_MESSAGE = {"role": "assistant", "content": "One moment", "reasoning": "Let me think.", "tool_calls": CALLS}


def read(pieces: list[bytes], *, streamed: bool = True) -> Reply | Skip:
    reader = ReplyReader(streamed=streamed)
    for piece in pieces:
        reader.feed(piece)
    return reader.close()


def whole(message: dict[str, Any], finish: str = "stop", **more: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": finish}], **more}).encode()


def test_a_streamed_reply_with_reasoning_and_tool_calls_is_put_together() -> None:
    assert read(STREAMED_CALLS) == Reply(message=FULL_MESSAGE, finish_reason="tool_calls")


@pytest.mark.parametrize("size", [1, 7, 64])
def test_the_pieces_of_the_network_change_nothing(size: int) -> None:
    stream = b"".join(STREAMED_CALLS)
    assert read([stream[start : start + size] for start in range(0, len(stream), size)]) == read(STREAMED_CALLS)


def test_a_whole_reply_gives_the_same_message_as_a_streamed_one() -> None:
    nulls = {"refusal": None, "annotations": None, "audio": None, "function_call": None}
    body = whole({**FULL_MESSAGE, **nulls}, finish="tool_calls")
    assert read([body[:50], body[50:]], streamed=False) == read(STREAMED_CALLS)


def test_a_reply_of_tool_calls_alone_keeps_its_empty_content() -> None:
    reply = read(
        [whole({"role": "assistant", "content": None, "tool_calls": CALLS}, finish="tool_calls")], streamed=False
    )
    assert isinstance(reply, Reply)
    assert reply.message == {"role": "assistant", "content": None, "tool_calls": CALLS}


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([chunk({"content": "a"})], Skip.NOT_COMPLETED),
        ([chunk({"content": "a"}, finish="stop")], Skip.NOT_COMPLETED),
        ([chunk({"content": "a"}), b'data: {"error": {"message": "died"}}\n\n', DONE], Skip.NOT_COMPLETED),
        ([chunk({"content": "a"}, finish="content_filter"), DONE], Skip.NOT_COMPLETED),
        ([chunk({"content": "a"}), chunk({"content": "b"}, index=1), DONE], Skip.SEVERAL_CHOICES),
        ([b"data: {oh\n\n", DONE], Skip.UNREADABLE),
        ([], Skip.NOT_COMPLETED),
    ],
)
def test_a_stream_that_is_no_completed_turn_gives_no_reply(pieces: list[bytes], why: Skip) -> None:
    assert read(pieces) is why


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"not json", Skip.UNREADABLE),
        (b'{"error": {"message": "no"}}', Skip.NOT_COMPLETED),
        (b'{"choices": []}', Skip.NOT_COMPLETED),
        (b'{"choices": [{"message": {}}, {"message": {}}]}', Skip.SEVERAL_CHOICES),
        (b'{"choices": ["x"]}', Skip.UNREADABLE),
    ],
)
def test_a_body_that_is_no_completed_turn_gives_no_reply(body: bytes, why: Skip) -> None:
    assert read([body], streamed=False) is why


PARTS = [
    {"type": "text", "text": "What is on this picture? 🙂 \ud83d"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1000}},
]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
REPLY = Reply(message={"role": "assistant", "content": "A cat."}, finish_reason="stop")


def request(**more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": PARTS}], **more}).encode()


def primer(body: bytes, reply: Reply = REPLY, threshold: int = 0) -> dict[str, Any]:
    made = make_primer(body, reply, threshold=threshold)
    assert isinstance(made, dict)
    return made


def test_the_primer_is_the_conversation_with_the_reply_for_one_token() -> None:
    made = primer(request(tools=TOOLS, chat_template_kwargs={"enable_thinking": False}, cache_salt="s", odd_field=[1]))
    assert made == {
        "model": "m",
        "messages": [{"role": "user", "content": PARTS}, REPLY.message],
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": False},
        "cache_salt": "s",
        "odd_field": [1],
        "max_tokens": 1,
        "stream": False,
    }


def test_what_belongs_to_one_request_alone_is_left_out() -> None:
    made = primer(
        request(
            stream=True,
            stream_options={"include_usage": True},
            max_completion_tokens=900,
            max_tokens=900,
            min_tokens=5,
            n=1,
            prompt_logprobs=1,
            request_id="once",
            response_format={"type": "json_object"},
        )
    )
    assert set(made) == {"model", "messages", "max_tokens", "stream"}
    assert made["max_tokens"] == 1


@pytest.mark.parametrize(
    ("earlier", "expected"),
    [
        (None, {"reasoning": "hm"}),
        ({"role": "assistant", "content": "a"}, {}),
        ({"role": "assistant", "content": "a", "reasoning": "b"}, {"reasoning": "hm"}),
        ({"role": "assistant", "content": "a", "reasoning_content": "b"}, {"reasoning_content": "hm"}),
    ],
)
def test_reasoning_goes_along_as_this_client_sends_it(earlier: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    history = [{"role": "user", "content": "q"}, *([earlier, {"role": "user", "content": "r"}] if earlier else [])]
    reply = Reply(message={"role": "assistant", "content": "c", "reasoning": "hm"}, finish_reason="stop")
    made = primer(json.dumps({"messages": history}).encode(), reply)
    assert made["messages"][-1] == {"role": "assistant", "content": "c", **expected}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"\xff", Skip.UNREADABLE),
        (b"[]", Skip.UNREADABLE),
        (b'{"messages": []}', Skip.UNREADABLE),
        (b'{"messages": "text"}', Skip.UNREADABLE),
        (request(n=2), Skip.SEVERAL_CHOICES),
        (request(continue_final_message=True), Skip.CONTINUED_MESSAGE),
        (request(echo=True), Skip.CONTINUED_MESSAGE),
    ],
)
def test_requests_that_no_primer_can_follow(body: bytes, why: Skip) -> None:
    assert make_primer(body, REPLY, threshold=0) is why


def test_the_threshold_counts_text_and_no_pictures() -> None:
    messages = [
        {"role": "user", "content": PARTS},
        {"role": "assistant", "content": "abc", "reasoning": "de", "tool_calls": CALLS[:1]},
        "nonsense",
    ]
    length = count_characters(messages)
    assert length == len(PARTS[0]["text"]) + 5 + len(CALLS[0]["function"]["arguments"])
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 94}]}).encode()
    assert make_primer(body, REPLY, threshold=101) is Skip.TOO_SHORT
    assert isinstance(make_primer(body, REPLY, threshold=100), dict)
