"""What the rules of `decide` do to noise of a known size: how often they cry wolf, and what they notice.

docs/gates.md prints `table`, and a test holds the page to it. The noise is an assumption; `selfcheck` measures it.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence

from treemla.gate.decide import RULE, Rule, Verdict, decide, decide_absolute, detectable
from treemla.gate.report import table as text_table

RUNS = 1000
SPREADS = (0.003, 0.01, 0.02, 0.03)
CHANGES = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.08)


def processes(change: float, spread: float, seed: int, outliers: float = 0.0) -> Iterator[float]:
    """Log ratios of processes without end: normal around `change`; a share `outliers` of them spreads four times."""
    noise = random.Random(seed)
    while True:
        wide = 4.0 if noise.random() < outliers else 1.0
        yield math.log1p(change) + noise.gauss(0.0, wide * spread)


def run(log_ratios: Iterator[float], rule: Rule = RULE) -> Verdict:
    """One gate: the first processes, and where these do not settle it all of them."""
    taken = [next(log_ratios) for _ in range(rule.first)]
    decision = decide(taken, rule)
    if decision.verdict is Verdict.MORE:
        taken += [next(log_ratios) for _ in range(rule.most - rule.first)]
        decision = decide(taken, rule)
    return decision.verdict


def shares(change: float, spread: float, outliers: float = 0.0, runs: int = RUNS) -> dict[Verdict, float]:
    """The share of gates that end with each verdict."""
    counts = Counter(run(processes(change, spread, seed, outliers)) for seed in range(runs))
    return {verdict: counts[verdict] / runs for verdict in Verdict}


def absolute_red(change: float, spread: float, stored: int = 20, runs: int = RUNS) -> float:
    """The share of red verdicts of the absolute gate, sessions spreading by `spread`, `stored` of them known."""
    red = 0
    for seed in range(runs):
        noise = random.Random(seed)
        sessions = [math.exp(noise.gauss(0.0, spread)) for _ in range(stored)]
        today = [(1 + change) * math.exp(noise.gauss(0.0, spread)) for _ in range(3)]
        verdict = decide_absolute(sessions, today[:1])
        red += (decide_absolute(sessions, today) if verdict is Verdict.MORE else verdict) is Verdict.REGRESSION
    return red / runs


def table(changes: Sequence[float] = CHANGES, spreads: Sequence[float] = SPREADS) -> str:
    """Red and ambiguous verdicts of the paired gate, a line a spread of processes, a column a true slowdown."""
    rows = []
    for spread in spreads:
        cells = []
        for change in changes:
            share = shares(change, spread)
            red, unknown = share[Verdict.REGRESSION], share[Verdict.AMBIGUOUS]
            cells.append(f"{100 * red:.1f}" + (f" ({100 * unknown:.1f})" if unknown else ""))
        rows.append([f"{100 * spread:.1f}%", f"+{100 * detectable(spread):.1f}%", *cells])
    return text_table(["spread", "detectable", *(f"+{100 * change:.0f}%" for change in changes)], rows)


if __name__ == "__main__":
    print(table())
