"""The portable path: whatever the plan, the oracle's answer. Unowned slots, outputs and workspace start as NaN."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from cases import TREES, Case, Inputs, make_inputs
from compare import assert_matches
from hypothesis import given, settings
from hypothesis import strategies as st

from treemla import SlotTable, VerifyPlan, portable
from treemla.schedule import DIRECT, OVERLONG, Schedule

CPU = torch.device("cpu")
MORE_PARTS_THAN_TOKENS = 64  # of a short request

lengths = st.lists(st.one_of(st.sampled_from([0, 1, 31, 32, 33, 64]), st.integers(0, 250)), min_size=1, max_size=4)


@st.composite
def cases(draw: st.DrawFn, **fixed: object) -> Case:
    """Small cases of every tree, slot kind and dtype."""
    drawn = {
        "lengths": tuple(draw(lengths)),
        "tree_tokens": draw(st.integers(1, 12)),
        "heads": draw(st.integers(1, 4)),
        "dtype": draw(st.sampled_from(["fp32", "fp16", "bf16"])),
        "tree": draw(st.sampled_from(TREES)),
        "slots": draw(st.sampled_from(["table32", "table64", "ranges32", "ranges64"])),
        "k": draw(st.sampled_from([1.0, 0.06, 3.7])),
        "v": draw(st.sampled_from([1.0, 0.5])),
    }
    drawn |= fixed
    if drawn["tree"] == "padded" and drawn["tree_tokens"] < len(drawn["lengths"]):
        drawn["tree"] = "random"  # a padded tree grows with its request's place in the batch
    return Case(**drawn)


def check_against_oracle(inputs: Inputs) -> None:
    out, lse = inputs.run()
    assert_matches(out, lse, inputs.expected(), inputs.case)


@settings(max_examples=60)
@given(st.data())
def test_balanced_plan_gives_the_oracle_answer(data: st.DataObject) -> None:
    parts = data.draw(st.sampled_from([1, 2, 5, 8, MORE_PARTS_THAN_TOKENS]))
    check_against_oracle(make_inputs(data.draw(cases(parts=parts)), CPU))


@settings(max_examples=40)
@given(st.data())
def test_fixed_split_plan_gives_the_oracle_answer(data: st.DataObject) -> None:
    split = data.draw(st.sampled_from([32, 64, 256]))
    check_against_oracle(make_inputs(data.draw(cases(split=split)), CPU))


@settings(max_examples=60)
@given(st.data())
def test_any_cuts_give_the_oracle_answer(data: st.DataObject) -> None:
    """Cuts anywhere: twice in one place (an empty piece), and inside the tree (pieces that some rows see nothing of)."""
    inputs = make_inputs(data.draw(cases(parts=MORE_PARTS_THAN_TOKENS)), CPU)
    ends = [n + inputs.case.tree_tokens for n in inputs.case.lengths]
    cuts = [sorted(data.draw(st.lists(st.integers(0, end), max_size=12))) for end in ends]
    inputs.plan.load(hand_made(inputs, cuts, data.draw(st.randoms(use_true_random=False))))
    check_against_oracle(inputs)


def test_more_pieces_than_tokens_give_the_oracle_answer() -> None:
    """Every token is a piece, with an empty piece between any two."""
    case = Case((7, 0, 3), tree_tokens=5, heads=3, dtype="fp32", tree="random", parts=MORE_PARTS_THAN_TOKENS)
    inputs = make_inputs(case, CPU)
    cuts = [sorted(2 * list(range(n + 6))) for n in case.lengths]
    inputs.plan.load(hand_made(inputs, cuts))
    check_against_oracle(inputs)


def hand_made(inputs: Inputs, cuts: list[list[int]], random: object = None) -> Schedule:
    """A schedule with these cuts; slots in shuffled order, since nothing may depend on their values."""
    slots = list(range(len(inputs.plan.partial_out)))
    if random is not None:
        random.shuffle(slots)
    pieces, request_ptr = [], [0]
    for request, inner in enumerate(cuts):
        edges = [0, *inner, inputs.case.lengths[request] + inputs.case.tree_tokens]
        for begin, end in pairwise(edges):
            pieces.append((request, begin, end, DIRECT if len(edges) == 2 else slots.pop()))
        request_ptr.append(len(pieces))
    arrays = (inputs.case.lengths, pieces, np.linspace(0, len(pieces), inputs.plan.parts + 1), request_ptr)
    return Schedule(*(np.array(array).astype(np.int32) for array in arrays))


def test_context_of_16k_gives_the_oracle_answer() -> None:
    check_against_oracle(make_inputs(Case((16_384,), tree_tokens=9, heads=8, dtype="fp32"), CPU))


@pytest.mark.parametrize("family", ["needle.first", "needle.last", "needle.cut", "needle.precut", "needle.tree"])
def test_one_key_that_outweighs_all_others(family: str) -> None:
    """Scores of pieces differ by more than 2^30: the merge must rescale, and no piece and no edge token may be lost."""
    for lengths, split in (((300, 70), 64), ((96, 4), 32)):
        case = Case(lengths, tree_tokens=8, heads=2, dtype="fp32", tree="random", family=family, split=split)
        check_against_oracle(make_inputs(case, CPU))


def test_padding_reads_no_slot() -> None:
    """Zero words and no context: out 0 and lse -inf, though the table's row points nowhere."""
    case = Case((40, 0, 0), tree_tokens=6, heads=2, dtype="fp32", tree="random", padding=2)
    inputs = make_inputs(case, CPU)
    padded_rows = inputs.slots.req_pool_indices[1:]
    inputs.slots.req_to_token[padded_rows] = 0x7FFF_FF00
    out, lse = inputs.run()
    assert_matches(out, lse, inputs.expected(), case)
    assert (out[6:] == 0).all()
    assert (lse[6:] == -math.inf).all()


def test_tree_slots_that_no_row_sees_are_not_read() -> None:
    case = Case((40, 9), tree_tokens=8, heads=2, dtype="fp32", tree="padded")
    inputs = make_inputs(case, CPU)
    expected = inputs.expected()  # while the unseen rows are finite
    for request, n in enumerate(case.lengths):
        seen = portable.visible_tree(inputs.words, request, 8).any(dim=0)
        inputs.kv_cache[inputs.owned[request][n:][~seen]] = math.nan
    out, lse = inputs.run()
    assert_matches(out, lse, expected, case)


def test_zero_word_with_context_sees_the_context_alone() -> None:
    case = Case((40,), tree_tokens=4, heads=2, dtype="fp32", tree="random")
    inputs = make_inputs(case, CPU)
    inputs.words[2] = 0
    check_against_oracle(inputs)


def test_overlong_request_is_nan_and_the_others_right() -> None:
    case = Case((40, 90, 64), tree_tokens=4, heads=2, dtype="fp32", tree="random")
    inputs = make_inputs(case, CPU)
    expected = inputs.expected()
    plan = inputs.plan
    plan.load(plan.mirror(np.array([40, OVERLONG, 64], np.int32)))
    inputs.slots.req_to_token[inputs.slots.req_pool_indices[1]] = 0x7FFF_FF00  # read nothing of it
    out, lse = (torch.full_like(tensor, 7.0) for tensor in (inputs.out, inputs.lse))
    q_latent, q_rope = inputs.q[..., :512], inputs.q[..., 512:]
    portable.verify(
        q_latent, q_rope, inputs.kv_cache, inputs.slots, inputs.words, plan, out=out, lse=lse, **inputs.scales
    )
    assert out[4:8].isnan().all()
    assert lse[4:8].isnan().all()
    others = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11])
    assert_matches(out[others], lse[others], expected.rows(others), case)


def test_request_without_pieces_sees_nothing() -> None:
    inputs = make_inputs(Case((5,), tree_tokens=2, heads=1, dtype="fp32"), CPU)
    no_pieces = np.zeros((0, 4), np.int32)
    part_ptr = np.zeros(inputs.plan.parts + 1, np.int32)
    inputs.plan.load(Schedule(np.array([5], np.int32), no_pieces, part_ptr, np.array([0, 0], np.int32)))
    out, lse = inputs.run()
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@settings(max_examples=20)
@given(st.data())
def test_fixed_split_result_ignores_the_rest_of_the_batch(data: st.DataObject) -> None:
    """Bit for bit: a request alone and among others."""
    case = data.draw(cases(split=64, slots="table64", tree="random"))
    together = make_inputs(case, CPU)
    out, lse = together.run()
    for request, n in enumerate(case.lengths):
        tokens = slice(request * case.tree_tokens, (request + 1) * case.tree_tokens)
        slots = SlotTable(together.slots.req_to_token, together.slots.req_pool_indices[request : request + 1])
        plan = VerifyPlan(case.shape, 1, CPU, fixed_split_tokens=64, max_context=max(1, *case.lengths, 0))
        plan.update(together.seq_lens[request : request + 1], slots)
        alone_out, alone_lse = torch.empty_like(out[tokens]), torch.empty_like(lse[tokens])
        q = together.q[tokens]
        portable.verify(
            q[..., :512],
            q[..., 512:],
            together.kv_cache,
            slots,
            together.words[tokens],
            plan,
            out=alone_out,
            lse=alone_lse,
            **together.scales,
        )
        assert torch.equal(alone_out, out[tokens]), f"{case.id}: request {request} with {n} committed tokens"
        assert torch.equal(alone_lse, lse[tokens])


@given(cases(tree="chain", family="cold"))
@settings(max_examples=20)
def test_chain_given_as_words_equals_none(case: Case) -> None:
    """Bit for bit."""
    inputs = make_inputs(case, CPU)
    out, lse = (tensor.clone() for tensor in inputs.run())
    object.__setattr__(inputs, "words", None)
    none_out, none_lse = inputs.run()
    assert torch.equal(none_out, out)
    assert torch.equal(none_lse, lse)


@given(st.lists(st.floats(-3000, 3000, width=32), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_combine_is_the_weighted_mean_in_base_two(lses: list[float], random: object) -> None:
    outs = torch.tensor([[random.uniform(-1, 1) for _ in range(3)] for _ in lses])
    out, lse = portable.combine(outs[:, None], torch.tensor(lses)[:, None])
    exponents = torch.tensor(lses, dtype=torch.float64)
    weights = torch.exp2(exponents - exponents.max())
    torch.testing.assert_close(out[0].double(), (weights @ outs.double()) / weights.sum(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse[0].double(), exponents.max() + weights.sum().log2(), atol=1e-6, rtol=1e-6)


def test_combine_gives_a_partial_that_saw_nothing_no_weight() -> None:
    outs, lses = torch.tensor([[[5.0]], [[3.0]], [[5.0]]]), torch.tensor([[-math.inf], [-2000.0], [-math.inf]])
    assert [tensor.tolist() for tensor in portable.combine(outs, lses)] == [[[3.0]], [-2000.0]]


def test_combine_of_partials_that_saw_nothing_is_zero() -> None:
    out, lse = portable.combine(torch.zeros(3, 1, 2), torch.full((3, 1), -math.inf))
    assert out.tolist() == [[0.0, 0.0]]
    assert lse.tolist() == [-math.inf]


def test_nan_query_gives_nan_in_its_own_rows() -> None:
    """Nothing may turn a broken query into a plausible answer."""
    inputs = make_inputs(Case((90,), tree_tokens=3, heads=2, dtype="fp32", split=32), CPU)
    inputs.q[1, 1, 7] = math.nan
    out, lse = inputs.run()
    broken = lse.isnan()
    assert broken.nonzero().tolist() == [[1, 1]]
    assert out[broken].isnan().all()
    assert out[~broken].isfinite().all()
