"""Write this patch anew from ``provisioner/marlin/repack.py``: ``python patches/sm80-cpu-repack/cut.py`` in a checkout.

The patch is that file, added as ``vllm/_sm80_cpu_repack.py``, and four hunks in ``vllm/_custom_ops.py``. The sums in
``patch.toml`` follow. A test fails while the patch and the source differ. Once a text has been published, put it into
``former/<sha256>.patch`` and its digest into ``former`` before cutting the next.
"""

import hashlib
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCE = FOLDER.parents[1] / "provisioner/marlin/repack.py"
PATCH = "0.24.patch"

# Decorators: each hunk quotes its own function's first lines and no neighbour's, so none depends on what stands around it.
HOOK = """\
diff --git a/vllm/_custom_ops.py b/vllm/_custom_ops.py
--- a/vllm/_custom_ops.py
+++ b/vllm/_custom_ops.py
@@ -1083,2 +1083,8 @@
+# The Marlin repack faults on some cards of compute capability 8.0: there it
+# runs on the CPU (VLLM_MARLIN_CPU_REPACK=auto|1|0).
+from vllm._sm80_cpu_repack import route  # noqa: E402
+
+
+@route
 def gptq_marlin_repack(
     b_q_weight: torch.Tensor,
@@ -1117,2 +1123,3 @@
+@route
 def awq_marlin_repack(
     b_q_weight: torch.Tensor,
@@ -1148,2 +1155,3 @@
+@route
 def gptq_marlin_moe_repack(
     b_q_weight: torch.Tensor,
@@ -1170,2 +1178,3 @@
+@route
 def awq_marlin_moe_repack(
     b_q_weight: torch.Tensor,
"""


def cut(source: str) -> str:
    """The patch text that adds ``source`` and hooks it in."""
    lines = source.splitlines()
    head = [
        "diff --git a/vllm/_sm80_cpu_repack.py b/vllm/_sm80_cpu_repack.py",
        "new file mode 100644",
        "--- /dev/null",
        "+++ b/vllm/_sm80_cpu_repack.py",
        f"@@ -0,0 +1,{len(lines)} @@",
    ]
    return HOOK + "".join(f"{line}\n" for line in (*head, *(f"+{line}" for line in lines)))


def update_sums(toml: str, patch: str, added: int) -> str:
    """``patch.toml`` with the digest of ``patch`` and the length of the added file."""
    toml = re.sub(r'^sha256 = "[^"]*"$', f'sha256 = "{hashlib.sha256(patch.encode()).hexdigest()}"', toml, flags=re.M)
    return re.sub(
        r'(path = "vllm/_sm80_cpu_repack\.py"\nhunks = 1\nadded = )\d+', lambda match: f"{match[1]}{added}", toml
    )


def main() -> int:
    source = SOURCE.read_text(encoding="utf-8")
    patch = cut(source)
    metadata = FOLDER / "patch.toml"
    (FOLDER / PATCH).write_text(patch, encoding="utf-8")
    metadata.write_text(
        update_sums(metadata.read_text(encoding="utf-8"), patch, len(source.splitlines())), encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
