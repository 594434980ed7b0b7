"""The decision rules: what they must call red, what they must not, and that no noise is taken for an answer."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treemla.gate import decide, simulate
from treemla.gate.decide import RULE, Verdict

NOISE = st.floats(-0.01, 0.01)
SETTLED = {Verdict.SAME, Verdict.FASTER}


def around(change, *noise):
    return [math.log1p(change) + n for n in noise]


EIGHT = (0.004, -0.003, 0.001, -0.002, 0.002, 0.0, -0.004, 0.002)


@pytest.mark.parametrize(
    ("log_ratios", "verdict"),
    [
        (around(0.0, *EIGHT[:3]), Verdict.SAME),
        (around(0.015, *EIGHT[:3]), Verdict.SAME),
        (around(0.025, *EIGHT[:3]), Verdict.MORE),
        (around(0.025, *EIGHT), Verdict.SAME),
        (around(0.04, *EIGHT[:3]), Verdict.MORE),
        (around(0.04, *EIGHT), Verdict.REGRESSION),
        (around(-0.05, *EIGHT[:3]), Verdict.FASTER),
        (around(-0.05, *EIGHT), Verdict.FASTER),
        (around(0.0, 0.06, -0.06, 0.0), Verdict.MORE),  # too noisy to say that nothing changed
        (around(0.0, *(20 * n for n in EIGHT)), Verdict.AMBIGUOUS),
        (around(0.04, *(40 * n for n in EIGHT)), Verdict.AMBIGUOUS),
    ],
)
def test_each_verdict_has_its_ratios(log_ratios, verdict):
    assert decide.decide(log_ratios).verdict is verdict


@pytest.mark.parametrize("log_ratios", [[], [0.0, 0.0], [0.0, 0.0, math.nan], [0.0, 0.0, math.inf]])
def test_too_few_processes_and_no_numbers_are_an_error(log_ratios):
    with pytest.raises(ValueError, match="log_ratios"):
        decide.decide(log_ratios)


@given(st.lists(st.floats(-0.2, 0.2), min_size=3, max_size=8), st.randoms())
def test_the_order_of_processes_does_not_matter(log_ratios, random):
    shuffled = random.sample(log_ratios, len(log_ratios))
    first, second = decide.decide(log_ratios), decide.decide(shuffled)
    assert first.verdict is second.verdict
    assert first.change == pytest.approx(second.change, abs=1e-12)


@given(st.lists(st.floats(-0.2, 0.2), min_size=8, max_size=8), st.floats(0, 0.5))
def test_slower_everywhere_never_looks_better(log_ratios, slower):
    rank = {Verdict.FASTER: 0, Verdict.SAME: 1, Verdict.AMBIGUOUS: 1, Verdict.REGRESSION: 2}
    before = decide.decide(log_ratios).verdict
    after = decide.decide([r + slower for r in log_ratios]).verdict
    assert rank[after] >= rank[before]


@given(st.lists(NOISE, min_size=8, max_size=8), st.floats(0.05, 0.5))
def test_head_and_base_swapped_turn_a_regression_into_a_gain(noise, change):
    slower = around(change, *noise)
    assert decide.decide(slower).verdict is Verdict.REGRESSION
    assert decide.decide([-r for r in slower]).verdict is Verdict.FASTER


@given(st.lists(st.floats(-0.3, 0.3), min_size=3, max_size=8))
def test_a_verdict_is_final_with_all_processes_and_only_then_red_or_ambiguous(log_ratios):
    verdict = decide.decide(log_ratios).verdict
    final = len(log_ratios) == RULE.most
    assert verdict is not Verdict.MORE if final else verdict in {*SETTLED, Verdict.MORE}


@given(st.lists(st.floats(-0.3, 0.3), min_size=3, max_size=8))
def test_what_passes_was_measured_sharply_enough(log_ratios):
    decision = decide.decide(log_ratios)
    if decision.verdict in SETTLED:
        assert decision.detectable <= RULE.noticed
    assert decision.low <= decision.change <= decision.high


def test_no_change_is_red_in_at_most_one_of_a_hundred_and_five_percent_in_at_least_95():
    assert simulate.shares(0.0, 0.01)[Verdict.SAME] >= 0.99
    assert simulate.shares(0.05, 0.01)[Verdict.REGRESSION] >= 0.95
    assert simulate.shares(0.0, 0.01, outliers=0.05)[Verdict.REGRESSION] <= 0.01


@pytest.mark.parametrize("spread", [0.003, 0.01, 0.02, 0.03])
def test_what_is_called_detectable_is_noticed_19_times_in_20(spread):
    change = decide.detectable(spread)
    share = simulate.shares(change, spread)
    assert 0.94 <= share[Verdict.REGRESSION] + share[Verdict.AMBIGUOUS] <= 0.99


@pytest.mark.parametrize("spread", [0.01, 0.03, 0.05, 0.08, 0.15])
def test_however_noisy_the_machine_a_six_percent_slowdown_seldom_passes(spread):
    share = simulate.shares(RULE.noticed, spread)
    assert sum(share[verdict] for verdict in SETTLED) <= 0.08


SESSIONS = [100.0 + 0.5 * math.sin(7 * i) for i in range(20)]


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        ([102.9], Verdict.SAME),
        ([90.0], Verdict.SAME),
        ([103.5], Verdict.MORE),
        ([103.5, 100.0, 100.0], Verdict.SAME),
        ([103.5, 104.0, 100.0], Verdict.REGRESSION),
    ],
)
def test_a_stored_baseline_is_exceeded_by_the_median_of_three_sessions(measured, verdict):
    assert decide.decide_absolute(SESSIONS, measured) is verdict


def test_a_spread_of_sessions_widens_the_limit():
    assert decide.limit(SESSIONS) == pytest.approx(103, abs=0.2)
    assert decide.limit([100.0 + 4 * math.sin(7 * i) for i in range(20)]) > 110


def test_nothing_measured_is_no_verdict():
    with pytest.raises(ValueError, match="got none"):
        decide.decide_absolute(SESSIONS, [])


def test_the_absolute_gate_is_quiet_without_change_and_sees_eight_percent():
    assert simulate.absolute_red(0.0, 0.01) <= 0.001
    assert simulate.absolute_red(0.08, 0.01) >= 0.99


def test_one_percent_a_week_creeps_past_the_anchor_where_no_step_was_red():
    weeks = [100.0 * 1.01**week for week in range(11)]
    steps = [decide.decide(around(b / a - 1, *EIGHT[:3])).verdict for a, b in pairwise(weeks)]
    assert set(steps) == {Verdict.SAME}
    assert [decide.creep(week, weeks[0]) > decide.MAX_CREEP for week in weeks] == [False] * 5 + [True] * 6


def test_the_page_prints_what_the_simulation_says():
    page = (Path(__file__).parents[2] / "docs/gates.md").read_text()
    assert f"python -m treemla.gate.simulate -->\n```text\n{simulate.table()}\n```" in page
