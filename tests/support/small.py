"""A small distribution, patches made from its files, and facts about trees of it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from provisioner.digests import digest_of
from provisioner.patching.compare import patch_between
from provisioner.patching.model import FileFacts, FileVerdict, Patch, PatchVerdict, SeriesPatch, SeriesVerdict
from provisioner.patching.series import judge_series, learn_cuts, touched_paths
from provisioner.patching.steps import CreateFile, DeleteFile, FileStep, ReplaceFile, SetMode
from provisioner.wheels.record import Record, RecordEntry

Tree = dict[str, bytes]

OPS = "v/ops.py"
MATH = "v/math.py"
NEW = "v/new.py"


def numbered(name: str) -> str:
    """A function of ten different lines."""
    return f"def {name}(x):\n" + "".join(f"    {name}_{n} = x + {n}\n" for n in range(10)) + f"    return {name}_9\n"


PRISTINE: Mapping[str, bytes] = MappingProxyType(
    {
        OPS: "\n\n".join(numbered(name) for name in ("load", "scale", "store")).encode(),
        MATH: "\n\n".join(numbered(name) for name in ("add", "sub")).encode(),
        "v/__init__.py": b"",
        "v/data.json": b'{"a": 1}\n',
    }
)


def change(tree: Mapping[str, bytes], path: str, old: str, new: str) -> Tree:
    """The tree with one piece of text, which stands there once, exchanged."""
    assert tree[path].count(old.encode()) == 1
    return {**tree, path: tree[path].replace(old.encode(), new.encode())}


def patch_of(name: str, old: Mapping[str, bytes], new: Mapping[str, bytes]) -> Patch:
    return patch_between(old, new, id=name, source=f"{name}.patch")


def series_of(*patches: Patch, base: Mapping[str, bytes] = PRISTINE) -> tuple[SeriesPatch, ...]:
    """A series with the scopes that its patches have on the release that they were cut against."""
    return learn_cuts([SeriesPatch(patch=patch) for patch in patches], base)


def record_of(tree: Mapping[str, bytes]) -> Record:
    entries = {path: RecordEntry(path=path, digest=digest_of(data), size=len(data)) for path, data in tree.items()}
    return Record(entries=entries)


def facts_of(
    series: Sequence[SeriesPatch],
    disk: Mapping[str, bytes],
    pristine: Mapping[str, bytes] = PRISTINE,
    *,
    at_hand: bool = False,
    modes: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, FileFacts]:
    return {
        path: FileFacts(
            path=path,
            content=disk.get(path),
            pristine=pristine.get(path) if at_hand else None,
            recorded=digest_of(pristine[path]) if path in pristine else None,
            mode=modes.get(path),
        )
        for path in touched_paths(series)
    }


def judge(
    series: Sequence[SeriesPatch],
    disk: Mapping[str, bytes],
    pristine: Mapping[str, bytes] = PRISTINE,
    *,
    at_hand: bool = False,
) -> SeriesVerdict:
    return judge_series(series, facts_of(series, disk, pristine, at_hand=at_hand), record_of(pristine))


def verdicts(verdict: SeriesVerdict) -> dict[str, str]:
    return {patch.id: str(patch.verdict) for patch in verdict.patches}


def file_of(verdict: SeriesVerdict | PatchVerdict, path: str) -> FileVerdict:
    patches = verdict.patches if isinstance(verdict, SeriesVerdict) else (verdict,)
    (found,) = (file for patch in patches for file in patch.files if file.path == path)
    return found


def carry_out(tree: Mapping[str, bytes], steps: Sequence[FileStep]) -> Tree:
    """The tree after the steps, each of which must find what it expects."""
    out = dict(tree)
    for step in steps:
        match step:
            case ReplaceFile(path=path, before=before, content=content):
                assert digest_of(out[path]) == before
                assert out[path] != content
                out[path] = content
            case CreateFile(path=path, content=content):
                assert path not in out
                out[path] = content
            case DeleteFile(path=path, before=before):
                assert digest_of(out.pop(path)) == before
            case SetMode():
                pass
    return out
