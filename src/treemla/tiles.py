"""The one dispatch table: how query rows are cut into row blocks, and what a block's CTA looks like on each GPU.

A CTA holds a *row block*: 8 to 40 query rows in steps of 8 (`ROW_TILE`, the n of mma.m16n8k16, since the
kernel computes S^T = K Q^T and O^T = V^T P^T with the query rows as columns). Its registers bound the height:
a thread keeps 16 accumulators and 18 registers of Q for each 8 rows, so 40 rows take 170 of 255.
csrc/tile.cuh repeats the three constants marked (device) and asserts the shared-memory formula.
"""

from dataclasses import dataclass

from treemla.problem import VerifyShape

ROW_TILE = 8  # (device)
MAX_ROW_TILES = 5
TILE_TOKENS = 32  # (device) KV tokens a pipeline stage
CONSUMER_WARPS = 8  # (device) the arithmetic
PRODUCER_WARPS = 4  # (device) copy KV rows

_KV_ROW_BYTES = 576 * 2 + 16  # padded to an odd multiple of 16 bytes: ldmatrix reads it without bank conflicts
_STAGE_BYTES = TILE_TOKENS * _KV_ROW_BYTES
_MAX_STAGES = 5
_BUFFER_BYTES_A_ROW = 4 * (TILE_TOKENS + 4) * 4 + 2 * (TILE_TOKENS + 8) + 4  # scores of 4 splits, probabilities, factor
_BARRIER_BYTES = 2 * _MAX_STAGES * 8


@dataclass(frozen=True)
class Target:
    """A GPU architecture that a cubin is built for.

    `buffers`: 2 where softmax of a tile runs beside PV of the one before, which keeps two tiles resident;
    1 where shared memory holds too few stages for that.
    """

    arch: str  # nvcc's name
    compute_capability: tuple[int, int]
    shared_memory_limit_bytes: int  # a block
    buffers: int


TARGETS = {
    "sm_90a": Target("sm_90a", (9, 0), 232_448, buffers=2),
    "sm_120a": Target("sm_120a", (12, 0), 101_376, buffers=1),
}


def row_blocks(shape: VerifyShape) -> tuple[int, int]:
    """(number of row blocks, rows a block, a multiple of 8) that cover `shape.rows` with the least padding."""
    tiles = -(-shape.rows // ROW_TILE)
    blocks = -(-tiles // MAX_ROW_TILES)
    return blocks, -(-tiles // blocks) * ROW_TILE


def num_parts(blocks: int, num_sms: int) -> int:
    """KV parts a launch is cut into; the grid is (blocks, parts), one CTA an SM.

    Blocks of one part sit on neighbouring CTAs and read the same KV, so all but the first read it from L2.
    One wave where that keeps 95% of the SMs busy, else the least number of waves (up to 4) that does.
    """
    candidates = [max(1, waves * num_sms // blocks) for waves in (1, 2, 3, 4)]
    busy = [parts * blocks / (num_sms * -(-parts * blocks // num_sms)) for parts in candidates]
    return next((p for p, b in zip(candidates, busy, strict=True) if b >= 0.95), candidates[busy.index(max(busy))])


def shared_memory_bytes(target: Target, block_rows: int) -> int:
    """Dynamic shared memory of a verify CTA: barriers, scores, probabilities and factors, then as many KV stages as fit, up to 5."""
    buffers = target.buffers * block_rows * _BUFFER_BYTES_A_ROW + _BARRIER_BYTES
    stages = min(_MAX_STAGES, (target.shared_memory_limit_bytes - buffers) // _STAGE_BYTES)
    return stages * _STAGE_BYTES + buffers


def verify_kernel_name(block_rows: int) -> str:
    return f"treemla_verify_r{block_rows}"


KERNEL_NAMES = (
    "treemla_plan",
    "treemla_pack_mask",
    "treemla_combine",
    *(verify_kernel_name(ROW_TILE * tiles) for tiles in range(1, MAX_ROW_TILES + 1)),
)
