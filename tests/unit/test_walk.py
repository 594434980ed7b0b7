"""The accept walk against an oracle that looks at whole paths."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import trees

from treemla.ddtree import accept_walk
from treemla.tree import DraftTree


@st.composite
def drawn_walks(draw: st.DrawFn) -> tuple[DraftTree, np.ndarray, np.ndarray]:
    """A tree whose siblings carry different tokens, and a pick after each token. Few tokens, so that paths match."""
    tree = draw(trees(16))
    tokens = np.zeros(tree.tree_tokens, np.int64)
    for parent in range(tree.tree_tokens):
        children = tree.children(parent)
        tokens[children] = draw(st.permutations(range(max(3, len(children)))))[: len(children)]
    picks = draw(st.lists(st.integers(0, 3), min_size=tree.tree_tokens, max_size=tree.tree_tokens))
    return tree, tokens, np.array(picks)


@given(drawn_walks())
def test_the_longest_path_whose_picks_all_match_is_accepted(walk: tuple[DraftTree, np.ndarray, np.ndarray]) -> None:
    tree, tokens, picks = walk
    accepted, bonus = accept_walk(tree, tokens, picks)
    matching = [
        path
        for path in map(tree.path, range(tree.tree_tokens))
        if all(picks[parent] == tokens[child] for parent, child in itertools.pairwise(path))
    ]
    assert accepted == max(matching, key=len)
    assert bonus == picks[accepted[-1]]


def test_a_chain_is_accepted_up_to_the_first_mismatch() -> None:
    tree, tokens = DraftTree.chain(4), np.array([9, 1, 2, 3])
    assert accept_walk(tree, tokens, np.array([1, 2, 7, 3])) == ([0, 1, 2], 7)
    assert accept_walk(tree, tokens, np.array([1, 2, 3, 5])) == ([0, 1, 2, 3], 5)
    assert accept_walk(tree, tokens, np.array([4, 2, 3, 5])) == ([0], 4)


def test_the_walk_takes_the_branch_that_matches() -> None:
    tree = DraftTree([-1, 0, 1, 0, 3])
    assert accept_walk(tree, np.array([9, 1, 2, 5, 6]), np.array([5, 0, 0, 6, 8])) == ([0, 3, 4], 8)


def test_a_pick_that_equals_a_token_elsewhere_is_not_accepted() -> None:
    """Token 2 exists, below 1 and not below the root."""
    tree = DraftTree([-1, 0, 1])
    assert accept_walk(tree, np.array([9, 1, 2]), np.array([2, 2, 2])) == ([0], 2)


def test_of_siblings_with_the_same_token_the_first_is_taken() -> None:
    tree = DraftTree([-1, 0, 0, 1])
    assert accept_walk(tree, np.array([5, 7, 7, 8]), np.array([7, 8, 9, 1])) == ([0, 1, 3], 1)


def test_a_single_token_gives_its_pick() -> None:
    assert accept_walk(DraftTree.chain(1), np.array([9]), np.array([4])) == ([0], 4)


def test_sizes_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected shape \[2\] each, got \[3\] and \[2\]"):
        accept_walk(DraftTree.chain(2), np.zeros(3), np.zeros(2))
