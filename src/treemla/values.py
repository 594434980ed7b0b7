"""The debug check of a verify call: what the tensors' values promise. Reads them on the host."""

import torch

from treemla.checks import expect
from treemla.plan import VerifyPlan
from treemla.portable import token_slots, visible_tree
from treemla.problem import Slots, SlotTable
from treemla.schedule import OVERLONG


def expect_values(slots: Slots, words: torch.Tensor | None, plan: VerifyPlan, pool_slots: int) -> None:
    """Raise ValueError for tree words, lengths or slot indices that no correct caller passes."""
    if words is not None:
        _expect_words(words, plan.shape.tree_tokens)
    capacity = _expect_capacity(slots)
    for request, committed in enumerate(plan.committed[: slots.batch].tolist()):
        tokens, room = committed + plan.shape.tree_tokens, int(capacity[request])
        too_long = committed == OVERLONG or tokens > room
        got = "more" if committed == OVERLONG else tokens
        expect(not too_long, "seq_lens", f"at most {room} slots, tree included, for request {request}", got)
        _expect_slots_in_pool(slots, words, plan, request, committed, pool_slots)


def _expect_words(words: torch.Tensor, tree_tokens: int) -> None:
    """Each word is 0 (padding), or holds its own bit and none above it."""
    held = words.cpu()
    own = torch.ones_like(held) << torch.arange(len(held)) % tree_tokens
    wrong = ((held & own == 0) | (held & ~(own | (own - 1)) != 0)) & (held != 0)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        rule = f"bit {row % tree_tokens} and no higher one in word {row}, or 0"
        expect(False, "words", rule, f"{int(held[row]) % 2**64:#x}")


def _expect_capacity(slots: Slots) -> torch.Tensor:
    """[B] slots each request has, after checking that the tables point into each other."""
    if isinstance(slots, SlotTable):
        rows, columns = slots.req_to_token.shape
        _expect_between("slots.req_pool_indices", slots.req_pool_indices, 0, rows)
        return torch.full((slots.batch,), columns)
    indptr = slots.kv_indptr.cpu().long()
    _expect_between("slots.kv_indptr", indptr, 0, len(slots.kv_indices) + 1)
    return indptr.diff()


def _expect_slots_in_pool(
    slots: Slots, words: torch.Tensor | None, plan: VerifyPlan, request: int, committed: int, pool_slots: int
) -> None:
    """Slots that the request reads lie in the pool; a tree token that no row sees is not read."""
    seen = visible_tree(words, request, plan.shape.tree_tokens).any(dim=0).nonzero()[:, 0]
    tokens = torch.cat([torch.arange(committed), committed + seen]).to(plan.device)
    _expect_between(f"slots of request {request}", token_slots(slots, request, tokens), 0, pool_slots)


def _expect_between(name: str, values: torch.Tensor, low: int, end: int) -> None:
    outside = values[(values < low) | (values >= end)]
    expect(len(outside) == 0, name, f"values in [{low}, {end})", int(outside[0]) if len(outside) else None)
