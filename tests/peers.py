"""SGLang's own Triton kernel on a case's inputs: the peer that takes a tree mask."""

import warnings

import torch
from cases import Inputs

from treemla.gate import triton_peer
from treemla.tree import visible_from_words


def load_extend_attention() -> triton_peer.Extend:
    """SGLang's extend_attention_fwd. A suite that needs it fails without it; it does not skip."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return triton_peer.load()
    except Exception as error:
        message = (
            "SGLang's Triton kernel is what this suite compares with, and it could not be imported "
            f"({type(error).__name__}: {error}). Install treemla's `sglang` extra, or put SGLang 0.5.16 .. 0.5.23 and "
            "what it imports on PYTHONPATH."
        )
        raise AssertionError(message) from error


def sglang_extend(inputs: Inputs, *, causal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B*T, H, 512], lse [B*T, H]) of SGLang's tree verify; `causal`: of its chain path, which takes no mask.

    Its k_scale and v_scale reach the context alone (tree tokens are not quantised yet), so here both are folded into
    the score scale and the output, where they mean the same for all tokens.
    """
    case = inputs.case
    out, lse = torch.full_like(inputs.out, torch.nan), torch.full_like(inputs.lse, torch.nan)
    mask = None if causal else _full_mask(inputs)
    taken = inputs.packed_q, inputs.kv_cache, inputs.owned, case.lengths, mask
    run = triton_peer.verify(load_extend_attention(), *taken, sm_scale=inputs.sm_scale * case.k, out=out, lse=lse)
    with warnings.catch_warnings(action="ignore"):  # its own; under the interpreter also log(0) in rows that pad a tile
        run()
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
