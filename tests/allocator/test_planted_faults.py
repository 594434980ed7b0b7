"""The machine notices what servers have got wrong: each planted fault breaks a rule that the test names."""

import pytest
import serving
import torch
from serving import Serving
from test_machine import make, play, stock_classes

from treemla.sglang import allocator
from treemla.sglang.allocator import ordered_allocator_classes

EXAMPLES = 300  # at most: it stops at the first
TAKING = {"admit", "decode", "extend", "speculate", "exhaust", "nested_free_group", "retract", "radix_hit"}
GIVING = {"finish", "finish_with_a_reserved_tail", "free_group", "evict", "retract"}


def broken_rule(faulty: type, page_size: int) -> str:
    """The message of the first sequence that goes wrong with mixin `faulty` before our allocator."""
    classes = tuple(type(f"Faulty{ours.__name__}", (faulty, ours), {}) for ours in ordered_allocator_classes())
    with pytest.raises(AssertionError, match=r"^rule \w+: ") as caught:
        play(lambda: [make(classes, page_size), make(stock_classes(), page_size)], EXAMPLES, shrink=False)
    return str(caught.value).splitlines()[0]


class Healthy:
    pass


class FreesWithoutMerge:
    """Where the unmerged list is short it refuses, lest stock 0.5.16 read past it."""

    def merge_and_sort_free(self) -> None:
        pass

    def alloc_extend(self, *arguments):
        pages = arguments[5] // self.page_size + len(arguments[0]) + 1
        return None if pages > len(self.free_pages) else super().alloc_extend(*arguments)

    def alloc_decode(self, *arguments):
        return None if len(arguments[0]) > len(self.free_pages) else super().alloc_decode(*arguments)


class ReleasesSlotZero:
    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel():
            super().free(torch.cat((free_index.new_zeros(1), free_index)))


class ForgetsFreeGroups:
    def free_group_end(self) -> None:
        self.free_group = []
        super().free_group_end()


class CountsBeforeMerging:
    def alloc(self, need_size: int):
        short = need_size > len(self.free_pages) * self.page_size
        return None if short else super().alloc(need_size)


class HandsOutTheSameSlotsTwice:
    def alloc(self, need_size: int):
        before = self.free_pages
        slots = super().alloc(need_size)
        if need_size > 5 * self.page_size:
            self.free_pages = before
        return slots


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    ("faulty", "rules"),
    [
        (FreesWithoutMerge, TAKING),
        (CountsBeforeMerging, TAKING),
        (ReleasesSlotZero, GIVING | {"exhaust", "nested_free_group"}),
        (ForgetsFreeGroups, {"free_group", "nested_free_group"}),
    ],
)
def test_a_faulty_allocator_breaks_a_rule(faulty: type, rules: set[str], page_size: int) -> None:
    message = broken_rule(faulty, page_size)
    assert message.split()[1].rstrip(":") in rules


def test_slots_handed_out_twice_are_seen_at_once() -> None:
    assert "owned" in broken_rule(HandsOutTheSameSlotsTwice, 1)


@pytest.mark.parametrize("page_size", [1, 4])
def test_moves_applied_in_order_break_accept_path(monkeypatch, page_size: int) -> None:
    def in_order(buffers, source, destination) -> None:
        for buffer in buffers:
            for old, new in zip(source.tolist(), destination.tolist(), strict=True):
                buffer[new] = buffer[old]

    monkeypatch.setattr(serving, "move_rows", in_order)
    assert broken_rule(Healthy, page_size).startswith("rule accept_path: a live token reads another's row")


@pytest.mark.parametrize("left_out", [0, -1], ids=["a-request", "a-node"])
def test_a_holder_left_unmapped_breaks_compact(monkeypatch, left_out: int) -> None:
    relocate = allocator.relocate

    def forgets_one(moves, buffers, holders, free, adopt_free) -> None:
        kept = [holder for i, holder in enumerate(holders) if i != left_out % len(holders)]
        relocate(moves, buffers, kept, free, adopt_free)

    monkeypatch.setattr(allocator, "relocate", forgets_one)
    assert broken_rule(Healthy, 1).startswith("rule compact: owned and free")


def test_a_reserved_tail_that_is_not_freed_breaks_a_finish(monkeypatch) -> None:
    finish = Serving.finish

    def forgets_tail(self, request, *, keep: bool) -> None:
        request.allocated = len(request.tokens)
        finish(self, request, keep=keep)

    monkeypatch.setattr(Serving, "finish", forgets_tail)
    message = broken_rule(Healthy, 1)
    assert message.split()[1].rstrip(":") in GIVING
