"""SGLang's Triton verify kernel, called as its attention backend calls it: the peer that treemla is compared with."""

from collections.abc import Callable

import torch

from treemla.gate.inputs import SM_SCALE, Inputs

Extend = Callable[..., object]


def load() -> Extend:
    """SGLang's extend_attention_fwd; ImportError says what is missing."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    return extend_attention_fwd  # type: ignore[no-any-return]


def layer(extend: Extend, inputs: Inputs, kv: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    """A callable that enqueues one layer's verify on `kv` [S, 576] into `out` [B*T, H, 512]."""
    case, device = inputs.case, kv.device
    prefix, tree = zip(*(owned.split([n, case.tree_tokens]) for owned, n in zip(inputs.owned, case.contexts, strict=True)),
                       strict=True)  # fmt: skip
    new_rows = kv[torch.cat(tree)].unsqueeze(1)

    def starts(sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([0, *sizes], device=device).cumsum(0).to(dtype)

    qo_indptr = starts([case.tree_tokens] * case.batch, torch.int64)
    kv_indptr = starts(list(case.contexts), torch.int32)
    mask_indptr = starts([case.tree_tokens * (n + case.tree_tokens) for n in case.contexts], torch.int64)
    kv_indices = torch.cat(prefix)
    k_buffer = kv.unsqueeze(1)
    k_new, v_new = new_rows.contiguous(), new_rows[..., :512].contiguous()

    def enqueue() -> None:
        extend(
            inputs.q,
            k_new,
            v_new,
            out,
            k_buffer,
            k_buffer[..., :512],
            qo_indptr,
            kv_indptr,
            kv_indices,
            inputs.mask,
            True,  # is_causal
            mask_indptr,
            case.tree_tokens,
            1.0,  # k_scale
            1.0,  # v_scale
            sm_scale=SM_SCALE,
        )

    return enqueue
