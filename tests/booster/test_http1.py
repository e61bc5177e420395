import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.booster.http1 import (
    AnswerHead,
    BodyFraming,
    BodyUntilEnd,
    ChunkedBody,
    MalformedAnswerError,
    SizedBody,
    framing_of,
    parse_answer_head,
    print_chunk,
    print_request_head,
)


def head(*headers: tuple[bytes, bytes], status: int = 200) -> AnswerHead:
    return AnswerHead(status=status, reason="OK", headers=headers)


def read(framing: BodyFraming, pieces: list[bytes]) -> bytes:
    payload = b"".join(framing.feed(piece) for piece in pieces if not framing.done)
    if not framing.done:
        framing.end()
    return payload


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=8),
    st.lists(st.integers(0, 400), max_size=12),
    st.sampled_from([b"", b";name=value", b"; a"]),
    st.sampled_from([b"", b"X-Trailer: 1\r\n", b"A: b\r\nC: d\r\n"]),
)
def test_a_chunked_body_is_read_wherever_the_network_cuts_it(
    chunks: list[bytes], cuts: list[int], extension: bytes, trailer: bytes
) -> None:
    framed = b"".join(b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    stream = framed + b"0\r\n" + trailer + b"\r\n"
    places = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    pieces = [stream[start:end] for start, end in itertools.pairwise(places) if start < end]
    framing = ChunkedBody()
    assert read(framing, pieces) == b"".join(chunks)
    assert framing.done


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8))
def test_printed_chunks_are_read_back(chunks: list[bytes]) -> None:
    stream = b"".join(print_chunk(chunk) for chunk in [*chunks, b""])
    assert read(ChunkedBody(), [stream]) == b"".join(chunks)


@pytest.mark.parametrize("stream", [b"3\r\nabc\r\n", b"3\r\nab", b"3", b"0\r\n", b"0\r\nA: b\r\n"])
def test_a_chunked_body_that_ends_early_is_told(stream: bytes) -> None:
    framing = ChunkedBody()
    framing.feed(stream)
    with pytest.raises(MalformedAnswerError):
        framing.end()


@pytest.mark.parametrize(
    "stream",
    [
        b"x\r\n",
        b"-3\r\nabc",
        b"\r\n",
        b"3\r\nabcd\r\n0\r\n",
        b"3\r\nabcdef\r\n1\r\n",
        b"1" * 10_000,
        b"1_0\r\n",
        b"0x10\r\n",
        b"+5\r\n",
        b" 5\r\n",
        b"5 \r\n",
        b"a-b\r\n",
    ],
)
def test_a_chunked_body_that_is_none_is_refused(stream: bytes) -> None:
    with pytest.raises(MalformedAnswerError):
        ChunkedBody().feed(stream)


def test_two_different_lengths_are_refused() -> None:
    with pytest.raises(MalformedAnswerError, match="two different"):
        framing_of("GET", head((b"Content-Length", b"5"), (b"content-length", b"6")))
    same = framing_of("GET", head((b"Content-Length", b"5"), (b"content-length", b"5")))
    assert read(same, [b"abcde"]) == b"abcde"


def test_a_sized_body_ends_with_its_length() -> None:
    framing = SizedBody(5)
    assert framing.feed(b"abc") + framing.feed(b"defg") == b"abcde"
    assert framing.done
    short = SizedBody(5)
    short.feed(b"abc")
    with pytest.raises(MalformedAnswerError):
        short.end()


def test_a_body_without_framing_ends_with_the_connection() -> None:
    framing = BodyUntilEnd()
    assert framing.feed(b"abc") == b"abc"
    assert not framing.done
    framing.end()
    assert framing.done


@pytest.mark.parametrize(
    ("method", "answer", "kind"),
    [
        ("GET", head((b"Transfer-Encoding", b"chunked")), ChunkedBody),
        ("GET", head((b"content-length", b"5")), SizedBody),
        ("GET", head((b"Content-Length", b"5"), (b"transfer-encoding", b"Chunked")), ChunkedBody),
        ("GET", head(), BodyUntilEnd),
        ("HEAD", head((b"Content-Length", b"5")), SizedBody),
        ("GET", head((b"Content-Length", b"5"), status=304), SizedBody),
    ],
)
def test_how_a_body_is_framed(method: str, answer: AnswerHead, kind: type) -> None:
    framing = framing_of(method, answer)
    assert isinstance(framing, kind)
    assert framing.done == (method == "HEAD" or answer.status == 304)


def test_a_length_that_is_no_number_is_refused() -> None:
    with pytest.raises(MalformedAnswerError):
        framing_of("GET", head((b"Content-Length", b"-1")))


def test_a_head_is_read_as_it_stands() -> None:
    parsed = parse_answer_head(b"HTTP/1.1 207 Odd Reason\r\nX-A:  b \r\nx-a: \xe4")
    assert parsed == AnswerHead(status=207, reason="Odd Reason", headers=((b"X-A", b"b"), (b"x-a", b"\xe4")))
    assert parsed.find(b"x-a") == b"\xe4"
    assert parsed.find(b"x-b") is None
    assert parse_answer_head(b"HTTP/1.0 200").reason == ""


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"SSH-2.0-x",
        b"HTTP/1.1 20 OK",
        b"HTTP/1.1 2xx OK",
        b"HTTP/1.1 200 OK\r\nno colon",
        b"HTTP/1.1 200 OK\r\n a: b",
    ],
)
def test_what_is_no_head_is_refused(text: bytes) -> None:
    with pytest.raises(MalformedAnswerError):
        parse_answer_head(text)


def test_a_request_head_is_printed_byte_for_byte() -> None:
    printed = print_request_head("POST", "/a?b=%20", ((b"X-A", b"\xe4"), (b"x-a", b"2")))
    assert printed == b"POST /a?b=%20 HTTP/1.1\r\nX-A: \xe4\r\nx-a: 2\r\n\r\n"
