"""The oracle against the definition, written out with loops, and its own promises."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import trees

from treemla import reference
from treemla.tree import DraftTree, batch_words

HEADS, LATENT, HEAD_DIM, POOL = 2, 6, 8, 40
SCALES = {"sm_scale": 0.3, "k_scale": 0.5, "v_scale": 3.0}


def by_definition(q, kv, slots, committed, visible):
    """Softmax attention of one request, number by number."""
    out = torch.zeros(len(q), HEADS, LATENT, dtype=torch.float64)
    lse = torch.full((len(q), HEADS), -math.inf, dtype=torch.float64)
    for token in range(len(q)):
        seen = [slots[j] for j in range(committed)] + [slots[committed + j] for j in visible[token]]
        for head in range(HEADS):
            scores = [
                SCALES["sm_scale"]
                * sum(float(q[token, head, d]) * SCALES["k_scale"] * float(kv[s, d]) for d in range(HEAD_DIM))
                for s in seen
            ]
            total = sum(math.exp(score) for score in scores)
            if seen:
                lse[token, head] = math.log(total)
            for score, s in zip(scores, seen, strict=True):
                out[token, head] += math.exp(score) / total * SCALES["v_scale"] * kv[s, :LATENT].double()
    return out, lse


@st.composite
def drawn_batches(draw: st.DrawFn):
    """Two requests of one tree size, lengths of their own, slots in random order, everything else NaN."""
    first, second = draw(trees(5)), draw(trees(5))
    size = min(first.tree_tokens, second.tree_tokens)
    made = [DraftTree(first.parents[:size]), DraftTree(second.parents[:size])]
    committed = [draw(st.integers(0, 6)), draw(st.integers(0, 6))]
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    order = torch.randperm(POOL, generator=random)
    slots = [order[: committed[0] + size], order[20 : 20 + committed[1] + size]]
    kv = torch.full((POOL, HEAD_DIM), torch.nan)
    for owned in slots:
        kv[owned] = torch.randn(len(owned), HEAD_DIM, generator=random)
    return torch.randn(2 * size, HEADS, HEAD_DIM, generator=random), kv, slots, committed, made


@settings(max_examples=30)
@given(drawn_batches())
def test_it_is_attention_by_definition(batch) -> None:
    q, kv, slots, committed, made = batch
    size = made[0].tree_tokens
    words = torch.from_numpy(batch_words(made, size))
    out, lse = reference.verify_reference(q, kv, slots, committed, words, latent_dim=LATENT, **SCALES)
    for b, tree in enumerate(made):
        rows = slice(b * size, (b + 1) * size)
        want = by_definition(q[rows], kv, slots[b], committed[b], [tree.path(token) for token in range(size)])
        torch.testing.assert_close((out[rows], lse[rows]), want, rtol=1e-12, atol=1e-12)


@given(drawn_batches(), st.integers(1, 40))
def test_working_in_chunks_changes_nothing(batch, chunk: int) -> None:
    q, kv, slots, committed, made = batch
    words = torch.from_numpy(batch_words(made, made[0].tree_tokens))
    whole = reference.verify_reference(q, kv, slots, committed, words, latent_dim=LATENT, **SCALES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "CHUNK_SCORES", chunk)
        chunked = reference.verify_reference(q, kv, slots, committed, words, latent_dim=LATENT, **SCALES)
    torch.testing.assert_close(chunked, whole, rtol=1e-13, atol=1e-13)


def test_no_words_means_a_chain() -> None:
    q, kv, slots = torch.randn(4, HEADS, HEAD_DIM), torch.randn(POOL, HEAD_DIM), [torch.arange(9)]
    words = torch.from_numpy(DraftTree.chain(4).words.view("int64"))
    for given_words in (None, words):
        out, lse = reference.verify_reference(q, kv, slots, [5], given_words, latent_dim=LATENT, **SCALES)
        want = by_definition(q, kv, slots[0], 5, [range(token + 1) for token in range(4)])
        torch.testing.assert_close((out, lse), want, rtol=1e-12, atol=1e-12)


def test_a_row_that_sees_nothing_is_zero_and_reads_nothing() -> None:
    kv = torch.full((POOL, HEAD_DIM), torch.nan)
    out, lse = reference.verify_reference(
        torch.randn(2, HEADS, HEAD_DIM), kv, [torch.arange(2)], [0], torch.zeros(2, dtype=torch.int64), sm_scale=1.0,
        latent_dim=LATENT,
    )  # fmt: skip
    assert (out == 0).all() and (lse == -math.inf).all()


def test_a_row_that_sees_one_key_returns_its_value_whatever_the_score() -> None:
    q, kv = 1e4 * torch.randn(1, HEADS, HEAD_DIM), torch.randn(POOL, HEAD_DIM)
    out, lse = reference.verify_reference(q, kv, [torch.tensor([7])], [0], None, sm_scale=1.0, latent_dim=LATENT)
    assert (out == kv[7, :LATENT].double()).all()
    torch.testing.assert_close(lse[0], q[0].double() @ kv[7].double())


def test_the_highest_of_64_bits_is_a_bit_like_any_other() -> None:
    words = torch.zeros(64, dtype=torch.int64)
    words[63] = -(2**63)
    visible = reference.visible_tokens(0, 64, words, torch.device("cpu"))
    assert visible.nonzero().tolist() == [[63, 63]]
