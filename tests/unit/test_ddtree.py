"""The best-first builder against brute force: all prefixes of small drafts, enumerated."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import log_probs

from treemla.ddtree import best_first_tree, expected_accepted_length, node_tokens
from treemla.tree import DraftTree


def prefixes(scores: np.ndarray) -> dict[tuple[int, ...], float]:
    """Every non-empty rank sequence of positive probability, and its log-probability, summed left to right."""
    found = {}
    for length in range(1, scores.shape[0] + 1):
        for ranks in product(range(scores.shape[1]), repeat=length):
            total = 0.0
            for position, rank in enumerate(ranks):
                total += scores[position, rank]
            if total > -np.inf:
                found[ranks] = total
    return found


def built_prefixes(tree: DraftTree, ranks: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(ranks[tree.path(token)[1:]].tolist()) for token in range(1, tree.tree_tokens)]


@given(log_probs(), st.integers(0, 63))
def test_the_best_prefixes_are_taken(scores: np.ndarray, budget: int) -> None:
    tree, ranks = best_first_tree(scores, budget)
    built, known = built_prefixes(tree, ranks), prefixes(scores)
    best = sorted(known.values(), reverse=True)[:budget]
    assert len(set(built)) == len(built) == min(budget, len(known))
    assert [known[prefix] for prefix in built] == best  # the same scores in the same order: equal up to ties


@given(log_probs(), st.integers(1, 63))
def test_no_tree_of_that_size_is_accepted_longer(scores: np.ndarray, budget: int) -> None:
    tree, ranks = best_first_tree(scores, budget)
    best = sum(sorted(np.exp(list(prefixes(scores).values())), reverse=True)[:budget])
    assert expected_accepted_length(tree, ranks, scores) == pytest.approx(best, abs=1e-12)


@given(log_probs(), st.integers(1, 30))
def test_expected_length_is_what_an_average_draw_accepts(scores: np.ndarray, budget: int) -> None:
    """Over all outcomes of L independent draws: probability times the deepest built prefix that the draw follows."""
    tree, ranks = best_first_tree(scores, budget)
    built = set(built_prefixes(tree, ranks))
    known_mass = np.exp(scores).sum(axis=1) if scores.size else np.zeros(len(scores))
    scores = (
        scores - np.log(np.maximum(known_mass, 1.0))[:, None]
    )  # at most 1 a position; the rest is "no listed token"
    other = 1 - np.minimum(known_mass, 1.0)
    average = 0.0
    for draw in product(range(scores.shape[1] + 1), repeat=scores.shape[0]):
        chances = [other[i] if rank == scores.shape[1] else np.exp(scores[i, rank]) for i, rank in enumerate(draw)]
        average += np.prod(chances) * max(
            length for length in range(len(draw) + 1) if length == 0 or draw[:length] in built
        )
    assert expected_accepted_length(tree, ranks, scores) == pytest.approx(average, abs=1e-9)


@given(log_probs(), st.integers(0, 62))
def test_a_larger_budget_only_appends(scores: np.ndarray, budget: int) -> None:
    """Hence ties are broken one way, and the order is that of probability."""
    small, small_ranks = best_first_tree(scores, budget)
    large, large_ranks = best_first_tree(scores, budget + 1)
    assert large.parents[: small.tree_tokens] == small.parents
    assert large_ranks[: small.tree_tokens].tolist() == small_ranks.tolist()


def test_budget_zero_is_the_root_alone() -> None:
    tree, ranks = best_first_tree(np.log([[0.6, 0.4]]), 0)
    assert tree == DraftTree.chain(1) and ranks.tolist() == [-1]


def test_budget_one_is_the_best_first_token() -> None:
    tree, ranks = best_first_tree(np.log([[0.6, 0.4], [0.9, 0.1]]), 1)
    assert tree == DraftTree.chain(2) and ranks.tolist() == [-1, 0]


def test_a_draft_without_positions_or_tokens_is_the_root_alone() -> None:
    for shape in ((0, 4), (4, 0), (0, 0)):
        assert best_first_tree(np.zeros(shape), 8)[0] == DraftTree.chain(1)


def test_a_budget_beyond_all_prefixes_takes_all() -> None:
    tree, _ = best_first_tree(np.log([[0.6, 0.4], [0.7, 0.3]]), 63)
    assert tree.tree_tokens == 1 + 2 + 4


def test_a_confident_drafter_gives_a_chain() -> None:
    assert best_first_tree(np.log(np.tile([0.9, 0.1], (7, 1))), 7)[0] == DraftTree.chain(8)


def test_heap_order_may_leave_depth_order() -> None:
    tree, ranks = best_first_tree(np.log([[0.6, 0.4], [0.9, 0.1]]), 3)
    assert tree.parents == (-1, 0, 1, 0) and ranks.tolist() == [-1, 0, 0, 1]
    assert tree.depth.tolist() == [0, 1, 2, 1]


def test_ties_go_to_the_lower_ranks_first() -> None:
    tree, ranks = best_first_tree(np.zeros((2, 2)), 6)
    assert built_prefixes(tree, ranks) == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]


def test_tokens_follow_ranks() -> None:
    tree, ranks = best_first_tree(np.log([[0.6, 0.4], [0.9, 0.1]]), 3)
    assert node_tokens(tree, ranks, np.array([[11, 12], [21, 22]]), root_token=5).tolist() == [5, 11, 21, 12]


@pytest.mark.parametrize(
    ("scores", "budget", "message"),
    [
        (np.zeros((1, 1)), -1, "budget: expected 0..63, got -1"),
        (np.zeros((1, 1)), 64, "budget: expected 0..63, got 64"),
        (np.zeros(3), 1, r"log_probs: expected shape \[L, K\], got \[3\]"),
        (np.array([[np.nan]]), 1, "got a NaN or a positive value"),
        (np.array([[0.5]]), 1, "got a NaN or a positive value"),
        (np.array([[-1.0, -2.0], [-2.0, -1.0]]), 1, "expected each position best first, got position 1 unsorted"),
    ],
    ids=["negative", "too-large", "flat", "nan", "probability", "unsorted"],
)
def test_bad_input_is_refused(scores: np.ndarray, budget: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        best_first_tree(scores, budget)
