"""What Engines are started with: models as their config.json alone, and the settings of a run."""

import json
from pathlib import Path
from typing import Any

SLICE = {  # one of eight tensor-parallel ranks of Kimi K2.6, experts cut so that all layers fit
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 8, "num_key_value_heads": 8,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 2304, "moe_intermediate_size": 256, "n_routed_experts": 48, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.8,
    "vocab_size": 163840, "max_position_embeddings": 262144, "rope_theta": 50000.0, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = SLICE | {"hidden_size": 2048, "num_hidden_layers": 16, "n_routed_experts": 64, "vocab_size": 128}
DRAFT = {  # shares SMALL's embedding and head (weights.py), so its likeliest tokens are the target's
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 2048,
    "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 16,
    "head_dim": 128, "vocab_size": 128, "max_position_embeddings": 262144, "rope_theta": 50000.0,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {"slice": SLICE, "small": SMALL, "draft": DRAFT}

COMMON = {
    "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "random_seed": 1, "page_size": 1,
    "sampling_backend": "pytorch", "max_running_requests": 4, "log_level": "info",
    "cuda_graph_bs_decode": [1, 2, 4],  # so that three requests are padded: with speculation SGLang captures 3 too
}  # fmt: skip
# Float32 logits: in bfloat16 neighbouring ones are 0.06 apart, more than the attention kernels are.
# SGLang keeps the rest of what was free before it loaded: little, for others load meanwhile.
SMALL_SETTINGS = {
    "mem_fraction_static": 0.9, "max_total_tokens": 60_000, "context_length": 16_384, "chunked_prefill_size": 2048,
    "enable_fp32_lm_head": True,
}  # fmt: skip
# A prompt is prefilled in one chunk: later chunks go through the kernel that takes 41 s for 65k.
SLICE_SETTINGS = {
    "mem_fraction_static": 0.85, "max_total_tokens": 80_000, "context_length": 131_072,
    "chunked_prefill_size": 66_000, "max_prefill_tokens": 66_000,
}  # fmt: skip

TREE_TOKENS = 9
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": TREE_TOKENS}
CHURN = NGRAM | {"max_total_tokens": 12_000}  # so few that the cache is evicted
RUNS: dict[str, dict[str, Any]] = {
    "decode": {},
    "ngram": NGRAM,
    "churn": CHURN,
    "churn-compact": CHURN,
    "shadow": NGRAM | {"cuda_graph_backend_decode": "disabled"},
    "standalone": {
        "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "draft", "speculative_num_steps": 3,
        "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16,
        "speculative_draft_attention_backend": "triton",
    },
}  # fmt: skip
ENVIRONMENT = {"churn-compact": {"TREEMLA_SLOTS": "compact"}}  # of a run's processes


def settings(model: str, run: str, backend: str, folder: Path) -> dict[str, Any]:
    """Arguments of sglang.Engine. Writes the models' folders below `folder`."""
    for name, config in MODELS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    made = COMMON | (SLICE_SETTINGS if model == "slice" else SMALL_SETTINGS) | RUNS[run]
    made |= {"model_path": str(folder / model), "attention_backend": backend}
    if "speculative_draft_model_path" in made:
        made["speculative_draft_model_path"] = str(folder / made["speculative_draft_model_path"])
    return made
