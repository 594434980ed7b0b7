"""How far a correct result may be from the float64 oracle: one table, for the suites and for shadow serving.

A bound is a multiple of the format's unit roundoff u (half the distance from 1 to the next number): a kernel that keeps
float32 accumulators rounds twice in the format, once the softmax weights before they meet the values and once the
output, so an element is off by at most 2 u (p @ |v|), and a row's error spreads like that of a reference that does those
two roundings and nothing else.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """elementwise: |d| <= elementwise * u * (p @ |v|). cosine: 1 - 2<x,y> / (<x,x> + <y,y>) of the whole output.
    row_rmse: times that of the rounding reference, or of `row_rmse_floor` * u * rms(row) where that is more (a row
    that sees one key may be exact in the reference). lse: absolute below 1, relative above."""

    unit_roundoff: float
    elementwise: float
    cosine: float
    row_rmse: float
    row_rmse_floor: float
    lse: float


TOLERANCES = {
    # 2 u are provable, 0.5 u left for float32 scores. A correct kernel sits near 2.6e-6 in cosine and 1 in row RMSE.
    torch.bfloat16: Tolerance(2.0**-8, 2.5, 5e-6, 2.5, 0.5, 2.0**-13),
    # As bf16 with its own u, whose square the cosine follows.
    torch.float16: Tolerance(2.0**-11, 2.5, 5e-6 / 64, 2.5, 0.5, 2.0**-13),
    # Nothing is rounded but float32 itself: scores of 576 products, whose error the exponential turns into a relative
    # one. Measured on the CPU cases, Triton's interpreter and the portable path alike: 150, 3e-13, 5, 7e-7.
    torch.float32: Tolerance(2.0**-24, 512, 2e-12, 16, 16, 2.0**-18),
}


def cosine_difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """1 - 2<x,y> / (<x,x> + <y,y>) of two float64 tensors; 0 where both are zero."""
    power = float((x * x).sum() + (y * y).sum())
    return 1 - 2 * float((x * y).sum()) / power if power else 0.0
