"""The CUDA launch of the row mover: its parameters as csrc/move_rows.cuh lays them out, and its grid."""

import ctypes
from collections.abc import Sequence

import torch

from treemla.launch import _launch

MOVE_THREADS = 576
MOVE_CHUNKS = 8  # 16-byte chunks a thread moves
MOVE_BUFFERS = 256  # of one launch
MOVE_SHARED_BYTES = MOVE_THREADS * MOVE_CHUNKS * 16
MOVES_AT_ONCE = MOVE_THREADS * MOVE_CHUNKS  # what one CTA holds when its slice of a row is one chunk


class MoveRowsArgs(ctypes.Structure):
    _fields_ = [
        ("buffers", ctypes.c_void_p * MOVE_BUFFERS),
        *((name, ctypes.c_void_p) for name in ("source", "destination")),
        ("stride_bytes", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("moves", "num_slots", "row_chunks", "slice_chunks")),
    ]


def move_rows(
    buffers: Sequence[torch.Tensor], source: torch.Tensor, destination: torch.Tensor, *, disjoint: bool
) -> None:
    """Copy rows from slots to slots. Enqueues a kernel for each size of rows, for up to MOVE_BUFFERS buffers of it."""
    alike: dict[tuple[int, int], list[int]] = {}
    for buffer in buffers:
        row_bytes, stride_bytes = buffer[0].numel() * buffer.element_size(), buffer.stride(0) * buffer.element_size()
        alike.setdefault((row_bytes // 16, stride_bytes), []).append(buffer.data_ptr())
    for (row_chunks, stride_bytes), pointers in alike.items():
        width = slice_chunks(row_chunks, len(source), disjoint=disjoint)
        for first in range(0, len(pointers), MOVE_BUFFERS):
            table = pointers[first : first + MOVE_BUFFERS]
            args = MoveRowsArgs(
                buffers=(ctypes.c_void_p * MOVE_BUFFERS)(*table),
                source=source.data_ptr(),
                destination=destination.data_ptr(),
                stride_bytes=stride_bytes,
                moves=len(source),
                num_slots=min(map(len, buffers)),
                row_chunks=row_chunks,
                slice_chunks=width,
            )
            grid = groups(len(source), width) * (row_chunks // width), len(table)
            _launch("treemla_move_rows", source.device, grid, MOVE_THREADS, MOVE_SHARED_BYTES, args)


def slice_chunks(row_chunks: int, moves: int, *, disjoint: bool) -> int:
    """Chunks of a row that a CTA moves: the most that divide it and, unless disjoint, leave room for all moves."""
    rows = 1 if disjoint else -(-moves // MOVE_CHUNKS)
    fitting = range(1, min(row_chunks, MOVE_THREADS // rows) + 1)
    return max(width for width in fitting if row_chunks % width == 0)


def groups(moves: int, slice_chunks: int) -> int:
    """Groups that the moves are cut into: one where a CTA holds them all."""
    return -(-moves // (MOVE_THREADS // slice_chunks * MOVE_CHUNKS))
