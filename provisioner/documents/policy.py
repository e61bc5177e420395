"""What a recipe asks of a patch, and what became of one that it names. Judging patches needs no more of it. Pure."""

from enum import StrEnum
from typing import assert_never

from provisioner.records import dataclass


class PatchPolicy(StrEnum):
    """What a recipe asks of a patch."""

    REQUIRED = "required"
    OPTIONAL = "optional"
    NOT_NEEDED = "not-needed"


class Omission(StrEnum):
    """Why a patch that a series names is not applied."""

    REPLACED = "replaced"
    ASKED = "asked"
    NO_OVERLAY = "no-overlay"


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A patch of a series that is not applied; ``by`` is the id of the one in its place, if there is one."""

    id: str
    omission: Omission
    by: str | None = None

    def __str__(self) -> str:
        match self.omission:
            case Omission.REPLACED:
                return f"{self.id}: replaced by {self.by}"
            case Omission.ASKED:
                return f"{self.id}: left out by --without-patch"
            case Omission.NO_OVERLAY:
                return f"{self.id}: left out by --without-overlay"
            case _:
                assert_never(self.omission)
