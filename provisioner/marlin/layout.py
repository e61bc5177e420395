"""The Marlin weight layout, stated once: three ways to pack a quantised weight into int32 words. Pure.

A weight is a matrix of unsigned values of 4 or 8 bits, ``size_k`` rows (inputs) by ``size_n`` columns (outputs);
``32 // bits`` of them share a word. Position 0 of a word is its least significant bits.

* GPTQ packs along k: word ``(p, n)`` holds rows ``p * per_word + position`` of column ``n``.
* AWQ packs along n with an interleave: word ``(k, q)`` holds column ``q * per_word + c`` at position
  ``AWQ_POSITIONS[bits][c]``.
* Marlin stores tiles in the order in which the lanes of a warp want them for the tensor cores. A tile is 16 rows by 64
  columns for 16-bit activations, 32 by 32 for 8-bit ones. Tiles follow each other along n, then along k; inside a tile
  the storage order is a permutation of the bit fields of (k, n): :data:`TILES`.

Act-order (``perm``) gathers rows first: row k of the Marlin weight is row ``perm[k]`` of the packed one.

Source: vLLM's repack kernels (``quantization/marlin/{gptq,awq}_marlin_repack.cu``), read for facts; compared bit for
bit with the compiled op of 0.27.1 and 0.30.0 (docs/verification.md).

Everything here is slow and meant to be read. :func:`reference_repack` and its inverse come from the definition of each
word (which lane of which warp packs which values), :func:`permute_tiles` from the axes. Tests hold the two against each
other and the fast repack against both.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, assert_never

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[np.uint32]
    Values = NDArray[np.uint8]

WORD_BITS = 32
MARLIN_ROW = 16
"""Rows of the weight in one row of the Marlin words, whatever the tile."""


class Packing(StrEnum):
    """How a checkpoint packs values into words."""

    GPTQ = "gptq"
    AWQ = "awq"


class Activation(IntEnum):
    """Bits of the activations that the weight will be multiplied with; 8 is vLLM's ``is_a_8bit``."""

    WIDE = 16
    NARROW = 8


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A bit field of k or of n inside a tile; ``size`` is a power of two."""

    name: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The permutation inside a tile.

    ``k_axes`` and ``n_axes`` split row and column of a value, most significant field first. ``order`` names the same
    fields in storage order, most significant first; the last of them, as many as fill a word, give the position in it.
    """

    k_axes: tuple[Axis, ...]
    n_axes: tuple[Axis, ...]
    order: tuple[str, ...]

    @property
    def rows(self) -> int:
        return math.prod(axis.size for axis in self.k_axes)

    @property
    def columns(self) -> int:
        return math.prod(axis.size for axis in self.n_axes)


# Rows: h is the half of the tile, r the group of rows that a lane owns in it, l the row in the group. Columns: j and b
# name the fragment of 8 columns, c the column in it. (c, r) is the lane: lane = 4 * c + r.
_WIDE_K = (Axis(name="h", size=2), Axis(name="r", size=4), Axis(name="l", size=2))
_WIDE_N = (Axis(name="j", size=4), Axis(name="b", size=2), Axis(name="c", size=8))
_NARROW_K = (Axis(name="h", size=2), Axis(name="r", size=4), Axis(name="l", size=4))
_NARROW_N = (Axis(name="j", size=2), Axis(name="b", size=2), Axis(name="c", size=8))

TILES = {
    (8, Activation.WIDE): Tile(k_axes=_WIDE_K, n_axes=_WIDE_N, order=("c", "r", "j", "b", "l", "h")),
    (4, Activation.WIDE): Tile(k_axes=_WIDE_K, n_axes=_WIDE_N, order=("c", "r", "j", "l", "b", "h")),
    (8, Activation.NARROW): Tile(k_axes=_NARROW_K, n_axes=_NARROW_N, order=("c", "r", "j", "b", "h", "l")),
    (4, Activation.NARROW): Tile(k_axes=_NARROW_K, n_axes=_NARROW_N, order=("c", "r", "j", "b", "l", "h")),
}
"""The layout: (bits, activation) -> tile."""

AWQ_POSITIONS = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}
"""Position in its word of each of the columns that share an AWQ word."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One of the eight repacks. ``bits`` is 4 or 8."""

    bits: int
    packing: Packing = Packing.GPTQ
    activation: Activation = Activation.WIDE

    def __post_init__(self) -> None:
        if (self.bits, self.activation) not in TILES:
            raise ValueError(f"Marlin has no layout for {self.bits} bits")

    @property
    def per_word(self) -> int:
        return WORD_BITS // self.bits

    @property
    def tile(self) -> Tile:
        return TILES[self.bits, self.activation]

    def packed_shape(self, size_k: int, size_n: int) -> tuple[int, int]:
        """Shape of the checkpoint's int32 words."""
        match self.packing:
            case Packing.GPTQ:
                return size_k // self.per_word, size_n
            case Packing.AWQ:
                return size_k, size_n // self.per_word
            case _:
                assert_never(self.packing)

    def marlin_shape(self, size_k: int, size_n: int) -> tuple[int, int]:
        """Shape of the Marlin int32 words: ``(size_k / 16, size_n * 16 / per_word)``."""
        return size_k // MARLIN_ROW, size_n * MARLIN_ROW // self.per_word


def all_layouts() -> tuple[Layout, ...]:
    """Every repack there is: two packings, two widths, two kinds of activation."""
    return tuple(
        Layout(bits=bits, packing=packing, activation=activation)
        for packing in Packing
        for bits in (4, 8)
        for activation in Activation
    )


def pack_values(values: "Values", layout: Layout) -> "Words":
    """Checkpoint words, shape ``layout.packed_shape(size_k, size_n)``, of ``values``, shape (size_k, size_n)."""
    import numpy as np

    size_k, size_n = values.shape
    words = np.zeros(layout.packed_shape(size_k, size_n), dtype=np.uint32)
    for index in range(layout.per_word):
        match layout.packing:
            case Packing.GPTQ:
                position, share = index, values[index :: layout.per_word]
            case Packing.AWQ:
                position, share = AWQ_POSITIONS[layout.bits][index], values[:, index :: layout.per_word]
            case _:
                assert_never(layout.packing)
        words |= share.astype(np.uint32) << np.uint32(layout.bits * position)
    return words


def unpack_values(words: "Words", layout: Layout) -> "Values":
    """Inverse of :func:`pack_values`: values of shape (size_k, size_n), uint8, of checkpoint words (uint32)."""
    import numpy as np

    rows, columns = words.shape
    mask = np.uint32((1 << layout.bits) - 1)
    if layout.packing is Packing.GPTQ:
        values = np.empty((rows * layout.per_word, columns), dtype=np.uint8)
        for index in range(layout.per_word):
            values[index :: layout.per_word] = words >> np.uint32(layout.bits * index) & mask
        return values
    values = np.empty((rows, columns * layout.per_word), dtype=np.uint8)
    for index, position in enumerate(AWQ_POSITIONS[layout.bits]):
        values[:, index :: layout.per_word] = words >> np.uint32(layout.bits * position) & mask
    return values


def permute_tiles(values: "Values", layout: Layout) -> "Values":
    """``values``, shape (size_k, size_n), in the order of Marlin's storage, shape (size_k / 16, size_n * 16).

    This is the layout as axes: a view with one axis a bit field, one permutation, a copy.
    """
    size_k, size_n = values.shape
    tile = layout.tile
    fields = ("kt", *(axis.name for axis in tile.k_axes), "nt", *(axis.name for axis in tile.n_axes))
    sizes = (-1, *(axis.size for axis in tile.k_axes), size_n // tile.columns, *(axis.size for axis in tile.n_axes))
    storage = [fields.index(name) for name in ("kt", "nt", *tile.order)]
    return values.reshape(sizes).transpose(storage).reshape(size_k // MARLIN_ROW, size_n * MARLIN_ROW)


def pack_storage(values: "Values", layout: Layout) -> "Words":
    """Words of values that are in storage order already: consecutive values fill a word from its low end."""
    import numpy as np

    words = np.zeros((values.shape[0], values.shape[1] // layout.per_word), dtype=np.uint32)
    for position in range(layout.per_word):
        words |= values[:, position :: layout.per_word].astype(np.uint32) << np.uint32(layout.bits * position)
    return words


def place_in_tile(layout: Layout, word: int, position: int) -> tuple[int, int]:
    """(row, column) in the tile of the value at ``position`` of the tile's ``word``.

    By the warps that pack a tile: four of them, 32 lanes each, every lane packs eight values. For 16-bit activations a
    lane takes rows 2r, 2r+1, 2r+8, 2r+9 of two columns that are 8 apart; for 8-bit ones rows 4r to 4r+3 and the same
    16 further down, of one column. Eight values are one word of 4 bits or two words of 8 bits.
    """
    words_a_lane = 8 // layout.per_word
    lane, rest = divmod(word, 4 * words_a_lane)
    warp, second = divmod(rest, words_a_lane)
    column, quad = divmod(lane, 4)
    if layout.activation is Activation.WIDE:
        which = (0, 2, 4, 6, 1, 3, 5, 7)[position] if layout.bits == 4 else 4 * second + (0, 2, 1, 3)[position]
        return 2 * quad + (0, 1, 8, 9)[which % 4], 16 * warp + column + 8 * (which // 4)
    which = (0, 4, 1, 5, 2, 6, 3, 7)[position] if layout.bits == 4 else 4 * second + position
    return 4 * quad + which % 4 + 16 * (which // 4), 8 * warp + column


def places_in_tile(layout: Layout) -> Iterator[tuple[int, int, int, int]]:
    """(word, position, row, column) of every value of a tile."""
    for word in range(layout.tile.rows * layout.tile.columns // layout.per_word):
        for position in range(layout.per_word):
            yield word, position, *place_in_tile(layout, word, position)


def reference_repack(words: "Words", layout: Layout, *, perm: "NDArray[np.integer] | None" = None) -> "Words":
    """Marlin words, shape ``layout.marlin_shape(size_k, size_n)``, of checkpoint words, both uint32.

    ``perm``, shape (size_k,), is act-order's. Value by value from :func:`place_in_tile`, vectorised over tiles only.
    Sizes must be multiples of the tile's.
    """
    import numpy as np

    values = unpack_values(words, layout)
    if perm is not None:
        values = values[perm]
    size_k, size_n = values.shape
    tile = layout.tile
    tiles = values.reshape(size_k // tile.rows, tile.rows, size_n // tile.columns, tile.columns)
    marlin = np.zeros((tiles.shape[0], tiles.shape[2], tile.rows * tile.columns // layout.per_word), dtype=np.uint32)
    for word, position, row, column in places_in_tile(layout):
        marlin[:, :, word] |= tiles[:, row, :, column].astype(np.uint32) << np.uint32(layout.bits * position)
    return marlin.reshape(layout.marlin_shape(size_k, size_n))


def reference_values(marlin: "Words", layout: Layout, size_k: int, size_n: int) -> "Values":
    """Inverse of the repack: the values, shape (size_k, size_n), that Marlin words (uint32) hold."""
    import numpy as np

    tile = layout.tile
    tiles = np.empty((size_k // tile.rows, tile.rows, size_n // tile.columns, tile.columns), dtype=np.uint8)
    stored = marlin.reshape(tiles.shape[0], tiles.shape[2], -1)
    mask = np.uint32((1 << layout.bits) - 1)
    for word, position, row, column in places_in_tile(layout):
        tiles[:, row, :, column] = stored[:, :, word] >> np.uint32(layout.bits * position) & mask
    return tiles.reshape(size_k, size_n)
