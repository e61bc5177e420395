"""Small environments that look provisioned: a real venv, an installed "vllm", a receipt, a recording server."""

import json
import sys
import venv
from dataclasses import replace
from pathlib import Path

from provisioner.digests import digest_of, digest_to_record
from provisioner.documents.receipt import AppliedPatch, InstalledBuild, PatchedFile, Receipt
from provisioner.environment.state import write_receipt

PATCHED = "vllm/v1/worker/mamba_utils.py"
BEFORE, AFTER = b"bound = None\n", b"bound = 1\n"
# Writes what it was given and ends; the tests read the file.
RECORDER = """#!{python}
import json, os, sys
with open(os.environ["RECORD_TO"], "w") as out:
    json.dump({{"argv": sys.argv, "cwd": os.getcwd(), "environ": dict(os.environ), "pid": os.getpid()}}, out)
"""


def make_environment(folder: Path, *, version: str = "0.27.1", recipe: str = "hynix-stable") -> Path:
    """Make the environment with one patched file and its receipt; returns its site-packages."""
    venv.create(folder, with_pip=False)
    packages = next(folder.glob("lib/python*/site-packages"))
    shipped = {"vllm/__init__.py": b"", PATCHED: BEFORE}
    info = packages / f"vllm-{version}.dist-info"
    info.mkdir()
    rows = [f"{path},{digest_to_record(digest_of(data))},{len(data)}" for path, data in shipped.items()]
    (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,"]) + "\n", encoding="utf-8")
    for path, data in (shipped | {PATCHED: AFTER}).items():
        (packages / path).parent.mkdir(parents=True, exist_ok=True)
        (packages / path).write_bytes(data)
    make_recorder(folder / "bin" / "vllm", python=folder / "bin" / "python")
    (folder / ".provision").mkdir()
    write_receipt(folder / ".provision", make_receipt(version=version, recipe=recipe))
    return packages


def make_recorder(path: Path, *, python: Path = Path(sys.executable)) -> None:
    """An executable that writes its arguments, folder and environment to the file that RECORD_TO names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(RECORDER.format(python=python), encoding="utf-8")
    path.chmod(0o755)


def make_receipt(*, version: str = "0.27.1", recipe: str = "hynix-stable", **changes) -> Receipt:
    file = PatchedFile(path=PATCHED, before=digest_of(BEFORE), after=digest_of(AFTER))
    patches = tuple(
        AppliedPatch(
            id=id_, source="store", text=digest_of(id_.encode()), policy="required", verdict="applied", files=files
        )
        for id_, files in (("pr50021-gdn-spec-bounds", (file,)), ("sm80-cpu-repack", ()))
    )
    receipt = Receipt(
        created="2026-11-30T00:00:00+00:00",
        tool="0",
        build=InstalledBuild(
            distribution="vllm", version=version, commit=None, variant=None, wheel=None, wheel_sha256=None
        ),
        patches=patches,
        recipe=recipe,
    )
    return replace(receipt, **changes)


def read_record(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))
