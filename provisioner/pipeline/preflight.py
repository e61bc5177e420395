"""What can be known before anything is written: platform, disk, card."""

import platform
import shutil
from pathlib import Path

from provisioner.documents.recipe import CardExpectation
from provisioner.errors import CannotObtainError, CardError
from provisioner.records import dataclass

GIB = 1024**3
# Measured: vllm 0.27.1 with its CUDA packages takes 7.6 GB installed, its wheel alone 0.8 GB.
FULL_ENVIRONMENT_BYTES = 9 * GIB
BARE_ENVIRONMENT_BYTES = 2 * GIB
_ELSEWHERE = "choose another place with --venv DIR, or set PROVISION_HOME"


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What was found: warnings for people, and the card in one line (None where there is none)."""

    warnings: tuple[str, ...]
    card: str | None


def check_platform() -> None:
    """Raise CannotObtainError where vLLM's Linux x86_64 wheels cannot run."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise CannotObtainError(
            "the locks are for another platform", expected="Linux x86_64", found=f"{system} {machine}"
        )


def check_disk(folder: Path, needed: int, *, hints: tuple[str, ...] = (_ELSEWHERE,)) -> None:
    """Raise CannotObtainError where the file system of ``folder`` has less than ``needed`` bytes free."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise CannotObtainError(
            "too little disk space",
            where=str(existing),
            expected=f"{needed / GIB:.1f} GiB free",
            found=f"{free / GIB:.1f} GiB",
            hints=hints,
        )


def look_at_card(expected: CardExpectation | None) -> Preflight:
    """Compare the cards that the driver shows with the recipe's; a missing card is a warning, not an error."""
    from provisioner.gpu.devices import read_inventory

    try:
        cards = read_inventory().cards
    except CardError as error:
        return Preflight(warnings=(f"{error.what}; nothing can be verified on this machine",), card=None)
    if not cards:
        return Preflight(warnings=("no NVIDIA card was found; nothing can be verified on this machine",), card=None)
    names = ", ".join(card.name for card in cards)
    if expected is None or any(card.name == expected.name for card in cards):
        return Preflight(warnings=(), card=names)
    validated = f"{expected.name} {expected.memory_gib} GB"
    return Preflight(warnings=(f"this recipe was validated on {validated}; found {names}",), card=names)
