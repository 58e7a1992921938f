"""How long stages say how far they are; the command shows a bar, a flow an artifact, a test nothing."""

from typing import Protocol


class Progress(Protocol):
    """Receives a stage's phases and bytes. ``advance`` may be called from several threads at once."""

    def phase(self, label: str, total: int) -> None:
        """A new phase begins: what it does, and how many bytes it will go through."""

    def advance(self, size: int) -> None:
        """``size`` more bytes of the current phase are done."""


class Silent:
    """Shows nothing."""

    def phase(self, label: str, total: int) -> None:
        """Nothing."""

    def advance(self, size: int) -> None:
        """Nothing."""
