"""``patch refresh``: the contents of both builds, the merge, the new variant in the store, its behaviour checked."""

import difflib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

from provisioner.digests import Digest, digest_of
from provisioner.environment.facts import shipped_facts
from provisioner.errors import ConflictError, InvalidPatchError
from provisioner.files import write_whole
from provisioner.index.lazy import Wheel
from provisioner.patching.diff import manifest_of, print_patch
from provisioner.patching.hunks import cut_of
from provisioner.patching.model import FileFacts, Patch, SeriesPatch, Verdict
from provisioner.patching.series import judge_series, touched_paths
from provisioner.porting.merge import merge_with_git
from provisioner.porting.refresh import Fate, Refresh, RefreshedFile, find_break, finish_refresh, refresh_patch
from provisioner.series.store import PatchVariant, StoredPatch, load_series_patch

CHECK_TIMEOUT_SECONDS = 900
_ALIKE = 0.6
_MARKER = b"<<<<<<< new build"


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """A behaviour check's cases: how many ran and the ones that failed; ``why`` where it could not run."""

    cases: int
    failed: tuple[str, ...]
    why: str | None = None


def refresh_onto(item: SeriesPatch, base: Wheel, new: Wheel) -> Refresh:
    """Carry a patch from the wheel that it was cut against to another, following files that moved."""
    paths = touched_paths([item])
    old, now = read_present(base, paths), read_present(new, paths)
    moved = dict(_find_moved(paths, old, now, new))
    now |= read_present(new, moved.values())
    return refresh_patch(item, old, now, moved, merge_with_git)


def read_present(wheel: Wheel, paths: Iterable[str]) -> dict[str, bytes | None]:
    """The contents at ``paths``; None where the wheel does not ship a file there."""
    wanted = tuple(paths)
    record = wheel.record()
    found = wheel.read_many([path for path in wanted if path in record])
    return {path: found.get(path) for path in wanted}


def _find_moved(
    paths: Sequence[str], old: Mapping[str, bytes | None], now: Mapping[str, bytes | None], new: Wheel
) -> Iterator[tuple[str, str]]:
    """Files that are gone from their path: by equal digest, else the most similar one of the same name."""
    record = new.record()
    for path in paths:
        content = old[path]
        if content is None or now[path] is not None:
            continue
        digest = digest_of(content)
        same = [entry.path for entry in record if record.digest(entry.path) == digest]
        alike = [entry.path for entry in record if Path(entry.path).name == Path(path).name and entry.path not in paths]
        target = same[0] if same else _most_similar(content, new, alike)
        if target is not None:
            yield path, target


def _most_similar(content: bytes, wheel: Wheel, paths: Sequence[str]) -> str | None:
    lines = content.splitlines()
    best: tuple[float, str] | None = None
    for path, other in wheel.read_many(paths).items():
        ratio = difflib.SequenceMatcher(None, lines, other.splitlines(), autojunk=False).ratio()
        if ratio >= _ALIKE and (best is None or ratio > best[0]):
            best = (ratio, path)
    return best[1] if best else None


def prove_refresh(refresh: Refresh, patch: Patch) -> SeriesPatch:
    """The refreshed patch with its scopes, proven to give exactly the merged bytes on the new build's files.

    Raises ConflictError where it does not: that would be a defect of the merge.
    """
    facts: dict[str, FileFacts] = {}
    for file in refresh.files:
        digest = digest_of(file.new) if file.new is not None else None
        facts[file.target] = FileFacts(path=file.target, content=file.new, pristine=file.new, recorded=digest)
    cuts = {change.path: cut_of(facts[change.path].content or b"", change) for change in patch.changes}
    item = SeriesPatch(patch=patch, cuts={path: cut for path, cut in cuts.items() if cut is not None})
    verdict = judge_series([item], {path: facts[path] for path in touched_paths([item])})
    wanted = {file.target: file.merged for file in refresh.files}
    wrong = [path for path, content in verdict.final.items() if wanted[path] != content]
    if wrong or verdict.patches[0].verdict is not Verdict.APPLIES:
        raise ConflictError("the refreshed patch does not give the merged files", where=", ".join(wrong) or patch.id)
    return item


def run_check(stored: StoredPatch, files: Sequence[RefreshedFile]) -> CheckResult:
    """Run the patch's behaviour check on the new build's files, pristine against refreshed, on the CPU."""
    if stored.check is None:
        return CheckResult(cases=0, failed=(), why="the patch names no behaviour check")
    with tempfile.TemporaryDirectory(prefix="provision-check-") as name:
        folder = Path(name)
        for file in files:
            for side, content in (("pristine", file.new), ("patched", file.merged)):
                if content is not None:
                    write_whole(folder / side / file.target, content)
        command = [sys.executable, str(stored.folder / stored.check), "--device", "cpu"]
        command += ["--pristine", str(folder / "pristine"), "--patched", str(folder / "patched")]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=CHECK_TIMEOUT_SECONDS, check=False, env=os.environ
            )
        except subprocess.TimeoutExpired:
            return CheckResult(cases=0, failed=(), why=f"it was not done after {CHECK_TIMEOUT_SECONDS} s")
    return _read_cases(done.stdout, done.stderr)


def _read_cases(stdout: str, stderr: str) -> CheckResult:
    cases = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
    failed = tuple(f"{case['kernel']}: {case['case']}: {case['detail']}" for case in cases if not case["ok"])
    if not cases:
        last = (stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return CheckResult(cases=0, failed=(), why=last)
    return CheckResult(cases=len(cases), failed=failed)


def variant_name(version: Version) -> str:
    """The file of a variant for a release's minor series."""
    return f"{version.major}.{version.minor}.patch"


def refuse_needless(stored: StoredPatch, version: Version, wheel: Wheel) -> None:
    """Refuse a variant for a build to which the text that the store opens for it applies.

    Raises ConflictError, naming that text's file.
    """
    covering = stored.variant_for(version)
    if covering is None:
        return
    item, record = load_series_patch(stored, covering), wheel.record()
    found = judge_series([item], shipped_facts(record, touched_paths([item]), wheel), record).patches[0].verdict
    if found.applies:
        raise ConflictError(
            f"the store needs no text of its own for {version}: the one for {covering.versions} applies to it",
            where=str(stored.file_of(covering)),
            expected="a build to which the text of the store does not apply",
            found=str(found),
            hints=(f"provision patch show {stored.id} --version {version}",),
        )


def variant_range(version: Version) -> str:
    """The versions that a variant cut against ``version`` is for.

    A release's text ends before the builds of main that follow it, which carry the next version's development number
    and may be nearer to the next minor series; a development build's text begins with them.
    """
    series, following = f"{version.major}.{version.minor}", f"{version.major}.{version.minor + 1}"
    if version.is_prerelease:
        return f">={version.base_version}.dev0,<{following}"
    return f">={series},<{series}.{version.micro + 1}.dev0"


def write_variant(
    stored: StoredPatch, item: SeriesPatch, bases: Mapping[str, Digest], version: Version, source: PatchVariant
) -> Path:
    """Put the refreshed text into the store as a variant of its own, before the one that it came from.

    ``bases`` are the digests, by path, of the files that it was cut against. Where the release's minor series has a
    text already, the new one is for this version alone.

    Raises InvalidPatchError where a variant was cut against this version already.
    """
    import tomlkit

    for known in stored.variants:
        if known.cut_against == version:
            where = str(stored.file_of(known))
            raise InvalidPatchError("the store has a variant that was cut against this release already", where=where)
    path, versions = stored.folder / variant_name(version), variant_range(version)
    if path.exists():
        path, versions = stored.folder / f"{version.public}.patch", f"=={version.public}"
    text = print_patch(item.patch)
    toml = stored.folder / "patch.toml"
    document = tomlkit.parse(toml.read_text(encoding="utf-8"))
    variants = document["variant"]
    index = [variant.file for variant in stored.variants].index(source.file)
    variants.insert(index, _variant_table(item, bases, version, path.name, versions, text))
    write_whole(path, text)
    write_whole(toml, tomlkit.dumps(document).encode())
    return path


def _variant_table(
    item: SeriesPatch, bases: Mapping[str, Digest], version: Version, name: str, versions: str, text: bytes
) -> object:
    import tomlkit

    table = tomlkit.table()
    table.update(
        {
            "file": name,
            "versions": versions,
            "cut_against": str(version),
            "sha256": digest_of(text),
            "former": [],
        }
    )
    rows = []
    for entry in manifest_of(item.patch).files:
        scopes = item.cuts[entry.path].scopes if entry.path in item.cuts else ()
        base = {"before": bases[entry.path]} if entry.path in bases else {}
        values = {"path": entry.path, **base, "hunks": entry.hunks, "added": entry.added, "removed": entry.removed}
        row = tomlkit.table()
        row.update({**values, "scopes": [scope or "" for scope in scopes]})
        rows.append(row)
    rows[-1].add(tomlkit.nl())
    files = tomlkit.aot()
    for row in rows:
        files.append(row)
    table.add("files", files)
    return table


def bases_of(refresh: Refresh) -> dict[str, Digest]:
    """The digests, by path, of the new build's own files."""
    return {file.target: digest_of(file.new) for file in refresh.files if file.new is not None}


def write_conflicts(refresh: Refresh, folder: Path) -> None:
    """Lay out what a person needs: for each conflicting file the three versions and the merge with its markers."""
    for file in refresh.files:
        for suffix, content in (("base", file.base), ("patched", file.patched), ("new", file.new)):
            if content is not None:
                write_whole(folder / "versions" / suffix / file.target, content)
        if file.merged is not None:
            write_whole(folder / "merged" / file.target, file.merged)


def continue_refresh(item: SeriesPatch, refresh: Refresh, folder: Path) -> Refresh:
    """The same refresh with the files that a person has merged in ``folder``.

    Raises ConflictError where a file is missing, still holds conflict markers, or uses a name that nothing binds.
    """
    files = []
    for file in refresh.files:
        if file.fate is not Fate.CONFLICT:
            files.append(file)
            continue
        place = folder / "merged" / file.target
        content = place.read_bytes() if place.is_file() else None
        if content is None or _MARKER in content:
            raise ConflictError("this file is not merged yet", where=str(place), hints=("edit it, then --continue",))
        if broken := find_break(file.target, file.new, content):
            raise ConflictError(broken, where=str(place), hints=("edit it, then --continue",))
        files.append(_settled(file, content))
    return finish_refresh(item.patch, tuple(files))


def _settled(file: RefreshedFile, content: bytes) -> RefreshedFile:
    fate = Fate.MERGED_UPSTREAM if content == file.new else Fate.CARRIED
    return replace(file, fate=fate, merged=content)
