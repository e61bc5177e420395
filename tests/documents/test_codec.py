"""Strict decoding of documents: each error says where and what."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal

import msgspec
import pytest
from packaging.version import Version

from provisioner.documents.codec import (
    ContradictionError,
    Document,
    HexDigest,
    Moment,
    decode_json,
    decode_toml,
    encode_json,
)
from provisioner.errors import InvalidReceiptError


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Part(Document, frozen=True, kw_only=True):
    name: str
    size: int = 0
    digest: HexDigest | None = None

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise ContradictionError("not a name", "name", expected="good", found=self.name)
        if self.size == 13:
            raise ValueError("No such size")


class Whole(Document, frozen=True, kw_only=True, rename="kebab", tag_field="schema", tag="whole/1"):
    title: str
    parts: tuple[Part, ...] = ()
    named: Mapping[str, Part] = {}
    main_part: Part | None = None
    colour: Colour | None = None
    mood: Literal["glad", "sad"] = "glad"
    port: Annotated[int, msgspec.Meta(ge=1, title="a port")] = 1
    version: Version | None = None
    made: Moment | None = None


NAME = ("did you mean 'name'?",)


def decode(text: str) -> Whole:
    return decode_json(text, Whole, where="x", error=InvalidReceiptError)


def whole(more: str) -> str:
    return f'{{"schema": "whole/1", "title": "", {more}}}'


@pytest.mark.parametrize(
    ("text", "message", "hints"),
    [
        ('{"schema": "whole/1", "titel": ""}', "x: titel: unknown key 'titel'", ("did you mean 'title'?",)),
        ('{"schema": "whole/1"}', "x: title: a required key is missing", ()),
        ("{}", "x: schema: a required key is missing", ()),
        ('{"schema": "whole/2"}', "x: schema: unknown schema (expected whole/1, found whole/2)", ()),
        ('{"schema": 1}', "x: schema: unknown schema (expected whole/1, found 1)", ()),
        ("[]", "x: a value of the wrong type (expected object, found array)", ()),
        (
            whole('"parts": [{"name": ""}, {"nam": ""}]'),
            "x: parts[1].nam: unknown key 'nam'",
            ("did you mean 'name'?",),
        ),
        (
            whole('"named": {"a": {"name": ""}, "k": {"zzz": ""}}'),
            "x: named.k.zzz: unknown key 'zzz'",
            ("known keys: digest, name, size",),
        ),
        (whole('"main-part": {"sise": 1}'), "x: main-part.sise: unknown key 'sise'", ("did you mean 'size'?",)),
        (whole('"main_part": {}'), "x: main_part: unknown key 'main_part'", ("did you mean 'main-part'?",)),
        (
            whole('"parts": [{"name": "", "size": true}]'),
            "x: parts[0].size: a value of the wrong type (expected int, found bool)",
            (),
        ),
        (whole('"colour": "green"'), "x: colour: unknown value (expected red | blue, found green)", ()),
        (whole('"mood": "so"'), "x: mood: unknown value (expected glad | sad, found so)", ()),
        (whole('"port": 0'), "x: port: not a port (found 0)", ()),
        (whole('"version": "one"'), "x: version: not a version (found one)", ()),
        (whole('"version": 1'), "x: version: a value of the wrong type (expected str, found int)", ()),
        (whole('"parts": [{"name": "bad"}]'), "x: parts[0].name: not a name (expected good, found bad)", ()),
        (whole('"main-part": {"name": "", "size": 13}'), "x: main-part: no such size", ()),
    ],
)
def test_an_error_says_where_and_what(text: str, message: str, hints: tuple[str, ...]) -> None:
    with pytest.raises(InvalidReceiptError) as caught:
        decode(text)
    assert (str(caught.value), caught.value.hints) == (message, hints)


@pytest.mark.parametrize("text", ["", "{", '{"x": ' + "[" * 100_000, '{"schema": "whole/1"} x'])
def test_a_text_that_is_no_json(text: str) -> None:
    with pytest.raises(InvalidReceiptError, match="x: not JSON: "):
        decode(text)


def test_a_text_that_is_no_toml_is_told_with_its_line() -> None:
    with pytest.raises(InvalidReceiptError, match=r"x: not TOML: .*line 2"):
        decode_toml('schema = "whole/1"\ntitle = \nmood = 1', Whole, where="x", error=InvalidReceiptError)


@pytest.mark.parametrize("digest", ["0" * 63, "0" * 64 + "\\n", "G" * 64])
def test_a_digest_has_one_form(digest: str) -> None:
    with pytest.raises(InvalidReceiptError, match=r"x: main-part\.digest: not a SHA-256"):
        decode(whole(f'"main-part": {{"name": "", "digest": "{digest}"}}'))


@pytest.mark.parametrize("value", ['"2026-01-01T00:00:00Z"', "2026-01-01T00:00:00", "2026-01-01"])
def test_a_time_in_toml_is_a_time_with_its_offset(value: str) -> None:
    text = f'schema = "whole/1"\ntitle = ""\nmade = {value}'
    with pytest.raises(InvalidReceiptError, match="x: made: "):
        decode_toml(text, Whole, where="x", error=InvalidReceiptError)


def test_what_is_encoded_is_decoded() -> None:
    made = decode_toml(
        'schema = "whole/1"\ntitle = "t"\nmade = 2026-01-01T00:00:00+02:00\nversion = "1.0"\n[[parts]]\nname = "ä"',
        Whole,
        where="x",
        error=InvalidReceiptError,
    )
    assert decode(encode_json(made)) == made
    assert encode_json(made).startswith('{\n  "schema": "whole/1",\n  "title": "t",\n  "parts"')
