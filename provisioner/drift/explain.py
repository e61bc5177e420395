"""Why a patch does not hold on a build, in at most a few lines. Pure."""

from collections.abc import Mapping

from provisioner.patching.model import FileFacts, PatchVerdict
from provisioner.wheels.record import Record


def explain_patch(verdict: PatchVerdict, facts: Mapping[str, FileFacts], record: Record) -> tuple[str, ...]:
    """The account of one patch on one build."""
    lines = [f"{file.path}: {file.why}" for file in verdict.files if file.why]
    missing = [path for path in facts if path not in record]
    return (*lines, *(f"{path}: not in this wheel" for path in missing))
