"""The public calls: every accepted form of an argument means the same, and torch.compile sees one operation."""

import pytest
import torch
from cases import Case, Inputs, make_inputs

from treemla import MaskLayout, pack_tree_mask, verify_attention

CASE = Case((40, 9), tree_tokens=6, heads=4, dtype="fp32", tree="random", k=0.5, v=2.0)


@pytest.fixture
def inputs() -> Inputs:
    return make_inputs(CASE, torch.device("cpu"))


def run(inputs: Inputs, **changed: object) -> tuple[torch.Tensor, torch.Tensor]:
    call = {"q": inputs.q, "kv_cache": inputs.kv_cache, "slots": inputs.slots, "words": inputs.words}
    return verify_attention(**(call | inputs.scales | {"plan": inputs.plan} | changed))


def test_query_pair_equals_one_tensor(inputs: Inputs) -> None:
    """Bit for bit, also where the halves are slices of wider rows."""
    expected = run(inputs)
    latent = torch.full((CASE.heads, len(inputs.q), 520), torch.nan)
    latent[..., :512] = inputs.q[..., :512].transpose(0, 1)
    rope = torch.full((len(inputs.q), CASE.heads, 192), torch.nan)
    rope[..., 128:] = inputs.q[..., 512:]
    got = run(inputs, q=(latent[..., :512].transpose(0, 1), rope[..., 128:]))
    assert all(torch.equal(mine, its) for mine, its in zip(got, expected, strict=True))


def test_cache_with_a_head_axis_or_wider_rows_equals_the_plain_one(inputs: Inputs) -> None:
    expected = run(inputs)
    wider = torch.full((len(inputs.kv_cache), 1, 640), torch.nan)
    wider[:, 0, :576] = inputs.kv_cache
    for kv_cache in (inputs.kv_cache[:, None], wider[..., :576], wider[:, 0, :576]):
        assert all(torch.equal(mine, its) for mine, its in zip(run(inputs, kv_cache=kv_cache), expected, strict=True))


def test_outputs_given_are_the_outputs_returned(inputs: Inputs) -> None:
    out, lse = run(inputs, out=inputs.out, lse=inputs.lse)
    assert out is inputs.out
    assert lse is inputs.lse
    allocated = run(inputs)
    assert all(torch.equal(mine, its) for mine, its in zip(allocated, (out, lse), strict=True))


def test_inputs_are_not_written(inputs: Inputs) -> None:
    held = [inputs.q, inputs.kv_cache, inputs.words, inputs.slots.req_to_token, *inputs.plan.tensors[:4]]
    before = [tensor.clone() for tensor in held]
    run(inputs)
    for tensor, copy in zip(held, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


def test_compiled_call_is_one_graph_with_the_same_bits(inputs: Inputs) -> None:
    expected = run(inputs)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(q: torch.Tensor, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = run(inputs, q=q, kv_cache=kv_cache)
        return out * 2, lse

    out, lse = layer(inputs.q, inputs.kv_cache)
    assert torch.equal(out, expected[0] * 2)
    assert torch.equal(lse, expected[1])


def test_compiled_packing_writes_the_same_words() -> None:
    mask = torch.ones(2, 5, 5, dtype=torch.bool).tril()
    lengths, words = torch.tensor([3, 0]), torch.zeros(10, dtype=torch.int64)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def pack(mask: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        pack_tree_mask(mask, lengths, words, MaskLayout.QLEN_ONLY)
        return words + 0

    assert pack(mask, words).tolist() == words.tolist() == [1, 3, 7, 15, 31] * 2


@pytest.mark.parametrize("words", [True, False])
def test_registered_verify_obeys_its_schema(inputs: Inputs, words: bool) -> None:
    inputs.run()  # leaves no NaN in the outputs, which opcheck compares
    q_latent, q_rope = inputs.q[..., :512], inputs.q[..., 512:]
    slots = inputs.slots.req_to_token, inputs.slots.req_pool_indices
    tensors = inputs.plan.tensors[:-2]
    workspace = torch.zeros_like(inputs.plan.partial_out), torch.zeros_like(inputs.plan.partial_lse)
    arguments = (q_latent, q_rope, inputs.kv_cache.nan_to_num(), *slots, True, inputs.words if words else None)
    arguments += (
        *tensors,
        *workspace,
        inputs.out,
        inputs.lse,
        *inputs.scales.values(),
        inputs.plan.path.name,
        False,
        inputs.plan.by_shares,
        True,
    )
    torch.library.opcheck(torch.ops.treemla.verify_.default, arguments)


def test_registered_packing_obeys_its_schema() -> None:
    mask, lengths = torch.ones(2, 5, 5, dtype=torch.bool).tril(), torch.tensor([3, 0])
    torch.library.opcheck(
        torch.ops.treemla.pack_tree_mask_.default, (mask, lengths, torch.zeros(10, dtype=torch.int64), False, 5, 0)
    )
