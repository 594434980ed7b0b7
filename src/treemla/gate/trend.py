"""Where a history of sessions steps: for a nightly look, never for a verdict on a change.

Splits where Student's t is largest, and again on either side, while the step is unlikely and large enough. It is fed
session medians: raw times have outliers and neighbours alike, which look like steps.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_SEGMENT = 4  # sessions; a step shows after so many nights
MAX_CHANCE = 1e-4  # that noise alone makes such a step at one place
MIN_CHANGE = 0.03


@dataclass(frozen=True)
class Step:
    """`index`: the first session after it. `change`: relative, of the medians on either side."""

    index: int
    change: float


def steps(values: Sequence[float]) -> list[Step]:
    """In order; ValueError for values that are not positive finite numbers."""
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError(f"values: expected positive finite numbers, got {list(values)}")
    return _steps([math.log(value) for value in values], 0)


def _steps(logs: Sequence[float], offset: int) -> list[Step]:
    places = range(MIN_SEGMENT, len(logs) - MIN_SEGMENT + 1)
    if not places:
        return []
    chance, place = min((_chance(logs[:place], logs[place:]), place) for place in places)
    before, after = logs[:place], logs[place:]
    change = math.expm1(statistics.median(after) - statistics.median(before))
    if chance > MAX_CHANCE or abs(change) < MIN_CHANGE:
        return []
    return [*_steps(before, offset), Step(offset + place, change), *_steps(after, offset + place)]


def _chance(before: Sequence[float], after: Sequence[float]) -> float:
    """Two-sided, of means so far apart where nothing changed: Student's t, both sides as noisy as each other."""
    from scipy.stats import t

    degrees = len(before) + len(after) - 2
    squares = sum((len(side) - 1) * statistics.variance(side) for side in (before, after))
    error = math.sqrt(max(squares / degrees, 1e-12) * (1 / len(before) + 1 / len(after)))
    return float(2 * t.sf(abs(statistics.fmean(after) - statistics.fmean(before)) / error, degrees))
