"""How a launch of the combine kernel is cut: by what an H200 was quickest with (docs/kernel-log.md, 62 and 63)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treemla.plan import VerifyPlan

CTA_WARPS = 8
WARP_DIMS = 256  # of a query row, that a warp merges where it is alone
LANE_PIECES = 5  # partial rows that a lane reads at once
MOST_PIECE_SHIFT = 2
MOST_GROUP_SHIFT = 5
MOST_WARPS = 4608  # a tenth more than an H200 runs at once; other GPUs were not timed
MOST_MEETING_WARPS = 2304  # where warps share a row
LEAST_AN_SM = 2  # CTAs; one alone starts late where SMs were idle beside verify
MOST_AN_SM = 4  # by registers
MOST_MEETING_AN_SM = 3
STATIC_SHARED_BYTES = 11_264  # what it holds, by the compiler padded to 1,024
DRIVER_SHARED_BYTES = 1024  # of every CTA
SHARED_GRANULE_BYTES = 128


def most_shift(plan: "VerifyPlan", batch: int) -> int:
    """2^this groups of lanes share a query row's pieces at most (csrc/combine.cuh): as many as all pieces take at once,
    but no more than there is room for. A request with fewer pieces takes fewer.

    Under fixed split it depends on the plan alone: the order of additions decides the last bits of the result.
    """
    requests, pieces = batch, plan.parts
    if plan.fixed_split:
        requests, pieces = plan.max_batch, len(plan.pieces) // plan.max_batch
    warps = requests * _row_warps(plan)
    shift = 0
    while shift < MOST_GROUP_SHIFT and pieces > LANE_PIECES << shift:
        # Of several requests one may have most of the pieces: the first warps that meet are then worth their waiting.
        one_warp_s = shift < MOST_PIECE_SHIFT or (shift == MOST_PIECE_SHIFT and requests > 1)
        if warps << shift + 1 > (MOST_WARPS if one_warp_s else MOST_MEETING_WARPS):
            break
        shift += 1
    return shift


def grid(plan: "VerifyPlan", batch: int, shift: int) -> tuple[int, int]:
    """CTAs of a launch: those of a request, and requests."""
    return -(-(_row_warps(plan) << shift) // CTA_WARPS), batch


def shared_bytes(ctas: int, shift: int, num_sms: int, sm_shared_bytes: int) -> int:
    """Dynamic shared memory of a CTA, unused: SMs with room for no more than an equal share of `ctas`. Else the first
    SMs that verify leaves would take all of them, and merge for the others. shift: `most_shift`.
    """
    most = MOST_AN_SM if shift <= MOST_PIECE_SHIFT else MOST_MEETING_AN_SM
    share = min(max(-(-ctas // num_sms), LEAST_AN_SM), most)
    if share == MOST_AN_SM:
        return 0
    cta_bytes = sm_shared_bytes // (share * SHARED_GRANULE_BYTES) * SHARED_GRANULE_BYTES
    return cta_bytes - STATIC_SHARED_BYTES - DRIVER_SHARED_BYTES


def _row_warps(plan: "VerifyPlan") -> int:
    return plan.shape.rows * plan.shape.latent_dim // WARP_DIMS
