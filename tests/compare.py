"""When a result counts as correct: the one function that applies the table of treemla.tolerance in every suite.

The yardstick is the float64 oracle.
tests/unit/test_compare.py shows what these bounds let through and what they catch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from treemla import reference
from treemla.tolerance import TOLERANCES, cosine_difference


@dataclass(frozen=True)
class Expected:
    """out [B*T, H, latent] and lse [B*T, H] in float64; magnitude p @ |v| of out's shape; and the RMSE [B*T, H] of a
    reference that rounds weights and output to `dtype` and accumulates in float32."""

    out: torch.Tensor
    lse: torch.Tensor
    magnitude: torch.Tensor
    rounding_rmse: torch.Tensor
    dtype: torch.dtype

    def rows(self, index: Any) -> "Expected":
        """The expectation of some of the B*T tokens."""
        held = (self.out, self.lse, self.magnitude, self.rounding_rmse)
        return Expected(*(tensor[index] for tensor in held), self.dtype)


@dataclass(frozen=True)
class Agreement:
    """How far a passing result was from its bounds: worst share of the elementwise bound, cosine difference, worst
    row RMSE in multiples of the rounding reference's, worst lse difference. Worth watching over time."""

    elementwise_share: float
    cosine: float
    row_rmse_ratio: float
    lse: float

    def record(self, record_property: Callable[[str, object], None], who: str = "treemla") -> None:
        """Keep the margins with a test's result (pytest's record_property; they end up in --junitxml)."""
        for name, value in vars(self).items():
            record_property(f"{who} {name}", value)


def expected_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    slots: list[torch.Tensor],
    committed: list[int],
    words: torch.Tensor | None,
    *,
    latent_dim: int = 512,
    **scales: float,
) -> Expected:
    """The oracle's answer and its yardsticks; arguments as `treemla.reference.verify_reference`."""
    rows = q.shape[0] * q.shape[1]
    out, magnitude = (q.new_zeros((rows, latent_dim), dtype=torch.float64) for _ in range(2))
    lse, rounding_rmse = (q.new_zeros(rows, dtype=torch.float64) for _ in range(2))
    for part in reference.attention_rows(q, kv, slots, committed, words, latent_dim=latent_dim, **scales):
        out[part.rows] = part.probs @ part.values
        magnitude[part.rows] = part.probs @ part.values.abs()
        lse[part.rows] = part.lse
        rounding_rmse[part.rows] = _rms(_rounding_reference(part, q.dtype) - out[part.rows])
    shape = q.shape[:2]
    return Expected(
        out.view(*shape, latent_dim),
        lse.view(shape),
        magnitude.view(*shape, latent_dim),
        rounding_rmse.view(shape),
        q.dtype,
    )


def _rounding_reference(part: reference.AttentionRows, dtype: torch.dtype) -> torch.Tensor:
    """What a kernel computes that scales a row's largest weight to 1, rounds the weights and at last the output."""
    if part.probs.shape[1] == 0:
        return part.probs @ part.values
    weights = part.probs / part.probs.amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    total = weights.sum(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    product = weights.to(dtype).float() @ part.values.float()
    return (product / total.float()).to(dtype).double()


def assert_matches(
    out: torch.Tensor, lse: torch.Tensor, ref: Expected, case: Any, *, who: str = "treemla"
) -> Agreement:
    """Fail unless out and lse agree with `ref` by every check of its dtype's row of TOLERANCES.

    `case` names the run: its `id` and `rerun(device)` go into the message, as does `who` computed the result.
    Returns the margins of a pass.
    """
    tolerance = TOLERANCES[ref.dtype]
    where = f"{who} on {case.id}\nrerun: {case.rerun(out.device.type)}"
    assert out.shape == ref.out.shape, f"shape of out: expected {list(ref.out.shape)}, got {list(out.shape)}\n{where}"
    assert lse.shape == ref.lse.shape, f"shape of lse: expected {list(ref.lse.shape)}, got {list(lse.shape)}\n{where}"
    out, lse = out.double(), lse.double()

    _check("non-finite pattern of out", ~_same_class(out, ref.out), out, ref.out, None, where)
    _check("non-finite pattern of lse", ~_same_class(lse, ref.lse), lse, ref.lse, None, where)
    finite_out, finite_lse = ref.out.isfinite(), ref.lse.isfinite()
    out, want = (torch.where(finite_out, tensor, 0.0) for tensor in (out, ref.out))
    lse, want_lse = (torch.where(finite_lse, tensor, 0.0) for tensor in (lse, ref.lse))
    error = (out - want).abs()

    bound = tolerance.elementwise * tolerance.unit_roundoff * ref.magnitude
    _check("elementwise", error > bound, out, want, bound, where)

    yardstick = torch.maximum(ref.rounding_rmse, tolerance.row_rmse_floor * tolerance.unit_roundoff * _rms(want))
    rmse = _rms(error)
    _check(
        "row RMSE",
        rmse > tolerance.row_rmse * yardstick,
        rmse,
        torch.zeros_like(rmse),
        tolerance.row_rmse * yardstick,
        where,
    )

    cosine = cosine_difference(out, want)
    assert cosine <= tolerance.cosine, f"cosine difference: expected <= {tolerance.cosine:g}, got {cosine:.3g}\n{where}"

    lse_error = (lse - want_lse).abs()
    lse_bound = tolerance.lse * want_lse.abs().clamp_min(1.0)
    _check("lse", lse_error > lse_bound, lse, want_lse, lse_bound, where)
    return Agreement(
        float((error / bound.clamp_min(1e-300)).nan_to_num().max()),
        cosine,
        float((rmse / yardstick.clamp_min(1e-300)).nan_to_num().max()),
        float(lse_error.max()),
    )


def _check(
    name: str, bad: torch.Tensor, got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor | None, where: str
) -> None:
    if not bool(bad.any()):
        return
    first = tuple(int(i) for i in bad.nonzero()[0])
    place = ", ".join(f"{axis} {i}" for axis, i in zip(("token", "head", "column"), first, strict=False))
    allowed = "" if bound is None else f", allowed difference {float(bound[first]):.6g}"
    raise AssertionError(
        f"{name}: {int(bad.sum())} of {bad.numel()} wrong; first at {place}: "
        f"expected {float(want[first]):.9g}, got {float(got[first]):.9g}{allowed}\n{where}"
    )


def _same_class(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Both NaN, both the same infinity, or both finite."""
    return (a == b) | (a.isnan() & b.isnan()) | (a.isfinite() & b.isfinite())


def _rms(rows: torch.Tensor) -> torch.Tensor:
    return rows.square().mean(dim=-1).sqrt()
