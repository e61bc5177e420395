"""What a recipe asks of a patch. On its own, since judging patches needs nothing else of recipes. Pure."""

from enum import StrEnum


class PatchPolicy(StrEnum):
    """What a recipe asks of a patch."""

    REQUIRED = "required"
    OPTIONAL = "optional"
    NOT_NEEDED = "not-needed"
