"""The field's way to repack on the CPU, as a baseline for `make bench`.

GPTQ words (K * bits / 32, N) int32 -> Marlin words (K / 16, N * bits / 2) int32, 16-bit activations, no act-order:
unpack to int64, 16 x 16 tiles, gather by the weight permutation, pack. Deliberately unoptimised: it stands for what
runs on these machines today (0.024 GB/s of weight bytes on 2 cores, 0.158 on 16, 5120 x 17408 at 8 bits).
"""

import torch


def weight_permutation(bits: int) -> torch.Tensor:
    """Order in which the 1024 values of a 16 x 64 block are stored; shape (1024,), int64."""
    order = []
    for thread in range(32):
        column, quad = divmod(thread, 4)
        fragment = [
            16 * row + column + 8 * half
            for half in (0, 1)
            for row in (2 * quad, 2 * quad + 1, 2 * quad + 8, 2 * quad + 9)
        ]
        for tile in range(4):
            order += [value + 256 * tile for value in fragment]
    interleave = {4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}[bits]
    return torch.tensor(order).reshape(-1, len(interleave))[:, interleave].ravel()


def field_repack(words: torch.Tensor, size_k: int, size_n: int, bits: int) -> torch.Tensor:
    per_word = 32 // bits
    mask = (1 << bits) - 1
    wide = words.to(torch.int64)
    values = torch.empty((size_k, size_n), dtype=torch.int64)
    for i in range(per_word):
        values[i::per_word] = (wide >> (bits * i)) & mask
    tiles = values.reshape(size_k // 16, 16, size_n // 16, 16).permute(0, 2, 1, 3).reshape(size_k // 16, size_n * 16)
    permutation = weight_permutation(bits)
    tiles = tiles.reshape(-1, permutation.numel())[:, permutation].reshape(size_k // 16, size_n * 16)
    packed = torch.zeros((size_k // 16, size_n * 16 // per_word), dtype=torch.int64)
    for i in range(per_word):
        packed |= tiles[:, i::per_word] << (bits * i)
    return packed.to(torch.int32)
