"""The performance layer's inputs and its guard: a wrong kernel is never timed. Small sizes, on a CPU."""

from dataclasses import replace

import pytest
import torch

from treemla import verify_attention
from treemla.gate import measure, triton_peer
from treemla.gate.cases import VerifyCase
from treemla.gate.inputs import SM_SCALE, make_inputs

CASES = [
    VerifyCase((70, 5, 33), 9, 4),
    VerifyCase((64,), 1, 8),
    VerifyCase((100, 31), 16, 2, page_size=16),
    VerifyCase((70, 33), 9, 4, fp8_kv=True),
]


@pytest.fixture(params=CASES, ids=lambda case: case.id)
def inputs(request):
    return make_inputs(request.param, torch.device("cpu"), cold_bytes=10_000)


def run(inputs, **changed):
    held = {"words": inputs.words, "kv": inputs.kv_layers[-1], **changed}
    return verify_attention(inputs.q, held["kv"], inputs.slots, held["words"], inputs.plan, sm_scale=SM_SCALE)


def test_a_right_result_is_accepted(inputs):
    assert inputs.error_of(*run(inputs)) == ""


def test_another_layers_result_is_refused(inputs):
    assert "relative error" in inputs.error_of(*run(inputs, kv=inputs.kv_layers[0]))


def test_an_unwritten_result_is_refused(inputs):
    out, lse = run(inputs)
    assert "relative error" in inputs.error_of(torch.full_like(out, torch.nan), lse)
    assert "lse off" in inputs.error_of(out, torch.full_like(lse, torch.nan))


def test_a_result_without_the_tree_mask_is_refused():
    inputs = make_inputs(CASES[0], torch.device("cpu"), cold_bytes=10_000)
    assert inputs.error_of(*run(inputs, words=None))


def test_a_page_lies_together_and_no_slot_is_owned_twice(inputs):
    page = inputs.case.page_size
    for slots in inputs.owned:
        first, offset = slots // page, slots % page
        assert (offset == torch.arange(len(slots)) % page).all()
        assert (first == first[torch.arange(len(slots)) // page * page]).all()
    everything = torch.cat(list(inputs.owned))
    assert len(everything.unique()) == len(everything)
    assert int(everything.max()) < len(inputs.kv_layers[0])


def test_the_peers_call_computes_the_same_attention(inputs):
    """In float32, since Triton's interpreter gets bf16 products wrong."""
    kv = inputs.kv_layers[-1].float()
    single = replace(inputs, q=inputs.q.float(), kv_layers=[kv])
    out = torch.full((len(inputs.q), inputs.case.heads, 512), torch.nan)
    taken = single.q, kv, single.owned, single.case.contexts, single.mask
    triton_peer.verify(triton_peer.load(), *taken, sm_scale=SM_SCALE, out=out)()
    assert single.error_of(out, None) == ""


@pytest.mark.parametrize(("layer_bytes", "layers"), [(1, 16), (600_000_000, 2), (4_700_000, 16), (75_497_472, 8)])
def test_a_graph_holds_layers_enough_to_leave_the_cache_cold(layer_bytes, layers):
    assert measure.num_layers(layer_bytes) == layers
