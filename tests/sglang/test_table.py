"""docs/sglang.md says what is served, left to Triton and refused. Each of its rows names the tests that hold it to it."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/sglang.md"
HEADER = "| mode or feature | | |"

ROWS = {
    "TARGET_VERIFY of the target model, eager and in CUDA graphs": (
        "test_kit.test_verify", "test_kit.test_verify_through_the_graph_hooks",
        "test_served.test_replays_are_right_and_equal_eager", "test_startup.test_tree_is_served_up_to_the_bits_of_a_word",
        "test_backend.test_steps_of_other_tree_sizes_and_decode_take_turns",
    ),
    "DECODE of the target model, eager and in CUDA graphs": (
        "test_kit.test_decode_through_the_graph_hooks", "test_kit.test_eager_extend_is_triton_s_and_decode_is_right",
    ),
    "prefill, chunked prefill, mixed chunks": (
        "test_kit.test_eager_extend_is_triton_s_and_decode_is_right", "test_backend.test_prefill_is_left_to_triton",
    ),
    "prefill graphs that leave attention out (breakable, tc_piecewise)": (
        "test_startup.test_graphs_of_prefill_without_its_attention_are_triton_s",
    ),
    "prefill graphs of the whole forward": ("test_startup.test_setting_is_refused[graphs of a whole prefill]",),
    "the draft model, draft extend": (
        "test_backend_limits.test_a_draft_model_keeps_triton_and_the_log_says_so",
        "test_backend_limits.test_a_draft_s_graph_is_refused_with_the_flag",
        "test_startup.test_setting_is_refused[no draft backend]",
    ),
    "NGRAM": ("test_kit.test_verify", "test_masks.test_a_mask_is_read_in_the_layout_that_it_has"),
    "EAGLE, EAGLE3, NEXTN, STANDALONE": (
        "test_startup.test_algorithm_is_served", "test_masks.test_the_tree_that_sglang_draws_is_the_tree_that_is_packed",
    ),
    "FROZEN_KV_MTP": ("test_kit.test_verify", "test_startup.test_algorithm_is_served"),
    "DFLASH": (
        "test_kit.test_verify_of_a_dflash_chain", "test_backend.test_chains_without_a_mask_are_causal",
        "test_backend_limits.test_dflash_leaves_its_mask_out",
    ),
    "DSPARK": ("test_startup.test_setting_is_refused[dspark]",),
    "UNO (0.5.23)": ("test_startup.test_setting_is_refused[uno]",),
    "more than 64 tree tokens": ("test_startup.test_setting_is_refused[tree larger than a word]",),
    "page size": ("test_kit.test_verify",),
    "bf16 model and KV cache": (
        "test_kit.test_verify", "test_startup.test_queries_of_another_dtype_than_the_kv_cache_are_refused",
    ),
    "`--kv-cache-dtype fp8_e4m3`": (
        "test_backend.test_over_an_fp8_cache_new_rows_are_scaled_rounded_and_attended_to_as_stored",
        "test_startup.test_on_a_gpu_an_fp8_cache_is_served_beside_bf16_and_nothing_else",
    ),
    "fp8_e5m2, mxfp8, fp4; fp8 rows with scales in them (sparse models)": (
        "test_startup.test_kv_caches_of_other_8_bit_formats_than_e4m3_are_refused",
        "test_startup.test_mxfp8_is_refused_though_sglang_calls_its_rows_e4m3",
        "test_startup.test_a_pool_whose_rows_carry_scales_is_refused",
    ),
    "latent and rope widths other than 512 and 64": (
        "test_startup.test_on_a_gpu_what_the_kernels_do_not_take_is_refused",
    ),
    "models without MLA; hybrid, sparse or sliding-window KV pools": (
        "test_startup.test_a_model_without_mla_is_refused", "test_startup.test_a_sliding_window_is_refused",
        "test_startup.test_a_kv_pool_that_is_not_plain_latent_rows_is_refused",
    ),
    "sliding window, logit cap, cross attention, temperature by length in a layer": (
        "test_startup.test_a_layer_that_does_more_than_mla_is_refused_when_the_model_is_known_and_when_it_is_called",
    ),
    "sinks, score functions": ("test_backend_limits.test_attention_with_extras_is_refused",),
    "another backend for prefill or decode": (
        "test_startup.test_setting_is_refused[decode alone]",
        "test_startup.test_setting_is_refused[another prefill backend]",
    ),
    "tensor parallelism": ("test_startup.test_one_rank_of_several_serves_its_share_of_the_heads",),
    "radix cache": ("test_backend.test_requests_may_share_the_slots_of_a_cached_prefix",),
    "overlap schedule": (
        "test_served.test_the_scheduler_s_barrier_waits_for_the_end_of_the_replay",
        "test_backend.test_the_plan_stream_s_second_pack_takes_effect",
    ),
    "deterministic inference": (
        "test_backend.test_deterministic_inference_gives_a_request_the_same_bits_in_any_batch",
        "test_entry_point.test_deterministic_inference_takes_the_name",
    ),
    "two-batch overlap, DP attention, unified memory, HiSparse, PD multiplexing, diffusion LLM": tuple(
        f"test_startup.test_setting_is_refused[{name}]"
        for name in ("two-batch overlap", "dp attention", "unified memory", "hisparse", "pdmux", "dllm")
    ),
    "pipeline parallelism": ("test_startup.test_setting_is_refused[pipeline parallelism]",),
    "decode context parallelism": ("test_startup.test_context_parallel_decode_is_refused",),
}  # fmt: skip


def table():
    lines = PAGE.read_text().partition(HEADER)[2].partition("\n\n")[0].splitlines()[2:]
    return {cells[1]: (cells[2], cells[3]) for line in lines for cells in [re.split(r"\s*\|\s*", line)]}


def test_every_row_of_the_page_has_its_tests_and_none_is_missing():
    assert table().keys() == ROWS.keys()


def test_every_row_says_served_triton_or_refused_and_a_refusal_what_instead():
    for row, (verdict, remark) in table().items():
        assert re.match(r"served|Triton|refused", verdict), row
        assert remark or not verdict.startswith("refused"), row


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_of_a_row_exist(row):
    for name in ROWS[row]:
        module, _, function = name.partition(".")
        function, _, case = function.partition("[")
        source = (HERE / f"{module}.py").read_text()
        assert f"\ndef {function}(" in source, name
        assert not case or f'"{case.rstrip("]")}": (' in source, name
