"""The server's arguments, in every form in which its parser takes them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.serve import flags
from provisioner.serve.flags import Origin, Setting, parse_arguments


def parse(*words: str) -> tuple[Setting, ...]:
    return parse_arguments(words, origin=Origin.EXTRA).settings


@pytest.mark.parametrize(
    "words",
    [
        ("--max-num-batched-tokens", "32000"),
        ("--max-num-batched-tokens=32000",),
        ("--max_num_batched_tokens", "32000"),
        ("--max_num_batched_tokens=32000",),
        ("--max-num-batched", "32000"),
        ("--max-num-b", "32k"),
    ],
)
def test_every_spelling_of_an_argument_is_the_same_argument(words):
    (setting,) = parse(*words)
    assert (setting.name, flags.integer_of(setting)) == ("--max-num-batched-tokens", 32000)


def test_an_abbreviation_that_fits_two_names_stays_as_it_was_written():
    (setting,) = parse("--max-num-s", "1")
    assert setting.name == "--max-num-s"


def test_a_switch_can_be_negated():
    on, off = parse("--async-scheduling", "--no-enable_prefix_caching")
    assert (on.name, on.on) == ("--async-scheduling", True)
    assert (off.name, off.on) == ("--enable-prefix-caching", False)


@pytest.mark.parametrize(
    ("word", "name", "values"),
    [
        ("-O3", "--optimization-level", ("3",)),
        ("-O=2", "--optimization-level", ("2",)),
        ("-tp=2", "--tensor-parallel-size", ("2",)),
        ("--served-model-name", "--served-model-name", ()),
    ],
)
def test_short_names(word, name, values):
    (setting,) = parse(word)
    assert (setting.name, setting.values) == (name, values)


def test_words_before_the_first_name_belong_to_nothing():
    arguments = parse_arguments(("model", "--port", "1"), origin=Origin.EXTRA)
    assert arguments.stray == ("model",)


def test_several_values_and_a_negative_number():
    names, number = parse("--served-model-name", "a", "b", "--seed", "-1")
    assert names.values == ("a", "b")
    assert number.value == "-1"


@pytest.mark.parametrize(
    ("text", "number"),
    [("8192", 8192), ("8k", 8000), ("8K", 8192), ("25.6k", 25600), ("auto", None), ("-1", None), ("8.5", None)],
)
def test_numbers_as_the_server_reads_them(text, number):
    assert flags.integer_of(Setting(name="--x", values=(text,))) == number


def test_a_later_setting_takes_the_place_of_an_earlier_one():
    base = (Setting(name="--a", values=("1",), why="because"), Setting(name="--b"))
    merged = flags.override(base, parse("--a", "2", "--c", "3"))
    assert flags.to_words(merged) == ("--a", "2", "--b", "--c", "3")


def test_a_dotted_part_keeps_the_rest_of_the_json():
    base = (Setting(name="--speculative-config", values=('{"method":"mtp","num_speculative_tokens":3}',)),)
    merged = flags.override(base, parse("-sc.num_speculative_tokens", "7"))
    assert flags.object_of(merged[0]) == {"method": "mtp", "num_speculative_tokens": 7}


def test_a_dotted_list_is_added_to():
    base = (Setting(name="--compilation-config", values=('{"custom_ops":["+a"]}',)),)
    merged = flags.override(base, parse("--compilation-config.custom_ops+", "+b,+c"))
    assert flags.object_of(merged[0]) == {"custom_ops": ["+a", "+b", "+c"]}


def test_a_dotted_part_of_nothing_becomes_json():
    merged = flags.override((), parse("--compilation-config.mode", "1k"))
    assert json.loads(merged[0].value or "") == {"mode": 1000}


def test_a_value_that_looks_like_a_name_is_bound_to_its_own():
    assert flags.to_words((Setting(name="--x", values=("-dash",)),)) == ("--x=-dash",)


values = st.text(alphabet='abc123{}":,. ', min_size=1).filter(lambda text: not text.startswith("-"))
settings = st.lists(
    st.builds(
        Setting,
        name=st.sampled_from(["--alpha-beta", "--max-model-len", "--enable-prefix-caching", "--quantization"]),
        values=st.lists(values, max_size=2).map(tuple),
        on=st.booleans(),
        origin=st.just(Origin.EXTRA),
    ),
    max_size=5,
).map(tuple)


@given(settings)
def test_words_and_settings_are_inverse(given_settings):
    assert parse_arguments(flags.to_words(given_settings), origin=Origin.EXTRA).settings == given_settings


@given(settings, settings)
def test_an_override_has_every_name_once_and_the_change_wins(base, changes):
    merged = flags.override((), flags.override(base, changes))
    for change in {setting.name: setting for setting in changes}.values():
        assert flags.find(merged, change.name) == change
