"""DraftTree: what is a tree, and what its depth, words and positions say."""

import numpy as np
import pytest
from hypothesis import given
from strategies import trees

from treemla.tree import DraftTree, batch_words, visible_from_words


def ancestors(tree: DraftTree, token: int) -> list[int]:
    """Root .. token, by walking up."""
    path = [token]
    while tree.parents[path[-1]] != -1:
        path.append(tree.parents[path[-1]])
    return path[::-1]


@given(trees())
def test_a_token_sees_its_ancestors_and_itself(tree: DraftTree) -> None:
    for token in range(tree.tree_tokens):
        word = sum(1 << ancestor for ancestor in ancestors(tree, token))
        assert int(tree.words[token]) == word
        assert tree.path(token) == ancestors(tree, token)


@given(trees())
def test_depth_counts_edges_and_positions_follow_depth(tree: DraftTree) -> None:
    assert tree.depth.tolist() == [len(ancestors(tree, token)) - 1 for token in range(tree.tree_tokens)]
    assert tree.positions(1000).tolist() == [1000 + depth for depth in tree.depth]


def test_siblings_share_a_position() -> None:
    tree = DraftTree([-1, 0, 0, 1, 0])
    assert tree.positions(7).tolist() == [7, 8, 8, 9, 8]


@given(trees())
def test_children_are_those_who_name_the_parent(tree: DraftTree) -> None:
    listed = [(parent, child) for parent in range(tree.tree_tokens) for child in tree.children(parent)]
    assert sorted(listed) == sorted((parent, child) for child, parent in enumerate(tree.parents) if child)


@pytest.mark.parametrize("tree_tokens", [1, 2, 9, 63, 64])
def test_a_chain_sees_a_lower_triangle(tree_tokens: int) -> None:
    chain = DraftTree.chain(tree_tokens)
    assert (chain.visible == np.tri(tree_tokens, dtype=bool)).all()
    assert chain.depth.tolist() == list(range(tree_tokens))
    assert int(chain.words[-1]) == 2**tree_tokens - 1


def test_the_last_bit_of_a_word_survives_as_int64() -> None:
    words = batch_words([DraftTree.chain(64)], 64)
    assert words.dtype == np.int64 and words[-1] == -1
    assert (visible_from_words(words, 64) == np.tri(64, dtype=bool)).all()


def test_words_of_a_smaller_tree_are_padded_by_zero() -> None:
    words = batch_words([DraftTree.chain(2), DraftTree([-1, 0, 0])], 3)
    assert words.tolist() == [0b1, 0b11, 0, 0b1, 0b11, 0b101]
    with pytest.raises(ValueError, match="at most 2 tokens, got a tree of 3"):
        batch_words([DraftTree.chain(3)], 2)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([], "parents: expected 1..64 tokens, got 0"),
        ([-1] + [0] * 64, "parents: expected 1..64 tokens, got 65"),
        ([0], r"parents\[0\]: expected -1 \(the root\), got 0"),
        ([1, 0], r"parents\[0\]: expected -1 \(the root\), got 1"),
        ([-1, 1], r"parents\[1\]: expected 0\.\.0 .*no token is its own ancestor.*, got 1"),
        ([-1, 2, 1], r"parents\[1\]: expected 0\.\.0 .*, got 2"),
        ([-1, 0, 3, 2], r"parents\[2\]: expected 0\.\.1 .*a parent precedes its child.*, got 3"),
        ([-1, 0, -1], r"parents\[2\]: expected 0\.\.1 .*, got -1"),
        ([-1, 0, -2], r"parents\[2\]: expected 0\.\.1 .*, got -2"),
    ],
    ids=["empty", "too-many", "self-root", "late-root", "self", "cycle", "parent-after-child", "two-roots", "negative"],
)
def test_what_is_no_tree_is_refused(parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftTree(parents)


def test_parents_that_are_no_integers_are_refused() -> None:
    with pytest.raises(TypeError, match="parents: expected integers, got"):
        DraftTree([-1, 0.0])  # type: ignore[list-item]


def test_trees_are_values() -> None:
    assert DraftTree(np.array([-1, 0, 0])) == DraftTree((-1, 0, 0))
    assert len({DraftTree.chain(3), DraftTree([-1, 0, 1])}) == 1
    with pytest.raises(ValueError, match="read-only"):
        DraftTree.chain(3).depth[0] = 1
