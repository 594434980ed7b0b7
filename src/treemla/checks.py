"""Argument checks: one place that words them. Every message names the argument, what was expected, what came."""

import math
import numbers
from collections.abc import Sequence

import torch

from treemla.problem import SlotRanges, SlotTable

MAX_SCALE = 1e12  # three of them and log2(e) multiply to less than float32's 3e38


def expect(condition: bool, name: str, expected: str, got: object) -> None:
    """Raise ValueError naming `name` unless `condition` holds."""
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {got!r}")


def expect_int(name: str, value: object, low: int, high: int) -> int:
    """Check a count: an int (TypeError, bools are none) in low..high (ValueError). Returns it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    expect(low <= value <= high, name, f"{low}..{high}", value)
    return value


def expect_device(name: str, device: object) -> torch.device:
    """Check a device that tensors can be made on; "cuda" alone becomes the current device's number."""
    if not isinstance(device, str | torch.device):
        raise TypeError(f"{name}: expected a torch.device or its name, got {device!r}")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # how torch says so depends on its build
        raise ValueError(f"{name}: expected a device that torch can use, got {str(device)!r}: {error}") from error


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
        expect(len(slots.kv_indptr) >= 1, "slots.kv_indptr", "B + 1 elements", 0)
        expect_tensor("slots.kv_indices", slots.kv_indices, shape=(None,), dtypes=integers, device=device)
    else:
        raise TypeError(f"slots: expected SlotTable or SlotRanges, got {type(slots).__name__}")


def expect_rows(name: str, tensor: torch.Tensor) -> None:
    """Check that rows can be read 16 bytes at a time: last stride 1, the other strides multiples of 8 elements, of 16
    where an element is one byte.

    The stride of a dimension of size 1 is never used and may be anything.
    """
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    unit_last = tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    leading = strides[:-1] if tensor.shape[-1] > 1 else strides
    step = max(8, 16 // tensor.element_size())
    aligned = unit_last and all(stride % step == 0 for stride in leading)
    rule = f"last stride 1 and the other strides multiples of {step} elements"
    expect(aligned, name, rule, f"strides {tensor.stride()}")


def expect_aligned(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor's data starts on 16 bytes."""
    past = tensor.data_ptr() % 16
    expect(past == 0, name, "data aligned to 16 bytes", f"a pointer {past} bytes past a multiple of 16")


def expect_apart(name: str, written: torch.Tensor, other: str, read: torch.Tensor) -> None:
    """Check that a result does not lie between the first and the last byte of an input."""
    begin, end = _span_bytes(written)
    other_begin, other_end = _span_bytes(read)
    expect(end <= other_begin or other_end <= begin, name, f"memory apart from {other}'s", "memory that overlaps it")


def _span_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def expect_scale(name: str, value: object) -> float:
    """Check a scale: a number above 0 whose products stay finite in float32. Returns it as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    try:
        scale = float(value)
    except OverflowError:
        scale = math.inf
    expect(0 < scale <= MAX_SCALE, name, f"a number above 0, at most {MAX_SCALE:g}", value)
    return scale
