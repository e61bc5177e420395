"""From what is wanted and what is found to steps; nothing to do gives no step. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from provisioner.digests import digest_of
from provisioner.errors import ConflictError, ForeignBytesError, UsageError
from provisioner.patching.model import FileFacts, PatchVerdict, SeriesPatch, SeriesVerdict, Verdict
from provisioner.patching.series import judge_series, touched_paths
from provisioner.patching.steps import (
    DEFAULT_MODE,
    CreateFile,
    DeleteFile,
    FileStep,
    Plan,
    ReplaceFile,
    SetMode,
)
from provisioner.wheels.record import Record


def make_plan(verdict: SeriesVerdict, files: Mapping[str, FileFacts]) -> Plan:
    """The steps from the files as they are to the series' final state.

    Raises ConflictError (ForeignBytesError where bytes are foreign) if any patch does not hold.
    """
    if verdict.blocking:
        raise _blocked(verdict.blocking)
    return Plan(steps=steps_to(verdict.final, files, verdict.final_modes))


def plan_revert(verdict: SeriesVerdict, files: Mapping[str, FileFacts]) -> Plan:
    """The steps back to what was shipped: changed files restored, created ones deleted, deleted ones put back.

    Raises ForeignBytesError if a touched file is in no state of the series, since its edits would be lost.
    """
    _refuse_foreign(verdict)
    return Plan(steps=steps_to(verdict.pristine, files, verdict.pristine_modes))


def plan_without(
    series: Sequence[SeriesPatch],
    verdict: SeriesVerdict,
    files: Mapping[str, FileFacts],
    ids: Collection[str],
    record: Record | None = None,
) -> Plan:
    """The steps that take single patches out of a tree while the other applied ones stay.

    Raises UsageError for an id that the series does not have, ForeignBytesError for foreign bytes, and ConflictError,
    naming them, if applied patches do not go on without the ones taken out, or others are there in part or in an older
    text and would be lost.
    """
    unknown = sorted(set(ids) - {item.patch.id for item in series})
    if unknown:
        raise UsageError(f"the series has no patch {', '.join(unknown)}", hints=("provision patch revert --help",))
    _refuse_foreign(verdict)
    half = [p.id for p in verdict.patches if p.verdict.resettable and p.id not in ids]
    if half:
        raise ConflictError(
            f"{_listed(half)} would be lost: not all of it is there, or an older text of it",
            hints=(f"provision patch revert {' '.join([*sorted(ids), *half])}",),
        )
    there = {patch.id for patch in verdict.patches if _is_there(patch)}
    kept = [item for item in series if item.patch.id in there and item.patch.id not in ids]
    base = {path: replace(files[path], content=verdict.pristine[path]) for path in touched_paths(kept)}
    rest = judge_series(kept, base, record)
    if rest.blocking:
        needing = ", ".join(patch.id for patch in rest.blocking)
        raise ConflictError(
            f"{', '.join(sorted(ids))} cannot be taken out alone: {needing} would no longer apply",
            hints=(f"provision patch revert {' '.join([*sorted(ids), *(patch.id for patch in rest.blocking)])}",),
        )
    wanted = {**verdict.pristine, **rest.final}
    return Plan(steps=steps_to(wanted, files, {**verdict.pristine_modes, **rest.final_modes}))


def reset_foreign(files: Mapping[str, FileFacts], paths: Collection[str]) -> Mapping[str, FileFacts]:
    """The facts as if ``paths`` were as shipped, to judge a series with; plans are made with the true facts.

    Raises ForeignBytesError for a path that is shipped but whose pristine bytes are not at hand.
    """
    for path in sorted(paths):
        if files[path].pristine is None and files[path].recorded is not None:
            raise ForeignBytesError("the pristine bytes are not at hand, so the file cannot be restored", where=path)
    changed = {path: replace(files[path], content=files[path].pristine) for path in paths}
    return MappingProxyType({**files, **changed})


def foreign_paths(verdict: SeriesVerdict) -> tuple[str, ...]:
    """The touched files that are in no state of the series, sorted."""
    every = {file.path for patch in verdict.patches for file in patch.files if file.verdict is Verdict.FOREIGN}
    return tuple(sorted(every))


def steps_to(
    wanted: Mapping[str, bytes | None], files: Mapping[str, FileFacts], modes: Mapping[str, int]
) -> tuple[FileStep, ...]:
    """The steps from the files as they are to the wanted contents (None: no file) and executable bits.

    Files come in the order of their paths, deletions last. Only the executable bits of ``modes`` count for files that
    stay; where a file's mode is not known it is left alone.
    """
    steps: list[FileStep] = []
    deletions: list[FileStep] = []
    for path in sorted(wanted):
        content, fact = wanted[path], files[path]
        if content is None:
            if fact.content is not None:
                deletions.append(DeleteFile(path=path, before=digest_of(fact.content)))
            continue
        if fact.content is None:
            steps.append(CreateFile(path=path, content=content, mode=modes.get(path, DEFAULT_MODE)))
            continue
        if fact.content != content:
            steps.append(ReplaceFile(path=path, before=digest_of(fact.content), content=content))
        if path in modes and fact.mode is not None:
            after = with_executable(fact.mode, like=modes[path])
            if after != fact.mode:
                steps.append(SetMode(path=path, before=fact.mode, after=after))
    return (*steps, *deletions)


def with_executable(mode: int, *, like: int) -> int:
    """``mode`` with the executable bits that ``like`` asks for: wherever there is a read bit, or nowhere."""
    bare = mode & ~0o111
    return bare | (bare & 0o444) >> 2 if like & 0o111 else bare


def _is_there(patch: PatchVerdict) -> bool:
    shipped = [file for file in patch.files if file.verdict is not Verdict.NOT_SHIPPED]
    return any(file.verdict is Verdict.APPLIED for file in shipped)


def _refuse_foreign(verdict: SeriesVerdict) -> None:
    foreign = foreign_paths(verdict)
    if foreign:
        raise ForeignBytesError(
            f"{_listed(foreign)} {'are' if len(foreign) > 1 else 'is'} neither as shipped nor any state of the series",
            hints=("provision patch diff",),
        )


def _blocked(blocking: Sequence[PatchVerdict]) -> ConflictError:
    kind = ForeignBytesError if any(patch.verdict is Verdict.FOREIGN for patch in blocking) else ConflictError
    first = blocking[0]
    names = _listed([f"{patch.id} ({patch.verdict})" for patch in blocking])
    return kind(f"the series cannot be carried out: {names}" + (f"; {first.why}" if first.why else ""))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
