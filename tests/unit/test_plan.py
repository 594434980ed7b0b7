"""VerifyPlan: what it allocates, what update writes, what it refuses."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treemla import SlotRanges, SlotTable, VerifyPlan, VerifyShape, cost
from treemla.schedule import DIRECT, OVERLONG, Schedule

SHAPE = VerifyShape(num_heads=2, tree_tokens=4, latent_dim=16, rope_dim=8, dtype=torch.float32)


def table(batch: int, columns: int) -> SlotTable:
    return SlotTable(torch.zeros(batch, columns, dtype=torch.int32), torch.arange(batch))


def written(plan: VerifyPlan) -> list[list]:
    return [tensor.tolist() for tensor in plan.tensors[:4]]


def check_holds(plan: VerifyPlan, schedule: Schedule) -> None:
    for held, made in zip(
        plan.tensors, (schedule.committed, schedule.pieces, schedule.part_work, schedule.request_ptr), strict=False
    ):
        np.testing.assert_array_equal(held[: len(made)].numpy(), made)


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=40),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([0, 1]),
    st.sampled_from([None, 32, 512]),
)
def test_update_writes_the_mirror(
    lengths: list[int], dtype: torch.dtype, tail: int, fixed_split_tokens: int | None
) -> None:
    fixed = {} if fixed_split_tokens is None else {"fixed_split_tokens": fixed_split_tokens, "max_context": 5000}
    plan = VerifyPlan(SHAPE, 40, "cpu", **fixed)
    plan.update(torch.tensor(lengths, dtype=dtype), table(len(lengths), 5004), tail)
    made = plan.mirror(np.maximum(0, np.array(lengths, np.int32) - tail))
    check_holds(plan, made)
    assert plan.batch == len(lengths)
    assert made.pieces[:, 3].max() < len(plan.partial_out)


def test_update_with_a_smaller_batch_leaves_no_piece_of_the_larger() -> None:
    plan = VerifyPlan(SHAPE, 8, "cpu")
    plan.update(torch.full((8,), 3000), table(8, 3004))
    plan.update(torch.tensor([40]), table(1, 3004))
    assert plan.batch == 1
    assert plan.part_work[-1, 5] == plan.request_ptr[1] == len(plan.mirror(np.array([40], np.int32)).pieces)


@pytest.mark.parametrize(("overhead", "cut"), [(0, [320, 329, 256, 329, 169]), (9, [329, 329, 169])])
def test_a_tiling_that_is_given_is_taken(overhead: int, cut: list[int]) -> None:
    """Requests of 6, 6 and 3 tiles: without overhead a share is 5, with 9 tiles between them 11."""
    plan = VerifyPlan(VerifyShape(8, 9), 3, "cpu", path="wgmma", block_rows=40, parts=3, overhead_tiles=overhead)
    assert (plan.blocks, plan.block_rows, plan.parts) == (2, 40, 3)
    assert plan.partial_out.shape[1:3] == (2, 40)
    assert plan.mirror(np.array([320, 320, 160], np.int32)).pieces[:, 2].tolist() == cut


def test_workspace_depends_on_parts_and_not_on_batch() -> None:
    """Under the balanced rule; a request more costs its schedule entries: committed, request_ptr and one piece."""
    small, large = (VerifyPlan(SHAPE, batch, "cpu", parts=132) for batch in (1, 301))
    assert small.partial_out.shape == large.partial_out.shape
    assert large.workspace_bytes - small.workspace_bytes == 300 * 4 * (1 + 1 + 4)


def test_workspace_of_a_fixed_split_holds_the_longest_contexts() -> None:
    plan = VerifyPlan(SHAPE, 3, "cpu", fixed_split_tokens=64, max_context=1000)
    plan.update(torch.full((3,), 1000), table(3, 1004))
    assert sorted(plan.pieces[:, 3].tolist()) == list(range(len(plan.partial_out)))


@pytest.mark.parametrize("slots", [table(2, 50), SlotRanges(torch.tensor([0, 50, 100]), torch.zeros(100))])
def test_update_refuses_lengths_above_the_slots_and_writes_nothing(slots: SlotTable | SlotRanges) -> None:
    if isinstance(slots, SlotRanges):
        slots = SlotRanges(slots.kv_indptr, slots.kv_indices.long())
    plan = VerifyPlan(SHAPE, 2, "cpu")
    plan.update(torch.tensor([46, 46]), slots)
    before = written(plan)
    with pytest.raises(
        ValueError, match=r"seq_lens: expected n_b \+ 4 tree tokens <= 50 slots, got seq_lens\[1\] = 47"
    ):
        plan.update(torch.tensor([46, 47]), slots)
    assert written(plan) == before


def test_update_refuses_lengths_above_max_context() -> None:
    plan = VerifyPlan(SHAPE, 1, "cpu", fixed_split_tokens=32, max_context=64)
    plan.update(torch.tensor([64]), table(1, 500))
    with pytest.raises(ValueError, match="seq_lens: expected n_b"):
        plan.update(torch.tensor([65]), table(1, 500))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, r"max_batch: expected 1\.\.4096, got 0"),
        ({"max_batch": 4097}, r"max_batch: expected 1\.\.4096, got 4097"),
        ({"path": "tcgen05"}, r"path: expected one of \['mma', 'wgmma'\] on cpu, got 'tcgen05'"),
        ({"block_rows": 44}, r"block_rows: expected one of \[8, 16, 24, 32, 40\] \(mma\), got 44"),
        ({"block_rows": 48}, r"block_rows: expected one of \[8, 16, 24, 32, 40\] \(mma\), got 48"),
        ({"block_rows": 8.0}, r"block_rows: expected one of \[8, 16, 24, 32, 40\] \(mma\), got 8.0"),
        ({"overhead_tiles": -1}, r"overhead_tiles: expected 0\.\.1024, got -1"),
        ({"contexts": ()}, r"contexts: expected at least one length, got \(\)"),
        ({"contexts": (5, -1)}, r"contexts: expected 0\.\.1073741824, got -1"),
        ({"parts": 0}, r"parts: expected 1\.\.2048, got 0"),
        ({"parts": 2049}, r"parts: expected 1\.\.2048, got 2049"),
        ({"fixed_split_tokens": 33, "max_context": 9}, "fixed_split_tokens: expected a multiple of 32, got 33"),
        ({"fixed_split_tokens": 0, "max_context": 9}, r"fixed_split_tokens: expected 32\.\.1073741824, got 0"),
        (
            {"fixed_split_tokens": 2**32, "max_context": 9},
            r"fixed_split_tokens: expected 32\.\.1073741824, got 4294967296",
        ),
        ({"fixed_split_tokens": 32}, "max_context: expected a length"),
        ({"fixed_split_tokens": 32, "max_context": -1}, r"max_context: expected 0\.\.1073741824, got -1"),
        ({"max_context": 100}, "max_context: expected None without fixed_split_tokens, got 100"),
    ],
)
def test_plan_refuses(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VerifyPlan(SHAPE, **({"max_batch": 2, "device": "cpu"} | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": None}, "shape: expected a VerifyShape, got NoneType"),
        ({"max_batch": 4.0}, "max_batch: expected an int, got 4.0"),
        ({"max_batch": True}, "max_batch: expected an int, got True"),
        ({"contexts": (4096.0,)}, "contexts: expected an int, got 4096.0"),
        ({"parts": "3"}, "parts: expected an int, got '3'"),
        ({"fixed_split_tokens": 64.0, "max_context": 9}, "fixed_split_tokens: expected an int, got 64.0"),
        ({"fixed_split_tokens": 64, "max_context": 9.5}, "max_context: expected an int, got 9.5"),
        ({"device": None}, "device: expected a torch.device or its name, got None"),
    ],
)
def test_plan_refuses_types(options: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        VerifyPlan(**({"shape": SHAPE, "max_batch": 2, "device": "cpu"} | options))


@pytest.mark.parametrize("device", ["junk", "cuda:99"])
def test_plan_refuses_devices_that_torch_cannot_use(device: str) -> None:
    with pytest.raises(ValueError, match=f"device: expected a device that torch can use, got '{device}'"):
        VerifyPlan(SHAPE, 2, device)


def test_ranges_that_run_backwards_are_named() -> None:
    slots = SlotRanges(torch.tensor([60, 50, 100]), torch.arange(100))
    with pytest.raises(ValueError, match=r"slots\.kv_indptr: expected ascending values, got"):
        VerifyPlan(SHAPE, 2, "cpu").update(torch.tensor([1, 1]), slots)


def test_lengths_at_the_end_of_64_bits_are_too_long() -> None:
    with pytest.raises(ValueError, match="seq_lens: expected n_b"):
        VerifyPlan(SHAPE, 1, "cpu").update(torch.tensor([2**63 - 2]), table(1, 500))


@pytest.mark.parametrize(
    ("seq_lens", "slots", "tail", "error", "message"),
    [
        (torch.zeros(2), table(2, 9), 0, TypeError, "seq_lens: expected dtype torch.int32 or torch.int64, got"),
        (torch.zeros(3, dtype=torch.int32), table(2, 9), 0, ValueError, r"seq_lens: expected shape \[2\], got \[3\]"),
        (torch.zeros(3, dtype=torch.int32), table(3, 9), 0, ValueError, r"seq_lens: expected 1\.\.2 requests"),
        (torch.zeros(0, dtype=torch.int32), table(0, 9), 0, ValueError, r"seq_lens: expected 1\.\.2 requests"),
        (torch.zeros(4, dtype=torch.int32)[::2], table(2, 9), 0, ValueError, "seq_lens: expected a contiguous tensor"),
        (torch.zeros(2, dtype=torch.int32, device="meta"), table(2, 9), 0, ValueError, "seq_lens: expected device cpu"),
        (torch.zeros(2, dtype=torch.int32), table(2, 9), 2, ValueError, r"tail: expected 0\.\.1, got 2"),
        (
            torch.zeros(2, dtype=torch.int32),
            None,
            0,
            TypeError,
            "slots: expected SlotTable or SlotRanges, got NoneType",
        ),
        ([0, 0], table(2, 9), 0, TypeError, "seq_lens: expected a tensor, got list"),
    ],
)
def test_update_refuses(seq_lens, slots, tail: int, error: type[Exception], message: str) -> None:
    plan = VerifyPlan(SHAPE, 2, "cpu")
    plan.update(torch.tensor([3, 4]), table(2, 9))
    before = written(plan)
    with pytest.raises(error, match=message):
        plan.update(seq_lens, slots, tail)
    assert written(plan) == before


def schedule(**changed: list) -> Schedule:
    """One request, two parts."""
    arrays = {
        "committed": [60],
        "pieces": [[0, 0, 32, 0], [0, 32, 64, 1]],
        "part_ptr": [0, 1, 2],
        "request_ptr": [0, 2],
    }
    arrays |= changed
    return Schedule(**{name: np.array(value, np.int32) for name, value in arrays.items()})


def test_load_takes_a_schedule_as_it_is() -> None:
    plan = VerifyPlan(SHAPE, 1, "cpu", parts=2)
    plan.load(schedule(committed=[OVERLONG], pieces=[[0, 0, 0, DIRECT]], request_ptr=[0, 1], part_ptr=[0, 0, 1]))
    work = [[0] * 6 + [1, 0], [0, 0, 0, DIRECT, 0, 1, 1, 0]]  # the first part is empty
    assert written(plan) == [[OVERLONG], [[0, 0, 0, DIRECT], [0, 0, 0, 0]], work, [0, 1]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"committed": [1, 1]}, "schedule: expected at most 1 requests, got 2"),
        ({"part_ptr": [0, 2]}, "schedule: expected 2 parts, got 1"),
        ({"pieces": [[0, 0, 8, 0]] * 3}, "schedule: expected at most 2 pieces, got 3"),
        ({"pieces": [[0, 0, 8, 2]]}, "schedule: expected slots below 2, got 2"),
    ],
)
def test_load_refuses_what_the_plan_cannot_hold(changed: dict[str, list], message: str) -> None:
    plan = VerifyPlan(SHAPE, 1, "cpu", parts=2)
    with pytest.raises(ValueError, match=message):
        plan.load(schedule(**changed))


@pytest.mark.parametrize(
    "cut",
    [
        {"halved_tiles": 5, "path": "mma"},
        {"halved_tiles": 5, "path": "wgmma", "parts": 1},
        {"third_tiles": 5, "path": "wgmma", "parts": 2},
        {"third_tiles": 5, "path": "wgmma", "block_rows": 40},
        {"halved_tiles": 5, "path": "wgmma", "fixed_split_tokens": 64, "max_context": 64},
    ],
    ids=str,
)
def test_a_plan_without_such_shares_says_why(cut: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"(halved|third)_tiles: expected 0 \(.*: no such shares\), got 5"):
        VerifyPlan(VerifyShape(8, 9), 1, "cpu", **cut)


def test_a_plan_shares_blocks_as_it_is_told_by_either_kind() -> None:
    shape, wgmma = VerifyShape(8, 9), {"path": "wgmma", "block_rows": 72, "parts": 6}
    for cut, shares in (({"third_tiles": 9}, 3), ({"halved_tiles": 9}, 2), ({}, 1)):
        plan = VerifyPlan(shape, 1, "cpu", **wgmma, **cut)
        assert plan.by_shares == (shares > 1)
        assert plan.mirror(np.array([500], np.int32)).shares.tolist() == [shares]


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ({}, (50, 20)),
        ({"parts": 2}, (50, 0)),
        ({"parts": 1}, (0, 0)),
        ({"block_rows": 64}, (0, 0)),
        ({"third_tiles": 7}, (0, 7)),
    ],
    ids=str,
)
def test_the_model_s_shares_are_taken_where_there_are_such(
    cut: dict[str, int], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with another height, and no more of them than parts; one that the caller names leaves the other 0."""
    monkeypatch.setattr(VerifyPlan, "_tiling", lambda plan, contexts: cost.Tiling(1, 72, 9, 2, 50, 20))
    plan = VerifyPlan(VerifyShape(8, 9), 1, "cpu", path="wgmma", **cut)
    assert (plan.halved_tiles, plan.third_tiles) == expected


def test_from_tensors_is_the_plan_that_verify_reads() -> None:
    plan = VerifyPlan(SHAPE, 3, "cpu", parts=5)
    again = VerifyPlan.from_tensors(SHAPE, 2, "mma", False, False, *plan.tensors)
    for name in (
        "shape",
        "path",
        "fixed_split",
        "by_shares",
        "max_batch",
        "device",
        "blocks",
        "block_rows",
        "parts",
        "workspace_bytes",
    ):
        assert getattr(again, name) == getattr(plan, name)
    assert all(mine is its for mine, its in zip(again.tensors, plan.tensors, strict=True))


def test_a_block_of_more_rows_than_a_tree_has_tokens_needs_several_heads() -> None:
    """A block of 72 rows has words for 37 tokens."""
    with pytest.raises(ValueError, match=r"block_rows: expected one of \[8, .*, 64\] \(wgmma\), got 72"):
        VerifyPlan(VerifyShape(1, 64), 1, "cpu", path="wgmma", block_rows=72)
    assert VerifyPlan(VerifyShape(2, 64), 1, "cpu", path="wgmma", block_rows=72).block_rows == 72
