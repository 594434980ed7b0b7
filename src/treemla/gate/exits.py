"""Exit codes of every command. Only PASS is a pass."""

from collections.abc import Iterable
from enum import IntEnum


class Exit(IntEnum):
    PASS = 0
    FAILED = 1  # a test failed, a result is wrong, something is slower
    USAGE = 2
    NOTHING_MEASURED = 3  # no test ran, or fewer than were named
    INVALID_ENVIRONMENT = 4  # no GPU, an unsupported or busy one, clocks that jump, a tool missing or not working
    BASELINE_MISSING = 5  # nothing to compare with: a base that cannot be measured, a baseline that is gone or foreign
    AMBIGUOUS = 6  # everything was tried and it is still not known


GRAVEST_FIRST = (
    Exit.FAILED,
    Exit.NOTHING_MEASURED,
    Exit.BASELINE_MISSING,
    Exit.AMBIGUOUS,
    Exit.INVALID_ENVIRONMENT,
    Exit.USAGE,
    Exit.PASS,
)


def gravest(exits: Iterable[Exit]) -> Exit:
    """What a command with these parts ends with. Without parts nothing was measured, which is no pass."""
    return min(exits, key=GRAVEST_FIRST.index, default=Exit.NOTHING_MEASURED)


class InvalidEnvironment(RuntimeError):
    """This machine cannot run what was asked; the message says why and what to do."""


class BaselineMissing(RuntimeError):
    """There is nothing to compare with; the message says what is missing and what to do."""
