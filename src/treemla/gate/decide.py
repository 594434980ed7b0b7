"""When a change of time is a regression: pure functions of numbers that were measured.

The unit of replication is the process, never the iteration: two runs of one program differ by more than the iterations
of either do. Changes are relative: 0.03 is 3% slower. `simulate` shows what these rules notice and how often they cry
wolf.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

ONE_SIDED_97 = 1.96  # of the normal distribution, 97.5%: two stages passed are 95%
SIGMA_PER_MAD = 1.4826  # of the normal distribution
MIN_SESSIONS = 12  # with fewer, the spread of sessions is a guess
MAX_CREEP = 0.05  # slower than the best that was ever blessed


class Verdict(StrEnum):
    SAME = "same"
    FASTER = "faster"
    REGRESSION = "regression"
    AMBIGUOUS = "ambiguous"  # every process was used, and it is still not known
    MORE = "more"  # not known yet: more processes decide


@dataclass(frozen=True)
class Rule:
    """Two stages. Up to `suspicious` the first processes settle it; else all do, and more than `regression` whose lower
    bound is above zero is one. Nothing passes where a slowdown of `noticed` would have gone unseen in more than about 5
    of 100 such runs.
    """

    suspicious: float = 0.02
    regression: float = 0.03
    noticed: float = 0.06
    first: int = 3
    most: int = 8


@dataclass(frozen=True)
class Decision:
    """`change` of the median process, between `low` and `high` with 95% confidence a side; `detectable` today."""

    verdict: Verdict
    change: float
    low: float
    high: float
    processes: int
    detectable: float


RULE = Rule()


def decide(log_ratios: Sequence[float], rule: Rule = RULE) -> Decision:
    """From one natural logarithm of slower / faster a process: log(head / base), or log(head / its limit).

    ValueError unless they are finite and at least `rule.first`.
    """
    count = len(log_ratios)
    if count < rule.first or not all(map(math.isfinite, log_ratios)):
        raise ValueError(f"log_ratios: expected at least {rule.first} finite numbers, got {list(log_ratios)}")
    mean, spread = statistics.fmean(log_ratios), statistics.stdev(log_ratios)
    margin = _t95(count - 1) * spread / math.sqrt(count)
    noticed = detectable(spread, rule)
    return Decision(
        verdict=_verdict(mean, margin, sharp=noticed <= rule.noticed, final=count >= rule.most, rule=rule),
        change=math.expm1(mean),
        low=math.expm1(mean - margin),
        high=math.expm1(mean + margin),
        processes=count,
        detectable=noticed,
    )


def _verdict(mean: float, margin: float, *, sharp: bool, final: bool, rule: Rule) -> Verdict:
    """`margin`: from the mean to either bound. `sharp`: what must be noticed would be."""
    regression = math.log1p(rule.regression)
    if not final:
        if mean > math.log1p(rule.suspicious) or not sharp:
            return Verdict.MORE
    elif mean > regression and mean > margin:
        return Verdict.REGRESSION
    elif mean > regression or not sharp:
        return Verdict.AMBIGUOUS
    return Verdict.FASTER if mean < -regression and mean < -margin else Verdict.SAME


def detectable(spread: float, rule: Rule = RULE) -> float:
    """The smallest slowdown that `decide` calls a regression in 95 of 100 runs, where log ratios of processes have the
    standard deviation `spread`: 1.96 standard errors beyond each threshold that it must pass.
    """
    error = spread / math.sqrt(rule.most)
    return math.expm1(
        max(
            math.log1p(rule.suspicious) + ONE_SIDED_97 * spread / math.sqrt(rule.first),
            math.log1p(rule.regression) + ONE_SIDED_97 * error,
            (_t95(rule.most - 1) + ONE_SIDED_97) * error,
        )
    )


def decide_unpaired(base: Sequence[float], head: Sequence[float], rule: Rule = RULE) -> Decision:
    """From times of whole processes, those of each side on their own: Welch's intervals instead of pairs.

    ValueError unless either side has at least `rule.first` positive finite times.
    """
    sides = [base, head]
    if min(map(len, sides)) < rule.first or not all(math.isfinite(us) and us > 0 for side in sides for us in side):
        raise ValueError(f"times: expected at least {rule.first} positive finite processes a side, got {sides}")
    logs = [[math.log(us) for us in side] for side in sides]
    mean = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
    parts = [max(statistics.variance(side), 1e-12) / len(side) for side in logs]
    error = math.sqrt(sum(parts))
    degrees = sum(parts) ** 2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, logs, strict=True))
    margin = _t95(degrees) * error
    sharp = mean + margin <= math.log1p(rule.noticed)
    verdict = _verdict(mean, margin, sharp=sharp, final=True, rule=rule)
    low, high = math.expm1(mean - margin), math.expm1(mean + margin)
    return Decision(verdict, math.expm1(mean), low, high, min(map(len, sides)), math.expm1(2 * margin))


def limit(sessions: Sequence[float], floor: float = 0.03, mads: float = 3.5) -> float:
    """What a session may take beside stored ones: their median and the larger of `floor` and `mads` robust sigmas."""
    median = statistics.median(sessions)
    spread = SIGMA_PER_MAD * statistics.median(abs(s - median) for s in sessions)
    return median * (1 + max(floor, mads * spread / median))


def decide_absolute(sessions: Sequence[float], measured: Sequence[float], floor: float = 0.03) -> Verdict:
    """Stored sessions against the sessions of today: one, and where it is over the limit two more; their median counts.
    floor: as of `limit`.

    That is no retry until it passes: the median of three is what one of them was meant to be.
    """
    if not measured:
        raise ValueError("measured: expected at least one session, got none")
    allowed = limit(sessions, floor)
    if statistics.median(measured) <= allowed:
        return Verdict.SAME
    return Verdict.MORE if len(measured) < 3 else Verdict.REGRESSION


def creep(current: float, anchor: float) -> float:
    """How much slower than the anchor, the best blessed figure: small steps that each pass add up here."""
    return current / anchor - 1


@cache
def _t95(degrees: float) -> float:
    """95% quantile of Student's t."""
    from scipy.stats import t

    return float(t.ppf(0.95, degrees))
