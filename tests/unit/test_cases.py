"""Case ids are complete, and inputs hold what the suites rely on."""

import case_lists
import pytest
import torch
from cases import KV_DTYPES, SLOTS, Case, make_inputs
from hypothesis import given
from hypothesis import strategies as st
from strategies import cases
from tree_kinds import TREE_KINDS, make_tree

CPU = torch.device("cpu")


def test_ids_read_as_documented() -> None:
    assert Case((16384,) * 8, tree_tokens=9, heads=8).id == "verify-b8-c16384-t9-h8-p1-bf16"
    assert (
        Case((1, 2), 9, 8, tree="star", slots="ranges64", k=0.06).id
        == "verify-b2-c1_2-t9-h8-p1-bf16-star-ranges64-k0.06"
    )
    assert Case((7,), 9, 8, kv="fp8", tree="star").id == "verify-b1-c7-t9-h8-p1-bf16-fp8-star"


@given(st.one_of(cases("cuda"), cases("cpu")))
def test_an_id_names_its_case(case: Case) -> None:
    assert Case.from_id(case.id) == case


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_listed_cases_have_ids_of_their_own(device: str) -> None:
    listed = case_lists.CASES[device]
    assert len({case.id for case in listed}) == len(listed)
    assert [Case.from_id(case.id) for case in listed] == listed


def test_what_is_no_id_is_refused() -> None:
    with pytest.raises(ValueError, match="case id: expected verify-b"):
        Case.from_id("verify-b1")


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("slots", SLOTS)
def test_each_token_has_a_slot_of_its_own_within_whole_pages(slots: str, page_size: int) -> None:
    case = Case((70, 0, 33), 9, 1, page_size=page_size, dtype="fp32", slots=slots)
    inputs = make_inputs(case, CPU)
    every = torch.cat(inputs.owned)
    assert [len(owned) for owned in inputs.owned] == [n + 9 for n in case.lengths]
    assert len(every.unique()) == len(every) and int(every.min()) >= page_size
    for owned in inputs.owned:
        assert (owned % page_size == torch.arange(len(owned)) % page_size).all()
        assert all(len(page.unique()) == 1 for page in (owned // page_size).split(page_size))


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_all_that_is_not_owned_is_poisoned(kv: str) -> None:
    inputs = make_inputs(Case((40, 3), 9, 2, dtype="fp32", kv=kv, tree="padded", parts=4), CPU)
    owned = torch.zeros(len(inputs.kv_cache), dtype=torch.bool)
    owned[torch.cat(inputs.owned)] = True
    assert not inputs.kv_cache[owned].isnan().any()
    assert inputs.kv_cache[~owned].isnan().all() and (~owned).sum() > 2
    out, lse = inputs.run()
    assert out is inputs.out and lse is inputs.lse and out.isfinite().all()


def test_the_rows_of_padding_requests_are_poisoned() -> None:
    inputs = make_inputs(Case((40, 0, 0), 9, 2, dtype="fp32", padding=2), CPU)
    assert inputs.kv_cache[torch.cat(inputs.owned[1:])].isnan().all()
    assert (inputs.words[9:] == 0).all() and (inputs.words[:9] != 0).all()


@pytest.mark.parametrize("kind", TREE_KINDS)
@pytest.mark.parametrize("tree_tokens", [1, 2, 9, 17, 64])
def test_trees_have_the_size_asked_for(kind: str, tree_tokens: int) -> None:
    assert all(make_tree(kind, tree_tokens, seed).tree_tokens == tree_tokens for seed in range(20))


def test_requests_of_a_batch_have_different_trees() -> None:
    words = make_inputs(Case((5,) * 4, 17, 1, dtype="fp32"), CPU).words.view(4, 17)
    assert len(words.unique(dim=0)) == 4


def test_inputs_are_the_same_each_time() -> None:
    case = Case((50, 3), 9, 2, dtype="fp32")
    first, second = make_inputs(case, CPU), make_inputs(case, CPU)
    assert torch.equal(first.q, second.q) and torch.equal(first.slots.req_to_token, second.slots.req_to_token)
    assert torch.equal(first.kv_cache.nan_to_num(), second.kv_cache.nan_to_num())


@pytest.mark.parametrize("family", ["needle.first", "needle.last", "needle.cut", "needle.precut"])
def test_a_needle_outweighs_all_else(family: str) -> None:
    inputs = make_inputs(Case((3000,), 2, 2, dtype="bf16", family=family, parts=3), CPU)
    assert (inputs.expected().out[1] - 8).abs().max() < 0.05
