"""What the repack is tried on."""

import numpy as np
import pytest

from provisioner.marlin.cases import (
    Case,
    Difference,
    digit_count,
    digit_words,
    find_difference,
    huge_cases,
    make_perm,
    model_cases,
    random_words,
    small_cases,
)
from provisioner.marlin.layout import Layout, all_layouts, unpack_values


def test_names_are_unique_and_every_layout_occurs() -> None:
    cases = (*small_cases(), *model_cases())
    assert len({case.name for case in cases}) == len(cases)
    assert {case.layout for case in small_cases()} == {case.layout for case in model_cases()} == set(all_layouts())
    assert any(case.act_order for case in small_cases())


def test_the_huge_case_is_above_two_gib() -> None:
    (case,) = huge_cases()
    assert case.size_k * case.size_n * case.layout.bits // 8 > 2**31


def test_digits_number_every_value() -> None:
    case = Case(layout=Layout(bits=4), size_k=32, size_n=64)
    number = sum(
        unpack_values(digit_words(case, digit), case.layout).astype(np.int64) << 4 * digit
        for digit in range(digit_count(case))
    )
    assert np.array_equal(number, np.arange(32 * 64).reshape(32, 64))


def test_random_words_and_perm_repeat() -> None:
    case = Case(layout=Layout(bits=8), size_k=64, size_n=64, act_order=True)
    assert np.array_equal(random_words(case, seed=3), random_words(case, seed=3))
    assert not np.array_equal(random_words(case, seed=3), random_words(case, seed=4))
    perm = make_perm(case)
    assert perm is not None
    assert sorted(perm.tolist()) == list(range(64))


def test_a_difference_names_the_first_word_and_both_values() -> None:
    left = np.arange(12, dtype=np.uint32).reshape(3, 4)
    right = left.copy()
    assert find_difference(left, right) is None
    right[1, 2] ^= np.uint32(8)
    right[2, 0] ^= np.uint32(1)
    assert find_difference(left, right) == Difference(count=2, index=(1, 2), left=6, right=14)
    with pytest.raises(ValueError, match="shapes"):
        find_difference(left, right[:1])
