"""Marlin's weight repack on the CPU, at about the speed of a memory copy, and the hook that puts it into vLLM.

One source, two lives: here as ``provisioner.marlin.repack``, and inside a patched vLLM as ``vllm._sm80_cpu_repack``. So
it imports nothing of this project, needs torch (and uses numba where there is one), and loads either only when it runs.

The layout is stated in this project's ``marlin/layout.py``; the kernels below are that permutation, rewritten so that
the inner loops run over neighbouring words. Everything is split into tiles that do not share output, so the work
spreads over a pool of threads and the result does not depend on how. numba's own parallel layer is not used: its
workqueue must not be entered from several threads, and a server's loader may do that. A tile here is 16 rows (32 for
8-bit activations) by 64 columns.

Memory: the output, and a few hundred KiB of scratch a thread (act-order: 64 bytes a row of the weight a thread, at most
32 MiB together). From a GPU: 48 MiB of pinned staging a device while a model loads.

The parts, in this order: what is refused; numba's kernels; the same three steps in torch; the work list; the repack of
tensors in host memory; the pipeline for tensors on a GPU; the hook.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
import inspect
import logging
import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

logger = logging.getLogger(__name__)

SETTING = "VLLM_MARLIN_CPU_REPACK"
STRIP = 64
"""Columns of a strip: the columns of one wide tile, of two narrow ones, and the multiple that Marlin asks of size_n."""
SCRATCH_BYTES = 256 << 10
ACT_ORDER_BYTES = 32 << 20
MAX_THREADS = 32


class RepackError(ValueError):
    """The weight has no Marlin layout, or the arguments contradict each other."""


@dataclass(frozen=True)
class Weight:
    """What is repacked: ``experts`` matrices of ``size_k`` x ``size_n`` values of ``bits`` bits.

    ``packing`` is "gptq" (along k) or "awq" (along n, interleaved); ``narrow`` means 8-bit activations.
    """

    packing: str
    bits: int
    narrow: bool
    size_k: int
    size_n: int
    experts: int = 1

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    @property
    def tile_rows(self) -> int:
        return 32 if self.narrow else 16

    @property
    def source_rows(self) -> int:
        """Rows of packed words that one row of tiles comes from."""
        return self.tile_rows if self.packing == "awq" else self.tile_rows // self.per_word

    @property
    def packed_shape(self) -> tuple[int, int]:
        if self.packing == "awq":
            return self.size_k, self.size_n // self.per_word
        return self.size_k // self.per_word, self.size_n

    @property
    def marlin_shape(self) -> tuple[int, int]:
        return self.size_k // 16, self.size_n * 16 // self.per_word

    @property
    def tiles(self) -> int:
        """Rows of tiles, of all experts together (experts follow each other, and none ends inside a tile)."""
        return self.experts * self.size_k // self.tile_rows

    @property
    def strips(self) -> int:
        return self.size_n // STRIP

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile, packed either way."""
        return self.tile_rows * STRIP * self.bits // 8


def check_weight(weight: Weight, *, act_order: bool) -> None:
    """Raise RepackError for what Marlin cannot hold.

    The compiled op refuses the same, and lets three things through that it leaves half done: 8-bit activations with
    ``size_k`` an odd multiple of 16, act-order together with 8-bit activations, and empty weights.
    """
    if weight.bits not in (4, 8):
        raise RepackError(f"num_bits must be 4 or 8, not {weight.bits}")
    if min(weight.experts, weight.size_k, weight.size_n) <= 0:
        raise RepackError(f"nothing to repack: {weight.experts} x {weight.size_k} x {weight.size_n} values")
    if weight.size_k % weight.tile_rows:
        raise RepackError(f"size_k = {weight.size_k} is not a multiple of the tile's {weight.tile_rows} rows")
    if weight.size_n % STRIP:
        raise RepackError(f"size_n = {weight.size_n} is not a multiple of {STRIP}")
    if act_order and weight.narrow:
        raise RepackError("act-order with 8-bit activations has no Marlin kernel")
    if act_order and weight.packing == "awq":
        raise RepackError("AWQ has no act-order")


def check_words(words: torch.Tensor, shape: tuple[int, ...], what: str) -> None:
    """Raise RepackError unless ``words`` is a contiguous int32 tensor of ``shape``."""
    import torch

    if words.dtype != torch.int32:
        raise RepackError(f"{what} must be int32, not {words.dtype}")
    if tuple(words.shape) != shape:
        raise RepackError(f"{what} has shape {tuple(words.shape)}, expected {shape}")
    if not words.is_contiguous():
        raise RepackError(f"{what} is not contiguous")


def read_order(weight: Weight, perm: torch.Tensor) -> torch.Tensor:
    """The rows that act-order gathers, for each expert: int64 on the CPU, shape (experts, size_k).

    Raises RepackError unless each row of ``perm`` holds every index once: the compiled op would read elsewhere.
    """
    import torch

    check_words(perm, (weight.size_k,) if perm.dim() == 1 else (weight.experts, weight.size_k), "perm")
    order = perm.to(device="cpu", dtype=torch.int64).reshape(-1, weight.size_k)
    if not torch.equal(order.sort(dim=1).values, torch.arange(weight.size_k).expand_as(order)):
        raise RepackError(f"perm is not a permutation of 0 to {weight.size_k - 1}")
    return order


# --- numba ----------------------------------------------------------------------------------------------------------
# Plain functions that numba compiles on first use (_numba_kernel). They shift and mask in uint32, so that the loops
# over columns become vector instructions; constants are therefore made with the array's own type. `out` has one row a
# row of tiles. Each kernel first makes the words of a tile where its columns lie (vector code), then moves them to
# their lanes.


def _shuffle_8(source: Any, row: int, column: int, out: Any, k0: int, n0: int, tiles: int, strips: int) -> None:
    """8-bit GPTQ words straight to Marlin words, 16-bit activations."""
    u = source.dtype.type
    even_bytes, odd_bytes, low, high, byte, half = (
        u(0x00FF00FF),
        u(0xFF00FF00),
        u(0x0000FFFF),
        u(0xFFFF0000),
        u(8),
        u(16),
    )
    made = source[:4, :64].copy()
    for kt in range(tiles):
        for nt in range(strips):
            start = column + 64 * nt
            for quad in range(2):
                upper = source[row + 4 * kt + quad, start : start + 64]
                lower = source[row + 4 * kt + quad + 2, start : start + 64]
                first = made[2 * quad]
                second = made[2 * quad + 1]
                for i in range(64):
                    x = upper[i]
                    y = lower[i]
                    even = (x & even_bytes) | ((y & even_bytes) << byte)
                    odd = ((x >> byte) & even_bytes) | (y & odd_bytes)
                    first[i] = (even & low) | (odd << half)
                    second[i] = (even >> half) | (odd & high)
            target = out[k0 + kt, 256 * (n0 + nt) : 256 * (n0 + nt) + 256]
            for c in range(8):
                for r in range(4):
                    for jb in range(8):
                        target[32 * c + 8 * r + jb] = made[r, 8 * jb + c]


def _shuffle_4(source: Any, row: int, column: int, out: Any, k0: int, n0: int, tiles: int, strips: int) -> None:
    """4-bit GPTQ words straight to Marlin words, 16-bit activations."""
    u = source.dtype.type
    even_nibbles, odd_nibbles, even_bytes, odd_bytes = u(0x0F0F0F0F), u(0xF0F0F0F0), u(0x00FF00FF), u(0xFF00FF00)
    low, high, nibble, byte, half = u(0x0000FFFF), u(0xFFFF0000), u(4), u(8), u(16)
    columns = source[:2, :64].copy().reshape(4, 32)
    made = source[:2, :64].copy().reshape(4, 32)
    for kt in range(tiles):
        for nt in range(strips):
            start = column + 64 * nt
            upper = source[row + 2 * kt, start : start + 64]
            lower = source[row + 2 * kt + 1, start : start + 64]
            for j in range(4):
                for c in range(8):
                    columns[0, 8 * j + c] = upper[16 * j + c]
                    columns[1, 8 * j + c] = upper[16 * j + 8 + c]
                    columns[2, 8 * j + c] = lower[16 * j + c]
                    columns[3, 8 * j + c] = lower[16 * j + 8 + c]
            upper_left, upper_right, lower_left, lower_right = columns[0], columns[1], columns[2], columns[3]
            first, second, third, fourth = made[0], made[1], made[2], made[3]
            for i in range(32):
                a = (upper_left[i] & even_nibbles) | ((lower_left[i] & even_nibbles) << nibble)
                b = (upper_right[i] & even_nibbles) | ((lower_right[i] & even_nibbles) << nibble)
                d = ((upper_left[i] >> nibble) & even_nibbles) | (lower_left[i] & odd_nibbles)
                e = ((upper_right[i] >> nibble) & even_nibbles) | (lower_right[i] & odd_nibbles)
                ab_even = (a & even_bytes) | ((b & even_bytes) << byte)
                ab_odd = ((a >> byte) & even_bytes) | (b & odd_bytes)
                de_even = (d & even_bytes) | ((e & even_bytes) << byte)
                de_odd = ((d >> byte) & even_bytes) | (e & odd_bytes)
                first[i] = (ab_even & low) | (de_even << half)
                second[i] = (ab_odd & low) | (de_odd << half)
                third[i] = (ab_even >> half) | (de_even & high)
                fourth[i] = (ab_odd >> half) | (de_odd & high)
            target = out[k0 + kt, 128 * (n0 + nt) : 128 * (n0 + nt) + 128]
            for c in range(8):
                for r in range(4):
                    for j in range(4):
                        target[16 * c + 4 * r + j] = made[r, 8 * j + c]


def _unpack_gptq(source: Any, bits: int, row: int, column: int, rows: int, strips: int, values: Any) -> None:
    """values[strip, k, column] of GPTQ words; ``rows`` counts values."""
    u = source.dtype.type
    per_word = 32 // bits
    mask = u((1 << bits) - 1)
    for nt in range(strips):
        start = column + 64 * nt
        for p in range(rows // per_word):
            words = source[row + p, start : start + 64]
            for position in range(per_word):
                shift = u(bits * position)
                target = values[nt, per_word * p + position]
                for i in range(64):
                    target[i] = (words[i] >> shift) & mask


def _unpack_awq_4(source: Any, row: int, column: int, rows: int, strips: int, wide: Any) -> None:
    """values[strip, k, column] of AWQ words, given as uint64: one word's eight columns are one element of ``wide``.

    The low half of a word holds the even columns, the high half the odd ones.
    """
    u = wide.dtype.type
    half, spread, step, pairs, nibbles, byte = (
        u(0xFFFF),
        u(24),
        u(12),
        u(0x000000FF000000FF),
        u(0x000F000F000F000F),
        u(8),
    )
    sixteen = u(16)
    for nt in range(strips):
        start = column + 8 * nt
        for k in range(rows):
            words = source[row + k, start : start + 8]
            target = wide[nt, k]
            for q in range(8):
                x = u(words[q]) & half
                y = u(words[q]) >> sixteen
                x = (x | (x << spread)) & pairs
                y = (y | (y << spread)) & pairs
                x = (x | (x << step)) & nibbles
                y = (y | (y << step)) & nibbles
                target[q] = x | (y << byte)


def _unpack_awq_8(source: Any, row: int, column: int, rows: int, strips: int, wide: Any) -> None:
    """The same for 8 bits, given as uint32: the two middle bytes of a word change places."""
    u = source.dtype.type
    outer, third, second, byte = u(0xFF0000FF), u(0x00FF0000), u(0x0000FF00), u(8)
    for nt in range(strips):
        start = column + 16 * nt
        for k in range(rows):
            words = source[row + k, start : start + 16]
            target = wide[nt, k]
            for q in range(16):
                x = words[q]
                target[q] = (x & outer) | ((x << byte) & third) | ((x >> byte) & second)


def _merge_wide(values: Any, bits: int, order: Any, out: Any, k0: int, n0: int, strips: int, made: Any) -> None:
    """Values, rows taken in ``order``, to Marlin words for 16-bit activations; ``made`` is uint32 scratch (4, 64)."""
    u = out.dtype.type
    shift, half, upper = u(bits), u(16), u(16 + bits)
    byte = u(8)
    for nt in range(strips):
        for kt in range(len(order) // 16):
            for r in range(4):
                k = 16 * kt + 2 * r
                a, b = values[nt, order[k]], values[nt, order[k + 8]]
                d, e = values[nt, order[k + 1]], values[nt, order[k + 9]]
                target = made[r]
                for i in range(64):
                    target[i] = u(a[i]) | (u(b[i]) << shift) | (u(d[i]) << half) | (u(e[i]) << upper)
            if bits == 8:
                words = out[k0 + kt, 256 * (n0 + nt) : 256 * (n0 + nt) + 256]
                for c in range(8):
                    for r in range(4):
                        for jb in range(8):
                            words[32 * c + 8 * r + jb] = made[r, 8 * jb + c]
            else:
                words = out[k0 + kt, 128 * (n0 + nt) : 128 * (n0 + nt) + 128]
                for c in range(8):
                    for r in range(4):
                        for j in range(4):
                            words[16 * c + 4 * r + j] = made[r, 16 * j + c] | (made[r, 16 * j + 8 + c] << byte)


def _merge_narrow(values: Any, bits: int, order: Any, out: Any, k0: int, n0: int, strips: int, made: Any) -> None:
    """Values, rows taken in ``order``, to Marlin words for 8-bit activations; ``made`` is uint32 scratch (8, 64).

    A strip is two tiles of 32 columns. Row 4 * h + r of ``made`` holds the four rows l, a byte each; for 4 bits the
    nibbles of both halves h share a byte.
    """
    u = out.dtype.type
    nibble, byte, half, upper = u(4), u(8), u(16), u(24)
    for nt in range(strips):
        for kt in range(len(order) // 32):
            for g in range(8):
                k = 32 * kt + 4 * g
                a, b = values[nt, order[k]], values[nt, order[k + 1]]
                d, e = values[nt, order[k + 2]], values[nt, order[k + 3]]
                target = made[g]
                for i in range(64):
                    target[i] = u(a[i]) | (u(b[i]) << byte) | (u(d[i]) << half) | (u(e[i]) << upper)
            if bits == 8:
                words = out[k0 + kt, 512 * (n0 + nt) : 512 * (n0 + nt) + 512]
                for lane in range(64):
                    at = 32 * (lane >> 5) + ((lane >> 2) & 7)
                    r = lane & 3
                    for jb in range(4):
                        words[8 * lane + 2 * jb] = made[r, at + 8 * jb]
                        words[8 * lane + 2 * jb + 1] = made[4 + r, at + 8 * jb]
            else:
                words = out[k0 + kt, 256 * (n0 + nt) : 256 * (n0 + nt) + 256]
                for lane in range(64):
                    at = 32 * (lane >> 5) + ((lane >> 2) & 7)
                    r = lane & 3
                    for jb in range(4):
                        words[4 * lane + jb] = made[r, at + 8 * jb] | (made[4 + r, at + 8 * jb] << nibble)


_SIGNATURES = {
    "_shuffle_8": "void(uint32[:,::1], int64, int64, uint32[:,::1], int64, int64, int64, int64)",
    "_shuffle_4": "void(uint32[:,::1], int64, int64, uint32[:,::1], int64, int64, int64, int64)",
    "_unpack_gptq": "void(uint32[:,::1], int64, int64, int64, int64, int64, uint8[:,:,::1])",
    "_unpack_awq_4": "void(uint32[:,::1], int64, int64, int64, int64, uint64[:,:,::1])",
    "_unpack_awq_8": "void(uint32[:,::1], int64, int64, int64, int64, uint32[:,:,::1])",
    "_merge_wide": "void(uint8[:,:,::1], int64, int64[::1], uint32[:,::1], int64, int64, int64, uint32[:,::1])",
    "_merge_narrow": "void(uint8[:,:,::1], int64, int64[::1], uint32[:,::1], int64, int64, int64, uint32[:,::1])",
}
_compiling = threading.Lock()


@functools.cache
def _numba_kernel(name: str) -> Callable[..., None]:
    """The compiled kernel, from numba's cache on disk where its folder can be written (about 1 s otherwise)."""
    import numba

    with _compiling:
        try:
            return numba.njit(_SIGNATURES[name], nogil=True, cache=True)(globals()[name])  # type: ignore[no-any-return]
        except RuntimeError:  # no folder for the cache
            return numba.njit(_SIGNATURES[name], nogil=True)(globals()[name])  # type: ignore[no-any-return]


# --- engines --------------------------------------------------------------------------------------------------------


class Engine(Protocol):
    """The three steps, on views that the engine makes of CPU tensors of words.

    ``shuffle`` does GPTQ for 16-bit activations in one go. Everything else is ``unpack`` into values, shape (strips,
    rows, 64), uint8, then ``merge``, which takes their rows in ``order``. Sizes are in tiles and strips; ``k0`` and
    ``n0`` say where the first one goes; ``out`` has one row a row of tiles.
    """

    name: str
    tiles_a_task: int | None

    def view(self, words: torch.Tensor) -> Any: ...

    def indices(self, order: torch.Tensor) -> Any: ...

    def scratch(self, strips: int, rows: int) -> Any: ...

    def shuffle(self, weight: Weight, source: Any, out: Any, *, k0: int, n0: int, tiles: int, strips: int) -> None: ...

    def unpack(
        self, weight: Weight, source: Any, values: Any, *, row: int, n0: int, rows: int, strips: int
    ) -> None: ...

    def merge(self, weight: Weight, values: Any, order: Any, out: Any, *, k0: int, n0: int, strips: int) -> None: ...


class NumbaEngine:
    """Compiled loops; they release the GIL."""

    name = "numba"
    tiles_a_task: int | None = None

    def view(self, words: torch.Tensor) -> Any:
        return words.numpy().view("uint32")

    def indices(self, order: torch.Tensor) -> Any:
        return order.numpy()

    def scratch(self, strips: int, rows: int) -> Any:
        import torch

        return torch.empty((strips, rows, STRIP), dtype=torch.uint8).numpy()

    def shuffle(self, weight: Weight, source: Any, out: Any, *, k0: int, n0: int, tiles: int, strips: int) -> None:
        kernel = _numba_kernel(f"_shuffle_{weight.bits}")
        kernel(source, k0 * weight.source_rows, n0 * STRIP, out, k0, n0, tiles, strips)

    def unpack(self, weight: Weight, source: Any, values: Any, *, row: int, n0: int, rows: int, strips: int) -> None:
        if weight.packing == "gptq":
            _numba_kernel("_unpack_gptq")(source, weight.bits, row, n0 * STRIP, rows, strips, values)
        else:
            wide = values.view("uint64" if weight.bits == 4 else "uint32")
            column = n0 * STRIP // weight.per_word
            _numba_kernel(f"_unpack_awq_{weight.bits}")(source, row, column, rows, strips, wide)

    def merge(self, weight: Weight, values: Any, order: Any, out: Any, *, k0: int, n0: int, strips: int) -> None:
        import numpy as np

        made = np.empty((8, STRIP), dtype=np.uint32)
        kernel = _numba_kernel("_merge_narrow" if weight.narrow else "_merge_wide")
        kernel(values, weight.bits, order, out, k0, n0, strips, made)


class TorchEngine:
    """Whole-tensor operations on blocks small enough that each stays in the cache and on the thread that asked.

    Two values, or two pairs, are joined by a shift and an or; one gather then puts the joined pieces into their places.
    """

    name = "torch"
    tiles_a_task: int | None = 60
    """Torch starts threads of its own from 32768 elements on; 60 tiles of 512 pieces stay below."""

    def view(self, words: torch.Tensor) -> Any:
        return words

    def indices(self, order: torch.Tensor) -> Any:
        return order

    def scratch(self, strips: int, rows: int) -> Any:
        import torch

        return torch.empty((strips, rows, STRIP), dtype=torch.uint8)

    def shuffle(self, weight: Weight, source: Any, out: Any, *, k0: int, n0: int, tiles: int, strips: int) -> None:
        import torch

        rows = source[k0 * weight.source_rows : (k0 + tiles) * weight.source_rows, n0 * STRIP : (n0 + strips) * STRIP]
        target = _tiles_of(weight, out, k0=k0, n0=n0, tiles=tiles, strips=strips)
        if weight.bits == 8:
            pieces = rows.view(torch.uint8).unflatten(0, (tiles, 2, 2))  # tile, h, quad, byte
            joined = _join(pieces[:, 0], pieces[:, 1], 8, torch.int16).view(torch.int32)
            # tile, quad, strip, jb, c, row of the quad
            _place(joined, (tiles, 2, strips, 8, 8, 2), (0, 2, 4, 1, 5, 3), target)
            return
        x, y = rows.unflatten(0, (tiles, 2)).unbind(1)
        swapped = x.bitwise_right_shift(4).bitwise_xor_(y).bitwise_and_(0x0F0F0F0F)
        odd = y ^ swapped
        even = swapped.bitwise_left_shift_(4).bitwise_xor_(x)
        joined = torch.empty((2, tiles, strips * 4, 32), dtype=torch.int16)
        for made, nibbles in zip(joined, (even, odd), strict=True):
            left, right = nibbles.view(torch.uint8).unflatten(1, (strips * 4, 2, 32)).unbind(2)
            made.copy_(right).bitwise_left_shift_(8).bitwise_or_(left)
        # l, tile, strip, j, c, r
        _place(joined, (2, tiles, strips, 4, 8, 4), (1, 2, 4, 5, 3, 0), target)

    def unpack(self, weight: Weight, source: Any, values: Any, *, row: int, n0: int, rows: int, strips: int) -> None:
        mask = (1 << weight.bits) - 1
        if weight.packing == "gptq":
            columns = source[row : row + rows // weight.per_word, n0 * STRIP : (n0 + strips) * STRIP]
            words = columns.unflatten(1, (strips, STRIP)).transpose(0, 1)
            target = values.unflatten(1, (rows // weight.per_word, weight.per_word))
            for position in range(weight.per_word):
                target[:, :, position].copy_((words >> weight.bits * position) & mask)
            return
        width = STRIP // weight.per_word
        words = source[row : row + rows, n0 * width : (n0 + strips) * width].unflatten(1, (strips, width))
        target = values.unflatten(2, (width, weight.per_word)).transpose(0, 1)
        for column, position in enumerate((0, 4, 1, 5, 2, 6, 3, 7) if weight.bits == 4 else (0, 2, 1, 3)):
            target[..., column].copy_((words >> weight.bits * position) & mask)

    def merge(self, weight: Weight, values: Any, order: Any, out: Any, *, k0: int, n0: int, strips: int) -> None:
        import torch

        tiles = len(order) // weight.tile_rows
        target = _tiles_of(weight, out, k0=k0, n0=n0, tiles=tiles, strips=strips)
        deep = 4 if weight.narrow else 2
        rows = values.index_select(1, order).view(strips, tiles, 2, 4, deep, STRIP)  # strip, tile, h, r, l, column
        if weight.bits == 4:
            rows = _join(rows[:, :, 0], rows[:, :, 1], 4, torch.uint8)  # strip, tile, r, l, column
        if weight.narrow:
            joined = _join(rows[..., ::2, :], rows[..., 1::2, :], 8, torch.int16)
            if weight.bits == 8:  # strip, tile, h, r, pair of l, half strip, jb, c
                _place(joined, (strips, tiles, 2, 4, 2, 2, 4, 8), (1, 0, 5, 7, 3, 6, 2, 4), target)
            else:  # strip, tile, r, pair of l, half strip, jb, c
                _place(joined, (strips, tiles, 4, 2, 2, 4, 8), (1, 0, 4, 6, 2, 5, 3), target)
        elif weight.bits == 8:
            joined = _join(rows[:, :, 0], rows[:, :, 1], 8, torch.int16)  # strip, tile, r, l, jb, c
            _place(joined, (strips, tiles, 4, 2, 8, 8), (1, 0, 5, 2, 4, 3), target)
        else:
            left, right = rows.unflatten(-1, (4, 2, 8)).unbind(-2)
            joined = _join(left, right, 8, torch.int16)  # strip, tile, r, l, j, c
            _place(joined, (strips, tiles, 4, 2, 4, 8), (1, 0, 5, 2, 4, 3), target)


def _join(low: torch.Tensor, high: torch.Tensor, shift: int, dtype: torch.dtype) -> torch.Tensor:
    """``low | high << shift``, contiguous."""
    import torch

    joined = torch.empty(high.shape, dtype=dtype)
    return joined.copy_(high).bitwise_left_shift_(shift).bitwise_or_(low)


@functools.lru_cache(maxsize=16)
def _storage_index(shape: tuple[int, ...], axes: tuple[int, ...]) -> torch.Tensor:
    """Where each piece in storage order comes from: the permutation of a ``shape`` as a flat int32 index."""
    import torch

    return torch.arange(math.prod(shape), dtype=torch.int32).view(shape).permute(axes).reshape(-1)


def _place(pieces: torch.Tensor, shape: tuple[int, ...], axes: tuple[int, ...], target: torch.Tensor) -> None:
    """Gather ``pieces``, permuted, into ``target``; faster than a strided copy of the same permutation."""
    import torch

    index = _storage_index(shape, axes)
    flat = pieces.view(-1)
    if target.is_contiguous():
        torch.index_select(flat, 0, index, out=target.view(-1).view(pieces.dtype))
    else:
        target.copy_(flat.index_select(0, index).view(torch.int32).view(target.shape))


def _tiles_of(weight: Weight, out: torch.Tensor, *, k0: int, n0: int, tiles: int, strips: int) -> torch.Tensor:
    """The part of ``out`` that some tiles fill: (tiles, strips, words)."""
    words = weight.tile_bytes // 4
    return out[k0 : k0 + tiles, words * n0 : words * (n0 + strips)].unflatten(1, (strips, words))


@functools.cache
def default_engine() -> Engine:
    """numba where it can be imported and compiles, torch otherwise (also under NUMBA_DISABLE_JIT)."""
    if importlib.util.find_spec("numba") is None:
        return TorchEngine()
    try:
        import numba

        if not numba.config.DISABLE_JIT:
            _numba_kernel("_shuffle_8")
            return NumbaEngine()
    except (ImportError, OSError, RuntimeError, SystemError) as error:
        logger.warning("numba cannot be used, the repack runs on torch alone and slower: %s", error)
    return TorchEngine()


# --- the work list --------------------------------------------------------------------------------------------------


def default_threads() -> int:
    """Threads that repack: the processors that this process may use, at most 32."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, MAX_THREADS)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(default_threads(), thread_name_prefix="marlin-repack")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads


def _cover(total: int, step: int) -> Iterator[tuple[int, int]]:
    """(start, length) of the pieces of ``range(total)``."""
    for start in range(0, total, step):
        yield start, min(step, total - start)


def _blocks(tiles: int, strips: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """(k0, tiles, n0, strips) of blocks of about ``size`` tiles; whole rows of tiles where they are short enough."""
    width = min(strips, size)
    for k0, deep in _cover(tiles, max(1, size // width)):
        for n0, wide in _cover(strips, width):
            yield k0, deep, n0, wide


def _drain(queue: collections.deque[Any]) -> Iterator[Any]:
    """The tasks that other threads have left."""
    while True:
        try:
            task = queue.popleft()
        except IndexError:
            return
        yield task


def _run(tasks: Sequence[Any], make_work: Callable[[], Callable[[Any], None]], workers: int) -> None:
    """Hand ``tasks`` to ``workers`` threads, each with the work function that it makes for itself.

    Returns or raises only when no thread writes any more.
    """
    queue = collections.deque(tasks)

    def work_off() -> None:
        work = make_work()
        for task in _drain(queue):
            work(task)

    workers = min(workers, len(tasks))
    if workers <= 1:
        work_off()
        return
    futures = [_pool().submit(work_off) for _ in range(workers)]
    try:
        for future in futures:
            future.result()
    finally:
        queue.clear()
        wait(futures)


# --- host memory ----------------------------------------------------------------------------------------------------


def _shuffle_all(weight: Weight, words: torch.Tensor, out: torch.Tensor, engine: Engine, workers: int) -> None:
    source, target = engine.view(words), engine.view(out)
    share = weight.tiles * weight.strips // (4 * workers)
    size = engine.tiles_a_task or min(max(share, 64), (2 << 20) // weight.tile_bytes)

    def make_work() -> Callable[[tuple[int, int, int, int]], None]:
        def work(block: tuple[int, int, int, int]) -> None:
            k0, tiles, n0, strips = block
            engine.shuffle(weight, source, target, k0=k0, n0=n0, tiles=tiles, strips=strips)

        return work

    _run(tuple(_blocks(weight.tiles, weight.strips, size)), make_work, workers)


def _merge_all(weight: Weight, words: torch.Tensor, out: torch.Tensor, engine: Engine, workers: int) -> None:
    """Everything but wide GPTQ, without act-order: through a block of values."""
    import torch

    source, target = engine.view(words), engine.view(out)
    size = min(SCRATCH_BYTES // (weight.tile_rows * STRIP), engine.tiles_a_task or SCRATCH_BYTES)

    def make_work() -> Callable[[tuple[int, int, int, int]], None]:
        def work(block: tuple[int, int, int, int]) -> None:
            k0, tiles, n0, strips = block
            rows = tiles * weight.tile_rows
            values = engine.scratch(strips, rows)
            engine.unpack(weight, source, values, row=k0 * weight.source_rows, n0=n0, rows=rows, strips=strips)
            engine.merge(weight, values, engine.indices(torch.arange(rows)), target, k0=k0, n0=n0, strips=strips)

        return work

    _run(tuple(_blocks(weight.tiles, weight.strips, size)), make_work, workers)


def _merge_ordered(
    weight: Weight, words: torch.Tensor, order: torch.Tensor, out: torch.Tensor, engine: Engine, workers: int
) -> None:
    """Act-order: the values of a whole strip, whose rows are then taken in any order without leaving the cache."""
    source, target = engine.view(words), engine.view(out)
    orders = [engine.indices(row) for row in order]
    tiles = weight.size_k // weight.tile_rows
    workers = max(1, min(workers, ACT_ORDER_BYTES // (weight.size_k * STRIP)))

    def make_work() -> Callable[[tuple[int, int]], None]:
        values = engine.scratch(1, weight.size_k)

        def work(task: tuple[int, int]) -> None:
            expert, strip = task
            row = expert * tiles * weight.source_rows
            engine.unpack(weight, source, values, row=row, n0=strip, rows=weight.size_k, strips=1)
            engine.merge(weight, values, orders[expert], target, k0=expert * tiles, n0=strip, strips=1)

        return work

    _run([(expert, strip) for expert in range(weight.experts) for strip in range(weight.strips)], make_work, workers)


def _fill(
    weight: Weight,
    words: torch.Tensor,
    order: torch.Tensor | None,
    out: torch.Tensor,
    *,
    engine: Engine,
    threads: int,
) -> None:
    """Repack checked CPU tensors of any shape into ``out``."""
    words = words.view(-1, words.shape[-1])
    out = out.view(weight.tiles, -1)
    if order is not None:
        _merge_ordered(weight, words, order, out, engine, threads)
    elif weight.packing == "gptq" and not weight.narrow:
        _shuffle_all(weight, words, out, engine, threads)
    else:
        _merge_all(weight, words, out, engine, threads)


def _describe(
    packing: str, words: torch.Tensor, size_k: int, size_n: int, bits: int, *, narrow: bool
) -> tuple[Weight, tuple[int, ...]]:
    """The weight, and the leading shape that its words and its output share: () or (experts,)."""
    if words.dim() not in (2, 3):
        raise RepackError(f"the packed weight has {words.dim()} dimensions, expected 2, or 3 with experts")
    leading = tuple(words.shape[:-2])
    return Weight(packing, bits, narrow, size_k, size_n, math.prod(leading)), leading


def repack(
    packing: str,
    words: torch.Tensor,
    size_k: int,
    size_n: int,
    bits: int,
    *,
    perm: torch.Tensor | None = None,
    is_a_8bit: bool = False,
    out: torch.Tensor | None = None,
    engine: Engine | None = None,
    threads: int | None = None,
) -> torch.Tensor:
    """Marlin words of a packed weight in host memory.

    ``words`` is int32, contiguous: (size_k / per_word, size_n) for packing "gptq", (size_k, size_n / per_word) for
    "awq", per_word = 32 / bits, with a leading axis of experts or without. ``perm`` is act-order's gather of rows,
    int32, (size_k,) or (experts, size_k); None or an empty tensor means none. The result is int32, (size_k / 16,
    size_n * 16 / per_word) with the same leading axis; it goes into ``out`` (which may be pinned) where that is given.
    Raises RepackError for whatever Marlin cannot hold.
    """
    import torch

    weight, leading = _describe(packing, words, size_k, size_n, bits, narrow=is_a_8bit)
    act_order = perm is not None and perm.numel() > 0
    check_weight(weight, act_order=act_order)
    check_words(words, leading + weight.packed_shape, "the packed weight")
    if words.device.type != "cpu":
        raise RepackError(f"the packed weight is on {words.device}; only repack_from_device reads from there")
    order = read_order(weight, perm) if perm is not None and act_order else None
    if out is None:
        out = torch.empty(leading + weight.marlin_shape, dtype=torch.int32)
    check_words(out, leading + weight.marlin_shape, "the output")
    if out.data_ptr() < words.data_ptr() + words.nbytes and words.data_ptr() < out.data_ptr() + out.nbytes:
        raise RepackError("the output overlaps the packed weight")
    engine = engine or default_engine()
    _fill(weight, words, order, out, engine=engine, threads=min(threads or MAX_THREADS, default_threads()))
    return out


# --- from a GPU and back --------------------------------------------------------------------------------------------

BLOCK_BYTES = 8 << 20
SLOTS = 3


class Ticket(Protocol):
    """A copy that is under way."""

    def synchronize(self) -> None: ...


class Link(Protocol):
    """Copies between a device and host memory that go on in the background, each direction in its own order.

    They start after everything that the caller had queued on the device at ``begin``; what the caller queues after
    ``finish`` starts after them.
    """

    def begin(self) -> None: ...

    def fetch(self, host: torch.Tensor, device: torch.Tensor) -> Ticket: ...

    def send(self, device: torch.Tensor, host: torch.Tensor) -> Ticket: ...

    def finish(self) -> None: ...


class CudaLink:
    """Two streams of one GPU, so that both directions of the bus are in use at once."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)

    def begin(self) -> None:
        import torch

        current = torch.cuda.current_stream(self._device)
        self._down.wait_stream(current)
        self._up.wait_stream(current)

    def fetch(self, host: torch.Tensor, device: torch.Tensor) -> Ticket:
        return self._copy(self._down, host, device)

    def send(self, device: torch.Tensor, host: torch.Tensor) -> Ticket:
        return self._copy(self._up, device, host)

    def _copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        import torch

        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            ticket: Ticket = stream.record_event()
            return ticket

    def finish(self) -> None:
        import torch

        torch.cuda.current_stream(self._device).wait_stream(self._up)


@dataclass
class Slot:
    """Two pinned buffers of one block, and the copy that still reads the second."""

    down: torch.Tensor
    up: torch.Tensor
    sent: Ticket | None = None


class Staging:
    """The way of weights through host memory: block by block through pinned slots, one weight at a time.

    While one block is repacked, the next ones come down and the last ones go up.
    """

    def __init__(self, link: Link, *, block_bytes: int = BLOCK_BYTES, slots: int = SLOTS, pinned: bool = True) -> None:
        self._link = link
        self._block_words = block_bytes // 4
        self._count = slots
        self._pinned = pinned
        self._slots: list[Slot] = []
        self._lock = threading.Lock()

    def repack(
        self,
        weight: Weight,
        words: torch.Tensor,
        order: torch.Tensor | None,
        out: torch.Tensor,
        *,
        engine: Engine,
        threads: int,
    ) -> None:
        """Fill ``out`` from ``words``, both on the device, both checked.

        Act-order reads rows from anywhere, so such a weight lies in host memory whole, packed and repacked, one
        expert at a time; any other passes through the slots alone.
        """
        import torch

        source, target = words.view(weight.tiles, -1), out.view(weight.tiles, -1)
        with self._lock:
            self._link.begin()
            try:
                if order is None:

                    def fill(tiles: int, down: torch.Tensor, up: torch.Tensor, _: int) -> None:
                        block = replace(weight, experts=1, size_k=tiles * weight.tile_rows)
                        _fill(block, down.view(-1, words.shape[-1]), None, up, engine=engine, threads=threads)

                    self._flow(source, target, fill)
                    return
                tiles_each = weight.tiles // weight.experts
                one = replace(weight, experts=1)
                host, made = (torch.empty((tiles_each, source.shape[1]), dtype=torch.int32) for _ in range(2))
                for expert in range(weight.experts):
                    span = slice(expert * tiles_each, (expert + 1) * tiles_each)
                    self._flow(source[span], None, lambda n, down, _, k0: host[k0 : k0 + n].view(-1).copy_(down))
                    packed = host.view(-1, words.shape[-1])
                    _fill(one, packed, order[expert : expert + 1], made, engine=engine, threads=threads)
                    self._flow(None, target[span], lambda n, _, up, k0: up.copy_(made[k0 : k0 + n].view(-1)))
            finally:
                self._link.finish()

    def _flow(
        self,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        work: Callable[[int, torch.Tensor, torch.Tensor, int], object],
    ) -> None:
        """Call ``work(tiles, down, up, k0)`` on each block of rows of tiles of ``source``, for each of ``target``."""
        shape = (source if source is not None else target).shape  # type: ignore[union-attr]
        slots = self._slots_for(shape[1])
        blocks = list(_cover(shape[0], slots[0].down.numel() // shape[1]))
        arriving: collections.deque[Ticket] = collections.deque()

        def fetch(index: int) -> None:
            if source is not None and index < len(blocks):
                k0, tiles = blocks[index]
                down = slots[index % len(slots)].down[: tiles * shape[1]]
                arriving.append(self._link.fetch(down, source[k0 : k0 + tiles].view(-1)))

        for index in range(len(slots)):
            fetch(index)
        for index, (k0, tiles) in enumerate(blocks):
            slot = slots[index % len(slots)]
            down, up = slot.down[: tiles * shape[1]], slot.up[: tiles * shape[1]]
            if source is not None:
                arriving.popleft().synchronize()
            if slot.sent is not None:
                slot.sent.synchronize()
                slot.sent = None
            work(tiles, down, up, k0)
            if target is not None:
                slot.sent = self._link.send(target[k0 : k0 + tiles].view(-1), up)
            fetch(index + len(slots))

    def _slots_for(self, row_words: int) -> list[Slot]:
        """Slots whose buffers hold at least one row of tiles."""
        import torch

        size = max(self._block_words, row_words)
        if not self._slots or self._slots[0].down.numel() < size:
            self._slots = [
                Slot(*(torch.empty(size, dtype=torch.int32, pin_memory=self._pinned) for _ in range(2)))
                for _ in range(self._count)
            ]
        return self._slots


@functools.cache
def _staging(device: torch.device) -> Staging:
    return Staging(CudaLink(device))


def repack_from_device(
    packing: str,
    words: torch.Tensor,
    size_k: int,
    size_n: int,
    bits: int,
    *,
    perm: torch.Tensor | None = None,
    is_a_8bit: bool = False,
    engine: Engine | None = None,
    threads: int | None = None,
    staging: Staging | None = None,
) -> torch.Tensor:
    """:func:`repack` for a weight on a GPU; the result is on the same GPU.

    Nothing but copies runs there, and nothing is allocated but the result. Returns when the last block is on its way
    up; what the caller queues on its stream afterwards waits for it.
    """
    import torch

    weight, leading = _describe(packing, words, size_k, size_n, bits, narrow=is_a_8bit)
    act_order = perm is not None and perm.numel() > 0
    check_weight(weight, act_order=act_order)
    check_words(words, leading + weight.packed_shape, "the packed weight")
    order = read_order(weight, perm) if perm is not None and act_order else None
    out = torch.empty(leading + weight.marlin_shape, dtype=torch.int32, device=words.device)
    (staging or _staging(words.device)).repack(
        weight,
        words,
        order,
        out,
        engine=engine or default_engine(),
        threads=min(threads or MAX_THREADS, default_threads()),
    )
    return out


# --- the hook -------------------------------------------------------------------------------------------------------

QUIET_SECONDS = 5.0
_ARGUMENTS = {"b_q_weight", "perm", "size_k", "size_n", "num_bits", "is_a_8bit"}


class Ledger:
    """Says once that the repack is active, and once, when no weight has come for a while, what it did."""

    def __init__(self, when_quiet: Callable[[], None], *, quiet_seconds: float = QUIET_SECONDS) -> None:
        self._when_quiet = when_quiet
        self._quiet_seconds = quiet_seconds
        self._lock = threading.Lock()
        self._weights = self._bytes = 0
        self._seconds = self._last = 0.0
        self._watcher: threading.Thread | None = None
        self._told = False

    def note(self, size: int, seconds: float, *, how: str) -> None:
        """Add a weight of ``size`` bytes that took ``seconds``."""
        with self._lock:
            if not self._weights:
                logger.info("Marlin weights are repacked on the CPU (%s; %s=0 turns this off)", how, SETTING)
            self._weights += 1
            self._bytes += size
            self._seconds += seconds
            self._last = time.monotonic()
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="marlin-repack-ledger", daemon=True)
                self._watcher.start()

    def _watch(self) -> None:
        while True:
            with self._lock:
                remaining = self._last + self._quiet_seconds - time.monotonic()
                if remaining <= 0:
                    self._watcher = None
                    told, self._told = self._told, True
                    break
            time.sleep(remaining)
        if not told:
            logger.info(
                "Repacked %d Marlin weights on the CPU: %.2f GB in %.1f s, copies included",
                self._weights,
                self._bytes / 1e9,
                self._seconds,
            )
        self._when_quiet()


_ledger = Ledger(_staging.cache_clear)


def read_setting() -> str:
    """``VLLM_MARLIN_CPU_REPACK``: "auto" (the default), "1" or "0". Raises RepackError for anything else."""
    value = os.environ.get(SETTING, "auto").strip().lower() or "auto"
    if value not in ("auto", "0", "1"):
        raise RepackError(f"{SETTING}={value}: expected auto, 1 or 0")
    return value


def belongs_on_cpu(words: torch.Tensor) -> bool:
    """Whether this weight is repacked here rather than by the compiled op.

    By default where its GPU has compute capability 8.0: those are the cards that fault. With the setting "1" for every
    real tensor. Never while a graph is captured, and never for tensors without data (fake, meta).
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    setting = read_setting()
    if setting == "0" or isinstance(words, FakeTensor):
        return False
    if words.device.type == "cpu":
        return setting == "1"
    if words.device.type != "cuda" or torch.version.hip is not None or torch.cuda.is_current_stream_capturing():
        return False
    return setting == "1" or torch.cuda.get_device_capability(words.device) == (8, 0)


def route(compiled: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``compiled``, one of vLLM's ``{gptq,awq}_marlin[_moe]_repack``, or this module in its place.

    The arguments are bound by the function's own signature, so ``perm`` may be there (through 0.29) or not.
    """
    import torch

    packing = compiled.__name__.partition("_")[0]
    signature = inspect.signature(compiled)

    @functools.wraps(compiled)
    def routed(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return compiled(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        if not belongs_on_cpu(given.arguments["b_q_weight"]):
            return compiled(*args, **kwargs)
        return _repack_call(packing, given.arguments)

    return routed


def _repack_call(packing: str, given: dict[str, Any]) -> torch.Tensor:
    if not _ARGUMENTS.issuperset(given):
        unknown = ", ".join(sorted(set(given) - _ARGUMENTS))
        raise RepackError(f"this vLLM passes {unknown}, which the CPU repack does not know; {SETTING}=0 turns it off")
    words = given["b_q_weight"]
    started = time.perf_counter()
    engine = default_engine()
    out = (repack if words.device.type == "cpu" else repack_from_device)(
        packing,
        words,
        given["size_k"],
        given["size_n"],
        given["num_bits"],
        perm=given.get("perm") if packing == "gptq" else None,
        is_a_8bit=given.get("is_a_8bit", False),
        engine=engine,
    )
    _ledger.note(words.nbytes, time.perf_counter() - started, how=f"{engine.name}, {default_threads()} threads")
    return out
