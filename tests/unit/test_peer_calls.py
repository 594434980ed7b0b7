"""How peers are called: stand-ins with the signatures of the real libraries compute from what they are given, so a
wrong page, length, scale or order shows as a wrong result. Small sizes, on a CPU.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from treemla import reference
from treemla.gate import flashinfer_peer, flashmla_peer, triton_peer
from treemla.gate.cases import VerifyCase
from treemla.gate.inputs import SM_SCALE, make_inputs

CPU = torch.device("cpu")
PAGED = VerifyCase((130, 5, 64), 9, 4, page_size=64)


def inputs_of(case):
    return make_inputs(case, CPU, cold_bytes=10_000)


def chain_attention(q, rows, lengths, scale):
    """Chain attention of [B*T, H, 576] over each request's rows [n, 576]; the queries are its last tokens."""
    tokens = len(q) // len(rows)
    ends = torch.tensor([0, *map(len, rows)]).cumsum(0).tolist()
    owned = [torch.arange(begin, end) for begin, end in itertools.pairwise(ends)]
    contexts = [int(n) - tokens for n in lengths]
    return reference.verify_reference(q, torch.cat(rows), owned, contexts, None, sm_scale=scale)[0].to(q.dtype)


class Wrapper:
    """Stands in for flashinfer.mla.BatchMLAPagedAttentionWrapper (0.6.14)."""

    def __init__(self, float_workspace_buffer, *, backend="auto"):
        assert float_workspace_buffer.numel() >= 2**27 and backend in ("fa2", "fa3")

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
        sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        integers = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        assert all(tensor.dtype == torch.int32 for tensor in integers)
        assert (head_dim_ckv, head_dim_kpe, causal) == (512, 64, True)
        assert q_data_type == kv_data_type == torch.bfloat16
        assert qo_indptr.tolist() == [b * (int(qo_indptr[1])) for b in range(len(kv_len_arr) + 1)]
        self.pages = [kv_indices[a:b] for a, b in zip(kv_indptr.tolist(), kv_indptr.tolist()[1:], strict=False)]
        self.lengths, self.heads, self.page_size, self.scale = kv_len_arr.tolist(), num_heads, page_size, sm_scale

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None):
        assert q_nope.shape[1] == self.heads and ckv_cache.shape[1:] == (self.page_size, 512)
        assert kpe_cache.shape[1:] == (self.page_size, 64)
        pool = torch.cat([ckv_cache, kpe_cache], dim=-1)
        rows = [pool[held.long()].flatten(0, 1)[:n] for held, n in zip(self.pages, self.lengths, strict=True)]
        out.copy_(chain_attention(torch.cat([q_nope, q_pe], dim=-1), rows, self.lengths, self.scale))
        return out


def get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k):
    """Stands in for sgl_kernel.flash_mla.get_mla_metadata (sglang-kernel 0.4.5)."""
    assert cache_seqlens.dtype == torch.int32 and num_heads_k == 1
    return torch.tensor([num_q_tokens_per_head_k]), cache_seqlens


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False,
):  # fmt: skip
    batch, tokens, heads, width = q.shape
    assert (width, k_cache.shape[1:], head_dim_v, causal) == (576, (64, 1, 576), 512, True)
    assert block_table.dtype == cache_seqlens.dtype == torch.int32 and num_splits is cache_seqlens
    assert tile_scheduler_metadata.tolist() == [tokens * heads]
    lengths = cache_seqlens.tolist()
    rows = [k_cache[blocks.long()].reshape(-1, 576)[:n] for blocks, n in zip(block_table, lengths, strict=True)]
    out = chain_attention(q.reshape(batch * tokens, heads, width), rows, lengths, softmax_scale)
    return out.view(batch, tokens, heads, 512), None


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("case", [VerifyCase((70, 5, 33), 9, 4), PAGED, VerifyCase((65,), 1, 8)], ids=lambda c: c.id)
def test_flashinfer_is_given_the_causal_problem(case, backend):
    inputs = inputs_of(case)
    out = inputs.empty_out()
    layers = flashinfer_peer.layers(Wrapper, backend, inputs, inputs.kv_layers, out)
    assert len(layers) == len(inputs.kv_layers)
    assert layers[-1]() is out
    assert inputs.error_of(out, None, causal=True) == ""
    layers[0]()
    assert "relative error" in inputs.error_of(out, None, causal=True)  # another layer's KV


@pytest.mark.parametrize("case", [PAGED, replace(PAGED, tree_tokens=1)], ids=lambda c: c.id)
def test_flashmla_is_given_the_causal_problem(case):
    inputs = inputs_of(case)
    layers = flashmla_peer.layers((get_mla_metadata, flash_mla_with_kvcache), inputs, inputs.kv_layers)
    assert inputs.error_of(layers[-1](), None, causal=True) == ""
    assert "relative error" in inputs.error_of(layers[0](), None, causal=True)


def test_a_causal_result_is_not_taken_for_that_of_a_tree():
    inputs = inputs_of(PAGED)
    layers = flashmla_peer.layers((get_mla_metadata, flash_mla_with_kvcache), inputs, inputs.kv_layers)
    assert "relative error" in inputs.error_of(layers[-1](), None)


def in_float32(inputs):
    """The same, since Triton's interpreter gets bf16 products wrong."""
    return replace(inputs, q=inputs.q.float(), kv_layers=[inputs.kv_layers[-1].float()])


@pytest.mark.parametrize("eager", [False, True])
def test_tritons_verify_is_given_the_tree_with_the_types_of_sglangs_graphs_or_of_its_eager_calls(eager):
    inputs = in_float32(inputs_of(VerifyCase((70, 5), 9, 2)))
    extend = triton_peer.load()
    given = []

    def recorded(*arguments, **named):
        given.extend(arguments)
        extend(*arguments, **named)

    taken = inputs.q, inputs.kv_layers[-1], inputs.owned, inputs.case.contexts, inputs.mask
    out = triton_peer.verify(recorded, *taken, sm_scale=SM_SCALE, out=inputs.empty_out(), eager=eager)()
    assert inputs.error_of(out, None) == ""
    row_starts, kv_starts, kv_indices, mask = (given[i] for i in (6, 7, 8, 9))
    assert (kv_starts.dtype, kv_indices.dtype) == (torch.int32, torch.int64)
    assert (row_starts.dtype, mask.dtype) == ((torch.int32, torch.bool) if eager else (torch.int64, torch.uint8))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter, in splits without tokens
@pytest.mark.parametrize("contexts", [(200,), (70, 5, 33)])
def test_tritons_decode_is_given_the_problem(contexts):
    inputs = in_float32(inputs_of(VerifyCase(contexts, 1, 4)))
    kernels = triton_peer.load_decode()
    taken = inputs.q, inputs.kv_layers[-1], inputs.owned
    out = triton_peer.decode(kernels, *taken, sm_scale=SM_SCALE, out=inputs.empty_out(), sms=132)()
    assert inputs.error_of(out, None) == ""


@pytest.mark.parametrize(
    ("sms", "context", "splits"), [(132, 65536, 256), (132, 4096, 128), (188, 65536, 256), (132, 100, 8)]
)
def test_the_bound_on_kv_splits_is_sglangs(sms, context, splits):
    """Worked out by hand from triton_backend.py of SGLang 0.5.16."""
    assert triton_peer.most_splits(sms, context) == splits
