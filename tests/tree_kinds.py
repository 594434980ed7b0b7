"""Trees by kind, size and seed."""

import numpy as np

from treemla.ddtree import best_first_tree
from treemla.tree import DraftTree

TREE_KINDS = ("chain", "star", "comb", "random", "ddtree")


def make_tree(kind: str, tree_tokens: int, seed: int) -> DraftTree:
    """A tree of `kind`. ddtree: the best-first tree of random marginals, in the order found."""
    random = np.random.default_rng(seed)
    if kind == "ddtree":
        depth, confidence = (7 if tree_tokens <= 17 else 15), random.choice([1.0, 2.0, 4.0])
        logits = np.sort(confidence * random.standard_normal((depth, 64)), axis=1)[:, ::-1]
        log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return best_first_tree(log_probs, tree_tokens - 1)[0]
    parents = {
        "chain": lambda token: token - 1,
        "star": lambda _: 0,
        "comb": lambda token: token - 1 if token % 2 else token - 2,  # a spine of even tokens, each with a leaf
        "random": lambda token: int(random.integers(max(0, token - 6), token)),
    }[kind]
    return DraftTree([-1] + [parents(token) for token in range(1, tree_tokens)])
