"""Comparing two engines' answers: rounding is measured, ties are counted, everything else that differs is a fault."""

import math

import pytest
from e2e.agree import ALLOWANCE, Answer, Spread, compare, own_spread

SAME = Answer((5, 6, 7), (-0.1, -0.2, -0.3), (2.0, 0.01, 3.0))
ROUNDING = Spread(100, 0.02, 0.05)


def one(reference, other, rounding=ROUNDING):
    return compare({"p": reference}, {"p": other}, rounding)


def test_equal_answers_agree_in_every_token():
    found = one(SAME, SAME)
    assert (found.spread, found.ties, found.faults) == (Spread(3, 0.0, 0.0), 0, ())


def test_answers_that_part_where_two_tokens_are_as_likely_are_a_tie():
    found = one(SAME, Answer((5, 9, 9), (-0.1, -0.2, -9.0), (2.0, 0.02, 3.0)))
    assert (found.spread.count, found.ties, found.faults) == (1, 1, ())


@pytest.mark.parametrize("leads", [(2.0, 0.01), (0.01, 2.0)], ids=["the reference's", "the other's"])
def test_answers_that_part_where_one_token_leads_are_a_fault(leads):
    ours, theirs = (Answer((token,), (-0.1,), (lead,)) for token, lead in zip((5, 4), leads, strict=True))
    found = one(ours, theirs)
    assert found.spread.count == 0 and found.ties == 0 and "token 0 differs with leads of 2.010" in found.faults[0]


@pytest.mark.parametrize("logprob", [-0.3 - ALLOWANCE * ROUNDING.worst - 0.001, math.nan])
def test_the_same_token_with_another_probability_is_a_fault(logprob):
    found = one(SAME, Answer(SAME.tokens, (-0.1, -0.2, logprob), SAME.leads))
    assert "log-probabilities of token 2" in found.faults[0]


def test_many_small_differences_are_a_fault_where_no_single_one_is():
    off = ALLOWANCE * ROUNDING.rms + 0.001
    (fault,) = one(SAME, Answer(SAME.tokens, tuple(p + off for p in SAME.logprobs), SAME.leads)).faults
    assert "root mean square" in fault


def test_a_reference_that_does_not_round_but_wander_is_a_fault():
    for rounding in (Spread(100, 0.1, 0.9), Spread(0, 0.0, 0.0), Spread(100, math.nan, math.nan)):
        assert "the reference differs from itself" in one(SAME, SAME, rounding).faults[0]


def test_a_shorter_answer_and_a_missing_one_are_faults():
    assert one(SAME, Answer((5,), (-0.1,), (2.0,))).faults
    assert one(Answer((), (), ()), Answer((), (), ())).faults
    assert compare({"p": SAME}, {}, ROUNDING).faults == ("p: answered by one engine only",)


def test_an_engine_s_own_spread_is_over_all_pairs_until_their_texts_part():
    others = Answer((5, 6, 9), (-0.1, -0.5, -7.0), SAME.leads), Answer((5,), (-0.2,), (2.0,))
    spread = own_spread({"p": (SAME, *others), "q": (SAME,)})
    assert spread.count == 2 + 1 + 1
    assert spread.worst == pytest.approx(0.3)
    assert spread.rms == pytest.approx(math.sqrt((0.3**2 + 2 * 0.1**2) / 4))
