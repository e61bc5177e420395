"""What a repack is tried on: shapes, values that show a swap, calls that must be refused, where two differ. Pure.

Like the rest of this folder it can be loaded by path into another interpreter, which needs numpy and nothing else.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .layout import Activation, Layout, Packing, all_layouts, pack_values

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .layout import Words

SMALL_SHAPES = ((32, 64), (64, 64), (96, 192), (160, 256), (64, 1088), (1024, 640))
"""(size_k, size_n) that every layout takes: one tile, several, odd counts of tiles, long rows, many rows."""

WIDE_ONLY_SHAPES = ((16, 64), (48, 192), (1040, 128))
"""Odd multiples of 16 rows: half a tile for 8-bit activations."""

MODEL_SHAPES = ((5120, 17408), (17408, 5120), (5120, 34816), (5120, 16384), (6144, 5120))
"""Qwen3.8-27B: hidden 5120, MLP 17408, gate and up fused, attention in and out."""

LAYER_SHAPES = ((5120, 34816), (17408, 5120), (5120, 16384), (6144, 5120))
"""The weights of one of its 64 layers as vLLM repacks them."""

HUGE_SHAPE = (16384, 135168)
"""Above 2 GiB at 8 bits: offsets in bytes no longer fit 31 bits."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One repack to try."""

    layout: Layout
    size_k: int
    size_n: int
    act_order: bool = False

    @property
    def name(self) -> str:
        order = "-actorder" if self.act_order else ""
        layout = self.layout
        return f"{layout.packing}-w{layout.bits}-a{int(layout.activation)}-{self.size_k}x{self.size_n}{order}"


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A call that must be refused. ``by_op`` says whether the compiled op refuses it as well.

    ``shape`` is the shape of the words that the call passes.
    """

    name: str
    packing: Packing
    bits: int
    size_k: int
    size_n: int
    shape: tuple[int, int]
    activation: Activation = Activation.WIDE
    act_order: bool = False
    by_op: bool = True


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How two results differ: ``count`` words, the first at ``index`` with the values ``left`` and ``right``."""

    count: int
    index: tuple[int, ...]
    left: int
    right: int


def small_cases() -> tuple[Case, ...]:
    """Every layout on small shapes, with act-order where there is one."""
    return tuple(
        case
        for layout in all_layouts()
        for size_k, size_n in SMALL_SHAPES + (WIDE_ONLY_SHAPES if layout.activation is Activation.WIDE else ())
        for case in with_act_order(Case(layout=layout, size_k=size_k, size_n=size_n))
    )


def model_cases() -> tuple[Case, ...]:
    """Every layout on the shapes of a real model."""
    return tuple(
        case
        for layout in all_layouts()
        for size_k, size_n in MODEL_SHAPES
        for case in with_act_order(Case(layout=layout, size_k=size_k, size_n=size_n))
    )


def huge_cases() -> tuple[Case, ...]:
    """One weight above 2 GiB."""
    return (Case(layout=Layout(bits=8), size_k=HUGE_SHAPE[0], size_n=HUGE_SHAPE[1]),)


def with_act_order(case: Case) -> tuple[Case, ...]:
    """``case``, and its act-order twin where Marlin has one (GPTQ packing, 16-bit activations)."""
    if case.layout.packing is Packing.AWQ or case.layout.activation is Activation.NARROW:
        return (case,)
    return case, Case(layout=case.layout, size_k=case.size_k, size_n=case.size_n, act_order=True)


def refusals() -> tuple[Refusal, ...]:
    """Calls that a repack must refuse."""
    gptq, awq, narrow = Packing.GPTQ, Packing.AWQ, Activation.NARROW
    return (
        Refusal(name="k not of 16", packing=gptq, bits=8, size_k=24, size_n=64, shape=(6, 64)),
        Refusal(name="n not of 64", packing=gptq, bits=8, size_k=16, size_n=96, shape=(4, 96)),
        Refusal(name="k not of 16, awq", packing=awq, bits=4, size_k=24, size_n=64, shape=(24, 8)),
        Refusal(name="n not of 64, awq", packing=awq, bits=4, size_k=16, size_n=96, shape=(16, 12)),
        Refusal(name="2 bits", packing=gptq, bits=2, size_k=16, size_n=64, shape=(1, 64)),
        Refusal(name="rows missing", packing=gptq, bits=8, size_k=32, size_n=64, shape=(4, 64)),
        Refusal(name="columns missing", packing=gptq, bits=4, size_k=16, size_n=128, shape=(2, 64)),
        Refusal(name="rows missing, awq", packing=awq, bits=8, size_k=32, size_n=64, shape=(16, 16)),
        Refusal(
            name="act-order, 8-bit activations",
            packing=gptq,
            bits=8,
            size_k=32,
            size_n=64,
            shape=(8, 64),
            activation=narrow,
            act_order=True,
        ),
        # The compiled op checks for a multiple of 16 only, and leaves the second half of the last tile unwritten.
        Refusal(
            name="half a narrow tile",
            packing=gptq,
            bits=8,
            size_k=48,
            size_n=64,
            shape=(12, 64),
            activation=narrow,
            by_op=False,
        ),
        Refusal(
            name="half a narrow tile, awq",
            packing=awq,
            bits=4,
            size_k=48,
            size_n=64,
            shape=(48, 8),
            activation=narrow,
            by_op=False,
        ),
    )


def random_words(case: Case, seed: int = 0) -> "Words":
    """Uniform checkpoint words of the case's packed shape."""
    import numpy as np

    shape = case.layout.packed_shape(case.size_k, case.size_n)
    return np.random.default_rng(seed).integers(0, 1 << 32, size=shape, dtype=np.uint32)


def digit_count(case: Case) -> int:
    """How many digits of ``bits`` bits number every value of the case."""
    return -(-(case.size_k * case.size_n - 1).bit_length() // case.layout.bits)


def digit_words(case: Case, digit: int) -> "Words":
    """Checkpoint words in which every value is one digit of its own number, k * size_n + n, lowest digit first.

    Two values that trade places differ in some digit, so equality over all of them is equality of the permutation.
    """
    import numpy as np

    numbers = np.arange(case.size_k * case.size_n, dtype=np.uint64).reshape(case.size_k, case.size_n)
    mask = np.uint64((1 << case.layout.bits) - 1)
    return pack_values((numbers >> np.uint64(digit * case.layout.bits) & mask).astype(np.uint8), case.layout)


def make_perm(case: Case, seed: int = 0) -> "NDArray[np.int32] | None":
    """Act-order's gather of rows, (size_k,), or None where the case has none."""
    import numpy as np

    return np.random.default_rng(seed + 1).permutation(case.size_k).astype(np.int32) if case.act_order else None


def find_difference(left: "Words", right: "Words") -> Difference | None:
    """Where two arrays of words differ, None where they are equal. Raises ValueError for different shapes."""
    import numpy as np

    if left.shape != right.shape:
        raise ValueError(f"results have shapes {left.shape} and {right.shape}")
    unequal = left != right
    count = int(np.count_nonzero(unequal))
    if not count:
        return None
    index = tuple(int(part) for part in np.unravel_index(int(unequal.argmax()), unequal.shape))
    return Difference(count=count, index=index, left=int(left[index]), right=int(right[index]))
