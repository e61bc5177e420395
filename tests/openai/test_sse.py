import itertools

from hypothesis import given
from hypothesis import strategies as st

from provisioner.openai.sse import EventReader

STREAM = (
    b': a comment\n\ndata: {"one": 1}\n\nevent: named\ndata:two\r\n\r\nid: 7\n\n'
    b"data: first line\ndata: second line\n\ndata: \xe2\x82\xac\r\rdata: [DONE]\n\n"
)
PAYLOADS = [b'{"one": 1}', b"two", b"first line\nsecond line", "€".encode(), b"[DONE]"]


def read(pieces: list[bytes]) -> list[bytes]:
    reader = EventReader()
    return [payload for piece in pieces for payload in reader.feed(piece)] + reader.close()


def test_payloads_of_all_kinds_of_line_ends_comments_and_fields() -> None:
    assert read([STREAM]) == PAYLOADS


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_the_cuts_of_the_network_change_nothing(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    assert read([STREAM[start:end] for start, end in itertools.pairwise(places)]) == PAYLOADS


def test_an_event_is_told_as_soon_as_its_blank_line_is_there() -> None:
    reader = EventReader()
    assert reader.feed(b"data: x\n") == []
    assert reader.feed(b"\n") == [b"x"]


def test_an_event_whose_blank_line_never_came_is_told_at_the_end() -> None:
    reader = EventReader()
    assert reader.feed(b"data: cut") == []
    assert reader.close() == [b"cut"]
    assert reader.close() == []
