"""What hypothesis draws: trees, marginals and small parity cases. Sizes stay small; edges come often."""

import numpy as np
from cases import DTYPES, FAMILIES, FP8_DTYPES, KV_DTYPES, SLOTS, TREES, Case
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from treemla.problem import PAGE_SIZES
from treemla.tree import DraftTree

EDGES = (0, 1, 2, 30, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129)


def trees(max_tokens: int = 64) -> st.SearchStrategy[DraftTree]:
    """Any tree with parents first, near-chains and near-stars included."""

    @st.composite
    def draw_tree(draw: st.DrawFn) -> DraftTree:
        tree_tokens = draw(st.integers(1, max_tokens))
        reach = draw(st.sampled_from([1, 2, 5, tree_tokens]))  # how far back a parent may be
        parents = [draw(st.integers(max(0, token - reach), token - 1)) for token in range(1, tree_tokens)]
        return DraftTree([-1, *parents])

    return draw_tree()


def log_probs(max_positions: int = 3, max_ranks: int = 4) -> st.SearchStrategy[np.ndarray]:
    """[L, K] log-probabilities, each position best first. From a few values, so that ties are common."""
    shapes = st.tuples(st.integers(0, max_positions), st.integers(0, max_ranks))
    values = st.sampled_from([0.0, -0.25, -0.5, -1.0, -1.75, -3.0, -np.inf])
    return shapes.flatmap(lambda shape: arrays(np.float64, shape, elements=values)).map(
        lambda drawn: np.sort(drawn, axis=1)[:, ::-1]
    )


def cases(device_type: str, kinds: tuple[str, ...] = TREES) -> st.SearchStrategy[Case]:
    """Small parity cases for a device, with trees of these kinds: every field drawn, within what its path takes."""
    on_gpu = device_type == "cuda"
    length = st.one_of(st.sampled_from(EDGES), st.integers(0, 900 if on_gpu else 150))

    @st.composite
    def draw_case(draw: st.DrawFn) -> Case:
        lengths = tuple(draw(st.lists(length, min_size=1, max_size=6 if on_gpu else 4)))
        tree = draw(st.sampled_from(kinds))
        padding = draw(st.integers(0, 2)) if tree != "none" else 0
        split = draw(st.sampled_from([0, 0, 0, 32, 96]))
        dtype = "bf16" if on_gpu else draw(st.sampled_from(list(DTYPES)))
        return Case(
            lengths + (0,) * padding,
            tree_tokens=draw(st.integers(1, 64 if on_gpu else 20)),
            heads=draw(st.integers(1, 40 if on_gpu else 6)),
            page_size=draw(st.sampled_from(PAGE_SIZES)),
            dtype=dtype,
            kv="" if dtype not in FP8_DTYPES else draw(st.sampled_from(list(KV_DTYPES))),
            tree=tree,
            family=draw(st.sampled_from(FAMILIES)),
            slots=draw(st.sampled_from(SLOTS)),
            parts=draw(st.integers(0, 70)),
            split=split,
            padding=padding,
            pair=draw(st.integers(0, 1)),
        )

    return draw_case()
