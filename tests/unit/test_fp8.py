"""KV rows of 8 bits (e4m3): what a shape and a call take and refuse."""

from dataclasses import replace

import pytest
import torch
from cases import Case, Inputs, make_inputs

from treemla import VerifyPlan, VerifyShape, verify_attention
from treemla.checks import expect_rows

FP8 = torch.float8_e4m3fn
CASE = Case((40, 9), tree_tokens=6, heads=4, dtype="fp32", kv="fp8", tree="random", k=0.5, v=2.0)
SENTINEL = 77.0


@pytest.fixture
def inputs() -> Inputs:
    return make_inputs(CASE, torch.device("cpu"))


def run(inputs: Inputs, **changed: object) -> tuple[torch.Tensor, torch.Tensor]:
    call = {"kv_cache": inputs.kv_cache, "plan": inputs.plan} | inputs.scales | changed
    return verify_attention(inputs.q, slots=inputs.slots, words=inputs.words, **call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_have_the_dtype_of_the_queries_unless_the_shape_says_otherwise(dtype: torch.dtype) -> None:
    assert VerifyShape(8, 9, dtype=dtype).kv_dtype is dtype
    assert VerifyShape(8, 9, dtype=dtype, kv_dtype=FP8).kv_dtype is FP8


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.uint8, "fp8"])
def test_other_rows_are_no_shape(kv_dtype: object) -> None:
    with pytest.raises(ValueError, match=r"kv_dtype: expected torch\.bfloat16 .* or torch\.float8_e4m3fn, got"):
        VerifyShape(8, 9, kv_dtype=kv_dtype)


def test_queries_and_outputs_are_never_fp8() -> None:
    with pytest.raises(ValueError, match="dtype: expected one of"):
        VerifyShape(8, 9, dtype=FP8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e5m2])
def test_a_cache_of_another_dtype_than_the_shapes_is_refused(inputs: Inputs, dtype: torch.dtype) -> None:
    """Bytes too: that they mean e4m3 must be said."""
    raw = inputs.kv_cache.view(torch.uint8)
    cache = raw if dtype is torch.uint8 else raw.view(dtype) if dtype.itemsize == 1 else inputs.kv_cache.to(dtype)
    refuse(inputs, TypeError, f"kv_cache: expected dtype {FP8}, got {dtype}", kv_cache=cache)


def test_an_fp8_cache_is_refused_where_the_shape_does_not_say_so(inputs: Inputs) -> None:
    plan = VerifyPlan(replace(CASE.shape, kv_dtype=torch.float32), CASE.batch, "cpu")
    plan.update(inputs.seq_lens, inputs.slots)
    refuse(inputs, TypeError, f"kv_cache: expected dtype torch.float32, got {FP8}", plan=plan)


@pytest.mark.parametrize("stride", [576 + 8, 576 + 24])
def test_rows_that_do_not_start_on_16_bytes_are_refused(inputs: Inputs, stride: int) -> None:
    """Multiples of 8 elements, which do for wider formats."""
    wider = torch.zeros(len(inputs.kv_cache), stride, dtype=FP8)[:, :576]
    refuse(inputs, ValueError, "kv_cache: expected .* multiples of 16 elements", kv_cache=wider)
    expect_rows("kv_cache", torch.zeros(79, stride, dtype=torch.bfloat16)[:, :576])


def refuse(inputs: Inputs, error: type[Exception], message: str, **changed: object) -> None:
    for written in (inputs.out, inputs.lse):
        written.fill_(SENTINEL)
    with pytest.raises(error, match=message):
        run(inputs, **changed, out=inputs.out, lse=inputs.lse)
    assert (inputs.out == SENTINEL).all() and (inputs.lse == SENTINEL).all()


def test_rows_with_a_head_axis_or_further_apart_give_the_same_bits(inputs: Inputs) -> None:
    expected = run(inputs)
    wider = torch.full((len(inputs.kv_cache), 1, 640), torch.nan).to(FP8)
    wider[:, 0, :576] = inputs.kv_cache
    for kv_cache in (inputs.kv_cache[:, None], wider[..., :576], wider[:, 0, :576]):
        assert all(torch.equal(mine, its) for mine, its in zip(run(inputs, kv_cache=kv_cache), expected, strict=True))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_cache_widened_beforehand_gives_the_same_bits(dtype: str) -> None:
    """In the narrower formats too; tests/parity has what holds on either device."""
    inputs = make_inputs(replace(CASE, dtype=dtype), torch.device("cpu"))
    out, lse = run(inputs)
    plan = VerifyPlan(replace(inputs.case.shape, kv_dtype=inputs.q.dtype), CASE.batch, "cpu")
    plan.update(inputs.seq_lens, inputs.slots)
    wide = run(inputs, kv_cache=inputs.kv_cache.to(inputs.q.dtype), plan=plan)
    assert torch.equal(wide[0], out) and torch.equal(wide[1], lse)


def test_compiled_call_is_one_graph_with_the_same_bits(inputs: Inputs) -> None:
    expected = run(inputs)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = run(inputs, kv_cache=kv_cache)
        return out * 2, lse

    out, lse = layer(inputs.kv_cache)
    assert torch.equal(out, expected[0] * 2) and torch.equal(lse, expected[1])
