"""The patch engine against GNU patch on fifteen patches over real files of vLLM 0.27.1 (0.95 MB of them).

Ours is CPU time of this process from patch texts to plan; theirs is the CPU time of fifteen runs of ``patch -F0`` on
the same files. Reading the files counts for neither. Medians; both take turns.
"""

import os
import resource
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.timing import interleave
from provisioner.digests import Digest, digest_of
from provisioner.index.settings import read_settings
from provisioner.index.source import candidates, open_wheel, parse_spec
from provisioner.index.transport import Transport
from provisioner.patching.diff import parse_patch, print_patch
from provisioner.patching.model import Cut, FileChange, FileFacts, Patch, Rename, SeriesPatch
from provisioner.patching.plan import make_plan
from provisioner.patching.scope import map_scopes
from provisioner.patching.series import judge_series, learn_cuts, touched_paths
from provisioner.wheels.names import Target, choose
from tests.support.real_series import EAGLE, EMPTY, SHIPPED, make_series

ROUNDS = 7
COPIES = 100
Tree = Mapping[str, bytes]
Cuts = Mapping[str, Cut]


def rows() -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory(prefix="provision-bench-") as name:
        folder = Path(name)
        pristine = _read_files(folder / "cache")
        patches, trees = make_series(pristine)
        texts = [print_patch(patch) for patch in patches]
        learnt = learn_cuts([SeriesPatch(patch=patch) for patch in patches], pristine)
        scopes = [{path: replace(cut, digest=None) for path, cut in item.cuts.items()} for item in learnt]
        digests = [item.cuts for item in learnt]
        recorded = {path: digest_of(data) for path, data in pristine.items()}
        final = trees[-1]
        medians = interleave(
            ROUNDS,
            patch=lambda: _by_gnu_patch(folder, pristine, texts),
            fresh=lambda: _cpu(lambda: _run(texts, scopes, pristine, pristine, recorded)),
            known=lambda: _cpu(lambda: _run(texts, digests, pristine, pristine, recorded)),
            done=lambda: _cpu(lambda: _run(texts, scopes, final, {}, recorded)),
        )
        return [
            _row("judge and apply, scopes checked / GNU patch", medians["fresh"], medians["patch"], "<= 3"),
            _row("judge and apply, files known by digest / GNU patch", medians["known"], medians["patch"], "<= 3"),
            _row("judge it applied, without pristine bytes / GNU patch", medians["done"], medians["patch"], "<= 6"),
            _growth(texts, scopes, pristine, medians["fresh"]),
            _memory(texts, scopes, final, recorded),
        ]


def _read_files(cache: Path) -> Tree:
    settings = read_settings(os.environ, Path.home(), cache=cache)
    with Transport(settings) as transport:
        listed = candidates(parse_spec("pypi:0.27.1"), settings, transport=transport)
        wheel = open_wheel(choose(listed, Target(python=(3, 12))).chosen, settings, transport=transport)
        return wheel.read_many(SHIPPED)


def _run(
    texts: Sequence[bytes], cuts: Sequence[Cuts], disk: Tree, pristine: Tree, recorded: Mapping[str, Digest]
) -> None:
    """From texts to a plan; pristine bytes that are not given are won back."""
    map_scopes.cache_clear()
    parsed = [parse_patch(text, id=f"p{n}", source=f"p{n}.patch") for n, text in enumerate(texts)]
    series = [SeriesPatch(patch=patch, cuts=known) for patch, known in zip(parsed, cuts, strict=True)]
    facts = {
        path: FileFacts(
            path=path, content=disk.get(path), pristine=pristine.get(path), recorded=recorded.get(path), mode=0o644
        )
        for path in touched_paths(series)
    }
    make_plan(judge_series(series, facts), facts)


def _cpu(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _by_gnu_patch(folder: Path, pristine: Tree, texts: Sequence[bytes]) -> float:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        target = Path(name)
        for path, data in pristine.items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_bytes(data)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        for text in texts:
            command = ["patch", "-p1", "-F0", "--silent", "--force", "--no-backup-if-mismatch"]
            subprocess.run(command, cwd=target, input=text, check=True, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _growth(texts: Sequence[bytes], cuts: Sequence[Cuts], pristine: Tree, single: float) -> dict[str, object]:
    """The same series on a hundred copies of the files, as one series of 1500 patches."""
    many_texts: list[bytes] = []
    many_cuts: list[Cuts] = []
    many_files: dict[str, bytes] = {}
    patches = [parse_patch(text, id="p", source="p") for text in texts]
    for copy in range(COPIES):
        # A line of its own in each file, so that no cache takes one copy for another; empty and deleted files stay.
        mark = b"# %d\n" % copy
        whole = {EMPTY, EAGLE}
        many_files |= {f"c{copy}/{path}": data + (b"" if path in whole else mark) for path, data in pristine.items()}
        many_texts += [print_patch(_moved(patch, f"c{copy}/")) for patch in patches]
        many_cuts += [{f"c{copy}/{path}": cut for path, cut in known.items()} for known in cuts]
    recorded = {path: digest_of(data) for path, data in many_files.items()}
    taken = _cpu(lambda: _run(many_texts, many_cuts, many_files, many_files, recorded))
    return _row(f"{COPIES} times the series / {COPIES} x its time", taken, COPIES * single, "<= 1.5")


def _moved(patch: Patch, prefix: str) -> Patch:
    return replace(patch, changes=tuple(_move(change, prefix) for change in patch.changes))


def _move(change: FileChange, prefix: str) -> FileChange:
    if isinstance(change, Rename):
        return replace(change, path=prefix + change.path, source=prefix + change.source)
    return replace(change, path=prefix + change.path)


def _memory(
    texts: Sequence[bytes], cuts: Sequence[Cuts], disk: Tree, recorded: Mapping[str, Digest]
) -> dict[str, object]:
    tracemalloc.start()
    _run(texts, cuts, disk, {}, recorded)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"name": "peak of the engine's own memory", "ours": peak / 1e6, "unit": "MB", "target": "< 120"}


def _row(name: str, ours: float, theirs: float, target: str) -> dict[str, object]:
    return {
        "name": name,
        "ours": ours * 1000,
        "theirs": theirs * 1000,
        "unit": "ms",
        "ratio": ours / theirs,
        "target": target,
    }
