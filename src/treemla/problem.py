"""What one verify call computes: the shape, its limits, and where tokens live in the KV pool."""

from dataclasses import dataclass

import torch

MAX_TREE_TOKENS = 64  # one 64-bit word of ancestors a tree token
MAX_HEADS = 128
PAGE_SIZES = (1, 16, 64)
PORTABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CUDA_DTYPES = (torch.bfloat16,)
FP8 = torch.float8_e4m3fn  # of KV rows: 4 bits of exponent, 3 of mantissa, no infinity, largest 448
CUDA_KV_DTYPES = (torch.bfloat16, FP8)


@dataclass(frozen=True)
class VerifyShape:
    """Heads, tree tokens, widths, page size and dtypes of a verify call.

    `rows` = tree_tokens * num_heads query rows share one KV stream; row r belongs to tree token
    r // num_heads and head r % num_heads. A KV row holds `head_dim` = latent + rope elements: all of
    them are the key, the first `latent_dim` are the value. `dtype` is that of q and out, `kv_dtype` of the KV
    rows: `dtype` again, which is the default, or float8_e4m3fn.
    """

    num_heads: int
    tree_tokens: int
    latent_dim: int = 512
    rope_dim: int = 64
    page_size: int = 1
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = None  # type: ignore[assignment] # None: dtype, from __post_init__ on

    def __post_init__(self) -> None:
        _check_range("num_heads", self.num_heads, 1, MAX_HEADS)
        _check_range("tree_tokens", self.tree_tokens, 1, MAX_TREE_TOKENS)
        _check_range("latent_dim", self.latent_dim, 1, 1024)
        _check_range("rope_dim", self.rope_dim, 0, 1024)
        if isinstance(self.page_size, bool) or not isinstance(self.page_size, int):
            raise TypeError(f"page_size: expected an int, got {self.page_size!r}")
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size: expected one of {PAGE_SIZES}, got {self.page_size!r}")
        if self.dtype not in PORTABLE_DTYPES:
            raise ValueError(f"dtype: expected one of {PORTABLE_DTYPES}, got {self.dtype!r}")
        object.__setattr__(self, "kv_dtype", self.kv_dtype or self.dtype)
        if self.kv_dtype not in (self.dtype, FP8):
            raise ValueError(f"kv_dtype: expected {self.dtype} (dtype) or {FP8}, got {self.kv_dtype!r}")

    @property
    def head_dim(self) -> int:
        return self.latent_dim + self.rope_dim

    @property
    def rows(self) -> int:
        return self.tree_tokens * self.num_heads


@dataclass(frozen=True)
class SlotTable:
    """Token j of request b lives in slot req_to_token[req_pool_indices[b], j]; its tree in columns n_b .. n_b+T-1.

    req_to_token: [R, C] int32, last stride 1. req_pool_indices: [B] int32 or int64, contiguous.
    """

    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor

    @property
    def batch(self) -> int:
        return self.req_pool_indices.shape[0]


@dataclass(frozen=True)
class SlotRanges:
    """Token j of request b lives in slot kv_indices[kv_indptr[b] + j]; n_b + T slots a request, the tree last.

    kv_indptr: [B+1], kv_indices: [N]; each int32 or int64, contiguous. Token slots, never page ids.
    """

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor

    @property
    def batch(self) -> int:
        return self.kv_indptr.shape[0] - 1


Slots = SlotTable | SlotRanges


def rows_at(kv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """kv[slots]: [N, head_dim] of kv's dtype. Eight-bit rows are picked as bytes: not every torch indexes fp8."""
    if kv.element_size() > 1:
        return kv[slots]
    return kv.view(torch.uint8)[slots].view(kv.dtype)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {low}..{high}, got {value}")
