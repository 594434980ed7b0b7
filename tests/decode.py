"""Plain attention of single tokens through treemla: what tree results are compared with."""

import torch
from compare import Expected, expected_attention

from treemla import SlotRanges, VerifyPlan, VerifyShape, verify_attention


def decode(
    q: torch.Tensor, kv_cache: torch.Tensor, slots: list[torch.Tensor], **scales: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row b of q [B, H, 576] over the tokens in slots[b], the last of them its own: T = 1, no words."""
    lengths = torch.tensor([len(seen) for seen in slots], device=q.device)
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    ranges = SlotRanges(starts, torch.cat(slots))
    plan = VerifyPlan(VerifyShape(q.shape[1], 1, dtype=q.dtype, kv_dtype=kv_cache.dtype), len(slots), q.device)
    plan.update(lengths, ranges, tail=1)
    return verify_attention(q, kv_cache, ranges, None, plan, **scales)


def expected_decode(q: torch.Tensor, kv_cache: torch.Tensor, slots: list[torch.Tensor], **scales: float) -> Expected:
    """The oracle's answer to `decode`."""
    return expected_attention(q, kv_cache, slots, [len(seen) - 1 for seen in slots], None, **scales)
