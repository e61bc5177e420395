"""The main job: a whole environment against bare uv, and the small commands against a two-command typer program."""

import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.timing import BARE_TYPER, interleave, run_timed

ROOT = Path(__file__).parent.parent
PROVISION = [sys.executable, "-m", "provisioner"]
RECIPE = "hynix-stable"


def rows() -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory(prefix="provision-bench-") as name:
        folder = Path(name)
        return [*_environment(folder), *_small_commands(folder)]


def _environment(folder: Path) -> list[dict[str, object]]:
    """`provision hynix-stable` on a warm cache against `uv venv && uv pip sync` of the same lock."""
    from uv import find_uv_bin

    uv = find_uv_bin()
    home = {"PROVISION_HOME": str(folder / "home")}
    python = _target_python(folder, home)
    bare = folder / "bare"
    requirements = str(ROOT / "lockfiles" / f"{RECIPE}.txt")

    def by_uv() -> float:
        shutil.rmtree(bare, ignore_errors=True)
        made = run_timed([uv, "venv", "--no-project", "--no-config", "--python", python, str(bare)])
        sync = [uv, "pip", "sync", "--no-config", "--require-hashes", "--python", str(bare / "bin" / "python")]
        return made + run_timed([*sync, requirements])

    def by_provision() -> float:
        shutil.rmtree(folder / "home", ignore_errors=True)
        return run_timed([*PROVISION, RECIPE], environ=home)

    by_uv()  # warms uv's cache
    medians = interleave(3, theirs=by_uv, ours=by_provision)
    again = interleave(5, ours=lambda: run_timed([*PROVISION, RECIPE], environ=home))["ours"]
    shell = _shell_way(folder)
    status = interleave(5, ours=lambda: run_timed([*PROVISION, "status", RECIPE], environ=home))["ours"]
    return [
        _row("provision, warm cache / uv venv + sync", medians["ours"], medians["theirs"], "<= 1.10 x + 1 s"),
        {"name": "second run (nothing to do)", "ours": again, "unit": "s", "target": "< 1.0 s"},
        _row("status / the shell way's import and patch --dry-run", status, shell, "<= 1/20"),
    ]


def _target_python(folder: Path, home: dict[str, str]) -> str:
    """The interpreter that the tool itself would choose."""
    run_timed([*PROVISION, RECIPE, "--bare"], environ=home)
    return str((folder / "home" / "venvs" / RECIPE / "bin" / "python").resolve())


def _shell_way(folder: Path) -> float:
    """What people do today to learn where the files are and whether the patch is in."""
    venv = folder / "home" / "venvs" / RECIPE
    patch = next((ROOT / "patches" / "pr50021-gdn-spec-bounds").glob("0.27*.patch"))
    find = "import vllm, os; print(os.path.dirname(os.path.dirname(vllm.__file__)))"
    script = f"cd / && site=$({venv}/bin/python -c '{find}') && patch --dry-run -R -p1 -d \"$site\" < {patch}"
    return interleave(3, ours=lambda: run_timed(["bash", "-c", script]))["ours"]


def _small_commands(folder: Path) -> list[dict[str, object]]:
    program = folder / "bare_typer.py"
    program.write_text(BARE_TYPER)
    home = {"PROVISION_HOME": str(folder / "home")}
    medians = interleave(
        11,
        typer_command=lambda: run_timed([sys.executable, str(program), "one"]),
        typer_help=lambda: run_timed([sys.executable, str(program), "--help"]),
        status=lambda: run_timed([*PROVISION, "status", RECIPE], environ=home),
        help=lambda: run_timed([*PROVISION, "--help"]),
    )
    return [
        _row("status / two-command typer program", medians["status"], medians["typer_command"], "<= 1.8"),
        _row("--help / that program's --help", medians["help"], medians["typer_help"], "<= 1.3"),
    ]


def _row(name: str, ours: float, theirs: float, target: str) -> dict[str, object]:
    return {"name": name, "ours": ours, "theirs": theirs, "ratio": ours / theirs, "unit": "s", "target": target}
