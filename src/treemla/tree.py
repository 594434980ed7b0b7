"""DraftTree: the tokens a target model verifies in one forward, and SGLang's forms of the same tree.

Token 0 is the root, the last accepted token; the others are drafts. A token sees all committed tokens, its
ancestors and itself. Pure NumPy; nothing here reads a device.
"""

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from treemla.problem import MAX_TREE_TOKENS


@dataclass(frozen=True)
class DraftTree:
    """A draft tree, given by each token's parent: parents[0] = -1 and parents[i] < i.

    Any order with parents first is a tree: depth order is not assumed.
    ValueError where `parents` holds no such tree, TypeError where it does not hold integers.
    """

    parents: tuple[int, ...]

    def __init__(self, parents: Iterable[int]) -> None:
        try:
            held = tuple(operator.index(parent) for parent in parents)
        except TypeError as error:
            raise TypeError(f"parents: expected integers, got {parents!r}") from error
        object.__setattr__(self, "parents", held)
        if not 1 <= len(held) <= MAX_TREE_TOKENS:
            raise ValueError(f"parents: expected 1..{MAX_TREE_TOKENS} tokens, got {len(held)}")
        if held[0] != -1:
            raise ValueError(f"parents[0]: expected -1 (the root), got {held[0]}")
        for token, parent in enumerate(held[1:], start=1):
            if not 0 <= parent < token:
                what = f"0..{token - 1} (a parent precedes its child, and no token is its own ancestor)"
                raise ValueError(f"parents[{token}]: expected {what}, got {parent}")

    @classmethod
    def chain(cls, tree_tokens: int) -> "DraftTree":
        """Each token the child of the one before it: what plain speculation verifies."""
        return cls(range(-1, tree_tokens - 1))

    @classmethod
    def from_mask(cls, mask: np.ndarray) -> "DraftTree":
        """The tree of a boolean mask [T, committed + T]; committed = 0 is SGLang's QLEN_ONLY form of one request.

        ValueError where a committed column is hidden, or the last T columns are not the ancestor closure of a tree.
        """
        if mask.ndim != 2 or mask.shape[1] < mask.shape[0]:
            raise ValueError(f"mask: expected shape [T, committed + T], got {list(mask.shape)}")
        tree_tokens, width = mask.shape
        committed, visible = np.split(mask.astype(bool), [width - tree_tokens], axis=1)
        if not committed.all():
            row, column = np.argwhere(~committed)[0]
            raise ValueError(f"mask[{row}, {column}]: expected True (a committed token), got False")
        parents = [-1]
        for token in range(tree_tokens):
            if not visible[token, token]:
                raise ValueError(f"mask: expected token {token} to see itself, got False on the diagonal")
            seen = np.flatnonzero(visible[token])
            if seen[-1] > token:
                raise ValueError(f"mask: expected a lower triangle, got token {token} seeing token {seen[-1]}")
            if token > 0 and len(seen) == 1:
                raise ValueError(f"mask: expected token {token} to see the root, got a token that sees itself alone")
            if token > 0:
                parents.append(int(seen[-2]))  # the latest token seen, itself aside: if this is a tree, the parent
        tree = cls(parents)
        if (tree.visible != visible).any():
            token, other = np.argwhere(tree.visible != visible)[0]
            verb = "see" if tree.visible[token, other] else "not see"
            because = f"it sees its parent {parents[token]}"
            raise ValueError(f"mask: expected token {token} to {verb} token {other}, since {because}")
        return tree

    @property
    def tree_tokens(self) -> int:
        return len(self.parents)

    @cached_property
    def visible(self) -> np.ndarray:
        """[T, T] bool: row i sees column j. Ancestors and itself."""
        seen = np.eye(self.tree_tokens, dtype=bool)
        for token, parent in enumerate(self.parents[1:], start=1):
            seen[token] |= seen[parent]
        seen.flags.writeable = False
        return seen

    @cached_property
    def depth(self) -> np.ndarray:
        """[T] int64: edges from the root. Siblings share a depth."""
        edges: np.ndarray = self.visible.sum(axis=1) - 1
        edges.flags.writeable = False
        return edges

    @property
    def words(self) -> np.ndarray:
        """[T] uint64: bit j of word i is set where token i sees token j, itself included."""
        return words_from_visible(self.visible)

    def positions(self, seq_len: int) -> np.ndarray:
        """[T] int64: position ids after `seq_len` committed tokens. Depth counts, not index: siblings share one."""
        return seq_len + self.depth

    def path(self, token: int) -> list[int]:
        """Root .. token: what `token` sees, in order."""
        return np.flatnonzero(self.visible[token]).tolist()

    def children(self, token: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == token]

    def mask(self, committed: int = 0) -> np.ndarray:
        """[T, committed + T] bool, what `from_mask` reads: committed columns True, then the tree."""
        return np.pad(self.visible, ((0, 0), (committed, 0)), constant_values=True)


def words_from_visible(visible: np.ndarray) -> np.ndarray:
    """[.., T, T] bool -> [.., T] uint64, column j to bit j."""
    bits = np.left_shift(np.uint64(1), np.arange(visible.shape[-1], dtype=np.uint64))
    words: np.ndarray = np.bitwise_or.reduce(np.where(visible, bits, np.uint64(0)), axis=-1)
    return words


def visible_from_words(words: np.ndarray, tree_tokens: int) -> np.ndarray:
    """[..] uint64 or int64 -> [.., tree_tokens] bool, bit j to column j."""
    bits = np.arange(tree_tokens, dtype=np.uint64)
    return (words.view(np.uint64)[..., None] >> bits & np.uint64(1)).astype(bool)


def batch_words(trees: Sequence[DraftTree], tree_tokens: int) -> np.ndarray:
    """[B * tree_tokens] int64, the form `verify_attention` takes (torch has no uint64 arithmetic).

    A tree smaller than `tree_tokens` is padded by words of zero: such a row sees committed tokens alone.
    """
    words = np.zeros((len(trees), tree_tokens), np.uint64)
    for row, tree in zip(words, trees, strict=True):
        _expect_at_most(tree, tree_tokens)
        row[: tree.tree_tokens] = tree.words
    return words.view(np.int64).reshape(-1)


def full_mask(trees: Sequence[DraftTree], seq_lens: Sequence[int]) -> np.ndarray:
    """SGLang's FULL mask of a batch: flat bool; request b spans T * (seq_lens[b] + T) entries, rows one by one."""
    blocks = [tree.mask(seq_len).reshape(-1) for tree, seq_len in zip(trees, seq_lens, strict=True)]
    return np.concatenate(blocks) if blocks else np.zeros(0, bool)


def full_mask_offsets(seq_lens: Sequence[int], tree_tokens: int) -> np.ndarray:
    """[B+1] int64: where each request's block of the FULL mask begins (SGLang's mask_indptr)."""
    sizes = tree_tokens * (np.asarray(seq_lens, np.int64) + tree_tokens)
    return np.concatenate([[0], np.cumsum(sizes)])


def trees_from_full_mask(mask: np.ndarray, seq_lens: Sequence[int], tree_tokens: int) -> list[DraftTree]:
    """The trees of a flat FULL mask. ValueError as `DraftTree.from_mask`, and where its size does not fit."""
    offsets = full_mask_offsets(seq_lens, tree_tokens)
    if mask.shape != (offsets[-1],):
        raise ValueError(f"mask: expected shape [{offsets[-1]}] for {len(seq_lens)} requests, got {list(mask.shape)}")
    spans = itertools.pairwise(offsets)
    return [DraftTree.from_mask(mask[begin:end].reshape(tree_tokens, -1)) for begin, end in spans]


def qlen_mask(trees: Sequence[DraftTree]) -> np.ndarray:
    """SGLang's QLEN_ONLY mask of a batch: flat bool, T * T entries a request, no committed columns."""
    return full_mask(trees, [0] * len(trees))


def trees_from_qlen_mask(mask: np.ndarray, tree_tokens: int) -> list[DraftTree]:
    """The trees of a flat QLEN_ONLY mask. ValueError as `DraftTree.from_mask`, and where its size does not fit."""
    requests, rest = divmod(mask.size, tree_tokens * tree_tokens)
    if rest:
        raise ValueError(f"mask: expected a multiple of {tree_tokens}^2 entries, got {mask.size}")
    return trees_from_full_mask(mask.reshape(-1), [0] * requests, tree_tokens)


def retrieve_links(trees: Sequence[DraftTree], tree_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """EAGLE's linked form: (retrieve_index, retrieve_next_token, retrieve_next_sibling), each [B, tree_tokens] int64.

    retrieve_index counts rows of the whole batch; next_token is a token's first child and next_sibling its
    parent's next child, both within the request, -1 for none. Siblings are linked in ascending order.
    Padding rows of a smaller tree are linked from nowhere.
    """
    index = np.arange(len(trees) * tree_tokens, dtype=np.int64).reshape(len(trees), tree_tokens)
    next_token, next_sibling = np.full_like(index, -1), np.full_like(index, -1)
    for b, tree in enumerate(trees):
        _expect_at_most(tree, tree_tokens)
        for token in reversed(range(1, tree.tree_tokens)):
            parent = tree.parents[token]
            next_sibling[b, token] = next_token[b, parent]
            next_token[b, parent] = token
    return index, next_token, next_sibling


def tree_from_retrieve_links(next_token: np.ndarray, next_sibling: np.ndarray) -> DraftTree:
    """The tree of one request's links, each [T]; siblings may be linked in any order.

    Rows at the end that nothing links to are padding and left out. ValueError where a link leaves the request,
    a token is reached twice, or a token in the middle is not reached.
    """
    tree_tokens = len(next_token)
    if next_token.shape != (tree_tokens,) or next_sibling.shape != (tree_tokens,):
        raise ValueError(f"links: expected two [T], got {list(next_token.shape)} and {list(next_sibling.shape)}")
    parents = {0: -1}
    waiting = [0]
    while waiting:
        parent = waiting.pop()
        child = int(next_token[parent])
        while child != -1:
            if not 0 <= child < tree_tokens or child in parents:
                raise ValueError(
                    f"links: expected each of 0..{tree_tokens - 1} reached once, got {child} under {parent}"
                )
            parents[child] = parent
            waiting.append(child)
            child = int(next_sibling[child])
    if sorted(parents) != list(range(len(parents))):
        raise ValueError(f"links: expected every token before the padding reached, got {sorted(parents)}")
    return DraftTree(parents[token] for token in range(len(parents)))


def _expect_at_most(tree: DraftTree, tree_tokens: int) -> None:
    if tree.tree_tokens > tree_tokens:
        raise ValueError(f"trees: expected at most {tree_tokens} tokens, got a tree of {tree.tree_tokens}")
