"""Behaviour check of pr50021-gdn-spec-bounds: vLLM's own kernels, patched against pristine.

    python check.py --pristine DIR --patched DIR [--device cpu|cuda|sm80|sm90] [--kernel NAME] [--case NAME]

DIR is a site-packages folder (or a copy of the files that the patch touches, at the same paths). Kernels whose file the
pristine one has not are left out: not every release has every model.
One JSON object a line on stdout: {"kernel", "case", "ok", "detail", "unpatched"}. "unpatched" is what the case does
when --patched names a pristine tree: "passes" (both sides must compute the same bits), "fails" (it shows the defect)
or "unsafe" (it would read far outside its tensors). Exit 0: all are ok, 1: one is not, 2: usage.

Nothing but torch, Triton and numpy is imported: the kernels' files are loaded by path, and whatever they import from
vllm is a stand-in. On the CPU they run under Triton's interpreter, on a card compiled; with sm80 or sm90 the patched
ones are only compiled for such a card, which needs none.

How an out-of-row access is caught: every index table lies inside a larger buffer of ids that name decoy states, and
memory that a launcher allocates is poisoned. A stray read gives a wrong value, and an unwritten output is seen.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not {"cuda", "sm80", "sm90"} & set(sys.argv):
    # Read by Triton when a kernel is decorated: has to be set before the first import.
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

POISON = 7777.0
INT32_MAX = 2**31 - 1
INT32_MIN = -(2**31)

CONV = "vllm/model_executor/layers/mamba/ops/causal_conv1d.py"
SSM = "vllm/model_executor/layers/mamba/ops/mamba_ssm.py"
RECURRENT = "vllm/third_party/flash_linear_attention/ops/fused_recurrent.py"
GATING = "vllm/third_party/flash_linear_attention/ops/fused_sigmoid_gating.py"
KDA_AMD = "vllm/models/kimi_k3/amd/ops/third_party/kda/fused_recurrent.py"
KDA_NVIDIA = "vllm/models/kimi_k3/nvidia/ops/third_party/kda/fused_recurrent.py"
GLM_AMD = "vllm/models/glm5next/amd/ops/third_party/kda/fused_recurrent.py"
GLM_NVIDIA = "vllm/models/glm5next/nvidia/ops/third_party/kda/fused_recurrent.py"
COPY = "vllm/v1/worker/mamba_utils.py"
# Where 0.25 and older have them.
FORMER_PATHS = {
    RECURRENT: "vllm/model_executor/layers/fla/ops/fused_recurrent.py",
    GATING: "vllm/model_executor/layers/fla/ops/fused_sigmoid_gating.py",
}

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


# ---------------------------------------------------------------- stand-ins for what the files import


def _exp(x: Any) -> Any:
    """tl.exp, looked up when it is called: the interpreter replaces it in `tl` alone, not where it was imported to."""
    return tl.exp(x)


def _log(x: Any) -> Any:
    return tl.log(x)


@triton.jit
def _fast_exp(x):
    return tl.math.exp2(1.4426950408889634 * x)


@triton.jit
def _mamba_state_copy_boundary(num_tokens_running_state, new_num_computed, block_size: tl.constexpr):
    aligned_new_computed = (new_num_computed // block_size) * block_size
    needs_copy = aligned_new_computed >= num_tokens_running_state
    accept_token_bias = aligned_new_computed - num_tokens_running_state
    dest_block_idx = aligned_new_computed // block_size - 1
    return needs_copy, accept_token_bias, dest_block_idx


def _signed_64(value: int) -> int:
    return value if value < (1 << 63) else value - (1 << 64)


class Signals:
    """Records, program by program, the PDL instructions of the last launch under the interpreter."""

    def __init__(self) -> None:
        self.waited: list[tuple[int, ...]] = []
        self.launched: list[tuple[int, ...]] = []

    @staticmethod
    def _program() -> tuple[int, ...]:
        from triton.runtime.interpreter import interpreter_builder

        return tuple(int(i) for i in interpreter_builder.grid_idx)

    def wait(self, *_: Any, **__: Any) -> None:
        program = self._program()
        if program in self.waited:  # A program waits once: this is the next launch.
            self.waited.clear()
            self.launched.clear()
        self.waited.append(program)

    def launch(self, *_: Any, **__: Any) -> None:
        self.launched.append(self._program())


class Platform:
    """The few questions that the files ask vllm.platforms.current_platform."""

    pdl = False

    def is_arch_support_pdl(self) -> bool:
        return self.pdl

    def __getattr__(self, name: str) -> Callable[..., bool]:
        if name.startswith("is_"):
            return lambda *_, **__: False
        raise AttributeError(name)


class Layout:
    dim_first = False


def _conv_copy_spec() -> None: ...


def _temporal_copy_spec() -> None: ...


PLATFORM = Platform()
_MATH = {"cdiv": triton.cdiv, "next_power_of_2": triton.next_power_of_2}
_EXP_LOG = {"exp": _exp, "log": _log} if INTERPRETED else {"exp": tl.exp, "log": tl.log}
_KNOWN: dict[str, dict[str, Any]] = {
    "vllm.triton_utils": {"tl": tl, "triton": triton, "HAS_TRITON": True},
    "vllm.platforms": {"current_platform": PLATFORM},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": contextlib.nullcontext},
    "vllm.utils": _MATH,
    "vllm.utils.math_utils": _MATH,
    "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
    "vllm.model_executor.layers.mamba.ops.triton_helpers": {"fast_exp": _fast_exp},
    "vllm.model_executor.layers.mamba.mamba_utils": {
        "get_conv_copy_spec": _conv_copy_spec,
        "get_temporal_copy_spec": _temporal_copy_spec,
        "is_conv_state_dim_first": lambda: Layout.dim_first,
    },
    "vllm.v1.worker.replayssm_utils": {
        "mamba_state_copy_boundary": _mamba_state_copy_boundary,
        "_reinterpret_u64_as_i64": _signed_64,
    },
    "vllm.third_party.flash_linear_attention.ops.op": _EXP_LOG,
    "vllm.model_executor.layers.fla.ops.op": _EXP_LOG,
}


class StandIn(types.ModuleType):
    """A module under `vllm`: known names from _KNOWN, any other name is an empty class (it is used in annotations)."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers every import of `vllm` and below, before an installed vLLM can."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != "vllm" and not fullname.startswith("vllm."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        for name, value in _KNOWN.get(module.__name__, {}).items():
            setattr(module, name, value)


def place_of(root: Path, path: str) -> str | None:
    """Where this release has the file ``path``; None where it has none."""
    places = (path, FORMER_PATHS.get(path, path))
    return next((place for place in places if (root / place).is_file()), None)


def load_kernels(root: Path, path: str) -> types.ModuleType:
    """Load the file ``path`` of root as the module that its place under vllm/ makes it, without importing vLLM."""
    place = place_of(root, path)
    if place is None:
        raise FileNotFoundError(root / path)
    name = place.removesuffix(".py").replace("/", ".")
    spec = importlib.util.spec_from_file_location(name, root / place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if path == SSM:
        # The launcher's own choice reads a table of tuned configurations by the card's name.
        module.try_get_optimal_ssm_config = lambda *_, **__: (8, 1)
    if path == COPY:
        # From 0.28 on: 16 programs a copy saturate a card, two show that they share the work.
        module._TEMPORAL_TILES = 2
    return module


def patch_device_functions_once() -> None:
    """Save a third of the interpreter's time.

    It replaces the functions of triton.language anew at each call of a device function. Once for each is enough, since
    only what a kernel's launch has replaced is put back.
    """
    from triton.runtime import interpreter

    replace, known = interpreter._patch_lang, set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in known:
            replace(self.fn)
            known.add(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


class CompileOnly:
    """What Triton asks of a driver in order to compile; there is no card behind it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_instead_of_launching(capability: int) -> None:
    """Every launch from here on compiles its kernel and goes no further."""
    launch = triton.runtime.jit.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        del warmup
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    triton.runtime.driver.set_active(CompileOnly(capability))
    triton.runtime.jit.JITFunction.run = compile_only


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fill what a launcher allocates without initialising it, so that an output nobody wrote is seen."""

    def poison(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(POISON) if tensor.is_floating_point() else tensor

        return allocate_poisoned

    places = [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]
    originals = [getattr(place, name) for place, name in places]
    try:
        for (place, name), original in zip(places, originals, strict=True):
            setattr(place, name, poison(original))
        yield
    finally:
        for (place, name), original in zip(places, originals, strict=True):
            setattr(place, name, original)


# ---------------------------------------------------------------- comparing


class NotInThisReleaseError(Exception):
    """The kernel does not take what the case gives it: in this release there is nothing to check."""


class MismatchError(Exception):
    """The patched kernel did not do what the case demands."""


def storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of the storage under a tensor, padding and neighbours included."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with a storage of its own and the same strides and offset."""
    return storage_of(tensor).clone().as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def copies_of(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: copy_of(value) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def require_same_bits(name: str, expected: torch.Tensor, actual: torch.Tensor) -> None:
    """Raises MismatchError with the first place where two storages differ in bits."""
    want, got = storage_of(expected).cpu(), storage_of(actual).cpu()
    if want.dtype != got.dtype or want.numel() != got.numel():
        raise MismatchError(f"{name}: {want.numel()} x {want.dtype} expected, {got.numel()} x {got.dtype} found")
    size = want.element_size()
    wrong = (want.view(torch.uint8) != got.view(torch.uint8)).view(-1, size).any(dim=1)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise MismatchError(
            f"{name}: {int(wrong.sum())} of {want.numel()} elements differ, first at {first}: "
            f"expected {want[first].item()!r}, found {got[first].item()!r}"
        )


Outcome = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Sides:
    pristine: types.ModuleType
    patched: types.ModuleType
    device: str


def require_outcome(expected: Outcome, actual: Outcome) -> None:
    for name, tensor in expected.items():
        require_same_bits(name, tensor, actual[name])


# ---------------------------------------------------------------- inputs


class Draw:
    """Deterministic inputs; every call of a case with the same arguments gives the same tensors."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(50021)

    def normal(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator).to(dtype).to(self.device)

    def padded(self, *size: int, pad: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor whose rows (last axis) lie `pad` elements apart."""
        return self.normal(*size[:-1], size[-1] + pad, dtype=dtype)[..., : size[-1]]

    def ids(self, rows: int, columns: int, *, row_stride: int, column_stride: int = 1, first: int = 1) -> torch.Tensor:
        """An index table in the middle of a buffer of distinct state ids, all of them real states."""
        guard = 16  # More than any case but the unsafe ones goes astray.
        order = torch.randperm(2 * guard + rows * row_stride, generator=self.generator)
        buffer = (order + first).to(torch.int32).to(self.device)
        return buffer.as_strided((rows, columns), (row_stride, column_stride), guard)

    def ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def starts(self, lengths: Sequence[int]) -> torch.Tensor:
        total = [0]
        for length in lengths:
            total.append(total[-1] + length)
        return self.ints(total)


def spans(lengths: Sequence[int]) -> list[slice]:
    """Where each sequence's tokens lie in the flattened batch."""
    out, start = [], 0
    for length in lengths:
        out.append(slice(start, start + length))
        start += length
    return out


def takes(function: Callable[..., Any], parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters


def mentions(module: types.ModuleType, name: str) -> bool:
    return name in Path(module.__file__ or "").read_text(encoding="utf-8")


def states_in(ids: torch.Tensor) -> int:
    return int(storage_of(ids).max()) + 1


# ---------------------------------------------------------------- causal_conv1d


def conv_case(
    sides: Sides,
    *,
    counts: Sequence[int],
    lengths: Sequence[int],
    varlen: bool = True,
    width: int = 4,
    dim: int = 6,
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
    activation: str | None = "silu",
    dim_last: bool = True,
    pad: int = 0,
    id_stride: int = 1,
    null: Sequence[int] = (),
    separate_out: bool = False,
    prefix_cache: bool = False,
) -> None:
    """A count outside 1..length: zero output for the sequence, untouched conv state; else the pristine bits."""
    launcher = sides.pristine.causal_conv1d_update
    if (prefix_cache and not takes(launcher, "initial_state_idx")) or (separate_out and not takes(launcher, "out")):
        raise NotInThisReleaseError
    draw = Draw(sides.device)
    batch, longest = len(lengths), max(lengths)
    state_length = width - 1 + longest - 1
    ids = draw.ids(batch, 3 if prefix_cache else 1, row_stride=max(id_stride, 3 if prefix_cache else 1))
    for sequence in null:
        ids[sequence] = 0
    slots = states_in(ids)
    if dim_last:
        state = draw.padded(slots, state_length, dim, pad=pad, dtype=dtype).transpose(1, 2)
    else:
        state = draw.padded(slots, dim, state_length, pad=pad, dtype=dtype)
    if varlen:
        x = draw.padded(sum(lengths), dim, pad=pad, dtype=dtype)
    else:
        x = draw.padded(batch, longest, dim, pad=pad, dtype=dtype).transpose(1, 2)
    arguments: dict[str, Any] = {
        "x": x,
        "conv_state": state,
        "weight": draw.normal(dim, width, dtype=dtype),
        "bias": draw.normal(dim, dtype=dtype) if bias else None,
        "activation": activation,
        "conv_state_indices": ids if prefix_cache else ids[:, 0],
    }
    if varlen:
        arguments |= {"query_start_loc": draw.starts(lengths), "max_query_len": longest}
    if separate_out:
        arguments["out"] = torch.full_like(x, POISON)
    if prefix_cache:
        arguments |= {
            "initial_state_idx": draw.ints([i % 2 for i in range(batch)]),
            "block_idx_last_scheduled_token": draw.ints([1 + i % 2 for i in range(batch)]),
        }

    def run(module: types.ModuleType, accepted: Sequence[int]) -> Outcome:
        given = copies_of(arguments)
        with poisoned_allocations():
            out = module.causal_conv1d_update(**given, num_accepted_tokens=draw.ints(accepted))
        return {"output": out, "conv_state": given["conv_state"]}

    live = [s for s in range(batch) if s not in null and lengths[s] > 0]
    invalid = [s for s in live if not 1 <= counts[s] <= lengths[s]]
    expected = run(sides.pristine, [1 if s in invalid else c for s, c in enumerate(counts)])
    for sequence in invalid:
        if varlen:
            expected["output"][spans(lengths)[sequence]] = 0
        else:
            expected["output"][sequence] = 0
        touched = ids[sequence].long()
        expected["conv_state"][touched] = state[touched]
    require_outcome(expected, run(sides.patched, counts))


def conv_signals(sides: Sides, **options: Any) -> None:
    if not mentions(sides.pristine, "gdc_wait"):
        raise NotInThisReleaseError
    require_one_signal_each(record_signals(lambda: conv_case(sides, **options)))


# ---------------------------------------------------------------- mamba_ssm


def ssm_case(
    sides: Sides,
    *,
    counts: Sequence[int] | None,
    lengths: Sequence[int],
    varlen: bool = True,
    columns: int = 4,
    row_stride: int = 4,
    column_stride: int = 1,
    heads: int = 2,
    dim: int = 6,
    dstate: int = 8,
    dtype: torch.dtype = torch.float32,
    z: bool = False,
    tied: bool = False,
    softplus: bool = True,
    own_destination: bool = False,
    pad: int = 0,
    null: Sequence[tuple[int, int]] = (),
    indexed: bool = True,
) -> None:
    """A first column outside the row: zero output, untouched state. A count below 1 reads column 0, as before."""
    draw = Draw(sides.device)
    batch, tokens = len(lengths), sum(lengths)
    source = draw.ids(batch, columns, row_stride=row_stride, column_stride=column_stride)
    destination = draw.ids(batch, columns, row_stride=columns + 1, first=states_in(source))
    for row, column in null:
        source[row, column] = 0
    slots = states_in(destination)
    state = draw.padded(slots, heads, dim, dstate, pad=pad, dtype=dtype)
    if tied:
        a = (-draw.normal(heads).abs())[:, None, None].expand(heads, dim, dstate)
        dt = draw.normal(tokens, heads)[:, :, None].expand(tokens, heads, dim)
        dt_bias = draw.normal(heads)[:, None].expand(heads, dim)
    else:
        a, dt, dt_bias = (
            -draw.normal(heads, dim, dstate).abs(),
            draw.normal(tokens, heads, dim),
            draw.normal(heads, dim),
        )
    arguments: dict[str, Any] = {
        "state": state,
        "x": draw.padded(tokens, heads, dim, pad=pad, dtype=dtype),
        "dt": dt,
        "A": a,
        "B": draw.normal(tokens, 1, dstate),
        "C": draw.normal(tokens, 1, dstate),
        "D": draw.normal(heads, dim),
        "dt_bias": dt_bias,
        "z": draw.normal(tokens, heads, dim, dtype=dtype) if z else None,
        "dt_softplus": softplus,
        "state_batch_indices": source if indexed else None,
        "dst_state_batch_indices": destination if own_destination else None,
        "out": torch.full_like(draw.padded(tokens, heads, dim, pad=pad, dtype=dtype), POISON),
        "cu_seqlens": draw.starts(lengths) if varlen else None,
    }

    def run(module: types.ModuleType, accepted: Sequence[int] | None) -> Outcome:
        given = copies_of(arguments)
        if accepted is not None:
            given["num_accepted_tokens"] = draw.ints(accepted)
        with poisoned_allocations():
            module.selective_state_update(**given)
        return {"output": given["out"], "state": given["state"]}

    if counts is None:
        require_outcome(run(sides.pristine, None), run(sides.patched, None))
        return
    invalid = [s for s, c in enumerate(counts) if max(c - 1, 0) * column_stride >= row_stride and lengths[s] > 0]
    expected = run(sides.pristine, [1 if s in invalid or c < 1 else c for s, c in enumerate(counts)])
    written = destination if own_destination else source
    for sequence in invalid:
        expected["output"][spans(lengths)[sequence]] = 0
        touched = written[sequence].long()
        expected["state"][touched] = state[touched]
    require_outcome(expected, run(sides.patched, counts))


# ---------------------------------------------------------------- gated delta rule (recurrent, sigmoid gating, KDA)


@dataclass(frozen=True)
class Rows:
    """A batch of sequences, their accepted counts and their rows of state ids."""

    counts: Sequence[int] | None
    lengths: Sequence[int]
    ids: torch.Tensor

    def closed(self) -> list[int]:
        """The sequences whose initial state is invalid: no output, no state."""
        return [s for s, length in enumerate(self.lengths) if length > 0 and self._initial(s) <= 0]

    def safe_counts(self) -> list[int] | None:
        if self.counts is None:
            return None
        return [1 if not self._in_row(c) else c for c in self.counts]

    def _in_row(self, count: int) -> bool:
        return 1 <= count <= self.ids.stride(0)

    def _initial(self, sequence: int) -> int:
        count = 1 if self.counts is None else self.counts[sequence]
        if not self._in_row(count) and self.counts is not None:
            return 0
        place = self.ids.storage_offset() + sequence * self.ids.stride(0) + count - 1
        return int(storage_of(self.ids)[place])

    def close(self, expected: Outcome, state: torch.Tensor) -> None:
        """What an invalid initial state means for the outcome of the pristine kernel."""
        for sequence in self.closed():
            expected["output"][spans(self.lengths)[sequence]] = 0
            touched = self.ids[sequence].long().reshape(-1)
            expected["state"][touched] = state[touched]


def draw_rows(
    draw: Draw,
    counts: Sequence[int] | None,
    lengths: Sequence[int],
    *,
    columns: int,
    row_stride: int,
    null: Sequence[tuple[int, int]],
) -> Rows:
    ids = draw.ids(len(lengths), columns, row_stride=row_stride)
    for row, column in null:
        ids[row, column] = 0
    return Rows(counts=counts, lengths=lengths, ids=ids if counts is not None else ids[:, 0])


def draw_state(
    draw: Draw, slots: int, heads: int, value: int, key: int, *, pad: int, dtype: torch.dtype
) -> torch.Tensor:
    """States of (heads, value, key), dense inside and `pad` elements apart."""
    size = heads * value * key
    return draw.normal(slots, size + pad, dtype=dtype).as_strided(
        (slots, heads, value, key), (size + pad, value * key, key, 1)
    )


@dataclass(frozen=True)
class Sizes:
    """A batch in the varlen form, (1, tokens, ...), or in the fixed-length one, (batch, length, ...)."""

    lengths: Sequence[int]
    varlen: bool
    heads: int
    key: int
    value: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def form(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.varlen:
            return tensor.unsqueeze(0)
        return tensor.reshape(len(self.lengths), self.lengths[0], *tensor.shape[1:])


def delta_rule_case(
    sides: Sides,
    *,
    launch: Callable[[types.ModuleType, dict[str, Any]], tuple[torch.Tensor, torch.Tensor]],
    gates: Callable[[Draw, Sizes], dict[str, Any]],
    counts: Sequence[int] | None,
    lengths: Sequence[int],
    varlen: bool = True,
    columns: int = 4,
    row_stride: int = 4,
    heads: int = 1,
    value_heads: int = 2,
    key: int = 8,
    value: int = 6,
    dtype: torch.dtype = torch.float32,
    pad: int = 0,
    null: Sequence[tuple[int, int]] = (),
    in_place: bool = True,
    l2norm: bool = True,
) -> None:
    draw = Draw(sides.device)
    sizes = Sizes(lengths, varlen, value_heads, key, value)
    rows = draw_rows(draw, counts, lengths, columns=columns, row_stride=row_stride, null=null)
    state = draw_state(draw, states_in(rows.ids), value_heads, value, key, pad=pad, dtype=dtype)
    arguments: dict[str, Any] = {
        "q": sizes.form(draw.normal(sizes.tokens, heads, key, dtype=dtype)),
        "k": sizes.form(draw.normal(sizes.tokens, heads, key, dtype=dtype)),
        "v": sizes.form(draw.normal(sizes.tokens, value_heads, value, dtype=dtype)),
        "scale": key**-0.5,
        "initial_state": state,
        "inplace_final_state": in_place,
        "cu_seqlens": draw.starts(lengths) if varlen else None,
        "ssm_state_indices": rows.ids,
        "use_qk_l2norm_in_kernel": l2norm,
        **gates(draw, sizes),
    }

    def run(module: types.ModuleType, accepted: Sequence[int] | None) -> Outcome:
        given = copies_of(arguments)
        given["num_accepted_tokens"] = None if accepted is None else draw.ints(accepted)
        with poisoned_allocations():
            out, final = launch(module, given)
        outcome = {"output": out.view(sizes.tokens, value_heads, value), "state": given["initial_state"]}
        return outcome if in_place else outcome | {"final_state": final}

    expected = run(sides.pristine, rows.safe_counts())
    rows.close(expected, state)
    if not in_place:
        for sequence in rows.closed():
            expected["final_state"][spans(lengths)[sequence]] = POISON
    require_outcome(expected, run(sides.patched, counts))


def recurrent_gates(draw: Draw, sizes: Sizes) -> dict[str, Any]:
    return {
        "g": sizes.form(-draw.normal(sizes.tokens, sizes.heads).abs()),
        "beta": sizes.form(draw.normal(sizes.tokens, sizes.heads).sigmoid()),
    }


def headwise_gates(draw: Draw, sizes: Sizes) -> dict[str, Any]:
    beta = draw.normal(sizes.tokens, sizes.heads, sizes.value).sigmoid()
    return recurrent_gates(draw, sizes) | {"beta": sizes.form(beta)}


def channel_gates(draw: Draw, sizes: Sizes) -> dict[str, Any]:
    gate = -draw.normal(sizes.tokens, sizes.heads, sizes.key).abs()
    return recurrent_gates(draw, sizes) | {"g": sizes.form(gate)}


def launch_recurrent(module: types.ModuleType, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor] = module.fused_recurrent_gated_delta_rule_fwd(**given)
    return result


def launch_recurrent_kda(module: types.ModuleType, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same kernel as the flash-linear-attention KDA launcher (another file of the wheel) starts it."""
    q, v, state, ids = given["q"], given["v"], given["initial_state"], given["ssm_state_indices"]
    (rows, length, heads, key), (value_heads, value) = q.shape, v.shape[2:]
    cu_seqlens = given["cu_seqlens"]
    sequences = rows if cu_seqlens is None else len(cu_seqlens) - 1
    block = min(triton.next_power_of_2(value), 8)
    out = q.new_empty(v.shape)
    module.fused_recurrent_gated_delta_rule_fwd_kernel[(1, triton.cdiv(value, block), sequences * value_heads)](
        q=q,
        k=given["k"],
        v=v,
        g=given["g"],
        beta=given["beta"],
        o=out,
        h0=state,
        ht=state,
        cu_seqlens=cu_seqlens,
        ssm_state_indices=ids,
        num_accepted_tokens=given["num_accepted_tokens"],
        scale=given["scale"],
        N=sequences,
        T=length,
        B=rows,
        H=heads,
        HV=value_heads,
        K=key,
        V=value,
        BK=triton.next_power_of_2(key),
        BV=block,
        stride_init_state_token=state.stride(0),
        stride_final_state_token=state.stride(0),
        stride_indices_seq=ids.stride(0),
        stride_indices_tok=1,
        IS_BETA_HEADWISE=given["beta"].ndim == v.ndim,
        USE_QK_L2NORM_IN_KERNEL=given["use_qk_l2norm_in_kernel"],
        INPLACE_FINAL_STATE=True,
        IS_KDA=True,
        num_warps=1,
        num_stages=3,
    )
    return out, state


def sigmoid_gates(draw: Draw, sizes: Sizes) -> dict[str, Any]:
    return {
        "A_log": draw.normal(sizes.heads),
        "a": sizes.form(draw.normal(sizes.tokens, sizes.heads)),
        "b": sizes.form(draw.normal(sizes.tokens, sizes.heads)),
        "dt_bias": draw.normal(sizes.heads),
    }


def launch_gating(module: types.ModuleType, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor] = module.fused_sigmoid_gating_delta_rule_update(**given)
    return result


def recurrent_case(sides: Sides, **options: Any) -> None:
    """A count outside the row of state ids, or a null id: zero output for all tokens; else the pristine bits."""
    options.setdefault("gates", recurrent_gates)
    options.setdefault("launch", launch_recurrent)
    delta_rule_case(sides, **options)


def gating_case(sides: Sides, **options: Any) -> None:
    """The same as for the recurrent kernel."""
    delta_rule_case(sides, launch=launch_gating, gates=sigmoid_gates, **options)


def kda_case(
    sides: Sides,
    *,
    counts: Sequence[int] | None,
    lengths: Sequence[int],
    columns: int = 4,
    row_stride: int = 4,
    heads: int = 2,
    key: int = 8,
    value: int = 3,
    dtype: torch.dtype = torch.float32,
    pad: int = 0,
    null: Sequence[tuple[int, int]] = (),
    given_out: bool = False,
    gate_in_kernel: bool = True,
    dt_bias: bool = True,
    lower_bound: float | None = None,
) -> None:
    """The same for Kimi's KDA kernel, whose rows of q, k, v and output may lie apart."""
    draw = Draw(sides.device)
    tokens = sum(lengths)
    rows = draw_rows(draw, counts, lengths, columns=columns, row_stride=row_stride, null=null)
    state = draw_state(draw, states_in(rows.ids), heads, value, key, pad=pad, dtype=torch.float32)
    packed = draw.padded(1, tokens, heads * (2 * key + value), pad=pad, dtype=dtype)
    q, k, v = packed.split([heads * key, heads * key, heads * value], dim=-1)
    arguments: dict[str, Any] = {
        "q": q.unflatten(-1, (heads, key)),
        "k": k.unflatten(-1, (heads, key)),
        "v": v.unflatten(-1, (heads, value)),
        "g": draw.padded(1, tokens, heads * key, pad=pad).unflatten(-1, (heads, key)).neg_(),
        "beta": draw.padded(1, tokens, heads, pad=pad).sigmoid_(),
        "initial_state": state,
        "cu_seqlens": draw.starts(lengths),
        "ssm_state_indices": rows.ids,
        "use_gate_in_kernel": gate_in_kernel,
        "use_beta_sigmoid_in_kernel": gate_in_kernel,
        "lower_bound": lower_bound,
    }
    if gate_in_kernel:
        arguments |= {"A_log": draw.normal(heads), "dt_bias": draw.normal(heads * key) if dt_bias else None}
    if given_out:
        arguments["out"] = draw.padded(1, tokens, heads * value, pad=5, dtype=dtype).unflatten(-1, (heads, value))

    def run(module: types.ModuleType, accepted: Sequence[int] | None) -> Outcome:
        given = copies_of(arguments)
        given["num_accepted_tokens"] = None if accepted is None else draw.ints(accepted)
        with poisoned_allocations():
            out, _ = module.fused_recurrent_kda_fwd(**given)
        return {"output": out[0], "state": given["initial_state"]}

    expected = run(sides.pristine, rows.safe_counts())
    rows.close(expected, state)
    require_outcome(expected, run(sides.patched, counts))


def kda_signals(sides: Sides, **options: Any) -> None:
    require_one_signal_each(record_signals(lambda: kda_case(sides, **options)))


# ---------------------------------------------------------------- PDL


def record_signals(run: Callable[[], None]) -> Signals:
    """Run with PDL on and its two instructions replaced by recorders."""
    signals, cuda = Signals(), tl.extra.cuda
    originals = cuda.gdc_wait, cuda.gdc_launch_dependents
    PLATFORM.pdl, cuda.gdc_wait, cuda.gdc_launch_dependents = True, signals.wait, signals.launch
    try:
        run()
    finally:
        PLATFORM.pdl = False
        cuda.gdc_wait, cuda.gdc_launch_dependents = originals
    return signals


def require_one_signal_each(signals: Signals) -> None:
    """The patched kernel is launched last: each of its programs has waited, and has signalled once."""
    if not signals.waited:
        raise MismatchError("no program waited")
    silent = sorted(set(signals.waited) - set(signals.launched))
    if silent or sorted(signals.launched) != sorted(signals.waited):
        programs = len(signals.waited)
        raise MismatchError(f"{len(silent)} of {programs} programs never signal dependent launches: {silent[:3]}")


# ---------------------------------------------------------------- copies between block columns


@dataclass(frozen=True)
class Move:
    """One request: copy from a block column, `bias` accepted tokens on, to another one."""

    source: int
    target: int
    bias: int = 0


WIDTH, CHANNELS = 4, 6


def draw_tables(draw: Draw, requests: int, columns: int, null: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
    tables = [draw.ids(requests, columns, row_stride=columns), draw.ids(requests, columns, row_stride=columns)]
    for row, column, value in null:
        for table in tables:
            table[row, column] = value
    return tables


def draw_layers(draw: Draw, tables: list[torch.Tensor], dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """A conv and a temporal state for each of two layers (of two groups); temporal pages are padded."""
    slots = max(states_in(table) for table in tables)
    shape = (CHANNELS, WIDTH) if Layout.dim_first else (WIDTH, CHANNELS)
    temporal = {"a": (5, 8), "b": (3, 4)} if dtype == torch.float16 else {"a": (10, 12), "b": (3, 4)}
    layers = {}
    for name, (elements, page) in temporal.items():
        state = draw.normal(slots, page, dtype=dtype).as_strided((slots, 1, elements), (page, elements, 1))
        layers[name] = [draw.normal(slots, *shape, dtype=dtype), state]
    return layers


def move_states(
    layers: dict[str, list[torch.Tensor]], tables: list[torch.Tensor], moves: Sequence[Move | None]
) -> None:
    """What the copy kernels are documented to do, in slices; columns outside the row and null blocks move nothing."""
    for (conv, temporal), table in zip(layers.values(), tables, strict=True):
        columns = table.size(1)
        for row, move in enumerate(moves):
            if move is None or not 0 <= move.target < columns or not 0 <= move.source < columns:
                continue
            target, source = int(table[row, move.target]), int(table[row, move.source])
            if target > 0 and source > 0 and move.bias < WIDTH:
                before = conv[source].clone()
                if Layout.dim_first:
                    conv[target, :, : WIDTH - move.bias] = before[:, move.bias :]
                else:
                    conv[target, : WIDTH - move.bias] = before[move.bias :]
            if move.source + move.bias >= columns:
                continue
            source = int(table[row, move.source + move.bias])
            if target > 0 and source > 0:
                temporal[target] = temporal[source].clone()


def bind_context(
    module: types.ModuleType, layers: dict[str, list[torch.Tensor]], tables: list[torch.Tensor], block: int
) -> Any:
    """The module's own launcher, bound to these states and block tables."""
    spec = module.MambaSpec()
    spec.block_size, spec.num_speculative_blocks = block, 1
    spec.mamba_cache_mode, spec.mamba_type = "align", "gdn"
    config = types.SimpleNamespace(
        kv_cache_groups=[types.SimpleNamespace(kv_cache_spec=spec, layer_names=[name]) for name in layers]
    )
    functions = (module.get_conv_copy_spec, module.get_temporal_copy_spec)
    by_type = {spec.mamba_type: functions}
    create = module.MambaSpecDecodeGPUContext.create
    # From 0.29 on the copy functions come by the type of layer.
    typed = takes(create, "copy_funcs")
    attention = {name: types.SimpleNamespace(kv_cache=states) for name, states in layers.items()}
    context = create(
        max_num_reqs=tables[0].size(0),
        kv_cache_config=config,
        device=tables[0].device,
        # From 0.34 on the layers are asked for their functions, and there is nothing to stage.
        **({"forward_context": attention} if takes(create, "forward_context") else {"make_buffer": lambda *_, **__: None}),
        **({"copy_funcs": by_type} if typed else {"num_state_types": len(functions)}),
    )
    context.initialize_from_forward_context(
        config,
        attention,
        by_type if typed else functions,
        tables,
    )
    return context


def copy_layers(layers: dict[str, list[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    return {name: [copy_of(state) for state in states] for name, states in layers.items()}


def outcome_of(layers: dict[str, list[torch.Tensor]]) -> Outcome:
    kinds = ("conv", "temporal")
    return {
        f"{name}.{kind}": state for name, states in layers.items() for kind, state in zip(kinds, states, strict=True)
    }


@contextlib.contextmanager
def conv_layout(*, dim_first: bool) -> Iterator[None]:
    Layout.dim_first = dim_first
    try:
        yield
    finally:
        Layout.dim_first = False


def precopy_case(
    sides: Sides,
    *,
    moves: Sequence[Move],
    columns: int = 4,
    null: Sequence[tuple[int, int, int]] = (),
    dim_first: bool = False,
    mapped: bool = True,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Each column has to lie in the request's row and name a block; otherwise that state is not copied."""
    launcher = sides.pristine.MambaSpecDecodeGPUContext.run_fused_precopy
    if not mapped and "HAS_IDX_MAPPING" not in inspect.getsource(launcher):
        raise NotInThisReleaseError
    draw = Draw(sides.device)
    requests = len(moves)
    with conv_layout(dim_first=dim_first):
        tables = draw_tables(draw, requests, columns, null)
        layers = draw_layers(draw, tables, dtype)

        def run(module: types.ModuleType) -> Outcome:
            given = copy_layers(layers)
            bind_context(module, given, tables, block=4).run_fused_precopy(
                num_reqs=requests,
                state_idx_gpu=draw.ints([move.target for move in moves]),
                src_col_gpu=draw.ints([move.source for move in moves]),
                token_bias_gpu=draw.ints([move.bias for move in moves]),
                idx_mapping=draw.ints(range(requests)) if mapped else None,
            )
            return outcome_of(given)

        expected = copy_layers(layers)
        # A fresh state (column -1) and one that stays in its column are no copies.
        moving = [None if move.source < 0 or move.source == move.target else move for move in moves]
        move_states(expected, tables, moving)
        require_outcome(outcome_of(expected), run(sides.patched))
        if all(move is None or is_in_row(move, columns) for move in moving) and not null:
            require_outcome(run(sides.pristine), run(sides.patched))


def is_in_row(move: Move, columns: int) -> bool:
    return 0 <= move.target < columns and move.source >= 0 and move.source + move.bias < columns


@dataclass(frozen=True)
class Request:
    """One request's counters after a step, as the fused postprocess kernel reads them."""

    accepted: int
    column: int
    scheduled: int
    computed: int
    drafts: int

    @property
    def running(self) -> int:
        return self.computed + self.scheduled - self.drafts

    def move(self, block: int) -> Move | None:
        """The copy that aligns the state to a block boundary, None where no boundary was passed."""
        aligned = (self.running + self.accepted - 1) // block * block
        if aligned < self.running:
            return None
        move = Move(source=self.column, target=aligned // block - 1, bias=aligned - self.running)
        return None if move.source == move.target and move.bias == 0 else move


def postprocess_case(
    sides: Sides,
    *,
    requests: Sequence[Request],
    columns: int = 4,
    null: Sequence[tuple[int, int, int]] = (),
    dim_first: bool = False,
    mapped: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """The same copy, its columns now derived in the kernel from the accepted count."""
    draw, block = Draw(sides.device), 4
    with conv_layout(dim_first=dim_first):
        tables = draw_tables(draw, len(requests), columns, null)
        layers = draw_layers(draw, tables, dtype)
        columns_now = draw.ints([request.column for request in requests])
        accepted_now = draw.ints([request.accepted for request in requests])

        def run(module: types.ModuleType) -> Outcome:
            given, accepted = copy_layers(layers), accepted_now.clone()
            context = bind_context(module, given, tables, block)
            # From 0.34 on there is only the mapped form.
            if mapped or not hasattr(context, "run_fused_postprocess"):
                context.run_fused_postprocess_align(
                    num_reqs=len(requests),
                    num_accepted_tokens_gpu=accepted,
                    state_idx_gpu=columns_now,
                    new_num_computed_tokens_gpu=draw.ints([r.running + r.accepted - 1 for r in requests]),
                    idx_mapping=draw.ints(range(len(requests))),
                )
                return outcome_of(given)
            context.run_fused_postprocess(
                num_reqs=len(requests),
                num_accepted_tokens_gpu=accepted,
                mamba_state_idx_gpu=columns_now,
                num_scheduled_tokens_gpu=draw.ints([request.scheduled for request in requests]),
                num_computed_tokens_gpu=draw.ints([request.computed for request in requests]),
                num_draft_tokens_gpu=draw.ints([request.drafts for request in requests]),
            )
            return outcome_of(given) | {"num_accepted": context.num_accepted_tokens_out}

        moves = [request.move(block) for request in requests]
        expected = copy_layers(layers)
        move_states(expected, tables, moves)
        actual = run(sides.patched)
        require_outcome(outcome_of(expected), actual)
        if all(move is None or is_in_row(move, columns) for move in moves) and not null:
            require_outcome(run(sides.pristine), actual)


# ---------------------------------------------------------------- the cases


@dataclass(frozen=True)
class Case:
    kernel: str
    name: str
    path: str
    run: Callable[..., None]
    options: dict[str, Any]
    unpatched: str
    interpreter_only: bool = False


Given = tuple[str, str, dict[str, Any]]


def given(name: str, unpatched: str, **options: Any) -> Given:
    """A case's name, what unpatched kernels make of it, and the options of its run."""
    return name, unpatched, options


def conv_cases() -> Iterator[Given]:
    three = [3, 3, 3]
    yield given("counts 1 to 3", "passes", counts=[1, 2, 3], lengths=three)
    yield given("counts 1 to 3, separate output", "passes", counts=[1, 2, 3], lengths=three, separate_out=True)
    yield given("counts 1 to 3, fixed length", "passes", counts=[1, 2, 3], lengths=three, varlen=False)
    yield given("counts 1 to 4, lengths differ", "passes", counts=[1, 2, 4, 1], lengths=[1, 3, 4, 2])
    yield given("one token", "passes", counts=[1, 1], lengths=[1, 1], width=3)
    yield given(
        "null blocks and empty sequences", "passes", counts=[2, 3, 1], lengths=[3, 3, 0], null=[1], separate_out=True
    )
    yield given(
        "invalid counts of null blocks and empty sequences",
        "passes",
        counts=[0, 9, 2],
        lengths=[3, 0, 3],
        null=[0],
        separate_out=True,
    )
    yield given("prefix cache", "passes", counts=[1, 3, 2], lengths=three, prefix_cache=True)
    yield given("count 0", "fails", counts=[0], lengths=[3])
    yield given("count 4 of 3", "fails", counts=[4], lengths=[3])
    yield given("count -1", "fails", counts=[-1], lengths=[3])
    yield given("mixed batch", "fails", counts=[2, 0, 3, 4, -2, 1], lengths=[3] * 6)
    yield given("mixed batch, separate output", "fails", counts=[0, 2, 4], lengths=three, separate_out=True)
    yield given("mixed batch, fixed length", "fails", counts=[0, 2, 4], lengths=three, varlen=False)
    yield given(
        "mixed batch, fixed length, separate output, padded",
        "fails",
        counts=[3, 0, 4],
        lengths=three,
        varlen=False,
        separate_out=True,
        pad=3,
    )
    yield given(
        "counts above their own length only", "fails", counts=[2, 3, 4, 4], lengths=[1, 2, 3, 4], separate_out=True
    )
    yield given(
        "padded rows, strided ids, half precision, no bias",
        "fails",
        counts=[0, 2, 4],
        lengths=three,
        pad=5,
        id_stride=5,
        dtype=torch.float16,
        bias=False,
        activation=None,
    )
    yield given("state with tokens last", "fails", counts=[0, 2, 4], lengths=three, dim_last=False, pad=2)
    yield given("width 2", "fails", counts=[0, 2, 4], lengths=three, width=2)
    yield given("prefix cache, mixed batch", "fails", counts=[1, 0, 4], lengths=three, prefix_cache=True)
    yield given("channels over two programs", "fails", counts=[2, 0, 4], lengths=three, dim=300)
    yield given("huge counts", "unsafe", counts=[INT32_MAX, 2, INT32_MIN], lengths=three)
    yield given("huge counts, fixed length", "unsafe", counts=[INT32_MAX, 2, INT32_MIN], lengths=three, varlen=False)


def ssm_cases() -> Iterator[Given]:
    four = [2, 2, 2, 2]
    yield given("counts 1 to 4", "passes", counts=[1, 2, 3, 4], lengths=four)
    yield given("counts 1 to 4, own destination", "passes", counts=[1, 2, 3, 4], lengths=four, own_destination=True)
    yield given("counts below 1 read column 0", "passes", counts=[0, -1, -3, 2], lengths=four)
    yield given("counts far below 1", "passes", counts=[INT32_MIN, 2], lengths=[2, 2])
    yield given("fixed length", "passes", counts=[1, 2, 4], lengths=[1, 1, 1], varlen=False)
    yield given("no counts", "passes", counts=None, lengths=[1, 1], varlen=False, columns=1, row_stride=1)
    yield given("no counts, no ids", "passes", counts=None, lengths=[1, 1], varlen=False, indexed=False)
    yield given("strided ids", "passes", counts=[1, 2, 3, 4], lengths=four, row_stride=8, column_stride=2)
    yield given("padded rows of ids", "passes", counts=[1, 2, 4], lengths=[2, 2, 2], row_stride=6)
    yield given(
        "null blocks and empty sequences", "passes", counts=[1, 2, 3, 5], lengths=[2, 2, 2, 0], null=[(0, 0), (1, 2)]
    )
    yield given("count 5 of 4", "fails", counts=[5], lengths=[2])
    yield given("mixed batch", "fails", counts=[5, 2, 0, 6, 4], lengths=[2, 2, 2, 1, 3])
    yield given(
        "mixed batch, z, own destination", "fails", counts=[5, 2, 7], lengths=[2, 3, 2], z=True, own_destination=True
    )
    yield given("mixed batch, tied heads", "fails", counts=[2, 5, 4], lengths=[2, 2, 2], tied=True)
    yield given("mixed batch, fixed length", "fails", counts=[5, 1, 6], lengths=[1, 1, 1], varlen=False)
    yield given(
        "padded rows, half precision",
        "fails",
        counts=[7, 4, 9],
        lengths=[2, 2, 2],
        row_stride=6,
        pad=3,
        dtype=torch.float16,
    )
    yield given(
        "strided ids, mixed batch",
        "fails",
        counts=[5, 4, 6],
        lengths=[2, 2, 2],
        row_stride=8,
        column_stride=2,
        softplus=False,
    )
    yield given("one column", "fails", counts=[2, 1], lengths=[1, 1], columns=1, row_stride=1)
    yield given("channels over two programs", "fails", counts=[5, 3], lengths=[2, 2], dim=12)
    yield given("huge counts", "unsafe", counts=[INT32_MAX, 2, 10**6], lengths=[2, 2, 2])


def row_cases(*, fixed: bool) -> Iterator[Given]:
    """What the three kernels over a row of state ids share."""
    four = [2, 2, 2, 2]
    yield given("counts 1 to 4", "passes", counts=[1, 2, 3, 4], lengths=four)
    yield given("lengths differ", "passes", counts=[1, 4, 2], lengths=[1, 4, 2])
    yield given("padded rows of ids", "passes", counts=[1, 2, 4], lengths=[2, 2, 2], row_stride=6)
    yield given("padded states, half precision", "passes", counts=[2, 3], lengths=[3, 2], pad=4, dtype=torch.float16)
    yield given("null blocks to write", "passes", counts=[1, 2], lengths=[2, 2], null=[(0, 1), (1, 1)])
    yield given("empty sequences", "passes", counts=[2, 0, 5, 3], lengths=[3, 0, 0, 2])
    yield given("no counts", "passes", counts=None, lengths=[1, 1, 1], row_stride=1, columns=1)
    yield given("no counts, strided ids", "passes", counts=None, lengths=[1, 1, 1], row_stride=5)
    yield given("count 0", "fails", counts=[0], lengths=[2])
    yield given("count 5 of 4", "fails", counts=[5], lengths=[2])
    yield given("count -1", "fails", counts=[-1], lengths=[2])
    yield given("null block to read", "fails", counts=[2, 2], lengths=[2, 2], null=[(0, 1)])
    yield given("mixed batch", "fails", counts=[2, 0, 4, 5, -3, 1], lengths=[2, 2, 4, 2, 3, 1])
    yield given("mixed batch, padded rows and states", "fails", counts=[7, 4, 0, 8], lengths=four, row_stride=6, pad=4)
    yield given("huge counts", "unsafe", counts=[INT32_MAX, 2, INT32_MIN], lengths=[2, 2, 2])
    if fixed:
        yield given("fixed length", "passes", counts=[1, 2, 4], lengths=[2, 2, 2], varlen=False)
        yield given("fixed length, mixed batch", "fails", counts=[0, 2, 5], lengths=[2, 2, 2], varlen=False)
        yield given("not in place", "passes", counts=[1, 4], lengths=[3, 2], in_place=False)
        yield given("not in place, mixed batch", "fails", counts=[0, 4, 5], lengths=[3, 2, 2], in_place=False)
        yield given(
            "no l2norm, values over two programs", "fails", counts=[0, 4], lengths=[2, 2], l2norm=False, value=36
        )


def recurrent_cases() -> Iterator[Given]:
    yield from row_cases(fixed=True)
    mixed = {"counts": [2, 0, 5], "lengths": [2, 2, 2]}
    yield given("headwise beta", "passes", counts=[1, 4], lengths=[3, 2], gates=headwise_gates)
    yield given("headwise beta, mixed batch", "fails", gates=headwise_gates, **mixed)
    kda = {"gates": channel_gates, "launch": launch_recurrent_kda}
    yield given("as KDA", "passes", counts=[1, 4], lengths=[3, 2], **kda)
    yield given("as KDA, mixed batch", "fails", **mixed, **kda)


def kda_cases(*, two_blocks: int) -> Iterator[Given]:
    """`two_blocks` is a number of values that the launcher spreads over more than one program."""
    yield from row_cases(fixed=False)
    mixed = {"counts": [2, 0, 5], "lengths": [2, 2, 2]}
    yield given("given output, padded", "passes", counts=[1, 4], lengths=[3, 2], given_out=True, pad=3)
    yield given("given output, mixed batch", "fails", given_out=True, pad=3, **mixed)
    yield given("gate outside, mixed batch", "fails", gate_in_kernel=False, **mixed)
    yield given("lower bound, no bias, mixed batch", "fails", lower_bound=-5.0, dt_bias=False, **mixed)
    yield given("values over programs", "fails", counts=[0, 4], lengths=[2, 2], value=two_blocks)


def precopy_cases() -> Iterator[Given]:
    moves = [Move(0, 1), Move(1, 2, 1), Move(0, 3, 2), Move(2, 0, 1), Move(-1, 1), Move(2, 2, 1)]
    for dim_first in (False, True):
        layout = {"dim_first": dim_first}
        order = "channels first" if dim_first else "tokens first"
        yield given(f"in the row, {order}", "passes", moves=moves[:4], **layout)
        yield given(f"nothing to do, {order}", "passes", moves=moves[4:], **layout)
        yield given(f"target beyond the row, {order}", "fails", moves=[Move(0, 4), *moves[:2]], **layout)
        yield given(f"target before the row, {order}", "fails", moves=[moves[0], Move(0, -1), Move(1, -3)], **layout)
        yield given(f"source beyond the row, {order}", "fails", moves=[Move(4, 1), moves[1], Move(5, 0, 1)], **layout)
        yield given(f"bias beyond the row, {order}", "fails", moves=[Move(3, 1, 1), moves[0], Move(2, 0, 3)], **layout)
        null = [(0, 0, 0), (1, 2, 0), (2, 1, -1)]
        yield given(
            f"null blocks, {order}",
            "fails",
            moves=[Move(0, 1), Move(1, 2), Move(1, 3), Move(0, 2, 1)],
            null=null,
            **layout,
        )
        wild = [Move(INT32_MAX, 1, 1), Move(0, INT32_MAX), Move(0, INT32_MIN, 1), Move(1, 0, INT32_MAX), moves[0]]
        yield given(f"huge columns, {order}", "unsafe", moves=wild, **layout)
    yield given("batch order", "passes", moves=moves[:4], mapped=False)
    yield given(
        "batch order, half precision", "fails", moves=[*moves[:3], Move(3, 1, 1)], mapped=False, dtype=torch.float16
    )


def postprocess_cases() -> Iterator[Given]:
    # Block size 4: a request with `computed` tokens runs in column computed // 4 and passes a boundary by accepting.
    valid = [
        Request(accepted=3, column=0, scheduled=4, computed=2, drafts=3),
        Request(accepted=1, column=1, scheduled=4, computed=5, drafts=3),
        Request(accepted=4, column=1, scheduled=4, computed=6, drafts=3),
        Request(accepted=0, column=1, scheduled=4, computed=7, drafts=3),
    ]
    beyond = Request(accepted=14, column=0, scheduled=4, computed=6, drafts=3)
    before = Request(accepted=3, column=-1, scheduled=4, computed=2, drafts=3)
    bias = Request(accepted=3, column=3, scheduled=4, computed=2, drafts=3)
    huge = Request(accepted=10**8, column=0, scheduled=4, computed=6, drafts=3)
    for dim_first in (False, True):
        layout = {"dim_first": dim_first}
        order = "channels first" if dim_first else "tokens first"
        yield given(f"in the row, {order}", "passes", requests=valid, **layout)
        yield given(f"count beyond the row, {order}", "fails", requests=[valid[0], beyond, valid[2]], **layout)
        yield given(f"column before the row, {order}", "fails", requests=[valid[0], before, valid[2]], **layout)
        yield given(f"bias beyond the row, {order}", "fails", requests=[bias, valid[2]], **layout)
        yield given(
            f"null blocks, {order}", "fails", requests=[valid[0], valid[2]], null=[(0, 0, 0), (1, 2, -1)], **layout
        )
        yield given(f"huge count, {order}", "unsafe", requests=[huge, valid[0]], **layout)
    # Not into their own column: there the kernel resets the count in place while its other programs read it.
    moving = [
        Request(accepted=3, column=1, scheduled=4, computed=2, drafts=3),
        Request(accepted=4, column=0, scheduled=4, computed=6, drafts=3),
    ]
    yield given("mapped, in the row", "passes", requests=moving, mapped=True)
    yield given("mapped, mixed batch", "fails", requests=[before, moving[0], beyond], mapped=True)


def all_cases() -> Iterator[Case]:
    tables: list[tuple[str, str, Callable[..., None], Iterator[Given]]] = [
        ("causal_conv1d_update", CONV, conv_case, conv_cases()),
        ("selective_state_update", SSM, ssm_case, ssm_cases()),
        ("fused_recurrent_gated_delta_rule", RECURRENT, recurrent_case, recurrent_cases()),
        ("fused_sigmoid_gating_delta_rule", GATING, gating_case, row_cases(fixed=True)),
        ("kda_amd", KDA_AMD, kda_case, kda_cases(two_blocks=36)),
        ("kda_nvidia", KDA_NVIDIA, kda_case, kda_cases(two_blocks=6)),
        ("glm_amd", GLM_AMD, recurrent_case, row_cases(fixed=True)),
        ("glm_nvidia", GLM_NVIDIA, recurrent_case, row_cases(fixed=True)),
        ("precopy_mamba", COPY, precopy_case, precopy_cases()),
        ("postprocess_mamba", COPY, postprocess_case, postprocess_cases()),
    ]
    for kernel, path, run, cases in tables:
        for name, unpatched, options in cases:
            yield Case(kernel, name, path, run, options, unpatched)
    yield from signal_cases()


def signal_cases() -> Iterator[Case]:
    """Launch signals can be seen under the interpreter alone."""
    valid = {"counts": [2, 3, 1], "lengths": [3, 3, 3]}
    invalid = {"counts": [2, 0, 5], "lengths": [3, 3, 3]}
    empty = {"counts": [2, 1], "lengths": [3, 0]}
    conv_null, kda_null = valid | {"null": [1]}, valid | {"null": [(1, 2)]}
    for kernel, path, run, name, options, unpatched in (
        ("causal_conv1d_update", CONV, conv_signals, "valid counts", valid | {"dim": 300}, "passes"),
        ("causal_conv1d_update", CONV, conv_signals, "empty sequence", empty, "passes"),
        ("causal_conv1d_update", CONV, conv_signals, "null block", conv_null, "passes"),
        ("causal_conv1d_update", CONV, conv_signals, "invalid counts", invalid | {"dim": 300}, "fails"),
        ("causal_conv1d_update", CONV, conv_signals, "fixed length", invalid | {"varlen": False}, "fails"),
        ("kda_nvidia", KDA_NVIDIA, kda_signals, "valid counts", valid, "passes"),
        ("kda_nvidia", KDA_NVIDIA, kda_signals, "empty sequence", empty, "fails"),
        ("kda_nvidia", KDA_NVIDIA, kda_signals, "null block", kda_null, "fails"),
        ("kda_nvidia", KDA_NVIDIA, kda_signals, "invalid counts", invalid, "fails"),
    ):
        yield Case(kernel, f"launch signals, {name}", path, run, options, unpatched, interpreter_only=True)


def first_of_each(cases: Sequence[Case]) -> list[Case]:
    """The first case of each kernel that passes unpatched, and the first that fails."""
    chosen: dict[tuple[str, str], Case] = {}
    for case in cases:
        if case.unpatched != "unsafe":
            chosen.setdefault((case.kernel, case.unpatched), case)
    return list(chosen.values())


def compile_case(case: Case, sides: Sides) -> dict[str, Any]:
    """The case's kernels as its arguments specialise them; nothing has been computed, so nothing is compared."""
    ok, detail = True, ""
    try:
        case.run(sides, **case.options)
    except NotInThisReleaseError:
        raise
    except MismatchError:
        pass
    except Exception as error:  # noqa: BLE001 - a kernel that does not compile is a result
        ok, detail = False, f"{type(error).__name__}: {error}"
    return {"kernel": case.kernel, "case": case.name, "ok": ok, "detail": detail, "unpatched": case.unpatched}


def run_case(case: Case, sides: Sides) -> dict[str, Any]:
    """The result of one case. Raises NotInThisReleaseError where it has none."""
    try:
        case.run(sides, **case.options)
        if sides.device == "cuda":
            torch.cuda.synchronize()
    except NotInThisReleaseError:
        raise
    except MismatchError as mismatch:
        ok, detail = False, str(mismatch)
    except Exception as error:  # noqa: BLE001 - a case that breaks is a result, the others still count
        ok, detail = False, f"{type(error).__name__}: {error}"
    else:
        ok, detail = True, ""
    return {"kernel": case.kernel, "case": case.name, "ok": ok, "detail": detail, "unpatched": case.unpatched}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pristine", type=Path, help="site-packages with the files as the wheel ships them")
    parser.add_argument("--patched", type=Path, help="site-packages with the patched files")
    parser.add_argument("--device", choices=("cpu", "cuda", "sm80", "sm90"), default="cpu")
    parser.add_argument("--kernel", action="append", help="only this kernel (may be repeated)")
    parser.add_argument("--case", action="append", help="only the cases of this name (may be repeated)")
    parser.add_argument("--unpatched", action="append", choices=("passes", "fails", "unsafe"), help="only these cases")
    parser.add_argument("--quick", action="store_true", help="two cases a kernel: one valid, one that shows the defect")
    parser.add_argument("--list", action="store_true", help="print the cases and run none")
    options = parser.parse_args(arguments)
    if (options.device == "cpu") != INTERPRETED:
        parser.error("TRITON_INTERPRET=1 has to be set for the CPU, and must not be for CUDA")
    root = options.pristine
    cases = [
        case
        for case in all_cases()
        if (not options.kernel or case.kernel in options.kernel)
        and (not options.case or case.name in options.case)
        and (not options.unpatched or case.unpatched in options.unpatched)
        and (options.device == "cpu" or not case.interpreter_only)
        and (root is None or place_of(root, case.path) is not None)
    ]
    if options.quick:
        cases = first_of_each(cases)
    if not cases:
        parser.error("no case is left; --list shows them")
    if options.list:
        for case in cases:
            print(json.dumps({"kernel": case.kernel, "case": case.name, "unpatched": case.unpatched}))
        return 0
    if options.pristine is None or options.patched is None:
        parser.error("--pristine and --patched are needed")
    sys.meta_path.insert(0, StandInFinder())
    prepare_device(options.device)
    compiling = options.device.startswith("sm")
    reference = options.patched if compiling else options.pristine
    modules = {
        path: (load_kernels(reference, path), load_kernels(options.patched, path))
        for path in dict.fromkeys(case.path for case in cases)
    }
    good = True
    for case in cases:
        pristine, patched = modules[case.path]
        try:
            if compiling:
                result = compile_case(case, Sides(pristine, patched, "cpu"))
            else:
                result = run_case(case, Sides(pristine, patched, options.device))
        except NotInThisReleaseError:
            continue
        good = good and bool(result["ok"])
        print(json.dumps(result), flush=True)
    return 0 if good else 1


def prepare_device(device: str) -> None:
    if device == "cpu":
        patch_device_functions_once()
        return
    capability = int(device[2:]) if device != "cuda" else 10 * torch.cuda.get_device_capability()[0]
    PLATFORM.pdl = capability >= 90
    if device != "cuda":
        compile_instead_of_launching(capability)


if __name__ == "__main__":
    sys.exit(main())
