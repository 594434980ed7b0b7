"""How a launch of the combine kernel is cut: by what an H200 was quickest with (docs/kernel-log.md, 62)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treemla.plan import VerifyPlan

CTA_WARPS = 8
WARP_DIMS = 256  # of a query row, that a warp merges where it is alone
LANE_PIECES = 5  # partial rows that a lane reads at once
MOST_PIECE_SHIFT = 2
MOST_GROUP_SHIFT = 5
MOST_WARPS = 4608  # a tenth more than an H200 runs at once
MOST_MEETING_WARPS = 2304  # where they share rows: none waits for one that does not run yet
CTAS_AN_SM = range(2, 5)  # by registers no more; one alone starts late where SMs were idle beside verify
CTA_SHARED_BYTES = 10_304  # what it holds
SPARE_SHARED_BYTES = 2048  # 1,024 are the driver's; CTAs that would fill an H200's SM to the last byte do not fit


def most_shift(plan: "VerifyPlan", batch: int) -> int:
    """2^this groups of lanes share a query row's pieces at most (csrc/combine.cuh): as many as all pieces take at once,
    but no more than there is room for. A request with fewer pieces takes fewer.

    Under fixed split it depends on the plan alone: the order of additions decides the last bits of the result.
    """
    requests, pieces = (plan.max_batch, len(plan.pieces)) if plan.fixed_split else (batch, 1 + plan.parts)
    warps = requests * _row_warps(plan)
    shift = 0
    while shift < MOST_GROUP_SHIFT and pieces > LANE_PIECES << shift:
        if warps << shift + 1 > (MOST_WARPS if shift < MOST_PIECE_SHIFT else MOST_MEETING_WARPS):
            break
        shift += 1
    return shift


def grid(plan: "VerifyPlan", batch: int, shift: int) -> tuple[int, int]:
    """CTAs of a launch: those of a request, and requests."""
    return -(-(_row_warps(plan) << shift) // CTA_WARPS), batch


def shared_bytes(ctas: int, num_sms: int, sm_shared_bytes: int) -> int:
    """Dynamic shared memory of a CTA, unused: SMs with room for no more than an equal share of `ctas`. Else the first
    SMs that verify leaves would take all of them, and merge for the others.
    """
    share = min(max(-(-ctas // num_sms), CTAS_AN_SM[0]), CTAS_AN_SM[-1])
    return sm_shared_bytes // share - CTA_SHARED_BYTES - SPARE_SHARED_BYTES if share < CTAS_AN_SM[-1] else 0


def _row_warps(plan: "VerifyPlan") -> int:
    return plan.shape.rows * plan.shape.latent_dim // WARP_DIMS
