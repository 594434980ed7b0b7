"""Runs a plan with torch, on any device: what the kernels compute, in the plain order they compute it.

One partial a piece (normalised float32 output and base-2 log-sum-exp), then one merge a request in piece order.
Reads the plan on the host, so it is the CPU's path and no graph can record it.
"""

import math

import torch

from treemla.checks import expect
from treemla.plan import VerifyPlan
from treemla.problem import Slots, SlotTable, rows_at
from treemla.schedule import DIRECT, OVERLONG

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


def verify(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: Slots,
    words: torch.Tensor | None,
    plan: VerifyPlan,
    *,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Write out [B*T, H, latent] and lse [B*T, H] (natural log) for checked arguments; kv_cache is [S, head_dim]."""
    shape = plan.shape
    q = torch.cat([q_latent, q_rope], dim=-1).float().view(slots.batch, shape.rows, shape.head_dim)
    out_rows = out.view(slots.batch, shape.rows, shape.latent_dim)
    lse_rows = lse.view(slots.batch, shape.rows)
    partial_out = plan.partial_out.flatten(1, 2)
    partial_lse = plan.partial_lse.flatten(1, 2)
    pieces, request_ptr = plan.pieces.tolist(), plan.request_ptr.tolist()
    for request, committed in enumerate(plan.committed[: slots.batch].tolist()):
        if committed == OVERLONG:
            out_rows[request] = lse_rows[request] = math.nan
            continue
        out_rows[request], lse_rows[request] = 0.0, -math.inf
        visible = visible_tree(words, request, shape.tree_tokens).to(plan.device)
        used_slots = []
        for _, kv_begin, kv_end, slot in pieces[request_ptr[request] : request_ptr[request + 1]]:
            seen, slot_ids = _seen_tokens(slots, request, kv_begin, kv_end, committed, visible)
            kv = rows_at(kv_cache, slot_ids).float()
            scores = q[request] @ kv.T * (sm_scale * k_scale * LOG2_E)
            scores.masked_fill_(~seen.repeat_interleave(shape.num_heads, dim=0), -math.inf)
            piece_out, piece_lse = _softmax_times_values(scores, kv[:, : shape.latent_dim])
            piece_out *= v_scale
            if slot == DIRECT:
                out_rows[request] = piece_out.to(out.dtype)
                lse_rows[request] = piece_lse * LN_2
            else:
                partial_out[slot, : shape.rows] = piece_out
                partial_lse[slot, : shape.rows] = piece_lse
                used_slots.append(slot)
        if used_slots:
            merged_out, merged_lse = combine(
                partial_out[used_slots, : shape.rows], partial_lse[used_slots, : shape.rows]
            )
            out_rows[request] = merged_out.to(out.dtype)
            lse_rows[request] = merged_lse * LN_2


def pack_mask(
    custom_mask: torch.Tensor,
    seq_lens: torch.Tensor,
    words: torch.Tensor,
    *,
    full_layout: bool,
    tree_tokens: int,
    num_padding: int,
) -> None:
    """Write the words of checked arguments. A FULL mask shorter than seq_lens say, or a negative length: ValueError."""
    real = len(seq_lens) - num_padding
    committed = seq_lens[:real].long() if full_layout else seq_lens.new_zeros(real, dtype=torch.int64)
    possible = bool(((committed >= 0) & (committed <= custom_mask.numel())).all())
    expect(possible, "seq_lens", f"lengths in 0..{custom_mask.numel()}, the mask's elements", committed.tolist())
    row_width = committed + tree_tokens
    block_begin = torch.cumsum(tree_tokens * row_width, 0) - tree_tokens * row_width
    needed = int((tree_tokens * row_width).sum())
    expect(needed <= custom_mask.numel(), "custom_mask", f"at least {needed} elements", custom_mask.numel())
    token = torch.arange(tree_tokens, device=words.device)
    row_begin = block_begin[:, None] + token * row_width[:, None] + committed[:, None]  # of the tree columns
    bits = custom_mask.view(-1)[row_begin[:, :, None] + token] != 0
    words.zero_()
    words[: real * tree_tokens] = (bits.long() << token).sum(dim=-1).view(-1)


def combine(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge normalised partials [P, rows, latent] with base-2 lse [P, rows] in the order given.

    A partial of lse -inf weighs nothing; where all are, the result is 0 with lse -inf.
    """
    highest = _finite(lses.amax(dim=0))
    total_out, total = torch.zeros_like(outs[0]), torch.zeros_like(lses[0])
    for piece_out, piece_lse in zip(outs, lses, strict=True):
        weight = torch.exp2(piece_lse - highest)
        total_out += weight[:, None] * piece_out
        total += weight
    return _normalised(total_out, total), highest + torch.log2(total)


def visible_tree(words: torch.Tensor | None, request: int, tree_tokens: int) -> torch.Tensor:
    """[T, T] bool: row i sees tree token j. None is a chain."""
    tokens = torch.arange(tree_tokens)
    if words is None:
        return tokens[None, :] <= tokens[:, None]
    mine = words[request * tree_tokens : (request + 1) * tree_tokens, None].cpu()
    return (mine >> tokens & 1).bool()


def token_slots(slots: Slots, request: int, tokens: torch.Tensor) -> torch.Tensor:
    """Pool slots (int64) of the given tokens of a request."""
    if isinstance(slots, SlotTable):
        return slots.req_to_token[slots.req_pool_indices[request]][tokens].long()
    return slots.kv_indices[slots.kv_indptr[request] + tokens].long()


def _seen_tokens(
    slots: Slots, request: int, kv_begin: int, kv_end: int, committed: int, visible: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(row sees token [T, N] bool, slots [N]) of the tokens in [kv_begin, kv_end) that some row sees.

    The others are left out and not only masked: their slots may hold NaN, which weight 0 would not silence.
    """
    tokens = torch.arange(kv_begin, kv_end, device=visible.device)
    tree_begin = min(max(committed - kv_begin, 0), len(tokens))
    seen = torch.ones(len(visible), len(tokens), dtype=torch.bool, device=visible.device)
    seen[:, tree_begin:] = visible[:, tokens[tree_begin:] - committed]
    anyone_sees = seen.any(dim=0)
    return seen[:, anyone_sees], token_slots(slots, request, tokens[anyone_sees])


def _softmax_times_values(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Base-2 softmax of scores [rows, N] times values [N, latent], and its lse. A row of -inf gives 0 and -inf."""
    if scores.shape[1] == 0:
        return values.new_zeros(len(scores), values.shape[1]), scores.new_full((len(scores),), -math.inf)
    highest = _finite(scores.amax(dim=1))
    weights = torch.exp2(scores - highest[:, None])
    total = weights.sum(dim=1)
    return _normalised(weights @ values, total), highest + torch.log2(total)


def _finite(highest: torch.Tensor) -> torch.Tensor:
    """0 instead of -inf, so that -inf minus it stays -inf and not NaN."""
    return highest.masked_fill(highest == -math.inf, 0.0)


def _normalised(weighted: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The weighted sum over its total, 0 where nothing weighed; NaN stays NaN."""
    return weighted / total.masked_fill(total == 0, 1.0)[:, None]
