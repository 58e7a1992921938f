"""The errors that users see: one line for each problem, and the exit status that belongs to it."""

from collections.abc import Iterable


class ShardflowError(Exception):
    """Base of the project's own errors. ``problems`` holds one complete line for each problem found."""

    exit_status = 1

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["ShardflowError"], tuple[tuple[str, ...]]]:
        # The default would pickle the joined text and lose the separate lines between processes.
        return type(self), (self.problems,)


class InputError(ShardflowError, ValueError):
    """A source, checkpoint, configuration or argument that cannot be used. Nothing was written."""

    exit_status = 2


class RunError(ShardflowError, RuntimeError):
    """A failure while running: storage, network, a dead rank."""

    exit_status = 1
