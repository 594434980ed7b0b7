"""Exit codes of every command. Only PASS is a pass."""

from enum import IntEnum


class Exit(IntEnum):
    PASS = 0
    FAILED = 1  # a test failed, or a result is wrong
    USAGE = 2
    NOTHING_MEASURED = 3  # no test ran, or fewer than were named
    INVALID_ENVIRONMENT = 4  # no GPU, an unsupported one, a tool missing or not working


class InvalidEnvironment(RuntimeError):
    """This machine cannot run what was asked; the message says why and what to do."""
