"""A real loadable op library, in the place of vLLM's, whose moods are chosen by the environment.

``OP_SCHEMA`` names the schemas that it registers; ``OP_MOOD`` how it behaves; ``OP_WHEN`` from which call on (0 is the
first).
Written against torch's stable ABI, as vLLM's library is, which also compiles five times faster than the full headers.
"""

import sysconfig
from pathlib import Path

import pytest

from tests.gpu.conftest import Build

NAME = "_C_stable_libtorch.abi3.so"

SOURCE = r"""
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/csrc/stable/ops.h>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unistd.h>

using torch::stable::Tensor;

static const char *variable(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}
static int calls = 0;
static bool mood_is(const char *mood) {
    return calls > atoi(variable("OP_WHEN", "0")) && !strcmp(variable("OP_MOOD", "right"), mood);
}

struct Weight {
    const uint32_t *words; const int32_t *perm; int64_t k, n; int bits; bool awq;
    uint32_t value(int64_t row, int64_t column) const {
        static const int four[] = {0, 4, 1, 5, 2, 6, 3, 7}, eight[] = {0, 2, 1, 3};
        int share = 32 / bits;
        if (perm) row = perm[row];
        uint32_t word = awq ? words[row * (n / share) + column / share] : words[row / share * n + column];
        int position = awq ? (bits == 4 ? four : eight)[column % share] : row % share;
        return word >> (bits * position) & ((1u << bits) - 1);
    }
};

static void repack(const Weight &weight, bool narrow, uint32_t *out) {
    static const int wide_four[] = {0, 2, 4, 6, 1, 3, 5, 7}, narrow_four[] = {0, 4, 1, 5, 2, 6, 3, 7};
    static const int wide_eight[] = {0, 2, 1, 3}, rows_of[] = {0, 1, 8, 9};
    int share = 32 / weight.bits, lane_words = 8 / share, rows = narrow ? 32 : 16, columns = narrow ? 32 : 64;
    for (int64_t kt = 0; kt < weight.k / rows; kt++)
        for (int64_t nt = 0; nt < weight.n / columns; nt++)
            for (int word = 0; word < rows * columns / share; word++) {
                int lane = word / (4 * lane_words), warp = word % (4 * lane_words) / lane_words;
                int half = word % lane_words;
                int column = lane / 4, quad = lane % 4;
                uint32_t packed = 0;
                for (int position = 0; position < share; position++) {
                    int which = narrow ? (weight.bits == 4 ? narrow_four[position] : 4 * half + position)
                                       : (weight.bits == 4 ? wide_four[position] : 4 * half + wide_eight[position]);
                    int row = narrow ? 4 * quad + which % 4 + 16 * (which / 4) : 2 * quad + rows_of[which % 4];
                    int at = narrow ? 8 * warp + column : 16 * warp + column + 8 * (which / 4);
                    packed |= weight.value(kt * rows + row, nt * columns + at) << (weight.bits * position);
                }
                *out++ = packed;
            }
}

static Tensor answer(const Tensor &words, const Tensor *perm, int64_t k, int64_t n, int bits, bool narrow, bool awq) {
    calls++;
    if (mood_is("crash")) *(volatile int *)8 = 1;
    if (mood_is("abort")) abort();
    if (mood_is("killed")) raise(SIGKILL);
    if (mood_is("hang")) for (;;) pause();
    if (mood_is("refuses")) throw std::runtime_error("size_k is not divisible by tile_k_size");
    if (mood_is("illegal-access")) throw std::runtime_error("CUDA error: an illegal memory access was encountered");
    if (mood_is("toolchain"))
        throw std::runtime_error("CUDA error: the provided PTX was compiled with an unsupported toolchain.");
    if (mood_is("not-ready")) throw std::runtime_error("CUDA error: device not ready");
    bool misfit = k % 16 || n % 64;
    if (misfit && !mood_is("accepts-misfits")) throw std::runtime_error("sizes are not divisible by the tile");
    int64_t share = 32 / bits;
    Tensor out = torch::stable::new_empty(words, {k / 16, n * 16 / share - (mood_is("short") ? 1 : 0)});
    if (mood_is("short")) return out;
    uint32_t *first = static_cast<uint32_t *>(out.data_ptr());
    if (misfit) { memset(first, 0, out.numel() * 4); return out; }
    bool ordered = perm && perm->numel() > 0;
    Weight weight{static_cast<const uint32_t *>(words.data_ptr()),
                  ordered ? static_cast<const int32_t *>(perm->data_ptr()) : nullptr, k, n, bits, awq};
    uint32_t kept = first[out.numel() - 1];
    if (!(narrow && k % 32)) repack(weight, narrow, first);
    if (mood_is("wrong-word")) first[out.numel() - 1] ^= 1u << 30;
    if (mood_is("unwritten")) first[out.numel() - 1] = kept;
    if (mood_is("harms-input")) *static_cast<uint32_t *>(words.data_ptr()) ^= 1;
    return out;
}

template <bool awq> static void boxed(StableIValue *stack, uint64_t count, uint64_t) {
    using torch::stable::detail::to;
    std::string schema = variable("OP_SCHEMA", "perm,a8");
    Tensor words = to<Tensor>(stack[0]);
    uint64_t at = 1;
    Tensor perm = words;
    bool has_perm = !awq && schema.find("perm") != std::string::npos;
    if (has_perm) perm = to<Tensor>(stack[at++]);
    int64_t k = to<int64_t>(stack[at]), n = to<int64_t>(stack[at + 1]), bits = to<int64_t>(stack[at + 2]);
    bool narrow = count > at + 3 && to<bool>(stack[at + 3]);
    stack[0] = torch::stable::detail::from(answer(words, has_perm ? &perm : nullptr, k, n, bits, narrow, awq));
}

STABLE_TORCH_LIBRARY_FRAGMENT(_C, m) {
    std::string schema = variable("OP_SCHEMA", "perm,a8");
    if (schema == "none") return;
    std::string perm = schema.find("perm") != std::string::npos ? "Tensor perm, " : "";
    std::string tail = "SymInt size_k, SymInt size_n, int num_bits";
    if (schema.find("a8") != std::string::npos) tail += ", bool is_a_8bit";
    if (schema.find("strange") != std::string::npos) tail += ", bool is_strange";
    m.def(("gptq_marlin_repack(Tensor b_q_weight, " + perm + tail + ") -> Tensor").c_str());
    m.def(("awq_marlin_repack(Tensor b_q_weight, " + tail + ") -> Tensor").c_str());
}

STABLE_TORCH_LIBRARY_IMPL(_C, CPU, m) {
    std::string schema = variable("OP_SCHEMA", "perm,a8");
    if (schema == "none" || schema.find("no-kernel") != std::string::npos) return;
    m.impl("gptq_marlin_repack", &boxed<false>);
    m.impl("awq_marlin_repack", &boxed<true>);
}
"""


def build_op_library(build_library: Build) -> Path:
    """The library, ready to be loaded by ``torch.ops.load_library``; skips where torch has no stable headers."""
    torch = Path(sysconfig.get_path("purelib")) / "torch"
    headers = torch / "include"
    if not (headers / "torch/csrc/stable/library.h").is_file():
        pytest.skip("torch is not installed with its headers: this test needs a real op library")
    return build_library(SOURCE, NAME, "-O1", "-std=c++20", f"-I{headers}", f"-L{torch}/lib", "-ltorch_cpu")
