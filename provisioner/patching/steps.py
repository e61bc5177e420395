"""What a plan consists of: one effect on one file each. Pure.

Paths are posix and relative to site-packages. Every step names what it expects to find, so that a step on anything else
can be refused.
"""

from dataclasses import field

from provisioner.digests import Digest
from provisioner.records import dataclass

DEFAULT_MODE = 0o644


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaceFile:
    """Put ``content`` where a file with digest ``before`` stands; its mode stays."""

    path: str
    before: Digest
    content: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateFile:
    """Put ``content`` where no file stands."""

    path: str
    content: bytes = field(repr=False)
    mode: int = DEFAULT_MODE


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteFile:
    """Remove the file with digest ``before``."""

    path: str
    before: Digest


@dataclass(frozen=True, kw_only=True, slots=True)
class SetMode:
    """Change permission bits; comes after the step, if any, that writes the same file."""

    path: str
    before: int
    after: int


FileStep = ReplaceFile | CreateFile | DeleteFile | SetMode


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Steps in order; empty when everything is already as wanted."""

    steps: tuple[FileStep, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def created(self) -> frozenset[str]:
        """The paths that the plan creates."""
        return frozenset(step.path for step in self.steps if isinstance(step, CreateFile))
