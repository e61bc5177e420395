"""A package index of small wheels, a recipe over them, and requests to provision it: real uv, no network."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from packaging.version import Version

from provisioner.documents.lock import Lock
from provisioner.documents.recipe import PatchPolicy, Recipe, parse_recipe
from provisioner.environment import uv as uv_room
from provisioner.index.settings import IndexSettings
from provisioner.locks.make import LockRequest, build_of, make_lock
from provisioner.locks.wheel import open_locked_wheel
from provisioner.patching.diff import parse_patch
from provisioner.patching.model import SeriesPatch
from provisioner.patching.series import touched_paths
from provisioner.pipeline.execute import Request
from provisioner.progress import Silence
from provisioner.series.model import NamedPatch, Series
from tests.support.index_server import IndexServer
from tests.support.wheels import version_file, wheel_bytes, wheel_filename

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
COMMIT = "6e448d0ea" + "0" * 31
OPS = b"def scale(x):\n    return x * 2\n\n\ndef shift(x):\n    return x + 1\n"
FILES: Mapping[str, bytes] = MappingProxyType(
    {
        "vllm/__init__.py": b"raise RuntimeError('imported')\n",
        "vllm/ops.py": OPS,
        "vllm/other.py": b"OTHER = 1\n",
        "vllm/_C.abi3.so": b"\x7fELF not really",
    }
)
TORCH = b"__version__ = '2.13.0+cu130'\ndebug = False\ncuda: str | None = '13.0'\n"
RECIPE = f"""
schema = 1
title = "Small"
[python]
preferred = "{PYTHON}"
supported = "=={PYTHON}.*"
[build]
release = "0.27.1"
[expect]
torch-cuda = "13.0"
"""
BOUNDS = b"""\
--- a/vllm/ops.py
+++ b/vllm/ops.py
@@ -1,2 +1,4 @@
 def scale(x):
+    if x < 0:
+        return 0
     return x * 2
"""
NEW_FILE = b"""\
--- /dev/null
+++ b/vllm/added.py
@@ -0,0 +1 @@
+ADDED = 1
"""


def series_of(*texts: bytes, policy: PatchPolicy = PatchPolicy.REQUIRED) -> Series:
    """A series of patch texts, called p1, p2 and so on."""
    patches = tuple(
        NamedPatch(
            patch=SeriesPatch(patch=parse_patch(text, id=f"p{number}", source=f"p{number}.patch")), policy=policy
        )
        for number, text in enumerate(texts, start=1)
    )
    return Series(patches=patches)


def vllm_wheel(version: str = "0.27.1", files: Mapping[str, bytes] = FILES) -> bytes:
    """A small vllm that says which build it is and needs a small torch."""
    contents = {**files, "vllm/_version.py": version_file(version, COMMIT)}
    return wheel_bytes(contents, version=version, requires=["torch==2.13.0"])


@dataclass(kw_only=True)
class Shop:
    """Publishes wheels and makes requests."""

    server: IndexServer
    folder: Path
    recipe: Recipe = field(default_factory=lambda: parse_recipe(RECIPE, name="small", where="small.toml"))

    def stock(self, version: str = "0.27.1", files: Mapping[str, bytes] = FILES, torch: bytes = TORCH) -> None:
        """Publish one vllm and one torch."""
        self.server.add_package("vllm", {wheel_filename(version): vllm_wheel(version, files)})
        data = wheel_bytes({"torch/version.py": torch}, version="2.13.0", project="torch")
        self.server.add_package("torch", {wheel_filename("2.13.0", project="torch"): data})

    @property
    def settings(self) -> IndexSettings:
        return IndexSettings(pypi=self.server.simple_url, timeout=5.0, retries=1, backoff=0.001)

    @property
    def uv(self) -> uv_room.Uv:
        # A cache of its own: these wheels come again and again under the same name with other bytes.
        environ = {**os.environ, "UV_CACHE_DIR": str(self.folder / "uv-cache")}
        environ.pop("UV_INDEX_URL", None)
        return uv_room.find_uv(environ | {"UV_DEFAULT_INDEX": self.server.simple_url})

    def lock(self, series: Series) -> Lock:
        """Lock what is published now."""
        request = LockRequest(
            recipe=self.recipe,
            build=build_of(self.recipe, version=None),
            exclude_newer=None,
            touched=lambda _: touched_paths(series.texts),
        )
        return make_lock(request, self.settings, self.uv, Silence())

    def request(
        self, series: Series, lock: Lock | None = None, *, reapply: bool = False, bare: bool = False
    ) -> Request:
        """Ask for the series on the locked build."""
        wanted = lock or self.lock(series)
        assert wanted.build.version == Version("0.27.1")
        return Request(
            recipe=self.recipe,
            lock=wanted,
            series=series,
            venv=self.folder / "venv",
            python=None,
            bare=bare,
            reapply=reapply,
            open_wheel=lambda: open_locked_wheel(wanted, self.settings),
            environ=os.environ,
        )

    @property
    def site_packages(self) -> Path:
        """Where the wheel's files lie after provisioning."""
        return self.folder / "venv" / "lib" / f"python{PYTHON}" / "site-packages"
