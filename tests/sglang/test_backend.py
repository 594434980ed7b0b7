"""What the kit does not try: padding, steps of other sizes, shared slots, and scales."""

import pytest
import torch
from runners import (
    LATENT,
    ROPE,
    attend,
    capture,
    eagle_input,
    expected,
    fill_pool,
    full_mask,
    make_layer,
    make_runner,
    queries,
    replay,
    stand_in,
    view,
)
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from treemla.sglang import compat
from treemla.sglang.backend import TreemlaAttnBackend

VERIFY, DECODE = ForwardMode.TARGET_VERIFY, ForwardMode.DECODE
SIBLINGS = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
LINE = torch.ones(3, 3, dtype=torch.bool).tril()


@pytest.mark.parametrize("num_padding", [0, 1, 3])
def test_a_replay_below_the_captured_size_is_right_and_its_padding_harmless(eagle, num_padding):
    runner, backend = eagle
    static = capture(backend, runner, 4, eagle_input(stand_in(), 3))
    generator = fill_pool(runner)
    runner.token_to_kv_pool.get_key_buffer(0)[0] = torch.nan  # the slot that padding rows point at
    fill, real = backend.get_cuda_graph_seq_len_fill_value(), 4 - num_padding
    lens, trees = [40, 3, 0, 11][:real], [SIBLINGS, LINE, SIBLINGS, SIBLINGS][:real]
    mask = full_mask(lens, trees)
    batch = view(runner, lens + [fill] * num_padding, VERIFY, eagle_input(mask, 3), num_padding)
    replay(backend, static, batch)
    q = queries(generator, 12)
    out = attend(backend, q, static)
    torch.testing.assert_close(out[: 3 * real].double(), expected(runner, batch, q, trees), atol=1e-5, rtol=0)
    assert (out[3 * real :] == 0).all()


def test_a_decode_replay_below_the_captured_size_is_right_and_its_padding_finite():
    runner = make_runner()
    backend = TreemlaAttnBackend(runner)
    static = capture(backend, runner, 4, None, DECODE)
    generator = fill_pool(runner)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    batch = view(runner, [31, 1, fill, fill], DECODE, num_padding=2)
    replay(backend, static, batch)
    q = queries(generator, 4)
    out = attend(backend, q, static)
    wanted = expected(runner, batch, q, [torch.ones(1, 1, dtype=torch.bool)] * 2, tail=1)
    torch.testing.assert_close(out[:2].double(), wanted, atol=1e-5, rtol=0)
    assert out.isfinite().all()


def test_stale_words_of_a_longer_replay_do_not_survive(eagle):
    runner, backend = eagle
    static = capture(backend, runner, 4, eagle_input(stand_in(), 3))
    generator = fill_pool(runner)
    for lens, tree in (([5, 6, 7, 8], LINE), ([8, 1, 0, 3], SIBLINGS)):
        trees = [tree] * 4
        batch = view(runner, lens, VERIFY, eagle_input(full_mask(lens, trees), 3))
        replay(backend, static, batch)
        q = queries(generator, 12)
        wanted = expected(runner, batch, q, trees)
        torch.testing.assert_close(attend(backend, q, static).double(), wanted, atol=1e-5, rtol=0)


def test_the_plan_stream_s_second_pack_takes_effect(eagle):
    runner, backend = eagle
    static = capture(backend, runner, 2, eagle_input(stand_in(), 3))
    generator = fill_pool(runner)
    lens, trees = [9, 4], [SIBLINGS, SIBLINGS]
    mask = torch.zeros_like(full_mask(lens, trees))  # the draft stage has not written it yet
    batch = view(runner, lens, VERIFY, eagle_input(mask, 3))
    replay(backend, static, batch)
    mask.copy_(full_mask(lens, trees))
    backend.update_verify_buffers_to_fill_after_draft(batch.spec_info, 2)
    q = queries(generator, 6)
    wanted = expected(runner, batch, q, trees)
    torch.testing.assert_close(attend(backend, q, static).double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("captured", ["words", "chains"])
def test_a_graph_never_replays_with_another_kind_of_mask_than_it_was_captured_with(eagle, captured):
    runner, backend = eagle
    mask = full_mask([3, 4], [SIBLINGS, SIBLINGS])
    first, second = (stand_in(), None) if captured == "words" else (None, mask)
    static = capture(backend, runner, 2, eagle_input(first, 3))
    batch = view(runner, [3, 4], VERIFY, eagle_input(second, 3))
    with pytest.raises(RuntimeError, match="was captured"):
        replay(backend, static, batch)


def test_chains_without_a_mask_are_causal(eagle):
    runner, backend = eagle
    static = capture(backend, runner, 2, eagle_input(None, 3))
    generator = fill_pool(runner)
    batch = view(runner, [6, 2], VERIFY, eagle_input(None, 3))
    replay(backend, static, batch)
    q = queries(generator, 6)
    wanted = expected(runner, batch, q, [LINE, LINE])
    torch.testing.assert_close(attend(backend, q, static).double(), wanted, atol=1e-5, rtol=0)


def test_steps_of_other_tree_sizes_and_decode_take_turns(eagle):
    runner, backend = eagle
    generator = fill_pool(runner)
    for tree_tokens in (3, 5, 1, 3):
        trees = [torch.eye(tree_tokens, dtype=torch.bool) | (torch.arange(tree_tokens) == 0)] * 2
        batch = view(runner, [7, 12], VERIFY, eagle_input(full_mask([7, 12], trees), tree_tokens))
        q = queries(generator, 2 * tree_tokens)
        backend.init_forward_metadata(batch)
        wanted = expected(runner, batch, q, trees)
        torch.testing.assert_close(attend(backend, q, batch).double(), wanted, atol=1e-5, rtol=0)
    batch = view(runner, [7, 1], DECODE)
    q = queries(generator, 2)
    backend.init_forward_metadata(batch)
    wanted = expected(runner, batch, q, [torch.ones(1, 1, dtype=torch.bool)] * 2, tail=1)
    torch.testing.assert_close(attend(backend, q, batch).double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", [VERIFY, DECODE])
def test_new_rows_are_written_before_they_are_read(eagle, mode):
    runner, backend = eagle
    generator = fill_pool(runner)
    tree_tokens, tail = (3, 0) if mode is VERIFY else (1, 1)
    tree = SIBLINGS if mode is VERIFY else torch.ones(1, 1, dtype=torch.bool)
    spec_info = eagle_input(full_mask([9], [tree]), 3) if mode is VERIFY else None
    batch = view(runner, [9], mode, spec_info)
    columns = 9 - tail + torch.arange(tree_tokens)
    batch.out_cache_loc = runner.req_to_token_pool.req_to_token[1, columns].long()
    batch.out_cache_loc_is_physical = True
    q, k = queries(generator, tree_tokens), torch.randn(tree_tokens, 1, LATENT + ROPE, generator=generator)
    backend.init_forward_metadata(batch)
    call = backend.forward_extend if mode is VERIFY else backend.forward_decode
    out = call(q, k, k[..., :LATENT], make_layer(), batch)
    torch.testing.assert_close(runner.token_to_kv_pool.get_key_buffer(0)[batch.out_cache_loc], k)
    torch.testing.assert_close(out.double(), expected(runner, batch, q, [tree], tail), atol=1e-5, rtol=0)


def test_scales_of_a_quantised_checkpoint_are_applied_where_triton_applies_them(eagle):
    runner, backend = eagle
    generator = fill_pool(runner)
    batch = view(runner, [9], VERIFY, eagle_input(full_mask([9], [SIBLINGS]), 3))
    batch.out_cache_loc = runner.req_to_token_pool.req_to_token[1, 9:12].long()
    batch.out_cache_loc_is_physical = True
    layer = make_layer()
    layer.k_scale, layer.v_scale, layer.k_scale_float, layer.v_scale_float = (
        torch.tensor(4.0),
        torch.tensor(3.0),
        4.0,
        3.0,
    )
    q, k = queries(generator, 3), torch.randn(3, 1, LATENT + ROPE, generator=generator)
    given = k.clone()
    backend.init_forward_metadata(batch)
    out = backend.forward_extend(q, k, k[..., :LATENT], layer, batch)
    torch.testing.assert_close(runner.token_to_kv_pool.get_key_buffer(0)[batch.out_cache_loc], given / 4)
    assert torch.equal(k, given)
    wanted = 3 * expected(runner, batch, 4 * q, [SIBLINGS])
    torch.testing.assert_close(out.double(), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mode", [VERIFY, DECODE])
@pytest.mark.parametrize("k_scale", [None, 0.5])
def test_over_an_fp8_cache_new_rows_are_scaled_rounded_and_attended_to_as_stored(k_scale, mode):
    """float8_e4m3 rows from end to end, divided by the layer's scale; what is rounded is the pool and nothing else."""
    runner = make_runner(speculative_algorithm="EAGLE", fp8_kv_cache=True)
    backend = TreemlaAttnBackend(runner)
    generator = fill_pool(runner)
    is_verify = mode is VERIFY
    tree, tail = (SIBLINGS, 0) if is_verify else (torch.ones(1, 1, dtype=torch.bool), 1)
    spec_info = eagle_input(full_mask([9], [tree]), 3) if is_verify else None
    batch = view(runner, [9], mode, spec_info)
    columns = 9 - tail + torch.arange(len(tree))
    batch.out_cache_loc = runner.req_to_token_pool.req_to_token[1, columns].long()
    batch.out_cache_loc_is_physical = True
    layer = make_layer()
    if k_scale is not None:
        layer.k_scale, layer.v_scale = torch.tensor(k_scale), torch.tensor(k_scale)
        layer.k_scale_float = layer.v_scale_float = k_scale
    q, k = queries(generator, len(tree)), torch.randn(len(tree), 1, LATENT + ROPE, generator=generator)
    backend.init_forward_metadata(batch)
    call = backend.forward_extend if is_verify else backend.forward_decode
    out = call(q, k, k[..., :LATENT], layer, batch)
    scale = k_scale or 1.0
    pool = runner.token_to_kv_pool.get_key_buffer(0)
    assert pool.dtype is torch.float8_e4m3fn and pool[0].nbytes == LATENT + ROPE
    assert torch.equal(pool[batch.out_cache_loc].float(), (k / scale).to(pool.dtype).float())
    wanted = scale * expected(runner, batch, scale * q, [tree], tail)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=0)


def test_deterministic_inference_gives_a_request_the_same_bits_in_any_batch():
    runner = make_runner(speculative_algorithm="EAGLE", enable_deterministic_inference=True)
    backend = TreemlaAttnBackend(runner)
    backend.enable_deterministic = True  # 0.5.23 asks its context, where the kit says otherwise
    backend._trees.clear()
    generator = fill_pool(runner)
    q, outs = queries(generator, 12), []
    for lens in ([33], [33, 50, 1, 20]):
        trees = [SIBLINGS] * len(lens)
        batch = view(runner, lens, VERIFY, eagle_input(full_mask(lens, trees), 3))
        backend.init_forward_metadata(batch)
        outs.append(attend(backend, q[: 3 * len(lens)], batch)[:3])
        assert backend._step.plan.fixed_split
    assert torch.equal(*outs)


def test_requests_may_share_the_slots_of_a_cached_prefix(eagle):
    runner, backend = eagle
    generator = fill_pool(runner)
    lens, trees = [30, 30, 12], [SIBLINGS, LINE, SIBLINGS]
    batch = view(runner, lens, VERIFY, eagle_input(full_mask(lens, trees), 3))
    table = runner.req_to_token_pool.req_to_token
    table[2:4, :12] = table[1, :12]
    q = queries(generator, 9)
    backend.init_forward_metadata(batch)
    torch.testing.assert_close(attend(backend, q, batch).double(), expected(runner, batch, q, trees), atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DRAFT_EXTEND_V2])
def test_prefill_is_left_to_triton(eagle, monkeypatch, mode):
    runner, backend = eagle
    planned, ran = [], []
    triton = compat.triton_backend()
    monkeypatch.setattr(triton, "init_forward_metadata", lambda self, batch: planned.append(batch))
    monkeypatch.setattr(triton, "forward_extend", lambda self, *args, **extras: ran.append((args, extras)))
    batch = view(runner, [3], mode)
    q, k, layer, sinks = torch.zeros(1), torch.zeros(2), make_layer(), torch.zeros(3)
    backend.init_forward_metadata(batch)
    backend.forward_extend(q, k, k, layer, batch, sinks=sinks)
    ((args, extras),) = ran
    assert planned == [batch] and args == (q, k, k, layer, batch, True)
    assert extras == {"sinks": sinks, "score_mod": None, "aux_tensors": None}
