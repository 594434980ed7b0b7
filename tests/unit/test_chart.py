"""Axes of the page's charts: every value lies on them, and their ticks are few, round and apart."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treemla.gate import chart
from treemla.gate.cases import CASES, PEER_CASES, case_of
from treemla.gate.chart import Axis, Series

TIMES = st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=30)


def expect_whole(axis: Axis, values):
    shares = [axis.share(value) for value in (*values, *axis.ticks)]
    assert all(math.isfinite(share) and -1e-6 <= share <= 1 + 1e-6 for share in shares)
    assert axis.low < axis.high and all(axis.ticks.values())
    assert len(set(axis.ticks.values())) == len(axis.ticks)


@given(TIMES)
def test_a_logarithmic_axis_holds_its_values(values):
    axis = chart.log_axis("us", values)
    expect_whole(axis, values)
    assert 2 <= len(axis.ticks) <= 15 and all(len(text) <= 9 for text in axis.ticks.values())


@given(TIMES, st.booleans())
def test_a_linear_axis_holds_its_values(values, zero):
    axis = chart.linear_axis("us", values, zero=zero)
    expect_whole(axis, values)
    assert 3 <= len(axis.ticks) <= 8 and (axis.low == 0 or not zero)


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=40))
def test_an_axis_of_contexts_leaves_out_what_has_no_room(values):
    axis = chart.point_axis("tokens", values)
    expect_whole(axis, values)
    places = sorted(axis.share(value) for value in axis.ticks)
    assert all(after - before > 0.1 for before, after in pairwise(places))


def test_a_small_change_looks_small():
    """0.1% of noise does not fill the chart."""
    axis = chart.linear_axis("us", [100.0, 100.1], zero=False)
    assert axis.high - axis.low >= 4.0


def test_a_value_stands_where_its_axis_says():
    axis = chart.log_axis("us", [10.0, 1000.0])
    assert (axis.low, axis.high) == (10.0, 1000.0) and axis.share(100.0) == pytest.approx(0.5)
    drawn = chart.lines("t", [Series("a", [(10.0, 10.0), (1000.0, 1000.0)], 0)], axis, axis)
    (path,) = [node for node in drawn.iter("path") if node.get("class") == "line c0"]
    assert path.get("d") == f"M{chart.LEFT:.1f} {chart.BOTTOM:.1f}L{chart.RIGHT:.1f} {chart.TOP:.1f}"


def test_a_legend_has_the_marks_of_its_chart():
    series = [Series(str(style), [(1.0, 1.0)], style) for style in range(12)]
    axis = chart.log_axis("us", [1.0])
    drawn = [node.get("d") for node in chart.lines("t", series, axis, axis).iter("path") if "dot" in node.get("class")]
    named = [node.get("d") for node in chart.legend(series).iter("path") if "dot" in node.get("class")]
    assert drawn == named
    signs = [(chart._colour(held), chart.MARKERS[held.style % len(chart.MARKERS)]) for held in series]
    assert len(set(signs)) == len(series)  # no two kernels look the same


@pytest.mark.parametrize("known", dict.fromkeys((*CASES, *PEER_CASES)), ids=lambda known: known.id)
def test_an_id_gives_its_case(known):
    assert case_of(known.id) == known


@pytest.mark.parametrize(
    "text",
    ["", "verify", "verify-b0-c1-t9-h8-p1-bf16", "verify-b2-c1_2_3-t9-h8-p1-bf16", "verify-b1-c0-t9-h8-p1-bf16", "verify-b2-c7_7-t9-h8-p1-bf16",
     "verify-b99999-c1-t9-h8-p1-bf16", "verify-b1-c1_-t9-h8-p1-bf16", "verify-b1-c٣-t9-h8-p1-bf16", "move-n10-l60-b1152"],
)  # fmt: skip
def test_other_texts_are_no_case(text):
    assert case_of(text) is None
