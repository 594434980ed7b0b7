"""Carrying out a plan of moves: rows first, then everything that names a slot, all or nothing."""

from collections.abc import Callable, Sequence

import torch

from treemla.checks import expect
from treemla.kv.compaction import Moves
from treemla.kv.rows import move_rows


def relocate(
    moves: Moves,
    buffers: Sequence[torch.Tensor],
    holders: Sequence[torch.Tensor],
    free: torch.Tensor,
    adopt_free: Callable[[torch.Tensor], None],
) -> None:
    """Carry out `moves`, given in slots: copy rows, then rewrite every holder and the free slots, all or nothing.

    buffers:    every layer's KV of every pool that shares the slots (the draft pool too), [slots, ...] each.
    holders:    int32 or int64 tensors of slots, any shape, rewritten in place; views of a table will do.
    free:       int64 [free], all free slots; `adopt_free` takes the free slots in ascending order as its last act.
    An exception leaves holders and free slots as they were; only rows of free slots may have changed.
    """
    if len(moves) == 0:
        return
    device = free.device
    source, destination = (torch.from_numpy(slots).to(device) for slots in (moves.source, moves.destination))
    new_slot = torch.from_numpy(moves.remap(smallest_num_slots(moves, buffers))).to(device)
    rewritten = [new_slot[holder.long()].to(holder.dtype) for holder in holders]
    before = [holder.clone() for holder in holders]
    now_free = torch.cat((free[~torch.isin(free, destination)], source)).sort().values
    move_rows(buffers, source, destination, disjoint=True, check_values=False)  # a plan's moves are
    try:
        for holder, new in zip(holders, rewritten, strict=True):
            holder.copy_(new)
        adopt_free(now_free)
    except BaseException:
        for holder, old in zip(holders, before, strict=True):
            holder.copy_(old)
        raise


def smallest_num_slots(moves: Moves, buffers: Sequence[torch.Tensor]) -> int:
    """Slots of the smallest pool; ValueError where a move lies outside it."""
    expect(len(buffers) > 0, "buffers", "at least one buffer", len(buffers))
    num_slots = min(len(buffer) for buffer in buffers)
    last = int(max(moves.source.max(), moves.destination.max()))
    expect(last < num_slots, "moves", f"slots below {num_slots}, the rows of the smallest buffer", last)
    return num_slots
