"""Debug mode: a wrong free is an error that names the slots and leaves the allocator as it was."""

import pytest
import torch
from test_machine import SIZE, make

from treemla.sglang.allocator import compact, free_pages, ordered_allocator_classes, waiting_frees


def state(allocator) -> tuple:
    waiting = waiting_frees(allocator)
    return free_pages(allocator).tolist(), len(allocator.free_pages), None if waiting is None else waiting.tolist()


def refuses(allocator, slots: list[int], message: str) -> None:
    before = state(allocator)
    with pytest.raises(ValueError, match=message):
        allocator.free(torch.tensor(slots))
    assert state(allocator) == before


@pytest.fixture(params=[1, 4])
def used(request):
    """An allocator that has handed out its first 24 slots and taken back pages of the next 8."""
    allocator = make(ordered_allocator_classes(debug=True), request.param)
    allocator.alloc(24)
    allocator.free(allocator.alloc(8))
    return allocator


def test_freeing_the_padding_slot_is_refused(used) -> None:
    refuses(used, [0, used.page_size], r"free_index: expected slots in use, each once, got {'padding': \[0\]}")


def test_freeing_a_free_slot_is_refused(used) -> None:
    last = 24 + used.page_size  # handed out and taken back
    refuses(used, [5, last, last + 1], rf"'already free': \[{last}, {last + 1}\]")


def test_freeing_twice_is_refused(used) -> None:
    used.free(torch.arange(4, 8))
    refuses(used, [4, 5], r"'already free': \[4, 5\]")
    refuses(used, [9, 10, 9], r"'twice in one call': \[9\]")


def test_freeing_a_slot_of_no_pool_is_refused(used) -> None:
    beyond = SIZE + used.page_size
    refuses(used, [5, beyond, -1], rf"'foreign': \[-1, {beyond}\]")


def test_freeing_twice_in_a_group_is_refused(used) -> None:
    used.free_group_begin()
    used.free(torch.tensor([8, 9]))
    refuses(used, [9, 10], r"'already freed in this group': \[9\]")
    used.free(torch.tensor([10, 11]))
    used.free_group_end()
    assert {8 // used.page_size, 11 // used.page_size} <= set(free_pages(used).tolist())


def test_a_group_in_a_group_is_refused_and_names_what_it_would_lose(used) -> None:
    used.free_group_begin()
    used.free(torch.tensor([8, 9]))
    before = state(used)
    with pytest.raises(ValueError, match=r"free_group_begin: expected no open group.*\[8, 9\]"):
        used.free_group_begin()
    assert state(used) == before


def test_freeing_a_protected_slot_is_refused_until_it_is_released(used) -> None:
    locked = torch.tensor([12, 13])
    used.protected = lambda: locked
    refuses(used, [12, 14], r"'protected': \[12\]")
    locked = torch.empty(0, dtype=torch.int64)
    used.free(torch.tensor([12, 14]))


def test_all_that_is_wrong_is_named_at_once(used) -> None:
    refuses(used, [0, 9, 9], r"'padding': \[0\], 'twice in one call': \[9\]")


def test_frees_of_pages_are_checked_too(used) -> None:
    if not hasattr(used, "free_page_ids"):
        assert hasattr(used, "backup_state")  # 0.5.16 has no such call
        return
    before = state(used)
    page = 24 // used.page_size + 1
    with pytest.raises(ValueError, match=rf"'already free': \[{page * used.page_size}\]"):
        used.free_page_ids(torch.tensor([page]))
    assert state(used) == before


def test_compaction_in_an_open_group_is_refused(used) -> None:
    used.free_group_begin()
    before = state(used)
    with pytest.raises(ValueError, match="expected no open free group"):
        compact(used, [], [], 10)
    assert state(used) == before


def test_a_compaction_whose_holders_hold_a_free_slot_changes_nothing(used) -> None:
    before = state(used)
    free = torch.arange(24 + used.page_size, 24 + 2 * used.page_size)
    with pytest.raises(ValueError, match="free: expected slots that nobody holds"):
        compact(used, [free], [torch.zeros(SIZE + 4)], 10)
    assert state(used) == before


def test_a_dry_run_says_what_would_move_and_moves_nothing(used) -> None:
    holder = torch.cat([page + torch.arange(used.page_size) for page in (4 * torch.tensor([1, 3, 5]))])
    before = state(used), holder.clone()
    moves = compact(used, [holder], [torch.zeros(SIZE + 4)], 10, dry_run=True)
    assert len(moves) == 3 * used.page_size
    assert state(used) == before[0] and torch.equal(holder, before[1])
