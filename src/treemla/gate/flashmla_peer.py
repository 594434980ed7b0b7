"""FlashMLA's dense decode kernel as sglang-kernel ships it: causal, sm_90a alone, page size 64 alone."""

from collections.abc import Callable, Sequence

import torch

from treemla.gate.inputs import SM_SCALE, Inputs

PAGE_SIZE = 64
Kernels = tuple[Callable[..., tuple[torch.Tensor, torch.Tensor]], Callable[..., tuple[torch.Tensor, torch.Tensor]]]


def load() -> Kernels:
    """get_mla_metadata, which plans a step, and flash_mla_with_kvcache; ImportError says what is missing."""
    from sgl_kernel import flash_mla

    if problem := getattr(flash_mla, "_flashmla_import_error", None):  # which it raises only once it is called
        raise ImportError(f"sgl_kernel.flashmla_ops: {problem}")
    return flash_mla.get_mla_metadata, flash_mla.flash_mla_with_kvcache


def layers(kernels: Kernels, inputs: Inputs, kv_layers: Sequence[torch.Tensor]) -> list[Callable[[], torch.Tensor]]:
    """A callable a layer, which enqueues its causal verify and returns what it allocated for it: [B*T, H, 512].

    The plan and the block table are the same for all layers, as in SGLang's flashmla backend.
    """
    plan, attend = kernels
    case, device = inputs.case, inputs.q.device
    lengths = torch.tensor([len(slots) for slots in inputs.owned], dtype=torch.int32, device=device)
    blocks = [(slots[::PAGE_SIZE] // PAGE_SIZE).int() for slots in inputs.owned]
    block_table = torch.zeros(case.batch, max(map(len, blocks)), dtype=torch.int32, device=device)
    for row, held in zip(block_table, blocks, strict=True):
        row[: len(held)] = held
    metadata, num_splits = plan(lengths, case.tree_tokens * case.heads, 1)
    q = inputs.q.view(case.batch, case.tree_tokens, case.heads, 576)

    def layer(kv: torch.Tensor) -> Callable[[], torch.Tensor]:
        paged = kv.view(-1, PAGE_SIZE, 1, 576)
        return lambda: attend(
            q=q,
            k_cache=paged,
            block_table=block_table,
            cache_seqlens=lengths,
            head_dim_v=512,
            tile_scheduler_metadata=metadata,
            num_splits=num_splits,
            softmax_scale=SM_SCALE,
            causal=True,
        )[0].reshape(-1, case.heads, 512)

    return [layer(kv) for kv in kv_layers]
