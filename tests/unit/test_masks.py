"""SGLang's forms of a tree: boolean masks in both layouts, and EAGLE's retrieve links."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import trees

from treemla.tree import (
    DraftTree,
    full_mask,
    full_mask_offsets,
    qlen_mask,
    retrieve_links,
    tree_from_retrieve_links,
    trees_from_full_mask,
    trees_from_qlen_mask,
)

TREE = DraftTree([-1, 0, 0, 1])


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[DraftTree], list[int]]:
    """Trees of one size with lengths of their own."""
    drawn = draw(st.lists(trees(12), min_size=1, max_size=4))
    size = min(tree.tree_tokens for tree in drawn)
    same_size = [DraftTree(tree.parents[:size]) for tree in drawn]
    return same_size, draw(st.lists(st.integers(0, 9), min_size=len(drawn), max_size=len(drawn)))


@given(batches())
def test_full_masks_give_back_their_trees(batch: tuple[list[DraftTree], list[int]]) -> None:
    made, lengths = batch
    assert trees_from_full_mask(full_mask(made, lengths), lengths, made[0].tree_tokens) == made


@given(batches())
def test_qlen_masks_give_back_their_trees(batch: tuple[list[DraftTree], list[int]]) -> None:
    made, _ = batch
    assert trees_from_qlen_mask(qlen_mask(made), made[0].tree_tokens) == made


@given(batches())
def test_a_full_mask_lies_where_sglang_reads_it(batch: tuple[list[DraftTree], list[int]]) -> None:
    """Entry (i, j) of request b: offset[b] + i * (n + T) + n + j, and every committed column is set."""
    made, lengths = batch
    tree_tokens, mask = made[0].tree_tokens, full_mask(made, lengths)
    for b, (tree, n) in enumerate(zip(made, lengths, strict=True)):
        offset = sum(tree_tokens * (length + tree_tokens) for length in lengths[:b])
        assert full_mask_offsets(lengths, tree_tokens)[b] == offset
        for i in range(tree_tokens):
            row = mask[offset + i * (n + tree_tokens) :][: n + tree_tokens]
            assert row[:n].all() and (row[n:] == tree.visible[i]).all()


def changed(row: int, column: int, value: bool) -> np.ndarray:
    mask = TREE.mask(2)
    mask[row, 2 + column] = value
    return mask


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (changed(1, 1, False), "expected token 1 to see itself, got False on the diagonal"),
        (changed(0, 0, False), "expected token 0 to see itself, got False on the diagonal"),
        (changed(1, 3, True), "expected a lower triangle, got token 1 seeing token 3"),
        (changed(3, 0, False), "expected token 3 to see token 0, since it sees its parent 1"),
        (changed(3, 2, True), "expected token 3 to not see token 1, since it sees its parent 2"),
        (changed(2, 0, False), "expected token 2 to see the root, got a token that sees itself alone"),
        (changed(2, -1, False), r"mask\[2, 1\]: expected True \(a committed token\), got False"),
        (np.ones((3, 2), bool), r"expected shape \[T, committed \+ T\], got \[3, 2\]"),
        (np.ones(9, bool), r"expected shape \[T, committed \+ T\], got \[9\]"),
    ],
    ids=["diagonal", "root", "later", "not-closed", "two-branches", "orphan", "committed", "narrow", "flat"],
)
def test_a_mask_that_is_no_closure_is_refused(mask: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftTree.from_mask(mask)


@given(trees(10), st.data())
def test_one_flipped_entry_is_no_longer_this_tree(tree: DraftTree, data: st.DataObject) -> None:
    """Either another tree or an error: no entry of a mask goes unread."""
    mask = tree.mask(1)
    row, column = data.draw(st.integers(0, tree.tree_tokens - 1)), data.draw(st.integers(0, tree.tree_tokens))
    mask[row, column] ^= True
    with contextlib.suppress(ValueError):
        assert DraftTree.from_mask(mask) != tree


def test_masks_of_a_wrong_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mask: expected shape \[24\] for 1 requests, got \[23\]"):
        trees_from_full_mask(full_mask([TREE], [2])[1:], [2], 4)
    with pytest.raises(ValueError, match=r"mask: expected a multiple of 4\^2 entries, got 15"):
        trees_from_qlen_mask(qlen_mask([TREE])[1:], 4)


@given(batches(), st.integers(0, 3))
def test_links_give_back_their_trees(batch: tuple[list[DraftTree], list[int]], padding: int) -> None:
    made, _ = batch
    tree_tokens = made[0].tree_tokens + padding
    index, next_token, next_sibling = retrieve_links(made, tree_tokens)
    assert index.tolist() == np.arange(len(made) * tree_tokens).reshape(len(made), -1).tolist()
    assert [tree_from_retrieve_links(*links) for links in zip(next_token, next_sibling, strict=True)] == made


@given(trees(20))
def test_links_name_first_child_and_next_sibling(tree: DraftTree) -> None:
    _, next_token, next_sibling = (links[0].tolist() for links in retrieve_links([tree], tree.tree_tokens))
    for token in range(tree.tree_tokens):
        linked, child = [], next_token[token]
        while child != -1:
            linked.append(child)
            child = next_sibling[child]
        assert linked == tree.children(token)


@pytest.mark.parametrize(
    ("next_token", "next_sibling", "message"),
    [
        ([1, 0, -1], [-1, -1, -1], "reached once, got 0 under 1"),
        ([1, -1, -1], [-1, 1, -1], "reached once, got 1 under 0"),
        ([3, -1, -1], [-1, -1, -1], "reached once, got 3 under 0"),
        ([2, -1, -1], [-1, -1, -1], r"expected every token before the padding reached, got \[0, 2\]"),
        ([2, -1, 1], [-1, -1, -1], r"parents\[1\]: expected 0\.\.0"),
    ],
    ids=["cycle", "sibling-cycle", "outside", "gap", "child-first"],
)
def test_links_that_are_no_tree_are_refused(next_token: list[int], next_sibling: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree_from_retrieve_links(np.array(next_token), np.array(next_sibling))
