"""FlashInfer's BatchMLAPagedAttentionWrapper, backends fa2 and fa3: causal, any page size."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from treemla.gate.inputs import SM_SCALE, Inputs

WORKSPACE_BYTES = 128 * 1024 * 1024  # what its documentation recommends


def load() -> type[Any]:
    """The wrapper class; ImportError says what is missing."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    return BatchMLAPagedAttentionWrapper  # type: ignore[no-any-return] # flashinfer is untyped


def layers(
    wrapper_class: type[Any], backend: str, inputs: Inputs, kv_layers: Sequence[torch.Tensor], out: torch.Tensor
) -> list[Callable[[], torch.Tensor]]:
    """A callable a layer, which enqueues its causal verify into `out` [B*T, H, 512] and returns it.

    The plan, made here on the host, and the indices are the same for all layers. They stay where they are, so that the
    callables may be captured.
    """
    case, device = inputs.case, inputs.q.device
    pages = [slots[:: case.page_size] // case.page_size for slots in inputs.owned]
    wrapper = wrapper_class(torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=device), backend=backend)
    wrapper.plan(
        torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.tree_tokens,
        torch.tensor([0, *map(len, pages)], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32),
        torch.cat(pages).int(),
        torch.tensor([len(slots) for slots in inputs.owned], dtype=torch.int32, device=device),
        case.heads,
        512,
        64,
        case.page_size,
        True,  # causal, the queries being a request's last tokens
        SM_SCALE,
        inputs.q.dtype,
        kv_layers[0].dtype,
    )

    def layer(kv: torch.Tensor) -> Callable[[], torch.Tensor]:
        paged = kv.view(-1, case.page_size, 576)
        halves = inputs.q[..., :512], inputs.q[..., 512:], paged[..., :512], paged[..., 512:]
        return lambda: wrapper.run(*halves, out=out)

    return [layer(kv) for kv in kv_layers]
