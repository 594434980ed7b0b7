"""What must hold of fp8 (e4m3) rows on either device and in each kernel: nothing but the rows is rounded, NaN stays NaN."""

from dataclasses import replace

import pytest
import torch
from cases import MIXES, SM_SCALE, Case, Inputs, make_inputs
from compare import assert_matches

from treemla import SlotRanges, VerifyPlan, VerifyShape, verify_attention

FP8 = torch.float8_e4m3fn
KERNELS = ("", "mma")  # as in case_lists.py


def case_for(device: torch.device, *lengths: int, **fields: object) -> Case:
    dtype = "bf16" if device.type == "cuda" else "fp32"
    return Case(lengths or MIXES[1], **({"tree_tokens": 9, "heads": 8, "dtype": dtype, "kv": "fp8"} | fields))


def refuse_or_run(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor] | None:
    """None where the device reads slots and refuses them."""
    if inputs.out.device.type == "cuda":
        return inputs.run()
    with pytest.raises(ValueError, match="slots of request"):
        inputs.run()
    return None


@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize("heads", [1, 3, 8, 20])
@pytest.mark.parametrize("lengths", [MIXES[1], (3000,)], ids=len)
def test_a_cache_widened_beforehand_gives_the_same_bits(
    lengths: tuple[int, ...], heads: int, path: str, device: torch.device
) -> None:
    """Every e4m3 value is one of the wider format, and what computes cannot tell where it was widened."""
    inputs = make_inputs(case_for(device, *lengths, heads=heads, path=path, k=0.06, v=3.7), device)
    out, lse = (tensor.clone() for tensor in inputs.run())
    case = replace(inputs.case, kv="")
    cut = {name: getattr(inputs.plan, name) for name in ("block_rows", "parts", "overhead_tiles")}  # a model's choice
    plan = VerifyPlan(case.shape, case.batch, device, path=path or None, **cut)
    plan.update(inputs.seq_lens, inputs.slots)
    wide = replace(inputs, case=case, kv_cache=inputs.kv_cache.to(inputs.q.dtype), plan=plan)
    wide_out, wide_lse = wide.run()
    assert torch.equal(wide_out, out) and torch.equal(wide_lse, lse)


@pytest.mark.parametrize("path", KERNELS)
def test_every_value_in_every_column_arrives_as_it_is(path: str, device: torch.device) -> None:
    """A token that sees itself alone gets its own row: 254 rows, each byte but the NaNs in each of the 512 columns."""
    finite = torch.tensor([byte for byte in range(256) if byte % 128 != 127], dtype=torch.uint8)
    batch, dtype = len(finite), torch.bfloat16
    rows = torch.stack([finite[(torch.arange(576) + shift) % batch] for shift in range(batch)])
    kv_cache = rows.to(device).view(FP8)
    slots = SlotRanges(torch.arange(batch + 1, device=device), torch.arange(batch, device=device))
    plan = VerifyPlan(VerifyShape(8, 1, dtype=dtype, kv_dtype=FP8), batch, device, path=path or None)
    plan.update(torch.zeros(batch, dtype=torch.int32, device=device), slots)
    q = torch.zeros(batch, 8, 576, dtype=dtype, device=device)
    out, lse = verify_attention(q, kv_cache, slots, None, plan, sm_scale=SM_SCALE)
    assert torch.equal(out, kv_cache[:, None, :512].to(dtype).expand_as(out))
    assert (lse == 0).all()


@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("column", [0, 255, 511, 512, 575])
def test_a_nan_in_a_row_shows_in_its_request_alone(column: int, byte: int, path: str, device: torch.device) -> None:
    inputs = make_inputs(case_for(device, 70, 5, path=path), device)
    expected = inputs.expected()
    inputs.kv_cache.view(torch.uint8)[inputs.owned[0][33], column] = byte
    out, lse = inputs.run()
    mine = torch.arange(18, device=device) < 9
    assert lse[mine].isnan().all() and out[mine].isnan().all()
    assert_matches(out[~mine], lse[~mine], expected.rows(~mine), inputs.case)


@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize("slot", [-1, 2**31 - 1, 10_000])
def test_a_slot_outside_the_pool_is_refused_or_shows_as_nan(slot: int, path: str, device: torch.device) -> None:
    inputs = make_inputs(case_for(device, 70, 5, path=path), device)
    expected = inputs.expected()
    inputs.slots.req_to_token[inputs.slots.req_pool_indices[0], 33] = slot
    result = refuse_or_run(inputs)
    if result is None:
        return
    mine = torch.arange(18, device=device) < 9
    assert result[0][mine].isnan().all() and result[1][mine].isnan().all()
    assert_matches(result[0][~mine], result[1][~mine], expected.rows(~mine), inputs.case)
