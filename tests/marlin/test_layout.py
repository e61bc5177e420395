"""The two statements of the layout, axes and lanes, against each other and by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.marlin.cases import Case, digit_count, digit_words, make_perm, random_words, small_cases
from provisioner.marlin.layout import (
    AWQ_POSITIONS,
    Activation,
    Layout,
    Packing,
    all_layouts,
    pack_storage,
    pack_values,
    permute_tiles,
    places_in_tile,
    reference_repack,
    reference_values,
    unpack_values,
)


@pytest.mark.parametrize("layout", all_layouts(), ids=str)
def test_every_value_of_a_tile_has_one_place(layout: Layout) -> None:
    tile = layout.tile
    places = list(places_in_tile(layout))
    assert len({(row, column) for _, _, row, column in places}) == len(places) == tile.rows * tile.columns
    assert {(row, column) for _, _, row, column in places} == {
        (row, column) for row in range(tile.rows) for column in range(tile.columns)
    }


@pytest.mark.parametrize("case", small_cases(), ids=lambda case: case.name)
def test_axes_and_lanes_agree(case: Case) -> None:
    perm = make_perm(case)
    digits = digit_count(case) if case.size_k * case.size_n <= 1 << 16 else 0
    for words in (random_words(case), *(digit_words(case, digit) for digit in range(digits))):
        values = unpack_values(words, case.layout)
        gathered = values if perm is None else values[perm]
        marlin = reference_repack(words, case.layout, perm=perm)
        assert marlin.shape == case.layout.marlin_shape(case.size_k, case.size_n)
        assert np.array_equal(marlin, pack_storage(permute_tiles(gathered, case.layout), case.layout))
        assert np.array_equal(reference_values(marlin, case.layout, case.size_k, case.size_n), gathered)


@given(
    layout=st.sampled_from(all_layouts()),
    tiles=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 2**32 - 1),
)
def test_packing_is_undone_by_unpacking(layout: Layout, tiles: tuple[int, int], seed: int) -> None:
    shape = (32 * tiles[0], 64 * tiles[1])
    values = np.random.default_rng(seed).integers(0, 1 << layout.bits, size=shape, dtype=np.uint8)
    words = pack_values(values, layout)
    assert words.shape == layout.packed_shape(*shape)
    assert np.array_equal(unpack_values(words, layout), values)


def test_first_words_by_hand() -> None:
    """Lane 0 of warp 0 in four layouts, written out: the low end of the first word comes first."""
    values = np.arange(32 * 64, dtype=np.uint16).reshape(32, 64)
    low = (values & 0xFF).astype(np.uint8)
    wide = reference_repack(pack_values(low, Layout(bits=8)), Layout(bits=8))
    rows = (0, 8, 1, 9)  # (l, h) = (0, 0), (0, 1), (1, 0), (1, 1)
    assert wide[0, 0] == sum(int(low[row, 0]) << 8 * i for i, row in enumerate(rows))
    assert wide[0, 1] == sum(int(low[row, 8]) << 8 * i for i, row in enumerate(rows))

    nibbles = (values % 13).astype(np.uint8)
    four = reference_repack(pack_values(nibbles, Layout(bits=4)), Layout(bits=4))
    places = ((0, 0), (8, 0), (0, 8), (8, 8), (1, 0), (9, 0), (1, 8), (9, 8))
    assert four[0, 0] == sum(int(nibbles[place]) << 4 * i for i, place in enumerate(places))

    narrow = Layout(bits=8, activation=Activation.NARROW)
    marlin = reference_repack(pack_values(low, narrow), narrow)
    assert marlin[0, 0] == sum(int(low[row, 0]) << 8 * row for row in range(4))
    assert marlin[0, 1] == sum(int(low[row + 16, 0]) << 8 * row for row in range(4))


def test_awq_interleave_by_hand() -> None:
    values = np.arange(8, dtype=np.uint8).reshape(1, 8)
    assert pack_values(values, Layout(bits=4, packing=Packing.AWQ))[0, 0] == 0x75316420
    assert pack_values(values[:, :4], Layout(bits=8, packing=Packing.AWQ))[0, 0] == 0x03010200
    assert all(sorted(positions) == list(range(32 // bits)) for bits, positions in AWQ_POSITIONS.items())


def test_widths_without_a_layout_are_refused() -> None:
    with pytest.raises(ValueError, match="no layout for 2 bits"):
        Layout(bits=2)


def test_the_inverse_sees_one_flipped_bit() -> None:
    case = Case(layout=Layout(bits=4), size_k=64, size_n=128)
    words = random_words(case)
    marlin = reference_repack(words, case.layout)
    marlin[1, 77] ^= np.uint32(1 << 19)
    restored = reference_values(marlin, case.layout, case.size_k, case.size_n)
    assert np.count_nonzero(restored != unpack_values(words, case.layout)) == 1
