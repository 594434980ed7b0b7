"""DDTree (Ringel and Romano, arXiv:2604.12989): the best draft tree of a parallel drafter, and the accept walk.

The drafter gives one distribution a position, none knowing what was taken before. Under that independence the
expected accepted length of a tree is the sum of its nodes' path probabilities, so the best tree of B drafts is the
B most probable prefixes; a prefix is never less probable than its extensions, so they form a tree.
"""

import heapq

import numpy as np

from treemla.problem import MAX_TREE_TOKENS
from treemla.tree import DraftTree


def best_first_tree(log_probs: np.ndarray, budget: int) -> tuple[DraftTree, np.ndarray]:
    """The tree of the `budget` most probable prefixes, root not counted: T = budget + 1, fewer where fewer exist.

    log_probs: [L, K], natural logs of each position's K best tokens, best first.
    Returns the tree, its tokens in the order found (most probable first), and ranks [T] int64: token i drafts the
    token of rank ranks[i] at position depth[i] - 1; ranks[0] = -1. Equal probabilities are taken in order of the
    rank sequence; a token of probability zero is never drafted.
    ValueError where budget is not 0..63 or log_probs are not sorted log-probabilities.
    """
    scores = _checked_log_probs(log_probs)
    if not 0 <= budget < MAX_TREE_TOKENS:
        raise ValueError(f"budget: expected 0..{MAX_TREE_TOKENS - 1}, got {budget}")

    found: dict[tuple[int, ...], int] = {(): 0}  # ranks along the path -> token
    parents, ranks = [-1], [-1]
    heap: list[tuple[float, tuple[int, ...], float]] = []  # (-log p, path, log p of the parent)

    def offer(path: tuple[int, ...], parent_score: float) -> None:
        depth, rank = len(path), path[-1]
        if depth <= scores.shape[0] and rank < scores.shape[1] and scores[depth - 1, rank] > -np.inf:
            heapq.heappush(heap, (-(parent_score + scores[depth - 1, rank]), path, parent_score))

    offer((0,), 0.0)
    while heap and len(parents) <= budget:
        negative_score, path, parent_score = heapq.heappop(heap)
        found[path] = len(parents)
        parents.append(found[path[:-1]])
        ranks.append(path[-1])
        offer((*path[:-1], path[-1] + 1), parent_score)  # next sibling
        offer((*path, 0), -negative_score)  # first child
    return DraftTree(parents), np.array(ranks, np.int64)


def node_tokens(tree: DraftTree, ranks: np.ndarray, top_tokens: np.ndarray, root_token: int) -> np.ndarray:
    """[T] int64 vocabulary ids of a best-first tree. top_tokens: [L, K], the ids that log_probs [L, K] belong to."""
    drafts = top_tokens[tree.depth[1:] - 1, ranks[1:]]
    return np.concatenate([[root_token], drafts]).astype(np.int64)


def accept_walk(tree: DraftTree, tokens: np.ndarray, picks: np.ndarray) -> tuple[list[int], int]:
    """Walk from the root to the child whose token equals the pick, until none does.

    tokens: [T], what each tree token is. picks: [T], what the target chose to follow each. Lossless, since a token's
    pick depends on its ancestors alone. Returns the accepted indices, the root first, and the bonus token: the pick
    that no child matched. Of siblings that carry the same token the first is taken.
    """
    if tokens.shape != (tree.tree_tokens,) or picks.shape != (tree.tree_tokens,):
        got = f"{list(tokens.shape)} and {list(picks.shape)}"
        raise ValueError(f"tokens, picks: expected shape [{tree.tree_tokens}] each, got {got}")
    accepted = [0]
    while True:
        pick = int(picks[accepted[-1]])
        child = next((child for child in tree.children(accepted[-1]) if tokens[child] == pick), None)
        if child is None:
            return accepted, pick
        accepted.append(child)


def expected_accepted_length(tree: DraftTree, ranks: np.ndarray, log_probs: np.ndarray) -> float:
    """Drafts accepted on average if the target draws each position from the drafter's distribution (Prop. 1)."""
    steps = np.zeros(tree.tree_tokens)
    steps[1:] = log_probs[tree.depth[1:] - 1, ranks[1:]]
    return float(np.exp(tree.visible[1:] @ steps).sum())


def _checked_log_probs(log_probs: np.ndarray) -> np.ndarray:
    scores = np.asarray(log_probs, np.float64)
    if scores.ndim != 2:
        raise ValueError(f"log_probs: expected shape [L, K], got {list(scores.shape)}")
    if np.isnan(scores).any() or (scores > 0).any():
        raise ValueError("log_probs: expected values of at most 0, got a NaN or a positive value")
    if (scores[:, 1:] > scores[:, :-1]).any():
        raise ValueError(
            f"log_probs: expected each position best first, got position {_first_unsorted(scores)} unsorted"
        )
    return scores


def _first_unsorted(scores: np.ndarray) -> int:
    return int(np.argwhere(scores[:, 1:] > scores[:, :-1])[0, 0])
