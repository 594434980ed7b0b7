"""Comparing two engines' answers: ties are counted, everything else that differs is a fault."""

import math

import pytest
from e2e.agree import Answer, compare

SAME = Answer((5, 6, 7), (-0.1, -0.2, -0.3), (2.0, 0.01, 3.0))


def one(reference, other):
    return compare({"p": reference}, {"p": other}, tolerance=0.05)


def test_equal_answers_agree_in_every_token():
    found = one(SAME, SAME)
    assert (found.same, found.ties, found.faults) == (3, 0, ())


def test_answers_that_part_where_two_tokens_are_as_likely_are_a_tie():
    found = one(SAME, Answer((5, 9, 9), (-0.1, -0.2, -9.0), (2.0, 0.01, 3.0)))
    assert (found.same, found.ties, found.faults) == (1, 1, ())


def test_answers_that_part_where_one_token_leads_are_a_fault():
    found = one(SAME, Answer((4, 6, 7), SAME.logprobs, SAME.margins))
    assert found.same == 0 and found.ties == 0 and "token 0 is 5 with a lead of 2.000, not 4" in found.faults[0]


@pytest.mark.parametrize("logprob", [-0.4, math.nan])
def test_the_same_token_with_another_probability_is_a_fault(logprob):
    found = one(SAME, Answer(SAME.tokens, (-0.1, -0.2, logprob), SAME.margins))
    assert found.same == 2 and "log-probability of token 2" in found.faults[0]


def test_a_shorter_answer_and_a_missing_one_are_faults():
    assert one(SAME, Answer((5,), (-0.1,), (2.0,))).faults
    assert one(Answer((), (), ()), Answer((), (), ())).faults
    assert compare({"p": SAME}, {}).faults == ("p: answered by one engine only",)
