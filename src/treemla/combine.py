"""How a launch of the combine kernel is cut: by what an H200 was quickest with (docs/kernel-log.md, 49)."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from treemla.plan import VerifyPlan

CTA_WARPS = 8
WARP_DIMS = 256  # of a query row, that a warp merges where its lanes share no pieces
LANE_PIECES = 5  # partial rows that a lane reads at once
MOST_PIECE_SHIFT = 2
FEW_ROWS = 64  # of all requests


class Cut(NamedTuple):
    """2^piece_shift groups of lanes, in each of 2^warp_shift warps, share the pieces of a request (csrc/combine.cuh)."""

    piece_shift: int
    warp_shift: int


def cut(plan: "VerifyPlan", batch: int) -> Cut:
    """Lanes share pieces where there are more than one reads at once, the more so where there are few rows; warps only
    beyond 20 pieces, since they have to meet then: below, a second turn of one warp is quicker.

    Under fixed split it depends on the plan alone: the order of additions decides the last bits of the result.
    """
    requests = plan.max_batch if plan.fixed_split else batch
    pieces = len(plan.partial_out) // requests if plan.fixed_split else 1 + plan.parts // requests
    if pieces <= LANE_PIECES:
        return Cut(0, 0)
    piece_shift = MOST_PIECE_SHIFT if requests * plan.shape.rows <= FEW_ROWS else 1
    if pieces <= LANE_PIECES << MOST_PIECE_SHIFT:
        return Cut(piece_shift, 0)
    warps = -(-pieces // (LANE_PIECES << piece_shift))
    return Cut(piece_shift, min(CTA_WARPS.bit_length() - 1, (warps - 1).bit_length()))


def grid(plan: "VerifyPlan", batch: int, cut: Cut) -> tuple[int, int]:
    """CTAs of a launch: those of a request, and requests."""
    warps = (plan.shape.rows * plan.shape.latent_dim // WARP_DIMS) << cut.piece_shift + cut.warp_shift
    return -(-warps // CTA_WARPS), batch
