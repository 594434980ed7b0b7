"""What must hold between runs, whatever the right answer is: bit for bit where the schedule is the same, else within
the tolerances of compare.py."""

from dataclasses import replace

import pytest
import torch
from cases import MIXES, TREES, Case, Inputs, make_inputs
from compare import assert_matches
from decode import decode, expected_decode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import cases
from tree_kinds import TREE_KINDS

from treemla import SlotRanges, SlotTable, VerifyPlan
from treemla.reference import visible_tokens
from treemla.tree import DraftTree, batch_words

drawn = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


def case_for(device: torch.device, *lengths: int, tree_tokens: int = 9, heads: int = 3, **fields: object) -> Case:
    """A case in the dtype that the device's path is judged in here."""
    return Case(lengths or MIXES[1], tree_tokens, heads, dtype="bf16" if device.type == "cuda" else "fp32", **fields)


def results(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """A run's results, kept from being overwritten by the next."""
    out, lse = inputs.run()
    return out.clone(), lse.clone()


def assert_same_bits(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor], case: Case) -> None:
    for name, left, right in zip(("out", "lse"), a, b, strict=True):
        differ = left != right
        first = differ.nonzero()[0].tolist() if differ.any() else None
        rerun = f"inputs: make_inputs(Case.from_id({case.id!r}), device)"
        assert first is None, f"{name}: {int(differ.sum())} of {differ.numel()} differ, first at {first}; {rerun}"


def assert_nodes_match_their_paths(inputs: Inputs) -> None:
    """Within tolerance, not bit for bit: the plain run has other rows in a block and other tokens in a tile."""
    case, slots = inputs.case, []
    for b, n in enumerate(case.lengths):
        words = inputs.words[b * case.tree_tokens : (b + 1) * case.tree_tokens]
        visible = visible_tokens(n, case.tree_tokens, words, words.device)
        slots += [inputs.owned[b][seen] for seen in visible]
    expected = expected_decode(inputs.packed_q, inputs.kv_cache, slots, **inputs.scales)
    assert_matches(*results(inputs), expected, case, who="the tree")
    plain = decode(inputs.packed_q, inputs.kv_cache, slots, **inputs.scales)
    assert_matches(*plain, expected, case, who="the plain run of each path")


@pytest.mark.parametrize("family", ["diffuse", "mean"])
@pytest.mark.parametrize("tree", [*TREE_KINDS, "self"])
@pytest.mark.parametrize("tree_tokens", [9, 33])
def test_each_node_equals_a_plain_run_of_its_path(
    tree_tokens: int, tree: str, family: str, device: torch.device
) -> None:
    case = case_for(device, 0, 1, 40, 200, tree_tokens=tree_tokens, tree=tree, family=family)
    assert_nodes_match_their_paths(make_inputs(case, device))


@drawn
@given(data=st.data())
def test_each_node_of_a_drawn_case_equals_a_plain_run_of_its_path(data: st.DataObject, device: torch.device) -> None:
    case = data.draw(cases(device.type, (*TREE_KINDS, "self")).filter(lambda case: not case.padding))
    assert_nodes_match_their_paths(make_inputs(case, device))


@pytest.mark.parametrize("tree", ["star", "comb", "random", "ddtree"])
@pytest.mark.parametrize("tree_tokens", [9, 64])
def test_what_a_row_does_not_see_leaves_no_trace(tree_tokens: int, tree: str, device: torch.device) -> None:
    """Same bits after all that the last token does not see has changed: other tokens' rows of q, k, v and words."""
    case = case_for(device, 50, 0, 32, tree_tokens=tree_tokens, tree=tree)
    inputs = make_inputs(case, device)
    before = results(inputs)
    last = torch.arange(1, case.batch + 1, device=device) * tree_tokens - 1
    words = inputs.words.clone()
    for b, n in enumerate(case.lengths):
        unseen = ~visible_tokens(n, tree_tokens, words[last[b]][None].expand(tree_tokens), device)[0]
        inputs.kv_cache[inputs.owned[b][unseen]] *= -5
    others = torch.ones(len(words), dtype=torch.bool, device=device)
    others[last] = False
    inputs.q[others] *= -3
    inputs.words[others] = 1 << torch.arange(tree_tokens, device=device).repeat(case.batch)[others]
    after = results(inputs)
    assert_same_bits((before[0][last], before[1][last]), (after[0][last], after[1][last]), case)
    assert not torch.equal(before[0], after[0])


@pytest.mark.parametrize("tree_tokens", [1, 2, 8, 9, 17, 33, 63, 64])
@pytest.mark.parametrize("parts", [0, 1, 5])
def test_a_chain_as_words_equals_causal_bit_for_bit(parts: int, tree_tokens: int, device: torch.device) -> None:
    case = case_for(device, tree_tokens=tree_tokens, parts=parts, tree="chain")
    inputs = make_inputs(case, device)
    assert_same_bits(results(inputs), results(replace(inputs, words=None)), case)


@drawn
@given(data=st.data())
def test_a_drawn_chain_as_words_equals_causal_bit_for_bit(data: st.DataObject, device: torch.device) -> None:
    case = data.draw(cases(device.type, ("chain",)).filter(lambda case: not case.padding))
    inputs = make_inputs(case, device)
    assert_same_bits(results(inputs), results(replace(inputs, words=None)), case)


@pytest.mark.parametrize("tree", ["ddtree", "none"])
@pytest.mark.parametrize("lengths", [MIXES[1], (3000,)])
def test_twenty_runs_give_the_same_bits(lengths: tuple[int, ...], tree: str, device: torch.device) -> None:
    case = case_for(device, *lengths, tree=tree)
    inputs = make_inputs(case, device)
    first = results(inputs)
    for _ in range(19):
        assert_same_bits(results(inputs), first, case)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_slots_in_other_places_give_the_same_bits(page_size: int, device: torch.device) -> None:
    """The same tokens with the whole pool reversed; as a table and as ranges; as 32 and as 64 bits."""
    case = case_for(device, page_size=page_size)
    inputs = make_inputs(case, device)
    first = results(inputs)
    owned = [len(inputs.kv_cache) - 1 - slots for slots in inputs.owned]
    starts = torch.tensor([0, *map(len, owned)], device=device).cumsum(0)
    table = torch.zeros(case.batch, max(map(len, owned)), dtype=torch.int32, device=device)
    for row, slots in zip(table, owned, strict=True):
        row[: len(slots)] = slots
    rows = torch.arange(case.batch, device=device)
    moved = replace(inputs, kv_cache=inputs.kv_cache.flip(0).contiguous(), owned=owned)
    for slots in (
        SlotTable(table, rows),
        SlotTable(table, rows.int()),
        SlotRanges(starts, torch.cat(owned)),
        SlotRanges(starts.int(), torch.cat(owned).int()),
    ):
        for lengths in (inputs.seq_lens.int(), inputs.seq_lens.long()):
            inputs.plan.update(lengths, slots)
            assert_same_bits(results(replace(moved, slots=slots)), first, case)


@pytest.mark.parametrize("tree", TREES)
def test_under_fixed_split_a_request_has_the_same_bits_alone(tree: str, device: torch.device) -> None:
    """Also in another place of the batch: between other lengths and other trees."""
    case = case_for(device, 300, 0, 65, 1, 130, tree=tree, split=64)
    inputs = make_inputs(case, device)
    out, lse = results(inputs)
    for order in ([0], [1], [4], [4, 3, 2, 1, 0], [2, 0]):
        rows = torch.cat([torch.arange(b * 9, b * 9 + 9, device=device) for b in order])
        slots = SlotTable(inputs.slots.req_to_token, inputs.slots.req_pool_indices[order])
        plan = VerifyPlan(case.shape, len(order), device, fixed_split_tokens=64, max_context=300)
        plan.update(inputs.seq_lens[order], slots)
        chosen = replace(
            inputs,
            q=inputs.q[rows],
            slots=slots,
            words=None if inputs.words is None else inputs.words[rows],
            plan=plan,
            out=inputs.out[rows],
            lse=inputs.lse[rows],
        )
        assert_same_bits(results(chosen), (out[rows], lse[rows]), case)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_requests_of_a_batch_keep_their_own_trees(order: tuple[int, ...], device: torch.device) -> None:
    """Equal sizes, different trees and lengths: with equal weights the output spells the mask out."""
    made = [DraftTree.chain(9), DraftTree([-1] + [0] * 8), DraftTree([-1, 0, 0, 1, 1, 2, 2, 3, 3])]
    case = case_for(device, 7, 0, 70, family="mean")
    inputs = make_inputs(case, device)
    inputs.words.copy_(torch.from_numpy(batch_words([made[b] for b in order], 9)))
    out, _ = inputs.run()
    for b, tree in enumerate(order):
        seen = out[b * 9 : (b + 1) * 9, 0, :9] > 0
        assert seen.tolist() == made[tree].visible.tolist()


@pytest.mark.parametrize("halves", [(1, 1), (40, 300), (300, 40), (64, 64), (500, 500)])
def test_two_halves_merged_by_lse_equal_the_whole(halves: tuple[int, int], device: torch.device) -> None:
    """The external lse is a natural logarithm: weights are exp(lse - lse of the whole)."""
    inputs = make_inputs(case_for(device, sum(halves) - 1, tree_tokens=1, tree="none"), device)
    q, kv, whole = inputs.packed_q, inputs.kv_cache, inputs.owned[0]
    out, lse = decode(q.expand(2, -1, -1).contiguous(), kv, list(whole.split(halves)), **inputs.scales)
    merged_lse = lse.double().logsumexp(dim=0, keepdim=True)
    merged = ((lse.double() - merged_lse).exp()[..., None] * out.double()).sum(dim=0, keepdim=True)
    expected = inputs.expected()
    assert_matches(merged.to(q.dtype), merged_lse.float(), expected, inputs.case, who="two halves, merged")
    assert_matches(*results(inputs), expected, inputs.case)


@pytest.mark.parametrize("n", [0, 1, 31, 32, 400])
def test_lse_is_the_natural_logarithm_of_the_summed_exponentials(n: int, device: torch.device) -> None:
    case = case_for(device, n, tree="star")
    inputs = make_inputs(case, device)
    _, lse = inputs.run()
    scores = inputs.sm_scale * (inputs.packed_q.double() @ inputs.kv_cache[inputs.owned[0]].double().T)
    for token in range(9):
        seen = [*range(n), *{n, n + token}]
        want = torch.logsumexp(scores[token][:, seen], dim=-1)
        torch.testing.assert_close(lse[token].double(), want, rtol=2.0**-13, atol=2.0**-13)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_request_longer_than_its_slots_is_refused_or_nan_and_harms_no_other(place: int, device: torch.device) -> None:
    """A CPU reads the lengths and raises; a GPU does not, and answers NaN."""
    case = case_for(device, 40, 33, 64)
    inputs = make_inputs(case, device)
    expected = inputs.expected()
    lengths = inputs.seq_lens.clone()
    lengths[place] = inputs.slots.req_to_token.shape[1] - 8  # one more than fits before 9 tree tokens
    if device.type == "cpu":
        with pytest.raises(ValueError, match=f"seq_lens.*request {place}|seq_lens.*\\[{place}\\]"):
            inputs.plan.update(lengths, inputs.slots)
        return
    inputs.plan.update(lengths, inputs.slots)
    out, lse = inputs.run()
    mine = torch.arange(27, device=device) // 9 == place
    assert out[mine].isnan().all() and lse[mine].isnan().all()
    assert_matches(out[~mine], lse[~mine], expected.rows(~mine), case)
