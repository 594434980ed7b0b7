"""What verify_attention may write to: memory of its own, apart from what it reads, that autograd does not watch."""

import pytest
import torch

from treemla import SlotTable, VerifyPlan, VerifyShape, verify_attention

SHAPE = VerifyShape(num_heads=2, tree_tokens=4, latent_dim=16, rope_dim=8, dtype=torch.float32)


def call(**changed: object) -> dict[str, object]:
    slots = SlotTable(torch.arange(20, dtype=torch.int32)[None], torch.tensor([0]))
    plan = VerifyPlan(SHAPE, 1, "cpu")
    plan.update(torch.tensor([16]), slots)
    held = {"q": torch.randn(4, 2, 24), "kv_cache": torch.randn(20, 24), "slots": slots, "words": None, "plan": plan}
    return held | {"sm_scale": 0.1} | changed


def test_out_inside_q_is_refused() -> None:
    memory = torch.randn(4 * 2 * 24)
    with pytest.raises(ValueError, match="out: expected memory apart from q's, got 'memory that overlaps it'"):
        verify_attention(**call(q=memory.view(4, 2, 24), out=memory[: 4 * 2 * 16].view(4, 2, 16)))


def test_lse_inside_the_cache_is_refused() -> None:
    cache = torch.randn(20, 24)
    with pytest.raises(ValueError, match="lse: expected memory apart from kv_cache's"):
        verify_attention(**call(kv_cache=cache, lse=cache.view(-1)[:8].view(4, 2)))


def test_out_behind_q_in_one_buffer_is_accepted() -> None:
    memory = torch.randn(4 * 2 * (24 + 16))
    q, out = memory[: 4 * 2 * 24].view(4, 2, 24), memory[4 * 2 * 24 :].view(4, 2, 16)
    assert verify_attention(**call(q=q, out=out))[0].data_ptr() == out.data_ptr()


def test_out_that_autograd_watches_is_refused() -> None:
    with pytest.raises(ValueError, match="out: expected a tensor without requires_grad"):
        verify_attention(**call(out=torch.zeros(4, 2, 16, requires_grad=True)))


@pytest.mark.parametrize("value", ["x", 1, torch.tensor(True)])
def test_check_values_is_a_bool_or_none(value: object) -> None:
    with pytest.raises(TypeError, match="check_values: expected a bool or None"):
        verify_attention(**call(check_values=value))


@pytest.mark.parametrize("scale", [10**400, 1e300, float("nan"), 0.0, -1.0])
def test_scale_that_float32_cannot_carry_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="sm_scale: expected a number above 0"):
        verify_attention(**call(sm_scale=scale))
