"""What `tune` would choose from the times that it took on an H200."""

import re
from pathlib import Path

import pytest

from treemla import cost, tiles
from treemla.gate import schema, tune
from treemla.gate.cases import VerifyCase

TIMES = Path(__file__).parents[2] / "docs/measured/raw/2026-11-30-h200-d5f5485-tune.jsonl"
GPU = tune.Gpu(tiles.WGMMA, 132)


def recorded(cases: list[VerifyCase]) -> dict[tuple[str, tune.Cut], float]:
    """{(case, cut): microseconds} of these cases."""
    by_id, us = {case.id: case for case in cases}, {}
    for made in schema.load(TIMES):
        if made.case not in by_id:
            continue
        match = re.fullmatch(r"verify_wgmma_r(\d+)_p(\d+)_o(\d+)(_half|_third)?", made.metric)
        assert match, made.metric
        rows, parts, overhead = map(int, match.groups()[:3])
        case, shares = by_id[made.case], {None: 1, "_half": 2, "_third": 3}[match[4]]
        tiling = cost.Tiling(-(-case.tree_tokens * case.heads // rows), rows, parts, overhead).by_shares(shares)
        us[case.id, tune.cut_of(GPU, case, tiling)] = made.value
    return us


@pytest.fixture(scope="module")
def fitted() -> tuple[cost.Constants, list[tune.Row]]:
    """The constants of the recorded probes, and the recorded sweeps."""
    probes = tune.probes(GPU)
    us = recorded([*(case for case, _ in probes), *tune.ROWS])
    timer = lambda case, tiling: us[case.id, tune.cut_of(GPU, case, tiling)]  # noqa: E731 - not timed: a KeyError
    constants = tune.fit(GPU, [(probe, timer(*probe)) for probe in probes])
    return constants, [tune.sweep(GPU, case, timer, (cost.DEFAULTS["wgmma"], constants)) for case in tune.ROWS]


def test_every_row_of_the_table_is_cut_within_two_percent_of_the_best_that_was_timed(
    fitted: tuple[cost.Constants, list[tune.Row]],
) -> None:
    constants, rows = fitted
    assert len(rows) == 9
    assert tune.worst_off(GPU, constants, rows) <= tune.MOST_OFF


def test_the_defaults_cut_every_row_within_two_percent(fitted: tuple[cost.Constants, list[tune.Row]]) -> None:
    assert tune.worst_off(GPU, cost.DEFAULTS["wgmma"], fitted[1]) <= tune.MOST_OFF
