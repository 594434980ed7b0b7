"""What plans for any length would take of the times that an H200 took with other cuts."""

import functools
import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from treemla import cost
from treemla.gate import tune
from treemla.gate.cases import VerifyCase
from treemla.tiles import WGMMA

TIMES = Path(__file__).parents[2] / "docs/measured/raw/2026-11-30-h200-log-61-66.jsonl"
GPU = tune.Gpu(WGMMA, 132)
LEAST_CONTEXT = 1024  # tokens; below, no plan for 65k is near the best


@functools.cache
def timed() -> dict[VerifyCase, dict[tune.Cut, float]]:
    """{case: {cut: microseconds}} of process e, batches of one length."""
    times: dict[VerifyCase, dict[tune.Cut, float]] = defaultdict(dict)
    for line in TIMES.read_text().splitlines():
        made = json.loads(line)
        found = re.fullmatch(r"b(\d+) (\d+) t(\d+) h(\d+)", made["case"])
        if made["process"] != "e" or not found:
            continue
        batch, context, tree_tokens, heads = map(int, found.groups())
        blocks, rows, parts, overhead = map(int, re.split(r"[x+]", made["tiling"]))
        tiling = cost.Tiling(blocks, rows, parts, overhead).by_shares(int(made["entry"][-1]))
        case = VerifyCase((context,) * batch, tree_tokens, heads)
        if context >= LEAST_CONTEXT:
            times[case][tune.cut_of(GPU, case, tiling)] = made["median_us"]
    return times


def off(case: VerifyCase, max_batch: int) -> float | None:
    """From the best that was timed, of a plan for any length; None: its cut was not timed."""
    plan = cost.choose(cost.DEFAULTS["wgmma"], WGMMA, tune.shape_of(case), GPU.num_sms, cost.design_steps(max_batch))
    us = timed()[case].get(tune.cut_of(GPU, case, plan))
    return None if us is None else us / min(timed()[case].values()) - 1


def test_plans_of_a_batch_s_size_are_near_the_best_on_average() -> None:
    all_off = [off(case, case.batch) for case in timed()]
    known = [x for x in all_off if x is not None]
    assert len(known) > 150 and len(known) > 0.8 * len(all_off)
    assert float(np.mean(known)) < 0.035


@pytest.mark.parametrize("tree_tokens", [1, 2, 4, 5, 6, 8, 9, 16])
def test_a_lone_request_of_eight_heads_is_nowhere_far_off(tree_tokens: int) -> None:
    cases = [case for case in timed() if (case.batch, case.tree_tokens, case.heads) == (1, tree_tokens, 8)]
    known = {case.contexts[0]: x for case in cases if (x := off(case, 1)) is not None}
    assert len(known) >= 12
    assert max(known.values()) < 0.18
    assert max(x for context, x in known.items() if context >= 16_384) < 0.09
