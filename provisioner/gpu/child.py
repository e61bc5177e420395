"""The side of ``provision verify`` that touches the card; a program, run by the Python of the environment under test.

Imports torch (numpy comes with it), that environment's op library, and two files by path: the fallback and the
reference. It imports neither vllm, whose wrapper could lead both sides to the same code, nor this project. One JSON
request on stdin, JSON lines on stdout (``event`` names each), a heartbeat once a second.
"""

import concurrent.futures
import contextlib
import gc
import hashlib
import importlib.util
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any

BEAT_SECONDS = 1.0
POISON = 0x5A5A5A5A
PIECE_BYTES = 32 << 20
CRUMB_BYTES = 2 << 20
# Rows of a weight that the slow reference does at once: bounds its memory, and gives its threads something to share.
BAND_ROWS = 256
MARLIN_ROW = 16
SPARSE_BANDS = 4
LAYER_BAND_ROWS = 32
RAMP_WORDS = 4 << 20
GPTQ_OP = "gptq_marlin_repack"
AWQ_OP = "awq_marlin_repack"
_ARGUMENTS = {
    GPTQ_OP: ({"b_q_weight", "size_k", "size_n", "num_bits"}, {"perm", "is_a_8bit"}),
    AWQ_OP: ({"b_q_weight", "size_k", "size_n", "num_bits"}, {"is_a_8bit"}),
}

# What CUDA and the loader say, and whose fault it is. The first pattern that is found decides.
_KINDS = (
    (
        "toolchain",
        r"unsupported toolchain|device not ready|no kernel image|driver version is insufficient|undefined symbol|"
        r"cannot open shared object|file too short|invalid ELF header|compatibility mode|forward compatibility|"
        r"not compiled with CUDA|unsupported display driver|driver on your system is too old|named symbol not found|"
        r"shared object initialization failed",
    ),
    (
        "card",
        r"illegal memory access|launch failure|misaligned address|illegal instruction|invalid program counter|"
        r"hardware stack error|uncorrectable|ECC error|NVLink|fallen off|Xid|unknown error",
    ),
    ("lost", r"no CUDA-capable device|No CUDA GPUs are available|busy or unavailable|device unavailable"),
    ("memory", r"out of memory"),
)


class StopError(Exception):
    """The stage cannot go on; ``kind`` says whose fault it is."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


# --- speaking ---------------------------------------------------------------------------------------------------------


class Voice:
    """Writes the answer lines. Whatever libraries print goes to stderr instead."""

    def __init__(self) -> None:
        self._stream: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def say(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, **values})
        with self._lock:
            self._stream.write(line + "\n")
            self._stream.flush()

    def start_heart(self) -> None:
        threading.Thread(target=self._beat, name="heart", daemon=True).start()

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            try:
                self.say("beat")
            except OSError:
                # Nobody listens any more: the parent is gone, and the card must not stay occupied.
                os._exit(1)


def classify(text: str) -> str | None:
    """Whose fault an exception's text names: toolchain, card, lost, memory; None for none of them."""
    for kind, pattern in _KINDS:
        if re.search(pattern, text, re.IGNORECASE):
            return kind
    return None


def read_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def load_by_path(path: Path, name: str) -> ModuleType:
    """The module in the file ``path``, under ``name``; nothing around it is imported."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise StopError("internal", f"{path} is no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# --- the compiled op --------------------------------------------------------------------------------------------------


class CompiledOps:
    """vLLM's own repack, called through its registered schema; never through a Python wrapper."""

    def __init__(self, torch: Any, namespace: Any, arguments: dict[str, tuple[str, ...]]) -> None:
        self._torch = torch
        self._namespace = namespace
        self._arguments = arguments

    def takes(self, case: "Case") -> bool:
        """Whether this build has the operator and the argument that ``case`` needs."""
        arguments = self._arguments.get(case.operator)
        if arguments is None:
            return False
        return (not case.act_order or "perm" in arguments) and (not case.narrow or "is_a_8bit" in arguments)

    def repack(self, case: "Case", words: Any, perm: Any) -> Any:
        """Marlin words on the device of ``words``; RuntimeError where the op refuses."""
        empty = self._torch.empty(0, dtype=self._torch.int32, device=words.device)
        values = {
            "b_q_weight": words,
            "perm": empty if perm is None else perm,
            "size_k": case.size_k,
            "size_n": case.size_n,
            "num_bits": case.bits,
            "is_a_8bit": case.narrow,
        }
        operator = getattr(self._namespace, case.operator)
        return operator(*(values[name] for name in self._arguments[case.operator]))


def find_ops(torch: Any, libraries: list[Path], device: str, voice: Voice) -> CompiledOps:
    """Load libraries in order until one registers the op, and read the schemas that it registered."""
    reasons = []
    for library in libraries:
        try:
            torch.ops.load_library(str(library))
        except OSError as error:
            reasons.append(f"{library.name}: {error.__cause__ or error}")
            continue
        if hasattr(torch.ops._C, GPTQ_OP):
            return read_ops(torch, library, device, voice)
        reasons.append(f"{library.name} does not register {GPTQ_OP}")
    why = "; ".join(reasons) or "there is no library named _C*.so"
    raise StopError("toolchain" if any(classify(reason) for reason in reasons) else "unsupported", why)


def read_ops(torch: Any, library: Path, device: str, voice: Voice) -> CompiledOps:
    key = "CUDA" if device == "cuda" else "CPU"
    arguments, schemas = {}, {}
    for operator in (operator for operator in _ARGUMENTS if hasattr(torch.ops._C, operator)):
        schema = getattr(torch.ops._C, operator).default._schema
        names = tuple(argument.name for argument in schema.arguments)
        needed, known = _ARGUMENTS[operator]
        if not needed <= set(names) <= needed | known:
            raise StopError("unsupported", f"a schema that this check does not know: {schema}")
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"_C::{operator}", key):
            raise StopError("unsupported", f"{operator} has no {key} kernel")
        arguments[operator], schemas[operator] = names, str(schema)
    voice.say("op", library=str(library), schemas=schemas)
    voice.say(
        "code",
        role="compiled",
        file=str(library),
        digest=read_digest(library),
        device=device,
        origin=read_origin(torch, key),
    )
    return CompiledOps(torch, torch.ops._C, arguments)


def read_origin(torch: Any, key: str) -> str:
    """Where the dispatcher says that the kernel was registered."""
    dump = torch._C._dispatch_dump(f"_C::{GPTQ_OP}")
    found = re.search(rf"^{key}: (.*)$", dump, re.MULTILINE)
    return found[1].strip() if found else "unknown"


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One repack to compare. ``lenient``: the compiled op is known to take it, wrongly, where the fallback refuses."""

    name: str
    packing: str
    bits: int
    narrow: bool
    size_k: int
    size_n: int
    shape: tuple[int, int]
    act_order: bool = False
    lenient: bool = False

    @property
    def operator(self) -> str:
        return AWQ_OP if self.packing == "awq" else GPTQ_OP

    @property
    def words(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Input:
    """Words and, for act-order, row numbers, both int32 on the CPU."""

    words: Any
    perm: Any


class Comparison:
    """Three answers to the same input, compared."""

    def __init__(self, torch: Any, request: dict[str, Any], ops: CompiledOps, voice: Voice) -> None:
        self._torch = torch
        self._device = request["device"]
        self._ops = ops
        self._voice = voice
        self._reference = load_by_path(Path(request["reference"]), "verify_reference")
        self._fallback = load_by_path(Path(request["fallback"]), "verify_fallback")
        self._staging: Any = None
        self._threads = max(1, len(os.sched_getaffinity(0)))
        for role in ("fallback", "reference"):
            path = Path(request[role])
            voice.say("code", role=role, file=str(path), digest=read_digest(path), device="cpu", origin="Python source")

    def takes(self, case: Case) -> bool:
        return self._ops.takes(case)

    def run(self, case: Case, given: Input, *, sparse: bool) -> None:
        """Compare and say the result. ``sparse``: the reference answers for some bands of rows, not for all."""
        started = time.monotonic()
        compiled, refusal = self._ask_compiled(case, given)
        try:
            answer = self._ask_fallback(case, given)
        except ValueError as error:
            self._say_refusal(case, refusal, str(error))
            return
        if compiled is None:
            self._say(case, "fails", f"the compiled op refuses what the fallback takes: {refusal}")
            return
        if compiled.shape != answer.shape or compiled.dtype != answer.dtype:
            self._say(case, "fails", f"the compiled answer is {describe(compiled)}, the fallback's {describe(answer)}")
            return
        differences = list(self._compare(case, given, compiled.cpu(), answer, sparse=sparse))
        outcome = "fails" if differences else "agrees"
        why = "answers differ" if differences else ""
        self._say(case, outcome, why, differences=differences, seconds=round(time.monotonic() - started, 4))

    def run_layer(self, case: Case, given: Input) -> bool:
        """Compare a real weight without bringing the compiled answer back; False where all refuse its shape.

        The fallback's answer goes up through pinned memory and is compared on the card; the reference answers for the
        first rows.
        """
        torch = self._torch
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answering = pool.submit(self._ask_fallback, case, given)
            compiled, refusal = self._ask_compiled(case, given)
            try:
                answer = answering.result()
            except ValueError as error:
                self._say_refusal(case, refusal, str(error))
                return False
        if compiled is None:
            self._say(case, "fails", f"the compiled op refuses what the fallback takes: {refusal}")
            return True
        band = self._reference_band(case, given, 0, LAYER_BAND_ROWS)
        if compiled.shape != answer.shape or compiled.dtype != answer.dtype:
            self._say(case, "fails", f"the compiled answer is {describe(compiled)}, the fallback's {describe(answer)}")
            return True
        same = torch.equal(compiled, self._upload(answer)) and torch.equal(answer[: band.shape[0]], band)
        differences = [] if same else list(self._compare(case, given, compiled.cpu(), answer, sparse=False))
        self._say(case, "agrees" if same else "fails", "" if same else "answers differ", differences=differences)
        return True

    def _upload(self, tensor: Any) -> Any:
        """``tensor`` on the device, through one pinned buffer that grows to the largest layer."""
        torch = self._torch
        if self._device != "cuda":
            return tensor.clone()
        if self._staging is None or self._staging.numel() < tensor.numel():
            self._staging = torch.empty(tensor.numel(), dtype=torch.int32, pin_memory=True)
        staged = self._staging[: tensor.numel()].view(tensor.shape)
        staged.copy_(tensor)
        uploaded = staged.to(self._device, non_blocking=True)
        synchronize(torch, self._device)
        return uploaded

    def _ask_compiled(self, case: Case, given: Input) -> tuple[Any, str]:
        """The compiled op's words on the device, or None and how it refused."""
        torch = self._torch
        words = self._upload(given.words)
        perm = None if given.perm is None else given.perm.to(self._device)
        poison_free_memory(torch, case, self._device)
        try:
            answer = self._ops.repack(case, words, perm)
            synchronize(torch, self._device)
        except RuntimeError as error:
            if classify(str(error)) is not None:
                raise
            return None, first_line(error)
        if not torch.equal(words, self._upload(given.words)):
            self._say(case, "fails", "the compiled op changed its input")
        return answer, ""

    def _ask_fallback(self, case: Case, given: Input) -> Any:
        return call_fallback(self._torch, self._fallback, case, given)

    def _say_refusal(self, case: Case, compiled: str, fallback: str) -> None:
        if compiled or case.lenient:
            self._say(case, "refused", fallback if compiled else f"only the fallback refuses: {fallback}")
        else:
            self._say(case, "fails", f"the fallback refuses what the compiled op takes: {fallback}")

    def _compare(
        self, case: Case, given: Input, compiled: Any, fallback: Any, *, sparse: bool
    ) -> Iterator[dict[str, Any]]:
        torch = self._torch
        if not torch.equal(compiled, fallback):
            yield describe_difference(torch, "compiled", compiled, "fallback", fallback, row=0)
        for row, band in self._reference_bands(case, given, sparse=sparse):
            part = compiled[row : row + band.shape[0]]
            if not torch.equal(part, band):
                yield describe_difference(torch, "compiled", part, "reference", band, row=row)
                return

    def _reference_bands(self, case: Case, given: Input, *, sparse: bool) -> Iterator[tuple[int, Any]]:
        """(first Marlin row, Marlin words) of bands of the weight, from the slow reference, several at a time."""
        starts = list(range(0, case.size_k, BAND_ROWS))
        if sparse and len(starts) > SPARSE_BANDS:
            step = (len(starts) - 1) / (SPARSE_BANDS - 1)
            starts = [starts[round(step * index)] for index in range(SPARSE_BANDS)]
        with concurrent.futures.ThreadPoolExecutor(self._threads) as pool:
            for first in range(0, len(starts), self._threads):
                group = starts[first : first + self._threads]
                bands = pool.map(lambda start: self._reference_band(case, given, start), group)
                yield from zip((start // MARLIN_ROW for start in group), bands, strict=True)

    def _reference_band(self, case: Case, given: Input, start: int, rows: int = BAND_ROWS) -> Any:
        return call_reference(self._torch, self._reference, case, given, start, min(rows, case.size_k - start))

    def _say(self, case: Case, outcome: str, why: str, **values: Any) -> None:
        self._voice.say("result", case=case.name, outcome=outcome, why=why, **values)


def call_fallback(torch: Any, module: ModuleType, case: Case, given: Input) -> Any:
    """The fallback's words on the CPU, written over poison; ValueError where it refuses."""
    share = 32 // case.bits
    shape = (case.size_k // MARLIN_ROW, case.size_n * MARLIN_ROW // share)
    out = torch.full(shape, POISON, dtype=torch.int32)
    return module.repack(
        case.packing,
        given.words,
        case.size_k,
        case.size_n,
        case.bits,
        perm=given.perm,
        is_a_8bit=case.narrow,
        out=out,
    )


def call_reference(torch: Any, module: ModuleType, case: Case, given: Input, start: int, rows: int) -> Any:
    """Marlin words of the rows ``start`` to ``start + rows`` of the (act-ordered) weight, by the slow reference."""
    layout = module.Layout(
        bits=case.bits,
        packing=module.Packing(case.packing),
        activation=module.Activation(8 if case.narrow else 16),
    )
    words = given.words.numpy().view("uint32")
    if given.perm is None:
        share = 1 if case.packing == "awq" else 32 // case.bits
        part = words[start // share : (start + rows) // share]
    else:
        part = module.pack_values(gather_rows(module, layout, words, given.perm.numpy()[start : start + rows]), layout)
    return torch.from_numpy(module.reference_repack(part, layout).view("int32"))


def gather_rows(module: ModuleType, layout: Any, words: Any, rows: Any) -> Any:
    """The values of the weight's ``rows``, in that order; only the words that hold them are unpacked."""
    share = layout.per_word
    holders = module.unpack_values(words[rows // share], layout)
    return holders[[share * index + int(row) % share for index, row in enumerate(rows)]]


def poison_free_memory(torch: Any, case: Case, device: str) -> None:
    """Leave poison in the block that the op's output is going to get: a word that the op does not write then shows."""
    share = 32 // case.bits
    size = (case.size_k // MARLIN_ROW) * (case.size_n * MARLIN_ROW // share)
    block = torch.full((max(size, 1),), POISON, dtype=torch.int32, device=device)
    synchronize(torch, device)
    del block


def synchronize(torch: Any, device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def describe(tensor: Any) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def describe_difference(
    torch: Any, left: str, left_words: Any, right: str, right_words: Any, *, row: int
) -> dict[str, Any]:
    """How many words differ, and the first of them; ``row`` is the Marlin row that the tensors begin at."""
    differs = (left_words != right_words).flatten()
    first = int(differs.to(torch.uint8).argmax())
    columns = left_words.shape[1]
    return {
        "left": left,
        "right": right,
        "words": int(differs.sum()),
        "total": differs.numel(),
        "row": row + first // columns,
        "column": first % columns,
        "left_value": write_word(left_words.flatten()[first]),
        "right_value": write_word(right_words.flatten()[first]),
    }


def write_word(word: Any) -> str:
    return f"{int(word) & 0xFFFFFFFF:08x}"


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def make_inputs(torch: Any, case: Case) -> Iterator[Input]:
    """Random words; for all but large weights also a ramp in which no word occurs twice, so that a swap shows."""
    generator = torch.Generator().manual_seed(sum(case.name.encode()) + case.words)
    perm = torch.randperm(case.size_k, generator=generator).to(torch.int32) if case.act_order else None
    words = torch.randint(-(2**31), 2**31, case.shape, generator=generator, dtype=torch.int32)
    yield Input(words, perm)
    if 0 < case.words <= RAMP_WORDS:
        ramp = torch.arange(case.words, dtype=torch.int32).mul_(-1640531535)  # an odd factor: one to one modulo 2**32
        yield Input(ramp.reshape(case.shape), perm)


# --- ballast ----------------------------------------------------------------------------------------------------------


class Ballast:
    """Patterned memory that fills the card; each piece has its own pattern, so that two addresses of one cell show."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        self._device = device
        self._pieces: list[Any] = []
        self.filled = 0
        self._ramp = torch.arange(PIECE_BYTES // 4, dtype=torch.int32, device=device)
        self._scratch = torch.empty_like(self._ramp)

    def fill(self, target: int, progress: Callable[[int, int], None]) -> None:
        """Allocate and write pieces until ``target`` bytes are held or the card gives no more."""
        for size in (PIECE_BYTES, CRUMB_BYTES):
            while target - self.filled >= size and self._add(size):
                if len(self._pieces) % 64 == 0:
                    synchronize(self._torch, self._device)
                    progress(self.filled, target)
        synchronize(self._torch, self._device)

    def check(self, progress: Callable[[int, int], None]) -> tuple[int, str | None]:
        """Read everything back: how many words changed, and the first of them in words."""
        torch = self._torch
        wrong = torch.zeros((), dtype=torch.int64, device=self._device)
        for index, piece in enumerate(self._pieces):
            wrong += (piece != self._expected(index, piece.numel())).sum()
            if index % 64 == 0:
                synchronize(torch, self._device)
                progress(index, len(self._pieces))
        count = int(wrong)
        return count, self._find_wrong() if count else None

    def release(self) -> None:
        self._pieces.clear()
        self.filled = 0
        gc.collect()
        if self._device == "cuda":
            self._torch.cuda.empty_cache()

    def _add(self, size: int) -> bool:
        torch = self._torch
        try:
            piece = torch.empty(size // 4, dtype=torch.int32, device=self._device)
        except RuntimeError as error:
            if classify(str(error)) == "memory":
                return False
            raise
        piece.copy_(self._expected(len(self._pieces), piece.numel()))
        self._pieces.append(piece)
        self.filled += size
        return True

    def _expected(self, index: int, words: int) -> Any:
        scratch = self._scratch[:words]
        self._torch.mul(self._ramp[:words], 2 * index + 1, out=scratch)
        return scratch.add_(index * 7919)

    def _find_wrong(self) -> str:
        for index, piece in enumerate(self._pieces):
            expected = self._expected(index, piece.numel())
            differs = piece != expected
            if bool(differs.any()):
                word = int(differs.to(self._torch.uint8).argmax())
                return f"piece {index}, word {word}: wrote {write_word(expected[word])}, read {write_word(piece[word])}"
        return "read right the second time"


def measure_memory(torch: Any, device: str) -> tuple[int, int]:
    """(free, total) bytes of the card; on the CPU, for tests, a small card of 256 MiB."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return int(free), int(total)
    return 256 << 20, 256 << 20


# --- stages -----------------------------------------------------------------------------------------------------------


class Session:
    """One run of this program: the request, torch and the voice, and what the stages share."""

    def __init__(self, torch: Any, request: dict[str, Any], voice: Voice) -> None:
        self._torch = torch
        self._device = request["device"]
        self._request = request
        self._voice = voice
        self._made: Comparison | None = None

    def run(self, stage: dict[str, Any]) -> None:
        started = time.monotonic()
        self._voice.say("stage", stage=stage["name"])
        ballast = self._fill(stage)
        self._work(stage)
        if ballast is not None:
            self._close(ballast)
        self._voice.say("stage-end", stage=stage["name"], seconds=round(time.monotonic() - started, 3))

    def _work(self, stage: dict[str, Any]) -> None:
        if stage.get("cases"):
            self._compare_cases([Case(**values) for values in stage["cases"]], sparse=stage["sparse"])
        if stage.get("model"):
            self._compare_model(Path(stage["model"]))

    @property
    def _comparison(self) -> Comparison:
        if self._made is None:
            libraries = [Path(library) for library in self._request["libraries"]]
            ops = find_ops(self._torch, libraries, self._device, self._voice)
            self._made = Comparison(self._torch, self._request, ops, self._voice)
        return self._made

    def _compare_cases(self, cases: list[Case], *, sparse: bool) -> None:
        comparison = self._comparison
        chosen = [case for case in cases if comparison.takes(case)]
        for index, case in enumerate(chosen):
            self._voice.say("progress", done=index, total=len(chosen), unit=case.name)
            for given in make_inputs(self._torch, case):
                comparison.run(case, given, sparse=sparse)

    def _compare_model(self, folder: Path) -> None:
        weights = load_by_path(Path(__file__).with_name("weights.py"), "verify_weights")
        weights.compare_model(self._torch, sys.modules[__name__], self._comparison, folder, self._voice)

    def _fill(self, stage: dict[str, Any]) -> Ballast | None:
        wanted = stage.get("ballast")
        if wanted is None:
            return None
        if stage.get("cases"):
            # Loaded before the card is full: the library's own kernels take memory, too.
            _ = self._comparison
        free, total = measure_memory(self._torch, self._device)
        asked = int(wanted["bytes"]) if "bytes" in wanted else int(wanted["share"] * free)
        room = free - int(wanted["headroom"])
        ballast = Ballast(self._torch, self._device)
        ballast.fill(min(asked, max(room, 0)), lambda done, of: self._say_progress(done, of, "fill"))
        free, total = measure_memory(self._torch, self._device)
        used = max(total - free, ballast.filled)
        self._voice.say("ballast", asked=asked, filled=ballast.filled, used=used, free=free)
        return ballast

    def _close(self, ballast: Ballast) -> None:
        wrong, first = ballast.check(lambda done, of: self._say_progress(done, of, "check"))
        self._voice.say("ballast-check", wrong=wrong, first=first)
        ballast.release()

    def _say_progress(self, done: int, total: int, unit: str) -> None:
        self._voice.say("progress", done=done, total=total, unit=unit)


def open_torch(request: dict[str, Any], voice: Voice) -> Any:
    """torch, with the card awake. StopError where it has none or not the one expected."""
    started = time.monotonic()
    try:
        import torch
    except ImportError as error:
        raise StopError("toolchain", f"torch cannot be imported: {error}") from error
    facts = {"version": str(torch.__version__), "cuda": str(torch.version.cuda), "python": sys.version.split()[0]}
    if request["device"] == "cuda":
        if torch.version.cuda is None:
            raise StopError("toolchain", f"torch {torch.__version__} is built without CUDA")
        torch.cuda.init()
        properties = torch.cuda.get_device_properties(0)
        facts |= {"device": str(properties.name), "uuid": str(getattr(properties, "uuid", ""))}
    voice.say("torch", facts=facts, seconds=round(time.monotonic() - started, 3))
    return torch


def main() -> int:
    request = json.loads(sys.stdin.readline())
    voice = Voice()
    voice.start_heart()
    try:
        session = Session(open_torch(request, voice), request, voice)
        for stage in request["stages"]:
            session.run(stage)
    except StopError as stop:
        voice.say("failure", kind=stop.kind, why=str(stop))
        return 1
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent must hear of it
        traceback.print_exc()
        voice.say(
            "failure", kind=classify(str(error)) or "internal", why=f"{type(error).__name__}: {first_line(error)}"
        )
        return 1
    voice.say("done")
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
