"""CUDA launches: parameter structs (as csrc/tile.cuh lays them out), grids, the current stream. Nothing is checked
here beyond what the driver reports; ops.py and plan.py checked at the door."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from treemla import combine, cubins, tiles
from treemla.problem import FP8, Slots, SlotTable

if TYPE_CHECKING:
    from treemla.plan import VerifyPlan

PLAN_THREADS = 256
PACK_THREADS = 256
RUN_ROWS = 16  # of a tensor copy
INT32_MAX = 2**31 - 1


class SlotsArg(ctypes.Structure):
    _fields_ = [
        ("index", ctypes.c_void_p),
        ("row", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("index_is_64", ctypes.c_int32),
        ("row_is_64", ctypes.c_int32),
    ]


class PlanArgs(ctypes.Structure):
    _fields_ = [
        ("seq_lens", ctypes.c_void_p),
        ("slots", SlotsArg),
        *((name, ctypes.c_void_p) for name in ("committed", "pieces", "part_work", "request_ptr")),
        *((name, ctypes.c_int32) for name in ("batch", "parts", "tree_tokens", "tail", "seq_lens_is_64")),
        *(
            (name, ctypes.c_int32)
            for name in ("slots_are_ranges", "capacity", "split_tokens", "overhead_tiles", "tile_shift")
        ),
        *((name, ctypes.c_int32) for name in ("halved_tiles", "third_tiles")),
    ]


class PackMaskArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("mask", "seq_lens", "words")),
        ("mask_bytes", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("batch", "tree_tokens", "num_padding", "seq_lens_is_64", "full_layout")),
    ]


class VerifyArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q_latent", "q_rope", "kv", "words")),
        ("slots", SlotsArg),
        *((name, ctypes.c_void_p) for name in ("committed", "pieces", "part_work", "request_ptr")),
        *((name, ctypes.c_void_p) for name in ("partial_out", "partial_lse", "out", "lse")),
        *((name, ctypes.c_int64) for name in ("q_latent_token_stride", "q_latent_head_stride")),
        *((name, ctypes.c_int64) for name in ("q_rope_token_stride", "q_rope_head_stride", "kv_stride")),
        *((name, ctypes.c_int32) for name in ("num_slots", "heads", "tree_tokens")),
        *((name, ctypes.c_float) for name in ("score_scale", "v_scale")),
    ]


def plan(plan: VerifyPlan, seq_lens: torch.Tensor, slots: Slots, tail: int) -> None:
    """Write the step's schedule into the plan. Enqueues one kernel."""
    batch = slots.batch
    capacity = slots.req_to_token.shape[1] if isinstance(slots, SlotTable) else INT32_MAX
    if plan.max_context is not None:
        capacity = min(capacity, plan.max_context + plan.shape.tree_tokens)
    args = PlanArgs(
        seq_lens=seq_lens.data_ptr(),
        slots=_slots_arg(slots),
        committed=plan.committed.data_ptr(),
        pieces=plan.pieces.data_ptr(),
        part_work=plan.part_work.data_ptr(),
        request_ptr=plan.request_ptr.data_ptr(),
        batch=batch,
        parts=plan.parts,
        tree_tokens=plan.shape.tree_tokens,
        tail=tail,
        seq_lens_is_64=_is_64(seq_lens),
        slots_are_ranges=not isinstance(slots, SlotTable),
        capacity=capacity,
        split_tokens=plan.fixed_split_tokens or 0,
        overhead_tiles=plan.overhead_tiles,
        tile_shift=plan.path.tile_tokens.bit_length() - 1,
        halved_tiles=plan.halved_tiles,
        third_tiles=plan.third_tiles,
    )
    shared_bytes = plan_shared_bytes(batch, plan.parts)
    _launch(
        "treemla_plan",
        plan.device,
        (1,),
        PLAN_THREADS,
        shared_bytes,
        args,
        shared_limit_bytes=PLAN_SHARED_LIMIT_BYTES,
        overlaps_previous=True,
    )


def plan_shared_bytes(batch: int, parts: int) -> int:
    """Dynamic shared memory of the planner (csrc/plan.cuh lists the arrays)."""
    return 4 * (4 * (batch + 1) + 4 * (parts + 2))


PLAN_SHARED_LIMIT_BYTES = plan_shared_bytes(tiles.MAX_BATCH, tiles.MAX_PARTS)


def pack_mask(
    custom_mask: torch.Tensor,
    seq_lens: torch.Tensor,
    words: torch.Tensor,
    *,
    full_layout: bool,
    tree_tokens: int,
    num_padding: int,
) -> None:
    """Pack SGLang's boolean mask into `words`. Enqueues one kernel."""
    args = PackMaskArgs(
        mask=custom_mask.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        words=words.data_ptr(),
        mask_bytes=custom_mask.numel(),
        batch=seq_lens.shape[0],
        tree_tokens=tree_tokens,
        num_padding=num_padding,
        seq_lens_is_64=_is_64(seq_lens),
        full_layout=full_layout,
    )
    blocks = -(-words.numel() * 32 // PACK_THREADS)
    _launch("treemla_pack_mask", words.device, (blocks,), PACK_THREADS, 0, args)


def verify(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: Slots,
    words: torch.Tensor | None,
    plan: VerifyPlan,
    *,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Attention partials of every piece, then their merge. Enqueues two kernels."""
    shape = plan.shape
    args = VerifyArgs(
        q_latent=q_latent.data_ptr(),
        q_rope=q_rope.data_ptr(),
        kv=kv_cache.data_ptr(),
        words=None if words is None else words.data_ptr(),
        slots=_slots_arg(slots),
        committed=plan.committed.data_ptr(),
        pieces=plan.pieces.data_ptr(),
        part_work=plan.part_work.data_ptr(),
        request_ptr=plan.request_ptr.data_ptr(),
        partial_out=plan.partial_out.data_ptr(),
        partial_lse=plan.partial_lse.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        q_latent_token_stride=q_latent.stride(0),
        q_latent_head_stride=q_latent.stride(1),
        q_rope_token_stride=q_rope.stride(0),
        q_rope_head_stride=q_rope.stride(1),
        kv_stride=kv_cache.stride(0),
        num_slots=kv_cache.shape[0],
        heads=shape.num_heads,
        tree_tokens=shape.tree_tokens,
        score_scale=sm_scale * k_scale * math.log2(math.e),
        v_scale=v_scale,
    )
    path, rows = plan.path, plan.block_rows
    grid: tuple[int, ...] = (plan.blocks, plan.parts)
    fp8_kv = shape.kv_dtype is FP8
    name, shared_bytes = path.kernel_name(rows, fp8_kv, plan.by_shares), path.shared_memory_bytes(rows, fp8_kv)
    maps = (
        [_kv_map(kv_cache.data_ptr(), *kv_cache.shape, kv_cache.stride(0))] if path.copies_runs and not fp8_kv else []
    )
    _launch(name, plan.device, grid, path.threads, shared_bytes, args, *maps, overlaps_previous=True)
    most_shift = combine.most_shift(plan, slots.batch)
    grid = combine.grid(plan, slots.batch, most_shift)
    extents = [ctypes.c_int32(x) for x in (plan.blocks * plan.block_rows, most_shift)]
    gpu = torch.cuda.get_device_properties(plan.device)
    sm_bytes = gpu.shared_memory_per_multiprocessor
    _launch(
        "treemla_combine",
        plan.device,
        grid,
        32 * combine.CTA_WARPS,
        combine.shared_bytes(math.prod(grid), most_shift, gpu.multi_processor_count, sm_bytes),
        args,
        *extents,
        shared_limit_bytes=combine.shared_bytes(1, 0, 1, sm_bytes),  # of the fewest CTAs: the most
        overlaps_previous=True,
    )


@functools.lru_cache(maxsize=1024)
def _kv_map(address: int, num_slots: int, head_dim: int, stride: int) -> Any:
    """The tensor map by which a CTA copies 64 dims of RUN_ROWS consecutive slots into swizzled rows of shared memory.
    Host work: a map is made once for a cache. stride: elements."""
    from cuda.bindings import driver

    of_32, of_64 = driver.cuuint32_t, driver.cuuint64_t
    stride = head_dim if num_slots == 1 else stride  # of one row it may be anything
    error, made = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        2,
        address,
        [of_64(head_dim), of_64(num_slots)],
        [of_64(2 * stride)],
        [of_32(64), of_32(RUN_ROWS)],
        [of_32(1), of_32(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    _raise_on(error, f"kv_cache: tensor map of {num_slots} rows, {stride} elements apart")
    return (ctypes.c_uint64 * 16)(*map(int, made.opaque))


def _slots_arg(slots: Slots) -> SlotsArg:
    if isinstance(slots, SlotTable):
        index, row, stride = slots.req_to_token, slots.req_pool_indices, slots.req_to_token.stride(0)
    else:
        index, row, stride = slots.kv_indices, slots.kv_indptr, 1
    return SlotsArg(index.data_ptr(), row.data_ptr(), stride, _is_64(index), _is_64(row))


def _is_64(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.int64


def _launch(
    name: str,
    device: torch.device,
    grid: tuple[int, ...],
    threads: int,
    shared_bytes: int,
    *args: Any,
    shared_limit_bytes: int = 0,
    overlaps_previous: bool = False,
) -> None:
    """Enqueue a kernel on the current stream.

    shared_limit_bytes: the most dynamic shared memory that any launch of this kernel takes; 0: what this one does.
    overlaps_previous: programmatic dependent launch; the kernel is set up while the previous one runs and waits for
    its results itself.
    """
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = torch.cuda.current_stream(device).cuda_stream
    if overlaps_previous:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(arg) for arg in args))
    function = _function(name, device, shared_limit_bytes or shared_bytes)
    with torch.cuda.device(device):  # the default stream's handle is 0 on every device: the current one decides
        (error,) = driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0)
    _raise_on(error, f"{name}: launch on {device}")


@functools.cache
def _function(name: str, device: torch.device, shared_limit_bytes: int) -> Any:
    """The kernel as the driver launches it, allowed so much shared memory. The driver remembers the last value said
    for a kernel, so every launch of one kernel says the same."""
    from cuda.bindings import driver

    kernel = driver.CUkernel(int(cubins.kernel(name, device).handle))
    if shared_limit_bytes > 0:  # else static and dynamic bytes together may be 48 KB
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (error,) = driver.cuKernelSetAttribute(attribute, shared_limit_bytes, kernel, driver.CUdevice(device.index))
        _raise_on(error, f"{name}: {shared_limit_bytes} bytes of shared memory on {device}")
    return driver.CUfunction(int(kernel))


def _raise_on(error: Any, what: str) -> None:
    if error != 0:
        raise RuntimeError(f"{what} failed with {error.name}")
