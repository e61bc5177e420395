"""Marlin's weight repack on the CPU, at about the speed of a memory copy, and the hook that puts it into vLLM.

One source, two lives: here as ``provisioner.marlin.repack``, and inside a patched vLLM as ``vllm._sm80_cpu_repack``. So
it imports nothing of this project, needs torch (and uses numba where there is one), and loads either only when it runs.

The layout is stated in this project's ``marlin/layout.py``; the kernels below are that permutation, rewritten so that
the inner loops run over neighbouring words. Everything is split into tiles that do not share output, so the work
spreads over a pool of threads and the result does not depend on how. numba's own parallel layer is not used: its
workqueue must not be entered from several threads, and a server's loader may do that. A tile here is 16 rows (32 for
8-bit activations) by 64 columns.

Memory: the output, and scratch that does not grow with the weight: none to speak of for GPTQ, act-order included; 1 MiB
a thread for AWQ, up to 40 MiB for torch alone. From a GPU: 64 MiB of pinned staging a device while a model loads, and
for act-order the packed words of one matrix.

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
from pickle import PickleError
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

logger = logging.getLogger(__name__)

SETTING = "VLLM_MARLIN_CPU_REPACK"
STRIP = 64
"""Columns of a strip: the columns of one wide tile, of two narrow ones, and the multiple that Marlin asks of size_n."""
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
    def word_rows(self) -> int:
        """Rows of GPTQ words in one row of tiles."""
        return self.tile_rows // self.per_word

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


def _shuffle_narrow_8(source: Any, row: int, column: int, out: Any, k0: int, n0: int, tiles: int, strips: int) -> None:
    """8-bit GPTQ words to Marlin words, 8-bit activations: whole words change places. A strip is two tiles."""
    for kt in range(tiles):
        for nt in range(2 * strips):
            target = out[k0 + kt, 512 * n0 + 256 * nt : 512 * n0 + 256 * nt + 256]
            start = column + 32 * nt
            for lane in range(32):
                c = lane >> 2
                r = lane & 3
                upper = source[row + 8 * kt + r, start : start + 32]
                lower = source[row + 8 * kt + 4 + r, start : start + 32]
                for jb in range(4):
                    target[8 * lane + 2 * jb] = upper[8 * jb + c]
                    target[8 * lane + 2 * jb + 1] = lower[8 * jb + c]


def _shuffle_narrow_4(source: Any, row: int, column: int, out: Any, k0: int, n0: int, tiles: int, strips: int) -> None:
    """4-bit GPTQ words to Marlin words, 8-bit activations: nibbles of the two halves of a tile alternate."""
    u = source.dtype.type
    low, pairs, nibbles, nibble, byte, half = u(0x0000FFFF), u(0x00FF00FF), u(0x0F0F0F0F), u(4), u(8), u(16)
    made = source[:4, :64].copy()
    for kt in range(tiles):
        for nt in range(strips):
            start = column + 64 * nt
            for p in range(2):
                upper = source[row + 4 * kt + p, start : start + 64]
                lower = source[row + 4 * kt + 2 + p, start : start + 64]
                first = made[2 * p]
                second = made[2 * p + 1]
                for i in range(64):
                    a = upper[i] & low
                    b = lower[i] & low
                    d = upper[i] >> half
                    e = lower[i] >> half
                    a = (a | (a << byte)) & pairs
                    b = (b | (b << byte)) & pairs
                    d = (d | (d << byte)) & pairs
                    e = (e | (e << byte)) & pairs
                    first[i] = ((a | (a << nibble)) & nibbles) | (((b | (b << nibble)) & nibbles) << nibble)
                    second[i] = ((d | (d << nibble)) & nibbles) | (((e | (e << nibble)) & nibbles) << nibble)
            target = out[k0 + kt, 256 * (n0 + nt) : 256 * (n0 + nt) + 256]
            for lane in range(64):
                r = lane & 3
                at = 32 * (lane >> 5) + ((lane >> 2) & 7)
                for jb in range(4):
                    target[4 * lane + jb] = made[r, at + 8 * jb]


def _gather_kernel(bits: int) -> Callable[..., None]:
    """The kernel for act-order. ``bits`` is a constant of it, which makes it twice as fast as an argument would."""
    per_word = 32 // bits

    def gather(source: Any, row: int, order: Any, out: Any, k0: int, n0: int, strips: int, made: Any) -> None:
        """GPTQ words with act-order to Marlin words, 16-bit activations; ``made`` is scratch, (4 * strips, 64).

        The values of a word are picked from their four rows where the words of a plain weight would be shuffled. Each
        word is read once for each of its values, but in long runs of neighbours: rows come in any order, and a short
        run costs more than it holds (a page to translate, lines that nothing has fetched ahead).
        """
        u = source.dtype.type
        mask, shift, half, upper, byte = u((1 << bits) - 1), u(bits), u(16), u(16 + bits), u(8)
        for kt in range(len(order) // 16):
            for r in range(4):
                k = 16 * kt + 2 * r
                first, second, third, fourth = order[k], order[k + 8], order[k + 1], order[k + 9]
                row_a, row_b = row + first // per_word, row + second // per_word
                row_d, row_e = row + third // per_word, row + fourth // per_word
                at_a, at_b = u(first % per_word * bits), u(second % per_word * bits)
                at_d, at_e = u(third % per_word * bits), u(fourth % per_word * bits)
                for nt in range(strips):
                    start = 64 * (n0 + nt)
                    a, b = source[row_a, start : start + 64], source[row_b, start : start + 64]
                    d, e = source[row_d, start : start + 64], source[row_e, start : start + 64]
                    picked = made[4 * nt + r]
                    for i in range(64):
                        picked[i] = (
                            ((a[i] >> at_a) & mask)
                            | (((b[i] >> at_b) & mask) << shift)
                            | (((d[i] >> at_d) & mask) << half)
                            | (((e[i] >> at_e) & mask) << upper)
                        )
            for nt in range(strips):
                if bits == 8:
                    target = out[k0 + kt, 256 * (n0 + nt) : 256 * (n0 + nt) + 256]
                    for lane in range(32):
                        for jb in range(8):
                            target[8 * lane + jb] = made[4 * nt + (lane & 3), 8 * jb + (lane >> 2)]
                else:
                    target = out[k0 + kt, 128 * (n0 + nt) : 128 * (n0 + nt) + 128]
                    for lane in range(32):
                        left = lane >> 2
                        for j in range(4):
                            right = made[4 * nt + (lane & 3), left + 16 * j + 8] << byte
                            target[4 * lane + j] = made[4 * nt + (lane & 3), left + 16 * j] | right

    return gather


_gather_8 = _gather_kernel(8)
_gather_4 = _gather_kernel(4)


def _gptq_from_awq_4(source: Any, row: int, column: int, target: Any, strips: int, pairs: Any, wide: Any) -> None:
    """4-bit AWQ words to GPTQ words: ``target`` is (rows / 8, 64 * strips).

    ``pairs``, (4, 64) uint8, and ``wide``, (4, 8) uint64, are one piece of scratch: the eight values of a word spread
    over eight bytes, the low half of the word being the even columns; two rows share the bytes.
    """
    u = wide.dtype.type
    v = target.dtype.type
    low, apart, bytes_apart, nibbles = u(0xFFFF), u(24), u(0x000000FF000000FF), u(0x000F000F000F000F)
    step, nibble, byte, half = u(12), u(4), u(8), u(16)
    for p in range(target.shape[0]):
        for nt in range(strips):
            start = column + 8 * nt
            for pair in range(4):
                above = source[row + 8 * p + 2 * pair, start : start + 8]
                below = source[row + 8 * p + 2 * pair + 1, start : start + 8]
                spread = wide[pair]
                for q in range(8):
                    a = u(above[q]) & low
                    b = u(above[q]) >> half
                    d = u(below[q]) & low
                    e = u(below[q]) >> half
                    a = (a | (a << apart)) & bytes_apart
                    b = (b | (b << apart)) & bytes_apart
                    d = (d | (d << apart)) & bytes_apart
                    e = (e | (e << apart)) & bytes_apart
                    a = ((a | (a << step)) & nibbles) | (((b | (b << step)) & nibbles) << byte)
                    d = ((d | (d << step)) & nibbles) | (((e | (e << step)) & nibbles) << byte)
                    spread[q] = a | (d << nibble)
            first, second, third, fourth = pairs[0], pairs[1], pairs[2], pairs[3]
            words = target[p, 64 * nt : 64 * nt + 64]
            for i in range(64):
                words[i] = v(first[i]) | (v(second[i]) << v(8)) | (v(third[i]) << v(16)) | (v(fourth[i]) << v(24))


def _gptq_from_awq_8(source: Any, row: int, column: int, target: Any, strips: int, values: Any, wide: Any) -> None:
    """8-bit AWQ words to GPTQ words: ``target`` is (rows / 4, 64 * strips).

    ``values``, (4, 64) uint8, and ``wide``, (4, 16) uint32, are one piece of scratch: the words with their two middle
    bytes exchanged, which are the values in order.
    """
    u = target.dtype.type
    outer, third_byte, second_byte, byte = u(0xFF0000FF), u(0x00FF0000), u(0x0000FF00), u(8)
    for p in range(target.shape[0]):
        for nt in range(strips):
            start = column + 16 * nt
            for k in range(4):
                words = source[row + 4 * p + k, start : start + 16]
                ordered = wide[k]
                for q in range(16):
                    x = words[q]
                    ordered[q] = (x & outer) | ((x << byte) & third_byte) | ((x >> byte) & second_byte)
            first, second, third, fourth = values[0], values[1], values[2], values[3]
            made = target[p, 64 * nt : 64 * nt + 64]
            for i in range(64):
                made[i] = u(first[i]) | (u(second[i]) << u(8)) | (u(third[i]) << u(16)) | (u(fourth[i]) << u(24))


_SHUFFLE = "void(uint32[:,::1], int64, int64, uint32[:,::1], int64, int64, int64, int64)"
_GATHER = "void(uint32[:,::1], int64, int64[::1], uint32[:,::1], int64, int64, int64, uint32[:,::1])"
_FROM_AWQ = "void(uint32[:,::1], int64, int64, uint32[:,::1], int64, uint8[:,::1], {}[:,::1])"
_SIGNATURES = {
    "_shuffle_8": _SHUFFLE,
    "_shuffle_4": _SHUFFLE,
    "_shuffle_narrow_8": _SHUFFLE,
    "_shuffle_narrow_4": _SHUFFLE,
    "_gather_8": _GATHER,
    "_gather_4": _GATHER,
    "_gptq_from_awq_4": _FROM_AWQ.format("uint64"),
    "_gptq_from_awq_8": _FROM_AWQ.format("uint32"),
}
_compiling = threading.Lock()


# No folder for the cache; an entry that is damaged, or that names the module under which this file was loaded then.
_CACHE_FAILURES = (RuntimeError, ImportError, OSError, EOFError, AttributeError, LookupError, ValueError, PickleError)


@functools.cache
def _numba_kernel(name: str) -> Callable[..., None]:
    """The compiled kernel, from numba's cache on disk where that works (about 1 s otherwise)."""
    import numba

    with _compiling:
        try:
            return numba.njit(_SIGNATURES[name], nogil=True, cache=True)(globals()[name])  # type: ignore[no-any-return]
        except _CACHE_FAILURES:
            return numba.njit(_SIGNATURES[name], nogil=True)(globals()[name])  # type: ignore[no-any-return]


# --- engines --------------------------------------------------------------------------------------------------------


class Engine(Protocol):
    """The three steps, on views that the engine makes of CPU tensors of words, 2-D, one row of ``out`` a row of tiles.

    Sizes are in tiles and strips; ``k0`` and ``n0`` are the first ones in ``out``. Steps run on several threads at once
    and are called seldom: on many threads each call has to wait for the GIL, which costs tens of microseconds.
    """

    name: str

    def workers(self, threads: int) -> int:
        """Threads of ours to use where ``threads`` may be busy."""
        ...

    def block_tiles(self, weight: Weight, workers: int) -> int:
        """Tiles to repack at a time."""
        ...

    def view(self, words: torch.Tensor) -> Any: ...

    def indices(self, order: torch.Tensor) -> Any: ...

    def shuffle(
        self, weight: Weight, source: Any, out: Any, *, row: int, strip: int, k0: int, n0: int, tiles: int, strips: int
    ) -> None:
        """GPTQ words, from ``row`` and ``strip`` on, to Marlin words."""
        ...

    def gather(
        self, weight: Weight, source: Any, order: Any, out: Any, *, row: int, k0: int, n0: int, strips: int
    ) -> None:
        """GPTQ words, rows of the values in ``order`` counted from packed ``row``, to wide Marlin words.

        There are as many rows of tiles as ``order`` fills.
        """
        ...

    def from_awq(self, weight: Weight, source: Any, *, k0: int, n0: int, tiles: int, strips: int) -> Any:
        """The GPTQ words of some tiles of AWQ words."""
        ...


class NumbaEngine:
    """Compiled loops; they release the GIL."""

    name = "numba"

    def workers(self, threads: int) -> int:
        return threads

    def block_tiles(self, weight: Weight, workers: int) -> int:
        tiles = weight.tiles * weight.strips
        rounds = 2 if tiles * weight.tile_bytes > 4 * TASK_BYTES else 1
        return min(max(-(-tiles // (rounds * workers)), 64), TASK_BYTES // weight.tile_bytes)

    def view(self, words: torch.Tensor) -> Any:
        return words.numpy().view("uint32")

    def indices(self, order: torch.Tensor) -> Any:
        return order.numpy()

    def shuffle(
        self, weight: Weight, source: Any, out: Any, *, row: int, strip: int, k0: int, n0: int, tiles: int, strips: int
    ) -> None:
        kernel = _numba_kernel(f"_shuffle_narrow_{weight.bits}" if weight.narrow else f"_shuffle_{weight.bits}")
        kernel(source, row, strip * STRIP, out, k0, n0, tiles, strips)

    def gather(
        self, weight: Weight, source: Any, order: Any, out: Any, *, row: int, k0: int, n0: int, strips: int
    ) -> None:
        import torch

        made = torch.empty((4 * strips, STRIP), dtype=torch.int32).numpy().view("uint32")  # aligned to cache lines
        _numba_kernel(f"_gather_{weight.bits}")(source, row, order, out, k0, n0, strips, made)

    def from_awq(self, weight: Weight, source: Any, *, k0: int, n0: int, tiles: int, strips: int) -> Any:
        import numpy as np

        target = np.empty((tiles * weight.word_rows, strips * STRIP), dtype=np.uint32)
        scratch = np.empty((4, STRIP), dtype=np.uint8)
        wide = scratch.view(np.uint64 if weight.bits == 4 else np.uint32)
        column = n0 * STRIP // weight.per_word
        kernel = _numba_kernel(f"_gptq_from_awq_{weight.bits}")
        kernel(source, k0 * weight.tile_rows, column, target, strips, scratch, wide)
        return target


class TorchEngine:
    """Whole-tensor operations, spread over torch's own threads where it has some, over ours where it has one."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        # glibc's malloc hands memory back beyond twice the largest piece that it has seen freed, and then each block
        # faults the pages of its temporaries in anew: half the time and more. A piece freed untouched raises that to
        # 62 MiB (it learns from no larger one); other allocators do not mind.
        torch.empty(31 << 20, dtype=torch.uint8)

    def workers(self, threads: int) -> int:
        import torch

        return max(1, threads // int(torch.get_num_threads()))

    def block_tiles(self, weight: Weight, workers: int) -> int:
        import torch

        size = max(1 << 20, int(torch.get_num_threads()) * (256 << 10))
        return min(size, TORCH_BYTES // workers) // weight.tile_bytes

    def view(self, words: torch.Tensor) -> Any:
        return words

    def indices(self, order: torch.Tensor) -> Any:
        return order

    def shuffle(
        self, weight: Weight, source: Any, out: Any, *, row: int, strip: int, k0: int, n0: int, tiles: int, strips: int
    ) -> None:
        words = weight.tile_bytes // 4
        target = out[k0 : k0 + tiles, words * n0 : words * (n0 + strips)].unflatten(1, (strips, words))
        rows = source[row : row + tiles * weight.word_rows, strip * STRIP : (strip + strips) * STRIP]
        rows = rows.unflatten(0, (tiles, weight.word_rows))
        step = {
            (8, False): self._shuffle_8,
            (4, False): self._shuffle_4,
            (8, True): self._shuffle_narrow_8,
            (4, True): self._shuffle_narrow_4,
        }[weight.bits, weight.narrow]
        step(rows, target)

    def _shuffle_8(self, rows: Any, target: Any) -> None:
        """``rows``: (tile, 2 h + quad, column); ``target``: (tile, strip, 256)."""
        import torch

        upper, lower = rows.view(torch.uint8).unflatten(1, (2, 2)).unbind(1)
        joined = _join(upper, lower, 8, torch.int16).view(torch.int32)
        strips = target.shape[1]
        pieces = joined.unflatten(2, (strips, 8, 8, 2))  # tile, quad, strip, jb, c, row of the quad
        target.unflatten(2, (8, 2, 2, 8)).copy_(pieces.permute(0, 2, 4, 1, 5, 3))

    def _shuffle_4(self, rows: Any, target: Any) -> None:
        """``rows``: (tile, h, column); ``target``: (tile, strip, 128)."""
        import torch

        x, y = rows.unbind(1)
        swapped = x.bitwise_right_shift(4).bitwise_xor_(y).bitwise_and_(0x0F0F0F0F)
        odd = y ^ swapped
        even = swapped.bitwise_left_shift_(4).bitwise_xor_(x)
        strips = target.shape[1]
        halves = target.view(torch.int16).unflatten(2, (8, 4, 4, 2))  # tile, strip, c, r, j, l
        for which, nibbles in enumerate((even, odd)):
            left, right = nibbles.view(torch.uint8).unflatten(1, (strips, 4, 2, 8, 4)).unbind(3)
            pieces = _join(left, right, 8, torch.int16)  # tile, strip, j, c, r
            halves[..., which].copy_(pieces.permute(0, 1, 3, 4, 2))

    def _shuffle_narrow_8(self, rows: Any, target: Any) -> None:
        """``rows``: (tile, 4 h + r, column); ``target``: (tile, strip, 512)."""
        pieces = rows.unflatten(1, (2, 4)).unflatten(3, (target.shape[1], 2, 4, 8))  # tile, h, r, strip, half, jb, c
        target.unflatten(2, (2, 8, 4, 4, 2)).copy_(pieces.permute(0, 3, 4, 6, 2, 5, 1))

    def _shuffle_narrow_4(self, rows: Any, target: Any) -> None:
        """``rows``: (tile, 2 h + p, column); ``target``: (tile, strip, 256)."""
        import torch

        halves = rows.view(torch.int16).unflatten(1, (2, 2)).to(torch.int32)  # tile, h, p, 2 column + half
        halves.bitwise_and_(0xFFFF)
        for shift, mask in ((8, 0x00FF00FF), (4, 0x0F0F0F0F)):
            halves.bitwise_or_(halves << shift).bitwise_and_(mask)
        joined = halves[:, 1].bitwise_left_shift_(4).bitwise_or_(halves[:, 0])
        pieces = joined.unflatten(2, (target.shape[1], 2, 4, 8, 2))  # tile, p, strip, half strip, jb, c, half word
        target.unflatten(2, (2, 8, 2, 2, 4)).copy_(pieces.permute(0, 2, 3, 5, 1, 6, 4))

    def gather(
        self, weight: Weight, source: Any, order: Any, out: Any, *, row: int, k0: int, n0: int, strips: int
    ) -> None:
        import torch

        columns = source[row:, n0 * STRIP : (n0 + strips) * STRIP]
        rows = order.view(-1, 2, 4, 2)  # tile, half of the tile, r, row of the pair

        def pick(half: int, row: int) -> torch.Tensor:
            """The wanted values, each in a byte with what lay above it in its word."""
            wanted = rows[:, half, :, row].flatten()
            words = columns.index_select(0, wanted // weight.per_word)
            words.bitwise_right_shift_((wanted % weight.per_word * weight.bits).to(torch.int32).unsqueeze(1))
            return words.to(torch.uint8)

        made = torch.empty((len(rows) * 4, strips * 8 * weight.bits, 2), dtype=torch.int16)
        for row_of_pair in range(2):
            low, high = pick(0, row_of_pair), pick(1, row_of_pair)
            if weight.bits == 4:
                nibbles = low.bitwise_and_(15).bitwise_or_(high.bitwise_left_shift_(4))
                low, high = nibbles.unflatten(1, (-1, 2, 8)).unbind(2)
            made[..., row_of_pair].unflatten(1, low.shape[1:]).copy_(_join(low, high, 8, torch.int16))
        pieces = made.view(torch.int32).view(-1, 4, strips, weight.bits, 8)  # tile, r, strip, jb or j, c
        words = weight.tile_bytes // 4
        target = out[k0 : k0 + len(rows), words * n0 : words * (n0 + strips)]
        target.unflatten(1, (strips, 8, 4, weight.bits)).copy_(pieces.permute(0, 2, 4, 1, 3))

    def from_awq(self, weight: Weight, source: Any, *, k0: int, n0: int, tiles: int, strips: int) -> Any:
        import torch

        rows, width = tiles * weight.tile_rows, STRIP // weight.per_word
        columns = source[k0 * weight.tile_rows : k0 * weight.tile_rows + rows, n0 * width : (n0 + strips) * width]
        words = columns.unflatten(0, (-1, weight.per_word))  # row of GPTQ words, position there, AWQ word
        target = torch.zeros((words.shape[0], strips * width, weight.per_word), dtype=torch.int32)
        for column, position in enumerate((0, 4, 1, 5, 2, 6, 3, 7) if weight.bits == 4 else (0, 2, 1, 3)):
            values = (words >> weight.bits * position).bitwise_and_((1 << weight.bits) - 1)
            for k in range(weight.per_word):
                target[..., column] |= values[:, k] << weight.bits * k
        return target.flatten(1)


def _join(low: torch.Tensor, high: torch.Tensor, shift: int, dtype: torch.dtype) -> torch.Tensor:
    """``low | high << shift``, contiguous."""
    import torch

    joined = torch.empty(high.shape, dtype=dtype)
    return joined.copy_(high).bitwise_left_shift_(shift).bitwise_or_(low)


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
    width = min(strips, max(1, size))
    for k0, deep in _cover(tiles, max(1, -(-size // width))):
        for n0, wide in _cover(strips, width):
            yield k0, deep, n0, wide


class Running:
    """Tasks that threads are working off."""

    def __init__(self, tasks: Sequence[Any], work: Callable[[Any], None], workers: int) -> None:
        self._queue = collections.deque(tasks)
        self._work = work
        workers = min(workers, len(tasks))
        self._futures = [_pool().submit(self._work_off) for _ in range(workers)] if workers > 1 else []
        if not self._futures:
            self._work_off()

    def _work_off(self) -> None:
        while True:
            try:
                task = self._queue.popleft()
            except IndexError:
                return
            self._work(task)

    def join(self) -> None:
        """Wait for all; raise what a task raised. Afterwards no thread writes any more."""
        try:
            for future in self._futures:
                future.result()
        finally:
            self._queue.clear()
            wait(self._futures)


# --- host memory ----------------------------------------------------------------------------------------------------

TASK_BYTES = 4 << 20
TORCH_BYTES = 8 << 20
"""Blocks that torch has in work together; scratch is up to five times as much."""
AWQ_BYTES = 1 << 20
"""Scratch of a thread that repacks AWQ."""
ORDER_STRIPS = 96
"""Strips of act-order's rows that are read in one run, 24 KiB of each; the scratch of a thread is four such runs."""


def start_repack(
    weight: Weight,
    words: torch.Tensor,
    order: torch.Tensor | None,
    out: torch.Tensor,
    *,
    engine: Engine,
    threads: int,
) -> Running:
    """Begin to fill ``out`` from ``words``, both checked and in host memory; the work holds on to them."""
    source, target = engine.view(words.view(-1, words.shape[-1])), engine.view(out.view(weight.tiles, -1))
    if order is not None:
        return _start_gather(weight, source, order, target, engine=engine, workers=engine.workers(threads))
    workers = engine.workers(threads)

    def shuffle(block: tuple[int, int, int, int]) -> None:
        k0, tiles, n0, strips = block
        row = k0 * weight.word_rows
        engine.shuffle(weight, source, target, row=row, strip=n0, k0=k0, n0=n0, tiles=tiles, strips=strips)

    def shuffle_awq(block: tuple[int, int, int, int]) -> None:
        k0, tiles, n0, strips = block
        made = engine.from_awq(weight, source, k0=k0, n0=n0, tiles=tiles, strips=strips)
        engine.shuffle(weight, made, target, row=0, strip=0, k0=k0, n0=n0, tiles=tiles, strips=strips)

    size = engine.block_tiles(weight, workers)
    if weight.packing == "gptq":
        return Running(tuple(_blocks(weight.tiles, weight.strips, size)), shuffle, workers)
    size = min(size, AWQ_BYTES // weight.tile_bytes)
    return Running(tuple(_blocks(weight.tiles, weight.strips, size)), shuffle_awq, workers)


def _start_gather(
    weight: Weight, source: Any, order: torch.Tensor, target: Any, *, engine: Engine, workers: int
) -> Running:
    """Act-order: for each expert ``order`` names the rows of its matrix that the rows of ``target`` are."""
    orders = [engine.indices(row) for row in order]
    tiles, rows = order.shape[1] // weight.tile_rows, source.shape[0] // len(orders)

    def gather(task: tuple[int, int, int, int, int]) -> None:
        expert, n0, strips, k0, deep = task
        wanted = orders[expert][k0 * weight.tile_rows : (k0 + deep) * weight.tile_rows]
        engine.gather(weight, source, wanted, target, row=expert * rows, k0=expert * tiles + k0, n0=n0, strips=strips)

    size = engine.block_tiles(weight, workers)
    tasks = [
        (expert, n0, strips, k0, deep)
        for expert in range(len(orders))
        for n0, strips in _cover(weight.strips, ORDER_STRIPS)
        for k0, deep in _cover(tiles, max(1, size // strips))
    ]
    return Running(tasks, gather, workers)


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
    threads = min(threads or MAX_THREADS, default_threads())
    start_repack(weight, words, order, out, engine=engine, threads=threads).join()
    return out


# --- from a GPU and back --------------------------------------------------------------------------------------------

BLOCK_BYTES = 8 << 20
SLOTS = 4
LINK_THREADS = 4
"""Threads a block; two blocks are in work at once. More only wait for the GIL (measured, docs/verification.md)."""


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

    def wait_until_sent(self) -> None:
        if self.sent is not None:
            self.sent.synchronize()
            self.sent = None


@dataclass(frozen=True)
class Block:
    """Rows of tiles, from ``k0`` on, and where they pass through: their words before and after."""

    k0: int
    tiles: int
    down: torch.Tensor
    up: torch.Tensor


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

        Act-order reads rows from anywhere, so the packed words of such a matrix lie in host memory whole, one expert at
        a time; any other weight passes through the slots alone.
        """
        width = words.shape[-1]
        source, target = words.view(weight.tiles, -1), out.view(weight.tiles, -1)

        def shuffle(block: Block) -> Running:
            part = replace(weight, experts=1, size_k=block.tiles * weight.tile_rows)
            return start_repack(part, block.down.view(-1, width), None, block.up, engine=engine, threads=threads)

        with self._lock:
            self._link.begin()
            try:
                if order is None:
                    self._flow(source, target, shuffle)
                else:
                    self._gather(weight, source, target, order, engine=engine, threads=threads)
            finally:
                self._link.finish()

    def _gather(
        self,
        weight: Weight,
        source: torch.Tensor,
        target: torch.Tensor,
        order: torch.Tensor,
        *,
        engine: Engine,
        threads: int,
    ) -> None:
        import torch

        matrix = replace(weight, experts=1)
        packed = torch.empty((matrix.tiles, source.shape[1]), dtype=torch.int32)
        words = packed.view(matrix.packed_shape)

        def keep(block: Block) -> None:
            packed[block.k0 : block.k0 + block.tiles].view(-1).copy_(block.down)

        def gather(block: Block, rows: torch.Tensor) -> Running:
            part = replace(matrix, size_k=block.tiles * weight.tile_rows)
            wanted = rows[block.k0 * weight.tile_rows :][: part.size_k].unsqueeze(0)
            return start_repack(part, words, wanted, block.up, engine=engine, threads=threads)

        for expert, rows in enumerate(order):
            span = slice(expert * matrix.tiles, (expert + 1) * matrix.tiles)
            self._flow(source[span], None, keep)
            self._flow(None, target[span], functools.partial(gather, rows=rows))

    def _flow(
        self, source: torch.Tensor | None, target: torch.Tensor | None, start: Callable[[Block], Running | None]
    ) -> None:
        """Bring ``source`` down, call ``start`` on each block, take ``target`` up; either may be None.

        The work on a block is waited for only when the next one's has been started, so that threads do not run dry.
        """
        shape = (source if source is not None else target).shape  # type: ignore[union-attr]
        slots = self._slots_for(shape[1])
        blocks = list(_cover(shape[0], slots[0].down.numel() // shape[1]))
        arriving: collections.deque[Ticket] = collections.deque()

        def fetch(index: int) -> None:
            if source is not None and index < len(blocks):
                k0, tiles = blocks[index]
                down = slots[index % len(slots)].down[: tiles * shape[1]]
                arriving.append(self._link.fetch(down, source[k0 : k0 + tiles].view(-1)))

        def complete(index: int, running: Running | None) -> None:
            if running is not None:
                running.join()
            if target is not None:
                (k0, tiles), slot = blocks[index], slots[index % len(slots)]
                slot.sent = self._link.send(target[k0 : k0 + tiles].view(-1), slot.up[: tiles * shape[1]])
            fetch(index + len(slots))

        for index in range(len(slots)):
            fetch(index)
        before: Running | None = None
        try:
            for index, (k0, tiles) in enumerate(blocks):
                slot = slots[index % len(slots)]
                if source is not None:
                    arriving.popleft().synchronize()
                slot.wait_until_sent()
                size = tiles * shape[1]
                running = start(Block(k0, tiles, slot.down[:size], slot.up[:size]))
                before, done = running, before
                if index:
                    complete(index - 1, done)
            done, before = before, None
            complete(len(blocks) - 1, done)
        finally:
            if before is not None:
                before.join()

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
        threads=min(threads or LINK_THREADS, default_threads()),
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
