"""Fifteen patches over real files of vLLM 0.27.1, written as edits of anchors that stand once in their file.

Independent and overlapping changes, a change of a file that an earlier patch creates, creations in both spellings, a
deletion, a rename with a hunk, an empty file that is filled, a 350 KB file, and patches cut against pristine files as
well as against their predecessors' output. The changes only have to be changes; none is meant to run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from provisioner.digests import digest_of
from provisioner.patching.compare import change_between
from provisioner.patching.diff import print_patch
from provisioner.patching.model import Create, FileChange, Modify, Patch, Rename

Tree = Mapping[str, bytes]

OPS = "vllm/_custom_ops.py"
ENVS = "vllm/envs.py"
CACHE = "vllm/v1/core/kv_cache_manager.py"
MAMBA = "vllm/v1/worker/mamba_utils.py"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"
SCHEDULER = "vllm/v1/core/sched/scheduler.py"
EAGLE = "vllm/v1/spec_decode/eagle.py"
UBATCH = "vllm/v1/worker/ubatching.py"
SAMPLER = "vllm/v1/sample/ops/topk_topp_sampler.py"
EMPTY = "vllm/v1/sample/__init__.py"
NEW_REPACK = "vllm/v1/worker/cpu_repack.py"
NEW_REPORT = "vllm/v1/worker/repack_report.py"
NEW_UBATCH = "vllm/v1/worker/microbatching.py"

SHIPPED = (OPS, ENVS, CACHE, MAMBA, RUNNER, SCHEDULER, EAGLE, UBATCH, SAMPLER, EMPTY)


@dataclass(frozen=True, kw_only=True)
class Edit:
    """``old`` stands once in the file and becomes ``new``."""

    path: str
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one patch is made; ``on_pristine`` where it was cut against the files as shipped."""

    name: str
    edits: tuple[Edit, ...] = ()
    creates: Mapping[str, str] | None = None
    deletes: tuple[str, ...] = ()
    renames: Mapping[str, str] | None = None
    on_pristine: bool = False
    spell: Callable[[FileChange], FileChange] = lambda change: change


def _insert(path: str, anchor: str, text: str) -> Edit:
    return Edit(path=path, old=anchor, new=anchor + text)


def _name_the_old_file(change: FileChange) -> FileChange:
    """Spell a creation with --- a/file and @@ -0,0."""
    return replace(change, mode=None, fills_empty=True) if isinstance(change, Create) else change


REPACK = '''\
"""Repack on the CPU."""

import torch


def repack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Words in the order that the kernel reads."""
    return words.reshape(-1, 32 // bits)
'''

REPORT = '''\
"""What was repacked."""

COUNT = 0


def note() -> None:
    global COUNT
    COUNT += 1
'''

RECIPES = (
    Recipe(
        name="01-repack-on-cpu",
        edits=(
            Edit(
                path=OPS,
                old="    return torch.ops._C.gptq_marlin_repack(\n"
                "        b_q_weight, perm, size_k, size_n, num_bits, is_a_8bit\n    )\n\n\n"
                'if hasattr(torch.ops._C, "gptq_marlin_repack"):\n',
                new="    from vllm.v1.worker.cpu_repack import repack\n\n"
                "    return repack(b_q_weight.cpu(), num_bits).to(b_q_weight.device)\n\n\n"
                'if hasattr(torch.ops._C, "gptq_marlin_repack"):\n',
            ),
        ),
        creates={NEW_REPACK: REPACK},
    ),
    Recipe(
        name="02-repack-experts",
        edits=(
            Edit(
                path=OPS,
                old="        output[e] = torch.ops._C.gptq_marlin_repack(\n"
                "            b_q_weight[e], perm[e], size_k, size_n, num_bits, is_a_8bit\n        )\n",
                new="        output[e] = gptq_marlin_repack(\n"
                "            b_q_weight[e], perm[e], size_k, size_n, num_bits, is_a_8bit\n        )\n",
            ),
        ),
        on_pristine=True,
    ),
    Recipe(
        name="03-setting",
        edits=(
            _insert(
                ENVS, "    VLLM_USE_FLASHINFER_SAMPLER: bool = True\n", "    VLLM_REPACK_ON_CPU: bool = False\n"
            ),
            _insert(
                ENVS,
                '    "VLLM_TRACE_FUNCTION": lambda: int(os.getenv("VLLM_TRACE_FUNCTION", "0")),\n',
                "    # Repack weights on the CPU\n"
                '    "VLLM_REPACK_ON_CPU": lambda: bool(int(os.getenv("VLLM_REPACK_ON_CPU", "0"))),\n',
            ),
        ),
    ),
    Recipe(
        name="04-setting-on-by-default",
        edits=(
            Edit(
                path=ENVS,
                old="    VLLM_REPACK_ON_CPU: bool = False\n",
                new="    VLLM_REPACK_ON_CPU: bool = True\n    VLLM_REPACK_THREADS: int = 0\n",
            ),
            Edit(path=ENVS, old='os.getenv("VLLM_REPACK_ON_CPU", "0")', new='os.getenv("VLLM_REPACK_ON_CPU", "1")'),
        ),
    ),
    Recipe(
        name="05-cache-guards",
        edits=(
            _insert(
                CACHE, "logger = init_logger(__name__)\n", "\n# Requests whose blocks were freed early.\n_EARLY = 0\n"
            ),
            Edit(
                path=CACHE,
                old="        if pins:\n            self.block_pool.free_blocks(pins)\n"
                "        self.coordinator.free(request.request_id)\n\n    def remove_skipped_blocks(\n",
                new="        if pins is not None:\n            self.block_pool.free_blocks(pins)\n"
                "        self.coordinator.free(request.request_id)\n\n    def remove_skipped_blocks(\n",
            ),
        ),
    ),
    Recipe(
        name="06-cache-reset",
        edits=(
            Edit(
                path=CACHE,
                old="        if not self.block_pool.reset_prefix_cache():\n            return False\n",
                new="        if not self.block_pool.reset_prefix_cache():\n"
                '            logger.warning("prefix cache is in use")\n            return False\n',
            ),
        ),
        on_pristine=True,
    ),
    Recipe(
        name="07-mamba-bounds",
        edits=(
            Edit(
                path=MAMBA,
                old="    actual_src_block_id = tl.load(block_table_base + src_col + token_bias).to(tl.int64)\n",
                new="    column = src_col + token_bias\n    valid = column < block_table_stride_req\n"
                "    actual_src_block_id = tl.load(block_table_base + column, mask=valid, other=-1).to(tl.int64)\n"
                "    if actual_src_block_id <= 0:\n        return\n",
            ),
            _insert(MAMBA, "    grid = (batch,)\n    BLOCK_SIZE = 1024\n", "    assert batch > 0\n"),
        ),
    ),
    Recipe(
        name="08-runner-counts",
        edits=(
            _insert(
                RUNNER,
                "        num_reqs = output_token_ids.size(0)\n",
                "        assert num_reqs <= self.num_accepted_tokens.gpu.shape[0]\n",
            ),
            Edit(
                path=RUNNER,
                old="            self.num_prompt_logprobs.pop(req_id, None)\n        self.late_interaction_runner",
                new="            self.num_prompt_logprobs.pop(req_id, None)\n"
                '            logger.debug("finished %s", req_id)\n        self.late_interaction_runner',
            ),
        ),
    ),
    Recipe(
        name="09-runner-clamp",
        edits=(
            Edit(
                path=RUNNER,
                old="        self.num_accepted_tokens.gpu[:num_reqs] = (output_token_ids != -1).sum(dim=1)\n",
                new="        accepted = (output_token_ids != -1).sum(dim=1)\n"
                "        self.num_accepted_tokens.gpu[:num_reqs] = accepted.clamp(min=1)\n",
            ),
        ),
    ),
    Recipe(
        name="10-report",
        creates={NEW_REPORT: REPORT},
        spell=_name_the_old_file,
    ),
    Recipe(
        name="11-report-from-scheduler",
        edits=(
            Edit(path=NEW_REPORT, old="    COUNT += 1\n", new="    COUNT += 1\n    print(COUNT)\n"),
            _insert(
                SCHEDULER,
                '        """Return True if finished (can be False for resumable requests)."""\n',
                "        from vllm.v1.worker.repack_report import note\n\n        note()\n",
            ),
        ),
    ),
    Recipe(name="12-no-eagle", deletes=(EAGLE,)),
    Recipe(
        name="13-microbatching",
        edits=(Edit(path=UBATCH, old="_NUM_UBATCHES: int = 2\n", new="_NUM_UBATCHES: int = 4\n"),),
        renames={UBATCH: NEW_UBATCH},
    ),
    Recipe(name="14-sample-package", edits=(Edit(path=EMPTY, old="", new='"""Sampling."""\n'),)),
    Recipe(
        name="15-sampler",
        edits=(
            Edit(
                path=SAMPLER,
                old="    if not current_platform.is_cuda():\n        return False\n"
                "    if not envs.VLLM_USE_FLASHINFER_SAMPLER:\n",
                new="    if not current_platform.is_cuda():\n        return False\n"
                "    if envs.VLLM_REPACK_ON_CPU or not envs.VLLM_USE_FLASHINFER_SAMPLER:\n",
            ),
        ),
        on_pristine=True,
    ),
)  # fmt: skip


def make_series(pristine: Tree) -> tuple[tuple[Patch, ...], tuple[dict[str, bytes], ...]]:
    """The patches, and the trees from pristine to final (one more than patches)."""
    trees: list[dict[str, bytes]] = [dict(pristine)]
    patches: list[Patch] = []
    for recipe in RECIPES:
        before = trees[-1]
        base = dict(pristine) if recipe.on_pristine else before
        patches.append(_patch(recipe, base))
        trees.append(_carry_out(recipe, before))
    return tuple(patches), tuple(trees)


def _carry_out(recipe: Recipe, tree: Tree) -> dict[str, bytes]:
    out = dict(tree)
    for edit in recipe.edits:
        old = edit.old.encode()
        assert out[edit.path].count(old) == 1 if old else out[edit.path] == b"", (recipe.name, edit.old)
        out[edit.path] = out[edit.path].replace(old, edit.new.encode(), 1) if old else edit.new.encode()
    out |= {path: text.encode() for path, text in (recipe.creates or {}).items()}
    for path in recipe.deletes:
        del out[path]
    for source, target in (recipe.renames or {}).items():
        out[target] = out.pop(source)
    return out


def _patch(recipe: Recipe, base: Tree) -> Patch:
    after = _carry_out(recipe, base)
    renames = recipe.renames or {}
    changes: list[FileChange] = []
    for path in sorted({*base, *after} - {*renames, *renames.values()}):
        change = change_between(path, base.get(path), after.get(path))
        if change is not None:
            changes.append(recipe.spell(change))
    for source, target in renames.items():
        change = change_between(source, base[source], after[target])
        assert isinstance(change, Modify)
        changes.append(Rename(source=source, path=target, hunks=change.hunks, similarity=95))
    patch = Patch(id=recipe.name, source=f"{recipe.name}.patch", digest="", changes=tuple(changes))
    return replace(patch, digest=digest_of(print_patch(patch)))
