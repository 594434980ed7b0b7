"""Do two Engines say the same? Pure: reads answers, knows nothing of SGLang.

How far apart the log-probabilities of two correct kernels may lie is measured, not guessed: the reference answers the
same prompts in batches of other sizes, from the cache, and with another of its own kernels, and its answers differ by
rounding alone. The other Engine may be twice as far from the reference as the reference is from itself, at its worst
token and in the mean square. Two correct texts may part only where the leads of both choices over the other's are so
small that rounding explains them: a change of d in each of two log-probabilities bridges leads that sum to 2 d.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ALLOWANCE = 2.0
# The reference's own spread must look like rounding: bfloat16 activations err by 2^-9 in each of the residual stream's
# 32 sums, 1% together, of logits that spread over a few units. Beyond this something else is wrong with the reference.
ROUNDING_LIMIT = 0.3


@dataclass(frozen=True)
class Answer:
    """A prompt's greedy continuation: token ids, the log-probability of each, and its lead over the runner-up."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    leads: tuple[float, ...]


@dataclass(frozen=True)
class Spread:
    """Differences of log-probabilities, over `count` tokens."""

    count: int
    rms: float
    worst: float

    @classmethod
    def of(cls, differences: Iterable[float]) -> "Spread":
        held = list(differences)
        rms = math.sqrt(sum(d * d for d in held) / len(held)) if held else 0.0
        return cls(len(held), rms, max(held, default=0.0))


@dataclass(frozen=True)
class Agreement:
    """spread: over tokens that are equal. ties: answers that parted where rounding explains it. faults: the rest."""

    spread: Spread
    ties: int
    faults: tuple[str, ...]


def same_tokens(a: Answer, b: Answer) -> int:
    """Leading tokens that are equal; after the first other one the texts no longer attend to the same."""
    differs = (i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y)
    return next(differs, min(len(a.tokens), len(b.tokens)))


def differences(a: Answer, b: Answer) -> list[float]:
    n = same_tokens(a, b)
    return [abs(x - y) for x, y in zip(a.logprobs[:n], b.logprobs[:n], strict=True)]


def own_spread(answers: Mapping[str, Iterable[Answer]]) -> Spread:
    """How far answers of one Engine to the same prompt lie apart: prompt -> its answers."""
    pairs = (pair for held in answers.values() for pair in itertools.combinations(held, 2))
    return Spread.of(d for pair in pairs for d in differences(*pair))


def compare(reference: Mapping[str, Answer], other: Mapping[str, Answer], rounding: Spread) -> Agreement:
    """Answers by name; one that only one of the two gave is a fault. rounding: the reference's `own_spread`."""
    faults = [f"{name}: answered by one engine only" for name in sorted(reference.keys() ^ other.keys())]
    if not 0 < rounding.worst <= ROUNDING_LIMIT:
        faults.append(f"the reference differs from itself by {rounding.worst:.3f}, expected up to {ROUNDING_LIMIT}")
    tolerance = ALLOWANCE * rounding.worst
    ties, apart = 0, []
    for name in sorted(reference.keys() & other.keys()):
        a, b = reference[name], other[name]
        n = same_tokens(a, b)
        between = differences(a, b)
        apart += between
        if max(between, default=0.0) > tolerance or any(math.isnan(d) for d in between):
            i = max(range(n), key=lambda i: math.inf if math.isnan(between[i]) else between[i])
            faults.append(
                f"{name}: log-probabilities of token {i} are {between[i]:.3f} apart, tolerance {tolerance:.3f}"
            )
        if len(a.tokens) != len(b.tokens) or not a.tokens:
            faults.append(f"{name}: {len(a.tokens)} tokens against {len(b.tokens)}")
        elif n < len(a.tokens):
            leads = a.leads[n] + b.leads[n]
            if leads <= 2 * tolerance:
                ties += 1
            else:
                faults.append(f"{name}: token {n} differs with leads of {leads:.3f}, tolerance {2 * tolerance:.3f}")
    spread = Spread.of(apart)
    if not spread.rms <= ALLOWANCE * rounding.rms:
        faults.append(f"root mean square {spread.rms:.4f}, the reference's own {rounding.rms:.4f}")
    return Agreement(spread, ties, tuple(faults))
