"""Results about patches as JSON values, table rows and text."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, assert_never

from provisioner.counts import count_text
from provisioner.patching.model import FileVerdict, HunkVerdict, PatchVerdict, SeriesVerdict, Verdict
from provisioner.pipeline.evaluate import ForeignEdit, Judgement
from provisioner.resources import stored_patch_names
from provisioner.transaction.transaction import FileOutcome, Recovery, RecoveryKind
from provisioner.wheels.names import spec_of

if TYPE_CHECKING:
    from provisioner.pipeline.lint import Finding
    from provisioner.pipeline.show import ShownPatch


SHORT_DIGEST = 12
MOST_LINES = 40
SCOPE_UNKNOWN = "scope unknown"


def describe_judgement(judgement: Judgement) -> dict[str, Any]:
    """The value of ``provision/patch-check/1``."""
    return {
        "distribution": judgement.distribution,
        "version": str(judgement.version),
        "patches": [describe_patch(patch) for patch in judgement.verdict.patches],
        "final": dict(judgement.verdict.final_digests),
        "foreign": [describe_edit(edit) for edit in judgement.edits],
        "notes": list(judgement.remarks),
        "interrupted": judgement.interrupted,
    }


def describe_patch(patch: PatchVerdict) -> dict[str, Any]:
    """One patch with its files and hunks."""
    return {
        "id": patch.id,
        "source": patch.source,
        "verdict": str(patch.verdict),
        "why": patch.why,
        "same_as": patch.same_as,
        "displaced_by": list(patch.displaced_by),
        "files": [describe_file(file) for file in patch.files],
    }


def describe_file(file: FileVerdict) -> dict[str, Any]:
    """One file of a patch."""
    return {
        "path": file.path,
        "verdict": str(file.verdict),
        "before": file.before,
        "after": file.after,
        "why": file.why,
        "moved_to": file.moved_to,
        "hunks": [describe_hunk(hunk) for hunk in file.hunks],
    }


def describe_hunk(hunk: HunkVerdict) -> dict[str, Any]:
    """One hunk: the line it names, the line where it was found, and the scope it stands in."""
    return {
        "index": hunk.index,
        "verdict": str(hunk.verdict),
        "line": hunk.line,
        "found": hunk.found,
        "offset": hunk.offset,
        "scope": hunk.scope if hunk.scope is not None else hunk.found_scope,
        "found_scope": hunk.found_scope,
        "why": hunk.why,
        "displaced_by": hunk.displaced_by,
    }


def describe_edit(edit: ForeignEdit) -> dict[str, Any]:
    """A foreign file."""
    text = edit.difference.decode("utf-8", errors="backslashreplace")
    return {"path": edit.path, "found": edit.found, "nearest": edit.nearest, "diff": text}


def judgement_rows(verdict: SeriesVerdict) -> Iterator[tuple[str, str, str, str]]:
    """Patch, verdict, file, detail: a row a file, and one for each hunk that is not where and as it says."""
    for patch in verdict.patches:
        name, word = patch.id, str(patch.verdict)
        remark = patch.why or (f"the same as {patch.same_as}" if patch.same_as else "")
        if not patch.files:
            yield name, word, "", remark
        for file in patch.files:
            verdict_word = "" if file.verdict is patch.verdict else f"{file.verdict}: "
            yield name, word, file.path, f"{verdict_word}{_file_detail(file) or remark}".removesuffix(": ")
            name = word = ""
            for hunk in file.hunks:
                if _is_remarkable(hunk, file):
                    yield "", "", f"  hunk {hunk.index}, line {hunk.line}", f"{hunk.verdict}{_hunk_detail(hunk)}"


def _file_detail(file: FileVerdict) -> str:
    if file.moved_to:
        return f"moved to {file.moved_to}"
    if file.why or not file.verdict.remains:
        return file.why
    if file.before == file.after:
        return "permissions"
    return f"{_short(file.before)} -> {_short(file.after)}"


def _is_remarkable(hunk: HunkVerdict, file: FileVerdict) -> bool:
    return bool(hunk.offset) or hunk.verdict is not file.verdict or hunk.why not in ("", SCOPE_UNKNOWN, file.why)


def _hunk_detail(hunk: HunkVerdict) -> str:
    details = []
    if hunk.found is not None:
        details.append(f"found at line {hunk.found}" + (f" (offset {hunk.offset:+d})" if hunk.offset else ""))
    if hunk.found_scope is not None and hunk.found_scope != hunk.scope and hunk.scope is not None:
        details.append(f"in {hunk.found_scope or 'the module'}, not in {hunk.scope or 'the module'}")
    if hunk.why:
        details.append(hunk.why)
    return f": {', '.join(details)}" if details else ""


def outcome_rows(outcomes: Sequence[FileOutcome]) -> Iterator[tuple[str, str, str]]:
    """File, digest before, digest after."""
    for outcome in outcomes:
        after = "permissions" if outcome.before == outcome.after else _short(outcome.after)
        yield outcome.path, _short(outcome.before), after


def edit_text(edit: ForeignEdit) -> str:
    """A foreign file for people: what it is nearest to, and the difference."""
    if edit.nearest is None:
        return f"{edit.path} holds foreign bytes; what it should hold is not at hand"
    lines = edit.difference.decode("utf-8", errors="replace").splitlines()
    more = len(lines) - MOST_LINES
    rest = [f"… and {count_text(more, 'line')} more (provision patch diff shows them)"] if more > 0 else []
    shown = "\n".join([*lines[:MOST_LINES], *rest])
    return f"{edit.path} is not {edit.nearest}; the difference:\n{shown}"


def describe_shown(shown: "ShownPatch") -> dict[str, Any]:
    """The value of ``provision/patch-show/1``."""
    stored, variant = shown.stored, shown.variant
    return {
        "id": shown.id,
        "source": shown.source,
        "title": stored.title if stored else None,
        "upstream": stored.upstream if stored else None,
        "fixes": stored.fixes if stored else None,
        "cause": stored.cause if stored else None,
        "distribution": stored.distribution if stored else None,
        "versions": str(variant.versions) if variant else None,
        "cut_against": str(variant.cut_against) if variant else None,
        "files": [asdict(file) for file in shown.manifest.files],
        "text": shown.text.decode("utf-8", errors="backslashreplace"),
    }


def shown_text(shown: "ShownPatch") -> bytes:
    """What is known in front of the text, which patch tools pass over."""
    lines = [f"Patch: {shown.id} ({shown.source})"]
    if shown.stored and shown.variant:
        lines += [
            f"Title: {shown.stored.title}",
            f"Upstream: {shown.stored.upstream or 'none'}",
            f"For: {shown.stored.distribution} {shown.variant.versions}, cut against {shown.variant.cut_against}",
            f"Fixes: {shown.stored.fixes}",
        ]
    for file in shown.manifest.files:
        scopes = f" in {', '.join(scope or 'the module' for scope in file.scopes)}" if file.scopes else ""
        lines.append(
            f"File: {file.path}: {count_text(file.hunks, 'hunk')}{scopes}, {file.added} added, {file.removed} removed"
        )
    return "\n".join(lines).encode() + b"\n\n" + shown.text


def describe_finding(finding: "Finding") -> dict[str, Any]:
    """One value of ``provision/patch-lint/1``."""
    error = finding.error
    return {
        "source": finding.source,
        "id": finding.id,
        "files": [asdict(file) for file in finding.manifest.files] if finding.manifest else [],
        "not_shipped": list(finding.not_shipped),
        "error": {"what": error.what, "where": error.where, "hints": list(error.hints)} if error else None,
    }


def finding_rows(finding: "Finding") -> Iterator[tuple[str, ...]]:
    """Patch, file, hunks, added, removed, remark."""
    if finding.manifest is None:
        yield finding.source, "", "", "", "", "refused"
        return
    name = finding.source
    for file in finding.manifest.files:
        remark = "not shipped" if file.path in finding.not_shipped else _scope_text(file.scopes)
        yield name, file.path, str(file.hunks), str(file.added), str(file.removed), remark
        name = ""


def _scope_text(scopes: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(scope or "module" for scope in scopes))


def _short(digest: str | None) -> str:
    return digest[:SHORT_DIGEST] if digest else "no file"


def judgement_hints(judgement: Judgement, named: Sequence[str]) -> Iterator[str]:
    """What to run next where something stands in the way or could be known better; ``named`` are the user's patches."""
    if judgement.interrupted:
        yield f"provision patch apply {shlex.join(named)}"
    hunks = [hunk for patch in judgement.verdict.patches for file in patch.files for hunk in file.hunks]
    blind = sum(map(_is_blind, hunks))
    if blind:
        yield (
            f"{blind} of {count_text(len(hunks), 'hunk')} not at the line named, or with several places; to tell in "
            "which class or function each must stand, name the release they were cut against: --cut-against VERSION"
        )
    if any(patch.verdict.resettable for patch in judgement.blocking):
        what = shlex.join(named)
        yield f"to restore these files as shipped first, then apply: provision patch apply {what} --reset"
    for patch in judgement.blocking:
        if patch.verdict is Verdict.INVALID:
            yield f"provision patch lint {shlex.quote(patch.source)}"
        elif patch.displaced_by:
            yield from (_without(other) for other in judgement.verdict.patches if other.id in patch.displaced_by)
        elif patch.verdict.merged:
            yield "leave --strict out: what the build has is then left out, and the receipt says so"
        elif not patch.verdict.resettable:
            yield _next_of_conflict(patch, judgement)


def _without(earlier: PatchVerdict) -> str:
    """How an earlier patch makes way: one that is applied is taken back, another is left out."""
    if earlier.verdict is Verdict.APPLIED:
        return f"provision patch revert {shlex.quote(earlier.id)}"
    return f"run again with --without-patch {shlex.quote(earlier.id)}, which leaves it out"


def _next_of_conflict(patch: PatchVerdict, judgement: Judgement) -> str:
    """A patch of the store is carried to the build; of another one, each hunk's place is what there is to look at."""
    if patch.id in stored_patch_names():
        return f"provision patch refresh {patch.id} --onto {spec_of(judgement.version)}"
    return f"provision patch lint {shlex.quote(patch.source)}"


def _is_blind(hunk: HunkVerdict) -> bool:
    moved = hunk.verdict is Verdict.APPLIES_AT_OFFSET and SCOPE_UNKNOWN in hunk.why
    return moved or (hunk.verdict is Verdict.AMBIGUOUS and hunk.scope is None)


def recovery_text(recovery: Recovery) -> str:
    """What was left of an interrupted change, and what was done about it."""
    match recovery.kind:
        case RecoveryKind.NOTHING_WRITTEN:
            return "an interrupted change had written nothing; its journal is removed"
        case RecoveryKind.UNDONE:
            return f"an interrupted change of {recovery.started} was undone: {', '.join(recovery.paths) or 'no file'}"
        case RecoveryKind.COMPLETED:
            return "an interrupted change was complete; its journal is removed"
        case RecoveryKind.SET_ASIDE:
            return f"an unreadable journal was set aside: {recovery.aside}"
        case _:
            assert_never(recovery.kind)
