"""SGLang's own Triton kernel on a case's inputs: the peer that takes a tree mask."""

import warnings

import torch
from cases import Inputs

from treemla.tree import visible_from_words

WHERE = "sglang.kernels.ops.attention.extend_attention"


def load_extend_attention():
    """SGLang's extend_attention_fwd. A suite that needs it fails without it; it does not skip."""
    try:
        with warnings.catch_warnings(action="ignore"):
            from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
    except Exception as error:
        message = (
            f"SGLang's Triton kernel is what this suite compares with, and {WHERE} could not be imported "
            f"({type(error).__name__}: {error}). Install treemla's `sglang` extra, or put SGLang 0.5.16 .. 0.5.23 and "
            "what it imports on PYTHONPATH."
        )
        raise AssertionError(message) from error
    return extend_attention_fwd


def sglang_extend(inputs: Inputs, *, causal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B*T, H, 512], lse [B*T, H]) of SGLang's tree verify; `causal`: of its chain path, which takes no mask.

    As SGLang calls it: the context through slot indices, the tree's own keys and values as contiguous tensors, a
    FULL boolean mask. Its k_scale and v_scale reach the context alone (tree tokens are not quantised yet), so here
    both are folded into the score scale and the output, where they mean the same for all tokens.
    """
    extend_attention_fwd = load_extend_attention()
    case, device = inputs.case, inputs.kv_cache.device
    tree_tokens = case.tree_tokens
    pool = inputs.kv_cache[:, None]
    tree_slots = torch.cat([owned[n:] for owned, n in zip(inputs.owned, case.lengths, strict=True)])
    context = torch.cat([owned[:n] for owned, n in zip(inputs.owned, case.lengths, strict=True)])
    context = torch.cat([context, context.new_zeros(1)])  # never an empty tensor
    out = torch.full_like(inputs.out, torch.nan)
    lse = torch.full_like(inputs.lse, torch.nan)
    lengths = torch.tensor(case.lengths, device=device)
    with warnings.catch_warnings(action="ignore"):  # its own; under the interpreter also log(0) in rows that pad a tile
        extend_attention_fwd(
            inputs.packed_q,
            pool[tree_slots],
            pool[tree_slots, :, :512].contiguous(),
            out,
            pool,
            pool[..., :512],
            torch.arange(case.batch + 1, device=device, dtype=torch.int64) * tree_tokens,
            _starts(lengths).int(),
            context,
            None if causal else _full_mask(inputs),
            True,
            None if causal else _starts(tree_tokens * (lengths + tree_tokens)),
            tree_tokens,
            1.0,
            1.0,
            sm_scale=inputs.sm_scale * case.k,
            lse_extend=lse,
        )
    return out.double() * case.v, lse


def _full_mask(inputs: Inputs) -> torch.Tensor:
    """Flat uint8, SGLang's FULL layout: committed columns 1, then the words' bits."""
    tree_tokens = inputs.case.tree_tokens
    if inputs.words is None:
        visible = torch.ones(tree_tokens, tree_tokens, dtype=torch.bool).tril().repeat(inputs.case.batch, 1)
    else:
        visible = torch.from_numpy(visible_from_words(inputs.words.cpu().numpy(), tree_tokens))
    visible = visible.view(inputs.case.batch, tree_tokens, tree_tokens).to(inputs.kv_cache.device)
    blocks = [
        torch.cat([tree.new_ones(tree_tokens, n), tree], dim=1).flatten()
        for tree, n in zip(visible, inputs.case.lengths, strict=True)
    ]
    return torch.cat(blocks).to(torch.uint8)


def _starts(sizes: torch.Tensor) -> torch.Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
