"""pr50021-gdn-spec-bounds on the real files: vLLM's kernels, patched and pristine, under Triton's interpreter."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from provisioner.digests import digest_of
from provisioner.patching.hunks import Applied, apply_change
from provisioner.patching.model import Verdict
from provisioner.series.store import PatchVariant, load_series_patch, open_stored_patch
from provisioner.resources import patches_folder

from tests.patches.conftest import ReadRelease

pytestmark = [pytest.mark.background, pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(600)]

PATCH = open_stored_patch(patches_folder(), "pr50021-gdn-spec-bounds")
FOLDER = PATCH.folder
MAIN = next(variant for variant in PATCH.variants if variant.cut_against == Version("0.27.1"))
OTHERS = tuple((variant, str(variant.cut_against)) for variant in PATCH.variants if variant is not MAIN)
# The newest release that a text is for, which it was not cut against.
NEWEST = "0.34.0"
OTHERS += tuple((variant, NEWEST) for variant in PATCH.variants if variant.covers(Version(NEWEST)))
KERNELS = (
    "causal_conv1d_update",
    "selective_state_update",
    "fused_recurrent_gated_delta_rule",
    "fused_sigmoid_gating_delta_rule",
    "kda_amd",
    "kda_nvidia",
    "precopy_mamba",
    "postprocess_mamba",
)
# The two halves take about the same time.
HALVES = (("causal_conv1d_update", "selective_state_update", "kda_nvidia"), tuple(KERNELS[2:5]) + KERNELS[6:])

# For the cards of the recipes, and for the first that has launch signals.
SIGNALLING = ("causal_conv1d_update", "kda_nvidia")
BRANCHES = ("mixed batch", "target beyond the row, tokens first", "count beyond the row, channels first")
COMPILED = (
    ("--device", "sm80", *(word for case in BRANCHES for word in ("--case", case))),
    ("--device", "sm90", "--case", BRANCHES[0], "--kernel", SIGNALLING[0], "--kernel", SIGNALLING[1]),
)

CONV = "vllm/model_executor/layers/mamba/ops/causal_conv1d.py"
SSM = "vllm/model_executor/layers/mamba/ops/mamba_ssm.py"
RECURRENT = "vllm/third_party/flash_linear_attention/ops/fused_recurrent.py"
GATING = "vllm/third_party/flash_linear_attention/ops/fused_sigmoid_gating.py"
KDA_AMD = "vllm/models/kimi_k3/amd/ops/third_party/kda/fused_recurrent.py"
KDA_NVIDIA = "vllm/models/kimi_k3/nvidia/ops/third_party/kda/fused_recurrent.py"
COPY = "vllm/v1/worker/mamba_utils.py"


def apply_patch(
    variant: PatchVariant, pristine: Mapping[str, bytes], release: str | None = None
) -> dict[str, bytes]:
    """The patched files; every hunk has to stand in the scope that the manifest names, and at its own line in the
    release that the text was cut against."""
    own_release = release in (None, str(variant.cut_against))
    series = load_series_patch(PATCH, variant)
    patched = {}
    for change in series.patch.changes:
        applied = apply_change(pristine[change.path], change, series.cuts[change.path])
        assert isinstance(applied, Applied), applied
        assert applied.verdict is Verdict.APPLIES or (not own_release and applied.verdict.applies)
        assert applied.content is not None
        patched[change.path] = applied.content
    return patched


def paths_of(variant: PatchVariant) -> list[str]:
    return [file.path for file in variant.manifest.files]


def write_tree(root: Path, files: Mapping[str, bytes]) -> Path:
    for path, content in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    return root


@pytest.mark.parametrize("variant", PATCH.variants, ids=lambda variant: variant.file)
def test_every_hunk_stands_at_its_own_line(variant: PatchVariant, read_release: ReadRelease) -> None:
    pristine = read_release(str(variant.cut_against), paths_of(variant))
    assert variant.bases == {path: digest_of(content) for path, content in pristine.items()}
    patched = apply_patch(variant, pristine)
    assert sorted(patched) == sorted(pristine)
    for path, content in patched.items():
        ast.parse(content, filename=path)
        assert content != pristine[path]


@pytest.mark.parametrize("release", ["0.27.0", "0.28.0", "0.30.0", "0.31.0", "0.32.0", "0.34.0"])
def test_other_releases_differ_in_line_numbers_at_most(release: str, read_release: ReadRelease) -> None:
    variant = PATCH.variant_for(Version(release))
    assert variant is not None
    pristine = read_release(release, paths_of(variant))
    series = load_series_patch(PATCH, variant)
    verdicts = [
        apply_change(pristine[change.path], change, series.cuts[change.path]).verdict for change in series.patch.changes
    ]
    assert set(verdicts) <= {Verdict.APPLIES, Verdict.APPLIES_AT_OFFSET}
    assert (set(verdicts) == {Verdict.APPLIES}) == (release == "0.27.0")


def test_the_checks_stand_in_for_a_kernel_is_that_kernel(read_release: ReadRelease) -> None:
    """mamba_utils.py of 0.34.0 calls a kernel of a file that the patch does not touch, so the check brings its own."""
    path = "vllm/v1/worker/replayssm_utils.py"
    theirs = read_release(NEWEST, [path])[path]
    ours = (FOLDER / "check.py").read_bytes()
    assert body_of(ours, "_mamba_state_copy_boundary") == body_of(theirs, "mamba_state_copy_boundary")


def body_of(source: bytes, name: str) -> list[str]:
    """The statements of a function of the module, without its docstring."""
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    function = functions[name]
    return [ast.unparse(node) for node in function.body[1 if ast.get_docstring(function) else 0 :]]


# ---------------------------------------------------------------- behaviour

Results = list[dict[str, Any]]


@dataclass(frozen=True)
class Trees:
    pristine: Path
    patched: Path


@pytest.fixture(scope="module")
def trees(read_release: ReadRelease, tmp_path_factory: pytest.TempPathFactory) -> Trees:
    for needed in ("torch", "triton", "numpy"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: pip install 'provisioner[test]'")
    return plant_trees(MAIN, str(MAIN.cut_against), read_release, tmp_path_factory.mktemp("pr50021"))


def plant_trees(variant: PatchVariant, release: str, read_release: ReadRelease, root: Path) -> Trees:
    pristine = read_release(release, paths_of(variant))
    return Trees(
        pristine=write_tree(root / "pristine", pristine),
        patched=write_tree(root / "patched", apply_patch(variant, pristine, release)),
    )


def run_check(pristine: Path, patched: Path, *arguments: str) -> Results:
    """The check as users run it: a process of its own, one JSON object a line."""
    words = ["check.py", "--pristine", str(pristine), "--patched", str(patched), *arguments]
    process = run_python(words, home=patched.parent)
    results = [json.loads(line) for line in process.stdout.splitlines()]
    assert process.returncode == (0 if all(result["ok"] for result in results) else 1), process.stderr
    assert results, process.stderr
    return results


def run_slips(pristine: Path, root: Path, patched: Path) -> Results:
    """The one case of each slip, all in one process."""
    lines = [
        json.dumps(
            {"patched": str(write_slip(root / str(number), patched, slip)), "kernel": slip.kernel, "case": slip.case}
        )
        for number, slip in enumerate(SLIPS)
    ]
    runner = Path(__file__).with_name("run_slips.py")
    process = run_python([str(runner), str(FOLDER / "check.py"), str(pristine)], home=root, stdin="\n".join(lines))
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def run_python(words: Sequence[str], *, home: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = {
        # One thread: the tensors are tiny, and threads that spin for work would take the other process's core.
        "OMP_NUM_THREADS": "1",
        "HOME": str(home),
        "PATH": os.environ.get("PATH", ""),
    }
    return subprocess.run(
        [sys.executable, "-I", *words],
        cwd=FOLDER,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def only_kernels(kernels: Sequence[str]) -> list[str]:
    return [word for kernel in kernels for word in ("--kernel", kernel)]


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as workers:
        yield workers


@dataclass(frozen=True)
class Runs:
    patched: list[Future[Results]]
    unpatched: Future[Results]
    slips: Future[Results]
    compiled: list[Future[Results]]
    others: list[Future[Results]]


@pytest.fixture(scope="module")
def runs(
    trees: Trees, pool: ThreadPoolExecutor, read_release: ReadRelease, tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    """All processes, two at a time; each test waits for what it needs."""
    others = [
        plant_trees(variant, release, read_release, tmp_path_factory.mktemp(release)) for variant, release in OTHERS
    ]
    return Runs(
        patched=[pool.submit(run_check, trees.pristine, trees.patched, *only_kernels(half)) for half in HALVES],
        unpatched=pool.submit(run_check, trees.pristine, trees.pristine, "--unpatched", "fails"),
        slips=pool.submit(run_slips, trees.pristine, tmp_path_factory.mktemp("slips"), trees.patched),
        compiled=[pool.submit(run_check, trees.pristine, trees.patched, *words) for words in COMPILED],
        others=[pool.submit(run_check, other.pristine, other.patched, "--quick") for other in others],
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_patched_kernels_fail_closed_and_else_compute_the_same_bits(kernel: str, runs: Runs) -> None:
    half = next(i for i, kernels in enumerate(HALVES) if kernel in kernels)
    results = [result for result in runs.patched[half].result() if result["kernel"] == kernel]
    assert {result["unpatched"] for result in results} == {"passes", "fails", "unsafe"}
    assert [result for result in results if not result["ok"]] == []


@pytest.mark.parametrize("number", range(len(COMPILED)), ids=("sm80", "sm90"))
def test_patched_kernels_compile(number: int, runs: Runs) -> None:
    """The interpreter takes more than the compiler does: returns and loops, above all."""
    results = runs.compiled[number].result()
    assert {result["kernel"] for result in results} == set(KERNELS if number == 0 else SIGNALLING)
    assert [result for result in results if not result["ok"]] == []


@pytest.mark.parametrize("number", range(len(OTHERS)), ids=lambda number: OTHERS[number][1])
def test_the_texts_for_other_releases_do_the_same(number: int, runs: Runs) -> None:
    results = runs.others[number].result()
    assert len({result["kernel"] for result in results}) == {5: 6, 7: 8, 9: 10}[len(paths_of(OTHERS[number][0]))]
    assert [result for result in results if not result["ok"]] == []


@pytest.mark.parametrize("kernel", KERNELS)
def test_pristine_kernels_show_the_defect(kernel: str, runs: Runs) -> None:
    results = [result for result in runs.unpatched.result() if result["kernel"] == kernel]
    assert len(results) >= 5
    assert [result["case"] for result in results if result["ok"]] == []
    assert {type(result["detail"]) for result in results} == {str}
    assert [result for result in results if "Error" in result["detail"]] == [], "a wrong value, not a broken run"


# ---------------------------------------------------------------- the check can fail


@dataclass(frozen=True)
class Slip:
    """One slip in the patched file, and the case that has to notice it."""

    path: str
    old: str
    new: str
    kernel: str
    case: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.case}: {self.new.split(chr(10))[0].strip() or 'nothing'}"


def conv_slips() -> Iterator[Slip]:
    kernel = "causal_conv1d_update"
    bound = "if (conv_state_token_offset < 0) | (conv_state_token_offset >= seqlen):"
    yield Slip(CONV, bound, bound.replace(">=", ">"), kernel, "count 4 of 3")
    yield Slip(CONV, bound, "if conv_state_token_offset >= seqlen:", kernel, "count 0")
    yield Slip(CONV, bound, bound.replace(">= seqlen", "> 0"), kernel, "counts 1 to 3")
    zeros = "zero = tl.zeros((BLOCK_N,), dtype=tl.float32)\n            for idx_token in tl.range(seqlen):"
    yield Slip(CONV, zeros, zeros.replace("seqlen", "1"), kernel, "mixed batch, fixed length")
    leave = "tl.store(o_ptrs, zero, mask=idx_feats < dim)\n            if launch_pdl:\n"
    yield Slip(CONV, leave, leave.replace("launch_pdl", "False"), kernel, "launch signals, invalid counts")
    stay = "gdc_launch_dependents()\n            return\n    else:\n        conv_state_token_offset = 0"
    yield Slip(CONV, stay, stay.replace("return\n", "pass\n"), kernel, "count -1")


def ssm_slips() -> Iterator[Slip]:
    kernel = "selective_state_update"
    bound = "if init_token_idx * stride_state_indices_T >= stride_state_indices_batch:"
    yield Slip(SSM, bound, bound.replace(">=", ">"), kernel, "count 5 of 4")
    yield Slip(SSM, bound, "if init_token_idx >= stride_state_indices_T:", kernel, "counts 1 to 4")
    yield Slip(SSM, bound, "if init_token_idx >= stride_state_indices_batch:", kernel, "strided ids, mixed batch")
    zeros = "for i_t in range(seq_len):\n                    tl.store(\n                        zero_ptrs"
    yield Slip(SSM, zeros, zeros.replace("seq_len", "1"), kernel, "mixed batch")
    clamp = "init_token_idx = tl.maximum(num_accepted - 1, 0)"
    yield Slip(SSM, clamp, "init_token_idx = num_accepted - 1", kernel, "counts below 1 read column 0")


def row_slips(path: str, kernel: str, column: str, zeros: str) -> Iterator[Slip]:
    bound = f"in_row = ({column} >= 0) & ({column} < stride_indices_seq)"
    yield Slip(path, bound, bound.replace("< stride", "<= stride"), kernel, "count 5 of 4")
    yield Slip(path, bound, f"in_row = {column} < stride_indices_seq", kernel, "count 0")
    yield Slip(path, bound, bound.replace("stride_indices_seq", "1"), kernel, "counts 1 to 4")
    yield Slip(path, zeros, zeros.replace("T)", "1)").replace("sequence_length)", "1)"), kernel, "null block to read")


def signal_slips() -> Iterator[Slip]:
    signal = "        if launch_pdl:\n            tl.extra.cuda.gdc_launch_dependents()\n        return\n"
    empty = f"    if sequence_length == 0:\n{signal}"
    silent = "    if sequence_length == 0:\n        return\n"
    yield Slip(KDA_NVIDIA, empty, silent, "kda_nvidia", "launch signals, empty sequence")
    null = f"zero, mask=m_v)\n{signal}"
    yield Slip(KDA_NVIDIA, null, "zero, mask=m_v)\n        return\n", "kda_nvidia", "launch signals, null block")


def copy_slips() -> Iterator[Slip]:
    target = "dest_in_row = (dest_col >= 0) & (dest_col < block_table_stride_req)"
    yield Slip(COPY, target, "dest_in_row = dest_col >= 0", "precopy_mamba", "target beyond the row, tokens first")
    yield Slip(
        COPY,
        target,
        "dest_in_row = dest_col < block_table_stride_req",
        "precopy_mamba",
        "target before the row, channels first",
    )
    before = "src_in_row = (first_col >= 0) & (read_col >= 0)"
    yield Slip(COPY, before, "src_in_row = read_col > -9", "postprocess_mamba", "column before the row, channels first")
    beyond = "src_in_row = src_in_row & (read_col < block_table_stride_req)"
    yield Slip(COPY, beyond, "", "precopy_mamba", "bias beyond the row, tokens first")
    conv = "tl.where(conv_width > 0, 0, token_bias)"
    yield Slip(COPY, conv, "token_bias * 1", "precopy_mamba", "bias beyond the row, channels first")
    null = "if (dest_id <= 0) | (src_id <= 0):"
    yield Slip(COPY, null, null.replace("<= 0", "< 0"), "precopy_mamba", "null blocks, tokens first")


SLIPS = (
    *conv_slips(),
    *ssm_slips(),
    *row_slips(RECURRENT, "fused_recurrent_gated_delta_rule", "i_t", "for i_o in range(0, T)"),
    *row_slips(GATING, "fused_sigmoid_gating_delta_rule", "i_t", "for i_o in range(0, T)"),
    *row_slips(KDA_AMD, "kda_amd", "initial_token", "for i_o in range(0, sequence_length)"),
    *row_slips(KDA_NVIDIA, "kda_nvidia", "initial_token", "for i_o in range(0, sequence_length)"),
    *signal_slips(),
    *copy_slips(),
)


def write_slip(root: Path, patched: Path, slip: Slip) -> Path:
    text = (patched / slip.path).read_text()
    assert text.count(slip.old) == 1, slip
    return write_tree(root, {slip.path: text.replace(slip.old, slip.new).encode()})


@pytest.mark.parametrize("number", range(len(SLIPS)), ids=lambda number: str(SLIPS[number]))
def test_the_check_notices_a_slip(number: int, runs: Runs) -> None:
    result, slip = runs.slips.result()[number], SLIPS[number]
    assert (result["kernel"], result["case"]) == (slip.kernel, slip.case)
    assert not result["ok"]
    assert "Error" not in result["detail"]
