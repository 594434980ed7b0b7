"""The public operations. Each checks its arguments once, here, and then runs the kernels or the portable path."""

import enum
from collections.abc import Callable

import torch

from treemla import launch, portable
from treemla.checks import expect, expect_aligned, expect_apart, expect_rows, expect_scale, expect_slots, expect_tensor
from treemla.plan import VerifyPlan
from treemla.problem import CUDA_DTYPES, CUDA_KV_DTYPES, MAX_TREE_TOKENS, SlotRanges, Slots, SlotTable, VerifyShape
from treemla.values import expect_values

CUDA_WIDTHS = (512, 64)  # latent and rope width that the kernels are built for


class MaskLayout(enum.Enum):
    """How a boolean tree mask lies in memory, row-major, requests one after another.

    FULL: request b holds [T, seq_lens[b] + T]; the tree is the last T columns, the others are not read.
    QLEN_ONLY: request b holds [T, T].
    """

    FULL = "full"
    QLEN_ONLY = "qlen_only"


def verify_attention(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    slots: Slots,
    words: torch.Tensor | None,
    plan: VerifyPlan,
    *,
    sm_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    check_values: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of B*T tree tokens over their committed context and, of the tree, what their words show them.

    q: [B*T, H, latent + rope], or the pair (q_latent [B*T, H, latent], q_rope [B*T, H, rope]).
    kv_cache: [S, latent + rope] or [S, 1, latent + rope], the tree tokens' rows already written. A row is the key,
    its first `latent` elements are the value. q has the plan's dtype, kv_cache its kv_dtype; last stride 1, other
    strides multiples of 8 elements (of 16 for float8_e4m3fn), rows of kv_cache not overlapping, and on a GPU 16-byte
    aligned.
    words: [B*T] int64, bit j of row i: tree token i sees tree token j (itself included, none above); None: a chain.
    plan: after `plan.update` for the same slots.
    sm_scale, k_scale, v_scale: scores are q.k * sm_scale * k_scale, outputs are multiplied by v_scale. With
    float8_e4m3fn rows k_scale and v_scale are the tensor's scales: keys are kv_cache * k_scale, values * v_scale.
    out: [B*T, H, latent] of q's dtype. lse: [B*T, H] float32, natural log. Allocated when not given.
    check_values: also check what words, lengths and slot indices say. None: on a CPU yes, on a GPU no, since it
    waits for the device there. Unchecked, a slot outside the pool makes its request's rows NaN on a GPU; a CPU trusts
    the slots.

    A row that sees nothing gets out 0 and lse -inf; a request longer than its slots NaN in both.
    Raises TypeError or ValueError before anything is launched or written.
    """
    if not isinstance(plan, VerifyPlan):
        raise TypeError(f"plan: expected a VerifyPlan, got {type(plan).__name__}")
    shape = plan.shape
    if plan.device.type == "cuda":
        _expect_cuda_shape(shape)
    expect_slots(slots, plan.device)
    batch = slots.batch
    expect(1 <= batch <= plan.max_batch, "slots", f"1..{plan.max_batch} requests (the plan's max_batch)", batch)
    expect(batch == plan.batch, "plan", f"an update for {batch} requests", f"one for {plan.batch}")
    q_latent, q_rope = _query_pair(q, plan, batch)
    kv_rows = _kv_rows(kv_cache, plan)
    tokens = batch * shape.tree_tokens
    if words is not None:
        expect_tensor("words", words, shape=(tokens,), dtypes=(torch.int64,), device=plan.device)
    scales = [expect_scale(*named) for named in (("sm_scale", sm_scale), ("k_scale", k_scale), ("v_scale", v_scale))]
    if check_values is None:
        check_values = plan.device.type == "cpu"
    elif not isinstance(check_values, bool):
        raise TypeError(f"check_values: expected a bool or None, got {check_values!r}")
    out = _written("out", out, (tokens, shape.num_heads, shape.latent_dim), shape.dtype, plan.device)
    lse = _written("lse", lse, (tokens, shape.num_heads), torch.float32, plan.device)

    is_table = isinstance(slots, SlotTable)
    if isinstance(slots, SlotTable):
        where = slots.req_to_token, slots.req_pool_indices
    else:
        where = slots.kv_indptr, slots.kv_indices
    options = plan.path.name, plan.fixed_split, plan.by_shares, check_values
    torch.ops.treemla.verify_(
        q_latent, q_rope, kv_rows, *where, is_table, words, *plan.tensors, out, lse, *scales, *options
    )
    return out, lse


def pack_tree_mask(
    custom_mask: torch.Tensor,
    seq_lens: torch.Tensor,
    words: torch.Tensor,
    layout: MaskLayout,
    num_padding: int = 0,
) -> None:
    """Write SGLang's boolean tree mask into `words`, in place, as verify_attention reads them.

    custom_mask: bool or uint8, contiguous, of any shape; its elements in memory order are the mask, and it may be
    longer than the batch needs. seq_lens: [B] int32 or int64, the committed lengths that a FULL mask was laid out
    for. words: [B*T] int64. num_padding: the last so many requests get zero words and their mask is not read.
    Bits outside the lower triangle are written as they are; `check_values` finds them.

    A mask that is too short is a ValueError, except in the FULL layout on a GPU, where the host does not know the
    lengths: rows that the mask does not hold get zero words.
    """
    if not isinstance(layout, MaskLayout):
        raise TypeError(f"layout: expected a MaskLayout, got {layout!r}")
    if not isinstance(words, torch.Tensor):
        raise TypeError(f"words: expected a tensor, got {type(words).__name__}")
    device = words.device
    expect_tensor("seq_lens", seq_lens, shape=(None,), dtypes=(torch.int32, torch.int64), device=device)
    batch = seq_lens.shape[0]
    expect(batch >= 1, "seq_lens", "at least 1 request", batch)
    expect_tensor("words", words, shape=(None,), dtypes=(torch.int64,), device=device)
    tree_tokens = words.shape[0] // batch
    fits = words.shape[0] == batch * tree_tokens and 1 <= tree_tokens <= MAX_TREE_TOKENS
    expect(fits, "words", f"T = 1..{MAX_TREE_TOKENS} words for each of {batch} requests", words.shape[0])
    if isinstance(num_padding, bool) or not isinstance(num_padding, int):
        raise TypeError(f"num_padding: expected an int, got {num_padding!r}")
    expect(0 <= num_padding <= batch, "num_padding", f"0..{batch}", num_padding)
    mask_shape = (None,) * custom_mask.dim() if isinstance(custom_mask, torch.Tensor) else ()
    expect_tensor("custom_mask", custom_mask, shape=mask_shape, dtypes=(torch.bool, torch.uint8), device=device)
    full_layout = layout is MaskLayout.FULL
    if not full_layout:
        needed = (batch - num_padding) * tree_tokens**2
        expect(custom_mask.numel() >= needed, "custom_mask", f"at least {needed} elements", custom_mask.numel())
    torch.ops.treemla.pack_tree_mask_(custom_mask, seq_lens, words, full_layout, tree_tokens, num_padding)


def _verify(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    slots_first: torch.Tensor,
    slots_second: torch.Tensor,
    is_table: bool,
    words: torch.Tensor | None,
    committed: torch.Tensor,
    pieces: torch.Tensor,
    part_work: torch.Tensor,
    request_ptr: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    path: str,
    fixed_split: bool,
    by_shares: bool,
    check_values: bool,
) -> None:
    """verify_attention with its checks of sizes done, over plain tensors: what torch.compile and graphs see.

    The checks that need real memory are here: values and alignment.
    """
    slots: Slots = SlotTable(slots_first, slots_second) if is_table else SlotRanges(slots_first, slots_second)
    tree_tokens = q_latent.shape[0] // slots.batch
    widths = q_latent.shape[-1], q_rope.shape[-1]
    shape = VerifyShape(q_latent.shape[1], tree_tokens, *widths, dtype=q_latent.dtype, kv_dtype=kv_cache.dtype)
    schedule_and_workspace = committed, pieces, part_work, request_ptr, partial_out, partial_lse
    plan = VerifyPlan.from_tensors(shape, slots.batch, path, fixed_split, by_shares, *schedule_and_workspace)
    is_cuda = plan.device.type == "cuda"
    if is_cuda:
        for name, tensor in (("q", q_latent), ("q (rope)", q_rope), ("kv_cache", kv_cache), ("out", out)):
            expect_aligned(name, tensor)
    for name, written in (("out", out), ("lse", lse)):
        for other, read in (("q", q_latent), ("q (rope)", q_rope), ("kv_cache", kv_cache)):
            expect_apart(name, written, other, read)
    if check_values:
        capturing = is_cuda and torch.cuda.is_current_stream_capturing()
        expect(not capturing, "check_values", "False while a CUDA graph is captured", True)
        expect_values(slots, words, plan, kv_cache.shape[0])
    run = launch.verify if is_cuda else portable.verify
    scales = {"sm_scale": sm_scale, "k_scale": k_scale, "v_scale": v_scale}
    run(q_latent, q_rope, kv_cache, slots, words, plan, **scales, out=out, lse=lse)


def _pack_tree_mask(
    custom_mask: torch.Tensor,
    seq_lens: torch.Tensor,
    words: torch.Tensor,
    full_layout: bool,
    tree_tokens: int,
    num_padding: int,
) -> None:
    """pack_tree_mask with its checks done."""
    pack = launch.pack_mask if words.device.type == "cuda" else portable.pack_mask
    pack(custom_mask, seq_lens, words, full_layout=full_layout, tree_tokens=tree_tokens, num_padding=num_padding)


def _register(name: str, function: Callable[..., None], mutates: tuple[str, ...]) -> None:
    """Make `function` the operation treemla::name, on CPU and CUDA. Under torch.compile it only writes its arguments.

    Not torch.library.custom_op: its work on the schema at each call costs more than all of ours, and a step without
    graphs pays it in every layer.
    """
    qualified = f"treemla::{name}"
    torch.library.define(qualified, torch.library.infer_schema(function, mutates_args=mutates))
    torch.library.impl(qualified, ("cpu", "cuda"), function)
    torch.library.register_fake(qualified, lambda *_: None)


_register("verify_", _verify, mutates=("partial_out", "partial_lse", "out", "lse"))
_register("pack_tree_mask_", _pack_tree_mask, mutates=("words",))


def _written(
    name: str, tensor: torch.Tensor | None, size: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The caller's tensor for a result, checked, or a new one."""
    if tensor is None:
        return torch.empty(size, dtype=dtype, device=device)
    expect_tensor(name, tensor, shape=size, dtypes=(dtype,), device=device)
    expect(not tensor.requires_grad, name, "a tensor without requires_grad", "one with it")
    return tensor


def _query_pair(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], plan: VerifyPlan, batch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q_latent, q_rope) of either form of q, checked."""
    shape = plan.shape
    tokens, heads, latent = batch * shape.tree_tokens, shape.num_heads, shape.latent_dim
    if isinstance(q, torch.Tensor):
        _expect_readable("q", q, (tokens, heads, shape.head_dim), shape.dtype, plan)
        return q[..., :latent], q[..., latent:]
    if not isinstance(q, tuple) or len(q) != 2:
        raise TypeError(f"q: expected a tensor or a pair of tensors, got {type(q).__name__}")
    for name, half, width in (("q[0]", q[0], latent), ("q[1]", q[1], shape.rope_dim)):
        _expect_readable(name, half, (tokens, heads, width), shape.dtype, plan)
    return q


def _kv_rows(kv_cache: torch.Tensor, plan: VerifyPlan) -> torch.Tensor:
    """kv_cache as [S, head_dim], checked."""
    width = plan.shape.head_dim
    has_head_axis = isinstance(kv_cache, torch.Tensor) and kv_cache.dim() == 3
    size = (None, 1, width) if has_head_axis else (None, width)
    _expect_readable("kv_cache", kv_cache, size, plan.shape.kv_dtype, plan)
    expect(1 <= kv_cache.shape[0] < 2**31, "kv_cache", "1 to 2^31 - 1 slots", kv_cache.shape[0])
    apart = kv_cache.shape[0] == 1 or kv_cache.stride(0) >= width
    expect(
        apart,
        "kv_cache",
        f"rows that do not overlap, {width} elements apart or more",
        f"a stride of {kv_cache.stride(0)}",
    )
    return kv_cache.select(1, 0) if has_head_axis else kv_cache


def _expect_readable(
    name: str, tensor: torch.Tensor, size: tuple[int | None, ...], dtype: torch.dtype, plan: VerifyPlan
) -> None:
    expect_tensor(name, tensor, shape=size, dtypes=(dtype,), device=plan.device, contiguous=False)
    expect_rows(name, tensor)


def _expect_cuda_shape(shape: VerifyShape) -> None:
    """What the kernels are built for; the portable path takes the rest, on a CPU."""
    for name, dtype, served in (("dtype", shape.dtype, CUDA_DTYPES), ("kv_dtype", shape.kv_dtype, CUDA_KV_DTYPES)):
        if dtype not in served:
            raise TypeError(f"plan.shape.{name}: expected {served} on a CUDA device, got {dtype}")
    widths = (shape.latent_dim, shape.rope_dim)
    expect(widths == CUDA_WIDTHS, "plan.shape (latent_dim, rope_dim)", f"{CUDA_WIDTHS} on a CUDA device", widths)
