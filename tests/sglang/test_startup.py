"""What is refused before anything is served: each message names the flag and what to use instead."""

from types import SimpleNamespace

import pytest
import torch
from runners import HEADS, graphs, make_layer, make_runner, view
from sglang.srt.layers.attention import triton_backend
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from treemla import cubins
from treemla.sglang import compat, make_backend, startup

MODEL = "--model-path"
SERVED = ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM", "FROZEN_KV_MTP", "DFLASH", None)
BASE_CAPTURE = triton_backend.TritonAttnBackend.init_forward_metadata_for_breakable_cuda_graph_capture
REFUSED = {
    "tree larger than a word": ({"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 65},
                                "--speculative-num-draft-tokens: 65", "64 or less"),
    "dspark": ({"speculative_algorithm": "DSPARK"}, "--speculative-algorithm DSPARK", "EAGLE"),
    "no draft backend": ({"speculative_algorithm": "EAGLE3", "speculative_draft_attention_backend": None},
                         "--speculative-draft-attention-backend", "--speculative-draft-attention-backend triton"),
    "treemla for drafts": ({"speculative_algorithm": "STANDALONE", "speculative_draft_attention_backend": "treemla"},
                           "--speculative-draft-attention-backend", "--speculative-draft-attention-backend triton"),
    "two-batch overlap": ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap", "triton"),
    "dp attention": ({"enable_dp_attention": True}, "--enable-dp-attention", "triton"),
    "unified memory": ({"enable_unified_memory": True}, "--enable-unified-memory", "triton"),
    "hisparse": ({"enable_hisparse": True}, "--enable-hisparse", "triton"),
    "pdmux": ({"enable_pdmux": True}, "--enable-pdmux", "triton"),
    "dllm": ({"dllm_algorithm": "LowConfidence"}, "--dllm-algorithm", "triton"),
    "pipeline parallelism": ({"pp_size": 2}, "--pp-size: 2", "--tp-size"),
    "uno": ({"speculative_algorithm": "UNO"}, "--speculative-algorithm UNO", "EAGLE"),
    "shadow for drafts": ({"speculative_algorithm": "EAGLE", "speculative_draft_attention_backend": "treemla-shadow"},
                          "--speculative-draft-attention-backend", "--speculative-draft-attention-backend triton"),
    "graphs of a whole prefill": ({"cuda_graph_config": graphs(prefill="full")},
                                  "--cuda-graph-backend-prefill full", "--cuda-graph-backend-prefill disabled"),
    "decode alone": ({"attention_backend": "triton", "decode_attention_backend": "treemla"},
                     "--decode-attention-backend: treemla beside triton", "--attention-backend treemla alone"),
    "shadow beside treemla": ({"decode_attention_backend": "treemla-shadow"},
                              "--decode-attention-backend: treemla beside treemla-shadow", "treemla alone"),
    "another prefill backend": ({"prefill_attention_backend": "fa3"}, "--prefill-attention-backend",
                                "--attention-backend treemla alone"),
}  # fmt: skip


def refusal(runner) -> str:
    with pytest.raises(ValueError, match="; use ") as refused:
        make_backend(runner)
    return str(refused.value)


@pytest.mark.parametrize("name", REFUSED)
def test_setting_is_refused(name):
    settings, flag, remedy = REFUSED[name]
    message = refusal(make_runner(**settings))
    assert flag in message and remedy in message


@pytest.mark.parametrize("field", startup.UNTRIED)
def test_every_refused_field_is_one_that_this_sglang_has(field):
    assert hasattr(make_runner().server_args, field)


@pytest.mark.parametrize("algorithm", SERVED)
def test_algorithm_is_served(algorithm):
    assert type(make_backend(make_runner(speculative_algorithm=algorithm))).__name__ == "TreemlaAttnBackend"


@pytest.mark.parametrize("tree_tokens", [1, 64])
def test_tree_is_served_up_to_the_bits_of_a_word(tree_tokens):
    backend = make_backend(make_runner(speculative_algorithm="NGRAM", tree_tokens=tree_tokens))
    assert backend._trees[tree_tokens].plan.shape.tree_tokens == tree_tokens


@pytest.mark.parametrize("how", [how for how in Backend.ALL if how != Backend.FULL])
def test_graphs_of_prefill_without_its_attention_are_triton_s(how):
    """These plan each prefill eagerly, which is Triton's part of the backend."""
    runner = make_runner(cuda_graph_config=graphs(prefill=how))
    backend = make_backend(runner)
    assert type(backend).init_forward_metadata_for_breakable_cuda_graph_capture is BASE_CAPTURE
    backend.init_forward_metadata_in_graph(view(runner, [3], ForwardMode.EXTEND))  # nothing to record


def test_one_rank_of_several_serves_its_share_of_the_heads(monkeypatch):
    two = SimpleNamespace(attn_tp_size=2, dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0)
    monkeypatch.setattr(triton_backend, "get_parallel", lambda: two)
    assert make_backend(make_runner())._trees[1].plan.shape.num_heads == HEADS // 2


def test_a_model_without_mla_is_refused():
    from sglang.srt.configs.model_config import AttentionArch

    runner = make_runner()
    runner.model_config.attention_arch = AttentionArch.MHA
    message = refusal(runner)
    assert MODEL in message and "not MLA" in message and "--attention-backend triton" in message


def test_a_sliding_window_is_refused():
    runner = make_runner()
    runner.sliding_window_size = 128
    assert "sliding window of 128 tokens" in refusal(runner)


def test_a_kv_pool_that_is_not_plain_latent_rows_is_refused():
    runner = make_runner()
    runner.token_to_kv_pool = SimpleNamespace()
    assert "KV pool is a SimpleNamespace" in refusal(runner)


def test_a_pool_whose_rows_carry_scales_is_refused():
    """The sparse models' fp8 rows: 512 values, four scales, 64 bf16."""
    runner = make_runner(fp8_kv_cache=True)
    runner.token_to_kv_pool.kv_cache_dim += 16
    assert "KV pool is a MLATokenToKVPool" in refusal(runner)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.uint8])
def test_kv_caches_of_other_8_bit_formats_than_e4m3_are_refused(dtype):
    runner = make_runner()
    runner.kv_cache_dtype = dtype
    message = refusal(runner)
    assert f"--kv-cache-dtype: {dtype}" in message
    assert "use --kv-cache-dtype bfloat16 or --kv-cache-dtype fp8_e4m3" in message


def test_mxfp8_is_refused_though_sglang_calls_its_rows_e4m3():
    assert "--kv-cache-dtype: mxfp8" in refusal(make_runner(fp8_kv_cache=True, kv_cache_dtype="mxfp8"))


def test_fp8_queries_are_refused():
    runner = make_runner(fp8_kv_cache=True)
    runner.dtype = torch.float8_e4m3fn
    assert "--dtype: torch.float8_e4m3fn, served" in refusal(runner)


def test_queries_of_another_dtype_than_the_kv_cache_are_refused():
    runner = make_runner()
    runner.kv_cache_dtype = torch.bfloat16
    assert "--dtype: torch.float32" in refusal(runner)


def test_more_requests_than_a_plan_holds_are_refused():
    runner = make_runner()
    runner.req_to_token_pool.size = 4097
    assert "--max-running-requests: 4097" in refusal(runner)


def test_context_parallel_decode_is_refused(monkeypatch):
    monkeypatch.setattr(compat, "context_parallel_size", lambda: 2)
    assert "context parallelism" in refusal(make_runner())


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("logit_cap", 30.0), ("sliding_window_size", 128), ("is_cross_attention", True), ("xai_temperature_len", 1024)],
)
def test_a_layer_that_does_more_than_mla_is_refused_when_the_model_is_known_and_when_it_is_called(attribute, value):
    layer = make_layer()
    setattr(layer, attribute, value)
    runner = make_runner()
    runner.model = torch.nn.ModuleDict({"odd": layer})
    message = refusal(runner)
    assert "in odd" in message and "--attention-backend triton" in message
    with pytest.raises(ValueError, match="in layer 0"):
        startup.expect_plain_layer(layer, "layer 0")


def test_on_a_gpu_what_the_kernels_do_not_take_is_refused(monkeypatch):
    monkeypatch.setattr(startup, "_is_cuda", lambda runner: True)
    assert "--kv-cache-dtype: torch.float32" in refusal(make_runner())
    assert "latent and rope widths (32, 16)" in refusal(make_runner(dtype=torch.bfloat16))


def test_on_a_gpu_an_fp8_cache_is_served_beside_bf16_and_nothing_else(monkeypatch):
    monkeypatch.setattr(startup, "_is_cuda", lambda runner: True)
    served, other = (make_runner(dtype=dtype, fp8_kv_cache=True) for dtype in (torch.bfloat16, torch.float16))
    for runner in (served, other):
        runner.model_config.kv_lora_rank, runner.model_config.qk_rope_head_dim = 512, 64
    startup._expect_model(served)
    assert "--dtype: torch.float16, served" in refusal(other)


def test_a_gpu_without_kernels_is_refused_at_start_up(monkeypatch):
    def no_target(device):
        raise RuntimeError("no kernels for compute capability 8.0")

    monkeypatch.setattr(startup, "_is_cuda", lambda runner: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cubins, "target_of", no_target)
    runner = make_runner(dtype=torch.bfloat16)
    runner.model_config.kv_lora_rank, runner.model_config.qk_rope_head_dim = 512, 64
    with pytest.raises(RuntimeError, match=r"no kernels for compute capability 8\.0"):
        make_backend(runner)
