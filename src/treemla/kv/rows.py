"""Rows of the KV pool from slots to slots, in all layers at once: the kernel on a GPU, torch on a CPU."""

from collections.abc import Sequence

import torch

from treemla import launch_moves
from treemla.checks import expect, expect_aligned, expect_tensor

MAX_MOVES = 2**30


def move_rows(
    buffers: Sequence[torch.Tensor],
    source: torch.Tensor,
    destination: torch.Tensor,
    *,
    disjoint: bool = False,
    check_values: bool | None = None,
) -> None:
    """Copy row source[i] to row destination[i] of every buffer, as if all rows were read before one is written.

    buffers: [slots, ...] each, of any dtype; the elements of a row lie together. On a GPU rows, and the distances
    between them, are multiples of 16 bytes, and so is each buffer's address.
    source, destination: int64 [moves], on the buffers' device; destinations distinct.
    disjoint: the caller's word that no slot is both source and destination. More than 4,608 moves at once need it on a
    GPU.
    check_values: also check what source and destination say. None: on a CPU yes, on a GPU no, since it waits for the
    device there. Unchecked, a GPU leaves out a move from or to a slot that the smallest buffer does not have.
    Raises TypeError or ValueError before anything is written. On a GPU it only enqueues, and CUDA graphs record it.
    """
    expect(len(buffers) > 0, "buffers", "at least one buffer", len(buffers))
    for i, buffer in enumerate(buffers):
        expect_pool(f"buffers[{i}]", buffer, buffers[0])
    device = buffers[0].device
    expect_tensor("source", source, shape=(None,), dtypes=(torch.int64,), device=device)
    expect_tensor("destination", destination, shape=source.shape, dtypes=(torch.int64,), device=device)
    expect(len(source) <= MAX_MOVES, "source", f"at most {MAX_MOVES} moves", len(source))
    is_cuda = device.type == "cuda"
    at_once = launch_moves.MOVES_AT_ONCE
    expect(not is_cuda or disjoint or len(source) <= at_once, "source", f"{at_once} moves unless disjoint", len(source))
    if check_values or (check_values is None and not is_cuda):
        expect_moves(source, destination, min(map(len, buffers)), disjoint=disjoint)
    if len(source) == 0:
        return
    if is_cuda:
        launch_moves.move_rows(buffers, source, destination, disjoint=disjoint)
        return
    for buffer in buffers:
        buffer[destination] = buffer[source]  # the gather is a copy, so that the scatter cannot change what it reads


def expect_pool(name: str, buffer: object, first: torch.Tensor) -> None:
    """Check one buffer: beside the first, with rows that lie together and, on a GPU, in steps of 16 bytes."""
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(buffer).__name__}")
    device = first.device
    expect(buffer.device == device, name, f"device {device}", str(buffer.device))
    expect(buffer.dim() >= 1 and len(buffer) >= 1, name, "shape [slots, ...], at least 1 slot", list(buffer.shape))
    row = buffer[0]
    apart = row.numel() >= 1 and row.is_contiguous() and (len(buffer) == 1 or buffer.stride(0) >= row.numel())
    expect(apart, name, "rows of contiguous elements, one behind the other", f"strides {buffer.stride()}")
    if device.type == "cuda":
        row_bytes, stride_bytes = (n * buffer.element_size() for n in (row.numel(), buffer.stride(0)))
        steps = row_bytes % 16 == 0 and stride_bytes % 16 == 0
        expect(steps, name, "rows in steps of 16 bytes on a GPU", f"{row_bytes} bytes every {stride_bytes}")
        expect(len(buffer) < 2**31, name, "fewer than 2^31 slots", len(buffer))
        expect_aligned(name, buffer)


def expect_moves(source: torch.Tensor, destination: torch.Tensor, num_slots: int, *, disjoint: bool) -> None:
    """Check the slots themselves; waits for a GPU."""
    for name, slots in (("source", source), ("destination", destination)):
        outside = slots[(slots < 0) | (slots >= num_slots)]
        expect(len(outside) == 0, name, f"slots 0..{num_slots - 1}, the rows of the smallest buffer", outside.tolist())
    unique, count = torch.unique(destination, return_counts=True)
    expect(len(unique) == len(destination), "destination", "distinct slots", unique[count > 1].tolist())
    if disjoint:
        both = source[torch.isin(source, destination)]
        expect(len(both) == 0, "disjoint", "no slot that is both source and destination", both.tolist())
