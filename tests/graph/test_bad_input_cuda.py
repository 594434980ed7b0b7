"""On a GPU too: what the kernels do not take is an error that names the argument, and no output is written."""

import pytest
import torch

from treemla import MaskLayout, SlotTable, VerifyPlan, VerifyShape, pack_tree_mask, verify_attention

T, H, B, POOL = 4, 2, 2, 50
SENTINEL = 77.0


def arguments(shape: VerifyShape | None = None) -> dict[str, object]:
    shape = shape or VerifyShape(H, T)
    table = torch.arange(1, 41, dtype=torch.int32, device="cuda").view(2, 20).contiguous()
    slots = SlotTable(table, torch.arange(2, device="cuda"))
    plan = VerifyPlan(shape, 3, "cuda")
    plan.update(torch.tensor([10, 16], device="cuda"), slots)
    on_gpu = {"dtype": shape.dtype, "device": "cuda"}
    return {
        "q": torch.randn(B * T, H, shape.head_dim, **on_gpu),
        "kv_cache": torch.randn(POOL, shape.head_dim, device="cuda").to(shape.kv_dtype),
        "slots": slots,
        "words": torch.tensor([1, 3, 7, 15] * 2, device="cuda"),
        "plan": plan,
        "sm_scale": 0.1,
        "out": torch.full((B * T, H, shape.latent_dim), SENTINEL, **on_gpu),
        "lse": torch.full((B * T, H), SENTINEL, device="cuda"),
    }


def refuse(call: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        verify_attention(**call)
    torch.cuda.synchronize()
    for name in ("out", "lse"):
        assert (call[name] == SENTINEL).all(), f"{name} was written"


def misaligned(tensor: torch.Tensor, elements: int = 4) -> torch.Tensor:
    """The same values and strides, starting 8 bytes past a multiple of 16."""
    shifted = torch.empty(tensor.numel() + elements, dtype=tensor.dtype, device=tensor.device)[elements:]
    return shifted.view(tensor.shape).copy_(tensor)


def test_the_unchanged_call_is_accepted() -> None:
    call = arguments()
    verify_attention(**call)
    for name in ("out", "lse"):
        assert not (call[name] == SENTINEL).any()


@pytest.mark.parametrize("name", ["q", "kv_cache", "out"])
def test_pointer_that_is_not_16_byte_aligned(name: str) -> None:
    call = arguments()
    refuse(call | {name: misaligned(call[name])}, ValueError, f"{name}: expected data aligned to 16 bytes, got")


def test_fp8_cache_that_is_not_16_byte_aligned() -> None:
    call = arguments(VerifyShape(H, T, kv_dtype=torch.float8_e4m3fn))
    cache = misaligned(call["kv_cache"].view(torch.uint8), elements=8).view(torch.float8_e4m3fn)
    refuse(call | {"kv_cache": cache}, ValueError, "kv_cache: expected data aligned to 16 bytes, got")


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_cache_of_another_dtype_than_the_shapes(kv_dtype: torch.dtype) -> None:
    call = arguments(VerifyShape(H, T, kv_dtype=kv_dtype))
    other = torch.float8_e4m3fn if kv_dtype is torch.bfloat16 else torch.bfloat16
    refuse(call | {"kv_cache": call["kv_cache"].to(other)}, TypeError, f"kv_cache: expected dtype {kv_dtype}, got")


def test_rope_half_that_is_not_16_byte_aligned() -> None:
    call = arguments()
    pair = call["q"][..., :512].contiguous(), misaligned(call["q"][..., 512:].contiguous())
    refuse(call | {"q": pair}, ValueError, r"q \(rope\): expected data aligned to 16 bytes")


@pytest.mark.parametrize("name", ["q", "kv_cache", "words"])
def test_tensor_on_the_cpu(name: str) -> None:
    call = arguments()
    refuse(call | {name: call[name].cpu()}, ValueError, f"{name}: expected device cuda:0, got 'cpu'")


def test_slots_on_the_cpu() -> None:
    call = arguments()
    slots = SlotTable(call["slots"].req_to_token.cpu(), call["slots"].req_pool_indices)
    refuse(call | {"slots": slots}, ValueError, "slots.req_to_token: expected device cuda:0, got 'cpu'")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtype_that_has_no_kernel(dtype: torch.dtype) -> None:
    refuse(
        arguments(VerifyShape(H, T, dtype=dtype)), TypeError, "plan.shape.dtype: expected .*bfloat16.* on a CUDA device"
    )


@pytest.mark.parametrize(("latent_dim", "rope_dim"), [(256, 64), (512, 0)])
def test_widths_that_have_no_kernel(latent_dim: int, rope_dim: int) -> None:
    shape = VerifyShape(H, T, latent_dim=latent_dim, rope_dim=rope_dim)
    refuse(arguments(shape), ValueError, r"plan.shape \(latent_dim, rope_dim\): expected \(512, 64\) on a CUDA device")


def test_lengths_on_the_cpu() -> None:
    call = arguments()
    with pytest.raises(ValueError, match="seq_lens: expected device cuda:0, got 'cpu'"):
        call["plan"].update(torch.tensor([10, 16]), call["slots"])


def test_mask_on_the_cpu() -> None:
    words = torch.full((8,), 77, device="cuda")
    with pytest.raises(ValueError, match="custom_mask: expected device cuda:0, got 'cpu'"):
        pack_tree_mask(
            torch.ones(32, dtype=torch.bool), torch.tensor([1, 1], device="cuda"), words, MaskLayout.QLEN_ONLY
        )
    assert (words == 77).all()
