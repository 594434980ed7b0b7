"""The device planner writes what its host mirror computes, integer for integer; so does the mask packer."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from treemla import MaskLayout, SlotRanges, SlotTable, VerifyPlan, VerifyShape, pack_tree_mask
from treemla.schedule import ON_DEVICE, committed_tokens
from treemla.tiles import MAX_BATCH, MAX_PARTS

CAPACITY = 70_100
length = st.one_of(
    st.sampled_from([0, 1, 31, 32, 33, 4096, 65_536, CAPACITY - 64, CAPACITY]),
    st.integers(0, 300),
    st.integers(0, CAPACITY),
)
lengths = st.one_of(
    st.lists(length, min_size=1, max_size=8),
    st.lists(length, min_size=1, max_size=40),
    st.lists(length, min_size=300, max_size=300),
)
index_dtypes = st.sampled_from([torch.int32, torch.int64])
tree_tokens = st.sampled_from([1, 2, 9, 31, 32, 33, 64])


@cache
def plan_for(tree_tokens: int, parts: int | None, fixed_split: int) -> VerifyPlan:
    fixed = {"fixed_split_tokens": fixed_split, "max_context": CAPACITY} if fixed_split else {}
    max_batch = 300 if fixed_split != 32 else 40  # one partial a piece: bounds the workspace
    return VerifyPlan(VerifyShape(1, tree_tokens), max_batch, "cuda", parts=parts, **fixed)


def table_of(batch: int, dtype: torch.dtype) -> SlotTable:
    return SlotTable(
        torch.zeros(1, CAPACITY, dtype=torch.int32, device="cuda"), torch.zeros(batch, dtype=dtype, device="cuda")
    )


def check_equals_mirror(plan: VerifyPlan, seq_lens: list[int], capacity: list[int], tail: int) -> None:
    committed = committed_tokens(np.array(seq_lens), np.array(capacity), tail=tail, tree_tokens=plan.shape.tree_tokens)
    made = plan.mirror(committed)
    for name in ON_DEVICE:
        expected = getattr(made, name)
        np.testing.assert_array_equal(getattr(plan, name)[: len(expected)].cpu().numpy(), expected, err_msg=name)


@settings(max_examples=300)
@given(lengths, tree_tokens, st.sampled_from([None, 1, 2, 7, 66, 500]), index_dtypes, st.sampled_from([0, 1]))
@example([CAPACITY, 100], 9, 4, torch.int64, 0)  # the first request has no pieces
@example([0], 1, 500, torch.int32, 1)
def test_balanced_plan_equals_its_mirror(
    seq_lens: list[int], tree_tokens: int, parts: int | None, dtype: torch.dtype, tail: int
) -> None:
    plan = plan_for(tree_tokens, parts, 0)
    plan.update(torch.tensor(seq_lens, dtype=dtype, device="cuda"), table_of(len(seq_lens), dtype), tail)
    check_equals_mirror(plan, seq_lens, [CAPACITY] * len(seq_lens), tail)


up_to_tiles = st.sampled_from([0, 1, 40, 500, 3000, 2**30])


@settings(max_examples=300)
@given(lengths, st.sampled_from([3, 7, 66, 132, 500]), up_to_tiles, up_to_tiles)
@example([0], 7, 2**30, 2**30)  # CTAs of no part
def test_plan_of_shared_blocks_equals_its_mirror(
    seq_lens: list[int], parts: int, halved_tiles: int, third_tiles: int
) -> None:
    """Also where the GPU has no kernel that takes shares: the planner knows nothing of kernels."""
    plan = VerifyPlan(VerifyShape(1, 9), 300, "cuda", parts=parts)
    plan.halved_tiles, plan.third_tiles = halved_tiles, third_tiles
    plan.update(torch.tensor(seq_lens, device="cuda"), table_of(len(seq_lens), torch.int64))
    check_equals_mirror(plan, seq_lens, [CAPACITY] * len(seq_lens), 0)


@settings(max_examples=150)
@given(lengths, st.sampled_from([1, 9, 64]), st.sampled_from([32, 512, 4096]), st.sampled_from([None, 3]), index_dtypes)
def test_fixed_plan_equals_its_mirror(
    seq_lens: list[int], tree_tokens: int, split: int, parts: int | None, dtype: torch.dtype
) -> None:
    plan = plan_for(tree_tokens if split == 4096 else 1, parts, split)
    seq_lens = seq_lens[: plan.max_batch]
    plan.update(torch.tensor(seq_lens, dtype=dtype, device="cuda"), table_of(len(seq_lens), dtype))
    check_equals_mirror(plan, seq_lens, [CAPACITY] * len(seq_lens), 0)


@settings(max_examples=150)
@given(lengths, st.data(), tree_tokens, index_dtypes, index_dtypes)
def test_plan_over_ranges_equals_its_mirror(
    seq_lens: list[int], data: st.DataObject, tree_tokens: int, lens_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Some ranges are one slot short, which makes their request overlong, or longer than needed."""
    excess = data.draw(st.lists(st.sampled_from([-1, 0, 0, 5]), min_size=len(seq_lens), max_size=len(seq_lens)))
    held = [n + tree_tokens + more for n, more in zip(seq_lens, excess, strict=True)]
    indptr = torch.tensor([0, *np.cumsum(held)], dtype=dtype, device="cuda")
    plan = plan_for(tree_tokens, None, 0)
    plan.update(
        torch.tensor(seq_lens, dtype=lens_dtype, device="cuda"),
        SlotRanges(indptr, torch.zeros(1, dtype=dtype, device="cuda")),
    )
    check_equals_mirror(plan, seq_lens, held, 0)


def test_lengths_beyond_32_bits_are_overlong() -> None:
    plan = plan_for(9, None, 0)
    seq_lens = [2**32 + 5, 2**31, -7, 2**62]
    plan.update(torch.tensor(seq_lens, device="cuda"), table_of(4, torch.int64))
    check_equals_mirror(plan, seq_lens, [CAPACITY] * 4, 0)


@st.composite
def masks(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat bits, more than any layout needs, and lengths."""
    seq_lens = draw(st.lists(st.one_of(st.just(0), st.integers(0, 300)), min_size=1, max_size=6))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    return torch.rand(64 * (sum(seq_lens) + 64 * len(seq_lens)), generator=random) < 0.5, torch.tensor(seq_lens)


@settings(max_examples=200)
@given(
    masks(),
    st.sampled_from([1, 2, 9, 31, 32, 33, 63, 64]),
    st.sampled_from(MaskLayout),
    st.data(),
    index_dtypes,
    st.sampled_from([torch.bool, torch.uint8]),
)
def test_packing_equals_the_portable_one(
    drawn: tuple[torch.Tensor, torch.Tensor],
    tree_tokens: int,
    layout: MaskLayout,
    data: st.DataObject,
    dtype: torch.dtype,
    mask_dtype: torch.dtype,
) -> None:
    mask, seq_lens = drawn[0].to(mask_dtype), drawn[1].to(dtype)
    num_padding = data.draw(st.integers(0, len(seq_lens)))
    words = torch.full((len(seq_lens) * tree_tokens,), 77)
    on_gpu = words.cuda()
    pack_tree_mask(mask, seq_lens, words, layout, num_padding)
    pack_tree_mask(mask.cuda(), seq_lens.cuda(), on_gpu, layout, num_padding)
    assert on_gpu.tolist() == words.tolist()


@pytest.mark.parametrize("held", [0, 8, 9, 100, 351, 352, 359, 360, 361])
def test_rows_that_a_full_mask_does_not_hold_get_zero_words(held: int) -> None:
    """Two requests of 31 committed and 9 tree tokens; the mask ends after `held` elements."""
    tree_tokens, seq_lens = 9, torch.tensor([31, 31])
    mask = torch.ones(2 * 9 * 40, dtype=torch.bool)
    words = torch.full((18,), 77, device="cuda")
    pack_tree_mask(mask[:held].cuda(), seq_lens.cuda(), words, MaskLayout.FULL)
    ends = [40 * (row + 1) for row in range(18)]
    assert words.tolist() == [2**tree_tokens - 1 if end <= held else 0 for end in ends]


def test_plans_of_any_size_in_any_order() -> None:
    """The largest takes more shared memory than a kernel has unasked, and a smaller one after it takes less."""
    large = VerifyPlan(VerifyShape(1, 1), MAX_BATCH, "cuda", parts=MAX_PARTS)
    for batch in (MAX_BATCH, MAX_BATCH - 1, 1, MAX_BATCH):
        seq_lens = [(7919 * b) % 5000 for b in range(batch)]
        large.update(torch.tensor(seq_lens, device="cuda"), table_of(batch, torch.int64))
        check_equals_mirror(large, seq_lens, [CAPACITY] * batch, 0)
