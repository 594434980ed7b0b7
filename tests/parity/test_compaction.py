"""Attention before and after a compaction, on the same tokens in other slots: the same bits."""

import numpy as np
import pytest
import torch
from cases import Case, Inputs, make_inputs

from treemla import SlotTable
from treemla.kv import plan_moves, relocate

CASES = {
    "cpu": [
        Case((70, 0, 33), tree_tokens=9, heads=2, dtype="fp32", tree="random", slots="table32"),
        Case((70, 0, 33), tree_tokens=9, heads=2, dtype="bf16", tree="random", slots="ranges32"),
    ],
    "cuda": [Case((4096, 0, 333), tree_tokens=9, heads=8, dtype="bf16", tree="random", slots="table32")],
}


@pytest.mark.parametrize("budget", [20, 10_000])
def test_attention_does_not_notice_a_compaction(case: Case, device: torch.device, budget: int) -> None:
    inputs = make_inputs(case, device)
    before = [tensor.clone() for tensor in inputs.run()]
    owned = [slots.cpu().numpy() for slots in inputs.owned]
    free = np.setdiff1d(np.arange(1, len(inputs.kv_cache)), np.concatenate(owned))
    moves = plan_moves(owned, free, budget)
    assert 0 < len(moves) <= budget
    relocate(moves, [inputs.kv_cache], holders(inputs), torch.from_numpy(free).to(device), lambda _: None)
    inputs.kv_cache[torch.from_numpy(moves.source).to(device)] = torch.nan  # nobody's now
    after = inputs.run()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def holders(inputs: Inputs) -> list[torch.Tensor]:
    """Each request's slots, as a view of what the kernel reads; around them lie columns that nobody uses."""
    lengths = [len(slots) for slots in inputs.owned]
    if isinstance(inputs.slots, SlotTable):
        rows = inputs.slots.req_pool_indices.tolist()
        return [inputs.slots.req_to_token[row, :n] for row, n in zip(rows, lengths, strict=True)]
    begin = int(inputs.slots.kv_indptr[0])
    return list(inputs.slots.kv_indices[begin : begin + sum(lengths)].split(lengths))
