"""Do two engines say the same? Pure: reads what start.py wrote, knows nothing of SGLang.

Greedy decoding of two correct kernels may part ways only where the two likeliest tokens are closer than the kernels'
rounding; such a tie is counted and reported. After it the two texts differ in what they attend to, so comparison ends.
"""

from dataclasses import dataclass

LOGPROB_TOLERANCE = 0.05  # of bf16 logits over 61 layers; to be replaced by what the first GPU run shows


@dataclass(frozen=True)
class Answer:
    """A prompt's greedy continuation: token ids, the log-probability of each, and its lead over the runner-up."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True)
class Agreement:
    """same: tokens compared and equal. ties: answers that parted at a tie. faults: what no rounding explains."""

    same: int
    ties: int
    faults: tuple[str, ...]


def compare(reference: dict[str, Answer], other: dict[str, Answer], tolerance: float = LOGPROB_TOLERANCE) -> Agreement:
    """Answers by prompt name. A prompt that only one of the two answered is a fault."""
    same = ties = 0
    faults = [f"{name}: answered by one engine only" for name in sorted(reference.keys() ^ other.keys())]
    for name in sorted(reference.keys() & other.keys()):
        ours, theirs = reference[name], other[name]
        if len(ours.tokens) != len(theirs.tokens) or not ours.tokens:
            faults.append(f"{name}: {len(ours.tokens)} tokens against {len(theirs.tokens)}")
            continue
        for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)):
            if a != b:
                is_tie = ours.margins[i] <= tolerance
                ties += is_tie
                if not is_tie:
                    faults.append(f"{name}: token {i} is {a} with a lead of {ours.margins[i]:.3f}, not {b}")
                break
            apart = abs(ours.logprobs[i] - theirs.logprobs[i])
            if not apart <= tolerance:
                faults.append(f"{name}: log-probability of token {i} is {apart:.3f} apart")
                break
            same += 1
    return Agreement(same, ties, tuple(faults))
