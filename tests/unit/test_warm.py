"""Clocks a token and SM, worked out by hand; and that a warm case stays in L2."""

import pytest

from treemla.gate import schema, warm
from treemla.gate.cases import WARM_CASES, VerifyCase

WHERE = schema.Where("NVIDIA H200", "580.1", "13.0", "2.11.0", None, None, "0" * 40, "2026-01-02T03:04:05Z", "-")
H200_L2_BYTES = 60 * 1024 * 1024


def test_clocks_are_time_by_clock_shared_among_the_sms():
    """10 us at 1,980 MHz are 19,800 clocks; 132 SMs share 13,200 tokens, 100 each."""
    assert warm.clocks_a_token(VerifyCase((13_200,), 9, 8), 10.0, 1980.0, 132) == pytest.approx(198.0)


def test_every_warm_case_fits_into_l2_and_a_larger_one_is_refused():
    assert all(warm.fits(case, H200_L2_BYTES) for case in WARM_CASES)
    assert not warm.fits(VerifyCase((65536,), 9, 8), H200_L2_BYTES)
    assert not warm.fits(VerifyCase((16384,) * 8, 9, 8), H200_L2_BYTES)


def test_the_fixed_part_of_a_layer_cancels_in_what_longer_contexts_add():
    """100 clocks a token and 4 us before the first: at 1,000 MHz and 128 SMs, 4,096 tokens are 3.2 us more."""
    rows = [case for case in WARM_CASES if case.tree_tokens in (9, 16)]
    made = []
    for case in rows:
        us = 4.0 + sum(case.contexts) / 128 * 100 / 1000
        clocks = warm.clocks_a_token(case, us, 1000.0, 128)
        made += [
            schema.Measurement.of(case.id, "verify_mma_warm", "us", [us], WHERE),
            schema.Measurement.of(case.id, "verify_mma_warm_clocks", "clocks", [clocks], WHERE),
        ]
    lines = [line.split() for line in warm.show(made).splitlines()[2:]]
    assert [line[0] for line in lines] == [case.id for case in rows]
    assert [line[3:] for line in lines] == [["225", "-"], ["131", "100"]] * 2
