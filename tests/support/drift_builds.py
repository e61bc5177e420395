"""Small wheels of a history in which a function moves, changes, and takes over the patch; served by a real index."""

from collections.abc import Mapping

from packaging.version import Version

from provisioner.documents.recipe import DriftResponse, PatchPolicy
from provisioner.drift.scan import Subject
from provisioner.patching.diff import parse_patch
from provisioner.patching.model import Cut, SeriesPatch
from provisioner.series.model import NamedPatch, Series
from tests.support.wheels import version_file, wheel_bytes

OLD = b"def scale(x):\n    return x * 2\n"
SHIFTED = b"# one more line above\n" + OLD
MERGED = b"def scale(x):\n    if x < 0:\n        return 0\n    return x * 2\n"
CHANGED = b"def scale(x, by):\n    return x * by\n"
HISTORY: Mapping[str, bytes | None] = {
    "1.0": OLD,
    "1.1": OLD,
    "1.2": SHIFTED,
    "1.3": SHIFTED,
    "1.4": CHANGED,
    "1.5": CHANGED,
    "1.6": MERGED,
    "1.7": None,
}
PATCH = b"""\
--- a/vllm/ops.py
+++ b/vllm/ops.py
@@ -1,2 +1,4 @@
 def scale(x):
+    if x < 0:
+        return 0
     return x * 2
"""


def build(version: str, ops: bytes | None) -> bytes:
    files = {"vllm/__init__.py": b"", "vllm/_version.py": version_file(version, "1" * 40)}
    return wheel_bytes(files if ops is None else {**files, "vllm/ops.py": ops}, version=version)


def subject(
    policy: PatchPolicy = PatchPolicy.REQUIRED,
    responses: Mapping[str, DriftResponse] | None = None,
    *,
    name: str = "small",
    merged_as: str | None = None,
) -> Subject:
    parsed = parse_patch(PATCH, id="bounds", source="bounds.patch")
    patch = SeriesPatch(patch=parsed, cuts={"vllm/ops.py": Cut(scopes=("scale",))}, merged_as=merged_as)

    def series_for(_: Version) -> Series:
        return Series(patches=(NamedPatch(patch=patch, policy=policy),))

    return Subject(name=name, series_for=series_for, responses=responses or {})
