"""The float64 oracle of the attention contract, written to be read. Slow, and right on any device torch has."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from treemla.problem import rows_at

CHUNK_SCORES = 1 << 26  # scores held at a time: 512 MiB in float64


@dataclass(frozen=True)
class AttentionRows:
    """Some query rows of one request: rows [R] of the flattened [B*T*H], probs [R, N], lse [R], values [N, latent]."""

    rows: slice
    probs: torch.Tensor
    lse: torch.Tensor
    values: torch.Tensor


def attention_rows(
    q: torch.Tensor,
    kv: torch.Tensor,
    slots: Sequence[torch.Tensor],
    committed: Sequence[int],
    words: torch.Tensor | None,
    *,
    sm_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    latent_dim: int = 512,
) -> Iterator[AttentionRows]:
    """Softmax weights of every query row, in float64, a request and a few tree tokens at a time.

    Arguments as `verify_reference`. A row that sees nothing has weights of zero and an lse of -inf.
    """
    heads = q.shape[1]
    tree_tokens = q.shape[0] // len(slots)
    for b, owned in enumerate(slots):
        tree_words = None if words is None else words[b * tree_tokens : (b + 1) * tree_tokens]
        visible = visible_tokens(committed[b], tree_tokens, tree_words, kv.device)
        seen = visible.any(dim=0)  # by some row; nothing else is read, be it NaN
        visible, context = visible[:, seen], rows_at(kv, owned[seen]).double()
        keys, values = context * k_scale, context[:, :latent_dim] * v_scale
        step = max(1, CHUNK_SCORES // (heads * len(owned)))
        for begin in range(0, tree_tokens, step):
            end = min(begin + step, tree_tokens)
            queries = q[b * tree_tokens + begin : b * tree_tokens + end].double()
            scores = sm_scale * (queries @ keys.T)  # [tokens, H, N]
            scores = scores.masked_fill(~visible[begin:end, None, :], -torch.inf).flatten(0, 1)
            lse = scores.logsumexp(dim=-1)
            probs = (scores - lse.masked_fill(lse == -torch.inf, 0)[:, None]).exp()
            first = (b * tree_tokens + begin) * heads
            yield AttentionRows(slice(first, first + len(probs)), probs, lse, values)


def verify_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    slots: Sequence[torch.Tensor],
    committed: Sequence[int],
    words: torch.Tensor | None,
    *,
    sm_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    latent_dim: int = 512,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of B requests' tree tokens over their committed tokens and trees.

    q: [B*T, H, head_dim]; kv: [S, head_dim], the key, of which the first `latent_dim` elements are the value, in any
    floating dtype, 8 bits included;
    slots: one [n_b + T] tensor a request, the rows of kv that hold its tokens in order; committed: n_b;
    words: [B*T] int64, bit j of row i: tree token i sees tree token j; None: a chain. Keys are kv * k_scale, values
    kv * v_scale. Returns out [B*T, H, latent_dim] and lse [B*T, H] (natural log), float64; 0 and -inf where a row
    sees nothing.
    """
    out = q.new_zeros((q.shape[0] * q.shape[1], latent_dim), dtype=torch.float64)
    lse = q.new_full((q.shape[0] * q.shape[1],), -torch.inf, dtype=torch.float64)
    scales = {"sm_scale": sm_scale, "k_scale": k_scale, "v_scale": v_scale}
    for part in attention_rows(q, kv, slots, committed, words, latent_dim=latent_dim, **scales):
        out[part.rows] = part.probs @ part.values
        lse[part.rows] = part.lse
    return out.view(*q.shape[:2], latent_dim), lse.view(*q.shape[:2])


def visible_tokens(committed: int, tree_tokens: int, words: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """[T, committed + T] bool: all committed tokens, and of the tree what the word says (a chain without words)."""
    token = torch.arange(tree_tokens, device=device)
    if words is None:
        tree = token[:, None] >= token
    else:
        tree = (words[:, None] >> token & 1).bool()
    return torch.cat([tree.new_ones((tree_tokens, committed)), tree], dim=1)
