"""How long work says where it is. Rooms call a Reporter; only the command line draws one. Pure."""

from typing import Protocol


class Reporter(Protocol):
    """Receives progress. Implementations must be cheap and must not raise."""

    def stage(self, text: str) -> None:
        """A new stage begins, such as ``install 198 packages``."""

    def detail(self, text: str) -> None:
        """One line of news within the stage."""

    def amount(self, done: int, total: int | None, unit: str) -> None:
        """How much of the stage is done; ``total`` is None where nobody knows."""

    def warn(self, text: str) -> None:
        """Something that the user should know and that does not stop the work."""


class Silence:
    """A Reporter that says nothing."""

    def stage(self, text: str) -> None:
        """Say nothing."""

    def detail(self, text: str) -> None:
        """Say nothing."""

    def amount(self, done: int, total: int | None, unit: str) -> None:
        """Say nothing."""

    def warn(self, text: str) -> None:
        """Say nothing."""
