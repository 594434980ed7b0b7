"""Verify with its KV in L2: how many clocks an SM needs for a token when memory costs next to nothing.

sm_90a holds the mma kernels with the tiles of sm_120, so `bench --path mma --warm` on a Hopper GPU gives what a
prediction for sm_120 needs (docs/kernel.md).
"""

from collections.abc import Sequence
from itertools import pairwise

from treemla.gate import schema
from treemla.gate.cases import WARM_CASES, VerifyCase
from treemla.gate.report import table

LAYERS = 16  # of a graph; all read the same pool


def fits(case: VerifyCase, l2_bytes: int) -> bool:
    """Whether L2 holds the KV twice: each of its halves may keep a copy of what the other owns."""
    return 2 * sum(case.contexts) * case.row_bytes <= l2_bytes


def clocks_a_token(case: VerifyCase, us: float, mhz: float, num_sms: int) -> float:
    """Clocks that an SM spends on each committed token of its share, the fixed part of a layer included."""
    return us * mhz * num_sms / sum(case.contexts)


def show(made: Sequence[schema.Measurement]) -> str:
    """A line a case: time, clocks a token and SM, and these for the tokens beyond the next shorter context alone, in
    which a layer's fixed part (launches, first loads, combine) cancels.
    """
    cases = {case.id: case for case in WARM_CASES}
    times = {m.case: m for m in made if m.unit == "us"}
    clocks = {m.case: m.value for m in made if m.unit == "clocks"}
    beyond = {}
    for shorter, longer in pairwise([cases[name] for name in clocks]):
        few, many = sum(shorter.contexts), sum(longer.contexts)
        if (shorter.batch, shorter.tree_tokens, shorter.heads) == (longer.batch, longer.tree_tokens, longer.heads):
            beyond[longer.id] = (clocks[longer.id] * many - clocks[shorter.id] * few) / (many - few)
    lines = [
        [name, f"{times[name].value:.1f}", f"{times[name].mad:.2f}", f"{taken:.0f}",
         f"{beyond[name]:.0f}" if name in beyond else "-"]
        for name, taken in clocks.items()
    ]  # fmt: skip
    return table(["case", "verify us", "mad", "clocks a token and SM", "beyond the shorter"], lines)
