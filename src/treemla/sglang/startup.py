"""What the backend refuses before it serves anything. Every message names the flag and what to use instead."""

from typing import Any

import torch

from treemla import cubins
from treemla.problem import CUDA_DTYPES, CUDA_KV_DTYPES, FP8, MAX_TREE_TOKENS, PORTABLE_DTYPES
from treemla.sglang import BACKEND, SHADOW, compat
from treemla.tiles import MAX_BATCH

TRITON = "--attention-backend triton"

# Features that split, share or move the KV of a forward in ways nobody has tried with this backend.
UNTRIED = {
    "enable_two_batch_overlap": "--enable-two-batch-overlap",
    "enable_dp_attention": "--enable-dp-attention",
    "enable_unified_memory": "--enable-unified-memory",
    "enable_hisparse": "--enable-hisparse",
    "enable_pdmux": "--enable-pdmux",
    "dllm_algorithm": "--dllm-algorithm",
}


def expect_servable(runner: Any) -> None:
    """Raise ValueError for a model or a setting that the backend does not serve."""
    _expect_model(runner)
    _expect_flags(runner)
    _expect_speculation(runner)
    _expect_device(runner)


def _expect_model(runner: Any) -> None:
    config = runner.model_config
    _refuse(not compat.is_mla(runner), "--model-path: the model's attention is not MLA", TRITON)
    window = runner.sliding_window_size
    _refuse(bool(window), f"--model-path: sliding window of {window} tokens", TRITON)
    pool = type(runner.token_to_kv_pool).__name__
    _refuse(not compat.is_plain_mla_pool(runner.token_to_kv_pool), f"--model-path: its KV pool is a {pool}", TRITON)
    _expect_dtypes(runner)
    if _is_cuda(runner):
        widths = config.kv_lora_rank, config.qk_rope_head_dim
        _refuse(widths != (512, 64), f"--model-path: latent and rope widths {widths}, served: (512, 64)", TRITON)
    for name, layer in _attention_layers(runner):
        expect_plain_layer(layer, name)


def _expect_dtypes(runner: Any) -> None:
    """KV rows of the model's dtype or of e4m3; not the e4m3 of mxfp8, whose scales lie beside the rows."""
    dtype, kv_dtype, flag = runner.dtype, runner.kv_cache_dtype, "--kv-cache-dtype"
    served = CUDA_DTYPES if _is_cuda(runner) else PORTABLE_DTYPES
    served_kv = CUDA_KV_DTYPES if _is_cuda(runner) else (*PORTABLE_DTYPES, FP8)
    instead = " or ".join(f"{flag} {name}" for name in ("bfloat16", "fp8_e4m3")[: 1 + (FP8 in served_kv)])
    _refuse(compat.setting(runner, "kv_cache_dtype") == "mxfp8", f"{flag}: mxfp8", instead)
    _refuse(kv_dtype not in served_kv, f"{flag}: {kv_dtype}, served: {served_kv}", instead)
    _refuse(dtype not in served, f"--dtype: {dtype}, served: {served}", "--dtype bfloat16")
    queries = f"--dtype: {dtype} queries over a {kv_dtype} KV cache"
    _refuse(kv_dtype not in (dtype, FP8), queries, f"--dtype {_name(kv_dtype)}")


def _expect_flags(runner: Any) -> None:
    for field, flag in UNTRIED.items():
        _refuse(bool(compat.setting(runner, field)), f"{flag}: not served", f"{TRITON}, or drop {flag}")
    shards = "--dcp-size (decode context parallelism)"
    _refuse(compat.context_parallel_size() > 1, f"{shards}: not served", f"{TRITON}, or drop it")
    pipeline = compat.setting(runner, "pp_size") or 1
    _refuse(pipeline > 1, f"--pp-size: {pipeline}, served: 1", f"{TRITON}, or --tp-size alone")
    both = compat.setting(runner, "attention_backend")
    split = {compat.setting(runner, f"{phase}_attention_backend") or both for phase in ("prefill", "decode")}
    flags = "--prefill-attention-backend / --decode-attention-backend"
    alone = f"--attention-backend {BACKEND} alone: its prefill is Triton's"
    _refuse(split not in ({BACKEND}, {SHADOW}), f"{flags}: {' beside '.join(sorted(map(str, split)))}", alone)
    prefill_flag = "--cuda-graph-backend-prefill"
    whole = compat.graphs_of(runner, "prefill") == "full"
    _refuse(whole, f"{prefill_flag} full: graphs of a whole prefill are not served", f"{prefill_flag} disabled")
    pool = runner.req_to_token_pool.size
    _refuse(pool > MAX_BATCH, f"--max-running-requests: {pool}, at most {MAX_BATCH}", f"{MAX_BATCH} or less")


def _expect_speculation(runner: Any) -> None:
    name = compat.setting(runner, "speculative_algorithm")
    flag, others = "--speculative-algorithm", f"DFLASH, EAGLE or NGRAM, or {TRITON}"
    _refuse(name == "UNO", f"{flag} {name}: not served", others)  # 0.5.16 has none
    algorithm = compat.speculative_algorithm(runner)
    if algorithm.is_none():
        return
    _refuse(algorithm.is_dspark(), f"{flag} {name}: ragged verify is not served", others)
    tokens = compat.setting(runner, "speculative_num_draft_tokens")
    wrong = tokens is None or not 1 <= tokens <= MAX_TREE_TOKENS
    limit = f"1..{MAX_TREE_TOKENS} tree tokens, root included"
    _refuse(wrong, f"--speculative-num-draft-tokens: {tokens}, served: {limit}", f"{MAX_TREE_TOKENS} or less")
    drafted = algorithm.is_eagle() or algorithm.is_standalone()
    draft_flag, drafts_with = "--speculative-draft-attention-backend", "speculative_draft_attention_backend"
    missing = drafted and compat.setting(runner, drafts_with) in (None, BACKEND, SHADOW)
    _refuse(missing, f"{draft_flag}: {name} needs one for its draft model", f"{draft_flag} triton")


def _expect_device(runner: Any) -> None:
    """A GPU that there are kernels for, and the kernels. RuntimeError with the remedy otherwise."""
    if _is_cuda(runner):
        device = torch.device("cuda", torch.cuda.current_device())
        cubins.cubin_path(cubins.target_of(device).arch)


def expect_comparable(runner: Any) -> None:
    """Raise ValueError where a step cannot be compared with Triton: inside a graph, or with an fp8 KV cache, for which
    Triton rounds queries and weights too."""
    flag, graphs = "--cuda-graph-backend-decode", compat.graphs_of(runner, "decode")
    _refuse(graphs != "disabled", f"{flag}: {graphs}, but {SHADOW} compares step by step", f"{flag} disabled")
    flag, dtype = "--kv-cache-dtype", runner.kv_cache_dtype
    _refuse(dtype == FP8, f"{flag}: {dtype}, which {SHADOW} has no measure for", f"{flag} bfloat16")


def expect_plain_layer(layer: Any, name: str) -> None:
    """Raise ValueError for an attention layer with something beside a scale and the tree's mask."""
    odd = {
        "logit cap": layer.logit_cap not in (None, 0, 0.0),
        "sliding window": layer.sliding_window_size not in (None, -1),
        "cross attention": layer.is_cross_attention,
        "temperature by length": getattr(layer, "xai_temperature_len", -1) not in (None, -1),
    }
    for feature, held in odd.items():
        _refuse(bool(held), f"--model-path: {feature} in {name}", TRITON)


def _attention_layers(runner: Any) -> list[tuple[str, Any]]:
    """RadixAttention modules of the loaded model; none where the runner has no model yet."""
    model = getattr(runner, "model", None)
    if not isinstance(model, torch.nn.Module):
        return []
    return [(name, module) for name, module in model.named_modules() if type(module).__name__ == "RadixAttention"]


def _is_cuda(runner: Any) -> bool:
    return torch.device(runner.device).type == "cuda"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse(wrong: bool, what: str, instead: str) -> None:
    if wrong:
        raise ValueError(f"{what}; use {instead}")
