"""Why a patch does not hold on a build, in at most a few lines. Pure."""

from provisioner.patching.model import PatchVerdict


def explain_patch(verdict: PatchVerdict) -> tuple[str, ...]:
    """The account of one patch on one build."""
    return tuple(f"{file.path}: {file.why}" for file in verdict.files if file.why)
