"""Install provision from a bundle: ``tar -xOf FILE.tar tool/install.py | python3 - FILE.tar FOLDER``.

Travels in the bundle and stands alone: the host has a Python, and needs neither pip nor a network. The environment in
FOLDER is made by the uv that is in the bundle. A second run with the same bundle changes nothing.
"""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

_TIMEOUT_SECONDS = 600
_MARK = "provision-requirements.txt"


def main(argv: list[str]) -> int:
    """Print ``installed`` or ``unchanged`` with the path of the command."""
    if len(argv) != 2:
        sys.stderr.write("usage: install.py BUNDLE FOLDER\n")
        return 2
    bundle, folder = Path(argv[0]), Path(argv[1]).expanduser().absolute()
    try:
        changed = install(bundle, folder)
    except (
        OSError,
        tarfile.TarError,
        zipfile.BadZipFile,
        LookupError,
        ValueError,
        subprocess.SubprocessError,
    ) as error:
        sys.stderr.write(f"error: {bundle}: {error}\n")
        return 4
    sys.stdout.write(f"{'installed' if changed else 'unchanged'} {folder / 'bin' / 'provision'}\n")
    return 0


def install(bundle: Path, folder: Path) -> bool:
    """Whether anything was to be done."""
    if folder.exists() and not (folder / "pyvenv.cfg").exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} holds something else; name another folder")
    with tarfile.open(bundle, "r:") as archive, tempfile.TemporaryDirectory(prefix="provision-tool-") as name:
        manifest = _read_list(archive)
        files = {file["path"]: file["sha256"] for file in manifest["files"] if file["path"].startswith("tool/")}
        wanted = _read(archive, "tool/requirements.txt", files["tool/requirements.txt"])
        mark = folder / _MARK
        if mark.exists() and mark.read_bytes() == wanted and (folder / "bin" / "provision").exists():
            return False
        for path, digest in files.items():
            (Path(name) / Path(path).name).write_bytes(_read(archive, path, digest))
        mark.unlink(missing_ok=True)
        _build(Path(name), folder, manifest["python"])
        mark.write_bytes(wanted)
    return True


def _read_list(archive: tarfile.TarFile) -> dict:  # type: ignore[type-arg]
    first = archive.next()
    known = first is not None and first.name == "bundle.json" and first.isreg()
    stream = archive.extractfile(first) if first is not None and known else None
    if stream is None:
        raise ValueError("this is no bundle")
    manifest: dict = json.load(stream)  # type: ignore[type-arg]
    if manifest.get("tool") is None:
        raise ValueError("the bundle was written without the tool; write it again without --without-tool")
    return manifest


def _read(archive: tarfile.TarFile, path: str, digest: str) -> bytes:
    member = archive.getmember(path)
    stream = archive.extractfile(member) if member.isreg() else None
    data = stream.read() if stream is not None else b""
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(f"{path} is not what the bundle says; copy the bundle again")
    return data


def _build(wheels: Path, folder: Path, minor: str) -> None:
    uv = _unpack_uv(wheels)
    same = minor == f"{sys.version_info[0]}.{sys.version_info[1]}"
    python = sys.executable if same else minor
    try:
        _run(uv, "venv", "--quiet", "--no-project", "--allow-existing", "--python", python, str(folder))
    except subprocess.CalledProcessError as error:
        hint = f"run this by a Python {minor} itself: ... | /path/to/python{minor} - BUNDLE FOLDER"
        raise ValueError(f"the tool in it is for Python {minor}, which does not run here; {hint}") from error
    source = ("--offline", "--no-index", "--find-links", str(wheels), "--require-hashes")
    target = ("--python", str(folder / "bin" / "python"))
    _run(uv, "pip", "sync", "--quiet", *source, *target, str(wheels / "requirements.txt"))


def _unpack_uv(wheels: Path) -> Path:
    (wheel,) = wheels.glob("uv-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".data/scripts/uv"))
        uv = wheels / "uv"
        uv.write_bytes(archive.read(member))
    uv.chmod(0o755)
    return uv


def _run(uv: Path, *arguments: str) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PYTHON", "VIRTUAL_"))}
    fixed = {"UV_NO_CONFIG": "1", "UV_NO_CACHE": "1", "UV_LINK_MODE": "copy", "UV_PYTHON_DOWNLOADS": "never"}
    subprocess.run([str(uv), *arguments], env={**environ, **fixed}, check=True, timeout=_TIMEOUT_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
