"""What the tolerances let through and what they catch: an emulated kernel, right and with one fault at a time."""

from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from cases import DTYPES, Case, Inputs, make_inputs
from compare import TOLERANCES, Expected, assert_matches, expected_attention

from treemla.reference import visible_tokens

LONG = Case((4096,), tree_tokens=9, heads=4, tree="comb")
MANY = Case((300,) * 9, tree_tokens=9, heads=2, tree="comb")  # request b's needle is tree token b
INPUTS = {
    "diffuse": LONG,
    "cold": replace(LONG, family="cold"),
    "needle first": replace(LONG, family="needle.first"),
    "needle last": replace(LONG, family="needle.last"),
    "needle tree": replace(MANY, family="needle.tree"),
    "mean": replace(MANY, family="mean"),
    "scaled": replace(LONG, k=0.06, v=3.7),
}


@dataclass(frozen=True)
class Emulation:
    """A split-KV kernel in plain torch: scores and accumulators in float32, weights and output rounded. Every field
    but `splits` is a fault."""

    splits: int = 16
    score_scale: float = 1.0
    drop_last_committed: bool = False
    show_next_sibling: bool = False
    mask: str = "words"  # causal, full
    lse_error_of_a_split: float = 0.0
    drop_a_split: bool = False
    rescale_in_combine: bool = True
    swap_rows: bool = False
    round_accumulator: bool = False
    lse_in_base_2: bool = False
    swap_scales: bool = False

    def run(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        case, tree_tokens = inputs.case, inputs.case.tree_tokens
        outs, lses = [], []
        for b, n in enumerate(case.lengths):
            rows = slice(b * tree_tokens, (b + 1) * tree_tokens)
            visible = self._visible(n, tree_tokens, inputs.words[rows])
            out, lse = self._request(inputs.q[rows].float(), inputs.kv_cache[inputs.owned[b]].float(), visible, inputs)
            outs.append(out)
            lses.append(lse)
        out, lse = torch.cat(outs).to(inputs.q.dtype), torch.cat(lses)
        if self.swap_rows:
            out[[0, 1]] = out[[1, 0]]
        return out, lse / torch.log(torch.tensor(2.0)) if self.lse_in_base_2 else lse

    def _visible(self, n: int, tree_tokens: int, words: torch.Tensor) -> torch.Tensor:
        visible = visible_tokens(n, tree_tokens, None if self.mask == "causal" else words, words.device)
        if self.mask == "full":
            visible[:] = True
        if self.show_next_sibling:
            visible[3, n + 2] = True  # in a comb, tokens 1 and 2 are siblings, and 3 is a child of 2
            visible[1, n + 2] = True
        if self.drop_last_committed:
            visible[:, n - 1] = False
        return visible

    def _request(
        self, q: torch.Tensor, kv: torch.Tensor, visible: torch.Tensor, inputs: Inputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k_scale, v_scale = (inputs.case.k, inputs.case.v)[:: -1 if self.swap_scales else 1]
        scores = (q @ kv.T) * (inputs.sm_scale * k_scale * self.score_scale)
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        outs, lses = [], []
        for piece_scores, piece_kv in zip(
            scores.tensor_split(self.splits, dim=-1), kv.tensor_split(self.splits), strict=True
        ):
            highest = piece_scores.amax(-1, keepdim=True).clamp_min(-1e30)
            weights = (piece_scores - highest).exp()
            total = weights.sum(-1)
            outs.append(
                self._product(weights.to(inputs.q.dtype), piece_kv[:, :512]) / total.clamp_min(1e-30)[..., None]
            )
            lses.append(highest[..., 0] + total.log())
        if self.drop_a_split:
            del outs[5], lses[5]
        lses[len(lses) // 2] += self.lse_error_of_a_split
        out, lse = torch.stack(outs), torch.stack(lses)
        share = lse.softmax(0) if self.rescale_in_combine else (lse > -torch.inf) / (lse > -torch.inf).sum(0)
        return v_scale * (share[..., None] * out).sum(0), lse.logsumexp(0)

    def _product(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if not self.round_accumulator:
            return weights.float() @ values
        total = torch.zeros(*weights.shape[:-1], values.shape[-1])
        for w, v in zip(weights.split(16, dim=-1), values.split(16), strict=True):
            total = (total + w.float() @ v).to(weights.dtype).float()
        return total


@lru_cache
def prepared(name: str, dtype: str) -> tuple[Inputs, Expected]:
    inputs = make_inputs(replace(INPUTS[name], dtype=dtype), torch.device("cpu"))
    return inputs, inputs.expected()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 2, 16])
@pytest.mark.parametrize("name", INPUTS)
def test_a_correct_kernel_passes(name: str, splits: int, dtype: str) -> None:
    inputs, expected = prepared(name, dtype)
    assert_matches(*Emulation(splits).run(inputs), expected, inputs.case)


MUTANTS = {
    "scores 1% too large": (Emulation(score_scale=1.01), "diffuse", ("row RMSE", "elementwise")),
    "last committed token dropped": (Emulation(drop_last_committed=True), "needle last", ("elementwise",)),
    "last committed token dropped, equal weights": (Emulation(drop_last_committed=True), "mean", ("elementwise",)),
    "a sibling visible": (Emulation(show_next_sibling=True), "needle tree", ("elementwise",)),
    "a sibling visible, equal weights": (Emulation(show_next_sibling=True), "mean", ("elementwise",)),
    "tree mask replaced by causal": (Emulation(mask="causal"), "mean", ("elementwise",)),
    "tree mask dropped": (Emulation(mask="full"), "mean", ("elementwise",)),
    "one split's lse off in the merge": (
        Emulation(lse_error_of_a_split=0.02),
        "diffuse",
        ("elementwise", "row RMSE", "lse"),
    ),
    "one of 16 splits dropped": (Emulation(drop_a_split=True), "diffuse", ("elementwise",)),
    "no rescale in combine": (Emulation(rescale_in_combine=False), "diffuse", ("elementwise",)),
    "no rescale in combine, low temperature": (Emulation(rescale_in_combine=False), "cold", ("elementwise",)),
    "two rows swapped": (Emulation(swap_rows=True), "diffuse", ("elementwise",)),
    "lse in base 2": (Emulation(lse_in_base_2=True), "diffuse", ("lse",)),
    "k and v scale swapped": (Emulation(swap_scales=True), "scaled", ("elementwise",)),
    "accumulators rounded": (
        Emulation(round_accumulator=True),
        "diffuse",
        ("elementwise", "row RMSE", "cosine difference"),
    ),
}
# In fp32 "accumulators rounded" is no fault: float32 is what a correct kernel accumulates in.
FAULTS = [(fault, dtype) for fault in MUTANTS for dtype in DTYPES if (fault, dtype) != ("accumulators rounded", "fp32")]


@pytest.mark.parametrize(("fault", "dtype"), FAULTS)
def test_a_faulty_kernel_fails(fault: str, dtype: str) -> None:
    emulation, name, checks = MUTANTS[fault]
    inputs, expected = prepared(name, dtype)
    with pytest.raises(AssertionError) as caught:
        assert_matches(*emulation.run(inputs), expected, inputs.case)
    assert str(caught.value).startswith(checks), str(caught.value)


def small_result() -> tuple[torch.Tensor, torch.Tensor, Expected]:
    """A result that is right, of a request whose second token sees nothing."""
    q, kv = torch.randn(2, 3, 576).bfloat16(), torch.randn(4, 576).bfloat16()
    expected = expected_attention(q, kv, [torch.arange(2)], [0], torch.tensor([1, 0]), sm_scale=0.1)
    return expected.out.bfloat16(), expected.lse.float(), expected


def test_a_result_equal_to_the_oracle_has_margins_to_show() -> None:
    out, lse, expected = small_result()
    agreement = assert_matches(out, lse, expected, LONG)
    assert agreement.elementwise_share == 0 and agreement.row_rmse_ratio == 0 and agreement.lse < 1e-6


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_output_fails_where_a_number_belongs(value: float) -> None:
    out, lse, expected = small_result()
    out[0, 1, 17] = value
    with pytest.raises(
        AssertionError, match=r"non-finite pattern of out: 1 of 3072 wrong; first at token 0, head 1, column 17"
    ):
        assert_matches(out, lse, expected, LONG)


@pytest.mark.parametrize("value", [torch.nan, 0.0, torch.inf])
def test_an_lse_other_than_minus_infinity_fails_where_nothing_is_seen(value: float) -> None:
    out, lse, expected = small_result()
    lse[1, 2] = value
    with pytest.raises(AssertionError, match=r"non-finite pattern of lse: 1 of 6 wrong; first at token 1, head 2"):
        assert_matches(out, lse, expected, LONG)


def test_anything_but_zero_fails_where_nothing_is_seen() -> None:
    out, lse, expected = small_result()
    out[1, 0, 3] = 1e-30
    with pytest.raises(
        AssertionError, match=r"elementwise: 1 of 3072 wrong; first at token 1, head 0, column 3: expected -?0"
    ):
        assert_matches(out, lse, expected, LONG)


def test_a_failure_names_case_and_command() -> None:
    out, lse, expected = small_result()
    with pytest.raises(AssertionError) as caught:
        assert_matches(out, lse + 1, expected, LONG)
    assert "on verify-b1-c4096-t9-h4-p1-bf16-comb\n" in str(caught.value)
    assert "rerun: python -m pytest tests/parity --device cpu --case verify-b1-c4096-t9-h4-p1-bf16-comb" in str(
        caught.value
    )


def test_a_wrong_shape_fails() -> None:
    out, lse, expected = small_result()
    with pytest.raises(AssertionError, match=r"shape of out: expected \[2, 3, 512\], got \[1, 3, 512\]"):
        assert_matches(out[:1], lse, expected, LONG)


def test_every_dtype_has_its_own_tolerances() -> None:
    assert set(TOLERANCES) == set(DTYPES.values())
    assert all(torch.finfo(dtype).eps == 2 * row.unit_roundoff for dtype, row in TOLERANCES.items())
