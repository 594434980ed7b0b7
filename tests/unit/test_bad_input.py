"""verify_attention refuses what it cannot compute: the message names argument, expected and got; nothing is written."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from treemla import SlotRanges, SlotTable, VerifyPlan, VerifyShape, verify_attention
from treemla.checks import expect_aligned
from treemla.schedule import OVERLONG

T, H, B, POOL = 4, 2, 2, 50
SHAPE = VerifyShape(num_heads=H, tree_tokens=T, latent_dim=16, rope_dim=8, dtype=torch.float32)
SENTINEL = 77.0


def arguments() -> dict[str, object]:
    """A call that is right; every test changes one thing."""
    table = torch.arange(1, 41, dtype=torch.int32).view(2, 20).contiguous()
    slots = SlotTable(table, torch.arange(2))
    plan = VerifyPlan(SHAPE, 3, "cpu")
    plan.update(torch.tensor([10, 16]), slots)
    for written in (plan.partial_out, plan.partial_lse):
        written.fill_(SENTINEL)
    return {
        "q": torch.randn(B * T, H, 24),
        "kv_cache": torch.randn(POOL, 24),
        "slots": slots,
        "words": torch.tensor([1, 3, 7, 15] * 2),
        "plan": plan,
        "sm_scale": 0.1,
        "out": torch.full((B * T, H, 16), SENTINEL),
        "lse": torch.full((B * T, H), SENTINEL),
    }


def refuse(error: type[Exception], message: str, **changed: object) -> None:
    call = arguments() | changed
    plan = call["plan"]
    before = [tensor.clone() for tensor in plan.tensors] if isinstance(plan, VerifyPlan) else []
    with pytest.raises(error, match=message):
        verify_attention(**call)
    for name in ("out", "lse"):
        assert not isinstance(call[name], torch.Tensor) or (call[name] == SENTINEL).all(), f"{name} was written"
    for tensor, held in zip(plan.tensors if before else [], before, strict=True):
        assert torch.equal(tensor, held), "the plan was written"


def strided(*size: int, stride: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(100_000).as_strided(size, stride)


def test_the_unchanged_call_is_accepted() -> None:
    call = arguments()
    out, lse = verify_attention(**call)
    assert out is call["out"]
    assert lse is call["lse"]
    assert not (out == SENTINEL).any()
    assert not (lse == SENTINEL).any()


@pytest.mark.parametrize(
    ("q", "error", "message"),
    [
        (torch.zeros(8, 2, 24).half(), TypeError, "q: expected dtype torch.float32, got torch.float16"),
        (torch.zeros(8, 2, 23), ValueError, r"q: expected shape \[8, 2, 24\], got \[8, 2, 23\]"),
        (torch.zeros(7, 2, 24), ValueError, r"q: expected shape \[8, 2, 24\], got \[7, 2, 24\]"),
        (torch.zeros(8, 48), ValueError, r"q: expected shape \[8, 2, 24\], got \[8, 48\]"),
        (torch.zeros(8, 2, 24, device="meta"), ValueError, "q: expected device cpu, got 'meta'"),
        (
            strided(8, 2, 24, stride=(96, 48, 2)),
            ValueError,
            r"q: expected last stride 1 .* got 'strides \(96, 48, 2\)'",
        ),
        (strided(8, 2, 24, stride=(50, 24, 1)), ValueError, "q: expected .* multiples of 8 elements"),
        (strided(8, 2, 24, stride=(100, 25, 1)), ValueError, "q: expected .* multiples of 8 elements"),
        (None, TypeError, "q: expected a tensor or a pair of tensors, got NoneType"),
        ((torch.zeros(8, 2, 16),), TypeError, "q: expected a tensor or a pair"),
        ((torch.zeros(8, 2, 16), torch.zeros(8, 2, 9)), ValueError, r"q\[1\]: expected shape \[8, 2, 8\]"),
        ((torch.zeros(8, 2, 24), torch.zeros(8, 2, 8)), ValueError, r"q\[0\]: expected shape \[8, 2, 16\]"),
        ((torch.zeros(8, 2, 16), None), TypeError, r"q\[1\]: expected a tensor, got NoneType"),
        ((torch.zeros(8, 2, 16), strided(8, 2, 8, stride=(17, 8, 1))), ValueError, r"q\[1\]: expected last stride 1"),
    ],
)
def test_q(q: object, error: type[Exception], message: str) -> None:
    refuse(error, message, q=q)


@pytest.mark.parametrize(
    ("kv_cache", "error", "message"),
    [
        (torch.zeros(50, 24).half(), TypeError, "kv_cache: expected dtype torch.float32, got torch.float16"),
        (torch.zeros(50, 16), ValueError, r"kv_cache: expected shape \[\*, 24\], got \[50, 16\]"),
        (torch.zeros(50, 2, 24), ValueError, r"kv_cache: expected shape \[\*, 1, 24\], got \[50, 2, 24\]"),
        (torch.zeros(0, 24), ValueError, r"kv_cache: expected 1 to 2\^31 - 1 slots, got 0"),
        (torch.zeros(50, 24, device="meta"), ValueError, "kv_cache: expected device cpu, got 'meta'"),
        (strided(50, 24, stride=(25, 1)), ValueError, "kv_cache: expected last stride 1 and .* multiples of 8"),
        (strided(50, 24, stride=(1, 50)), ValueError, "kv_cache: expected last stride 1"),
        (strided(50, 24, stride=(16, 1)), ValueError, "kv_cache: expected rows that do not overlap, 24 elements apart"),
        (strided(50, 24, stride=(0, 1)), ValueError, "kv_cache: expected rows that do not overlap"),
        (np.zeros((50, 24)), TypeError, "kv_cache: expected a tensor, got ndarray"),
    ],
)
def test_kv_cache(kv_cache: object, error: type[Exception], message: str) -> None:
    refuse(error, message, kv_cache=kv_cache)


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (torch.zeros(8, dtype=torch.int32), TypeError, "words: expected dtype torch.int64, got torch.int32"),
        (torch.zeros(7, dtype=torch.int64), ValueError, r"words: expected shape \[8\], got \[7\]"),
        (torch.zeros(16, dtype=torch.int64)[::2], ValueError, "words: expected a contiguous tensor"),
        (torch.zeros(8, dtype=torch.int64, device="meta"), ValueError, "words: expected device cpu"),
        (
            torch.tensor([1, 3, 7, 15, 1, 3, 15, 15]),
            ValueError,
            "words: expected bit 2 and no higher .* word 6, .* '0xf'",
        ),
        (
            torch.tensor([1, 3, 7, 15, 1, 1, 7, 15]),
            ValueError,
            "words: expected bit 1 and no higher .* word 5, .* '0x1'",
        ),
        (torch.tensor([1, 3, 7, -1, 1, 3, 7, 15]), ValueError, "words: .* word 3, or 0, got '0xffffffffffffffff'"),
    ],
)
def test_words(words: object, error: type[Exception], message: str) -> None:
    refuse(error, message, words=words)


TABLE = torch.arange(1, 41, dtype=torch.int32).view(2, 20)
INDPTR, INDICES = torch.tensor([0, 14, 34]), torch.arange(34)


@pytest.mark.parametrize(
    ("slots", "error", "message"),
    [
        (TABLE, TypeError, "slots: expected SlotTable or SlotRanges, got Tensor"),
        (SlotTable(TABLE.long(), torch.arange(2)), TypeError, "slots.req_to_token: expected dtype torch.int32"),
        (
            SlotTable(TABLE[0], torch.arange(2)),
            ValueError,
            r"slots.req_to_token: expected shape \[\*, \*\], got \[20\]",
        ),
        (SlotTable(TABLE.T.contiguous().T, torch.arange(2)), ValueError, "slots.req_to_token: expected last stride 1"),
        (SlotTable(TABLE.to("meta"), torch.arange(2)), ValueError, "slots.req_to_token: expected device cpu"),
        (SlotTable(TABLE, torch.arange(2.0)), TypeError, "slots.req_pool_indices: expected dtype torch.int32 or torch"),
        (SlotTable(TABLE, torch.arange(4)[::2]), ValueError, "slots.req_pool_indices: expected a contiguous tensor"),
        (SlotTable(TABLE, torch.arange(4)), ValueError, r"slots: expected 1\.\.3 requests .*, got 4"),
        (SlotTable(TABLE, torch.arange(0)), ValueError, r"slots: expected 1\.\.3 requests .*, got 0"),
        (SlotTable(TABLE, torch.arange(3)), ValueError, "plan: expected an update for 3 requests, got 'one for 2'"),
        (
            SlotTable(TABLE, torch.tensor([0, 2])),
            ValueError,
            r"slots.req_pool_indices: expected values in \[0, 2\), got 2",
        ),
        (
            SlotTable(TABLE, torch.tensor([-1, 0])),
            ValueError,
            r"slots.req_pool_indices: expected values in \[0, 2\), got -1",
        ),
        (
            SlotTable(TABLE + 30, torch.arange(2)),
            ValueError,
            r"slots of request 1: expected values in \[0, 50\), got 5",
        ),
        (
            SlotTable(TABLE - 2, torch.arange(2)),
            ValueError,
            r"slots of request 0: expected values in \[0, 50\), got -1",
        ),
        (SlotTable(TABLE[:, :18], torch.arange(2)), ValueError, "seq_lens: expected at most 18 slots, .* got 20"),
        (SlotRanges(INDPTR.float(), INDICES), TypeError, "slots.kv_indptr: expected dtype torch.int32 or torch.int64"),
        (SlotRanges(INDPTR, INDICES.short()), TypeError, "slots.kv_indices: expected dtype torch.int32 or torch.int64"),
        (SlotRanges(INDPTR, INDICES[None]), ValueError, r"slots.kv_indices: expected shape \[\*\], got \[1, 34\]"),
        (SlotRanges(INDPTR, INDICES[:33]), ValueError, r"slots.kv_indptr: expected values in \[0, 34\), got 34"),
        (SlotRanges(torch.tensor([0, 14, 33]), INDICES), ValueError, "seq_lens: expected at most 19 slots, .* got 20"),
        (SlotRanges(INDPTR, INDICES + 20), ValueError, r"slots of request 1: expected values in \[0, 50\), got 50"),
    ],
)
def test_slots(slots: object, error: type[Exception], message: str) -> None:
    refuse(error, message, slots=slots)


def test_slots_outside_the_pool_are_fine_where_nothing_reads_them() -> None:
    """Columns behind the tree, and tree tokens that no row sees."""
    call = arguments()
    call["slots"].req_to_token[0, 13:] = 2**31 - 1
    call["words"] = torch.tensor([1, 3, 7, 0, 1, 3, 7, 15])
    out, _ = verify_attention(**call)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"out": torch.full((8, 2, 16), SENTINEL).double()}, TypeError, "out: expected dtype torch.float32"),
        ({"out": torch.full((8, 2, 24), SENTINEL)}, ValueError, r"out: expected shape \[8, 2, 16\], got \[8, 2, 24\]"),
        ({"out": torch.full((8, 2, 32), SENTINEL)[..., ::2]}, ValueError, "out: expected a contiguous tensor"),
        ({"out": torch.zeros(8, 2, 16, device="meta")}, ValueError, "out: expected device cpu"),
        ({"lse": torch.full((8, 2), SENTINEL).double()}, TypeError, "lse: expected dtype torch.float32"),
        ({"lse": torch.full((2, 8), SENTINEL)}, ValueError, r"lse: expected shape \[8, 2\], got \[2, 8\]"),
        ({"lse": torch.full((2, 8), SENTINEL).T}, ValueError, "lse: expected a contiguous tensor"),
    ],
)
def test_outputs(changed: dict[str, torch.Tensor], error: type[Exception], message: str) -> None:
    if next(iter(changed.values())).device.type == "cpu":
        refuse(error, message, **changed)
    else:
        with pytest.raises(error, match=message):
            verify_attention(**(arguments() | changed))


@pytest.mark.parametrize("name", ["sm_scale", "k_scale", "v_scale"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0.0, ValueError),
        (-0.1, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
        (None, TypeError),
        (True, TypeError),
        ("1", TypeError),
        (torch.tensor(1.0), TypeError),
    ],
)
def test_scales(name: str, value: object, error: type[Exception]) -> None:
    refuse(error, f"{name}: expected a .*number", **{name: value})


def test_plan_of_another_type() -> None:
    refuse(TypeError, "plan: expected a VerifyPlan, got NoneType", plan=None)


def test_plan_that_was_never_updated() -> None:
    refuse(ValueError, "plan: expected an update for 2 requests, got 'one for 0'", plan=VerifyPlan(SHAPE, 3, "cpu"))


def test_plan_that_is_too_small() -> None:
    refuse(
        ValueError, r"slots: expected 1\.\.1 requests \(the plan's max_batch\), got 2", plan=VerifyPlan(SHAPE, 1, "cpu")
    )


def test_plan_of_another_shape() -> None:
    plan = VerifyPlan(dataclasses.replace(SHAPE, num_heads=3), 3, "cpu")
    plan.update(torch.tensor([10, 16]), arguments()["slots"])
    refuse(ValueError, r"q: expected shape \[8, 3, 24\], got \[8, 2, 24\]", plan=plan)


def test_overlong_request_is_found_by_the_value_check() -> None:
    plan = arguments()["plan"]
    plan.load(plan.mirror(np.array([10, OVERLONG], np.int32)))
    refuse(ValueError, "seq_lens: expected at most 20 slots, tree included, for request 1, got 'more'", plan=plan)


def test_value_check_can_be_left_out() -> None:
    """Words above the diagonal then count as they are: a GPU does not look at them by default."""
    call = arguments() | {"words": torch.tensor([15] * 8), "check_values": False}
    out, _ = verify_attention(**call)
    assert out.isfinite().all()


def test_alignment_is_checked_in_bytes() -> None:
    """On a GPU q, kv_cache and out must start on 16 bytes; the CPU path does not need it."""
    held = torch.zeros(64, dtype=torch.bfloat16)
    expect_aligned("q", held)
    expect_aligned("q", held[8:])
    with pytest.raises(ValueError, match="q: expected data aligned to 16 bytes, got 'a pointer 8 bytes past"):
        expect_aligned("q", held[4:])


@pytest.mark.parametrize("heads", [1, 2])
def test_stride_of_a_dimension_of_size_one_may_be_anything(heads: int) -> None:
    shape = dataclasses.replace(SHAPE, num_heads=heads)
    slots = arguments()["slots"]
    plan = VerifyPlan(shape, 2, "cpu")
    plan.update(torch.tensor([10, 16]), slots)
    call = arguments() | {
        "plan": plan,
        "out": None,
        "lse": None,
        "q": torch.zeros(100_000).as_strided((8, heads, 24), (64, 31, 1)),
    }
    if heads == 1:
        assert verify_attention(**call)[0].isfinite().all()
    else:
        refuse(ValueError, "q: expected last stride 1", **call)
