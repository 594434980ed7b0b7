"""When the free list is ordered, and when it must not be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_machine import SIZE, make, stock_classes

from treemla.kv import run_lengths
from treemla.sglang.allocator import adopt_free_pages, free_pages, ordered_allocator_classes


def count_merges(allocator) -> list[int]:
    """A list that grows with every merge, by the slots that are free then."""
    merges, merge = [], allocator.merge_and_sort_free

    def counted() -> None:
        merges.append(len(free_pages(allocator)))
        merge()

    allocator.merge_and_sort_free = counted
    return merges


@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_freed_in_any_order_are_handed_out_as_one_run(page_size: int) -> None:
    ours, stock = (make(classes, page_size) for classes in (ordered_allocator_classes(), stock_classes()))
    for allocator in (ours, stock):
        slots = allocator.alloc(SIZE).view(-1, 8)
        for i in torch.randperm(len(slots), generator=torch.Generator().manual_seed(1)):
            allocator.free(slots[i])
    assert run_lengths(ours.alloc(SIZE).numpy()).tolist() == [SIZE]
    assert len(run_lengths(stock.alloc(SIZE).numpy())) > 8


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_free_never_sorts_nor_does_an_allocation_that_the_list_can_serve(page_size: int) -> None:
    allocator = make(ordered_allocator_classes(), page_size)
    merges = count_merges(allocator)
    for _ in range(3):
        allocator.free(allocator.alloc(SIZE // 4))
    assert merges == []


@pytest.mark.parametrize("page_size", [1, 4])
def test_an_allocation_that_fails_either_way_does_not_sort(page_size: int) -> None:
    allocator = make(ordered_allocator_classes(), page_size)
    merges = count_merges(allocator)
    allocator.free(allocator.alloc(SIZE // 2))
    assert allocator.alloc(SIZE + page_size) is None and merges == []


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 99)), max_size=60))
def test_sorting_is_paid_for_by_slots_that_came_and_went(steps: list[tuple[int, int]]) -> None:
    """All merges together sort no more than was ever handed out or freed, plus what was free at the start."""
    allocator = make(ordered_allocator_classes(), 1)
    merges, held, traffic = count_merges(allocator), [], 0
    for size, pick in steps:
        slots = allocator.alloc(size)
        if slots is not None:
            held.append(slots)
            traffic += size
        elif held:
            freed = held.pop(pick % len(held))
            allocator.free(freed)
            traffic += len(freed)
    assert sum(merges) <= traffic


@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_handed_out_stay_as_they_are_when_the_list_is_ordered(page_size: int) -> None:
    """They are a view of the list: ordering it in place would change them."""
    allocator = make(ordered_allocator_classes(), page_size)
    first, second = allocator.alloc(SIZE // 2), allocator.alloc(SIZE // 4)
    as_given = first.clone()
    allocator.free(second)
    allocator.alloc(SIZE // 2)  # orders
    assert torch.equal(first, as_given)


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_is_adopted_is_what_is_handed_out(page_size: int) -> None:
    allocator = make(ordered_allocator_classes(), page_size)
    allocator.free(allocator.alloc(SIZE))
    adopt_free_pages(allocator, torch.tensor([3, 4, 9]))
    assert allocator.available_size() == 3 * page_size
    assert (allocator.alloc(3 * page_size)[::page_size] // page_size).tolist() == [3, 4, 9]
    assert allocator.alloc(page_size) is None


def test_the_classes_are_drop_ins_and_made_once() -> None:
    for debug in (False, True):
        for ours, stock in zip(ordered_allocator_classes(debug=debug), stock_classes(), strict=True):
            assert issubclass(ours, stock)
        assert ordered_allocator_classes(debug=debug) is ordered_allocator_classes(debug=debug)
