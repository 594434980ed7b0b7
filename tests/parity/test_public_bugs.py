"""Bugs that other kernels had, as inputs. One row a test:

| where | what went wrong | test here, or where it is tested |
|---|---|---|
| ROCm/aiter #4711 | a split masked for some rows gave 0 * NaN in the merge | test_a_piece_that_some_rows_do_not_see |
| vLLM #57156, #57158; FlashInfer #942, #1029, #4971 | NaN of a slot that is not the request's | test_nan_in_slots_of_nobody |
| FlashInfer #2883; vLLM #37815, #37442, #38436; SGLang #1779 | NaN or stale rows in a batch's padding | test_rows_of_padding; tests/graph |
| vLLM #47671; tokenspeed #501; SGLang #9344, #20389 | 32-bit offsets | test_slots_beyond_32_bit_offsets, test_query_rows_beyond_32_bit_offsets |
| SGLang #5875 | requests of length zero | test_requests_without_context |
| vLLM #51848; SGLang #15601, #30407; FlashInfer #2236 | reads past the slot table | test_a_table_without_a_column_to_spare |
| rtx6kpro; FlashInfer #4199 | tree mask ignored, or replaced by causal | test_equal_weights_spell_the_mask_out |
| FlashInfer #1341, #3219, #3778; aiter #3841 | cache shapes and strides read wrongly | test_strided_forms, test_forms_that_are_refused |
| FlashInfer #2113, #4485; vLLM #43919, #47079; SGLang #33064 | lse in base 2 | test_properties.py: two halves merged, lse is natural |
| vLLM #46728, #53748; SGLang #14311, #17908 | more shared memory than there is | tests/static |
| SGLang #18396; vLLM #37054, #54563 | scales applied twice, swapped or not at all | test_scales_of_keys_and_values |
| FlashInfer #2689 | rows beyond 16 uninitialised | test_any_number_of_rows; tests/sanitize |
| SGLang #27367 | value width unlike key width | test_other_widths_work_or_are_refused |
| FlashInfer #3700, #4732, #5048 | hang in a padded, captured batch | tests/graph |
| rtx6kpro; SGLang #39287, #39160 | lengths of another row or request | test_order_of_lengths_in_a_batch, test_siblings_at_one_depth |
"""

from dataclasses import replace

import pytest
import torch
from cases import MIXES, Case, Inputs, make_inputs
from compare import assert_matches, expected_attention

from treemla import SlotRanges, SlotTable, VerifyPlan, VerifyShape, verify_attention
from treemla.tree import DraftTree, batch_words


def dtype_for(device: torch.device) -> str:
    return "bf16" if device.type == "cuda" else "fp32"


def check(case: Case, device: torch.device) -> None:
    inputs = make_inputs(replace(case, dtype=dtype_for(device)), device)
    assert_matches(*inputs.run(), inputs.expected(), inputs.case)


@pytest.mark.parametrize("tree", ["chain", "padded", "self"])
@pytest.mark.parametrize("parts", [2, 3, 5, 16])
@pytest.mark.parametrize("lengths", [(260,), (388,), (256, 384), (260, 388, 260, 388), (0, 256)])
def test_a_piece_that_some_rows_do_not_see(
    lengths: tuple[int, ...], parts: int, tree: str, device: torch.device
) -> None:
    """Of 256 and 384 tokens the last piece may hold the tree alone, and a padded row sees none of it."""
    check(Case(lengths, 8, 16, tree=tree, parts=parts), device)


@pytest.mark.parametrize("n", [0, 1, 5, 31, 33, 47, 65])
@pytest.mark.parametrize("slots", ["table32", "ranges32"])
def test_nan_in_slots_of_nobody(slots: str, n: int, device: torch.device) -> None:
    """Slot 0 and the last are NaN, as are half the pool's; lengths end inside a tile."""
    inputs = make_inputs(Case((n, 3), 4, 2, slots=slots, dtype=dtype_for(device)), device)
    assert inputs.kv_cache[0].isnan().all() and not any((owned == 0).any() for owned in inputs.owned)
    out, lse = inputs.run()
    assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize("lengths", [(37, 0, 0, 0, 0, 0, 0, 0), (1, 1, 0, 0), (0, 0)])
@pytest.mark.parametrize("tree_tokens", [1, 9])
def test_rows_of_padding(tree_tokens: int, lengths: tuple[int, ...], device: torch.device) -> None:
    """Padding reads no slot, here all NaN, and gives 0 with -inf. Real requests may be of length 1 and 0."""
    padding = sum(n == 0 for n in lengths)
    case = Case(lengths, tree_tokens, 8, tree="chain", padding=padding, dtype=dtype_for(device))
    inputs = make_inputs(case, device)
    out, lse = inputs.run()
    rows = padding * tree_tokens
    assert (out[-rows:] == 0).all() and (lse[-rows:] == -torch.inf).all()
    assert_matches(out, lse, inputs.expected(), case)


@pytest.mark.parametrize("page_size", [1, 64])
def test_slots_beyond_32_bit_offsets(page_size: int, device: torch.device) -> None:
    """Slots from 3,728,271 on lie beyond 2^31 elements and 2^32 bytes; untouched memory costs nothing on a CPU."""
    inputs = make_inputs(Case((70, 3), 9, 2, page_size=page_size), device)
    far = 3_728_280 // page_size * page_size
    pool = torch.empty(far + len(inputs.kv_cache), 576, dtype=torch.bfloat16, device=device)
    pool[far:] = inputs.kv_cache
    slots = replace(inputs.slots, req_to_token=inputs.slots.req_to_token.clamp(max=2**30) + far)
    moved = replace(inputs, kv_cache=pool, slots=slots, owned=[owned + far for owned in inputs.owned])
    assert_matches(*moved.run(), inputs.expected(), inputs.case)


def test_query_rows_beyond_32_bit_offsets(device: torch.device) -> None:
    """131,200 tokens, rows 16,384 elements apart. All requests read one tree's slots; the last one's q is checked."""
    batch, tree_tokens, stride = 2050, 64, 16_384
    kv_cache = torch.randn(100, 576, device=device).bfloat16()
    q = torch.empty(batch * tree_tokens, stride, dtype=torch.bfloat16, device=device)[:, None, :576]
    q[-tree_tokens:] = torch.randn(tree_tokens, 1, 576, device=device)
    owned = torch.arange(20, 20 + tree_tokens, device=device)
    slots = SlotTable(owned.int()[None], torch.zeros(batch, dtype=torch.int64, device=device))
    plan = VerifyPlan(VerifyShape(1, tree_tokens), batch, device)
    plan.update(torch.zeros(batch, dtype=torch.int32, device=device), slots)
    out, lse = verify_attention(q, kv_cache, slots, None, plan, sm_scale=0.07)
    expected = expected_attention(q[-tree_tokens:], kv_cache, [owned], [0], None, sm_scale=0.07)
    assert_matches(out[-tree_tokens:], lse[-tree_tokens:], expected, Case((0,) * batch, tree_tokens, 1, tree="none"))


@pytest.mark.parametrize(
    "lengths", [(0,), (0,) * 16, (0, 700), (700, 0), (0, 300, 0, 0, 400, 0), (500, 0, 0, 600)], ids=str
)
@pytest.mark.parametrize("parts", [0, 3])
def test_requests_without_context(parts: int, lengths: tuple[int, ...], device: torch.device) -> None:
    """Alone, all, first, last, between long ones."""
    check(Case(lengths, 4, 16, parts=parts), device)


@pytest.mark.parametrize("tree_tokens", [1, 3, 9])
@pytest.mark.parametrize("n", [256, 63, 0])
def test_a_table_without_a_column_to_spare(n: int, tree_tokens: int, device: torch.device) -> None:
    """The table ends with the tree's last slot, and the ranges with their last index."""
    case = Case((n,), tree_tokens, 2, dtype=dtype_for(device))
    inputs = make_inputs(case, device)
    expected, owned = inputs.expected(), inputs.owned[0]
    table = SlotTable(owned.int()[None].clone(), torch.zeros(1, dtype=torch.int32, device=device))
    ranges = SlotRanges(torch.tensor([0, len(owned)], device=device), owned.clone())
    for slots in (table, ranges):
        inputs.plan.update(inputs.seq_lens, slots)
        assert_matches(*replace(inputs, slots=slots).run(), expected, case)


@pytest.mark.parametrize("tree", ["none", "chain", "star", "comb", "random", "ddtree", "self", "padded"])
@pytest.mark.parametrize("tree_tokens", [1, 4, 9, 33, 64])
@pytest.mark.parametrize("n", [0, 3, 4000])
def test_equal_weights_spell_the_mask_out(n: int, tree_tokens: int, tree: str, device: torch.device) -> None:
    """Q = 0, one column a token: random values hide a wrong mask, this output is the mask."""
    check(Case((n, 5), tree_tokens, 2, tree=tree, family="mean"), device)


def strided(inputs: Inputs) -> dict[str, Inputs]:
    """The same numbers in the shapes and strides that callers have."""
    q, kv, device = inputs.packed_q, inputs.kv_cache, inputs.kv_cache.device
    wide = torch.full((len(kv), 640), torch.nan, dtype=kv.dtype, device=device)
    wide[:, :576] = kv
    layers = torch.full((len(kv), 3, 576), torch.nan, dtype=kv.dtype, device=device)
    layers[:, 1] = kv
    by_head = q.transpose(0, 1).contiguous().transpose(0, 1)  # strides [576, B*T*576, 1]
    return {
        "kv [S, 1, 576]": replace(inputs, kv_cache=kv[:, None]),
        "kv rows 640 apart": replace(inputs, kv_cache=wide[:, :576]),
        "kv of one layer among three": replace(inputs, kv_cache=layers[:, 1:2]),
        "q by head": replace(inputs, q=by_head),
        "q as a pair of views": replace(inputs, q=(by_head[..., :512], by_head[..., 512:])),
        "q as a pair of tensors": replace(inputs, q=(q[..., :512].contiguous(), q[..., 512:].contiguous())),
    }


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_strided_forms(heads: int, device: torch.device) -> None:
    inputs = make_inputs(Case((40, 0, 65), 9, heads, dtype=dtype_for(device)), device)
    out, lse = (result.clone() for result in inputs.run())
    assert_matches(out, lse, inputs.expected(), inputs.case)
    for form, same in strided(inputs).items():
        got_out, got_lse = same.run()
        assert torch.equal(got_out, out) and torch.equal(got_lse, lse), form


@pytest.mark.parametrize(
    ("argument", "form"),
    [
        ("kv_cache", lambda kv: kv[: len(kv) // 16 * 16].view(-1, 16, 576)),
        ("kv_cache", lambda kv: kv.T.contiguous().T),
        ("kv_cache", lambda kv: torch.nn.functional.pad(kv, (0, 4))[:, :576]),
        ("q", lambda q: q.transpose(1, 2).contiguous().transpose(1, 2)),
        ("q", lambda q: torch.nn.functional.pad(q, (0, 4))[..., :576]),
        ("q", lambda q: q[1:]),
    ],
    ids=["kv-in-pages", "kv-column-major", "kv-stride-580", "q-last-stride", "q-stride-580", "q-rows-missing"],
)
def test_forms_that_are_refused(argument: str, form, device: torch.device) -> None:
    """Loud, and before anything is written."""
    inputs = make_inputs(Case((40,), 9, 3, dtype=dtype_for(device)), device)
    inputs.run()
    inputs.out.fill_(7)
    tensors = {"q": inputs.q, "kv_cache": inputs.kv_cache}
    tensors[argument] = form(tensors[argument])
    with pytest.raises(ValueError, match=argument):
        verify_attention(
            tensors["q"], tensors["kv_cache"], inputs.slots, inputs.words, inputs.plan, out=inputs.out, sm_scale=0.1
        )
    assert (inputs.out == 7).all()


@pytest.mark.parametrize("k", [1.0, 0.06, 3.7])
@pytest.mark.parametrize("v", [1.0, 0.06, 3.7])
@pytest.mark.parametrize("parts", [1, 6])
def test_scales_of_keys_and_values(parts: int, v: float, k: float, device: torch.device) -> None:
    check(Case((300, 9), 9, 2, k=k, v=v, parts=parts), device)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 15, 16, 17, 24, 25, 32, 33, 39, 40, 41, 47, 48, 49, 63, 64])
def test_any_number_of_rows(rows: int, device: torch.device) -> None:
    """One head, so that query rows are tree tokens: every fill of the last row tile."""
    check(Case((70, 0), rows, 1), device)


@pytest.mark.parametrize("widths", [(256, 64), (512, 128), (192, 0)])
def test_other_widths_work_or_are_refused(widths: tuple[int, int], device: torch.device) -> None:
    """The portable path takes any; the kernels are built for one and say so."""
    latent, rope = widths
    kv_cache = torch.randn(40, latent + rope, device=device).to(torch.bfloat16)
    q = torch.randn(4, 2, latent + rope, device=device).to(torch.bfloat16)
    owned = torch.arange(3, 23, device=device)
    slots = SlotTable(owned.int()[None], torch.zeros(1, dtype=torch.int64, device=device))
    plan = VerifyPlan(VerifyShape(2, 4, latent_dim=latent, rope_dim=rope), 1, device)
    plan.update(torch.tensor([16], device=device), slots)
    if device.type == "cuda":
        with pytest.raises(ValueError, match="latent_dim"):
            verify_attention(q, kv_cache, slots, None, plan, sm_scale=0.1)
        return
    expected = expected_attention(q, kv_cache, [owned], [16], None, sm_scale=0.1, latent_dim=latent)
    assert_matches(
        *verify_attention(q, kv_cache, slots, None, plan, sm_scale=0.1), expected, Case((16,), 4, 2, tree="none")
    )


@pytest.mark.parametrize("lengths", [MIXES[1], MIXES[2], (2000, 3), (3, 2000), (3, 2000, 5, 1999, 0)], ids=str)
@pytest.mark.parametrize("tree_tokens", [2, 9])
def test_order_of_lengths_in_a_batch(tree_tokens: int, lengths: tuple[int, ...], device: torch.device) -> None:
    check(Case(lengths, tree_tokens, 4), device)


def test_siblings_at_one_depth(device: torch.device) -> None:
    """Tokens 1 and 2 are siblings: same depth, same number of keys seen, values that conflict."""
    case = Case((33, 2), 3, 2, family="mean", dtype=dtype_for(device))
    inputs = make_inputs(case, device)
    inputs.words.copy_(torch.from_numpy(batch_words([DraftTree([-1, 0, 0])] * 2, 3)))
    out, _ = inputs.run()
    for b, n in enumerate(case.lengths):
        share = 1 / (n + 2)
        for token, seen in ((1, [share, share, 0]), (2, [share, 0, share])):
            torch.testing.assert_close(
                out[3 * b + token, 0, :3].double().cpu(), torch.tensor(seen).double(), rtol=2**-8, atol=0
            )
