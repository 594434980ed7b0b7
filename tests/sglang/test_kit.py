"""SGLang's own attention kit, from its wheel, on the backend name `treemla`: its models, its batches, its reference.

Its "cuda graph" cases run the capture and replay hooks without a CUDA graph; tests/graph has real ones.
"""

import unittest
from functools import partial

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.kits.attention_unittest.attention_methods.mla_attention import (
    MLAAttentionCase,
    make_mla_cases,
    run_mla_attention_case,
)
from sglang.test.kits.attention_unittest.runner_modes import speculative_target_verify_runner
from sglang.test.kits.attention_unittest.runner_modes.cuda_graph_decode_runner import run_mla_cuda_graph_decode_case
from sglang.test.kits.attention_unittest.runner_modes.speculative_target_verify_runner import (
    run_mla_eagle_verify_case,
    run_mla_eagle_verify_cuda_graph_case,
)

WIDTHS = {"small": (32, 0), "deepseek": (512, 64)}
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
BF16 = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16}  # treemla alone takes bf16 on a CPU
EAGER = make_mla_cases("treemla")
VERIFIED = ("eagle", "ngram", "frozen_kv_mtp")


def verify_case(page_size: int, prefix_lens: tuple[int, ...] = (4, 7), tree_tokens: int = 3) -> MLAAttentionCase:
    return MLAAttentionCase(
        name=f"treemla_verify_page{page_size}",
        backend="treemla",
        forward_mode=ForwardMode.TARGET_VERIFY,
        num_heads=4,
        page_size=page_size,
        prefix_lens=prefix_lens,
        extend_lens=(tree_tokens,) * len(prefix_lens),
    )


def keywords(widths: str, dtype: torch.dtype) -> dict:
    latent, rope = WIDTHS[widths]
    return {"kv_lora_rank": latent, "qk_rope_head_dim": rope, "dtype": dtype, "device": "cpu"}


@pytest.fixture
def kit():
    """What the kit takes for its test case: it only ever skips through it, which counts as a failure here."""
    case = unittest.TestCase()
    case.skipTest = pytest.fail
    return case


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", EAGER, ids=lambda case: case.name)
def test_eager_extend_is_triton_s_and_decode_is_right(kit, case, dtype):
    run_mla_attention_case(kit, case, **keywords("small", DTYPES[dtype]))


@pytest.mark.parametrize("dtype", BF16)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("kind", VERIFIED)
def test_verify(kit, kind, topk, page_size, widths, dtype):
    run_mla_eagle_verify_case(kit, verify_case(page_size), topk=topk, spec_kind=kind, **keywords(widths, BF16[dtype]))


@pytest.mark.parametrize("kind", VERIFIED)
def test_verify_over_an_fp8_cache(kit, monkeypatch, kind):
    """The kit's own fp8 pool; its reference keeps full precision and its tolerance has room for the rounded rows."""
    monkeypatch.setattr(
        speculative_target_verify_runner,
        "build_mla_attention_fixture",
        partial(speculative_target_verify_runner.build_mla_attention_fixture, fp8_kv_cache=True),
    )
    run_mla_eagle_verify_case(kit, verify_case(1), topk=2, spec_kind=kind, **keywords("small", torch.float32))


@pytest.mark.parametrize("page_size", [1, 16])
def test_verify_of_a_dflash_chain(kit, page_size):
    run_mla_eagle_verify_case(
        kit, verify_case(page_size), topk=1, spec_kind="dflash", **keywords("small", torch.float32)
    )


def test_verify_without_committed_tokens(kit):
    run_mla_eagle_verify_case(kit, verify_case(1, (0, 5, 0)), topk=2, **keywords("small", torch.float32))


@pytest.mark.parametrize("captured_batch", [2, 4, 8])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("kind", VERIFIED)
def test_verify_through_the_graph_hooks(kit, kind, topk, widths, captured_batch):
    run_mla_eagle_verify_cuda_graph_case(
        kit,
        verify_case(16),
        topk=topk,
        spec_kind=kind,
        cuda_graph_capture_batch_size=captured_batch,
        **keywords(widths, torch.float32),
    )


@pytest.mark.parametrize("captured_batch", [3, 6])
@pytest.mark.parametrize("widths", WIDTHS)
def test_decode_through_the_graph_hooks(kit, widths, captured_batch):
    case = MLAAttentionCase(
        name="treemla_decode",
        backend="treemla",
        forward_mode=ForwardMode.DECODE,
        num_heads=4,
        page_size=16,
        prefix_lens=(14, 15, 16),
    )
    run_mla_cuda_graph_decode_case(
        kit, case, cuda_graph_capture_batch_size=captured_batch, **keywords(widths, torch.float32)
    )


def test_the_kit_notices_a_causal_mask(kit, monkeypatch):
    from treemla.sglang import backend

    def chains(mask, seq_lens, words, layout, num_padding=0):
        tree_tokens = len(words) // len(seq_lens)
        words.copy_(torch.tensor([2 ** (i % tree_tokens + 1) - 1 for i in range(len(words))]))

    monkeypatch.setattr(backend, "pack_tree_mask", chains)
    with pytest.raises(AssertionError, match="not close"):
        run_mla_eagle_verify_case(kit, verify_case(1), topk=2, **keywords("small", torch.float32))


def test_the_kit_notices_lengths_off_by_one(kit, monkeypatch):
    from treemla import VerifyPlan

    update = VerifyPlan.update
    monkeypatch.setattr(VerifyPlan, "update", lambda self, lens, slots, tail=0: update(self, lens - 1, slots, tail))
    with pytest.raises(AssertionError, match="not close"):
        run_mla_eagle_verify_case(kit, verify_case(1), topk=2, **keywords("small", torch.float32))
