"""Model runners as SGLang's kit makes them, with settings laid over their server arguments, and batches for them."""

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.test.kits.attention_unittest.attention_methods.mla_attention import (
    MLAAttentionCase,
    MockMLAModelRunner,
    TinyMLAModelConfig,
)

ONE_RANK = get_parallel().override(attn_tp_size=1, dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0)
ONE_RANK.__enter__()  # holds for as long as it is referenced

SETTINGS = {"attention_backend": "treemla", "speculative_draft_attention_backend": "triton"}
HEADS, LATENT, ROPE = 4, 32, 16
MAX_CONTEXT = 64


def lay_over(server_args: Any, **settings: Any) -> None:
    """Change what SGLang resolved for some arguments."""
    if hasattr(server_args, "override"):
        server_args.override("tests/sglang", **settings)
    else:  # 0.5.23 keeps resolutions in a list beside the arguments, which it closes to all but its own start-up
        server_args._resolved_overrides.append(("tests/sglang", settings))


def make_runner(
    max_batch: int = 4,
    tree_tokens: int = 3,
    dtype: torch.dtype = torch.float32,
    *,
    device: str = "cpu",
    heads: int = HEADS,
    widths: tuple[int, int] = (LATENT, ROPE),
    max_context: int = MAX_CONTEXT,
    fp8_kv_cache: bool = False,
    **settings: Any,
) -> Any:
    """A runner whose pools hold `max_batch` requests of up to `max_context` tokens, page size 1; fp8_kv_cache: what
    --kv-cache-dtype fp8_e4m3 makes of them."""
    case = MLAAttentionCase(
        name="runner",
        backend="triton",
        forward_mode=ForwardMode.TARGET_VERIFY,
        num_heads=heads,
        page_size=1,
        prefix_lens=(1,) * max_batch,
        extend_lens=(tree_tokens,) * max_batch,
    )
    latent_rope = {"kv_lora_rank": widths[0], "qk_rope_head_dim": widths[1]}
    config = TinyMLAModelConfig(num_heads=heads, hidden_size=64, context_len=max_context, **latent_rope)
    sizes = {"max_context_len": max_context, "dtype": dtype, "device": device, "fp8_kv_cache": fp8_kv_cache}
    runner = MockMLAModelRunner(case=case, model_config=config, **sizes, **latent_rope)
    lay_over(runner.server_args, **{**SETTINGS, **settings})
    return runner


def graphs(**phases: str) -> Any:
    """What SGLang resolves --cuda-graph-backend-decode and -prefill to."""
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig

    return CudaGraphConfig.from_dict({phase: {"backend": backend} for phase, backend in phases.items()})


def make_layer() -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    return RadixAttention(
        num_heads=HEADS, head_dim=LATENT + ROPE, scaling=0.2, num_kv_heads=1, layer_id=0, v_head_dim=LATENT
    )


def view(runner: Any, seq_lens: list[int], mode: ForwardMode, spec_info: Any = None, num_padding: int = 0) -> Any:
    """What the runner hands a backend: requests in rows 1.. of the slot table, padding in row 0 as it pads."""
    real = len(seq_lens) - num_padding
    rows = torch.tensor([*range(1, real + 1), *[0] * num_padding])
    tokens = len(seq_lens) * (1 if spec_info is None else spec_info.draft_token_num)
    table = runner.req_to_token_pool.req_to_token
    table[0] = 0
    for row in range(1, len(table)):
        table[row] = 1 + (row - 1) * MAX_CONTEXT + torch.arange(table.shape[1]) % MAX_CONTEXT
    return SimpleNamespace(
        batch_size=len(seq_lens),
        forward_mode=mode,
        req_pool_indices=rows,
        seq_lens=torch.tensor(seq_lens),
        out_cache_loc=torch.zeros(tokens, dtype=torch.int64),
        spec_info=spec_info,
        num_padding=num_padding,
    )


def full_mask(seq_lens: list[int], trees: list[torch.Tensor]) -> torch.Tensor:
    """SGLang's mask over the whole context, [T, n_b + T] a request, flat."""
    rows = [
        torch.cat([torch.ones(len(tree), n, dtype=torch.bool), tree], dim=1)
        for n, tree in zip(seq_lens, trees, strict=True)
    ]
    return torch.cat([row.flatten() for row in rows])


def eagle_input(mask: torch.Tensor | None, tree_tokens: int) -> EagleVerifyInput:
    names = ("draft_token", "positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
    nothing = dict.fromkeys((*names, "retrieve_cum_len", "capture_hidden_mode", "seq_lens_sum", "seq_lens_cpu"))
    return EagleVerifyInput(
        custom_mask=mask, draft_token_num=tree_tokens, spec_steps=tree_tokens - 1, topk=2, **nothing
    )


def ngram_input(mask: torch.Tensor, tree_tokens: int) -> NgramVerifyInput:
    return NgramVerifyInput(custom_mask=mask, draft_token_num=tree_tokens)


def expected(runner: Any, batch: Any, q: torch.Tensor, trees: list[torch.Tensor], tail: int = 0) -> torch.Tensor:
    """Attention in float64 from the pool's rows, real requests only. [tokens, H * latent]."""
    pool = runner.token_to_kv_pool.get_key_buffer(0)[:, 0].double()
    outs = []
    for b, tree in enumerate(trees):
        n, tree_tokens = int(batch.seq_lens[b]) - tail, len(tree)
        kv = pool[runner.req_to_token_pool.req_to_token[batch.req_pool_indices[b], : n + tree_tokens].long()]
        sees = torch.cat([torch.ones(tree_tokens, n, dtype=torch.bool), tree], dim=1)
        mine = q.view(-1, HEADS, LATENT + ROPE)[b * tree_tokens : (b + 1) * tree_tokens].double()
        scores = torch.einsum("thd,nd->thn", mine, kv) * 0.2
        weights = scores.masked_fill(~sees[:, None], -torch.inf).softmax(dim=-1)
        outs.append(torch.einsum("thn,nd->thd", weights, kv[:, :LATENT]))
    return torch.cat(outs).flatten(1)


def fill_pool(runner, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pool = runner.token_to_kv_pool.get_key_buffer(0)
    pool.copy_(torch.randn(pool.shape, generator=generator))
    return generator


def queries(generator, tokens):
    return torch.randn(tokens, HEADS * (LATENT + ROPE), generator=generator)


def attend(backend, q, batch):
    call = backend.forward_decode if batch.forward_mode.is_decode() else backend.forward_extend
    return call(q, None, None, make_layer(), batch, save_kv_cache=False)


def capture(backend, runner, batch_size, spec_info, mode=ForwardMode.TARGET_VERIFY):
    """What the runner does before and inside a capture; returns the batch of static buffers the graph reads."""
    static = view(runner, [backend.get_cuda_graph_seq_len_fill_value()] * batch_size, mode, spec_info)
    tree_tokens = 1 if spec_info is None else spec_info.draft_token_num
    backend.init_cuda_graph_state(batch_size, batch_size * tree_tokens)
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    backend.init_forward_metadata_in_graph(static)
    return static


def replay(backend, static, batch):
    """Load `batch` into the static buffers and do what a graph would."""
    for name in ("req_pool_indices", "seq_lens"):
        getattr(static, name).copy_(getattr(batch, name))
    static.spec_info, static.num_padding = batch.spec_info, batch.num_padding
    backend.init_forward_metadata_out_graph(static)
    backend.init_forward_metadata_in_graph(static)


def stand_in(tree_tokens=3):
    """The runner's mask at capture: longer than any tree needs, all ones."""
    return torch.ones(4 * tree_tokens * 4 * tree_tokens, dtype=torch.bool)
