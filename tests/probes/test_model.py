from provisioner.probes.model import (
    DECODE_RATE,
    FIRST_TOKEN,
    Setting,
    Spread,
    measures_of,
    print_context,
)


def test_a_spread_is_the_median_between_smallest_and_largest() -> None:
    spread = Spread.of([70.0, None, 69.0, 79.0])
    assert spread is not None
    assert (spread.median, spread.minimum, spread.maximum) == (70.0, 69.0, 79.0)
    assert Spread.of([None]) is None


def test_quantities_without_a_value_make_no_measure() -> None:
    measures = measures_of(((DECODE_RATE, (1.0,)), (FIRST_TOKEN, (None, None))))
    assert [measure.quantity for measure in measures] == [DECODE_RATE]


def test_a_setting_is_said_in_words() -> None:
    assert str(Setting(context=40000, sighting=2)) == "40K context, sighting 2"
    assert str(Setting(context=1500, streams=8)) == "1500 context, 8 streams"
    assert str(Setting(route="via")) == "via"
    assert print_context(999) == "999"
