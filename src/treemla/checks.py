"""Argument checks: one place that words them. Every message names the argument, what was expected, what came."""

import math
import numbers
from collections.abc import Sequence

import torch

from treemla.problem import SlotRanges, SlotTable


def expect(condition: bool, name: str, expected: str, got: object) -> None:
    """Raise ValueError naming `name` unless `condition` holds."""
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {got!r}")


def expect_tensor(
    name: str,
    tensor: object,
    *,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    contiguous: bool = True,
) -> None:
    """Check a tensor's type, dtype (TypeError), shape (None: any size), device and contiguity (ValueError)."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    sizes_match = len(tensor.shape) == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    wanted = "[" + ", ".join("*" if want is None else str(want) for want in shape) + "]"
    expect(sizes_match, name, f"shape {wanted}", list(tensor.shape))
    expect(tensor.device == device, name, f"device {device}", str(tensor.device))
    expect(not contiguous or tensor.is_contiguous(), name, "a contiguous tensor", f"strides {tensor.stride()}")


def expect_slots(slots: object, device: torch.device) -> None:
    """Check a SlotTable or SlotRanges: types, dtypes, shapes, strides and device of its tensors, not their values."""
    integers = (torch.int32, torch.int64)
    if isinstance(slots, SlotTable):
        table, indices = slots.req_to_token, slots.req_pool_indices
        expect_tensor(
            "slots.req_to_token", table, shape=(None, None), dtypes=(torch.int32,), device=device, contiguous=False
        )
        expect(table.stride(1) == 1, "slots.req_to_token", "last stride 1", f"strides {table.stride()}")
        expect_tensor("slots.req_pool_indices", indices, shape=(None,), dtypes=integers, device=device)
    elif isinstance(slots, SlotRanges):
        expect_tensor("slots.kv_indptr", slots.kv_indptr, shape=(None,), dtypes=integers, device=device)
        expect_tensor("slots.kv_indices", slots.kv_indices, shape=(None,), dtypes=integers, device=device)
    else:
        raise TypeError(f"slots: expected SlotTable or SlotRanges, got {type(slots).__name__}")


def expect_rows(name: str, tensor: torch.Tensor) -> None:
    """Check that rows can be read 16 bytes at a time: last stride 1, the other strides multiples of 8 elements.

    The stride of a dimension of size 1 is never used and may be anything.
    """
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    unit_last = tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    leading = strides[:-1] if tensor.shape[-1] > 1 else strides
    aligned = unit_last and all(stride % 8 == 0 for stride in leading)
    expect(aligned, name, "last stride 1 and the other strides multiples of 8 elements", f"strides {tensor.stride()}")


def expect_aligned(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor's data starts on 16 bytes."""
    past = tensor.data_ptr() % 16
    expect(past == 0, name, "data aligned to 16 bytes", f"a pointer {past} bytes past a multiple of 16")


def expect_scale(name: str, value: object) -> float:
    """Check a scale: a finite number above 0. Returns it as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    scale = float(value)
    expect(math.isfinite(scale) and scale > 0, name, "a finite number above 0", value)
    return scale
