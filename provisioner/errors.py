"""One exception tree. A class says how the process ends; an instance says what happened, where, and what to run.

Pure.
"""

from typing import ClassVar


class ProvisionError(Exception):
    """Base of every failure that a user can cause or mend.

    ``what`` is one sentence without a full stop. ``where`` is an address (a file, a URL, ``x.toml: build.version``).
    ``expected`` and ``found`` are what was compared; one that is not given is not told. Each hint is a command or act.
    """

    exit_code: ClassVar[int] = 70
    code: ClassVar[str] = "bug"

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        hints: tuple[str, ...] = (),
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.hints = hints

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        given = (("expected", self.expected), ("found", self.found))
        compared = ", ".join(f"{word} {value}" for word, value in given if value is not None)
        return f"{text} ({compared})" if compared else text


class UsageError(ProvisionError):
    """The command line asks for something that cannot be meant."""

    exit_code = 2
    code = "usage"


class InvalidInputError(ProvisionError):
    """A recipe, lock or patch is not what it must be; nothing was written."""

    exit_code = 3
    code = "invalid"


class InvalidRecipeError(InvalidInputError):
    """A recipe that cannot be read or contradicts itself."""

    code = "invalid-recipe"


class InvalidLockError(InvalidInputError):
    """A lock that cannot be read, is incomplete or contradicts itself."""

    code = "invalid-lock"


class InvalidPatchError(InvalidInputError):
    """A patch text that is not wholly understood."""

    code = "invalid-patch"


class InvalidReceiptError(InvalidInputError):
    """A receipt or record in the environment that cannot be read."""

    code = "invalid-receipt"


class InvalidReportError(InvalidInputError):
    """A report that cannot be read, or reports that contradict one another."""

    code = "invalid-report"


class InvalidBundleError(InvalidInputError):
    """A bundle that cannot be read, or whose members are not the ones that it lists."""

    code = "invalid-bundle"


class CannotObtainError(ProvisionError):
    """Something needed is not to be had."""

    exit_code = 4
    code = "cannot-obtain"


class NetworkError(CannotObtainError):
    """A server could not be reached or did not answer properly; trying again may help."""

    code = "network"


class NoSuchBuildError(CannotObtainError):
    """The index was reached and does not have this build."""

    code = "no-such-build"


class NoCompatibleWheelError(CannotObtainError):
    """The build exists, but not for this platform, Python or variant."""

    code = "no-compatible-wheel"


class InvalidWheelError(CannotObtainError):
    """Bytes arrived, or lie there, that are no wheel."""

    code = "invalid-wheel"


class HashMismatchError(CannotObtainError):
    """Bytes arrived, but not the ones that were promised."""

    code = "hash-mismatch"


class ResolutionError(CannotObtainError):
    """The resolver found no set of packages, or an install failed."""

    code = "resolution"


class NoInterpreterError(CannotObtainError):
    """No Python that the build supports was found."""

    code = "no-interpreter"


class ConflictError(ProvisionError):
    """What is on disk contradicts what is asked; nothing was written."""

    exit_code = 5
    code = "conflict"


class ForeignBytesError(ConflictError):
    """A file is neither pristine nor any state of the series."""

    code = "foreign"


class EnvironmentConflictError(ConflictError):
    """The folder or the environment in it is not the one that the recipe describes."""

    code = "environment-conflict"


class RefusedTargetError(ConflictError):
    """A path that is never written to: outside site-packages, a symlink, or neither shipped nor made by the series."""

    code = "refused-target"


class BusyError(ConflictError):
    """Another process holds this environment."""

    code = "busy"


class RestoredError(ProvisionError):
    """A change failed and everything was put back, proven by digests."""

    exit_code = 6
    code = "restored"


class NotRestoredError(ProvisionError):
    """A change failed and not everything could be put back; the journal is kept."""

    exit_code = 7
    code = "not-restored"


class CardError(ProvisionError):
    """The card is missing, lost or wedged."""

    exit_code = 8
    code = "card"


class InterruptedRunError(ProvisionError):
    """The user ended the command with Ctrl-C."""

    exit_code = 130
    code = "interrupted"

    def __init__(self) -> None:
        super().__init__("interrupted; run the same command again to go on")
