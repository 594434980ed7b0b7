"""Faults that the comparison of Engines must notice, put into treemla inside the process under test."""

from typing import Any

import torch

LARGE = 500  # slots


def inject(name: str) -> None:
    """Patch treemla in this process: a key of FAULTS."""
    FAULTS[name]()


def causal_mask() -> None:
    """Every tree token sees all earlier ones: the tree's mask is lost."""
    from treemla.sglang import backend

    pack = backend.pack_tree_mask

    def chains(mask: Any, seq_lens: Any, words: torch.Tensor, layout: Any, num_padding: int = 0) -> None:
        pack(mask, seq_lens, words, layout, num_padding=num_padding)
        tree_tokens = len(words) // len(seq_lens)
        ones = [2 ** (i + 1) - 1 for i in range(tree_tokens)] * len(seq_lens)
        words.copy_(torch.where(words == 0, words, torch.tensor(ones, device=words.device)))

    backend.pack_tree_mask = chains


def dropped_piece() -> None:
    """The first piece of the first request is missing from the merge, where the request has several."""
    from treemla import VerifyPlan

    update = VerifyPlan.update

    def update_and_drop(self: Any, seq_lens: Any, slots: Any, tail: int = 0) -> None:
        update(self, seq_lens, slots, tail)
        self.request_ptr[:1].copy_((self.request_ptr[1:2] > 2).int())  # of two, the merge would take one for direct

    VerifyPlan.update = update_and_drop


def length_off_by_one() -> None:
    """One committed token less than there is."""
    from treemla import VerifyPlan

    update = VerifyPlan.update
    VerifyPlan.update = lambda self, seq_lens, slots, tail=0: update(self, seq_lens - 1, slots, tail)


def forgotten_holder() -> None:
    """The first large compaction leaves one holder, the prefix tree, as it was: its slots are free and will be written.

    No other follows, because the next one's plan would notice and end the scheduler.
    """
    from treemla.sglang import allocator, slots

    relocate = allocator.relocate

    def forget(moves: Any, buffers: Any, holders: Any, free: Any, adopt_free: Any) -> None:
        is_large = len(moves) >= LARGE
        relocate(moves, buffers, [] if is_large else holders, free, adopt_free)
        if is_large:
            slots.IdleSlots.turn = lambda self: None

    allocator.relocate = forget


FAULTS = {
    "causal": causal_mask,
    "piece": dropped_piece,
    "length": length_off_by_one,
    "holder": forgotten_holder,
}
