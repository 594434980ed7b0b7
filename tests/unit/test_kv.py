"""Fragmentation figures, plans of moves, and their carrying out, on pools that hypothesis draws."""

from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from treemla.kv import Moves, measure, move_rows, plan_moves, relocate, run_lengths
from treemla.kv.fragmentation import largest_run_share


@dataclass
class Pool:
    """Holders and the free slots, shuffled; slot 0 and `spare` slots belong to nobody."""

    size: int
    holders: list[np.ndarray]
    free: np.ndarray


@st.composite
def pools(draw, most_slots: int = 60) -> Pool:
    """Slots dealt to holders in chunks, so that there are runs; some holders share a prefix with another."""
    size = draw(st.integers(1, most_slots))
    chunks = np.split(np.arange(1, size + 1), sorted(draw(st.sets(st.integers(1, size), max_size=20))))
    order = draw(st.permutations(range(len(chunks))))
    count = draw(st.integers(0, 5))
    owners = draw(st.lists(st.integers(-1, count - 1), min_size=len(chunks), max_size=len(chunks)))
    dealt: list[list[np.ndarray]] = [[] for _ in range(count + 1)]
    for chunk in order:
        dealt[owners[chunk]].append(chunks[chunk])  # -1: the last list, which is free
    holders = [np.concatenate([np.empty(0, np.int64), *mine]) for mine in dealt]
    free = holders.pop()
    if count and draw(st.booleans()):
        shared = holders[draw(st.integers(0, count - 1))]
        holders.append(shared[: draw(st.integers(0, len(shared)))])
    return Pool(size, holders, free)


def runs(slots: np.ndarray) -> int:
    return len(run_lengths(slots))


@dataclass
class Live:
    """A pool with content: two buffers, holders and free list as tensors."""

    buffers: list[torch.Tensor]
    holders: list[torch.Tensor]
    free: torch.Tensor

    def contents(self) -> list[list[torch.Tensor]]:
        return [[buffer[holder.long()] for buffer in self.buffers] for holder in self.holders]

    def adopt(self, free: torch.Tensor) -> None:
        self.free = free


def live(pool: Pool) -> Live:
    buffers = [torch.arange(pool.size + 1), torch.rand(pool.size + 1, 3)]
    holders = [torch.from_numpy(slots.astype(("int32", "int64")[i % 2])) for i, slots in enumerate(pool.holders)]
    return Live(buffers, holders, torch.from_numpy(pool.free.copy()))


def carry_out(moves: Moves, state: Live) -> None:
    relocate(moves, state.buffers, state.holders, state.free, state.adopt)


def all_equal(one: list, other: list) -> bool:
    return all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


@given(pools(), st.integers(0, 80))
def test_compaction_changes_no_content_and_scatters_no_holder(pool: Pool, budget: int) -> None:
    state = live(pool)
    before = state.contents()
    carry_out(plan_moves(pool.holders, pool.free, budget), state)
    assert all_equal(before, state.contents())
    for old, new in zip(pool.holders, state.holders, strict=True):
        assert runs(new.numpy()) <= runs(old)


@given(pools(), st.integers(0, 80))
def test_compaction_moves_live_slots_one_to_one_to_free_ones(pool: Pool, budget: int) -> None:
    state = live(pool)
    moves = plan_moves(pool.holders, pool.free, budget)
    carry_out(moves, state)
    held = {slot for holder in pool.holders for slot in holder.tolist()}
    now = {slot for holder in state.holders for slot in holder.tolist()}
    assert len(moves) <= budget
    assert set(moves.source.tolist()) <= held and set(moves.destination.tolist()) <= set(pool.free.tolist())
    assert len(now) == len(held)
    assert sorted(state.free.tolist()) == sorted(set(range(1, pool.size + 1)) - now)


@given(pools(), st.integers(0, 80), st.randoms())
def test_a_plan_depends_on_the_set_of_free_slots_alone(pool: Pool, budget: int, random) -> None:
    shuffled = random.sample(pool.free.tolist(), len(pool.free))
    one = plan_moves(pool.holders, pool.free, budget)
    other = plan_moves(pool.holders, np.array(shuffled, np.int64), budget)
    assert one.source.tolist() == other.source.tolist() and one.destination.tolist() == other.destination.tolist()


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.permutations(range(n)), st.permutations(range(n)))))
def test_rows_move_as_if_all_were_read_first(pairs: tuple[list[int], list[int]]) -> None:
    source, destination = (torch.tensor(slots) for slots in pairs)
    rows = torch.arange(len(source)) + 100
    buffers = [rows.clone(), rows[:, None].repeat(1, 2)]
    move_rows(buffers, source, destination)
    for buffer, old in zip(buffers, (rows, rows[:, None].repeat(1, 2)), strict=True):
        assert torch.equal(buffer[destination], old[source])


def test_a_scattered_holder_becomes_one_run_where_a_free_run_takes_it() -> None:
    holder = np.array([1, 3, 5, 6, 9])
    moves = plan_moves([holder], np.array([2, 4, 20, 21, 22, 23, 24, 25]), budget=5)
    assert moves.remap(26)[holder].tolist() == [20, 21, 22, 23, 24]


def test_a_holder_too_large_for_any_free_run_gets_its_most_broken_part_moved() -> None:
    holder = np.array([*range(1, 11), 12, 14, 16, *range(18, 28)])
    moves = plan_moves([holder], np.array([40, 41, 42]), budget=100)
    assert moves.source.tolist() == [12, 14, 16]


def test_shared_slots_move_for_all_who_hold_them() -> None:
    state = live(Pool(12, [np.array([1, 3, 5]), np.array([1, 3, 7])], np.array([9, 10, 11, 12])))
    carry_out(plan_moves([holder.numpy() for holder in state.holders], state.free.numpy(), 3), state)
    assert [holder.tolist() for holder in state.holders] == [[9, 10, 11], [9, 10, 7]]


def test_a_move_that_would_scatter_another_holder_is_not_made() -> None:
    moves = plan_moves([np.array([4, 1, 8]), np.array([1, 2, 3])], np.array([10, 11, 12]), 3)
    assert len(moves) == 0  # slots 4, 1 and 8 would be one run, but 1, 2, 3 is one already


class RaiseAt(TorchFunctionMode):
    """Raises once, in the n-th call of torch."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.left = call

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


@given(pools(most_slots=30))
def test_an_interrupted_relocation_leaves_the_old_state_whichever_step_it_hits(pool: Pool) -> None:
    moves = plan_moves(pool.holders, pool.free, 30)
    step = 0
    while True:
        step += 1
        state = live(pool)
        before = state.contents()
        with RaiseAt(step) as interruption, suppress(KeyboardInterrupt):
            carry_out(moves, state)
        assert all_equal(before, state.contents())
        if interruption.left > 0:
            break  # it ran to its end
        assert [holder.tolist() for holder in state.holders] == [slots.tolist() for slots in pool.holders]
        assert state.free.tolist() == pool.free.tolist()
    assert step > 8 or len(moves) == 0


def test_a_failure_to_adopt_the_free_slots_undoes_the_holders() -> None:
    pool = Pool(9, [np.array([1, 3, 5])], np.array([6, 7, 8, 9]))
    state = live(pool)

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        relocate(plan_moves(pool.holders, pool.free, 9), state.buffers, state.holders, state.free, fail)
    assert state.holders[0].tolist() == [1, 3, 5]


@pytest.mark.parametrize(
    ("holders", "free", "budget", "message"),
    [
        ([[1, 2]], [2, 3], 1, r"free: expected slots that nobody holds, got \[2\]"),
        ([[1, 2, 1]], [3], 1, r"holders\[0\]: expected distinct slots, got \[1\]"),
        ([[1]], [3, 3], 1, r"free: expected distinct slots, got \[3\]"),
        ([[1]], [0, 3], 1, r"free: expected slots above 0, the padding slot, got \[0\]"),
        ([[1]], [3], -1, r"budget: expected at least 0 moves, got -1"),
    ],
)
def test_a_plan_that_could_not_be_right_names_the_slots(holders, free, budget: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_moves([np.array(slots) for slots in holders], np.array(free), budget)


def test_moves_outside_the_smallest_buffer_change_nothing() -> None:
    small, large = torch.arange(4), torch.arange(10)
    holder = torch.tensor([1, 3])
    with pytest.raises(ValueError, match="below 4, the rows of the smallest buffer, got 8"):
        relocate(Moves(np.array([1, 3]), np.array([7, 8])), [large, small], [holder], torch.tensor([7, 8]), print)
    assert torch.equal(large, torch.arange(10)) and holder.tolist() == [1, 3]


def test_moves_need_distinct_slots() -> None:
    with pytest.raises(ValueError, match=r"moves: expected distinct slots, got \[2\]"):
        Moves(np.array([1, 2]), np.array([2, 3]))


def test_moves_of_pages_are_moves_of_their_slots_in_order() -> None:
    moves = Moves(np.array([5, 2]), np.array([8, 9])).in_slots(4)
    assert moves.source.tolist() == [20, 21, 22, 23, 8, 9, 10, 11]
    assert moves.destination.tolist() == [32, 33, 34, 35, 36, 37, 38, 39]


@given(pools())
def test_run_lengths_rebuild_the_slots(pool: Pool) -> None:
    for slots in pool.holders:
        lengths = run_lengths(slots)
        assert lengths.sum() == len(slots) and (lengths > 0).all()
        pieces = np.split(slots, np.cumsum(lengths)[:-1]) if len(slots) else []
        assert all((np.diff(piece) == 1).all() for piece in pieces)
        assert all(a[-1] + 1 != b[0] for a, b in pairwise(pieces))


def test_figures_of_a_known_pool() -> None:
    found = measure([np.array([1, 2, 3, 7, 8]), np.arange(20, 30)], np.array([40, 50, 51, 52]), tile_rows=4)
    assert (found.tokens, found.runs, found.mean_run, found.runs_per_request) == (15, 3, 5.0, 1.5)
    assert found.largest_free_share == 0.75
    assert found.rows_per_copy == 15 / (3 + 3)  # cut at 3 and at the tile's end 4; ten slots in tiles of 4


def test_nothing_live_and_nothing_free_have_figures_too() -> None:
    found = measure([], np.empty(0, np.int64))
    assert (found.mean_run, found.runs_per_request, found.rows_per_copy) == (0, 0, 0)
    assert largest_run_share(np.empty(0, np.int64)) == 1.0
