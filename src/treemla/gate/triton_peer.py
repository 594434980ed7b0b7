"""SGLang's Triton kernels, called as its attention backend calls them: verify, which takes a tree mask, and decode."""

from collections.abc import Callable, Sequence

import torch

Extend = Callable[..., object]

# SGLang 0.5.16 and 0.5.23, triton_backend.py: how its MLA decode chooses the number of KV splits
BASE_SPLITS = 8  # --triton-attention-num-kv-splits
MIN_SPLIT_TOKENS = 32
MAX_REQUESTS = 256  # that one program of the split kernel looks at


def load() -> Extend:
    """SGLang's extend_attention_fwd; ImportError says what is missing."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    return extend_attention_fwd  # type: ignore[no-any-return] # sglang is untyped


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
    eager: bool = False,
) -> Callable[[], torch.Tensor]:
    """A callable that enqueues one layer's verify into `out` [B*T, H, 512] and `lse` [B*T, H] and returns `out`.

    q: [B*T, H, 576]. kv: [S, 576]. owned: the slots of each request's n_b + T tokens; contexts: n_b. mask: SGLang's
    FULL layout, bool or uint8, or None for a chain. The context goes by slot, the tree's keys and values as tensors
    of their own.
    eager: row starts in int32 and the mask in bool, as SGLang passes them outside CUDA graphs; its graphs have int64
    and uint8. That alone decides how many registers ptxas takes, 128 or 255 (triton 3.6, sm_90), and with them the
    time: the second is faster for a lone request, the first, with two CTAs an SM, for a large batch.
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
        _starts([tree_tokens] * batch, device).to(torch.int32 if eager else torch.int64),
        _starts(contexts, device).int(),
        torch.cat([context, context.new_zeros(1)]),  # never an empty tensor
        None if mask is None else mask.view(torch.bool if eager else torch.uint8),
        True,  # is_causal
        None if mask is None else _starts([tree_tokens * (n + tree_tokens) for n in contexts], device),
        tree_tokens,
        1.0,  # k_scale
        1.0,  # v_scale
    )
    wanted = {} if lse is None else {"lse_extend": lse}

    def enqueue() -> torch.Tensor:
        extend(*arguments, sm_scale=sm_scale, **wanted)
        return out

    return enqueue


def load_decode() -> tuple[Callable[..., object], Callable[..., object]]:
    """SGLang's decode_attention_fwd, and its kernel that chooses each request's number of KV splits."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

    def num_splits(splits: torch.Tensor, lengths: torch.Tensor, heads: int, most: int, sms: int) -> None:
        sizes = len(lengths), 1, heads, 1, most, sms  # one token a request, one KV head
        get_num_kv_splits_triton[(1,)](splits, lengths, *sizes, MAX_NUM_SEQ=MAX_REQUESTS)

    return decode_attention_fwd, num_splits


def decode(
    kernels: tuple[Callable[..., object], Callable[..., object]],
    q: torch.Tensor,
    kv: torch.Tensor,
    owned: Sequence[torch.Tensor],
    *,
    sm_scale: float,
    out: torch.Tensor,
    sms: int,
) -> Callable[[], torch.Tensor]:
    """A callable that enqueues one layer's decode into `out` [B, H, 512] and returns it: T = 1.

    q: [B, H, 576]. kv: [S, 576]. owned: the slots of each request's tokens, the current one last. sms: the GPU's.
    """
    attend, num_splits = kernels
    batch, heads, device = len(owned), q.shape[1], kv.device
    pool = kv.unsqueeze(1)
    lengths = torch.tensor([len(slots) for slots in owned], device=device)
    most = most_splits(sms, int(lengths.max()))
    splits = torch.zeros(batch, dtype=torch.int32, device=device)
    num_splits(splits, lengths, heads, most, sms)
    arguments = (
        q,
        pool,
        pool[..., :512],
        out,
        _starts(lengths.tolist(), device).int(),
        torch.cat(list(owned)),
        torch.empty(batch, heads, most, 512, dtype=torch.float32, device=device),
        torch.empty(batch, heads, most, dtype=torch.float32, device=device),
        splits,
        most,
        sm_scale,
        1.0,  # k_scale
        1.0,  # v_scale
    )
    use_pdl = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9

    def enqueue() -> torch.Tensor:
        attend(*arguments, has_mla=True, use_pdl=use_pdl)
        return out

    return enqueue


def most_splits(sms: int, max_context: int) -> int:
    """SGLang's bound on the KV splits of a request, for a GPU and the longest context that it serves."""
    return max(BASE_SPLITS, min(_power_of_2(sms), _power_of_2(-(-max_context // MIN_SPLIT_TOKENS))))


def _power_of_2(n: int) -> int:
    """The least power of 2 from n on."""
    return 1 << (n - 1).bit_length()


def _starts(sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *sizes], device=device, dtype=torch.int64).cumsum(0)
