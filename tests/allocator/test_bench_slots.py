"""The made-up server of `bench-slots`: the same traffic for every allocator, and longer runs for ordered slots."""

import numpy as np
import pytest

from treemla.gate import slots
from treemla.kv import run_lengths


@pytest.fixture
def kinds():
    return slots.allocator_kinds()


def test_every_allocator_meets_the_same_traffic(kinds, monkeypatch) -> None:
    asked: dict[str, list[int]] = {}
    take = slots.Server.take
    for name, make in kinds.items():
        sizes = asked.setdefault(name, [])
        monkeypatch.setattr(slots.Server, "take", lambda self, n, sizes=sizes: sizes.append(sum(n)) or take(self, n))
        slots.churn(make(slots.CHURN_SLOTS), batch=4, steps=300, seed=3)
    assert asked["stock"] == asked["ordered"] and len(asked["stock"]) > 300


def test_every_call_is_served_and_no_slot_is_free_twice(kinds) -> None:
    allocator = kinds["ordered"](slots.CHURN_SLOTS)
    held = []
    take = allocator.alloc
    allocator.alloc = lambda n: held.append(take(n)) or held[-1]
    slots.churn(allocator, batch=8, steps=100, seed=3)
    assert all(slot is not None for slot in held)
    free = slots.free_pages(allocator).numpy()
    assert len(np.unique(free)) == len(free) == allocator.available_size()


def test_ordered_slots_lie_in_longer_runs_with_few_requests(kinds) -> None:
    late = {
        name: slots.churn(make(slots.CHURN_SLOTS), batch=4, steps=3000, seed=1).mean_runs[30:]
        for name, make in kinds.items()
    }
    assert np.mean(late["ordered"]) > 1.5 * np.mean(late["stock"])


def test_a_break_that_compacts_leaves_the_cache_in_longer_runs(kinds) -> None:
    found = {
        compacts: slots.churn(
            kinds["ordered"](slots.CHURN_SLOTS), batch=32, steps=600, seed=1, break_steps=200, compacts=compacts
        )
        for compacts in (False, True)
    }
    assert found[True].cached_run > 1.5 * found[False].cached_run


def test_a_fresh_pool_is_one_run(kinds) -> None:
    for make in kinds.values():
        assert run_lengths(make(100).alloc(100).numpy()).tolist() == [100]
