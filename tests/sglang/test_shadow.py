"""Shadow serving: treemla's own bits, and Triton's and float64's opinion of them in the log."""

import logging

import pytest
import torch
from runners import (
    HEADS,
    LATENT,
    ROPE,
    eagle_input,
    fill_pool,
    full_mask,
    graphs,
    lay_over,
    make_runner,
    ngram_input,
    view,
)
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from treemla import VerifyPlan
from treemla.sglang import backend as served
from treemla.sglang import make_backend, make_shadow
from treemla.sglang.shadow import EVERY

VERIFY, DECODE = ForwardMode.TARGET_VERIFY, ForwardMode.DECODE
SIBLINGS = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)


def make_shadow_runner(algorithm, **settings):
    """MLA's real widths for decode: of small ones with a rope part Triton's kernel knows nothing."""
    widths = (512, 64) if algorithm is None else (LATENT, ROPE)
    settings = {"attention_backend": "treemla-shadow", "cuda_graph_config": graphs(decode="disabled")} | settings
    return make_runner(speculative_algorithm=algorithm, widths=widths, **settings)


def layer_of(runner):
    latent, rope = runner.model_config.kv_lora_rank, runner.model_config.qk_rope_head_dim
    widths = {"head_dim": latent + rope, "v_head_dim": latent}
    return RadixAttention(num_heads=HEADS, scaling=0.2, num_kv_heads=1, layer_id=0, **widths)


def make_batch(runner, algorithm):
    """A step of two requests; its tree tokens' rows are in the pool, as after the layer wrote them."""
    lens = [20, 7]
    if algorithm is None:
        batch = view(runner, lens, DECODE)
    else:
        mask = None if algorithm == "DFLASH" else full_mask(lens, [SIBLINGS, SIBLINGS])
        batch = view(runner, lens, VERIFY, (ngram_input if algorithm == "NGRAM" else eagle_input)(mask, 3))
    table, tail = runner.req_to_token_pool.req_to_token, 1 if algorithm is None else 0
    tokens = 3 - 2 * tail
    own = [table[row, n - tail : n - tail + tokens] for row, n in zip(batch.req_pool_indices, lens, strict=True)]
    batch.out_cache_loc, batch.seq_lens_sum = torch.cat(own).long(), sum(lens)
    batch.out_cache_loc_is_physical, batch.seq_lens_cpu = True, batch.seq_lens
    batch.extend_seq_lens_cpu, batch.kv_loc_plan, batch.mha_one_shot = None, None, False
    return batch


def serve(backend, runner, algorithm, steps=1):
    """Outputs of `steps` steps."""
    generator = fill_pool(runner)
    outs = []
    for _ in range(steps):
        batch = make_batch(runner, algorithm)
        layer = layer_of(runner)
        q = torch.randn(len(batch.out_cache_loc), HEADS * layer.qk_head_dim, generator=generator)
        backend.init_forward_metadata(batch)
        call = backend.forward_decode if algorithm is None else backend.forward_extend
        outs.append(call(q, None, None, layer, batch, save_kv_cache=False))
    return outs


@pytest.mark.parametrize("algorithm", ["EAGLE", "STANDALONE", "NGRAM", "DFLASH", None])
def test_a_right_step_is_within_the_tolerance_and_treemla_s_own(algorithm, caplog):
    runner = make_shadow_runner(algorithm)
    shadow = make_shadow(runner)
    with caplog.at_level(logging.INFO):
        (out,) = serve(shadow, runner, algorithm)
        shadow.report()
    assert "compared step 0, 1 layers, largest shares of the tolerance: treemla 0." in caplog.text
    assert "Triton 0." in caplog.text and "beyond" not in caplog.text and shadow.wrong_steps == 0
    lay_over(runner.server_args, attention_backend="treemla")
    (alone,) = serve(make_backend(runner), runner, algorithm)
    assert torch.equal(out, alone)


def test_every_sixteenth_step_is_compared(monkeypatch):
    runner = make_shadow_runner("NGRAM")
    shadow, calls = make_shadow(runner), []
    extend = TritonAttnBackend.forward_extend
    monkeypatch.setattr(
        TritonAttnBackend,
        "forward_extend",
        lambda *args, **kwargs: calls.append(shadow.steps) or extend(*args, **kwargs),
    )
    serve(shadow, runner, "NGRAM", steps=2 * EVERY + 1)
    assert calls == [1, EVERY + 1, 2 * EVERY + 1]


def test_a_wrong_length_shows_as_treemla_s_error(monkeypatch, caplog):
    update = VerifyPlan.update
    monkeypatch.setattr(VerifyPlan, "update", lambda self, lens, slots, tail=0: update(self, lens - 1, slots, tail))
    runner = make_shadow_runner("EAGLE")
    shadow = make_shadow(runner)
    serve(shadow, runner, "EAGLE")
    shadow.report()
    assert shadow.wrong_steps == 1
    assert "beyond the tolerance in step 0 (1 such steps so far): treemla in 1 layers, most in layer 0" in caplog.text
    assert "Triton in" not in caplog.text and "--attention-backend triton" in caplog.text


def test_a_misread_mask_shows_as_triton_s_error(monkeypatch, caplog):
    monkeypatch.setattr(
        served, "pack_tree_mask", lambda mask, lens, words, *_, **__: words.copy_(words.new_tensor([1, 3, 7] * 2))
    )
    runner = make_shadow_runner("NGRAM")
    shadow = make_shadow(runner)
    serve(shadow, runner, "NGRAM")
    shadow.report()
    assert shadow.wrong_steps == 1 and "Triton in 1 layers" in caplog.text and "treemla in" not in caplog.text


def test_nan_is_beyond_the_tolerance(monkeypatch, caplog):
    runner = make_shadow_runner("NGRAM")
    shadow = make_shadow(runner)
    attend_with = served.verify_attention

    def poisoned(*args, **kwargs):
        out, lse = attend_with(*args, **kwargs)
        out[1, 2, 3] = torch.nan
        return out, lse

    monkeypatch.setattr(served, "verify_attention", poisoned)
    serve(shadow, runner, "NGRAM")
    shadow.report()
    assert shadow.wrong_steps == 1 and "treemla in 1 layers, most in layer 0: nan" in caplog.text


def test_new_rows_are_written_once(monkeypatch):
    runner = make_shadow_runner("NGRAM")
    shadow, generator = make_shadow(runner), fill_pool(runner)
    batch, written = make_batch(runner, "NGRAM"), []
    write = type(runner.token_to_kv_pool).set_kv_buffer
    monkeypatch.setattr(
        type(runner.token_to_kv_pool), "set_kv_buffer", lambda *args: written.append(args[2]) or write(*args)
    )
    shadow.init_forward_metadata(batch)
    k = torch.randn(6, 1, LATENT + ROPE, generator=generator)
    q = torch.randn(6, HEADS * (LATENT + ROPE), generator=generator)
    shadow.forward_extend(q, k, k[..., :LATENT], layer_of(runner), batch)
    assert len(written) == 1
    shadow.report()
    assert shadow.wrong_steps == 0


@pytest.mark.parametrize("how", ["full", "breakable"])
def test_graphs_of_decode_are_refused_with_the_flag(how):
    runner = make_shadow_runner("NGRAM", cuda_graph_config=graphs(decode=how))
    with pytest.raises(ValueError, match=f"--cuda-graph-backend-decode: {how}.*--cuda-graph-backend-decode disabled"):
        make_shadow(runner)


def test_an_fp8_cache_is_refused_with_the_flag():
    runner = make_shadow_runner("NGRAM")
    runner.kv_cache_dtype = torch.float8_e4m3fn
    with pytest.raises(ValueError, match=r"--kv-cache-dtype: torch\.float8_e4m3fn.*use --kv-cache-dtype bfloat16"):
        make_shadow(runner)


def test_a_draft_model_keeps_triton():
    runner = make_shadow_runner("EAGLE")
    runner.is_draft_worker = True
    assert type(make_shadow(runner)) is TritonAttnBackend
