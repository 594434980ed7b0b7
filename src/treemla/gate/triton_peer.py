"""SGLang's Triton verify kernel, called as its attention backend calls it: the peer that takes a tree mask."""

from collections.abc import Callable, Sequence

import torch

Extend = Callable[..., object]


def load() -> Extend:
    """SGLang's extend_attention_fwd; ImportError says what is missing."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    return extend_attention_fwd  # type: ignore[no-any-return]


def verify(
    extend: Extend,
    q: torch.Tensor,
    kv: torch.Tensor,
    owned: Sequence[torch.Tensor],
    contexts: Sequence[int],
    mask: torch.Tensor | None,
    *,
    sm_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> Callable[[], object]:
    """A callable that enqueues one layer's verify into `out` [B*T, H, 512] and `lse` [B*T, H].

    q: [B*T, H, 576]. kv: [S, 576]. owned: the slots of each request's n_b + T tokens; contexts: n_b. mask: SGLang's
    FULL layout, or None for a chain. The context goes by slot, the tree's keys and values as tensors of their own.
    """
    batch, device = len(contexts), kv.device
    tree_tokens = len(q) // batch
    pool = kv.unsqueeze(1)
    new_rows = pool[torch.cat([slots[n:] for slots, n in zip(owned, contexts, strict=True)])]
    context = torch.cat([slots[:n] for slots, n in zip(owned, contexts, strict=True)])
    arguments = (
        q,
        new_rows,
        new_rows[..., :512].contiguous(),
        out,
        pool,
        pool[..., :512],
        _starts([tree_tokens] * batch, device),
        _starts(contexts, device).int(),
        torch.cat([context, context.new_zeros(1)]),  # never an empty tensor
        mask,
        True,  # is_causal
        None if mask is None else _starts([tree_tokens * (n + tree_tokens) for n in contexts], device),
        tree_tokens,
        1.0,  # k_scale
        1.0,  # v_scale
    )
    wanted = {} if lse is None else {"lse_extend": lse}
    return lambda: extend(*arguments, sm_scale=sm_scale, **wanted)


def _starts(sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *sizes], device=device, dtype=torch.int64).cumsum(0)
